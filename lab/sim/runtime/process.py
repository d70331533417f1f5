"""The process of one rank: a production `Rank`, and the turns it takes when something arrives.

A turn is what a rank does between two waits: copy a little, report. Plans and reports travel with
the engine's own messages, which may overtake each other, come twice, or not at all.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.sim.runtime.conditions import Way
from lab.sim.runtime.memory import ALGORITHM, RankMemory
from penstock.cache.settings import HUB
from penstock.errors import PeerError
from penstock.runtime.copy_executor import CopyExecutor
from penstock.runtime.messages import RankFacts, TierFacts, decode_plan, decode_report
from penstock.runtime.rank import Rank
from penstock.store.process.messages import arena_name
from penstock.tiers.host import HostTier
from penstock.vocabulary.form import Form

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.sim.runtime.world import RuntimeWorld
    from penstock.machine.effects import Copy


class Post:
    """The engine's own messages, to and from one life of a rank."""

    def __init__(self, world: RuntimeWorld) -> None:
        self._world = world
        self._last_at = 0.0

    def send(self, deliver: Callable[[bytes], None], message: bytes, *, in_order: bool) -> bool:
        """Sends a message, which arrives once, mostly; False if it is lost."""
        world, ways = self._world, self._world.ways
        if not world.ranks.well and world.rng.random() < ways.lose:
            world.note("message lost")
            return False
        pause = world.rng.random() * 2 * world.delay_s
        if in_order:
            self._last_at = max(self._last_at, world.now + pause)
            pause = self._last_at - world.now
        world.after(pause, deliver, message)
        if not world.ranks.well and world.rng.random() < ways.repeat:
            world.note("message twice")
            world.after(pause + world.rng.random() * 4 * world.delay_s, deliver, message)
        return True


class WatchedExecutor(CopyExecutor):
    """The copies of one life of a rank: none that an earlier life was told to make."""

    born = 0
    """Operations up to this number are not its affair: the owner has given up on them here."""

    def submit(self, copy: Copy) -> None:
        """Takes a copy in, unless its slots may be somebody else's by now."""
        if copy.operation.sequence <= self.born:
            raise Violation("reuse", f"a rank copies for {copy.operation}, from before its time")
        super().submit(copy)


class RankProcess:
    """One life of a rank."""

    def __init__(
        self,
        world: RuntimeWorld,
        number: int,
        memory: RankMemory,
        lacking: frozenset[int] = frozenset(),
    ) -> None:
        self.number = number
        self.lacking = lacking
        """The tiers, by index, that its machine did not give it."""
        self.alive = True
        self.misses_a_plan = False
        """Whether a plan to it was lost, which it will notice with the next one."""
        self.post = Post(world)
        lower = [
            None if tier in lacking else store for tier, store in enumerate(memory.lower, start=HUB)
        ]
        if memory.hub is not None and HUB not in lacking:
            # Mapped by each process for itself: what one gives back, the next has.
            fd, slot_count = memory.hub.arena.fd, memory.hub.slot_count
            lower[0] = HostTier.attach(fd, memory.layout, slot_count)
        self._hub = lower[0] if lower else None
        self.executor = WatchedExecutor([memory.device, *lower], ALGORITHM)
        self.executor.born = world.books.ledger.started
        offer = None
        if world.stores is not None and HUB not in lacking:
            offer = world.stores.offer(self, self._hub)
        self.rank = Rank(
            self.executor, _facts(world, number, memory, lacking), arenas={}, offer=offer
        )
        self._offer_at = math.inf
        self.last_report: bytes | None = None
        self._world = world
        self._block_bytes = memory.layout.block_bytes
        self._reports: deque[bytes] = deque()
        self._woken = False
        if offer is not None and world.ways.way is not Way.HERE:
            world.after(0.0, self._ring)

    @property
    def facts(self) -> RankFacts:
        """What it tells the owner."""
        return self.rank.facts

    def wake(self) -> None:
        """Something has arrived, or is left to do: its next turn comes in a while."""
        if self.alive and not self._woken:
            self._woken = True
            self._world.after(self._world.ranks.pause(self.number), self._turn)

    def take(self, plan: bytes) -> None:
        """A plan arrives with a message of the engine."""
        if not self.alive:
            return
        if decode_plan(plan).asked:
            self._world.note("rank is asked about what it should have told")
        try:
            self.rank.take(plan)
        except PeerError:
            # A plan before it was lost: the rank says so, and its process ends.
            self._world.note("rank misses a plan")
            self.end("it missed a plan")
            return
        self.wake()

    def end(self, why: str) -> None:
        """The process ends in good order: what it has begun is cut short."""
        if self.alive:
            self.rank.close()
            self.kill(why)

    def kill(self, why: str) -> None:
        """The process is gone, from one moment to the next."""
        if self.alive:
            self.alive = False
            if self.rank.offer is not None:
                self.rank.offer.close()
            if isinstance(self._hub, HostTier):
                self._hub.close()
            self._world.ranks.process_gone(self.number, why)

    def _turn(self) -> None:
        self._woken = False
        if not self.alive:
            return
        report = self.rank.step(budget_bytes=self._world.step_blocks * self._block_bytes)
        if report is not None:
            self._world.ranks.finished(self, decode_report(report))
            self._reports.append(report)
            self.last_report = report
        self._post_reports()
        if self.executor.busy:
            self.wake()
        self._poll_in_time()

    def _poll_in_time(self) -> None:
        """A rank whose hub is not mapped yet tries again."""
        offer = self.rank.offer
        if offer is not None and offer.alarm is not None and offer.alarm < self._offer_at:
            self._offer_at = offer.alarm
            self._world.after(max(0.0, offer.alarm - self._world.now), self._ring)

    def _ring(self) -> None:
        self._offer_at = math.inf
        self.wake()

    def _post_reports(self) -> None:
        world = self._world
        while self._reports:
            report = self._reports.popleft()
            if not self.post.send(world.hear, report, in_order=False):
                world.note("report lost")


def _memory_name(memory: RankMemory, number: int, tier: int) -> str:
    if tier == HUB and memory.hub is not None:
        return arena_name(memory.hub.arena.fd)
    return f"{number}.{memory.epochs[tier - HUB]}"


def _facts(
    world: RuntimeWorld, number: int, memory: RankMemory, lacking: frozenset[int]
) -> RankFacts:
    layout = memory.layout
    return RankFacts(
        rank=number,
        life=world.rng.getrandbits(64),
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        cell_count=len(layout.cells),
        device_slots=tuple(group.block_count for group in layout.groups),
        tiers=tuple(
            TierFacts(
                name=tier.name,
                slot_count=tier.slot_count,
                memory="" if index in lacking else _memory_name(memory, number, index),
                off="no memory" if index in lacking else "",
            )
            for index, tier in enumerate(world.conditions.settings.tiers, start=HUB)
        ),
        algorithm=ALGORITHM.value,
        form=Form(layout=layout, checksum=ALGORITHM).fingerprint,
    )
