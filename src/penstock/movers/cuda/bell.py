"""How the CPU waits for the device with a deadline: the device posts a semaphore.

CUDA itself waits for an event for ever or not at all. So a function of the C library, which
CUDA's own thread calls when the device has got there, posts a semaphore, and this thread waits
for that: it costs no CPU meanwhile, and no Python runs in another thread.

Whoever submits more work before waiting asks for the ring first: streams share the queues of
the hardware, so that a ring asked for later may come only after that work (seen on an H200: a
step in ten was heard of when the next one ended).

The one rule: the semaphore outlives every call that may post it. A bell is closed only after
its stream has come to its end, and one that nobody closes is kept while the process lives.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.movers.cuda.library import DRIVER
from penstock.movers.cuda.streams import Stream

if TYPE_CHECKING:
    from penstock.movers.cuda.streams import StreamEvent

_SEMAPHORE_BYTES = 64
"""More than any C library of Linux needs."""


_MAY_RING: set[Bell] = set()
"""Bells that are not closed: the device may post their semaphores."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """A stream in which the device rings, and a semaphore that a thread waits for."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._driver = ctypes.CDLL(DRIVER)
        self._stream = Stream()
        self._semaphore = (ctypes.c_char * _SEMAPHORE_BYTES)()
        self._library.sem_init(self._semaphore, 0, 0)
        _MAY_RING.add(self)
        # What CUDA takes at the first call, it takes now: later that would wait for the device.
        self._ring()
        self._stream.wait()

    def ring_behind(self, event: StreamEvent) -> None:
        """Has the device ring when it reaches an event, which `hear` then waits for."""
        self._stream.wait_for(event)
        self._ring()

    def hear(self, event: StreamEvent, seconds: float) -> bool:
        """Blocks this thread until an event is reached; returns False if it takes too long."""
        give_up = time.monotonic() + seconds
        while not event.reached:
            # Rings for other events wake us early, and each is heard once.
            if not self._heard_before(give_up):
                return event.reached
        self._forget_rings()
        return True

    def wait(self, event: StreamEvent, seconds: float) -> bool:
        """The same where nobody has asked for a ring."""
        if not event.reached:
            self.ring_behind(event)
        return self.hear(event, seconds)

    def close(self) -> None:
        """Gives the stream back, once it has rung for all that was asked for."""
        self._stream.wait()
        self._stream.close()
        _MAY_RING.discard(self)

    def _ring(self) -> None:
        """Has the semaphore posted when the stream has got there."""
        post = ctypes.cast(self._library.sem_post, ctypes.c_void_p)
        stream = ctypes.c_void_p(self._stream.number)
        status = self._driver.cuLaunchHostFunc(stream, post, ctypes.byref(self._semaphore))
        if status:
            raise UnavailableError(f"CUDA: error {status} of cuLaunchHostFunc")

    def _heard_before(self, give_up: float) -> bool:
        """Waits for the semaphore; returns False when the time is over."""
        until = _Timespec(int(give_up), int(give_up % 1 * 1e9))
        clock = ctypes.c_int(time.CLOCK_MONOTONIC)
        if self._library.sem_clockwait(self._semaphore, clock, ctypes.byref(until)) == 0:
            return True
        why = ctypes.get_errno()
        if why == errno.EINTR:  # By a signal, which Python has seen to by now.
            return True
        if why == errno.ETIMEDOUT:
            return False
        raise OSError(why, os.strerror(why))

    def _forget_rings(self) -> None:
        """Takes back what was posted for events that were reached before anybody waited."""
        while self._library.sem_trywait(self._semaphore) == 0:
            pass
