"""What happens to the machines of a simulated world, at times of its seed.

| fault        | what happens                                                                     |
|--------------|----------------------------------------------------------------------------------|
| `deaths`     | 1 % of the machines die in an hour, at least one; back, empty, after 60 s  |
| `rack`       | a twentieth of the machines dies at once                                          |
| `partition`  | the network between such a rack and the router is gone for 60 s                   |
| `stale`      | a fifth of the engines say nothing of their caches for a third of the time        |
| `slow-store` | host memory and peers are `SLOW` times slower for a third of the time             |
| `scale`      | a tenth more engines, empty; later a tenth of all leaves                          |
| `roles`      | a quarter computes prompts for the others for a third of the time                 |
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from lab.routing.engine import SimulatedEngine
    from lab.routing.world import RoutingWorld

DEATHS_AN_HOUR = 0.01
BACK_S = 60.0
PARTITION_S = 60.0
SLOW = 20.0


class Fault(StrEnum):
    """A kind of failure or change."""

    DEATHS = "deaths"
    RACK = "rack"
    PARTITION = "partition"
    STALE = "stale"
    SLOW_STORE = "slow-store"
    SCALE = "scale"
    ROLES = "roles"


class Faults:
    """Puts the faults of a world on its clock."""

    def __init__(self, world: RoutingWorld, kinds: frozenset[Fault], rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        begin: dict[Fault, Callable[[], object]] = {
            Fault.DEATHS: self._deaths,
            Fault.RACK: lambda: self._at(0.3, self._rack_dies),
            Fault.PARTITION: lambda: self._at(0.3, self._part),
            Fault.STALE: lambda: self._at(0.3, self._go_stale),
            Fault.SLOW_STORE: lambda: self._at(0.3, self._slow_down),
            Fault.SCALE: self._scale,
            Fault.ROLES: lambda: self._at(0.3, self._change_roles),
        }
        for kind in Fault:
            if kind in kinds:
                begin[kind]()

    def _at(self, share: float, action: Callable[..., object], *arguments: object) -> None:
        """After a share of the time in which requests come."""
        self._world.after(share * self._world.seconds, action, *arguments)

    def _deaths(self) -> None:
        engines, seconds = self._world.engines, self._world.seconds
        expected = DEATHS_AN_HOUR * len(engines) * seconds / 3600
        for engine in self._rng.sample(engines, max(len(engines) > 1, round(expected))):
            self._at(self._rng.uniform(0.1, 0.9), self._die, engine)

    def _die(self, engine: SimulatedEngine) -> None:
        if engine.up and not engine.cut:
            engine.die()
            self._world.after(BACK_S, engine.start_again)

    def _some_rack(self) -> list[SimulatedEngine]:
        rack = self._rng.choice(self._world.engines).rack
        return [each for each in self._world.engines if each.rack == rack]

    def _rack_dies(self) -> None:
        for engine in self._some_rack():
            self._die(engine)

    def _part(self) -> None:
        for engine in self._some_rack():
            if engine.up:
                engine.part()
                self._world.after(PARTITION_S, engine.heal)

    def _go_stale(self) -> None:
        engines = self._world.engines
        for engine in self._rng.sample(engines, -(-len(engines) // 5)):
            engine.loses_events = True
            self._at(1 / 3, engine.speak)

    def _slow_down(self) -> None:
        self._world.slow_store = SLOW
        self._at(1 / 3, setattr, self._world, "slow_store", 1.0)

    def _scale(self) -> None:
        count = -(-len(self._world.engines) // 10)
        self._at(0.3, self._world.add_engines, count)
        self._at(0.7, self._shrink, count)

    def _shrink(self, count: int) -> None:
        there = [each for each in self._world.engines if each.up]
        for engine in self._rng.sample(there, min(count, len(there) - 1)):
            engine.leave()

    def _change_roles(self) -> None:
        links = self._world.router.ready
        changed = self._rng.sample(links, len(links) // 4)
        for link in links:
            self._world.router.set_role(link, "prefill" if link in changed else "decode")
        self._at(1 / 3, self._restore_roles)

    def _restore_roles(self) -> None:
        for link in self._world.router.ready:
            self._world.router.set_role(link, "both")
