"""One disk tier and its jobs, byte by byte, from one seed.

    DiskWorld(seed).run()

Real here: the disk tier with its format, index, segments, keeper and I/O. Simulated: the disk
below it, the order in which its threads get on, and the deaths of its process.

The bytes of a block follow from its space, generation, part and key. So a block that is delivered
for another one, or from before a reset, is seen to be wrong.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from lab.explore.world import Violation
from lab.sim.coverage import Kinds
from lab.sim.disk.device import DiskConditions, ProcessKilledError
from lab.sim.disk.images import FolderImages
from lab.sim.disk.process import DiskProcess, Identity
from lab.sim.turns import TurnsWorld, quiet_logs
from penstock.cache.operations import BlockFault
from penstock.errors import UnavailableError
from penstock.store.base import LoadJob, MappedArena, SaveJob, Space, part_name
from penstock.tiers.host import HostTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KEY_BYTES
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.sim.disk.process import WatchedTier
    from penstock.store.base import EndedJob
    from penstock.vocabulary.keys import Key

ARENA_SLOTS = 24
BLOCK_BYTES = (100, 512, 4096, 5000)
"""Less than a page, whole pages, and a page and a bit."""
SPACES = (b"one space of all", b"another one here")
MEMORY_FOLDER = "/dev/shm"
TURNS = 120

DISK_FAULTS: tuple[str, ...] = (
    "block corrupt",
    "block missing",
    "block unreadable",
    "bytes rot",
    "calls do a part only",
    "folder removed",
    "folder travels back",
    "generation voided",
    "job cancelled",
    "killed",
    "killed in a call",
    "opened with another size",
    "one file travels back",
    "power lost",
    "segment given up",
    "small files travel back",
    "sync is ignored",
    "tier is off",
    "tier is on again",
    "write lost",
)
DISK_KINDS = Kinds(
    events=("load", "restart", "save", "step", "void"),
    faults=DISK_FAULTS,
    copy_word="job",
    copies=("load", "save"),
    has_tables=False,
    events_mean_min=60.0,
)


def make_folder() -> Path:
    """A folder in memory, where there is one: nothing of a simulated disk has to be kept."""
    parent = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="penstock-sim-", dir=parent))


class Crash(NamedTuple):
    """The one thing that happens to a world: its process dies in a call."""

    call: int | None
    """Counted from 1; `None`: it does not."""
    power: bool = False
    turns: int = 30


class DiskArena:
    """The hub of one rank, its free slots, and what belongs where."""

    def __init__(self, rank: int, block_bytes: int, algorithm: Algorithm) -> None:
        layout = Layout.opaque(
            layers=range(1),
            block_bytes=block_bytes,
            encoding="digests",
            block_tokens=4,
            block_count=ARENA_SLOTS,
        )
        self.host = HostTier.create(layout, ARENA_SLOTS, huge_pages=False)
        form = Form(layout=layout, checksum=algorithm)
        part = part_name(form, rank=rank, rank_count=2, equal=False)
        self.mapped = MappedArena(self.host, form, part)
        self.free = set(range(ARENA_SLOTS))
        memory = self.host.arena.bytes[self.host.blocks_offset :]
        self.blocks = memory[: ARENA_SLOTS * self.host.slot_bytes].reshape(ARENA_SLOTS, -1)

    def fill(self, identity: Identity, slot: int, salt: int) -> None:
        """Puts a block into a slot, with its sums."""
        content = self.content(identity)
        self.blocks[slot, : len(content)] = content
        sums = self.mapped.span.sum_blocks(
            content[np.newaxis], [identity.key], self.mapped.form.checksum, salt=salt
        )
        self.host.keep_sums(np.array([slot], dtype=np.int32), sums)

    def check(self, identity: Identity, slot: int, salt: int) -> None:
        """A slot has the right bytes and the right sums."""
        content = self.content(identity)
        sums = self.mapped.span.sum_blocks(
            content[np.newaxis], [identity.key], self.mapped.form.checksum, salt=salt
        )
        found = self.host.sums(np.array([slot], dtype=np.int32))
        if (self.blocks[slot, : len(content)] != content).any() or (found != sums).any():
            raise Violation("bytes", f"wrong bytes are delivered for {identity}")

    def content(self, identity: Identity) -> np.ndarray:
        """The bytes of a block."""
        name, generation = identity.space
        digest = xxh3_128_digest(name + b"%d" % generation + identity.part + identity.key)
        size = self.host.layout.block_bytes
        return np.frombuffer((digest * (size // len(digest) + 1))[:size], dtype=np.uint8)


class DiskWorld(TurnsWorld):
    """One seed's world."""

    def __init__(
        self,
        seed: int,
        *,
        log: Callable[[str], None] | None = None,
        crash: Crash | None = None,
    ) -> None:
        """With `crash` nothing else goes wrong in it."""
        super().__init__(seed, log)
        self._turns = TURNS if crash is None else crash.turns
        rng = self.rng
        block_bytes = rng.choice(BLOCK_BYTES)
        algorithm = rng.choice((Algorithm.XXH3, Algorithm.MIX64))
        self.arenas = [DiskArena(0, block_bytes, algorithm)]
        if rng.random() < 0.4:
            self.arenas.append(DiskArena(1, block_bytes, algorithm))
        self.keys = [bytes([number]) * KEY_BYTES for number in range(rng.randint(6, 24))]
        slots = rng.randint(1, 4)
        slot_bytes = -(-block_bytes // 4096) * 4096 + 4096
        self.process = DiskProcess(
            rng,
            make_folder() / "tier",
            8 * (2 * 4096 + slots * slot_bytes),
            clock=lambda: self.now,
            queue_bytes=rng.choice((1 << 30, 1 << 30, 6 * slot_bytes)),
        )
        self.jobs: dict[int, tuple[SaveJob | LoadJob, DiskArena]] = {}
        self._draw_sizes(seed, crash)
        self._draw_travels(seed, crash)
        self._ticket = 0
        healthy = rng.random() < 0.15 or crash is not None
        self._conditions = DiskConditions(
            short=self._fault(healthy, 0.3, 0.3),
            lose=self._fault(healthy, 0.2, 0.05),
            meanwhile=rng.choice((0.0, 0.2, 0.5)),
            ignores_sync=not healthy and rng.random() < 0.2,
        )
        self._power = 0.0 if healthy else rng.choice((0.0, 0.5, 1.0))
        if crash is not None:
            self._power = float(crash.power)
            self.process.disk.dies_at = crash.call
        self._actions = [
            (3.0, self._save),
            (2.5, self._load),
            (4.0, self._step),
            (1.5, self._take_results),
            (0.3, self._cancel),
            (0.1, self._void),
            (self._fault(healthy, 0.7, 0.8), self._kill),
            (self._fault(healthy, 0.7, 0.8), self._doom),
            (self._fault(healthy, 0.5, 0.8), self._rot),
            (self._fault(healthy, 0.5, 0.8), self._refuse),
            (self._fault(healthy, 0.1, 0.3), self._remove_folder),
        ]

    def _draw_sizes(self, seed: int, crash: Crash | None) -> None:
        """Whether processes have the folder with different sizes, one after the other."""
        self._sizer = Random(f"sizes of {seed}")
        self._sizes_vary = crash is None and self._sizer.random() < 0.4
        self._size_bytes = self.process.size_bytes

    def _draw_travels(self, seed: int, crash: Crash | None) -> None:
        """Whether files travel back. Worlds in which none do draw as before."""
        self._traveller = Random(f"images of {seed}")
        travels = crash is None and self._traveller.random() < 0.4
        self._image_chance, self._travel_chance = (0.06, 0.03) if travels else (0.0, 0.0)
        process = self.process
        process.images = FolderImages(self._traveller, process.folder, process.disk)

    def _fault(self, healthy: bool, chance: float, most: float) -> float:  # noqa: FBT001
        drawn = self.rng.uniform(0.0, most) if self.rng.random() < chance else 0.0
        return 0.0 if healthy else drawn

    def run(self) -> None:
        """Lives the world to its end."""
        disk = self.process.disk
        disk.conditions = self._conditions
        if self._conditions.short:
            self.note("calls do a part only")
        if self._conditions.ignores_sync:
            self.note("sync is ignored")
        with quiet_logs("store"):
            try:
                self._start()
                for _ in range(self._turns):
                    self._guard(self.draw_action(within_s=0.2))
                    if self._traveller.random() < self._image_chance:
                        self.process.images.keep(self.process.truth)
                    if self._traveller.random() < self._image_chance:
                        self._guard(lambda: self._void_with(self._traveller))
                    if self._traveller.random() < self._travel_chance:
                        self._travel()
                self._end()
            finally:
                self.process.kill_quietly()
                shutil.rmtree(self.process.folder.parent)
                for arena in self.arenas:
                    arena.host.close()

    def _guard(self, action: Callable[[], None]) -> None:
        """Does something in which the process may die."""
        lost = self.process.disk.writes_lost
        try:
            action()
        except ProcessKilledError:
            self.note("killed in a call")
            self._die()
        if self.process.disk.writes_lost > lost:
            self.note("write lost")

    # ---------------------------------------------------------------- jobs

    def _draw_space(self, tier: WatchedTier) -> Space:
        name = self.rng.choice(SPACES)
        generation = tier.generation(name)
        self.process.truth.resets.note(name, generation)
        return Space(name, generation)

    def _draw_keys(self, limit: int) -> list[Key]:
        first = self.rng.randrange(len(self.keys))
        return (self.keys + self.keys)[first : first + self.rng.randint(1, min(limit, 5))][
            : len(self.keys)
        ]

    def _begin(self, *, save: bool) -> None:
        tier, arena = self.process.tier, self.rng.choice(self.arenas)
        if tier is None or not arena.free:
            return
        space, keys = self._draw_space(tier), self._draw_keys(len(arena.free))
        slots = self.rng.sample(sorted(arena.free), len(keys))
        arena.free -= set(slots)
        self._ticket += 1
        salt = self.rng.getrandbits(64)
        job: SaveJob | LoadJob
        if save:
            for key, slot in zip(keys, slots, strict=True):
                arena.fill(Identity(space, arena.mapped.part, key), slot, salt)
            parents = [None, *keys[:-1]]
            job = SaveJob(self._ticket, arena.mapped, space, keys, parents, slots, salt)
        else:
            arena.blocks[slots] = 0
            job = LoadJob(self._ticket, arena.mapped, space, keys, slots, salt)
        self.jobs[self._ticket] = (job, arena)
        self.events["save" if save else "load"] += 1
        self.tell(f"{'save' if save else 'load'} {self._ticket} {[key[0] for key in keys]}")
        (tier.save if isinstance(job, SaveJob) else tier.load)(job)  # type: ignore[arg-type]

    def _save(self) -> None:
        self._begin(save=True)

    def _load(self) -> None:
        self._begin(save=False)

    def _cancel(self) -> None:
        if self.process.tier is not None and self.jobs:
            self.note("job cancelled")
            self.process.tier.cancel(self.rng.choice(list(self.jobs)))

    def _void(self) -> None:
        self._void_with(self.rng)

    def _void_with(self, rng: Random) -> None:
        if self.process.tier is not None:
            name = rng.choice(SPACES)
            before = self.process.tier.generation(name)
            with suppress(UnavailableError):  # It counts all the same, up to a restart.
                self.process.void(name)
            if self.process.tier.generation(name) <= before:
                raise Violation("store", "a void did not begin a new generation")
            self.note("generation voided")
            self.events["void"] += 1

    def _step(self) -> None:
        self.events["step"] += 1
        if self.process.tier is None:
            self._start()
        elif not self.process.step():
            retry_at = self.process.tier.retry_at
            if retry_at < math.inf:
                self.now = max(self.now, retry_at)

    def _take_results(self) -> None:
        tier = self.process.tier
        if tier is None:
            return
        for ended in tier.collect():
            self._check(ended)
        if tier.take_gone():
            self.note("segment given up")
        tier.state()

    def _check(self, ended: EndedJob) -> None:
        job, arena = self.jobs.pop(ended.ticket)
        self.copies["save" if isinstance(job, SaveJob) else "load"] += 1
        arena.free |= set(job.slots)
        faults = dict(ended.faults)
        for fault in faults.values():
            self.note(f"block {fault.value}")
        if isinstance(job, SaveJob):
            if BlockFault.CORRUPT in faults.values():
                raise Violation("store", "a save calls a block corrupt")
            return
        for position, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            if position not in faults:
                arena.check(Identity(job.space, arena.mapped.part, key), slot, job.salt)

    # ---------------------------------------------------------------- what befalls it

    def _start(self) -> None:
        self.events["restart"] += 1
        if self._sizes_vary and self.events["restart"] > 1:
            self.note("opened with another size")
            share = self._sizer.choice((0.2, 0.5, 0.8, 1.0, 2.0))
            self.process.size_bytes = int(self._size_bytes * share)
        try:
            self.process.start()
        except UnavailableError:
            self.note("tier is off")
        except ProcessKilledError:
            self.note("killed in a call")
            self._after_death()

    def _kill(self) -> None:
        if self.process.tier is not None:
            self.note("killed")
            self._die()

    def _die(self) -> None:
        power = self.rng.random() < self._power
        if power:
            self.note("power lost")
        self.process.kill(power=power)
        self._after_death()

    def _after_death(self) -> None:
        self.process.disk.dies_at = None
        self.jobs.clear()
        for arena in self.arenas:
            arena.free = set(range(ARENA_SLOTS))

    def _doom(self) -> None:
        """It dies in one of its next calls."""
        disk = self.process.disk
        disk.dies_at = disk.call_count + self.rng.randint(1, 12)

    def _rot(self) -> None:
        if self.process.rot():
            self.note("bytes rot")

    def _refuse(self) -> None:
        """Calls fail from now on, or work again."""
        conditions = self.process.disk.conditions
        if conditions.refusals:
            conditions.refusals = None
            self.note("tier is on again")
            return
        number = self.rng.choice((errno.ENOSPC, errno.EIO, errno.EROFS))
        names = ("pwritev", "fallocate") if number != errno.EIO else ("preadv", "pwritev", "sync")
        conditions.refusals = {name: number for name in names if self.rng.random() < 0.7}
        self.note("tier is off")

    def _travel(self) -> None:
        travel = self.process.travel()
        if travel is not None:
            self.note(travel.value)

    def _remove_folder(self) -> None:
        self.note("folder removed")
        shutil.rmtree(self.process.folder, ignore_errors=True)
        self.process.forget_everything()

    # ---------------------------------------------------------------- the end

    def _end(self) -> None:
        """The disk is well; every job ends; what was saved is there after a kill, and right."""
        conditions = self.process.disk.conditions
        conditions.refusals, conditions.lose, self.process.disk.dies_at = None, 0.0, None
        if self.process.tier is None:
            self._start()
        self._come_to_rest()
        if self.jobs:
            raise Violation("liveness", f"jobs were not reported: {[*self.jobs]}")
        self.process.kill(power=False)
        self._after_death()
        self._start()
        self._come_to_rest()
        tier = self.process.tier
        assert tier is not None
        if not self.process.checked:
            raise Violation("liveness", f"the tier does not come back: {tier.state()}")
        for arena in self.arenas:
            self._load_all(tier, arena)

    def _load_all(self, tier: WatchedTier, arena: DiskArena) -> None:
        for name in SPACES:
            space = Space(name, tier.generation(name))
            for key in self.keys:
                self._ticket += 1
                job = LoadJob(self._ticket, arena.mapped, space, [key], [0], 1)
                self.jobs[self._ticket] = (job, arena)
                tier.load(job)
                self._come_to_rest()

    def _come_to_rest(self) -> None:
        tier = self.process.tier
        assert tier is not None
        for _ in range(100):
            self.process.settle()
            self._take_results()
            if tier.retry_at == math.inf:
                return
            self.now = max(self.now, tier.retry_at)
        raise Violation("liveness", f"the tier stays off: {tier.state().why}")
