"""A world around the production runtime, from one seed.

    RuntimeWorld(seed).run()

Real here: driver, links, plans and reports as bytes, ranks, copy executors, movers, tiers and sums.
Simulated: the clock, the engine's messages, processes and their deaths. Engines, texts and
checkers are those of the cache's worlds; every event of the machine is checked in the same way.

The one rule that must not break: nothing here depends on anything but the seed.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.sim.conditions import without_stores
from lab.sim.runtime.conditions import Way, draw_runtime_conditions
from lab.sim.runtime.faults import RuntimeFaultInjector
from lab.sim.runtime.neighbour import Neighbour
from lab.sim.runtime.ranks import RuntimeRanks
from lab.sim.runtime.stores import SimLink
from lab.sim.turns import quiet_logs
from lab.sim.world import World
from penstock.config import Config, ModelSettings, TierKind
from penstock.errors import UnavailableError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.machine import CacheMachine
from penstock.machine.writes import CAUSE
from penstock.runtime.base import Driven
from penstock.runtime.cache import Cache
from penstock.runtime.driver import Driver
from penstock.runtime.messages import agree, decode_report
from penstock.runtime.offload import Offload
from penstock.runtime.rank_links import LocalLink, MessageLinks
from penstock.runtime.stored_tiers import StoredTiers
from penstock.store.process.client import STARTING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lab.sim.conditions import Conditions
    from lab.sim.runtime.stores import Stores
    from penstock.cache.operations import Operation
    from penstock.machine.effects import Effect
    from penstock.machine.events import Event
    from penstock.runtime.messages import RankFacts
    from penstock.vocabulary.keys import OperationId


class WatchedMachine(CacheMachine):
    """The machine of a driver; its world looks at every event, whoever sent it."""

    def __init__(self, world: RuntimeWorld) -> None:
        super().__init__(world.conditions.settings, incarnation=world.incarnation)
        self._world = world
        self.last: list[Effect] = []
        """The effects of the last event, the drivers' too."""

    def handle(self, event: Event, now: float) -> list[Effect]:  # noqa: ARG002 - the same time
        """Handles an event under the eyes of the world."""
        self.last = self._world.observe(event, super().handle)
        return self.last


class WatchedDriver(Driver):
    """The driver of the product; while it waits, the world goes on."""

    world: RuntimeWorld

    def of_ranks(self) -> Mapping[OperationId, Operation]:
        """The operations that ranks report on."""
        return self._of_ranks()

    def _wait_for_ranks(self, deadline: float, descriptors: Sequence[int]) -> bool:
        if self.stored is None:
            return super()._wait_for_ranks(deadline, descriptors)
        # Nothing here waits for long: what has arrived is found by the next step.
        wait_s = self.world.ways.owner_s + 1e-3
        return self.world.live_until(lambda: False, min(deadline, self.world.now + wait_s))

    def _await_resets(self, deadline: float, deliver: Callable[[list[Effect]], None]) -> None:
        stored = self.stored
        while stored and stored.unconfirmed_resets and self.world.now < deadline:
            deliver(self._exchange_with_store(stored))
            self._wait_for_ranks(deadline, ())


class RuntimeWorld(World):
    """One seed's world."""

    ranks: RuntimeRanks
    machine: WatchedMachine

    def __init__(
        self, seed: int, *, audited: bool = True, log: Callable[[str], None] | None = None
    ) -> None:
        self.closing = False
        self.stores: Stores | None = None
        self.neighbour: Neighbour | None = None
        self._owner_called = False
        self._due_at = math.inf
        super().__init__(seed, audited=audited, log=log)
        self._open()

    def run(self) -> None:
        """Lives the world to its end; losses that it makes itself are not worth a log line."""
        names = ("runtime.status", "runtime.rank_links", "runtime.driver", "store")
        with quiet_logs(*names):
            try:
                super().run()
            finally:
                self._give_back()

    def _give_back(self) -> None:
        """Gives back descriptors and shared memory."""
        if self.stores is None:
            return
        if self.neighbour is not None:
            self.neighbour.close()
        self.driver.stored.close(0.0)  # type: ignore[union-attr]
        for process in self.ranks.processes:
            process.kill("the world is over")
        self.stores.close()
        for memory in self.ranks.memories:
            memory.close()

    def _draw_conditions(self) -> Conditions:
        conditions, self.ways = draw_runtime_conditions(self.rng)
        self.delay_s = self.ways.delay_s
        return conditions

    def _make_machine(self) -> CacheMachine:
        return WatchedMachine(self)

    def _make_ranks(self) -> RuntimeRanks:
        return RuntimeRanks(self)

    def _make_injector(self) -> RuntimeFaultInjector:
        self.injector = RuntimeFaultInjector(self)
        return self.injector

    def _open(self) -> None:
        """The owner meets its ranks, as `penstock.open` with `ranks` does."""
        config = Config(
            model=ModelSettings(name="simulated"),
            cache=without_stores(self.conditions).settings,
            tier_kinds=tuple(TierKind(name="memory") for _ in self.conditions.settings.tiers),
        )
        facts = [process.facts for process in self.ranks.processes]
        agreement = agree(config, facts)
        here = self.ways.way is Way.HERE
        links = (
            LocalLink(self.ranks.processes[0].executor)
            if here
            else MessageLinks(facts, self.incarnation)
        )
        self.driver = WatchedDriver(
            self.conditions.settings,
            links,
            incarnation=self.incarnation,
            stored=None if self.stores is None else self._open_stores(self.stores, facts),
            clock=lambda: self.now,
        )
        self.driver.world = self
        self.driver.machine = self.machine
        elsewhere = () if here else facts
        driven = Driven(config, agreement, self.driver, elsewhere)
        self.facade: Cache | Offload
        self.facade = Cache(driven) if self.conditions.managed else Offload(driven)
        if self.driver.stored is not None:
            for tier in self.driver.stored.tiers:
                self.driver.switch_tier_off(tier, STARTING)
            self.neighbour = Neighbour(self)

    def _open_stores(self, stores: Stores, facts: Sequence[RankFacts]) -> StoredTiers:
        link = SimLink(
            stores,
            life=self.incarnation,
            arenas=[each.tiers[0].memory for each in facts],
            arrived=self.call_owner,
        )
        stores.links[self.incarnation] = link
        here = self.ways.way is Way.HERE
        offer = self.ranks.processes[0].rank.offer if here else None
        return StoredTiers(link, tuple(stores.tier_names), offer=offer)

    # ---------------------------------------------------------------- for everybody in it

    @property
    def closed(self) -> bool:
        """Whether the cache takes no events any more."""
        return self.closing

    @property
    def step_blocks(self) -> int:
        """A rank copies so many blocks a turn."""
        return 64 if self.ranks.well else self.ways.step_blocks

    def send(self, event: Event) -> list[Effect]:
        """The engine tells the owner something; everything is checked on the way."""
        if isinstance(event, ev.Prefetch):
            self.driver.prefetch(event)
        elif isinstance(event, ev.Acquire):
            self.driver.acquire(event)
        else:
            self.driver.handle(event)
        return self.machine.last

    def hear_store(self, report: ev.CopyReport) -> None:
        """The owner believes that the store is through with a rank's part of a copy."""
        assert self.stores is not None
        self.stores.job_reported(self.stores.links[self.incarnation], report.operation, report.rank)

    def hear(self, report: bytes) -> None:
        """A message with a report reaches the owner."""
        if self.closing:
            return
        reported = decode_report(report)
        if reported.life != self.ranks.processes[reported.rank].facts.life:
            self.note("report from an earlier life")
        self.facade.ranks.receive(report)
        self.call_owner()

    def process_gone(self, rank: int) -> None:
        """A process has ended, for whatever reason."""
        self.injector.gone(rank)

    def call_owner(self) -> None:
        """There is something for the owner: its next turn comes soon."""
        if not self._owner_called and not self.closing:
            self._owner_called = True
            self.after(self.rng.random() * self.ways.owner_s, self._owner_turn)

    def live_until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Lets time pass until something is so, or until a deadline: then False."""
        while not done():
            if not self._agenda or self._agenda[0][0] > deadline:
                self.now = max(self.now, deadline)
                return False
            self._advance()
        return True

    # ---------------------------------------------------------------- the owner

    def _owner_turn(self) -> None:
        """What an engine does for its cache once an iteration."""
        self._owner_called = False
        if self.closing:
            return
        self.facade.step()
        self._post_plans()
        if self.ways.way is Way.HERE and self.facade.busy:
            self.call_owner()
        self._ask_in_time()

    def _ask_in_time(self) -> None:
        """An owner with nothing to do wakes when its ranks are to be asked something."""
        due = math.inf
        if self.driver.missing_reports is not None:
            due = self.driver.missing_reports.next_due(self.driver.of_ranks())
        if self.driver.stored is not None:
            due = min(due, self.driver.stored.next_due)
        if due < self._due_at:
            self._due_at = due
            self.after(max(0.0, due - self.now), self._wake_owner)

    def _wake_owner(self) -> None:
        self._due_at = math.inf
        self.call_owner()

    def _post_plans(self) -> None:
        if self.ways.way is not Way.MESSAGES:
            return
        while (plan := self.facade.ranks.take_plan()) is not None:
            for process in self.ranks.processes:
                if not process.post.send(process.take, plan, in_order=True):
                    self.note("plan lost")
                    process.misses_a_plan = True

    def _take_in(self, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, ev.CopyReport):
            self.ranks.hear(event)
        elif isinstance(event, ev.RankLost):
            if event.rank not in self.ranks.lost:
                self.injector.bury(event.rank)
            self.ranks.lose(event.rank)
            self.engine.rank_died()
        elif isinstance(event, ev.RankBack):
            self.ranks.regain(event.rank)
        elif isinstance(event, ev.TierOff):
            self.ranks.off.add(event.tier)
        elif isinstance(event, ev.TierOn):
            self.ranks.off.discard(event.tier)
        super()._take_in(event, effects)
        self.ranks.forget_report()
        if isinstance(event, ev.Reset | ev.Prefetch) and self.stores is not None:
            self.call_owner()
        if any(isinstance(effect, ef.Copy | ef.Abandon) for effect in effects):
            self.call_owner()
        if any(isinstance(effect, ef.Copy) and effect.cause == CAUSE for effect in effects):
            self.note("blocks are written behind")

    # ---------------------------------------------------------------- the end

    def _end(self) -> None:
        if not self.ways.shutdown:
            super()._end()
            if self.stores is not None:
                self.stores.check_kept()
            return
        self.tell("the engine shuts down")
        self.note("shutdown")
        self._shut_down()
        self.run_until_quiet()
        self._check_closed()

    def _shut_down(self) -> None:
        """As an engine that was asked to stop: drain, then close."""
        timeout_s = self.ways.drain_s
        if self.ways.way is Way.MESSAGES:
            self.facade.drain()
            self.live_until(lambda: not self.facade.busy, self.now + timeout_s)
        busy = len(self.machine.operations)
        self.closing, self.timed = True, False
        with warnings.catch_warnings():
            # The end may come while requests run.
            warnings.filterwarnings("ignore", "the cache was closed with open", ResourceWarning)
            drained = self.facade.close(timeout_s)
        if drained.unsettled != len(self.machine.operations):
            raise Violation("drain", f"{drained} of {busy} copies")
        if drained.unsettled:
            self.note("copies unsettled at the end")
        if self.facade.close() != drained:
            raise Violation("refusal", "a second close is not the first one")

    def _check_closed(self) -> None:
        """Every copy was told to end, no rank does anything, and nothing more is taken."""
        for process in self.ranks.processes:
            if process.alive:
                process.end("the owner closed")
                if process.executor.busy:
                    raise Violation("drain", f"rank {process.number} is closed, but copies")
        for job in self.ranks.open.values():
            if not job.ended:
                raise Violation("operations", f"{job} never ended")
        try:
            self.send(ev.Tick())
        except UnavailableError:
            return
        raise Violation("refusal", "a closed cache takes events")
