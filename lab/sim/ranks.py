"""The ranks of a simulated engine: their memories, and how they carry out copies.

A rank reads the source, writes the target and reports, each at a moment of its own, and
many things can go wrong between. What lies in a slot is a content (see `workload`); as
checksums would, a rank notices a wrong content whenever it reads below the device.

The one rule that must not break: a rank that has reported, is seen dead, or was fenced off
touches nothing any more. Everything else it may do at the worst possible time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.sim.checkers import Claims
from lab.sim.store import Store
from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import BlockFault, Outcome, Purpose
from penstock.cache.settings import DEVICE
from penstock.cache.states import SlotState
from penstock.machine.events import CopyReport

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from lab.sim.workload import Text
    from lab.sim.world import World
    from penstock.machine.effects import Abandon, Copy, DropBlocks, Ended, Settled
    from penstock.vocabulary.keys import Key, OperationId

Cell = tuple[object, ...] | None
"""What lies in a slot; `None` for nothing of interest."""

ROTTEN: Cell = ("rotten",)
GARBAGE: Cell = ("garbage",)
MIXED: Cell = ("parts that do not belong together",)


class Job:
    """A copy that the ranks carry out."""

    __slots__ = (
        "abandoned",
        "corrupt",
        "deadline",
        "ended",
        "faulty",
        "id",
        "keys",
        "left",
        "missing",
        "purpose",
        "skip",
        "source",
        "sources",
        "store",
        "target",
        "targets",
    )

    def __init__(self, copy: Copy, rank_count: int) -> None:
        self.id = copy.operation
        self.purpose = copy.purpose
        self.source = copy.source
        self.target = copy.target
        self.keys = copy.keys
        self.sources = _rows(copy.source_slots)
        self.targets = _rows(copy.target_slots)
        self.deadline = copy.deadline
        self.left = set(range(rank_count))
        """Ranks that may still touch the slots."""
        self.skip: set[int] = set()
        """Ranks that stop early because the copy was abandoned."""
        self.faulty: set[int] = set()
        """Positions at which a rank reported a fault."""
        self.corrupt: set[int] = set()
        """Those that were corrupt at the source."""
        self.missing: set[int] = set()
        """Those that the store said it does not have."""
        self.store: Store | None = None
        """The process that carries it out, where it is not the ranks."""
        self.abandoned = False
        self.ended = False
        """Whether the outcome was told."""

    def __str__(self) -> str:
        return f"{self.purpose.value} {self.id.epoch}.{self.id.sequence}"


class Trouble:
    """What goes wrong with one rank's part of a copy."""

    __slots__ = ("failure", "hang_s", "unreadable")

    def __init__(self) -> None:
        self.hang_s = [0.0, 0.0, 0.0]
        """Before reading, writing and reporting."""
        self.unreadable: int | None = None
        self.failure = ""


_NO_TROUBLE = Trouble()


class Ranks:
    """All ranks of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._conditions = world.conditions
        self._right = world.library.right
        settings = world.conditions.settings
        self._managed = world.conditions.managed
        self._tiers = world.books.tiers
        self.rank_count = settings.rank_count
        self.group_slots = world.conditions.engine_slots
        device_slots = (
            settings.device.slot_count
            if settings.device is not None
            else settings.group_count * self.group_slots
        )
        sizes = [device_slots, *(tier.slot_count for tier in settings.tiers)]
        self.memory: Sequence[Sequence[MutableSequence[Cell]]] = [
            [[None] * size for size in sizes] for _ in range(self.rank_count)
        ]
        """Rank and tier to the contents of the slots."""
        self.rotten: set[tuple[int, int, int]] = set()
        """Where bytes were changed behind everybody's back: rank, tier, slot."""
        self.open: dict[OperationId, Job] = {}
        """Copies that are not known to be quiet."""
        self.started = 0
        self.dead: set[int] = set()
        """Ranks that do nothing any more, whether anybody has noticed or not."""
        self.lost: set[int] = set()
        """Dead ranks that the cache knows of."""
        self.off: set[int] = set()
        """Tiers that are off."""
        self.late_reports = 0
        """Reports that the cache can do nothing with."""
        self.corrupt_now: set[Key] = set()
        """Blocks that the report being handled says, or earlier ones said, are corrupt."""
        self.undemoted_now: set[Key] = set()
        """Blocks that were to leave after a copy that the report being handled ends in vain."""
        self.claims = Claims()
        self.stores = self._make_stores()
        """Tiers that a store process serves."""
        self._well = world.conditions.healthy
        """Whether nothing goes wrong with copies, because it never does or not any more."""
        self._pace_s = list(world.conditions.pace_s)
        if max(self._conditions.pace_s) >= 10 * min(self._conditions.pace_s):
            world.note("rank is slow")

    def _make_stores(self) -> dict[int, Store]:
        conditions = self._conditions.store
        return {
            index: Store(self._world, index, conditions)
            for index, tier in enumerate(self._conditions.settings.tiers, 1)
            if conditions is not None and tier.stored
        }

    # ---------------------------------------------------------------- what the cache asks for

    def start(self, copy: Copy) -> None:
        """A copy was asked for: every rank that lives begins at a time of its own."""
        if copy.operation in self.open:
            raise Violation("operations", f"{copy.operation} was started twice")
        if self.lost:
            raise Violation(
                "liveness", f"{copy.operation} was started though rank {self.lost} is lost"
            )
        if copy.source in self.off or copy.target in self.off:
            raise Violation("operations", f"{copy.operation} uses a tier that is off")
        job = Job(copy, self.rank_count)
        self.started += 1
        self.claims.enter(job, managed=self._managed)
        self.open[job.id] = job
        job.store = self.stores.get(job.source) or self.stores.get(job.target)
        if job.store is not None:
            job.store.start(job, copy.parents)
            return
        for rank in range(self.rank_count):
            if rank not in self.dead:
                trouble = self._draw_trouble(job)
                self._world.after(
                    self._pause(rank) + trouble.hang_s[0], self._read, job, rank, trouble
                )

    def abandon(self, effect: Abandon) -> None:
        """Nobody wants a copy any more: some ranks stop, others are past stopping."""
        job = self.open.get(effect.operation)
        if job is None:
            raise Violation("operations", f"{effect.operation} was abandoned after its end")
        job.abandoned = True
        for rank in sorted(job.left):
            if self._rng.random() < 0.5:
                job.skip.add(rank)

    def drop(self, effect: DropBlocks) -> None:
        """A tier forgot blocks."""
        self.claims.check_drop(effect.tier, effect.slots.tolist(), effect.keys)

    def end(self, effect: Ended) -> None:
        """The outcome of a copy: told once, and quiet only when it is."""
        job = self.open.get(effect.operation)
        if job is None or job.ended:
            raise Violation("operations", f"{effect.operation} ended more than once")
        if effect.outcome in (Outcome.CANCELLED, Outcome.EXPIRED) and not job.abandoned:
            raise Violation("operations", f"{job} is {effect.outcome}, but no rank may stop")
        job.ended = True
        self._world.copies[f"{job.purpose.value} {effect.outcome.value}"] += 1
        if effect.outcome is Outcome.EXPIRED:
            self._world.note("deadline passed")
        if effect.settled:
            self._close(job)

    def settle(self, effect: Settled) -> None:
        """A copy that ended early is quiet at last."""
        job = self.open.get(effect.operation)
        if job is None or not job.ended:
            raise Violation("operations", f"{effect.operation} settled without an end")
        self._close(job)

    def _close(self, job: Job) -> None:
        if job.left:
            raise Violation("reuse", f"{job} is called quiet, but {job.left} may touch it")
        del self.open[job.id]
        for position in job.corrupt | job.missing:
            self._check_dropped(job.source, job.sources[0][position], job.keys[position])

    def silence(self, rank: int) -> None:
        """A rank is certain to touch nothing that it was asked to before; a store goes on."""
        for job in self.open.values():
            if job.store is None:
                job.left.discard(rank)

    def fence(self, tier: int) -> None:
        """It is certain that no copy touches a tier any more."""
        for job in self.open.values():
            carried_out_here = job.store is None or job.store.tier == tier
            if tier in (job.source, job.target) and carried_out_here:
                job.left.clear()

    def check_quiet_copies_are_closed(self) -> None:
        """A copy that no rank can touch any more has ended."""
        for job in self.open.values():
            if not job.left:
                raise Violation("operations", f"{job}: all have reported, it did not end")

    def recover(self) -> None:
        """From now on no rank is slow, and nothing goes wrong with copies."""
        self._well = True
        quick_s = self._conditions.settings.operation_timeout_s / 40
        self._pace_s = [quick_s] * self.rank_count

    # ---------------------------------------------------------------- the stages of a copy

    def _read(self, job: Job, rank: int, trouble: Trouble) -> None:
        if rank in self.dead or rank not in job.left:
            return
        self._check_not_free(job, job.source, job.sources[0], f"rank {rank} reads")
        contents = [self._fetch(job, rank, position) for position in range(len(job.keys))]
        faults: list[tuple[int, BlockFault]] = []
        if job.purpose is not Purpose.DUPLICATE:
            for position, key in enumerate(job.keys):
                if contents[position] != self._right[key]:
                    self._check_explained(job, rank, position)
                    faults.append((position, BlockFault.CORRUPT))
                    contents[position] = None
        if trouble.unreadable is not None:
            faults = [fault for fault in faults if fault[0] != trouble.unreadable]
            faults.append((trouble.unreadable, BlockFault.UNREADABLE))
            contents[trouble.unreadable] = GARBAGE
        if trouble.failure:
            del contents[self._rng.randint(0, len(contents)) :]
        pause = self._pause(rank) + trouble.hang_s[1]
        self._world.after(pause, self._write, job, rank, trouble, contents, faults)

    def _write(
        self,
        job: Job,
        rank: int,
        trouble: Trouble,
        contents: list[Cell],
        faults: list[tuple[int, BlockFault]],
    ) -> None:
        if rank in self.dead or rank not in job.left:
            return
        if rank not in job.skip:
            self._check_not_free(job, job.target, job.targets[0], f"rank {rank} writes")
            if job.ended:
                self._world.note("write after the copy was given up")
            for position, content in enumerate(contents):
                if content is not None:
                    self._store(job, rank, position, content)
            self._world.tell("rank %d writes for %s%s", rank, job, " (late)" if job.ended else "")
        pause = self._pause(rank) + trouble.hang_s[2]
        event = CopyReport(operation=job.id, rank=rank, faults=faults, failure=trouble.failure)
        self._world.after(pause, self._report, job, event)

    # ---------------------------------------------------------------- for a store process

    def read_arena(self, job: Job, rank: int) -> tuple[list[Cell], dict[int, BlockFault]]:
        """What a store finds in the slots of a rank, and what is corrupt there."""
        self._check_not_free(job, job.source, job.sources[0], f"the store reads for rank {rank}")
        contents = [self._fetch(job, rank, position) for position in range(len(job.keys))]
        faults: dict[int, BlockFault] = {}
        for position, key in enumerate(job.keys):
            if contents[position] != self._right[key]:
                self._check_explained(job, rank, position)
                faults[position] = BlockFault.CORRUPT
        return contents, faults

    def write_arena(self, job: Job, rank: int, contents: dict[int, Cell]) -> None:
        """A store puts blocks into the slots of a rank, whether that lives or not."""
        self._check_not_free(job, job.target, job.targets[0], f"the store writes for rank {rank}")
        if job.ended:
            self._world.note("store writes after the copy was given up")
        for position, content in contents.items():
            self._store(job, rank, position, content)

    def hear_store(
        self, job: Job, rank: int, faults: list[tuple[int, BlockFault]], failure: str
    ) -> None:
        """The store's answer for a rank reaches the driver."""
        if rank in self.dead and rank in job.left:
            self._world.note("store answers for a dead rank")
        event = CopyReport(operation=job.id, rank=rank, faults=faults, failure=failure)
        self._tell(job, event)

    def _report(self, job: Job, event: CopyReport) -> None:
        note = self._world.note
        if event.rank in self.dead or event.rank not in job.left:
            # It is silent now, but what it said before may still be on its way.
            if self._rng.random() < 0.5:
                return
            note("report from a dead rank")
        self._tell(job, event)
        if not self._well and self._rng.random() < self._conditions.duplicate:
            self._world.after(self._pause(event.rank), self._repeat, event)

    def _tell(self, job: Job, event: CopyReport) -> None:
        if event.rank in job.left:
            self._count_faults(job, event)
            job.left.discard(event.rank)
        else:
            self.late_reports += 1
        if job.id.epoch < self._world.epoch:
            self._world.note("report from before a reset")
        self.corrupt_now = {job.keys[position] for position in job.corrupt | job.missing}
        if job.purpose is Purpose.DEMOTE:
            everything = job.ended or event.failure
            positions = range(len(job.keys)) if everything else job.faulty
            self.undemoted_now = {job.keys[position] for position in positions} - self.corrupt_now
        self._world.send(event)
        self.corrupt_now, self.undemoted_now = set(), set()

    def _count_faults(self, job: Job, event: CopyReport) -> None:
        for position, fault in event.faults:
            self._world.note(f"block {fault.value}")
            job.faulty.add(position)
            if fault is BlockFault.CORRUPT:
                job.corrupt.add(position)
            elif fault is BlockFault.MISSING:
                job.missing.add(position)
        if event.failure:
            self._world.note("rank fails")

    def _repeat(self, event: CopyReport) -> None:
        self._world.note("report twice")
        self.late_reports += 1
        self._world.send(event)

    def _draw_trouble(self, job: Job) -> Trouble:
        conditions, rng = self._conditions, self._rng
        if self._well:
            return _NO_TROUBLE
        trouble = Trouble()
        if rng.random() < conditions.hang:
            timeout_s = conditions.settings.operation_timeout_s
            trouble.hang_s[rng.randrange(3)] = timeout_s * rng.uniform(0.5, 2.0)
            self._world.note("rank hangs")
        if rng.random() < conditions.unreadable:
            trouble.unreadable = rng.randrange(len(job.keys))
        if rng.random() < conditions.fail:
            trouble.failure = "cannot copy"
        return trouble

    def _pause(self, rank: int) -> float:
        return self._rng.random() * 2.0 * self._pace_s[rank]

    # ---------------------------------------------------------------- bytes

    def _fetch(self, job: Job, rank: int, position: int) -> Cell:
        memory = self.memory[rank][job.source]
        if self._managed or job.source != DEVICE:
            return memory[job.sources[0][position]]
        # A block lies in one slot of each KV group, and only together are they the block.
        parts = [memory[self.place(g, row[position])] for g, row in enumerate(job.sources)]
        right = self._right[job.keys[position]]
        whole = all(part == (group, right) for group, part in enumerate(parts))
        return right if whole else MIXED

    def _store(self, job: Job, rank: int, position: int, content: Cell) -> None:
        memory = self.memory[rank][job.target]
        if self._managed or job.target != DEVICE:
            slot = job.targets[0][position]
            memory[slot] = content
            if self.rotten:
                self.rotten.discard((rank, job.target, slot))
            return
        for group, row in enumerate(job.targets):
            if row[position] != NOWHERE:
                memory[self.place(group, row[position])] = (group, content)

    def place(self, group: int, slot: int) -> int:
        """Where a slot of a KV group lies in a rank's device memory."""
        return group * self.group_slots + slot

    def compute(self, table: Sequence[int], text: Text, start: int, end: int) -> None:
        """Every rank computes the tokens from `start` to `end` into the slots of a table."""
        size = self._world.library.block_tokens
        for block in range(start // size, -(-end // size)):
            slot = table[block]
            first = block * size
            self.claims.check_quiet(DEVICE, slot, "a computation", computing=True)
            done = max(0, start - first)
            marks = tuple(text.marks[first + done : min(end, first + size)])
            for memory in self.memory:
                memory[DEVICE][slot] = (memory[DEVICE][slot] or ())[:done] + marks

    def discover(self, tier: int, slots: Sequence[int], keys: Sequence[Key]) -> None:
        """Blocks are found where nobody here has written them."""
        for rank, memory in enumerate(self.memory):
            for slot, key in zip(slots, keys, strict=True):
                memory[tier][slot] = self._right[key]
                self.rotten.discard((rank, tier, slot))

    def rot(self, rank: int, tier: int, slot: int) -> None:
        """The bytes of a slot change by themselves."""
        self.memory[rank][tier][slot] = ROTTEN
        self.rotten.add((rank, tier, slot))

    def wipe(self, rank: int, tier: int) -> None:
        """The memory of a rank in a tier is gone."""
        memory = self.memory[rank][tier]
        memory[:] = [None] * len(memory)
        self.rotten = {place for place in self.rotten if place[:2] != (rank, tier)}

    # ---------------------------------------------------------------- looking at bytes

    def check_table(self, name: str, table: Sequence[int], text: Text, count: int) -> None:
        """The first `count` tokens of a text lie in the slots of a table, on every rank."""
        size = self._world.library.block_tokens
        for block in range(-(-count // size)):
            first = block * size
            expected = tuple(text.marks[first : min(count, first + size)])
            slot = table[block]
            for rank, memory in enumerate(self.memory):
                content = memory[DEVICE][slot]
                if content is None or content[: len(expected)] != expected:
                    if rank in self.dead:
                        continue
                    raise Violation(
                        "bytes", f"{name}: block {block} in slot {slot} is wrong on rank {rank}"
                    )

    def check_block(self, tier: int, slot: int, key: Key) -> None:
        """A block that can be matched lies in its slot, on every rank."""
        if tier in self.stores:
            self.stores[tier].check_listed(key)
            return
        right = self._right[key]
        for rank, memory in enumerate(self.memory):
            if memory[tier][slot] == right or (rank, tier, slot) in self.rotten:
                continue
            if tier == DEVICE and rank in self.dead:
                continue
            raise Violation(
                "bytes", f"slot {slot} of tier {tier} can be matched, but is wrong on rank {rank}"
            )

    def _check_dropped(self, index: int, slot: int, key: Key) -> None:
        """A copy that a rank found corrupt can no longer be matched."""
        node = self._world.books.nodes.ids.get(key)
        tier = self._tiers[index]
        if node is not None and tier is not None and tier.slot_of[node] == slot:
            raise Violation("bytes", f"{tier.name}[{slot}] is corrupt, but stays")

    def _check_not_free(self, job: Job, index: int, slots: Sequence[int], what: str) -> None:
        tier = self._tiers[index]
        if tier is None:
            return
        state = tier.pool.state
        for slot in slots:
            if state[slot] == SlotState.FREE:
                raise Violation("reuse", f"{what} {tier.name}[{slot}], free, for {job}")

    def _check_explained(self, job: Job, rank: int, position: int) -> None:
        """Wrong bytes at the source are the cache's fault, unless somebody spoilt them."""
        slot = job.sources[0][position]
        if job.ended or (rank, job.source, slot) in self.rotten:
            return
        raise Violation(
            "bytes", f"rank {rank} reads slot {slot} of tier {job.source} for {job}: wrong content"
        )


def _rows(slots: NDArray[np.int32]) -> list[list[int]]:
    """One row a KV group, also where a block has one slot."""
    rows: list[list[int]] = slots.reshape(-1, slots.shape[-1]).tolist()
    return rows
