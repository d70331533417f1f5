"""The states of a handoff with each of the four parties, and every legal move, as data.

A move that is not in its table raises `InvariantViolation` and changes nothing. PROTOCOL.md
prints these tables; a test compares them with the code.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Mapping


class Role(Enum):
    """Who a party is."""

    PREFILL_SCHEDULER = "prefill scheduler"
    PREFILL_RANK = "prefill rank"
    DECODE_SCHEDULER = "decode scheduler"
    DECODE_RANK = "decode rank"


class HandoffOutcome(Enum):
    """How a handoff ended, on one side."""

    DELIVERED = "delivered"
    FAILED_OVER = "failed_over"
    """The decode side computes the prompt itself."""
    CANCELLED = "cancelled"
    """Nobody wants it any more."""
    EXPIRED = "expired"
    """Its deadline passed."""
    WITHDRAWN = "withdrawn"
    """The decode side gave this claim up and may claim again, in the next epoch."""


class ReportStatus(Enum):
    """What a decode rank reports to its scheduler."""

    COMPLETE = "complete"
    """Every part is verified and in its slot."""
    FAILED = "failed"
    """It cannot be completed."""
    DROPPED = "dropped"
    """Nothing of this rank touches its slots any more."""


class DecodeState(Enum):
    """A handoff with the decode scheduler."""

    CLAIMING = "claiming"
    """Ranks collect parts; the first token may or may not be there."""
    ENDING = "ending"
    """The outcome is known, but a rank may still touch the slots."""
    CLOSING = "closing"
    """The engine has the outcome; ranks have to forget it, the prefill side to confirm it."""
    OVER = "over"
    """Forgotten, but for its last epoch."""


class DecodeMove(Enum):
    """What can happen to a handoff with the decode scheduler."""

    DELIVER = "deliver"
    """Every rank is complete and the first token is there."""
    GIVE_UP = "give up"
    """Failure, cancel, withdrawal or deadline, before it was delivered."""
    ALL_DROPPED = "see the last rank drop it"
    """No rank touches its slots any more: they come back."""
    FORGET = "be forgotten"
    """Every rank dropped it, and the prefill side knows or cannot be reached."""


class TargetState(Enum):
    """A handoff with a decode rank."""

    COLLECTING = "collecting"
    """Parts are missing."""
    COMPLETE = "complete"
    """Every part is verified and in its slot."""
    FAILED = "failed"
    """It cannot be completed; waits for `Drop`."""
    DROPPING = "dropping"
    """Dropped, but the rank's own mover still moves a part."""
    STOPPING = "stopping"
    """Nothing touches the slots; a source has not confirmed yet that it stopped."""
    OVER = "over"
    """Forgotten, but for its name."""


class TargetMove(Enum):
    """What can happen to a handoff with a decode rank."""

    LAST_PART = "get its last part"
    FAIL = "fail"
    DROP = "be dropped"
    LAST_MOVE = "see its last move end"
    """None of the rank's own moves for it is under way any more."""
    ALL_STOPPED = "see the last source stop"


class PrefillState(Enum):
    """A handoff with the prefill scheduler."""

    AWAITED = "awaited"
    """A decode engine asked for it; the request itself has not come yet."""
    COMPUTING = "computing"
    READY = "ready"
    """The first token is there."""
    RELEASING = "releasing"
    """The outcome is known, but a rank may still read its blocks."""
    OVER = "over"
    """Forgotten, but for its name."""


class PrefillMove(Enum):
    """What can happen to a handoff with the prefill scheduler."""

    SUBMIT = "be submitted"
    FIRST_TOKEN = "get its first token"
    END = "end"
    """Closed by decode, cancelled, or expired."""
    ALL_RELEASED = "see the last rank release it"
    FORGET = "be forgotten"
    """The request never came."""


class WantState(Enum):
    """What a decode rank wants of a prefill rank, as the prefill rank sees it."""

    PARKED = "parked"
    """Claimed, but this rank does not know the prompt yet."""
    OPEN = "open"
    """Parts are written as soon as they are computed and a berth is free."""
    OVER = "over"
    """Forgotten, but for its epoch. Writes that were posted for it may not have ended yet."""


class WantMove(Enum):
    """What can happen to what a decode rank wants."""

    ADMIT = "be admitted"
    STOP = "be stopped"
    FORGET = "be forgotten"
    """The prompt was released, or never came, or the decode rank has a new life."""


DECODE_MOVES: Mapping[tuple[DecodeState, DecodeMove], DecodeState] = {
    (DecodeState.CLAIMING, DecodeMove.DELIVER): DecodeState.CLOSING,
    (DecodeState.CLAIMING, DecodeMove.GIVE_UP): DecodeState.ENDING,
    (DecodeState.ENDING, DecodeMove.ALL_DROPPED): DecodeState.CLOSING,
    (DecodeState.CLOSING, DecodeMove.FORGET): DecodeState.OVER,
}
TARGET_MOVES: Mapping[tuple[TargetState, TargetMove], TargetState] = {
    (TargetState.COLLECTING, TargetMove.LAST_PART): TargetState.COMPLETE,
    (TargetState.COLLECTING, TargetMove.FAIL): TargetState.FAILED,
    (TargetState.COLLECTING, TargetMove.DROP): TargetState.DROPPING,
    (TargetState.FAILED, TargetMove.DROP): TargetState.DROPPING,
    (TargetState.COMPLETE, TargetMove.DROP): TargetState.OVER,
    (TargetState.DROPPING, TargetMove.LAST_MOVE): TargetState.STOPPING,
    (TargetState.STOPPING, TargetMove.ALL_STOPPED): TargetState.OVER,
}
PREFILL_MOVES: Mapping[tuple[PrefillState, PrefillMove], PrefillState] = {
    (PrefillState.AWAITED, PrefillMove.SUBMIT): PrefillState.COMPUTING,
    (PrefillState.COMPUTING, PrefillMove.FIRST_TOKEN): PrefillState.READY,
    (PrefillState.COMPUTING, PrefillMove.END): PrefillState.RELEASING,
    (PrefillState.READY, PrefillMove.END): PrefillState.RELEASING,
    (PrefillState.RELEASING, PrefillMove.ALL_RELEASED): PrefillState.OVER,
    (PrefillState.AWAITED, PrefillMove.FORGET): PrefillState.OVER,
}
WANT_MOVES: Mapping[tuple[WantState, WantMove], WantState] = {
    (WantState.PARKED, WantMove.ADMIT): WantState.OPEN,
    (WantState.PARKED, WantMove.STOP): WantState.OVER,
    (WantState.PARKED, WantMove.FORGET): WantState.OVER,
    (WantState.OPEN, WantMove.STOP): WantState.OVER,
    (WantState.OPEN, WantMove.FORGET): WantState.OVER,
}

S = TypeVar("S", bound=Enum)
M = TypeVar("M", bound=Enum)


def advance(table: Mapping[tuple[S, M], S], state: S, move: M) -> S:
    """The state after a move.

    Raises `InvariantViolation`: the table does not have this move.
    """
    try:
        return table[state, move]
    except KeyError:
        raise InvariantViolation(f"a handoff that is {state.value} cannot {move.value}") from None
