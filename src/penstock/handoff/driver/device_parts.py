"""Parts out of and into tensors of a CUDA device, by pack kernels that sum on the way.

    DeviceReader:  slots ─gather, sums─→ staging ─copy─→ berth        sums ─→ the notice
                   slots ─gather, sums─→ berth, where that is GPU memory
    DeviceTaker:   berth ─copy─→ staging ─sums─→ verdict ─scatter─→ slots

The CPU touches no byte of a part: it submits one batch of calls for each, and looks at one event.
A berth is memory that two processes share: of the target's GPU, mapped by both (`DeviceBytes`), or
of the host, pinned by both (`pin_memory`).

| hazard                            | what orders it                                             |
|-----------------------------------|------------------------------------------------------------|
| the part is not computed          | progress is reported after its event has passed            |
| a slot to be filled is still read | engines claim slots that no step under way touches          |
| a berth, a staging buffer         | used again when the CPU has seen the event                  |
| the area was left                 | `forget` waits for the copy that was submitted              |

The verdict on a block is found on the device, over a copy that no peer can reach, and the scatter
that follows it writes the blocks that were found good, and no others.

Readers and takers have a `Device` each: one stream, staging for parts of each `Shape` (with a
`Batch` of tables for each part under way), and kernels compiled once for each form (`Kernels`).

Two rules: a part is reported intact after the CPU has seen the verdict on every block of it; and
tables and staging of a part are used again only when the CPU has seen its end. The device works in
one stream, so what is submitted later is done later.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from penstock.errors import UnavailableError
from penstock.handoff.driver.window_scatter import WindowScatter
from penstock.movers.base import WAIT_S
from penstock.movers.cuda.buffers import (
    VECTOR_BYTES,
    PinnedMemory,
    StagingRing,
    StagingSize,
    register,
    unregister,
)
from penstock.movers.cuda.calls import calls_for
from penstock.movers.cuda.landing import DeviceBytes
from penstock.movers.cuda.marks import Marks
from penstock.movers.cuda.packer import Packer
from penstock.movers.cuda.streams import Bell, DescriptorBell, Stream, StreamEvent
from penstock.movers.packing import PROMPTS_KEPT, seeds_of
from penstock.vocabulary.checksums import SUM_BYTES
from penstock.vocabulary.layout import narrow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.handoff.driver.parts import PartForm, RouteParts
    from penstock.handoff.protocol.effects import Take
    from penstock.handoff.protocol.identity import WriteId
    from penstock.movers.cuda.buffers import Manifest, StagingBuffer
    from penstock.movers.cuda.calls import Calls
    from penstock.tiers.tensors import TensorTier
    from penstock.vocabulary.layout import Layout


Window: TypeAlias = "NDArray[np.uint8] | DeviceBytes"
"""Bytes of a berth, in pinned memory or in that of a GPU."""
PARTS = 8
"""Parts under way at a time: their tables are small, and the device works in order."""
STAGED = 2
"""Parts that lie in staging: one is packed while another leaves."""
FORGET_S = 10.0
"""A copy of one part that has not ended by then means that the device is lost."""


class _Reading(NamedTuple):
    write: WriteId
    shape: Shape
    batch: Batch


class DeviceReader:
    """Packs parts out of the tensors of a device; see `ArrayReader`. Sums are `MIX64`.

    Args:
        tier: the KV of the rank, on the current device.
        part_bytes: the largest part: the bytes of a berth.
    """

    def __init__(self, tier: TensorTier, *, part_bytes: int) -> None:
        self.slot_count = tier.slot_count
        self._tier = tier
        self._device = Device(tier, part_bytes)
        self._reading: deque[_Reading] = deque()
        self._forgotten: set[WriteId] = set()

    def read(
        self,
        write: WriteId,
        form: PartForm,
        slots: Sequence[int],
        keys: Sequence[bytes],
        memory: Window,
    ) -> bytes | None:
        if form.packed is None:
            return b""
        kernels = self._kernels_of(form)
        shape, packer, calls = kernels
        stream, count = self._device.stream, len(slots)
        batch, berth = shape.begin(tuple(keys))
        manifest = batch.manifest
        manifest.slots[:, :count] = numbers_of(tuple(slots))
        manifest.targets[0, :count] = shape.rows[:count]
        manifest.send(calls, stream)
        if isinstance(memory, DeviceBytes) and memory.address % VECTOR_BYTES == 0:
            packer.gather(calls, manifest, berth, stream, into=memory.address)
        else:
            packer.gather(calls, manifest, berth, stream)
            calls.copy(stream, address_of(memory), berth.staged, len(memory))
        packer.publish(calls, manifest, berth, batch.sums_address, stream)
        calls.record(manifest.ended, stream)
        self._device.rings.ring_behind(manifest.ended, calls)
        calls.make()
        self._reading.append(_Reading(write, shape, batch))
        return None

    @property
    def has_room(self) -> bool:
        return self._device.has_room

    def ended(self) -> list[tuple[WriteId, bytes]]:
        found = []
        self._device.rings.quiet()
        while self._reading and self._reading[0].batch.manifest.ended.reached:
            write, shape, batch = self._reading.popleft()
            if write in self._forgotten:
                self._forgotten.remove(write)
            else:
                sums = batch.sums[: batch.manifest.count].astype("<u8", copy=False).tobytes()
                found.append((write, sums))
            shape.free.append(batch)
        return found

    def forget(self, write: WriteId) -> None:
        """Waits for the copy of this write, if one is under way: it moves nothing after this.

        Raises `UnavailableError`: the device does not come to its end.
        """
        for reading in self._reading:
            if reading.write == write:
                self._forgotten.add(write)
                if not self._device.bell.wait(reading.batch.manifest.ended, FORGET_S):
                    raise UnavailableError(f"a copy of the device has not ended in {FORGET_S} s")

    @property
    def busy(self) -> bool:
        return bool(self._reading)

    @property
    def descriptor(self) -> int:
        """Readable when parts have ended."""
        return self._device.descriptor

    def close(self) -> None:
        self._device.close()

    def _kernels_of(self, form: PartForm) -> Kernels:
        return self._device.kernels_of(form, lambda: narrow(self._tier.layout, form.source_cuts))


class _Taking(NamedTuple):
    take: Take
    shape: Shape
    batch: Batch
    put_away: Callable[[], None] | None
    """What is left to do once the part is known to be intact: blocks of another size,"""
    scratch: torch.Tensor | None
    """of which this is a copy."""
    calls: Calls


class DeviceTaker:
    """Puts parts into the tensors of a device; see `ArrayTaker`. Sums are `MIX64`.

    Args:
        tier: the KV of the rank, on the current device.
        part_bytes: the largest part: the bytes of a berth.
    """

    def __init__(self, tier: TensorTier, *, part_bytes: int) -> None:
        self.slot_count = tier.slot_count
        self._tier = tier
        self._device = Device(tier, part_bytes)
        self._torch_stream = torch.cuda.ExternalStream(self._device.stream.number)
        self._taking: deque[_Taking] = deque()
        self._scatters: dict[PartForm, WindowScatter] = {}
        self._part_bytes = part_bytes
        self._scratches: list[torch.Tensor] = []
        """Free copies of parts with blocks of another size; taken when there are such."""

    def take(
        self,
        take: Take,
        route: RouteParts,
        form: PartForm,
        memory: Window,
        keys: Sequence[bytes],
        slots: Sequence[int],
    ) -> bool | None:
        if form.packed is None:
            return not take.sums
        if len(take.sums) != len(keys) * form.cell_count * SUM_BYTES:
            return False
        whole = route.source_ratio == route.target_ratio == 1
        shape, packer, calls = self._kernels_of(form, whole=whole)
        # Staging is used again before the verdict is seen, and others can write the berth: what is
        # put away later is this copy of what is summed. What may fail comes before the calls are
        # recorded: else they would be made with the next part's, and read an area that is gone.
        scratch = None if whole else self._take_scratch()
        stream, count = self._device.stream, len(keys)
        put_away = None
        if scratch is not None:
            put_away = self._put_away_of(route, form, scratch, count, slots)
        numbers = numbers_of(tuple(slots))
        batch, berth = shape.begin(tuple(keys))
        manifest = batch.manifest
        manifest.slots[0, :count] = shape.rows[:count]
        manifest.targets[:, :count] = numbers if whole else -1
        batch.sums[:count] = np.frombuffer(take.sums, dtype="<u8").reshape(count, -1)
        manifest.send(calls, stream)
        calls.copy(stream, berth.staged, address_of(memory), len(memory))
        if scratch is not None:
            calls.copy(stream, scratch.data_ptr(), berth.staged, len(memory))
        packer.sum(calls, manifest, berth, stream)
        packer.judge(calls, manifest, berth, batch.sums_address, stream)
        if whole:
            packer.scatter(calls, manifest, berth, stream)
        calls.record(manifest.ended, stream)
        self._device.rings.ring_behind(manifest.ended, calls)
        calls.make()
        self._taking.append(_Taking(take, shape, batch, put_away, scratch, calls))
        return None

    @property
    def has_room(self) -> bool:
        return self._device.has_room

    def ended(self) -> list[tuple[Take, bool]]:
        found = []
        self._device.rings.quiet()
        while self._taking and self._taking[0].batch.manifest.ended.reached:
            taking = self._taking[0]
            manifest = taking.batch.manifest
            intact = not manifest.bad_cells[: manifest.count].any()
            if intact and taking.put_away is not None:
                taking.put_away()
                manifest.ended.record(self._device.stream.handle)
                self._device.rings.ring_behind(manifest.ended, taking.calls)
                taking.calls.make()
                self._taking[0] = taking._replace(put_away=None)
                break
            self._taking.popleft()
            taking.shape.free.append(taking.batch)
            if taking.scratch is not None:
                self._scratches.append(taking.scratch)
            found.append((taking.take, intact))
        return found

    @property
    def busy(self) -> bool:
        return bool(self._taking)

    @property
    def descriptor(self) -> int:
        """Readable when parts have ended."""
        return self._device.descriptor

    def close(self) -> None:
        self._device.close()

    def _kernels_of(self, form: PartForm, *, whole: bool) -> Kernels:
        def layout() -> Layout:
            # Blocks of another size are summed where they lie packed, and belong to no slot yet.
            assert form.packed is not None
            return narrow(self._tier.layout, form.target_cuts) if whole else form.packed

        return self._device.kernels_of(form, layout)

    def _take_scratch(self) -> torch.Tensor:
        if self._scratches:
            return self._scratches.pop()
        try:
            return torch.empty(self._part_bytes, dtype=torch.uint8, device=self._tier.device)
        except torch.OutOfMemoryError as error:
            raise UnavailableError(f"{self._part_bytes} bytes for a part: {error}") from error

    def _put_away_of(
        self,
        route: RouteParts,
        form: PartForm,
        scratch: torch.Tensor,
        count: int,
        slots: Sequence[int],
    ) -> Callable[[], None]:
        scatter = self._scatters.get(form)
        if scatter is None:
            scatter = self._scatters[form] = WindowScatter(route, form, self._tier)

        def put_away() -> None:
            with torch.cuda.stream(self._torch_stream):
                scatter.scatter(scratch, count, slots)

        return put_away


def pin_memory(memory: NDArray[np.uint8]) -> Callable[[], None]:
    """Registers memory of the host for copies of the device, for `SharedTarget` and its writers.

    It takes about a twentieth of a second for 64 MiB, once for an area. Returns what undoes it.
    Raises `UnavailableError`: the memory cannot be pinned.
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
        self.rings = DescriptorBell()
        self._marks = Marks(self.stream.handle, self.bell, StreamEvent)
        self._tier = tier
        self._part_bytes = part_bytes
        self._shapes: dict[tuple[int, int, int], Shape] = {}
        self._kernels: dict[PartForm, Kernels] = {}

    @property
    def has_room(self) -> bool:
        """Whether a part of any shape can be submitted."""
        return all(shape.free for shape in self._shapes.values())

    @property
    def descriptor(self) -> int:
        """Readable when a part has ended."""
        return self.rings.descriptor

    def kernels_of(self, form: PartForm, layout_of: Callable[[], Layout]) -> Kernels:
        """The kernels for parts of a form whose blocks have this layout; prepared once."""
        found = self._kernels.get(form)
        if found is None:
            layout = layout_of()
            key = (form.block_bytes, form.cell_count, len(layout.groups))
            shape = self._shapes.get(key)
            if shape is None:
                shape = self._shapes[key] = Shape(layout, form.block_bytes, self._part_bytes)
            packer = Packer(layout, self._tier.addresses, shape.ring)
            found = self._kernels[form] = Kernels(shape, packer, calls_for(packer.kernels))
        return found

    def close(self) -> None:
        """Waits for what is under way, and gives everything back.

        Raises `UnavailableError`: it does not end; then nothing is given back, as it is still used.
        """
        if not self._marks.make().wait(WAIT_S):
            raise UnavailableError(f"parts have not ended on the device after {WAIT_S:g} s")
        for shape in self._shapes.values():
            shape.close()
        self._marks.close()
        self.bell.close()
        self.rings.close()
        self.stream.close()


def address_of(memory: Window) -> int:
    """Where bytes of a berth are."""
    return memory.address if isinstance(memory, DeviceBytes) else int(memory.ctypes.data)


@lru_cache(maxsize=PROMPTS_KEPT)
def numbers_of(slots: tuple[int, ...]) -> NDArray[np.int32]:
    """Slots, as kernels read them."""
    return np.array(slots, dtype=np.int32)
