"""What every mover does: takes copies, works on them a little at a time, tells what ended.

A mover never waits. `poll` does at most as much as its budget allows and returns. Every copy
that was submitted is reported exactly once, abandoned or not, and after that the mover does
not touch its slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from penstock.cache.operations import BlockFault
    from penstock.machine.effects import Copy
    from penstock.vocabulary.ids import OperationId

WAIT_S = 30.0
"""How long a mover waits for its device where nobody says otherwise. What is in flight takes
milliseconds: a device that has not ended it by then has stopped, or the engine's step has."""


class Moved(NamedTuple):
    """A copy that has ended on this rank."""

    operation: OperationId
    faults: tuple[tuple[int, BlockFault], ...] = ()
    failure: str = ""


class Mover(Protocol):
    """Copies blocks from one tier to another."""

    def submit(self, copy: Copy) -> None:
        """Takes a copy in; its work is done in `poll`."""
        ...

    def abandon(self, operation: OperationId) -> None:
        """The copy is not wanted any more: it ends early, and is reported all the same."""
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
        """Blocks until all that was submitted to the device has ended.

        Raises:
            UnavailableError: it has not within `timeout_s` seconds; it may still touch its slots.
        """
        ...
