"""The memory of one simulated rank, in real bytes: what the production movers read and write.

The KV of a token is its mark (see `workload`), sixteen bytes, changed a little in every KV group
so that groups cannot be taken for each other. Below the device lie packed blocks with their
checksums, in tiers of the product. The views on top read bytes back as contents, so that the
checkers of the simulator can look at them.

The one rule that must not break: a view shows what the bytes are, never what they should be.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, MutableSequence
from typing import TYPE_CHECKING

import numpy as np

from lab.sim.ranks import MIXED, ROTTEN, Cell
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.host import HostTier, MemoryTier
from penstock.vocabulary.checksums import Algorithm, CellSpan
from penstock.vocabulary.layout import Group, GroupKind, Layer, Layout
from penstock.vocabulary.planes import opaque_plane

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lab.sim.conditions import Conditions
    from lab.sim.workload import Content

MARK_BYTES = 16
ALGORITHM = Algorithm.XXH3


class RankMemory:
    """Device arrays, one a KV group, and the tiers below them.

    Args:
        conditions: what there is in this world.
        salt: of the cache's life at the time, for blocks that are found below.
    """

    def __init__(self, conditions: Conditions, salt: Callable[[], int]) -> None:
        settings = conditions.settings
        managed = settings.device is not None
        slots = settings.device.slot_count if settings.device else conditions.engine_slots
        shape = (slots, settings.block_tokens, MARK_BYTES)
        arrays = [np.zeros(shape, dtype=np.uint8) for _ in range(settings.group_count)]
        self.layout = _layout(settings.block_tokens, slots, settings.group_count)
        self.device = ArrayTier(self.layout, arrays)
        self._settings = settings
        self._salt = salt
        self._stored = any(tier.stored for tier in settings.tiers)
        self.lower = [self._make(index) for index in range(len(settings.tiers))]
        """The tiers below the device; `None` for those that a store process serves."""
        self.epochs = [0] * len(self.lower)
        """How often the bytes of each tier were lost with the process that had them."""
        self.views: list[MutableSequence[Cell]] = [
            ManagedSlots(arrays) if managed else OwnSlots(arrays),
            *(self._view(index) for index in range(len(self.lower))),
        ]

    def _make(self, index: int) -> MemoryTier | HostTier | None:
        tier = self._settings.tiers[index]
        if tier.stored:
            return None
        if index == 0 and self._stored:  # The store process maps it.
            return HostTier.create(self.layout, tier.slot_count, huge_pages=False)
        return MemoryTier(self.layout, tier.slot_count)

    def _view(self, index: int) -> MutableSequence[Cell]:
        tier = self.lower[index]
        if tier is None:
            return [None] * self._settings.tiers[index].slot_count
        return TierSlots(tier, self._settings.group_count, self._salt)

    @property
    def hub(self) -> HostTier | None:
        """What a store process maps, where there is one."""
        hub = self.lower[0] if self.lower else None
        return hub if isinstance(hub, HostTier) else None

    def renew(self, index: int) -> None:
        """The bytes of a tier are lost, and so is the memory they were in."""
        self.epochs[index] += 1
        old = self.lower[index]
        if isinstance(old, HostTier):
            self.lower[index] = self._make(index)
            self.views[index + 1] = self._view(index)
            old.close()

    def close(self) -> None:
        """Gives shared memory back."""
        if self.hub is not None:
            self.hub.close()


class Slots(MutableSequence[Cell]):
    """The slots of one tier as contents; their number is fixed."""

    @abstractmethod
    def read(self, slot: int) -> Cell:
        """What lies in a slot; `None` for nothing."""

    @abstractmethod
    def write(self, slot: int, content: Cell) -> None:
        """Overwrites a slot."""

    def __getitem__(self, slot: int | slice) -> Cell:  # type: ignore[override]
        assert isinstance(slot, int)
        return self.read(slot)

    def __setitem__(self, slot: int | slice, content: Cell | Iterable[Cell]) -> None:
        if isinstance(slot, slice):
            for at, each in zip(range(*slot.indices(len(self))), content or (), strict=True):
                self.write(at, each)  # type: ignore[arg-type]
        else:
            self.write(slot, content)  # type: ignore[arg-type]

    def __delitem__(self, slot: int | slice) -> None:
        raise TypeError("slots cannot be removed")

    def insert(self, index: int, value: Cell) -> None:  # noqa: ARG002 - as a sequence has it
        """Slots cannot be added."""
        raise TypeError("slots cannot be added")


class ManagedSlots(Slots):
    """Device slots that Penstock manages: a block has the same slot in every KV group."""

    def __init__(self, arrays: list[NDArray[np.uint8]]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays[0])

    def read(self, slot: int) -> Cell:
        """The marks in a slot, if all groups have the same."""
        found = {_marks(array[slot], group) for group, array in enumerate(self._arrays)}
        return found.pop() if len(found) == 1 else MIXED

    def write(self, slot: int, content: Cell) -> None:
        """Writes the tokens that are given; the rows after them stay."""
        for group, array in enumerate(self._arrays):
            if content is None:
                array[slot] = 0
            else:
                array[slot, : len(content)] = _rows(content, group)


class OwnSlots(Slots):
    """Device slots that the engine manages: a row of slots for each KV group."""

    def __init__(self, arrays: list[NDArray[np.uint8]]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays) * len(self._arrays[0])

    def read(self, slot: int) -> Cell:
        """The group, and the marks of it."""
        group, at = divmod(slot, len(self._arrays[0]))
        marks = _marks(self._arrays[group][at], group)
        return None if marks is None else (group, marks)

    def write(self, slot: int, content: Cell) -> None:
        """Writes the marks of one group."""
        group, at = divmod(slot, len(self._arrays[0]))
        if content is None:
            self._arrays[group][at] = 0
        else:
            assert content[0] == group
            self._arrays[group][at] = _rows(content[1], group)


class TierSlots(Slots):
    """Slots of a tier below the device: packed, group after group, with sums."""

    def __init__(
        self, tier: MemoryTier | HostTier, group_count: int, salt: Callable[[], int]
    ) -> None:
        self._tier = tier
        self._salt = salt
        self._span = CellSpan.of(tier.layout)
        raw = tier.blocks(()).buffers[0].reshape(tier.slot_count, -1)
        self._blocks = raw[:, : tier.layout.block_bytes]
        self._groups = self._blocks.reshape(tier.slot_count, group_count, -1, MARK_BYTES)
        assert np.shares_memory(self._groups, raw)

    def __len__(self) -> int:
        return len(self._blocks)

    def read(self, slot: int) -> Cell:
        """The marks of a packed block, if all groups have the same."""
        found = {_marks(rows, group) for group, rows in enumerate(self._groups[slot])}
        return found.pop() if len(found) == 1 else MIXED

    def write(self, slot: int, content: Cell) -> None:
        """Writes a block with its sums, wipes it, or lets it rot."""
        if content is None:
            self._blocks[slot] = 0
        elif content is ROTTEN:
            self._blocks[slot, slot % self._blocks.shape[1]] ^= 255
        else:
            for group, rows in enumerate(self._groups[slot]):
                rows[:] = _rows(content, group)
            key = content[-1]
            assert isinstance(key, bytes)
            block, salt = self._blocks[slot : slot + 1], self._salt()
            sums = self._span.sum_blocks(block, [key], ALGORITHM, salt=salt)
            self._tier.keep_sums(np.array([slot], dtype=np.int32), sums)


def _rows(content: object, group: int) -> NDArray[np.uint8]:
    marks: Content = content  # type: ignore[assignment]
    raw = np.frombuffer(b"".join(marks), dtype=np.uint8).reshape(-1, MARK_BYTES)
    mixed: NDArray[np.uint8] = raw ^ np.uint8(group)
    return mixed


def _marks(rows: NDArray[np.uint8], group: int) -> Cell:
    if not rows.any():
        return None
    # Rows that nobody has written are the same in every group.
    raw = (
        np.where(rows.any(axis=1, keepdims=True), rows ^ np.uint8(group), 0)
        .astype(np.uint8)
        .tobytes()
    )
    return tuple(raw[at : at + MARK_BYTES] for at in range(0, len(raw), MARK_BYTES))


def _layout(block_tokens: int, block_count: int, group_count: int) -> Layout:
    block_bytes = block_tokens * MARK_BYTES
    planes = [
        opaque_plane(
            block_bytes=block_bytes,
            block_stride=block_bytes,
            block_count=block_count,
            encoding="marks",
            buffer=group,
        )
        for group in range(group_count)
    ]
    groups = tuple(
        Group(kind=GroupKind.OPAQUE, layers=(Layer(number=number, planes=(plane,)),))
        for number, plane in enumerate(planes)
    )
    return Layout(groups=groups, block_tokens=block_tokens)
