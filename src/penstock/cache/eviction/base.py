"""What every eviction policy answers: of the blocks that may leave, which one goes first?

The tier decides *whether* a block may leave (it is ready, nothing holds it, and no block
that follows it lies in the tier); the policy decides the *order*. It is called for every block
that enters, is hit, and goes, and for each block when it may leave. Blocks that may
no longer leave are not withdrawn one by one: the policy asks for the block's standing when
its turn comes, and drops it from the queue then. So a hit on a prompt of ten thousand
blocks costs the policy two array writes.

A policy may keep ghosts: `forget` says which blocks were evicted, by key. Time is the logical
clock `tick`, one for each event the cache handles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.vocabulary.keys import Key

Standing = Callable[[int], "int | None"]
"""The priority of a node that may leave the tier now; `None` if it may not."""


Judge = Callable[[int], int]
"""Of blocks that are about to enter: how many leading ones are worth more than a node that would
have to leave for them."""


class EvictionPolicy(Protocol):
    """The order in which blocks leave one tier."""

    name: str

    def add(self, nodes: NDArray[np.intp], keys: Sequence[Key], *, tick: int) -> None:
        """These blocks entered the tier."""
        ...

    def touch(self, nodes: NDArray[np.intp], *, tick: int) -> None:
        """These blocks were hit."""
        ...

    def offer(self, nodes: Iterable[int]) -> None:
        """These blocks may leave from now on, until their standing says otherwise."""
        ...

    def pop(self) -> int | None:
        """The block to leave next, or `None` if none may.

        The caller either evicts it (`forget`) or offers it again.
        """
        ...

    def mark(self) -> None:
        """Blocks are going to be popped that may not leave after all."""
        ...

    def rollback(self) -> None:
        """Nothing popped since `mark` leaves: the order is what it was then.

        The caller offers the popped blocks again.
        """
        ...

    def offer_and_pop(self, node: int) -> int | None:
        """The same as `offer` of one block, then `pop`; evicting a chain does little else."""
        ...

    def leave_together(self, node: int, others: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of `others` would be popped right after `node`, if they may leave by then."""
        ...

    def forget(self, nodes: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:
        """These blocks left the tier; `evicted` if they did so to make room."""
        ...

    def candidates(self) -> set[int]:
        """All blocks that would be popped if asked often enough; for the audit."""
        ...

    def resize(self, node_capacity: int) -> None:
        """Node numbers up to `node_capacity` may occur from now on."""
        ...


@runtime_checkable
class SharesArrays(Protocol):
    """A policy of which there can be many in one tier, for little memory each.

    Each tenant with a quota has an order of its own. One that keeps arrays by node takes as much
    memory as the tier's for every tenant, unless they share them.
    """

    def sharing(self, standing: Standing) -> EvictionPolicy:
        """Another order, of other nodes, in the same arrays: no node is in two of them.

        `standing` is `None` for nodes of another: entries of theirs in a queue no longer hold.
        """
        ...


@runtime_checkable
class FollowsRequests(Protocol):
    """A policy that counts uses: for others, the end of a request is a `touch` of its blocks."""

    def release(self, nodes: NDArray[np.intp], *, tick: int) -> None:
        """A request that used these blocks has ended: a use, but not a hit."""
        ...


@runtime_checkable
class Admits(Protocol):
    """A policy that may keep blocks out of a full tier; others let every block in.

    Only a tier below the device asks, and only for blocks that nobody needs there now. A block that
    is refused is added and forgotten again, as if it had been evicted at once.
    """

    may_refuse: bool
    """Whether the tier is one that asks; it says so before anything else."""

    def admit(self, keys: Sequence[Key], *, priority: int) -> Judge | None:
        """What says how many leading blocks of a chain are worth more than a block that may leave.

        `None`: all of them, whatever has to leave.
        """
        ...
