"""Waiting for several channels, descriptors and signals at once, until a deadline.

    ready = wait_any([store, *ranks], [pidfd], deadline=now + 0.5)

    with SignalDescriptor([signal.SIGTERM]) as stop:
        wait_any(channels, [stop.descriptor], deadline=deadline)

Python calls the handler of a signal in the main thread, between two instructions of it. A signal
that another thread gets, or that comes just before the main thread begins to wait, interrupts no
wait: its handler is called when the wait is over. What Python does at once, in whatever thread, is
to write the signal's number to one descriptor (`signal.set_wakeup_fd`). Here that is a socket whose
other end takes these signals alone: the kernel drops the numbers of others by a filter.

    with StopSignal() as stop:
        while not stop.stopping:
            cache.step()
            cache.wait(deadline, descriptors=[stop.descriptor])
        drained = cache.close(timeout_s=20.0)

The signal's handler does nothing but remember it.

The rules:

- A channel is asked before it is polled. Its descriptor shows only what happened since it was last
  found empty, so a frame that came in earlier would otherwise be slept through.
- Only the given signals make it readable, and it stays so until it is read.
- Whatever is to be done about it happens in the engine's own loop, between two steps, never in the
  middle of one.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.vocabulary.arguments import as_int, as_tuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType
    from typing import Any, Self, TypeAlias

    from penstock.transport.base import Waitable


_POLL_MS_MAX = 2**31 - 1
"""What the kernel takes; a longer wait is made of several."""


class ReadyWaitable(NamedTuple):
    """What a wait found: both empty if its deadline passed first."""

    channels: tuple[Waitable, ...] = ()
    """They answer `receive` with something else than `Empty`; a listener has a channel."""
    descriptors: tuple[int, ...] = ()
    """They are readable, or a read of them fails."""


def wait_any(
    channels: Sequence[Waitable], descriptors: Sequence[int] = (), *, deadline: float | None
) -> ReadyWaitable:
    """Waits until a channel or a descriptor is ready, or `deadline` on the monotonic clock.

    Without a deadline it looks once and does not wait.
    """
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    watched = False
    while True:
        ready = tuple(channel for channel in channels if channel.ready)
        if not ready and not watched:
            for channel in channels:
                poll.register(channel.descriptor, select.POLLIN)
            watched = True
        until = min((at for channel in channels if (at := channel.alarm)), default=deadline)
        if until is not None and deadline is not None:
            until = min(until, deadline)
        timeout_ms = 0 if ready or deadline is None else _left_ms(until)
        readable = {fd for fd, _ in poll.poll(timeout_ms)}
        if not ready:
            ready = tuple(channel for channel in channels if channel.ready)
        found = tuple(fd for fd in descriptors if fd in readable)
        if ready or found or _left_ms(deadline) == 0:
            return ReadyWaitable(ready, found)


def wait_readable(fd: int, deadline: float) -> bool:
    """Whether a descriptor became readable before `deadline` on the monotonic clock."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(_left_ms(deadline)))


def _left_ms(deadline: float | None) -> int:
    """Rounded up: a wait that ends early would be repeated, with nothing left to wait for."""
    if deadline is None:
        return 0
    left_s = max(0.0, deadline - time.monotonic())
    return math.ceil(min(left_s * 1000, _POLL_MS_MAX))


if TYPE_CHECKING:
    _Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None

_NO_SIGNAL = 0
_NOBODY = -1
_SO_ATTACH_FILTER = 26
# Of classic BPF, as the kernel's header names them: what a filter of ours does, and with what.
_LOAD_BYTE, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x15, 0x06
_DROP, _TAKE = 0, 0xFFFF


class SignalDescriptor:
    """Readable from the first of its signals on; for the main thread."""

    def __init__(
        self, signals: Iterable[int], on_signal: Callable[[int], None] = lambda _number: None
    ) -> None:
        """Takes the signals: until `close` they do nothing else.

        Raises `ValueError`: this is not the main thread.
        """
        self._on_signal = on_signal
        self._far, self._near = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for each in (self._far, self._near):
            each.settimeout(0)
        try:
            self._before = self._take(sorted(signals))
        except ValueError:
            self._far.close()
            self._near.close()
            raise

    def _take(self, numbers: list[int]) -> dict[int, _Handler]:
        if _takes_only(self._near, self._far, numbers):
            other = signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
            if other != _NOBODY:
                # An event loop wakes the main thread by it, which then calls our handlers, too.
                signal.set_wakeup_fd(other)
        return {each: signal.signal(each, self._remember) for each in numbers}

    @property
    def descriptor(self) -> int:
        """What to wait for. A signal may be a byte to read, or two."""
        return self._near.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Has the signals mean what they meant before."""
        for each, before in self._before.items():
            # `None`: it was not Python that had set it, and Python cannot set it again.
            signal.signal(each, signal.SIG_DFL if before is None else before)
        now = signal.set_wakeup_fd(_NOBODY)
        if now != self._far.fileno():
            signal.set_wakeup_fd(now)
        self._far.close()
        self._near.close()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self._on_signal(number)
        # Where the kernel has no filter, or Python tells an event loop, nothing did it before.
        with suppress(BlockingIOError):
            os.write(self._far.fileno(), bytes([number]))


def _takes_only(near: socket.socket, far: socket.socket, numbers: list[int]) -> bool:
    """Has a socket drop every packet but one byte with one of these numbers; whether it does."""
    last = len(numbers)
    program = [
        (_LOAD_BYTE, 0, 0, 0),
        *((_JUMP_IF_EQUAL, last - at, 0, number) for at, number in enumerate(numbers)),
        (_RETURN, 0, 0, _DROP),
        (_RETURN, 0, 0, _TAKE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    try:
        near.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("@HP", len(program), ctypes.addressof(code)),
        )
    except OSError:
        return False
    far.send(bytes([_NO_SIGNAL]))
    with suppress(BlockingIOError):
        near.recv(1)
        return False
    return True


class StopSignal:
    """Turns signals that would end the process into a flag and a readable descriptor.

    For the main thread, which is where Python takes signals. At the end of the `with` block the
    signals mean again what they meant before.
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM,)) -> None:
        self.stopping = False
        """Whether one of the signals has come."""
        self.times = 0
        """How many have come: who asks twice does not want to wait."""
        self.last = 0
        """The number of the last one."""
        # Here, not on entering: there the signals before a wrong one would have been taken.
        self._signals = tuple(
            _require_signal(f"signals[{index}]", each)
            for index, each in enumerate(as_tuple("signals", signals))
        )
        self._taken: SignalDescriptor | None = None

    @property
    def descriptor(self) -> int:
        """Readable from the first signal on: give it to `wait`."""
        if self._taken is None:
            raise ValueError("a StopSignal has a descriptor inside its `with` block alone")
        return self._taken.descriptor

    def __enter__(self) -> Self:
        self._taken = SignalDescriptor(self._signals, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._taken is not None
        self._taken.close()
        self._taken = None

    def _remember(self, number: int) -> None:
        self.stopping = True
        self.last = number
        self.times += 1


def _require_signal(name: str, value: object) -> int:
    number = as_int(name, value, 1, signal.NSIG - 1)
    if number in {signal.SIGKILL, signal.SIGSTOP} or number not in signal.valid_signals():
        raise ValueError(f"{name} is {number}, must be a signal that a process can catch")
    return number
