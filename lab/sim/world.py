"""A world: one cache, its engine, its ranks, its conditions and its clock, all from one seed.

    World(seed).run()

Time is a number, and whatever is going to happen lies on an agenda in the order of time.
After every event the cache is audited and the checkers look at what it said.

The one rule that must not break: nothing here depends on anything but the seed, so that a
seed that fails once fails for ever.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.fixtures.frozen import freeze
from lab.sim.checkers import KvReader, Model, check_drained, check_waiting, check_watermarks
from lab.sim.conditions import Plenty, draw_conditions
from lab.sim.descriptions import describe, describe_conditions
from lab.sim.faults import FaultInjector
from lab.sim.managed import ManagedEngine
from lab.sim.offload import OffloadEngine
from lab.sim.ranks import Ranks
from lab.sim.workload import Library
from penstock.errors import CapacityError, LeaseError, UnavailableError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.machine import CacheMachine
from penstock.machine.writes import is_overdue

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.sim.conditions import Conditions
    from lab.sim.engine import Engine
    from penstock.machine.books import Books

_LOOP_MAX = 20_000
"""No world needs so many steps; one that does is stuck."""

_QUIETING = frozenset({ev.CopyReport, ev.RankLost, ev.TierOff})
"""After these, a copy may have no rank left that could touch its slots."""


class World:
    """One seed's world."""

    def __init__(
        self, seed: int, *, audited: bool = True, log: Callable[[str], None] | None = None
    ) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.conditions = self._draw_conditions()
        self.now = 0.0
        self.epoch = 0
        """How often everything was voided."""
        self.era = 0
        """How often everything was voided, or the weights changed."""
        self.incarnation = self.rng.getrandbits(64)
        self.machine = self._make_machine()
        self.event: ev.Event = ev.Tick()
        """The last event, which may still be being handled."""
        self.events: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.library = Library(self.rng, self.conditions)
        self.model = Model()
        self.timed = self.conditions.timers
        """Whether somebody looks after deadlines between the engine's ticks."""
        self._audited = audited
        self._log = log
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._entered = 0
        self._handled = 0
        self._frozen: tuple[object, ...] | None = None
        self.ranks = self._make_ranks()
        self.engine: Engine = (
            ManagedEngine(self) if self.conditions.managed else OffloadEngine(self)
        )
        self.kv = KvReader(self)
        self._injector = self._make_injector()
        self._reactions: dict[type[ef.Effect], list[Callable[..., None]]] = {
            ef.Copy: [self.ranks.start],
            ef.Abandon: [self.ranks.abandon],
            ef.DropBlocks: [self.ranks.drop],
            ef.Ended: [self.ranks.end],
            ef.Settled: [self.ranks.settle],
        }
        for kind, reaction in self.engine.reactions.items():
            self._reactions.setdefault(kind, []).append(reaction)

    def run(self) -> None:
        """Lives the world to its end.

        Raises:
            Violation: a promise was broken.
            InvariantViolation: the cache's books do not add up.
        """
        if self._log is not None:
            for line in describe_conditions(self.conditions):
                self._log(line)
        self._injector.begin()
        self.after(0.0, self._step)
        steps = 0
        while self._handled < self.conditions.event_budget and steps < _LOOP_MAX:
            self._advance()
            steps += 1
        self._agenda = [entry for entry in self._agenda if entry[2] != self._step]
        self._agenda.sort()
        self._end()

    # ---------------------------------------------------------------- what it is made of

    def _draw_conditions(self) -> Conditions:
        return draw_conditions(self.rng)

    def _make_machine(self) -> CacheMachine:
        return CacheMachine(self.conditions.settings, incarnation=self.incarnation)

    def _make_ranks(self) -> Ranks:
        return Ranks(self)

    def _make_injector(self) -> FaultInjector:
        return FaultInjector(self)

    # ---------------------------------------------------------------- for everybody in it

    @property
    def closed(self) -> bool:
        """Whether the cache takes no events any more."""
        return False

    @property
    def books(self) -> Books:
        """The machine's own state: checkers compare it with what they know."""
        return self.machine._books  # noqa: SLF001

    def send(self, event: ev.Event) -> list[ef.Effect]:
        """Hands an event to the cache, checks everything, and carries out the effects."""
        return self.observe(event, self.machine.handle)

    def observe(
        self, event: ev.Event, handle: Callable[[ev.Event, float], list[ef.Effect]]
    ) -> list[ef.Effect]:
        """Has an event handled, and everybody look at what came of it."""
        self.event = event
        self.events[type(event).__name__] += 1
        self._handled += 1
        if self._log is not None:
            self._log(f"{self.now:9.3f}  {describe(event)}")
        try:
            effects = handle(event, self.now)
        except (CapacityError, LeaseError, UnavailableError, ValueError) as refusal:
            if self._log is not None:
                self._log(f"{'':9}    refused: {refusal}")
            if self._audited:
                self.machine.audit()
            raise
        if self._log is not None:
            for effect in effects:
                self._log(f"{'':9}    → {describe(effect)}")
        self._take_in(event, effects)
        return effects

    def _take_in(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        """Everybody hears what an event brought, and the checkers look at it."""
        if self._audited:
            self.machine.audit()
        for effect in effects:
            for react in self._reactions.get(type(effect), ()):
                react(effect)
        self.kv.follow(event, effects)
        if type(event) in _QUIETING:
            self.ranks.check_quiet_copies_are_closed()
        elif type(event) is ev.Tick:
            check_waiting(self)
            check_watermarks(self, effects)

    def after(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Puts something on the agenda."""
        self._entered += 1
        heappush(self._agenda, (self.now + delay_s, self._entered, action, arguments))

    def note(self, fault: str) -> None:
        """Counts a fault."""
        self.faults[fault] += 1

    def tell(self, line: str, *arguments: object) -> None:
        """Tells whoever listens about something that the cache does not see."""
        if self._log is not None:
            self._log(f"{self.now:9.3f}  · {line % arguments}")

    def watch(self, *, always: bool = False) -> None:
        """Remembers the state of the cache, in case the next event is refused."""
        self._frozen = freeze(self.machine) if always or self.conditions.watchful else None

    def check_unchanged(self) -> None:
        """What was refused has changed nothing."""
        if self._frozen is not None and freeze(self.machine) != self._frozen:
            raise Violation("refusal", "an event was refused, but changed something")

    def run_until_quiet(self) -> None:
        """Lets time pass until nothing is on the agenda."""
        for _ in range(_LOOP_MAX):
            if not self._agenda:
                return
            self._advance()
        raise Violation("liveness", "the world does not come to rest")

    # ---------------------------------------------------------------- time

    def _advance(self) -> None:
        """Lets the next thing happen: a timer of the cache, or what is on the agenda."""
        at = self._agenda[0][0]
        if self.timed:
            deadline = self.machine.next_deadline()
            if deadline is not None and deadline <= at:
                self.now = max(self.now, deadline)
                self.send(ev.Tick())
                return
        _, _, action, arguments = heappop(self._agenda)
        self.now = at
        action(*arguments)

    def _step(self) -> None:
        """A step of the engine, and what else comes with the time it takes."""
        self._injector.strike()
        self.engine.step()
        if self.conditions.plenty is Plenty.BOTTOM:
            self.run_until_quiet()
        self.after(self.rng.random() * 2.0 * self.conditions.step_s, self._step)

    def _end(self) -> None:
        """The engine stops, the conditions clears, everything comes back."""
        self.tell("the engine stops")
        self.engine.stop()
        self.run_until_quiet()
        self._injector.mend()
        self.run_until_quiet()
        self.engine.check_no_one_waits()
        self.engine.finish()
        self.run_until_quiet()
        if self.conditions.recovery:
            self.engine.recover()
            self.run_until_quiet()
        self._step_while_behind()
        check_drained(self)

    def _step_while_behind(self) -> None:
        """Steps of an engine without requests, for as long as the cache says that it needs them."""
        for _ in range(_LOOP_MAX):
            if not is_overdue(self.books):
                return
            self.send(ev.Tick())
            self.run_until_quiet()
        raise Violation("liveness", "what a store missed is never written")
