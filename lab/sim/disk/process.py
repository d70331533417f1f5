"""A real disk tier, its steps taken in an order that the seed chooses, and what must outlive it.

    process = DiskProcess(rng, folder, size_bytes, clock=lambda: world.now)
    process.start()
    process.tier.save(job)
    while process.step(): …
    process.kill(power=True)

The keeper, the I/O threads and recovery are those of the product; here no thread runs them. While
one is in a call of the disk, others get on: they go on inside its call.

The one rule that must not break: what is checked follows from jobs, reports and `SimDisk.spoilt`,
and not from what the tier believes; of the tier's own records only places of blocks are used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from lab.explore.world import Violation
from lab.sim.disk.device import ProcessKilledError, SimDisk
from lab.sim.disk.images import FolderImages, Resets
from penstock.cache.operations import BlockFault
from penstock.store.base import LoadJob, SaveJob, Space
from penstock.store.disk.format import PAGE_BYTES, ROW_BYTES, Geometry
from penstock.store.disk.index import digests_of
from penstock.store.disk.io import AlignedMemory
from penstock.store.disk.tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from random import Random

    import numpy as np
    from numpy.typing import NDArray

    from lab.sim.disk.images import Travel
    from penstock.store.base import EndedJob, MappedArena
    from penstock.store.disk.index import DiskSegment
    from penstock.store.disk.segments import SegmentPool
    from penstock.vocabulary.keys import Key

NESTED_MAX = 3
"""So many calls of the disk are under way at the same time."""
STEPS_MAX = 10_000
"""No tier needs so many to come to rest."""


class Identity(NamedTuple):
    """A block of a tier."""

    space: Space
    part: bytes
    key: Key


class _Place(NamedTuple):
    path: str
    ranges: list[tuple[int, int]]
    """What must be whole for the block to be found and delivered: head, row, block and trailer."""


class DiskTruth:
    """What is known of a disk, whatever its process believes."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, Identity] = {}
        """By digest: reported as saved, and not given up or spoilt since."""
        self.generations: dict[bytes, int] = {}
        """The last of each space that was told."""
        self.resets = Resets()
        self.places: dict[int, _Place] = {}
        """Of what was acknowledged, when the process died."""
        self.is_rotten: Callable[[MappedArena, int], bool] = lambda _arena, _slot: False
        """Whether the bytes of an arena slot changed by themselves: they are saved as they are."""
        self.tainted: set[int] = set()
        """Digests of blocks that may have been saved like that."""


class WatchedTier(DiskTier):
    """The disk tier of the product; what it takes in and reports is compared."""

    def __init__(
        self,
        folder: Path,
        size_bytes: int,
        disk: SimDisk,
        truth: DiskTruth,
        *,
        queue_bytes: int = 1 << 30,
    ) -> None:
        self._disk = disk
        self._truth = truth
        self._in_hand: dict[int, SaveJob | LoadJob] = {}
        self._unsure: dict[int, set[int]] = {}
        """By job in hand: digests of blocks that were given up or forgotten meanwhile."""
        self._expected: dict[int, dict[int, _Place]] = {}
        """By load in hand: where acknowledged blocks of it lie, by position."""
        self._tickets_lost: set[int] = set()
        """Jobs in hand, or reported and not collected, when it began with another folder: what was
        asked for before it noticed may be reported out of the index of the folder that is gone."""
        self.has_folder = True
        super().__init__(
            folder,
            size_bytes,
            threads=4,
            queue_bytes=queue_bytes,
            direct=False,
            calls=disk.calls,
            stepped=True,
        )
        disk.is_locked = self.lock.locked

    def take_folder(self) -> SegmentPool:
        pool = super().take_folder()
        if not self.has_folder:
            self._tickets_lost |= self._in_hand.keys()
        self.has_folder = True
        drop = pool.index.drop

        def watched_drop(segment: DiskSegment) -> NDArray[np.intp]:
            self._give_up(int(each) for each in segment.digests if each)
            return drop(segment)

        forget = pool.index.forget

        def watched_forget(digest: int, segment: DiskSegment, slot: int) -> bool:
            self._truth.tainted.discard(digest)
            # Before the load that found it is reported, other blocks may be written there.
            spoilt = self._disk.is_spoilt(*self.place_of(digest))
            for ticket, unsure in self._unsure.items():
                if spoilt or isinstance(self._in_hand[ticket], SaveJob):
                    unsure.add(digest)
            return forget(digest, segment, slot)

        pool.index.drop = watched_drop  # type: ignore[method-assign]
        pool.index.forget = watched_forget  # type: ignore[method-assign]
        return pool

    def lose_folder(self) -> None:
        """All files are gone, though they may not be missed for a while; or others are there.

        No report counts until it begins with another folder: no store can keep what is removed.
        """
        self.has_folder = False

    def _give_up(self, digests: Iterable[int]) -> None:
        gone = set(digests)
        for digest in gone:
            self._truth.acknowledged.pop(digest, None)
        for unsure in self._unsure.values():
            unsure.update(gone)

    def save(self, job: SaveJob) -> None:
        self._in_hand[job.ticket] = job
        self._unsure[job.ticket] = set()
        super().save(job)

    def load(self, job: LoadJob) -> None:
        self._in_hand[job.ticket] = job
        self._unsure[job.ticket] = set()
        digests = digests_of(job.space, job.arena.part, job.keys)
        self._expected[job.ticket] = {
            position: self.place_of(digest)
            for position, digest in enumerate(digests)
            if digest in self._truth.acknowledged and digest in self.pool.index
        }
        super().load(job)

    def collect(self) -> list[EndedJob]:
        ended = super().collect()
        for each in ended:
            job = self._in_hand.pop(each.ticket)
            unsure = self._unsure.pop(each.ticket)
            if each.ticket in self._tickets_lost or not self.has_folder:
                self._expected.pop(each.ticket, None)
            elif isinstance(job, SaveJob):
                self._acknowledge(job, each, unsure)
            else:
                self._check_load(job, each, unsure)
        return ended

    def _acknowledge(self, job: SaveJob, ended: EndedJob, unsure: set[int]) -> None:
        digests = digests_of(job.space, job.arena.part, job.keys)
        faults = dict(ended.faults)
        for position, digest in enumerate(digests):
            if position in faults or ended.failure or digest in unsure:
                continue
            if self._truth.is_rotten(job.arena, job.slots[position]):
                self._truth.tainted.add(digest)
            if digest in self._truth.tainted:
                continue
            if not self._disk.is_spoilt(*self.place_of(digest)):
                key = job.keys[position]
                self._truth.acknowledged[digest] = Identity(job.space, job.arena.part, key)

    def _check_load(self, job: LoadJob, ended: EndedJob, unsure: set[int]) -> None:
        """A block that was there, and was not given up or spoilt, is delivered."""
        digests = digests_of(job.space, job.arena.part, job.keys)
        expected = self._expected.pop(ended.ticket)
        for position, fault in ended.faults:
            digest = digests[position]
            if fault is BlockFault.UNREADABLE or digest in unsure or position not in expected:
                continue
            places = (expected[position], self.place_of(digest))
            if not any(self._disk.is_spoilt(*place) for place in places):
                raise Violation(
                    "store", f"{job.keys[position].hex()[:4]} was saved, and is {fault.value}"
                )
            self._truth.acknowledged.pop(digest, None)

    def place_of(self, digest: int) -> _Place:
        """Where a block lies, if it is known."""
        found = self.pool.index.find(digest)
        if found is None:
            return _Place("", [])
        segment = self.pool.segments[found.segment]
        geometry = segment.geometry
        assert geometry is not None
        ranges = [
            (0, PAGE_BYTES),
            (Geometry.row_offset(found.slot), ROW_BYTES),
            (geometry.offset(found.slot), geometry.slot_bytes),
        ]
        return _Place(segment.path, ranges)

    # ---------------------------------------------------------------- steps

    def ready_steps(self, *, keeper: bool) -> list[Callable[[], None]]:
        """What its threads could do now."""
        threads = self._threads
        steps: list[Callable[[], None]] = []
        if keeper and threads.is_keeper_due():
            steps.append(threads.keep)
        if self.reads or self.writes:
            steps += [self._do_io] * 2
        if self.pool._unread:  # noqa: SLF001
            steps.append(self._recover)
        return steps

    def is_keeper(self, step: Callable[[], None]) -> bool:
        return step == self._threads.keep

    def _do_io(self) -> None:
        with self.lock:
            task = self.next_task()
        if task is not None:
            self._threads.do_task(task, AlignedMemory())

    def _recover(self) -> None:
        self._threads.recover_next(self.pool)
        with self.lock:
            self.change_state()

    def used_segments(self) -> list[DiskSegment]:
        """Those with a geometry, by number."""
        return [each for _, each in sorted(self.pool.segments.items()) if each.geometry]

    def abandon(self) -> None:
        """Gives the descriptors of a process that was killed back, those that it had."""
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)
        if hasattr(self, "folder"):
            self.folder.close()

    def loading(self) -> set[int]:
        """What loads in hand ask for: it may have been found spoilt, which nobody was told yet."""
        jobs = [job for job in self._in_hand.values() if isinstance(job, LoadJob)]
        return {d for job in jobs for d in digests_of(job.space, job.arena.part, job.keys)}


class DiskProcess:
    """The lives of a tier in one folder."""

    def __init__(
        self,
        rng: Random,
        folder: Path,
        size_bytes: int,
        *,
        clock: Callable[[], float],
        queue_bytes: int = 1 << 30,
    ) -> None:
        self.disk = SimDisk(rng, clock)
        self.truth = DiskTruth()
        self.folder = folder
        self.tier: WatchedTier | None = None
        """`None` while no process has the folder."""
        self.checked = False
        """Whether this life has found all that it should have."""
        self._rng = rng
        self.size_bytes = size_bytes
        self._queue_bytes = queue_bytes
        self._reads_refused = 0
        """Before this life. A table that it cannot read is not read again."""
        self.images = FolderImages(rng, folder, self.disk)
        self._depth = 0
        self._keeping = False
        self.disk.meanwhile = self._meanwhile

    def start(self) -> WatchedTier:
        """A new life; it may die at once, in a call."""
        tier = WatchedTier.__new__(WatchedTier)
        refused = self.disk.refusals["preadv"]
        try:
            tier.__init__(  # type: ignore[misc]
                *(self.folder, self.size_bytes, self.disk, self.truth),
                queue_bytes=self._queue_bytes,
            )
        except ProcessKilledError:
            tier.abandon()
            raise
        self.tier = tier
        self.checked = False
        self._reads_refused = self.disk.refusals["preadv"]
        read = self._reads_refused == refused
        self.images.settle(self.truth, tier, self.truth.resets.voided, read=read)
        return tier

    def void(self, name: bytes) -> None:
        """Begins a new generation.

        Raises:
            UnavailableError: it counts, up to a restart.
        """
        assert self.tier is not None
        self.truth.resets.note(name, self.tier.generation(name))
        generation = self.tier.void(name)
        self.truth.resets.confirm(name, generation)
        self.images.overwrite()

    def travel(self) -> Travel | None:
        """The folder, or a part of it, is what it was; `None`: there is no earlier image."""
        travelled = self.images.travel(lives=self.tier is not None)
        if travelled is None:
            return None
        travel, names = travelled
        if any(name.endswith(".segment") for name in names):
            self.truth.acknowledged.clear()
            self.truth.places.clear()
            if self.tier is not None:
                self.tier.lose_folder()
        return travel

    def step(self) -> bool:
        """Lets one of its threads get on; false if none can.

        Raises:
            ProcessKilledError: it died in it.
        """
        if self.tier is None:
            return False
        steps = self.tier.ready_steps(keeper=not self._keeping)
        if not steps:
            if not self._depth:
                self._check_recovered(self.tier)
            return False
        step = self._rng.choice(steps)
        keeping = self.tier.is_keeper(step)
        self._keeping |= keeping
        self._depth += 1
        try:
            step()
        finally:
            self._depth -= 1
            self._keeping &= not keeping
        if self.tier.broken:
            raise Violation("store", f"the disk tier broke: {self.tier.state().why}")
        return True

    def settle(self) -> None:
        """Lets all threads get on until nothing is left to do."""
        for _ in range(STEPS_MAX):
            if not self.step():
                return
        raise Violation("liveness", "the disk tier does not come to rest")

    def _meanwhile(self) -> None:
        if 0 < self._depth < NESTED_MAX:
            self.step()

    def kill(self, *, power: bool) -> None:
        """Its process is gone; with `power`, so is some of what was not synced."""
        tier = self.tier
        if tier is None:
            return
        truth = self.truth
        self._note_generations(tier)
        loading = tier.loading()
        for digest, identity in list(truth.acknowledged.items()):
            place = tier.place_of(digest)
            if place.path:
                truth.places[digest] = place
            elif digest in loading or self.disk.refusals["preadv"] != self._reads_refused:
                # Found spoilt, or in a table that could not be read: then its room was free.
                del truth.acknowledged[digest]
            elif self.checked and identity.space.generation == tier.generation(identity.space.name):
                raise Violation("store", f"{identity.key.hex()[:4]} was saved, and is gone")
        tier.abandon()
        self.tier = None
        self._depth, self._keeping = 0, False
        if power:
            self.disk.lose_power()
        self._excuse_spoilt()

    def rot(self) -> bool:
        """A byte of a segment changes by itself; false if there is none."""
        segments = [] if self.tier is None else self.tier.used_segments()
        segments = [each for each in segments if os.path.exists(each.path)]
        if not segments:
            return False
        segment = self._rng.choice(segments)
        self.disk.rot(segment.path, self._rng.randrange(segment.file_bytes))
        self._excuse_spoilt()
        return True

    def _excuse_spoilt(self) -> None:
        """What lies in bad sectors may be found or not; soon other blocks may lie there."""
        for digest in list(self.truth.acknowledged):
            place = None if self.tier is None else self.tier.place_of(digest)
            if place is None or not place.path:
                place = self.truth.places.get(digest)
            if place is not None and self.disk.is_spoilt(*place):
                del self.truth.acknowledged[digest]

    def kill_quietly(self) -> None:
        """The world is over: gives the descriptors back."""
        if self.tier is not None:
            self.tier.abandon()
            self.tier = None

    def forget_everything(self) -> None:
        """The folder was removed: nothing of it is asked for again."""
        self.truth.acknowledged.clear()
        self.truth.places.clear()
        self.truth.generations.clear()
        self.images.forget()
        if self.tier is not None:
            self.tier.lose_folder()

    def _note_generations(self, tier: WatchedTier) -> None:
        if not tier.has_folder:
            return
        for digest, (space, _, _) in list(self.truth.acknowledged.items()):
            self.truth.generations[space.name] = tier.generation(space.name)
            if space.generation != self.truth.generations[space.name]:
                # A reset has voided it: its room is given away untold. Small files that travel back
                # may make its generation count again, but nothing brings it back.
                del self.truth.acknowledged[digest]

    def _check_recovered(self, tier: WatchedTier) -> None:
        """All that was called saved is there, once the tables were read; nothing voided is."""
        state = tier.state()
        if self.checked or not state.on or state.recovered < 1:
            return
        self.checked = True
        for name, before in self.truth.generations.items():
            if tier.generation(name) < before:
                raise Violation("store", f"generation {before} was forgotten")
        for digest, identity in list(self.truth.acknowledged.items()):
            space, _, key = identity
            if space.generation != tier.generation(space.name):
                del self.truth.acknowledged[digest]
                continue
            if digest in tier.pool.index and not tier.reads_off:
                continue
            place = self.truth.places.get(digest)
            spoilt = place is not None and self.disk.is_spoilt(*place)
            if not spoilt and self.disk.refusals["preadv"] == self._reads_refused:
                raise Violation("store", f"{key.hex()[:4]} was saved, and is gone")
            del self.truth.acknowledged[digest]
