"""CUDA streams and events, waiting for them with a timeout, and the two streams of a link.

These are raw calls of the CUDA runtime: a copy through torch costs several times as much of the
engine's time. Only functions with `wait` in their names block the CPU.

`Bell` waits for the device with a timeout. CUDA waits for an event for ever or not at all, so the
device's callback thread calls `sem_post` of the C library, and this thread waits for the semaphore:
no CPU time is used, and no Python runs in another thread. A ring must be requested before more work
is submitted: streams share hardware queues, so a ring requested later may come only after that work
(on an H200, every tenth step was reported only when the next one ended). The semaphore must outlive
every call that may post it: a bell is closed only after its stream has ended, and one that is never
closed is kept until the process ends.

`CudaLink` is one direction of the link between GPU and host. A copy engine serves one stream until
that stream has to wait. Copies in one stream, or in two independent ones, delayed a 4 KiB copy of
the engine by all of them (9.5 ms and 4.6 ms of 512 MiB on an H200). So copies alternate between two
streams, each turn behind the one before, and other streams get the copy engine between turns. Turns
stay in order: the end of one is the end of all before it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from array import array
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from cuda.bindings import runtime

from penstock.cache.nodes import NOWHERE
from penstock.errors import UnavailableError
from penstock.movers.cuda.calls import DRIVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.movers.cuda.calls import Calls

STEPS_KEPT = 16
"""Steps whose events are kept; engines have two in flight."""
_NOT_READY = runtime.cudaError_t.cudaErrorNotReady
_SUCCESS = runtime.cudaError_t.cudaSuccess
_ANY_WAY = runtime.cudaMemcpyKind.cudaMemcpyDefault


class StreamPiece(NamedTuple):
    """One DMA."""

    source: int
    target: int
    length: int


def _in_stream_order() -> tuple[list[Any], list[int], int]:
    """The attributes of a batch of copies whose sources are written earlier in its stream."""
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    return [attributes], [0], 1


_IN_STREAM_ORDER = _in_stream_order()


def checked(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401 - what the call returns
    """The result of a call of the CUDA runtime.

    Raises:
        UnavailableError: the call failed; the device may be lost.
    """
    status = answer[0]
    if status != _SUCCESS:
        _, text = runtime.cudaGetErrorString(status)
        words = text.decode() if isinstance(text, bytes) else str(text)
        raise UnavailableError(f"CUDA: {words} ({status.name})")
    return answer[1] if len(answer) > 1 else None


class StreamEvent:
    """A point in a stream's work."""

    __slots__ = ("handle", "number")

    flags: ClassVar[int] = runtime.cudaEventDisableTiming

    def __init__(self) -> None:
        self.handle = checked(runtime.cudaEventCreateWithFlags(self.flags))
        self.number = int(self.handle)

    def record(self, stream: object) -> None:
        """Records the event behind the stream's work so far."""
        checked(runtime.cudaEventRecord(self.handle, stream))

    @property
    def reached(self) -> bool:
        """Whether the device has reached it."""
        (status,) = runtime.cudaEventQuery(self.handle)
        if status == _NOT_READY:
            return False
        checked((status,))
        return True

    def hold(self, stream: int) -> None:
        """Makes any stream wait on the device; during a capture, every replay of the graph."""
        status = checked(runtime.cudaStreamIsCapturing(stream))
        active = status == runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
        flags = runtime.cudaEventWaitExternal if active else 0
        checked(runtime.cudaStreamWaitEvent(stream, self.handle, flags))

    def close(self) -> None:
        checked(runtime.cudaEventDestroy(self.handle))


class TimedEvent(StreamEvent):
    """A point in a stream's work, and when it was reached."""

    __slots__ = ()

    flags: ClassVar[int] = runtime.cudaEventDefault


def elapsed_s(first: TimedEvent, second: TimedEvent) -> float:
    """Seconds between two reached points."""
    milliseconds: float = checked(runtime.cudaEventElapsedTime(first.handle, second.handle))
    return milliseconds / 1e3


class Stream:
    """A CUDA stream with the lowest priority."""

    __slots__ = ("handle", "number")

    def __init__(self) -> None:
        least, _ = _priorities()
        created = runtime.cudaStreamCreateWithPriority(runtime.cudaStreamNonBlocking, least)
        self.handle = checked(created)
        self.number = int(self.handle)

    def wait_for(self, event: StreamEvent) -> None:
        """Makes the stream wait on the device for an event; the CPU does not wait."""
        checked(runtime.cudaStreamWaitEvent(self.handle, event.handle, 0))

    def copy(self, pieces: Sequence[StreamPiece]) -> None:
        """Copies between the memories of host and device, in one call."""
        if len(pieces) == 1:  # Half the cost of a batch of one.
            [(source, target, length)] = pieces
            checked(runtime.cudaMemcpyAsync(target, source, length, _ANY_WAY, self.handle))
            return
        sources, targets, lengths = zip(*pieces, strict=True)
        checked(
            runtime.cudaMemcpyBatchAsync(
                *(targets, sources, lengths, len(lengths)), *_IN_STREAM_ORDER, self.handle
            )
        )

    def wait(self) -> None:
        checked(runtime.cudaStreamSynchronize(self.handle))

    def close(self) -> None:
        checked(runtime.cudaStreamDestroy(self.handle))


def stream_waits(stream: object, event: StreamEvent) -> None:
    checked(runtime.cudaStreamWaitEvent(stream, event.handle, 0))


def _priorities() -> tuple[int, int]:
    status, least, greatest = runtime.cudaDeviceGetStreamPriorityRange()
    checked((status,))
    return least, greatest


class _Step(NamedTuple):
    number: int
    event: StreamEvent


class Steps:
    """The engine's steps, and which of them last used each device slot.

    Call `submitted` after each step, with the slots that it reads or writes: copies wait only for
    steps that use their slots. Without slots, a step counts as using all of them. Steps end in the
    order in which they were submitted.
    """

    def __init__(self, slot_count: int) -> None:
        # One more, for `NOWHERE`, which no step uses.
        self._last = np.zeros(slot_count + 1, dtype=np.int64)
        self._floor = 0
        self._number = 0
        self._in_flight: deque[_Step] = deque()
        self._spare: list[StreamEvent] = []

    def submitted(self, stream: int, slots: ArrayLike | None = None) -> int:
        """A step was submitted to the stream; returns its number, from 1 on."""
        self._number += 1
        while self._in_flight and self._in_flight[0].event.reached:
            self._spare.append(self._in_flight.popleft().event)
        if len(self._in_flight) >= STEPS_KEPT:
            # `event_of` returns the next step's event instead, which is reached later.
            self._spare.append(self._in_flight.popleft().event)
        event = self._spare.pop() if self._spare else StreamEvent()
        event.record(stream)
        self._in_flight.append(_Step(self._number, event))
        if slots is None:
            self._floor = self._number
        else:
            self._last[np.asarray(slots)] = self._number
            self._last[NOWHERE] = 0
        return self._number

    @property
    def newest(self) -> int:
        """The number of the last submitted step."""
        return self._number

    def last_of(self, slots: NDArray[np.int32]) -> int:
        """The last step that may use any of the slots; 0 if none does."""
        if not slots.size:
            return 0
        return max(self._floor, int(self._last[slots].max()))

    def event_of(self, step: int) -> StreamEvent | None:
        """The event to wait for to be behind a step; `None` once it has ended."""
        if step == 0:
            return None
        for kept in self._in_flight:
            if kept.number >= step:
                return kept.event
        return None

    def close(self) -> None:
        for event in (*(step.event for step in self._in_flight), *self._spare):
            event.close()
        self._in_flight.clear()
        self._spare.clear()


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
        # The first call allocates, which would wait for the device later.
        self._ring()
        self._stream.wait()

    def ring_behind(self, event: StreamEvent) -> None:
        """Makes the device ring when it reaches an event; then use `wait_for_ring`."""
        self._stream.wait_for(event)
        self._ring()

    def wait_for_ring(self, event: StreamEvent, seconds: float) -> bool:
        """Blocks this thread until an event is reached; returns False after `seconds`."""
        give_up = time.monotonic() + seconds
        while not event.reached:
            # Rings for other events end the wait early, each once.
            if not self._posted_before(give_up):
                return event.reached
        self._forget_rings()
        return True

    def wait(self, event: StreamEvent, seconds: float) -> bool:
        """The same for an event without `ring_behind`."""
        if not event.reached:
            self.ring_behind(event)
        return self.wait_for_ring(event, seconds)

    def close(self) -> None:
        """Waits for all rings, and destroys the stream."""
        self._stream.wait()
        self._stream.close()
        _MAY_RING.discard(self)

    def _ring(self) -> None:
        """Queues a post of the semaphore in the stream."""
        post = ctypes.cast(self._library.sem_post, ctypes.c_void_p)
        stream = ctypes.c_void_p(self._stream.number)
        status = self._driver.cuLaunchHostFunc(stream, post, ctypes.byref(self._semaphore))
        if status:
            raise UnavailableError(f"CUDA: error {status} of cuLaunchHostFunc")

    def _posted_before(self, give_up: float) -> bool:
        """Waits for the semaphore; returns False at the deadline."""
        until = _Timespec(int(give_up), int(give_up % 1 * 1e9))
        clock = ctypes.c_int(time.CLOCK_MONOTONIC)
        if self._library.sem_clockwait(self._semaphore, clock, ctypes.byref(until)) == 0:
            return True
        why = ctypes.get_errno()
        if why == errno.EINTR:  # A signal, which Python has handled by now.
            return True
        if why == errno.ETIMEDOUT:
            return False
        raise OSError(why, os.strerror(why))

    def _forget_rings(self) -> None:
        """Removes posts of events that were reached before they were waited for."""
        while self._library.sem_trywait(self._semaphore) == 0:
            pass


class DescriptorBell:
    """An eventfd that the device makes readable, for those who wait for other descriptors too.

    In a stream of its own: calls of the host hold up what is behind them.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stream = Stream()

    def ring_behind(self, event: StreamEvent, calls: Calls) -> None:
        """Makes it readable when the device reaches an event."""
        calls.wait(self._stream, event)
        calls.ring(self._stream, self.descriptor)

    def quiet(self) -> None:
        """Forgets what rang. Look for reached events after this, not before."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Waits for all rings: none comes to who has the number of the descriptor next."""
        self._stream.wait()
        self._stream.close()
        os.close(self.descriptor)


class CudaLink:
    """Two streams that copy in turns between staging and host memory, in one direction.

    `calls.c` has the turns, in memory at `address`.
    """

    def __init__(self) -> None:
        self._streams = (Stream(), Stream())
        self._ends = (StreamEvent(), StreamEvent())
        self._words = array("q", [each.number for each in (*self._streams, *self._ends)])
        self.address = self._words.buffer_info()[0]
        """Both streams, that of the last turn first, and their events in the same order."""

    def wait(self) -> None:
        for stream in self._streams:
            stream.wait()

    def close(self) -> None:
        """Destroys streams and events; nothing may be in flight."""
        for each in (*self._streams, *self._ends):
            each.close()
