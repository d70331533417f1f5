"""The driver of one engine's cache: the only place where the machine meets the world.

`handle` gives the machine an event with the time and carries out what it asks for; `step`
lets the movers work a little and tells the machine what they finished. Both return at once.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from penstock.cache.settings import DEVICE, HUB
from penstock.machine import effects as ef
from penstock.machine.audit import audit
from penstock.machine.events import Event, Report, Tick
from penstock.machine.machine import CacheMachine
from penstock.movers.table import mover_between

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cache.settings import CacheSettings
    from penstock.movers.base import Mover
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.ids import OperationId

STEP_BUDGET_BYTES = 64 << 20
"""A step copies at most so much: about ten milliseconds of one core's memory bandwidth."""


class Driver:
    """One machine, its tiers and its movers, in one process and one thread."""

    def __init__(
        self,
        settings: CacheSettings,
        stores: Sequence[SlotStore],
        algorithm: Algorithm,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine = CacheMachine(settings, incarnation=secrets.randbits(64))
        self._clock = clock
        self._movers = _connect(stores, algorithm)
        self._mover_of: dict[OperationId, Mover] = {}

    def deadline(self, timeout_s: float | None) -> float | None:
        """The time so many seconds from now, on the machine's clock."""
        if timeout_s is None:
            return None
        if not timeout_s > 0:
            raise ValueError(f"timeout is {timeout_s} seconds, must be more than 0")
        return self._clock() + timeout_s

    def handle(self, event: Event) -> list[ef.Effect]:
        """Gives the machine an event; returns the effects that are for the engine."""
        return self._carry_out(self.machine.handle(event, self._clock()))

    def step(self, *, budget_bytes: int = STEP_BUDGET_BYTES) -> list[ef.Effect]:
        """Moves blocks for at most `budget_bytes`; returns the effects for the engine.

        Every mover gets on by a block at least, whatever the budget: else a steady stream of
        loads would leave saves, and the slots of abandoned copies, waiting for ever.
        """
        told = self.handle(Tick())
        for mover in self._movers.values():
            if not mover.busy:
                continue
            moved, spent = mover.poll(budget_bytes=max(0, budget_bytes))
            budget_bytes -= spent
            for ended in moved:
                del self._mover_of[ended.operation]
                report = Report(
                    operation=ended.operation,
                    rank=0,
                    faults=ended.faults,
                    failure=ended.failure,
                )
                told += self.handle(report)
        return told

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self._mover_of)

    def audit(self) -> None:
        """Checks every invariant of the whole state."""
        audit(self.machine.books)

    def _carry_out(self, effects: list[ef.Effect]) -> list[ef.Effect]:
        told: list[ef.Effect] = []
        for effect in effects:
            match effect:
                case ef.Copy():
                    mover = self._movers[effect.source, effect.target]
                    self._mover_of[effect.operation] = mover
                    mover.submit(effect)
                case ef.Abandon():
                    mover_of = self._mover_of.get(effect.operation)
                    if mover_of is not None:
                        mover_of.abandon(effect.operation)
                case ef.Drop():
                    pass  # Tiers in memory keep no headers that would have to be struck out.
                case _:
                    told.append(effect)
        return told


def _connect(stores: Sequence[SlotStore], algorithm: Algorithm) -> dict[tuple[int, int], Mover]:
    """Movers for every pair of tiers that exchange blocks: all of them with the hub."""
    movers: dict[tuple[int, int], Mover] = {}
    # Loads come first: a request waits for them.
    pairs = [(HUB, DEVICE), (DEVICE, DEVICE)]
    lower = range(HUB + 1, len(stores))
    pairs += [(tier, HUB) for tier in lower]
    pairs += [(DEVICE, HUB), *((HUB, tier) for tier in lower)]
    for source, target in pairs:
        if max(source, target) < len(stores):
            movers[source, target] = mover_between(stores[source], stores[target], algorithm)
    return movers
