"""Blocks between a GPU and pinned host memory, without a thread and without waiting.

    save:       gather + sums ─→ staging ─→ DMA in turns ─→ host slots
    load:       host slots ─→ DMA in turns ─→ staging ─→ sums, verdict ─→ scatter
    duplicate:  gather ─→ staging ─→ scatter

`poll` asks which batches have ended, reports the copies that have, and submits as much as the
budget and the queue allow. The device does the rest in order:

| hazard                       | what waits                                                   |
|------------------------------|--------------------------------------------------------------|
| save: the block is not there | the pack waits for the step that last touched the slot        |
| load: the slot is in use     | the scatter waits for the last step that could touch the slot |
| a slot is written again      | `guard` has the engine's stream wait for the pack             |
| host slots                   | reported once the CPU has seen the end                        |
| staging                      | a batch waits on the device until the one before has left     |

The one rule: a block whose sums are not those of its key is not written anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.cache.ledger import BlockFault
from penstock.movers.cuda.link import Link
from penstock.movers.cuda.packer import Packer
from penstock.movers.cuda.queue import Batch, QueuedMover
from penstock.movers.cuda.runs import equal_in_turns, in_turns, run_ends
from penstock.movers.cuda.staging import VERDICT_BYTES, StagingRing, StagingSize, pitch_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.machine.effects import Copy
    from penstock.movers.cuda.pinned import PinnedArea
    from penstock.movers.cuda.queue import DeviceSlots
    from penstock.movers.cuda.runs import Turn
    from penstock.movers.cuda.staging import Berth, Manifest
    from penstock.movers.cuda.streams import Event, Steps
    from penstock.vocabulary.checksums import Algorithm


class CudaMover(QueuedMover):
    """Copies blocks one way through staging: `SaveMover`, `LoadMover`, `DuplicateMover`.

    Args:
        device: The engine's tier, on the current CUDA device.
        algorithm: Must be `MIX64`, which the kernels compute.
        steps: The engine's steps; movers of one device tier share them.
        size: How much device memory to take; `staging_bytes` tells what it came to.
        host_stride: Bytes between two slots of the host, where blocks go there.
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
        self._ring = StagingRing(device.layout, size, pitch=pitch)
        self._packer = Packer(device.layout, device.addresses, self._ring)
        self._link = Link()

    @property
    def staging_bytes(self) -> int:
        """Device memory taken for staging."""
        return self._ring.device_bytes

    def _default_size(self) -> StagingSize:
        _, total_bytes = torch.cuda.mem_get_info()
        return StagingSize.for_device(total_bytes)

    def close(self) -> None:
        """Waits for what is in flight and gives everything back."""
        self._link.wait()
        self._kernels.wait()
        self._ring.close()
        self._link.close()
        self._kernels.close()

    @property
    def _room(self) -> int:
        return self._ring.blocks if self._ring.free else 0

    def _take_manifest(self) -> Manifest:
        return self._ring.free.popleft()

    def _give_back(self, batch: Batch) -> None:
        self._ring.free.append(batch.manifest)

    def _turns(
        self, batch: Batch, berth: Berth, slots: NDArray[np.int32], host: PinnedArea
    ) -> list[Turn]:
        """How a batch goes over the link.

        Blocks that follow each other on both sides go together, but not across the end of a
        registered extent.
        """
        job, pitch = batch.job, self._ring.pitch
        if job.road is None:
            job.road = self._survey(slots, host)
        hosts, ends = job.road
        at, end = batch.first, batch.first + batch.manifest.count
        turn_bytes = self._ring.size.turn_bytes
        if ends is None:
            return equal_in_turns(berth.staged, pitch, hosts[at:end], self._block_bytes, turn_bytes)
        extents: list[tuple[int, int, int]] = []
        first = berth.staged - at * pitch
        while at < end:
            stop = min(ends[at], end)
            length = (stop - at - 1) * pitch + self._block_bytes
            extents.append((first + at * pitch, hosts[at], length))
            at = stop
        return in_turns(extents, turn_bytes)

    def _survey(
        self, slots: NDArray[np.int32], host: PinnedArea
    ) -> tuple[list[int], list[int] | None]:
        """Where each block of a copy lies in host memory, and where its run ends, if there are any.

        Runs of one block, none of them longer than a turn, need not be told from each other.
        """
        stride = host.slot_stride
        hosts: list[int] = (host.address + slots.astype(np.int64) * stride).tolist()
        ends = run_ends(slots, run_slots=host.run_slots if self._ring.pitch == stride else 1)
        alone = len(ends) == len(set(ends)) and self._block_bytes <= self._ring.size.turn_bytes
        return hosts, None if alone else ends


class SaveMover(CudaMover):
    """Out of the device into pinned host memory; sums are made on the way."""

    def __init__(
        self,
        source: DeviceSlots,
        target: PinnedArea,
        algorithm: Algorithm,
        *,
        steps: Steps | None = None,
        size: StagingSize | None = None,
    ) -> None:
        super().__init__(source, algorithm, steps=steps, size=size, host_stride=target.slot_stride)
        self._host = target

    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        return copy.source_slots

    def _device_done(self, batch: Batch) -> Event:
        return batch.manifest.ready

    def _launch(self, batch: Batch, step: Event | None) -> None:
        manifest, stream = batch.manifest, self._kernels
        berth, empty = self._ring.next_berth(manifest)
        manifest.send(stream)
        for event in (empty, step):
            if event is not None:
                stream.wait_for(event)
        self._packer.gather(manifest, berth, stream.number)
        self._packer.publish(manifest, berth, self._host.sums_address, stream.number)
        manifest.ready.record(stream.handle)
        self._link.follow(manifest.ready)
        slots = batch.job.copy.target_slots
        self._link.send_to_host(self._turns(batch, berth, slots, self._host))
        manifest.ended.record(self._link.stream.handle)

    def _land(self, batch: Batch) -> None:
        """The block and its sums are in host memory."""


class LoadMover(CudaMover):
    """Out of pinned host memory into the device; what fails its sums is not written there."""

    def __init__(
        self,
        source: PinnedArea,
        target: DeviceSlots,
        algorithm: Algorithm,
        *,
        steps: Steps | None = None,
        size: StagingSize | None = None,
    ) -> None:
        super().__init__(target, algorithm, steps=steps, size=size, host_stride=source.slot_stride)
        self._host = source

    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        return copy.target_slots

    def _launch(self, batch: Batch, step: Event | None) -> None:
        manifest, stream = batch.manifest, self._kernels
        berth, empty = self._ring.next_berth(manifest)
        if empty is not None:
            self._link.follow(empty)
        slots = batch.job.copy.source_slots
        self._link.send_to_device(self._turns(batch, berth, slots, self._host))
        manifest.ready.record(self._link.stream.handle)
        manifest.send(stream)
        stream.wait_for(manifest.ready)
        self._packer.sum(manifest, berth, stream.number)
        self._packer.judge(manifest, berth, self._host.sums_address, stream.number)
        if step is not None:
            stream.wait_for(step)
        self._packer.scatter(manifest, berth, stream.number)
        manifest.ended.record(stream.handle)

    def _land(self, batch: Batch) -> None:
        wrong = np.flatnonzero(batch.manifest.told[: batch.manifest.count])
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

    def _launch(self, batch: Batch, step: Event | None) -> None:
        manifest = batch.manifest
        berth, _ = self._ring.next_berth(manifest)
        manifest.send(self._kernels)
        if step is not None:
            self._kernels.wait_for(step)
        self._kernels.clear(berth.verdicts, manifest.count * VERDICT_BYTES)
        self._packer.gather(manifest, berth, self._kernels.number, summed=False)
        self._packer.scatter(manifest, berth, self._kernels.number)
        manifest.ended.record(self._kernels.handle)

    def _land(self, batch: Batch) -> None:
        """Nothing left the device."""
