"""Signals as a descriptor that a wait can end by, whichever thread the kernel gives them to.

    with SignalDescriptor([signal.SIGTERM]) as stop:
        wait_any(channels, [stop.descriptor], deadline=deadline)

Python calls the handler of a signal in the main thread, between two instructions of it. A signal
that another thread gets, or that comes just before the main thread begins to wait, interrupts no
wait: its handler is called when the wait is over. What Python does at once, in whatever thread, is
to write the signal's number to one descriptor (`signal.set_wakeup_fd`). Here that is a socket whose
other end takes these signals alone: the kernel drops the numbers of others by a filter.

The one rule: only the given signals make it readable, and it stays so until it is read.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType
    from typing import Any, Self, TypeAlias

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
