"""How often each thing may go wrong in a world that is explored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Fault(IntEnum):
    """What can go wrong, once or more often; the value is its place among the budgets."""

    LOSS = 0
    """A message is lost."""
    DUPLICATE = 1
    """A message arrives twice, the second time after those sent meanwhile."""
    OVERTAKE = 2
    """A message is overtaken by those sent after it."""
    TIMER = 3
    """A timer expires although something else could happen first."""
    CANCEL = 4
    """An engine does not want a handoff any more."""
    WITHDRAW = 5
    """The decode engine gives a claim up, and claims again."""
    CRASH = 6
    """A process dies, and another begins in its place."""
    WRITE = 7
    """A write ends with an error, and may land yet."""
    SPOIL = 8
    """A write lands, but its bytes are wrong."""
    SUSPECT = 9
    """A party is thought to be gone, but is not."""
    RELAY = 10
    """The process that has the NIXL agents of a rank dies, and is started again."""
    RECONNECT = 11
    """The connection of two parties ends with all that is on its way, and another one is opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How often each fault may occur, and how many faults in all."""

    loss: int = 0
    duplicate: int = 0
    overtake: int = 0
    timer: int = 0
    cancel: int = 0
    withdraw: int = 0
    crash: int = 0
    write: int = 0
    spoil: int = 0
    suspect: int = 0
    relay: int = 0
    reconnect: int = 0
    total: int = 10

    def counts(self) -> tuple[int, ...]:
        """By fault, none above the total; and the total."""
        each = tuple(min(self.total, getattr(self, fault.name.lower())) for fault in Fault)
        return (*each, min(self.total, sum(each)))
