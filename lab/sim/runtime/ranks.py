"""The ranks of a world around the runtime: processes with real memory, and what is known of them.

Copies are carried out by the production ranks and movers. What is kept here is the truth about
them: which process may still touch the slots of which copy, whatever the owner believes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.sim.ranks import Job, Ranks
from lab.sim.runtime.conditions import Way
from lab.sim.runtime.memory import ALGORITHM, RankMemory
from lab.sim.runtime.process import RankProcess
from lab.sim.runtime.stores import Stores
from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import DEVICE, HUB
from penstock.store.base import part_name
from penstock.vocabulary.checksums import life_salt
from penstock.vocabulary.form import Form

if TYPE_CHECKING:
    from lab.sim.runtime.world import RuntimeWorld
    from lab.sim.store import Store
    from penstock.machine.effects import Abandon, Copy
    from penstock.machine.events import CopyReport
    from penstock.runtime.messages import RankReport
    from penstock.store.base import MappedArena
    from penstock.vocabulary.keys import Key


class RuntimeJob(Job):
    """A copy, and the ranks whose report the owner has not heard."""

    __slots__ = ("unheard",)

    def __init__(self, copy: Copy, rank_count: int) -> None:
        super().__init__(copy, rank_count)
        self.unheard = set(self.left)


class RuntimeRanks(Ranks):
    """All ranks of one world, each in a process of its own unless it is the owner's."""

    def __init__(self, world: RuntimeWorld) -> None:
        super().__init__(world)
        self._runtime = world
        self.memories = [RankMemory(world.conditions, self._salt) for _ in range(self.rank_count)]
        self.memory = [memory.views for memory in self.memories]
        self.stored = frozenset(
            index for index, tier in enumerate(world.conditions.settings.tiers, HUB) if tier.stored
        )
        """The tiers that a store process serves."""
        self.parts = [
            part_name(
                Form(layout=memory.hub.layout, checksum=ALGORITHM),
                rank=rank,
                rank_count=self.rank_count,
                equal=False,
            )
            for rank, memory in enumerate(self.memories)
            if memory.hub is not None
        ]
        if world.conditions.store is not None:
            world.stores = Stores(world, world.conditions.store)
        self.processes = [
            RankProcess(world, number, memory) for number, memory in enumerate(self.memories)
        ]

    def _make_stores(self) -> dict[int, Store]:
        return {}

    def is_rotten(self, arena: MappedArena, slot: int) -> bool:
        """Whether the bytes of a slot that a store has mapped changed by themselves."""
        return (self.parts.index(arena.part), HUB, slot) in self.rotten

    def is_stored(self, job: Job) -> bool:
        """Whether a store process carries a copy out."""
        return job.source in self.stored or job.target in self.stored

    def _salt(self) -> int:
        ledger = self._runtime.books.ledger
        return life_salt(ledger.incarnation, ledger.epoch)

    @property
    def well(self) -> bool:
        """Whether nothing goes wrong any more, or ever did."""
        return self._well

    def pause(self, rank: int) -> float:
        """How long a rank takes to notice that there is something to do."""
        return self._pause(rank)

    # ---------------------------------------------------------------- what the cache asks for

    def start(self, copy: Copy) -> None:
        """A copy was asked for; plans will bring it to the ranks."""
        if copy.operation in self.open:
            raise Violation("operations", f"{copy.operation} was started twice")
        if self.lost:
            raise Violation(
                "liveness", f"{copy.operation} was started though rank {self.lost} is lost"
            )
        if {copy.source, copy.target} & self.off:
            raise Violation("liveness", f"{copy.operation} was started in a tier that is off")
        job = RuntimeJob(copy, self.rank_count)
        if not self.is_stored(job):
            # A rank that is gone will never touch anything, though nobody has noticed yet.
            job.left -= {process.number for process in self.processes if not process.alive}
        self.started += 1
        self.claims.enter(job, managed=self._managed)
        self.open[job.id] = job

    def abandon(self, effect: Abandon) -> None:
        """Nobody wants a copy any more; plans will tell the ranks."""
        job = self.open.get(effect.operation)
        if job is None:
            raise Violation("operations", f"{effect.operation} was abandoned after its end")
        job.abandoned = True

    def check_quiet_copies_are_closed(self) -> None:
        """A copy on which every rank was heard has ended."""
        for job in self.open.values():
            assert isinstance(job, RuntimeJob)
            if not job.unheard:
                raise Violation("operations", f"{job}: all have reported, it did not end")

    # ---------------------------------------------------------------- what the owner hears

    def hear(self, report: CopyReport) -> None:
        """The owner is about to act on a report: it must be true."""
        job = self.open.get(report.operation)
        if job is None or report.rank not in self._unheard(job):
            self.late_reports += 1
            return
        if self.is_stored(job):
            self._runtime.hear_store(report)
            job.left.discard(report.rank)
        elif self._runtime.ways.way is Way.HERE:
            job.left.discard(report.rank)
        if report.rank in job.left:
            raise Violation("reuse", f"{job}: rank {report.rank} is believed to be through")
        self._unheard(job).discard(report.rank)
        if job.id.epoch < self._world.epoch:
            self._world.note("report from before a reset")
        self._check_faults(job, report)
        self._count_faults(job, report)
        self._forget_rot(job, report.rank)
        self.corrupt_now = {job.keys[position] for position in job.corrupt | job.missing}
        if job.purpose is Purpose.DEMOTE:
            everything = job.ended or report.failure
            positions = range(len(job.keys)) if everything else job.faulty
            self.undemoted_now = {job.keys[position] for position in positions} - self.corrupt_now

    def forget_report(self) -> None:
        """The report was handled."""
        self.corrupt_now, self.undemoted_now = set(), set()

    def lose(self, rank: int) -> None:
        """The owner counts a rank as lost."""
        self.lost.add(rank)
        self.dead.add(rank)
        for job in self._of_ranks():
            job.left.discard(rank)
            self._unheard(job).discard(rank)

    def regain(self, rank: int) -> None:
        """The owner counts on a rank again."""
        self.lost.discard(rank)
        self.dead.discard(rank)

    # ---------------------------------------------------------------- what ranks do

    def finished(self, process: RankProcess, report: RankReport) -> None:
        """A rank is through with copies, though the owner has not heard of it yet."""
        for moved in report.moved:
            job = self.open.get(moved.operation)
            if job is None or process is not self.processes[process.number]:
                continue
            job.left.discard(process.number)
            if job.ended:
                self._world.note("copy goes on after it was given up")

    def process_gone(self, rank: int, why: str) -> None:
        """A process has ended: it touches nothing any more, and its device memory is gone."""
        self._world.tell("rank %d is gone: %s", rank, why)
        self.dead.add(rank)
        self.wipe(rank, DEVICE)
        for job in self._of_ranks():
            job.left.discard(rank)
        self._runtime.process_gone(rank)

    def revive(self, rank: int) -> RankProcess:
        """A rank starts anew; the bytes below the device may have outlived its process."""
        self.processes[rank].kill("it is started anew")
        memory = self.memories[rank]
        self.wipe(rank, DEVICE)
        for index in range(len(memory.lower)):
            if index + HUB in self.stored:
                continue
            if self._rng.random() >= self._runtime.ways.keep:
                memory.renew(index)
                self.wipe(rank, index + 1)
                self._world.note("rank comes back without a tier")
        self.processes[rank] = RankProcess(self._runtime, rank, memory, self._draw_lacking(rank))
        return self.processes[rank]

    def _draw_lacking(self, rank: int) -> frozenset[int]:
        """The tiers that a machine does not give a rank that starts there."""
        lack = 0.0 if self._well else self._runtime.ways.lack
        memory = self.memories[rank]
        lower = range(HUB, HUB + len(memory.lower))
        lacking = [tier for tier in lower if tier not in self.stored and self._rng.random() < lack]
        for tier in lacking:
            memory.renew(tier - HUB)
            self.wipe(rank, tier)
            self._world.note("rank comes back with a tier off")
        return frozenset(lacking)

    def _of_ranks(self) -> list[Job]:
        """Copies that ranks carry out; a store goes on without them."""
        return [job for job in self.open.values() if not self.is_stored(job)]

    def check_block(self, tier: int, slot: int, key: Key) -> None:
        """A block that a store is said to have was saved once, by somebody, for every rank."""
        stores = self._runtime.stores
        if tier not in self.stored or stores is None:
            super().check_block(tier, slot, key)
            return
        for rank, part in enumerate(self.parts):
            if (part, key) not in stores.ever:
                raise Violation("store", f"{key.hex()[:4]} was never saved on rank {rank}")

    def _unheard(self, job: Job) -> set[int]:
        assert isinstance(job, RuntimeJob)
        return job.unheard

    def _check_faults(self, job: Job, report: CopyReport) -> None:
        """What a rank calls corrupt was spoilt behind everybody's back."""
        for position, fault in report.faults:
            if fault is BlockFault.CORRUPT and not self.is_stored(job):
                self._check_explained(job, report.rank, position)

    def _forget_rot(self, job: Job, rank: int) -> None:
        """What was overwritten with the right bytes is not rotten any more."""
        for position, slot in enumerate(job.targets[0]):
            place = (rank, job.target, slot)
            if (
                place in self.rotten
                and self.memory[rank][job.target][slot] == self._right[job.keys[position]]
            ):
                self.rotten.discard(place)
