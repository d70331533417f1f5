"""What the CUDA sides of a handoff share: staging, tables and kernels for parts, in one stream.

    batch      what one part takes along: slots and seeds for the device, a table of sums back
    shape      staging for all parts whose blocks are alike
    kernels    those of one form, compiled once, bound to their tables

The one rule: tables and staging of a part are used again only when the CPU has seen its end; the
device works in one stream, so what is submitted later is done later.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from penstock.errors import UnavailableError
from penstock.movers.base import WAIT_S
from penstock.movers.cuda.bell import Bell
from penstock.movers.cuda.calls import choose_calls
from penstock.movers.cuda.marks import Marks
from penstock.movers.cuda.packer import Packer
from penstock.movers.cuda.pinned import PinnedMemory, register, unregister
from penstock.movers.cuda.staging import StagingRing, StagingSize
from penstock.movers.cuda.streams import Stream, StreamEvent
from penstock.vocabulary.checksums import SUM_BYTES, key_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.handoff.driver.parts import PartForm
    from penstock.movers.cuda.calls import Calls
    from penstock.movers.cuda.staging import Manifest, StagingBuffer
    from penstock.tiers.tensors import TensorTier
    from penstock.vocabulary.layout import Layout

Window = Any
"""Bytes of a berth: a tensor on the device, or an array of pinned memory."""
PARTS = 8
"""Parts under way at a time: their tables are small, and the device works in order."""
STAGED = 2
"""Parts that lie in staging: one is packed while another leaves."""
PROMPTS_KEPT = 64
"""Lists of slots and keys whose arrays are kept: every layer of a prompt has the same."""


def device_berths(device: str | int | torch.device = "cuda") -> Callable[[int], Any]:
    """Makes landing areas of a device's memory, for `InprocFabric.target`."""

    def allocate(size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise UnavailableError(f"{size >> 20} MiB for a landing area: {error}") from error

    return allocate


def pin_memory(memory: NDArray[np.uint8]) -> Callable[[], None]:
    """Registers memory of the host for copies of the device, for `SharedTarget` and its writers.

    It takes about a twentieth of a second for 64 MiB, once for an area. Returns what undoes it.

    Raises:
        UnavailableError: the memory cannot be pinned.
    """
    registered = register([(memory.ctypes.data, len(memory))])
    return lambda: unregister(registered)


class Batch(NamedTuple):
    """What one part takes along: lists for the device, and a table of its sums on the host."""

    manifest: Manifest
    sums: NDArray[np.uint64]
    sums_address: int


class Shape:
    """Staging for parts whose blocks have as many bytes, cells and groups."""

    def __init__(self, layout: Layout, block_bytes: int, part_bytes: int) -> None:
        size = StagingSize(
            batch_bytes=max(part_bytes, block_bytes), batch_count=STAGED, queue_batches=PARTS
        )
        self.ring = StagingRing(layout, size, pitch=block_bytes)
        self.rows = np.arange(self.ring.blocks, dtype=np.int32)
        cells = len(layout.cells)
        table_bytes = self.ring.blocks * cells * SUM_BYTES
        self._tables = PinnedMemory(PARTS * table_bytes)
        tables = self._tables.bytes.view(np.uint64).reshape(PARTS, self.ring.blocks, cells)
        self.free = deque(
            Batch(manifest, table, self._tables.address + number * table_bytes)
            for number, (manifest, table) in enumerate(zip(self.ring.free, tables, strict=True))
        )

    def begin(self, keys: tuple[bytes, ...]) -> tuple[Batch, StagingBuffer]:
        """Tables and staging for a part with these keys."""
        if len(keys) > self.ring.blocks:
            raise UnavailableError(
                f"a part has {len(keys)} blocks, staging has room for {self.ring.blocks}: "
                "berth_bytes must be smaller"
            )
        batch = self.free.popleft()
        batch.manifest.count = len(keys)
        batch.manifest.seeds[: len(keys)] = seeds_of(keys)
        # Whose staging this was: one stream does all the work, so it is empty in time.
        berth, _ = self.ring.next_berth(batch.manifest)
        return batch, berth

    def close(self) -> None:
        """Gives everything back; nothing may be under way."""
        self.ring.close()
        self._tables.close()


class Kernels(NamedTuple):
    """The kernels of one form on one side."""

    shape: Shape
    packer: Packer
    calls: Calls


class Device:
    """Stream, staging and kernels of one direction."""

    def __init__(self, tier: TensorTier, part_bytes: int) -> None:
        self.stream = Stream()
        self.bell = Bell()
        self._marks = Marks(self.stream.handle, self.bell, StreamEvent)
        self._tier = tier
        self._part_bytes = part_bytes
        self._shapes: dict[tuple[int, int, int], Shape] = {}
        self._kernels: dict[PartForm, Kernels] = {}

    @property
    def has_room(self) -> bool:
        """Whether a part of any shape can be submitted."""
        return all(shape.free for shape in self._shapes.values())

    def kernels_of(self, form: PartForm, layout_of: Callable[[], Layout]) -> Kernels:
        """The kernels for parts of a form whose blocks lie as a layout says; prepared once."""
        found = self._kernels.get(form)
        if found is None:
            layout = layout_of()
            key = (form.block_bytes, form.cell_count, len(layout.groups))
            shape = self._shapes.get(key)
            if shape is None:
                shape = self._shapes[key] = Shape(layout, form.block_bytes, self._part_bytes)
            packer = Packer(layout, self._tier.addresses, shape.ring)
            found = self._kernels[form] = Kernels(shape, packer, choose_calls(packer.kernels))
        return found

    def close(self) -> None:
        """Waits for what is under way, and gives everything back.

        Raises:
            UnavailableError: it does not end; then nothing is given back, as it is still used.
        """
        if not self._marks.make().wait(WAIT_S):
            raise UnavailableError(f"parts have not ended on the device after {WAIT_S:g} s")
        for shape in self._shapes.values():
            shape.close()
        self._marks.close()
        self.bell.close()
        self.stream.close()


def address_of(memory: Window) -> int:
    """Where bytes of a berth are."""
    return int(memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr())


@lru_cache(maxsize=PROMPTS_KEPT)
def seeds_of(keys: tuple[bytes, ...]) -> NDArray[np.uint64]:
    """What the seeds of each key's cells are made from."""
    return np.array([key_seed(key) for key in keys], dtype=np.uint64)


@lru_cache(maxsize=PROMPTS_KEPT)
def numbers_of(slots: tuple[int, ...]) -> NDArray[np.int32]:
    """Slots, as kernels read them."""
    return np.array(slots, dtype=np.int32)
