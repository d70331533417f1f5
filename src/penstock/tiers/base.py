"""What every tier is to a mover: numbered slots, and where the bytes of a block lie in them.

A tier holds bytes and knows nothing of policy: which block lies where is the machine's
affair. Abilities that not every tier has are protocols of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.reshard import Blocks


class SlotStore(Protocol):
    """Blocks in numbered slots of directly addressable memory."""

    @property
    def medium(self) -> str:
        """What kind of memory it is: movers are chosen by the media at both ends."""
        ...

    @property
    def layout(self) -> Layout:
        """How a block lies in a slot."""
        ...

    @property
    def slot_count(self) -> int:
        """How many blocks fit."""
        ...

    def blocks(self, slots: Sequence[int]) -> Blocks:
        """The bytes of some slots, for reading or writing."""
        ...


@runtime_checkable
class GivesBack(Protocol):
    """A tier whose memory can be returned to the system for a while."""

    def give_back(self) -> int:
        """Returns the whole pages of all slots; returns how many bytes they have."""
        ...


@runtime_checkable
class TakesAgain(Protocol):
    """Memory that has to be taken again after it was given back: that of a GPU."""

    def give_back(self) -> int:
        """Gives all of it back; returns how many bytes."""
        ...

    def take_again(self) -> None:
        """Takes it again, at the same addresses.

        Raises:
            UnavailableError: there is not enough; it is away as before.
        """
        ...


@runtime_checkable
class KeepsSums(Protocol):
    """A tier whose bytes left the device, and therefore carry checksums."""

    def sums(self, slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """The tables of cell sums that were written with the blocks, one row a slot."""
        ...

    def keep_sums(self, slots: NDArray[np.int32], sums: NDArray[np.uint64]) -> None:
        """Writes the tables of cell sums, one row a slot."""
        ...
