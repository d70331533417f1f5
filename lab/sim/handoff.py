"""A world of the scenario `handoff`: two engines with up to eight ranks each, from one seed.

    HandoffSimulation(seed).run()

The parties are the shipped machines; around them are drivers, networks and engines in which
everything takes its time and much goes wrong. `HandoffWorld` is these two engines and what is
between them; the scenario `pairs` has several of them on one agenda.

The one rule that must not break: nothing here depends on anything but the seed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from lab.sim.agenda import Agenda
from lab.sim.handoff_conditions import draw_handoff_conditions
from lab.sim.handoff_drivers import Drivers
from lab.sim.handoff_ends import check_at_rest
from lab.sim.handoff_engines import Engines
from lab.sim.handoff_faults import HandoffFaultInjector
from lab.sim.handoff_network import Network
from lab.worlds import actions as do
from lab.worlds.decode import DecodeRankActor
from lab.worlds.descriptions import in_short
from lab.worlds.parties import actor_of
from lab.worlds.prefill import PrefillRankActor
from lab.worlds.scene import DECODE, PREFILL
from lab.worlds.schedulers import DecodeSchedulerActor, PrefillSchedulerActor
from penstock.handoff.protocol import effects as ef

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.sim.handoff_conditions import HandoffConditions
    from lab.worlds.parties import AnyActor
    from penstock.handoff.protocol.messages import AnyMessage

STEP_COUNT_MAX = 60_000
"""No world needs so many steps; one that does is stuck."""

_SLOW = 10.0


@dataclass(slots=True)
class Seen:
    """What was seen in a world, for the campaign's coverage."""

    events: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)


class HandoffWorld:
    """A prefill engine, a decode engine, and what is between them."""

    def __init__(
        self,
        conditions: HandoffConditions,
        rng: Random,
        agenda: Agenda,
        seen: Seen,
        *,
        log: Callable[[str], None] | None = None,
        label: str = "",
    ) -> None:
        self.conditions = conditions
        self.scene = conditions.scene
        self.rng = rng
        self.agenda = agenda
        self.seen = seen
        self._log = log
        self._label = label
        self.actors: dict[str, AnyActor] = {
            name: actor_of(self.scene, name) for name in self.scene.names
        }
        self._alarms: dict[str, float] = {}
        """For each party, when it will be woken next."""
        self._down: set[str] = set()
        self.on_decode_ended: Callable[[ef.HandoffEnded], None] | None = None
        """Who is told of ends on the decode side, beside the engine."""
        self.on_area_opened: Callable[[], None] | None = None
        self.network = Network(self)
        self.drivers = Drivers(self)
        self.engines = Engines(self)
        self.injector = HandoffFaultInjector(self)
        for _ in conditions.slow:
            self.note("slow rank")

    # ---------------------------------------------------------------- for everybody in it

    @property
    def now(self) -> float:
        """The time."""
        return self.agenda.now

    def give(self, name: str, action: do.Action) -> None:
        """Lets something happen to a party, and carries on with what it asks for."""
        actor = self.actors[name]
        kind = type(action).__name__
        if isinstance(action, do.Receive):
            kind = f"hears {type(action.message).__name__}"
        self.seen.events[kind] += 1
        if self._log is not None:
            self._log(f"{self.now:9.3f}  {self._label}{name} {kind} {in_short(action)}")
        self._carry_on(actor, actor.act(action, self.now))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Puts something on the agenda."""
        self.agenda.after(delay_s, action, *arguments)

    def note(self, fault: str) -> None:
        """Counts a fault."""
        self.seen.faults[fault] += 1

    def tell(self, line: str, *arguments: object) -> None:
        """Tells whoever listens about something that no party sees."""
        if self._log is not None:
            self._log(f"{self.now:9.3f}  · {self._label}{line % arguments}")

    def slowness(self, name: str) -> float:
        """How much longer than usual everything takes for a rank."""
        return _SLOW if name in self.conditions.slow else 1.0

    def is_up(self, name: str) -> bool:
        """Whether a party's process runs."""
        return name not in self._down

    def fall(self, name: str) -> None:
        """A process dies."""
        self._down.add(name)

    def rise(self, name: str) -> None:
        """A new process begins to work."""
        self._down.discard(name)
        self._set_alarm(self.actors[name])

    # ---------------------------------------------------------------- parties

    def prefill_rank(self, name: str) -> PrefillRankActor:
        """One of them."""
        actor = self.actors[name]
        assert isinstance(actor, PrefillRankActor)
        return actor

    def decode_rank(self, name: str) -> DecodeRankActor:
        """One of them."""
        actor = self.actors[name]
        assert isinstance(actor, DecodeRankActor)
        return actor

    @property
    def prefill_scheduler(self) -> PrefillSchedulerActor:
        """The only one."""
        actor = self.actors[PREFILL]
        assert isinstance(actor, PrefillSchedulerActor)
        return actor

    @property
    def decode_scheduler(self) -> DecodeSchedulerActor:
        """The only one."""
        actor = self.actors[DECODE]
        assert isinstance(actor, DecodeSchedulerActor)
        return actor

    # ---------------------------------------------------------------- what follows from a action

    def _carry_on(self, actor: AnyActor, said: tuple[AnyMessage, ...]) -> None:
        asked = actor.asked
        if self._log is not None:
            for message in said:
                self._log(f"{'':9}    → {message.target.name}: {in_short(message)}")
            for effect in asked:
                self._log(f"{'':9}    → {effect}")
        for message in said:
            self.network.send(message)
        self._set_alarm(actor)
        for effect in asked:
            if isinstance(effect, ef.HandoffEnded):
                self._end(actor.name, effect)
            else:
                self.drivers.carry_out(actor, effect)
                if isinstance(effect, ef.OpenArea) and self.on_area_opened is not None:
                    self.on_area_opened()

    def _end(self, name: str, ended: ef.HandoffEnded) -> None:
        if name == PREFILL:
            self.engines.prefill_ended(ended)
            return
        self.engines.decode_ended(ended)
        if self.on_decode_ended is not None:
            self.on_decode_ended(ended)

    def _set_alarm(self, actor: AnyActor) -> None:
        deadline = actor.machine.next_deadline()
        if deadline is None:
            return
        alarm = self._alarms.get(actor.name)
        if alarm is None or deadline < alarm:
            self._alarms[actor.name] = deadline
            self.after(max(0.0, deadline - self.now), self._wake, actor.name, deadline)

    def _wake(self, name: str, alarm: float) -> None:
        if self._alarms.get(name) != alarm:
            return  # An earlier alarm took its place.
        del self._alarms[name]
        actor = self.actors[name]
        if not self.is_up(name):
            return
        deadline = actor.machine.next_deadline()
        if deadline is None or deadline > self.now:
            self._set_alarm(actor)
            return
        self.seen.events["Timer"] += 1
        if self._log is not None:
            due = [timer for timer, at in actor.machine.timers.items() if at <= self.now]
            self._log(f"{self.now:9.3f}  {self._label}{name} timers {due}")
        self._carry_on(actor, actor.tick(self.now))


class HandoffSimulation(HandoffWorld):
    """One seed's world."""

    def __init__(self, seed: int, *, log: Callable[[str], None] | None = None) -> None:
        rng = Random(seed)
        conditions = draw_handoff_conditions(rng)
        super().__init__(conditions, rng, Agenda(), Seen(), log=log)
        self.events, self.faults, self.copies = (
            self.seen.events,
            self.seen.faults,
            self.seen.copies,
        )

    def run(self) -> None:
        """Lives the world to its end.

        Raises:
            Violation: a promise was broken.
        """
        if self._log is not None:
            self._log(f"{self.conditions}")
        self.engines.begin()
        self.injector.begin()
        self.agenda.run(step_count_max=STEP_COUNT_MAX)
        check_at_rest(self)
