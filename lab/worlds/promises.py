"""What must hold when an engine is told that a handoff is over: its memory is its own again.

Blocks of a prompt must not be read any more, slots not written to; and what was delivered must
be there, on every rank, part by part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.explore.world import Violation
from penstock.handoff.protocol.states import HandoffOutcome

if TYPE_CHECKING:
    from lab.worlds.actor import M
    from lab.worlds.decode import DecodeRankActor
    from lab.worlds.prefill import PrefillRankActor
    from lab.worlds.schedulers import SchedulerActor


def knows_life(scheduler: SchedulerActor[M], rank: DecodeRankActor) -> bool:
    """Whether a scheduler has heard of the rank's present life.

    If not, the memory it counts on went with the life before; what it delivered until it hears
    of that has to be computed again anyway.
    """
    return scheduler.machine.life_of(rank.name) == rank.identity.life


def check_blocks(rank: PrefillRankActor, handoff: str) -> None:
    """Nothing of this rank reads the prompt's blocks any more.

    Raises:
        Violation: a write does, or will.
    """
    if rank.reads(handoff):
        raise Violation("given back", f"{rank.name} still reads the blocks of {handoff}")


def check_slots(rank: DecodeRankActor, handoff: str, epoch: int, outcome: HandoffOutcome) -> None:
    """Nothing of this rank writes to the slots any more, and what was delivered is there.

    Raises:
        Violation: one of both does not hold.
    """
    if (handoff, epoch) in rank.touches():
        raise Violation("given back", f"{rank.name} still writes to the slots of {handoff}")
    if outcome is HandoffOutcome.DELIVERED and not rank.has_all(handoff, epoch):
        raise Violation("content", f"{handoff} is delivered, but {rank.name} has not all of it")
