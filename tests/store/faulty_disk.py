"""A kernel that refuses what a test tells it to, for the threads of a disk tier."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from lab.fixtures.store_tier_suite import WAIT_S
from penstock.store.disk.io import DiskCalls

if TYPE_CHECKING:
    from collections.abc import Sequence


class FaultyDisk:
    """`calls` work until `fail` says otherwise; `hold` keeps reads or writes waiting."""

    def __init__(self) -> None:
        self.calls = DiskCalls(
            preadv=self._preadv,
            pwritev=self._pwritev,
            fallocate=self._fallocate,
            sync=self._sync,
        )
        self.raised: dict[str, int] = {}
        """How often each call was refused."""
        self.written: list[int] = []
        """Bytes of each write of blocks, tables or heads."""
        self.read: list[int] = []
        self.events: list[str] = []
        """The names of calls, in the order in which they ended."""
        self._errors: dict[str, BaseException] = {}
        self._held = {name: threading.Event() for name in ("preadv", "pwritev")}
        self._held_bytes_min = dict.fromkeys(self._held, 0)
        self.waiting = {name: threading.Semaphore(0) for name in self._held}
        """Released for each call that is held."""
        for event in self._held.values():
            event.set()

    def fail(self, name: str, number: int) -> None:
        """From now on a call fails with this errno."""
        self._errors[name] = OSError(number, os.strerror(number))

    def crash(self, name: str, error: BaseException) -> None:
        self._errors[name] = error

    def mend(self) -> None:
        self._errors.clear()

    def hold(self, name: str, *, bytes_min: int = 0) -> None:
        """Calls wait from now on; with `bytes_min` only large ones, so that tables can be read."""
        self._held_bytes_min[name] = bytes_min
        self._held[name].clear()

    def go_on(self, name: str) -> None:
        self._held[name].set()

    def _answer(self, name: str, nbytes: int = 0) -> None:
        held = self._held.get(name)
        if held is not None and not held.is_set() and nbytes >= self._held_bytes_min[name]:
            self.waiting[name].release()
            assert held.wait(WAIT_S)
        error = self._errors.get(name)
        if error is not None:
            self.raised[name] = self.raised.get(name, 0) + 1
            raise error

    def _preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nbytes = sum(each.nbytes for each in buffers)
        self._answer("preadv", nbytes)
        self.read.append(nbytes)
        return os.preadv(fd, buffers, offset)

    def _pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nbytes = sum(each.nbytes for each in buffers)
        self._answer("pwritev", nbytes)
        self.written.append(nbytes)
        done = os.pwritev(fd, buffers, offset)
        self.events.append("pwritev")
        return done

    def _fallocate(self, fd: int, offset: int, length: int) -> None:
        self._answer("fallocate")
        os.posix_fallocate(fd, offset, length)

    def _sync(self, fd: int) -> None:
        self._answer("sync")
        os.fdatasync(fd)
        self.events.append("sync")
