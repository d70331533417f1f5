"""A tier of the store process that keeps blocks in memory; it survives nothing.

Files in its folder change how it behaves, so that a test can do that from another process:

| file   | effect                                                                        |
|--------|-------------------------------------------------------------------------------|
| `hold` | a job waits until it is cancelled, or until a later one finds the file gone   |
| `deaf` | cancelling has no effect, as where I/O is under way                           |
| `off`  | it cannot be opened                                                           |
| `slow` | opening it takes until the file is gone                                       |
| `dies` | its process notes there that it was started, and ends                         |
| `curt` | clients have a moment to say what they are for, and not as long as they like  |

`python -m tests.store.memory_tier CONFIG` is a store process with tiers of the kind "memory".
"""

from __future__ import annotations

import os
import select
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.operations import BlockFault
from penstock.errors import UnavailableError
from penstock.store.__main__ import main as run_store
from penstock.store.base import (
    EndedJob,
    FoundBlocks,
    GoneBlocks,
    LoadJob,
    Page,
    SaveJob,
    StoreTier,
    TierState,
)
from penstock.store.process import server
from penstock.store.process.messages import StoreConfig

if TYPE_CHECKING:
    from penstock.store.base import FindJob, MappedArena, Space
    from penstock.store.process.messages import StoreTierConfig
    from penstock.vocabulary.keys import Key

Identity = tuple["Space", bytes, "Key"]


class MemoryTier(StoreTier):
    """Keeps at most `size_bytes` of blocks; the oldest give way."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        if (folder / "off").exists():
            raise UnavailableError(f"{folder} has a file that says so")
        self._folder = folder
        self._size_bytes = size_bytes
        self._blocks: OrderedDict[Identity, tuple[bytes, Key | None]] = OrderedDict()
        self._bytes = 0
        self._held: dict[int, SaveJob | LoadJob] = {}
        self._ended: list[EndedJob] = []
        self._gone: list[GoneBlocks] = []
        self._generations: dict[bytes, int] = {}
        self._reclaimed = 0
        self._corrupt = 0
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def save(self, job: SaveJob) -> None:
        self._take(job)

    def load(self, job: LoadJob) -> None:
        self._take(job)

    def cancel(self, ticket: int) -> None:
        if not (self._folder / "deaf").exists() and self._held.pop(ticket, None):
            self._end(EndedJob(ticket, failure="cancelled"))

    def collect(self) -> list[EndedJob]:
        os.eventfd_read(self.descriptor)
        ended, self._ended = self._ended, []
        return ended

    def find(self, job: FindJob) -> FoundBlocks:
        parts = [arena.part for arena in job.arenas]
        present = [
            all((job.space, part, key) in self._blocks for part in parts) for key in job.keys
        ]
        return FoundBlocks(job.ticket, present)

    def page(self, space: Space, part: bytes, cursor: int | None, limit: int) -> Page:
        mine = [each for each in reversed(self._blocks) if each[:2] == (space, part)]
        start = cursor or 0
        keys = [key for _, _, key in mine[start : start + limit]]
        parents = [self._blocks[space, part, key][1] for key in keys]
        end = start + len(keys)
        return Page(keys, parents, end if end < len(mine) else None)

    def take_gone(self) -> list[GoneBlocks]:
        gone, self._gone = self._gone, []
        return gone

    def generation(self, name: bytes) -> int:
        return self._generations.get(name, 1)

    def void(self, name: bytes) -> int:
        self._generations[name] = self.generation(name) + 1
        return self._generations[name]

    def expect(self, name: bytes, generation: int) -> None:
        self._generations[name] = max(generation, self.generation(name))

    def state(self) -> TierState:
        return TierState(
            on=True,
            blocks=len(self._blocks),
            block_bytes=self._bytes,
            capacity_bytes=self._size_bytes,
            blocks_corrupt=self._corrupt,
            blocks_reclaimed=self._reclaimed,
        )

    def close(self, *, deadline: float) -> None:  # noqa: ARG002
        self._held.clear()
        os.close(self.descriptor)

    def _take(self, job: SaveJob | LoadJob) -> None:
        self._held[job.ticket] = job
        if not (self._folder / "hold").exists():
            for held in list(self._held.values()):
                del self._held[held.ticket]
                self._end(self._save(held) if isinstance(held, SaveJob) else self._load(held))

    def _end(self, ended: EndedJob) -> None:
        self._ended.append(ended)
        os.eventfd_write(self.descriptor, 1)

    def _save(self, job: SaveJob) -> EndedJob:
        faults = []
        sums = job.arena.host.sums(np.array(job.slots, dtype=np.int32))
        for at, (key, parent, slot) in enumerate(
            zip(job.keys, job.parents, job.slots, strict=True)
        ):
            block = _block(job.arena, slot)
            if (_sums(job.arena, block, key, job.salt) != sums[at]).any():
                faults.append((at, BlockFault.CORRUPT))
                continue
            self._put((job.space, job.arena.part, key), block.tobytes(), parent)
        return EndedJob(job.ticket, tuple(faults))

    def _put(self, identity: Identity, block: bytes, parent: Key | None) -> None:
        if identity in self._blocks:
            return
        self._blocks[identity] = (block, parent)
        self._bytes += len(block)
        self._make_room()

    def _make_room(self) -> None:
        while self._bytes > self._size_bytes:
            (space, part, key), (old, _) = self._blocks.popitem(last=False)
            self._bytes -= len(old)
            self._reclaimed += 1
            self._gone.append(GoneBlocks(space, part, [key]))

    def _load(self, job: LoadJob) -> EndedJob:
        faults = []
        for at, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            found = self._blocks.get((job.space, job.arena.part, key))
            if found is None:
                faults.append((at, BlockFault.MISSING))
                continue
            block = _block(job.arena, slot)
            block[:] = np.frombuffer(found[0], dtype=np.uint8)
            sums = _sums(job.arena, block, key, job.salt)
            job.arena.host.keep_sums(np.array([slot], dtype=np.int32), sums)
        return EndedJob(job.ticket, tuple(faults))


def _block(arena: MappedArena, slot: int) -> np.ndarray:
    start = arena.host.blocks_offset + slot * arena.host.slot_bytes
    return arena.host.arena.bytes[start : start + arena.span.length]


def _sums(arena: MappedArena, block: np.ndarray, key: Key, salt: int) -> np.ndarray:
    return arena.span.sum_blocks(block.reshape(1, -1), [key], arena.form.checksum, salt=salt)


def open_memory_tier(config: StoreTierConfig) -> MemoryTier:
    dies = Path(config.folder, "dies")
    if dies.exists():
        with dies.open("a") as starts:
            starts.write("x")
        os._exit(9)
    while Path(config.folder, "slow").exists():
        select.select([], [], [], 0.02)
    return MemoryTier(Path(config.folder), config.size_bytes)


def main(arguments: list[str]) -> int:
    [tier] = StoreConfig.from_json(arguments[0]).tiers
    server.GREETING_S = 0.5 if Path(tier.folder, "curt").exists() else 600.0
    return run_store(arguments, {"memory": open_memory_tier})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
