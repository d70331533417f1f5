"""A disk below a disk tier: what it keeps, loses and refuses, and where a process dies in a call.

The bytes lie in real files of a folder in memory. What was written since the last sync of a file is
remembered sector by sector, so that a loss of power can take back any part of it.

| trouble      | what is left                                                                   |
|--------------|--------------------------------------------------------------------------------|
| killed       | all that was written; of the write under way, any sectors                      |
| power lost   | of every sector written since the last sync: the old bytes or the new ones      |
| lost write   | the disk says that it wrote, and did not                                       |
| rot          | bytes change by themselves                                                      |
| refusal      | ENOSPC, EIO, or a call that does a part only                                    |

The one rule that must not break: `spoilt` names every sector that is not what was last written to
it, so that whatever else is found wrong is the tier's own fault.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from penstock.store.disk.io import DiskCalls, open_within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from random import Random

SECTOR_BYTES = 512


class ProcessKilledError(BaseException):
    """The process that made a call is gone. Nothing of it may catch this."""


@dataclass(slots=True, kw_only=True)
class DiskConditions:
    """What a disk is like now. Rates are for each call."""

    short: float = 0.0
    """A read or write does a part only."""
    lose: float = 0.0
    """A write is acknowledged, and lost."""
    meanwhile: float = 0.0
    """Somebody else gets on while a call is under way."""
    ignores_sync: bool = False
    refusals: dict[str, int] | None = None
    """Calls that fail, with their errno."""


class SimDisk:
    """Calls of a disk tier, carried out on the files of one folder."""

    def __init__(self, rng: Random, clock: Callable[[], float]) -> None:
        self.conditions = DiskConditions()
        self.spoilt: defaultdict[str, set[int]] = defaultdict(set)
        """By path: sectors that are not what was last written there."""
        self.call_count = 0
        self.writes_lost = 0
        self.refusals: Counter[str] = Counter()
        """How often each call was refused."""
        self.dies_at: int | None = None
        """In which call its process dies."""
        self.meanwhile: Callable[[], None] = lambda: None
        """What others do while a call is under way."""
        self.is_locked: Callable[[], bool] = lambda: False
        """Whether somebody holds the lock of the tier."""
        self.calls = DiskCalls(
            open=self._open,
            preadv=self._preadv,
            pwritev=self._pwritev,
            fallocate=self._fallocate,
            sync=self._sync,
            clock=clock,
        )
        self._rng = rng
        self._paths: dict[int, str] = {}
        self._before: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
        """By path: sectors that were written since the last sync, as they were before."""

    # ---------------------------------------------------------------- what befalls it

    def lose_power(self) -> None:
        """Any part of what was not synced is gone."""
        chance = self._rng.choice((0.1, 0.5, 0.9, 1.0))
        for path, sectors in self._before.items():
            if not os.path.exists(path):
                continue
            with open(path, "r+b") as file:
                for sector, content in sectors.items():
                    if self._rng.random() < chance:
                        file.seek(sector * SECTOR_BYTES)
                        file.write(content)
                        self.spoilt[path].add(sector)
        self._before.clear()

    def put_back(self, path: str, spoilt: Iterable[int]) -> None:
        """A file is another one from now on: a loss of power does not bring old sectors back."""
        self._before.pop(path, None)
        self.spoilt[path] = set(spoilt)

    def rot(self, path: str, offset: int) -> None:
        """A byte changes by itself."""
        with open(path, "r+b") as file:
            file.seek(offset)
            found = file.read(1)
            if not found:
                return
            file.seek(offset)
            file.write(bytes([found[0] ^ self._rng.randint(1, 255)]))
        self.spoilt[path].add(offset // SECTOR_BYTES)

    def is_spoilt(self, path: str, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether one of these ranges (first byte, length) is not what was written."""
        bad = self.spoilt.get(path, set())
        return any(not bad.isdisjoint(_sectors(offset, length)) for offset, length in ranges)

    # ---------------------------------------------------------------- calls

    def _enter(self, name: str) -> bool:
        """Begins a call; true if the process dies in it."""
        if self.is_locked():
            raise Violation("store", f"{name} is called with the lock held")
        if self._rng.random() < self.conditions.meanwhile:
            self.meanwhile()
        self.call_count += 1
        dies = self.call_count == self.dies_at
        number = (self.conditions.refusals or {}).get(name)
        if number is not None and not dies:
            self.refusals[name] += 1
            raise OSError(number, os.strerror(number))
        return dies

    def _open(self, name: str, flags: int, mode: int, folder: int) -> int:
        if self._enter("open"):
            raise ProcessKilledError
        fd = open_within(name, flags & ~os.O_DIRECT, mode, folder)
        self._paths[fd] = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        return fd

    def _preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._enter("preadv"):
            raise ProcessKilledError
        return os.preadv(fd, self._shortened(buffers), offset)

    def _pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        path = self._paths[fd]
        dies = self._enter("pwritev")
        content = b"".join(self._shortened(buffers))
        self._remember(path, offset, len(content))
        if dies:
            # Whole sectors are written or not, in any order.
            for sector in _sectors(offset, len(content)):
                if self._rng.random() < 0.5:
                    first = max(offset, sector * SECTOR_BYTES)
                    piece = content[first - offset : (sector + 1) * SECTOR_BYTES - offset]
                    os.pwrite(fd, piece, first)
            raise ProcessKilledError
        if self._rng.random() < self.conditions.lose:
            self.writes_lost += 1
            self.spoilt[path].update(_sectors(offset, len(content)))
            return len(content)
        # A sector that is written in part may have been bad in its other part.
        end = (offset + len(content)) // SECTOR_BYTES
        self.spoilt[path].difference_update(range(-(-offset // SECTOR_BYTES), end))
        return os.pwrite(fd, content, offset)

    def _fallocate(self, fd: int, offset: int, length: int) -> None:
        if self._enter("fallocate"):
            raise ProcessKilledError
        # It was cut before: all of it is zeros now.
        self.spoilt.pop(self._paths[fd], None)
        os.posix_fallocate(fd, offset, length)

    def _sync(self, fd: int) -> None:
        if self._enter("sync"):
            raise ProcessKilledError
        if not self.conditions.ignores_sync:
            self._before.pop(self._paths[fd], None)

    def _shortened(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """All of the buffers, or whole sectors at their beginning."""
        sectors = sum(each.nbytes for each in buffers) // SECTOR_BYTES
        if sectors < 2 or self._rng.random() >= self.conditions.short:
            return list(buffers)
        left = self._rng.randrange(1, sectors) * SECTOR_BYTES
        cut: list[memoryview] = []
        for each in buffers:
            raw = each.cast("B")
            cut.append(raw[:left])
            left -= len(cut[-1])
        return [each for each in cut if each]

    def _remember(self, path: str, offset: int, length: int) -> None:
        before = self._before[path]
        fresh = [each for each in _sectors(offset, length) if each not in before]
        if not fresh:
            return
        with open(path, "rb") as file:
            for sector in fresh:
                file.seek(sector * SECTOR_BYTES)
                before[sector] = file.read(SECTOR_BYTES)


def changed_sectors(before: bytes, now: bytes) -> set[int]:
    """In which sectors one content of a file is not the other."""
    both = _sectors(0, max(len(before), len(now)))
    ends = [(sector, sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES) for sector in both]
    return {sector for sector, first, end in ends if before[first:end] != now[first:end]}


def _sectors(offset: int, length: int) -> range:
    return range(offset // SECTOR_BYTES, -(-(offset + length) // SECTOR_BYTES))
