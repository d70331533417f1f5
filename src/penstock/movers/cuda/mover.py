"""The engine's KV memory on a GPU as a tier, and copies between it and pinned host memory.

    save:       gather + sums ─→ staging ─→ DMA in turns ─→ host slots
    load:       host slots ─→ DMA in turns ─→ staging ─→ sums, verdict ─→ scatter
    duplicate:  gather ─→ staging ─→ scatter

Order on the device:

| hazard                          | what waits                                                   |
|---------------------------------|--------------------------------------------------------------|
| save: the block is not computed | the pack waits for the last step that uses the slot           |
| load: the slot is in use        | the scatter waits for the last step that may use the slot     |
| a slot is written again         | `guard` makes the engine's stream wait for the pack           |
| host slots                      | reported when the CPU has seen the end                        |
| staging                         | a batch waits on the device until the one before has left     |

    device = CudaTier(TensorTier.of(…))
    save = device.saves_to(host)            # HostTier; registered for DMA once, for both ways
    load = device.loads_from(host)
    twin = device.duplicates()

The rules:

- A block whose checksums are wrong is not written anywhere.
- All movers of a tier share its `Steps`, so a step is reported once for all.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.cache.operations import BlockFault
from penstock.movers.cuda.buffers import (
    IDLE_QUEUES,
    VERDICT_BYTES,
    RegisteredHost,
    StagingRing,
    StagingSize,
    pitch_of,
)
from penstock.movers.cuda.calls import calls_for
from penstock.movers.cuda.layers import LayerLoadMover
from penstock.movers.cuda.packer import Packer
from penstock.movers.cuda.queue import CopyBatch, QueuedMover, slots_of_any
from penstock.movers.cuda.streams import CudaLink, Steps
from penstock.movers.cuda.tables import Road

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.machine.effects import Copy
    from penstock.movers.cuda.buffers import Manifest, PinnedArea, StagingBuffer
    from penstock.movers.cuda.queue import DeviceSlots
    from penstock.movers.cuda.streams import StreamEvent
    from penstock.tiers.host import HostTier
    from penstock.tiers.tensors import TensorTier
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.reshard import Blocks


class CudaMover(QueuedMover):
    """Copies blocks one way through staging: `SaveMover`, `LoadMover`, `DuplicateMover`.

    Args:
        device: The engine's tier, on the current CUDA device.
        algorithm: Must be `MIX64`, which the kernels compute.
        steps: The engine's steps; movers of one device tier share them.
        size: How much device memory to use for staging; `staging_bytes` is the result.
        host_stride: Bytes from one host slot to the next, for copies to or from the host.
    """

    def __init__(
        self,
        device: DeviceSlots,
        algorithm: Algorithm,
        *,
        steps: Steps | None = None,
        size: StagingSize | None = None,
        host_stride: int | None = None,
    ) -> None:
        super().__init__(device, algorithm, steps)
        size = size or self._default_size()
        pitch = pitch_of(self._block_bytes, host_stride)
        self._ring = StagingRing(device.layout, size, pitch=pitch, queues=IDLE_QUEUES)
        self._packer = Packer(device.layout, device.addresses, self._ring)
        self._calls = calls_for(self._packer.kernels)
        self._link = CudaLink()

    @property
    def staging_bytes(self) -> int:
        """Device memory taken for staging."""
        return self._ring.device_bytes

    def _default_size(self) -> StagingSize:
        _, total_bytes = torch.cuda.mem_get_info()
        return StagingSize.for_device(total_bytes)

    def close(self) -> None:
        """Waits for copies in flight and releases all memory.

        Raises `UnavailableError`: they do not end; then nothing is released, as it is still used.
        """
        self.wait()
        self._link.wait()
        self._kernels.wait()
        self._ring.close()
        self._link.close()
        self._kernels.close()
        self._bell.close()

    @property
    def _room(self) -> int:
        queue = self._ring.size.queue_batches * (IDLE_QUEUES if self._idle else 1)
        return self._ring.blocks if len(self._flying) < queue else 0

    def _take_manifest(self) -> Manifest:
        return self._ring.free.popleft()

    def _give_back(self, batch: CopyBatch) -> None:
        self._ring.free.append(batch.manifest)

    def _extents(
        self,
        batch: CopyBatch,
        berth: StagingBuffer,
        slots: NDArray[np.int32],
        host: PinnedArea,
        *,
        to_host: bool,
    ) -> list[int]:
        """The copies of a batch over the link: target, source and length of each run of blocks.

        Blocks that are adjacent on both sides are one run, but not across the end of a registered
        extent.
        """
        job, pitch, stride = batch.job, self._ring.pitch, host.slot_stride
        if job.road is None:
            job.road = Road.survey(slots, run_slots=host.run_slots if pitch == stride else 1)
        first, count = batch.first, batch.manifest.count
        if job.road.alone:
            extents = np.empty((count, 3), dtype=np.int64)
            extents[:, 0 if to_host else 1] = slots[batch.part] * np.int64(stride) + host.address
            extents[:, 1 if to_host else 0] = np.arange(count) * pitch + berth.staged
            extents[:, 2] = self._block_bytes
            return extents.ravel().tolist()
        return [
            word
            for at, blocks in job.road.runs(first, first + count)
            for word in _in_order(
                host.address + job.road.slots[at] * stride,
                berth.staged + (at - first) * pitch,
                (blocks - 1) * pitch + self._block_bytes,
                to_host=to_host,
            )
        ]


def _in_order(there: int, staged: int, length: int, *, to_host: bool) -> tuple[int, int, int]:
    return (there, staged, length) if to_host else (staged, there, length)


class SaveMover(CudaMover):
    """From the device to pinned host memory; computes the checksums."""

    def __init__(
        self,
        source: DeviceSlots,
        target: PinnedArea,
        algorithm: Algorithm,
        *,
        steps: Steps | None = None,
        size: StagingSize | None = None,
    ) -> None:
        stride = target.slot_stride
        super().__init__(source, algorithm, steps=steps, size=size, host_stride=stride)
        self._host = target

    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        return copy.source_slots

    def _device_done(self, batch: CopyBatch) -> StreamEvent:
        return batch.manifest.ready

    def _launch(self, batch: CopyBatch, step: StreamEvent | None) -> None:
        manifest, stream = batch.manifest, self._kernels
        calls = self._calls
        berth, empty = self._ring.next_berth(manifest)
        manifest.send(calls, stream)
        for event in (empty, step):
            if event is not None:
                calls.wait(stream, event)
        self._packer.gather(calls, manifest, berth, stream)
        self._packer.publish(calls, manifest, berth, self._host.sums_address, stream)
        calls.record(manifest.ready, stream)
        calls.follow(self._link, manifest.ready)
        slots = batch.job.copy.target_slots
        extents = self._extents(batch, berth, slots, self._host, to_host=True)
        calls.send(self._link, extents, self._ring.size.turn_bytes)
        calls.mark(manifest.ended, self._link)

    def _land(self, batch: CopyBatch) -> None:
        pass


class LoadMover(CudaMover):
    """From pinned host memory to the device; corrupt blocks are not written there."""

    def __init__(
        self,
        source: PinnedArea,
        target: DeviceSlots,
        algorithm: Algorithm,
        *,
        steps: Steps | None = None,
        size: StagingSize | None = None,
    ) -> None:
        stride = source.slot_stride
        super().__init__(target, algorithm, steps=steps, size=size, host_stride=stride)
        self._host = source

    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        return copy.target_slots

    def _launch(self, batch: CopyBatch, step: StreamEvent | None) -> None:
        manifest, stream = batch.manifest, self._kernels
        calls = self._calls
        berth, empty = self._ring.next_berth(manifest)
        if empty is not None:
            calls.follow(self._link, empty)
        slots = batch.job.copy.source_slots
        extents = self._extents(batch, berth, slots, self._host, to_host=False)
        calls.send(self._link, extents, self._ring.size.turn_bytes)
        calls.mark(manifest.ready, self._link)
        manifest.send(calls, stream)
        calls.wait(stream, manifest.ready)
        self._packer.sum(calls, manifest, berth, stream)
        self._packer.judge(calls, manifest, berth, self._host.sums_address, stream)
        if step is not None:
            calls.wait(stream, step)
        self._packer.scatter(calls, manifest, berth, stream)
        calls.record(manifest.ended, stream)

    def _land(self, batch: CopyBatch) -> None:
        wrong = np.flatnonzero(batch.manifest.bad_cells[: batch.manifest.count])
        batch.job.faults += [(batch.first + int(at), BlockFault.CORRUPT) for at in wrong]


class DuplicateMover(CudaMover):
    """From one slot of the device to another: unfinished blocks, without key or sums."""

    def __init__(
        self,
        source: DeviceSlots,
        target: DeviceSlots,
        algorithm: Algorithm,
        *,
        steps: Steps | None = None,
        size: StagingSize | None = None,
    ) -> None:
        if source is not target:
            raise ValueError("source and target of a duplicate are two tiers, must be one")
        super().__init__(source, algorithm, steps=steps, size=size)

    def _default_size(self) -> StagingSize:
        # A forked request copies a block or two.
        return StagingSize(batch_bytes=4 << 20)

    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        return np.concatenate(
            [np.atleast_2d(copy.source_slots), np.atleast_2d(copy.target_slots)], axis=0
        )

    def _launch(self, batch: CopyBatch, step: StreamEvent | None) -> None:
        manifest, stream, calls = batch.manifest, self._kernels, self._calls
        berth, _ = self._ring.next_berth(manifest)
        manifest.send(calls, stream)
        if step is not None:
            calls.wait(stream, step)
        calls.clear(stream, berth.verdicts, manifest.count * VERDICT_BYTES)
        self._packer.gather(calls, manifest, berth, stream, summed=False)
        self._packer.scatter(calls, manifest, berth, stream)
        calls.record(manifest.ended, stream)

    def _land(self, batch: CopyBatch) -> None:
        pass


logger = logging.getLogger(__name__)


class CudaTier:
    """KV tensors on the current CUDA device.

    Args:
        tier: The tensors.
        layerwise: Whether loads fill layer by layer, to be joined before they have ended.

    Raises:
        ValueError: the tensors lie elsewhere.
    """

    medium = "cuda"

    def __init__(self, tier: TensorTier, *, layerwise: bool = False) -> None:
        here = torch.device("cuda", torch.cuda.current_device())
        if tier.device != here:
            raise ValueError(f"kv lies on {tier.device}, must be on the current device, {here}")
        self.layerwise = layerwise
        self.layout: Layout = tier.layout
        self.slot_count: int = tier.slot_count
        self.steps = Steps(slots_of_any(tier.layout))
        self._tier = tier
        self._areas: dict[int, RegisteredHost] = {}

    @property
    def tensors(self) -> TensorTier:
        """The tensors themselves."""
        return self._tier

    @property
    def addresses(self) -> Mapping[int, int]:
        """Where each buffer of the layout starts."""
        return self._tier.addresses

    def blocks(self, slots: Sequence[int]) -> Blocks:
        """Raises: the CPU cannot access the device's memory."""
        return self._tier.blocks(slots)

    def saves_to(self, host: HostTier, algorithm: Algorithm) -> SaveMover:
        """The mover down to a host tier.

        Raises `UnavailableError`: the host's memory cannot be pinned, or the device has no memory
        left for staging.
        """
        mover = SaveMover(self, self._area(host), algorithm, steps=self.steps)
        _log_staging("saves", mover.staging_bytes)
        return mover

    def loads_from(self, host: HostTier, algorithm: Algorithm) -> LoadMover | LayerLoadMover:
        """The mover up from a host tier.

        Raises `UnavailableError`: as for `saves_to`.
        """
        make = LayerLoadMover if self.layerwise else LoadMover
        mover = make(self._area(host), self, algorithm, steps=self.steps)
        _log_staging("layer-wise loads" if self.layerwise else "loads", mover.staging_bytes)
        return mover

    def duplicates(self, algorithm: Algorithm) -> DuplicateMover:
        """The mover from slot to slot."""
        mover = DuplicateMover(self, self, algorithm, steps=self.steps)
        _log_staging("duplicates", mover.staging_bytes)
        return mover

    @property
    def can_give_back(self) -> bool:
        """Whether the engine has its memory where it can be given back for a while."""
        return self._tier.memory is not None

    def give_back(self) -> int:
        """Gives the memory of all blocks back, until `take_again`; returns how many bytes."""
        memory = self._tier.memory
        if memory is None:
            raise ValueError("only all blocks are given back, of an engine whose memory can be")
        return memory.give_back()

    def release(self, host: object) -> None:
        """Ends the registration of one host tier until `take_again`; no copy may use it."""
        area = self._areas.get(id(host))
        if area is not None:
            area.release()

    def take_again(self) -> None:
        """Takes the memory of the blocks again, and registers host tiers that were released.

        Raises `UnavailableError`: there is no memory, or it cannot be pinned; may be called again.
        """
        if self._tier.memory is not None:
            self._tier.memory.take_again()
        for area in self._areas.values():
            area.register_again()

    def forget(self, host: object) -> None:
        """Ends the registration of one host tier, if it has any; its movers are closed before."""
        area = self._areas.pop(id(host), None)
        if area is not None:
            area.close()

    def close(self) -> None:
        """Ends the registration of host memory; the movers must be closed before."""
        for area in self._areas.values():
            area.close()
        self._areas.clear()
        self.steps.close()

    def _area(self, host: HostTier) -> RegisteredHost:
        if id(host) not in self._areas:
            started = time.monotonic()
            self._areas[id(host)] = RegisteredHost(host)
            logger.info(
                "host memory registered: bytes=%d seconds=%.1f",
                host.arena.size,
                time.monotonic() - started,
            )
        return self._areas[id(host)]


def _log_staging(what: str, taken: int) -> None:
    logger.info("staging taken on the device: for=%s bytes=%d", what, taken)
