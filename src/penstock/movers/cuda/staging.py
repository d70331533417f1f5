"""The staging ring: device memory between scattered blocks and the link, taken once.

A *berth* holds one batch of packed blocks on the device, with their sums and verdicts, and in
pinned host memory what the kernels read and write of it: slots, seeds, sums. The ring has a
fixed number of berths, so the bytes in flight are bounded by it.

The one rule: a berth is free again only when the CPU has seen its batch end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.movers.cuda.pinned import PinnedMemory
from penstock.movers.cuda.streams import Event
from penstock.vocabulary.checksums import SUM_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.vocabulary.layout import Layout

BLOCKS_MAX = 1024
"""Blocks in one batch; small blocks would otherwise need large tables."""
_ALIGNMENT = 256
VERDICT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSize:
    """How much device memory a mover takes, and in what portions it uses the link."""

    batch_bytes: int = 16 << 20
    """Blocks that are packed by one launch; a single block may be larger. A small copy of the
    engine waits for one batch: on PCIe 5, 16 MiB take 0.3 ms."""
    batch_count: int = 2
    """Batches in flight, at most."""
    piece_bytes: int = 4 << 20
    """The largest single DMA."""

    def __post_init__(self) -> None:
        for name in ("batch_bytes", "batch_count", "piece_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")


class Berth:
    """Room for one batch, on both sides of the link."""

    __slots__ = (
        *("count", "ended", "kept", "kept_address", "ready", "seeds", "seeds_address", "slots"),
        *("slots_address", "staged", "sums", "targets", "targets_address", "told"),
        *("told_address", "verdicts"),
    )

    def __init__(self, device: int, host: PinnedMemory, start: int, sizes: _BerthSizes) -> None:
        blocks, cells, groups = sizes.blocks, sizes.cells, sizes.groups
        self.staged = device
        self.sums = device + sizes.sums_start
        self.verdicts = device + sizes.verdicts_start
        self.count = 0
        self.ready = Event()
        """The batch is packed (saves) or has arrived (loads) in staging."""
        self.ended = Event()
        at = start

        def portion(kind: str, shape: tuple[int, ...]) -> tuple[NDArray[Any], int]:
            nonlocal at
            length = int(np.prod(shape)) * np.dtype(kind).itemsize
            array = host.bytes[at : at + length].view(kind).reshape(shape)
            address = host.address + at
            at += _aligned(length)
            return array, address

        self.slots, self.slots_address = portion("<i4", (groups, blocks))
        self.targets, self.targets_address = portion("<i4", (groups, blocks))
        self.seeds, self.seeds_address = portion("<u8", (blocks,))
        self.kept, self.kept_address = portion("<u8", (blocks, cells))
        """Sums on their way: from the device after a save, to it before a load."""
        self.told, self.told_address = portion("<i4", (blocks,))
        """How many cells of each block were found wrong."""

    def close(self) -> None:
        """Gives the events back."""
        self.ready.close()
        self.ended.close()


@dataclass(frozen=True, slots=True)
class _BerthSizes:
    blocks: int
    pitch: int
    cells: int
    groups: int

    @property
    def sums_start(self) -> int:
        return _aligned(self.blocks * self.pitch)

    @property
    def verdicts_start(self) -> int:
        return self.sums_start + _aligned(self.blocks * self.cells * SUM_BYTES)

    @property
    def device_bytes(self) -> int:
        return self.verdicts_start + _aligned(self.blocks * VERDICT_BYTES)

    @property
    def host_bytes(self) -> int:
        tables = 2 * _aligned(self.groups * self.blocks * 4)
        rows = _aligned(self.blocks * 8) + _aligned(self.blocks * self.cells * SUM_BYTES)
        return tables + rows + _aligned(self.blocks * VERDICT_BYTES)


class StagingRing:
    """All berths of a mover; its memory is taken here and given back by `close`."""

    def __init__(self, layout: Layout, size: StagingSize, device: torch.device) -> None:
        self.size = size
        block_bytes = layout.block_bytes
        # A pitch of vectors, so that every packed block can be written four words at a time.
        self.pitch = -(-block_bytes // 16) * 16
        self.blocks = min(BLOCKS_MAX, max(1, size.batch_bytes // self.pitch))
        sizes = _BerthSizes(self.blocks, self.pitch, len(layout.cells), len(layout.groups))
        self.device_bytes = size.batch_count * sizes.device_bytes
        self._device = torch.empty(self.device_bytes, dtype=torch.uint8, device=device)
        self._host = PinnedMemory(size.batch_count * sizes.host_bytes)
        self.berths = [
            Berth(
                self._device.data_ptr() + number * sizes.device_bytes,
                self._host,
                number * sizes.host_bytes,
                sizes,
            )
            for number in range(size.batch_count)
        ]
        self.free = list(self.berths)

    def close(self) -> None:
        """Gives everything back; nothing may be in flight."""
        for berth in self.berths:
            berth.close()
        self.berths = self.free = []
        self._host.close()


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
