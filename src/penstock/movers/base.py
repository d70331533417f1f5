"""The interface of movers: they take copies, work on them in `poll`, and report what ended.

A mover never waits: `poll` does at most as much as its budget allows. Every submitted copy is
reported exactly once, abandoned or not, and after that the mover does not touch its slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from penstock.cache.operations import BlockFault
    from penstock.machine.effects import Copy
    from penstock.vocabulary.keys import OperationId

WAIT_S = 30.0
"""The default timeout for a device. Copies in flight take milliseconds: if they have not ended by
then, the device or the engine's step is stuck."""


class Moved(NamedTuple):
    """A copy that has ended on this rank."""

    operation: OperationId
    faults: tuple[tuple[int, BlockFault], ...] = ()
    failure: str = ""


class Mover(Protocol):
    """Copies blocks from one tier to another."""

    def submit(self, copy: Copy) -> None:
        """Adds a copy; `poll` works on it."""
        ...

    def abandon(self, operation: OperationId) -> None:
        """Ends a copy early; it is still reported."""
        ...

    def poll(self, *, budget_bytes: int) -> tuple[list[Moved], int]:
        """Works for at most `budget_bytes`, but at least on one block if there is any.

        Returns what ended, and how many bytes were moved.
        """
        ...

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        ...


@runtime_checkable
class WaitsForDevice(Protocol):
    """A mover whose copies go on by themselves once they are submitted to a device."""

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Blocks until all copies on the device have ended.

        Raises:
            UnavailableError: it has not within `timeout_s` seconds; it may still touch its slots.
        """
        ...

    def wait_for_room(self, timeout_s: float = WAIT_S) -> None:
        """Blocks until the next `poll` has something to submit, or to report.

        For an engine that computes nothing meanwhile. Raises as `wait` does.
        """
        ...
