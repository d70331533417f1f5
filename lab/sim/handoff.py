"""A world of the scenario `handoff`: two engines with up to eight ranks each, from one seed.

    HandoffSimulation(seed).run()

The parties are the shipped machines; around them are drivers, networks and engines in which
everything takes its time and much goes wrong.

The one rule that must not break: nothing here depends on anything but the seed.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING

from lab.sim.checkers import SimulationError
from lab.sim.handoff_drivers import Drivers
from lab.sim.handoff_ends import check_at_rest
from lab.sim.handoff_engines import Engines
from lab.sim.handoff_network import Network
from lab.sim.handoff_storm import HandoffStorm
from lab.sim.handoff_weather import draw_handoff_weather
from lab.worlds import deeds as do
from lab.worlds.casting import actor_of
from lab.worlds.decode import DecodeRankActor
from lab.worlds.prefill import PrefillRankActor
from lab.worlds.scene import DECODE, PREFILL
from lab.worlds.schedulers import DecodeSchedulerActor, PrefillSchedulerActor
from lab.worlds.telling import in_short
from penstock.handoff.protocol import effects as ef

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.worlds.casting import AnyActor
    from penstock.handoff.protocol.messages import AnyMessage

_LOOP_MAX = 60_000
"""No world needs so many steps; one that does is stuck."""

_SLOW = 10.0


class HandoffSimulation:
    """One seed's world."""

    def __init__(self, seed: int, *, teller: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.weather = draw_handoff_weather(self.rng)
        self.scene = self.weather.scene
        self.now = 0.0
        self.events: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._teller = teller
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._entered = 0
        self.actors: dict[str, AnyActor] = {
            name: actor_of(self.scene, name) for name in self.scene.names
        }
        self._alarms: dict[str, float] = {}
        """For each party, when it will be woken next."""
        self._down: set[str] = set()
        self.network = Network(self)
        self.drivers = Drivers(self)
        self.engines = Engines(self)
        self._storm = HandoffStorm(self)

    def run(self) -> None:
        """Lives the world to its end.

        Raises:
            Violation: a promise was broken by what a party did.
            SimulationError: one was broken by what nobody did.
        """
        if self._teller is not None:
            self._teller(f"{self.weather}")
        for rank in self.weather.slow:
            del rank
            self.note("slow rank")
        self.engines.begin()
        self._storm.begin()
        for _ in range(_LOOP_MAX):
            if not self._agenda:
                check_at_rest(self)
                return
            self.now, _, action, arguments = heappop(self._agenda)
            action(*arguments)
        raise SimulationError("liveness", "the world does not come to rest")

    # ---------------------------------------------------------------- for everybody in it

    def give(self, name: str, deed: do.Deed) -> None:
        """Lets something happen to a party, and carries on with what it asks for."""
        actor = self.actors[name]
        kind = type(deed).__name__
        if isinstance(deed, do.Receive):
            kind = f"hears {type(deed.message).__name__}"
        self.events[kind] += 1
        if self._teller is not None:
            self._teller(f"{self.now:9.3f}  {name} {kind} {in_short(deed)}")
        self._carry_on(actor, actor.act(deed, self.now))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Puts something on the agenda."""
        self._entered += 1
        heappush(self._agenda, (self.now + delay_s, self._entered, action, arguments))

    def note(self, fault: str) -> None:
        """Counts a fault."""
        self.faults[fault] += 1

    def tell(self, line: str, *arguments: object) -> None:
        """Tells whoever listens about something that no party sees."""
        if self._teller is not None:
            self._teller(f"{self.now:9.3f}  · {line % arguments}")

    def slowness(self, name: str) -> float:
        """How much longer than usual everything takes for a rank."""
        return _SLOW if name in self.weather.slow else 1.0

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

    # ---------------------------------------------------------------- what follows from a deed

    def _carry_on(self, actor: AnyActor, said: tuple[AnyMessage, ...]) -> None:
        asked = actor.asked
        if self._teller is not None:
            for message in said:
                self._teller(f"{'':9}    → {message.target.name}: {in_short(message)}")
            for effect in asked:
                self._teller(f"{'':9}    → {effect}")
        for message in said:
            self.network.send(message)
        self._set_alarm(actor)
        for effect in asked:
            if isinstance(effect, ef.HandoffEnded):
                ended = (
                    self.engines.prefill_ended
                    if actor.name == PREFILL
                    else self.engines.decode_ended
                )
                ended(effect)
            else:
                self.drivers.carry_out(actor, effect)

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
        self.events["Timer"] += 1
        if self._teller is not None:
            due = [timer for timer, at in actor.machine.timers.items() if at <= self.now]
            self._teller(f"{self.now:9.3f}  {name} timers {due}")
        self._carry_on(actor, actor.tick(self.now))
