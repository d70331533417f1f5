"""Copies blocks between a GPU and pinned host memory, without threads and without waiting.

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

The one rule: a block whose checksums are wrong is not written anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.cache.operations import BlockFault
from penstock.movers.cuda.calls import choose_calls
from penstock.movers.cuda.packer import Packer
from penstock.movers.cuda.queue import CopyBatch, QueuedMover
from penstock.movers.cuda.runs import Road
from penstock.movers.cuda.staging import (
    IDLE_QUEUES,
    VERDICT_BYTES,
    StagingRing,
    StagingSize,
    pitch_of,
)
from penstock.movers.cuda.streams import CudaLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.machine.effects import Copy
    from penstock.movers.cuda.calls import Calls
    from penstock.movers.cuda.packer import PackingKernel
    from penstock.movers.cuda.pinned import PinnedArea
    from penstock.movers.cuda.queue import DeviceSlots
    from penstock.movers.cuda.staging import Manifest, StagingBuffer
    from penstock.movers.cuda.streams import Steps, StreamEvent
    from penstock.vocabulary.checksums import Algorithm


class CudaMover(QueuedMover):
    """Copies blocks one way through staging: `SaveMover`, `LoadMover`, `DuplicateMover`.

    Args:
        device: The engine's tier, on the current CUDA device.
        algorithm: Must be `MIX64`, which the kernels compute.
        steps: The engine's steps; movers of one device tier share them.
        size: How much device memory to use for staging; `staging_bytes` is the result.
        calls: Makes the calls to the device, for these kernels.
        host_stride: Bytes from one host slot to the next, for copies to or from the host.
    """

    def __init__(
        self,
        device: DeviceSlots,
        algorithm: Algorithm,
        *,
        steps: Steps | None = None,
        size: StagingSize | None = None,
        calls: Callable[[Sequence[PackingKernel]], Calls] = choose_calls,
        host_stride: int | None = None,
    ) -> None:
        super().__init__(device, algorithm, steps)
        size = size or self._default_size()
        pitch = pitch_of(self._block_bytes, host_stride)
        self._ring = StagingRing(device.layout, size, pitch=pitch, queues=IDLE_QUEUES)
        self._packer = Packer(device.layout, device.addresses, self._ring)
        self._calls = calls(self._packer.kernels)
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
        calls: Callable[[Sequence[PackingKernel]], Calls] = choose_calls,
    ) -> None:
        stride = target.slot_stride
        super().__init__(source, algorithm, steps=steps, size=size, calls=calls, host_stride=stride)
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
        calls: Callable[[Sequence[PackingKernel]], Calls] = choose_calls,
    ) -> None:
        stride = source.slot_stride
        super().__init__(target, algorithm, steps=steps, size=size, calls=calls, host_stride=stride)
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
        calls: Callable[[Sequence[PackingKernel]], Calls] = choose_calls,
    ) -> None:
        if source is not target:
            raise ValueError("source and target of a duplicate are two tiers, must be one")
        super().__init__(source, algorithm, steps=steps, size=size, calls=calls)

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
