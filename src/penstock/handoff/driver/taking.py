"""How a decode rank verifies parts and puts them into its slots: at once on the CPU, or begun.

The one rule: a part that is not intact is told so, and nothing of the piece that is not intact
is put away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.handoff.driver.moving import PartScatter
from penstock.handoff.driver.reading import Window_contra
from penstock.movers.packing import Scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.handoff.driver.parts import PartForm, RouteParts
    from penstock.handoff.protocol.effects import Take
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm


class PartTaker(Protocol[Window_contra]):
    """Puts parts into the slots of one rank."""

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        ...

    def take(
        self,
        take: Take,
        route: RouteParts,
        form: PartForm,
        memory: Window_contra,
        keys: Sequence[bytes],
        slots: Sequence[int],
    ) -> bool | None:
        """Verifies and puts away: whether it was intact, or nothing if that has begun."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether another part can be begun."""
        ...

    def ended(self) -> list[tuple[Take, bool]]:
        """The parts that were begun and have ended, and whether they were intact."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a part was begun and has not ended."""
        ...


class ArrayTaker:
    """Takes parts on the CPU; each is done when `take` returns."""

    def __init__(self, tier: SlotStore, algorithm: Algorithm) -> None:
        self.slot_count = tier.slot_count
        self._tier = tier
        self._algorithm = algorithm
        self._scatters: dict[PartForm, PartScatter] = {}
        self._scratch = Scratch()

    def take(
        self,
        take: Take,
        route: RouteParts,
        form: PartForm,
        memory: NDArray[np.uint8],
        keys: Sequence[bytes],
        slots: Sequence[int],
    ) -> bool | None:
        """Verifies and puts away; see `PartTaker`."""
        scatter = self._scatters.get(form)
        if scatter is None:
            scatter = PartScatter(route, form, self._tier, self._algorithm, scratch=self._scratch)
            self._scatters[form] = scatter
        return scatter.scatter(memory, keys, take.sums, slots)

    @property
    def has_room(self) -> bool:
        """Always: nothing stays under way."""
        return True

    def ended(self) -> list[tuple[Take, bool]]:
        """Nothing stays under way."""
        return []

    @property
    def busy(self) -> bool:
        """Nothing stays under way."""
        return False
