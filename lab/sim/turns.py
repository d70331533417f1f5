"""Worlds that live by turns: in each one, something is drawn that happens."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def quiet_logs(*names: str) -> Iterator[None]:
    """Losses that a world makes itself are not worth a log line."""
    logs = [logging.getLogger(f"penstock.{name}") for name in names]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


class TurnsWorld:
    """One seed's world: its clock, what it has seen, and who is told of it."""

    def __init__(self, seed: int, log: Callable[[str], None] | None) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.events: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._log = log
        self._actions: list[tuple[float, Callable[[], None]]] = []
        """What may happen, and how often."""

    def draw_action(self, *, within_s: float) -> Callable[[], None]:
        """Time passes; returns what happens next."""
        self.now += self.rng.random() * within_s
        weights, actions = zip(*self._actions, strict=True)
        drawn: Callable[[], None] = self.rng.choices(actions, weights)[0]
        return drawn

    def note(self, fault: str) -> None:
        """Counts a fault."""
        self.faults[fault] += 1
        self.tell(fault)

    def tell(self, line: str) -> None:
        """Tells whoever listens."""
        if self._log is not None:
            self._log(f"{self.now:9.3f}  {line}")
