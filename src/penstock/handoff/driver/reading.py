"""How a prefill rank's KV becomes packed parts: at once on the CPU, by and by from a device.

The one rule: bytes are packed into the window that the write was given, and into nothing else;
of a write that was given up, no byte is moved any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.handoff.driver.moving import PartGather
from penstock.movers.packing import Scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.handoff.driver.parts import PartForm
    from penstock.handoff.protocol.identity import WriteId
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm


Window_contra = TypeVar("Window_contra", contravariant=True)
"""What bytes of a berth are: an array, or a tensor on a device."""


class PartReader(Protocol[Window_contra]):
    """Packs parts out of the slots of one rank."""

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        ...

    def read(
        self,
        write: WriteId,
        form: PartForm,
        slots: Sequence[int],
        keys: Sequence[bytes],
        memory: Window_contra,
    ) -> bytes | None:
        """Packs blocks into `memory`: their cell sums if that is done, nothing if it has begun."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether another part can be begun."""
        ...

    def ended(self) -> list[tuple[WriteId, bytes]]:
        """The parts that were begun and are packed now, with their sums; never waits."""
        ...

    def forget(self, write: WriteId) -> None:
        """Nothing more is to be moved for this write."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a part was begun and has not ended."""
        ...


class ArrayReader:
    """Packs parts on the CPU; each is done when `read` returns."""

    def __init__(self, tier: SlotStore, algorithm: Algorithm) -> None:
        self.slot_count = tier.slot_count
        self._tier = tier
        self._algorithm = algorithm
        self._gathers: dict[PartForm, PartGather] = {}
        self._scratch = Scratch()

    def read(
        self,
        write: WriteId,  # noqa: ARG002 - it has ended before anybody can name it
        form: PartForm,
        slots: Sequence[int],
        keys: Sequence[bytes],
        memory: NDArray[np.uint8],
    ) -> bytes | None:
        """Packs blocks into `memory`; see `PartReader`."""
        gather = self._gathers.get(form)
        if gather is None:
            gather = PartGather(form, self._tier, self._algorithm, scratch=self._scratch)
            self._gathers[form] = gather
        return gather.gather(slots, keys, memory)

    @property
    def has_room(self) -> bool:
        """Always: nothing stays under way."""
        return True

    def ended(self) -> list[tuple[WriteId, bytes]]:
        """Nothing stays under way."""
        return []

    def forget(self, write: WriteId) -> None:
        """Nothing stays under way."""

    @property
    def busy(self) -> bool:
        """Nothing stays under way."""
        return False
