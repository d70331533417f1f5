"""What a search has to say: how much it saw, and the shortest story to what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFECTS = (
    PenstockError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""How a defect can show itself in a move."""


class FindingKind(Enum):
    """What can be wrong."""

    VIOLATION = "violation"
    """A promise was broken in a state, or by the last move of the story."""
    DEADLOCK = "deadlock"
    """Nothing can happen any more, and not all work is done."""
    LIVELOCK = "livelock"
    """Something can happen for ever, but no path leads to an end with all work done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong, and how to get there in as few moves as the search could find."""

    kind: FindingKind
    problem: str
    story: tuple[str, ...]
    """Every move in words; after a violation by a move, that move is the last."""

    def lines(self) -> Iterator[str]:
        """The finding for people."""
        yield f"{self.kind.value}: {self.problem}"
        for place, line in enumerate(self.story, start=1):
            yield f"{place:5}  {line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of exploring one world."""

    state_count: int
    move_count: int
    """Moves that were followed."""
    finished_count: int
    """States in which all work was done."""
    exhausted: bool
    """Whether every state was visited that the search wants to visit."""
    stopped_by: str
    """The bound that ended a search that was not exhausted; empty otherwise."""
    reduced: bool
    delays: int | None
    """The most delays there could be; `None` when every order was looked at."""
    seconds: float
    memory_bytes: int
    """What the process grew by."""
    finding: Finding | None
    mirrored: bool = False
    """Whether a state and its mirror image were counted as one."""

    @property
    def bytes_a_state(self) -> float:
        """Memory for each state visited."""
        return self.memory_bytes / max(1, self.state_count)

    @property
    def states_a_second(self) -> float:
        """The speed of the search."""
        return self.state_count / max(1e-9, self.seconds)

    def summary(self) -> str:
        """The figures as one line."""
        how = ["all orders" if self.delays is None else f"at most {self.delays} delays"]
        if self.reduced:
            how.append("partial-order reduction")
        if self.mirrored:
            how.append("one of a state and its mirror image")
        end = "exhausted" if self.exhausted else f"not exhausted: stopped by {self.stopped_by}"
        return (
            f"{self.state_count} states, {self.move_count} moves, {', '.join(how)}, {end}, "
            f"{self.seconds:.1f} s ({self.states_a_second:.0f} states/s, "
            f"{self.bytes_a_state:.0f} bytes/state)"
        )

    def document(self) -> dict[str, object]:
        """The same as plain values."""
        finding = self.finding
        return {
            "states": self.state_count,
            "moves": self.move_count,
            "finished_states": self.finished_count,
            "exhausted": self.exhausted,
            "stopped_by": self.stopped_by,
            "reduced": self.reduced,
            "mirrored": self.mirrored,
            "delays": self.delays,
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
            "finding": None
            if finding is None
            else {
                "kind": finding.kind.value,
                "problem": finding.problem,
                "story": list(finding.story),
            },
        }


def said_by(defect: Exception) -> str:
    """Violations speak for themselves; of other exceptions the kind matters, too."""
    return str(defect) if isinstance(defect, Violation) else f"{type(defect).__name__}: {defect}"
