"""Blocks between a GPU and pinned host memory, without a thread and without waiting.

    save:       gather + sums ─→ staging ─→ DMA in pieces ─→ host slots
    load:       host slots ─→ DMA in pieces ─→ staging ─→ sums, verdict ─→ scatter
    duplicate:  gather ─→ staging ─→ scatter

`poll` asks which batches have ended, reports the copies that have, and submits as much as
budget and staging allow. The device does the rest in order:

| hazard                       | what waits                                                   |
|------------------------------|--------------------------------------------------------------|
| save: the block is not there | the pack waits for the step that last touched the slot        |
| load: the slot is in use     | the scatter waits for the last step that could touch the slot |
| a slot is written again      | `guard` has the engine's stream wait for the pack             |
| host slots                   | reported, and their sums kept, once the CPU has seen the end  |

The one rule: a block whose sums are not those of its key is not written anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch

from penstock.cache.ledger import BlockFault, Purpose
from penstock.movers.base import Moved
from penstock.movers.cuda.packer import Packer
from penstock.movers.cuda.staging import VERDICT_BYTES, StagingRing, StagingSize
from penstock.movers.cuda.streams import Piece, Steps, Stream, stream_waits
from penstock.vocabulary.checksums import SUM_BYTES, Algorithm, key_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import ArrayLike, NDArray

    from penstock.machine.effects import Copy
    from penstock.movers.cuda.pinned import PinnedArea
    from penstock.movers.cuda.staging import Berth
    from penstock.movers.cuda.streams import Event
    from penstock.vocabulary.ids import OperationId
    from penstock.vocabulary.layout import Layout


class DeviceSlots(Protocol):
    """A tier whose buffers a kernel can address."""

    layout: Layout
    slot_count: int

    @property
    def addresses(self) -> Mapping[int, int]:
        """Where each buffer of the layout starts."""
        ...


class _Job:
    """A copy and how far it is."""

    __slots__ = ("copy", "faults", "flying", "next", "step", "wanted")

    def __init__(self, copy: Copy, step: int) -> None:
        self.copy = copy
        self.step = step
        """The last step that could have touched its device slots."""
        self.next = 0
        self.flying = 0
        self.wanted = True
        self.faults: list[tuple[int, BlockFault]] = []

    @property
    def left(self) -> int:
        return len(self.copy.keys) - self.next if self.wanted else 0

    @property
    def ended(self) -> bool:
        return self.flying == 0 and self.left == 0

    def report(self) -> Moved:
        return Moved(self.copy.operation, tuple(sorted(self.faults, key=lambda fault: fault[0])))


class _Batch:
    """Some blocks of a job, in a berth."""

    __slots__ = ("berth", "first", "job")

    def __init__(self, job: _Job, berth: Berth, count: int) -> None:
        self.job = job
        self.berth = berth
        self.first = job.next
        berth.count = count


class CudaMover(ABC):
    """Copies blocks one way: `SaveMover`, `LoadMover` and `DuplicateMover` say which.

    Args:
        device: The engine's tier, on the current CUDA device.
        algorithm: Must be `MIX64`, which the kernels compute.
        steps: The engine's steps; movers of one device tier share them.
        size: How much device memory to take; `staging_bytes` tells what it came to.
    """

    default_size: ClassVar[StagingSize] = StagingSize()

    def __init__(
        self,
        device: DeviceSlots,
        algorithm: Algorithm,
        *,
        steps: Steps | None = None,
        size: StagingSize | None = None,
    ) -> None:
        if algorithm is not Algorithm.MIX64:
            raise ValueError(f"algorithm is {algorithm.value}, must be mix64 on a GPU")
        self.steps = Steps(device.slot_count) if steps is None else steps
        self._layout = device.layout
        self._block_bytes = device.layout.block_bytes
        here = torch.device("cuda", torch.cuda.current_device())
        self._ring = StagingRing(device.layout, size or self.default_size, here)
        self._packer = Packer(device.layout, device.addresses, self._ring)
        self._kernels = Stream()
        self._links = (Stream(), Stream())
        self._link_free: Event | None = None
        self._jobs: deque[_Job] = deque()
        self._flying: deque[_Batch] = deque()

    @property
    def staging_bytes(self) -> int:
        """Device memory taken for staging."""
        return self._ring.device_bytes

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self._jobs)

    def step_submitted(self, stream: int, slots: ArrayLike | None = None) -> None:
        """The engine has submitted a step to its stream; see `Steps.submitted`."""
        self.steps.submitted(stream, slots)

    def submit(self, copy: Copy) -> None:
        """Takes a copy in; its work is submitted to the device in `poll`."""
        self._jobs.append(_Job(copy, self.steps.last_of(self._device_slots(copy))))

    def abandon(self, operation: OperationId) -> None:
        """What is not on its way is left out; the copy is reported when the rest has ended."""
        for job in self._jobs:
            if job.copy.operation == operation:
                job.wanted = False
                return

    def poll(self, *, budget_bytes: int) -> tuple[list[Moved], int]:
        """Reports what ended and submits at most `budget_bytes`, but at least one block.

        Nothing is submitted while staging is full: that bounds the bytes in flight.
        """
        moved = self.collect()
        spent = 0
        for job in self._jobs:
            while job.left and self._ring.free:
                room = self._ring.blocks
                room = min(room, max(spent == 0, (budget_bytes - spent) // self._block_bytes))
                if room < 1:
                    return moved, spent
                count = min(job.left, room)
                self._submit_batch(job, count)
                spent += count * self._block_bytes
            if job.left:
                break
        return moved, spent

    def collect(self) -> list[Moved]:
        """Reports what ended, without submitting anything."""
        while self._flying and self._flying[0].berth.ended.reached:
            batch = self._flying.popleft()
            self._land(batch)
            batch.job.flying -= 1
            self._ring.free.append(batch.berth)
        # Batches end in the order they were submitted, and so do the copies they belong to.
        ended = [job for job in self._jobs if job.ended]
        for job in ended:
            self._jobs.remove(job)
        return [job.report() for job in ended]

    def wait(self) -> None:
        """Blocks this thread until all that was submitted to the device has ended."""
        if self._flying:
            self._flying[-1].berth.ended.wait()

    def guard(self, stream: int, slots: ArrayLike) -> bool:
        """Has an engine's stream wait for the copies that read or write these device slots.

        Returns False where such a copy has not been submitted to the device yet: then there is
        nothing to wait for on the device, and the slot must be left alone until its report.
        """
        wanted = np.asarray(slots, dtype=np.int32)
        for batch in self._flying:
            touched = self._device_slots(batch.job.copy)[
                ..., batch.first : batch.first + batch.berth.count
            ]
            if np.isin(touched, wanted).any():
                stream_waits(stream, self._device_done(batch.berth))
        waiting = (self._device_slots(job.copy)[..., job.next :] for job in self._jobs if job.left)
        return not any(np.isin(touched, wanted).any() for touched in waiting)

    def close(self) -> None:
        """Waits for what is in flight and gives everything back."""
        streams = (*self._links, self._kernels)
        for stream in streams:
            stream.wait()
        self._ring.close()
        for stream in streams:
            stream.close()

    def _submit_batch(self, job: _Job, count: int) -> None:
        batch = _Batch(job, self._ring.free.pop(), count)
        job.next += count
        job.flying += 1
        self._flying.append(batch)
        copy, berth = job.copy, batch.berth
        part = slice(batch.first, batch.first + count)
        berth.slots[:, :count] = copy.source_slots[..., part]
        berth.targets[:, :count] = copy.target_slots[..., part]
        if copy.purpose is not Purpose.DUPLICATE:
            berth.seeds[:count] = [key_seed(key) for key in copy.keys[part]]
        self._launch(batch, self.steps.event_of(job.step))

    @abstractmethod
    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        """Which slots of the device a copy reads or writes."""

    @abstractmethod
    def _launch(self, batch: _Batch, step: Event | None) -> None:
        """Submits the work of a batch, behind a step where the device's slots are touched."""

    @abstractmethod
    def _land(self, batch: _Batch) -> None:
        """The CPU has seen the end of a batch."""

    def _device_done(self, berth: Berth) -> Event:
        """When the device's slots are no longer touched."""
        return berth.ended

    def _next_link(self) -> Stream:
        """The stream of the next batch's DMA, which waits for that of the batch before.

        With all batches in one stream, a small copy of the engine came after every one in flight
        (0.75 ms at 3 × 16 MiB on an H200); where batches change streams it comes after one (0.3).
        """
        self._links = self._links[::-1]
        if self._link_free is not None:
            self._links[0].wait_for(self._link_free)
        return self._links[0]

    def _runs(
        self, berth: Berth, slots: NDArray[np.int32], host: PinnedArea
    ) -> Iterator[tuple[int, int, int]]:
        """The DMA of a batch: address in staging, address in host memory, length.

        Blocks that follow each other on both sides go together, but not across the end of a
        registered extent.
        """
        block_bytes, pitch, stride = self._block_bytes, self._ring.pitch, host.slot_stride
        joined = block_bytes == pitch == stride
        piece_bytes = self._ring.size.piece_bytes
        row = slots[0, : berth.count].tolist()
        first = 0
        while first < len(row):
            end = first + 1
            while joined and end < len(row) and row[end] == row[end - 1] + 1:
                if row[end] % host.run_slots == 0:
                    break
                end += 1
            length = (end - first) * block_bytes
            staged, address = berth.staged + first * pitch, host.address + row[first] * stride
            for at in range(0, length, piece_bytes):
                yield staged + at, address + at, min(piece_bytes, length - at)
            first = end

    def _clear_sums(self, berth: Berth) -> None:
        self._kernels.clear(berth.sums, berth.count * len(self._layout.cells) * SUM_BYTES)


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
        super().__init__(source, algorithm, steps=steps, size=size)
        self._host = target

    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        return copy.source_slots

    def _device_done(self, berth: Berth) -> Event:
        return berth.ready

    def _launch(self, batch: _Batch, step: Event | None) -> None:
        berth = batch.berth
        if step is not None:
            self._kernels.wait_for(step)
        self._clear_sums(berth)
        self._packer.gather(berth, self._kernels.number)
        self._packer.publish(berth, self._kernels.number)
        berth.ready.record(self._kernels.handle)
        link = self._next_link()
        link.wait_for(berth.ready)
        link.copy(
            [
                Piece(staged, address, length)
                for staged, address, length in self._runs(berth, berth.targets, self._host)
            ]
        )
        berth.ended.record(link.handle)
        self._link_free = berth.ended

    def _land(self, batch: _Batch) -> None:
        berth = batch.berth
        self._host.keep_sums(berth.targets[0, : berth.count], berth.kept[: berth.count])


class LoadMover(CudaMover):
    """Out of pinned host memory into the device; what fails its sums is not written there."""

    default_size = StagingSize(batch_bytes=32 << 20, batch_count=3)
    """Larger than for saves: by the rates at 8 to 32 MiB on an H200, a batch costs the link about
    16 µs beside its bytes on the way up, 8 on the way down."""

    def __init__(
        self,
        source: PinnedArea,
        target: DeviceSlots,
        algorithm: Algorithm,
        *,
        steps: Steps | None = None,
        size: StagingSize | None = None,
    ) -> None:
        super().__init__(target, algorithm, steps=steps, size=size)
        self._host = source

    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        return copy.target_slots

    def _launch(self, batch: _Batch, step: Event | None) -> None:
        berth = batch.berth
        berth.kept[: berth.count] = self._host.sums(berth.slots[0, : berth.count])
        link = self._next_link()
        link.copy(
            [
                Piece(address, staged, length)
                for staged, address, length in self._runs(berth, berth.slots, self._host)
            ]
        )
        berth.ready.record(link.handle)
        self._link_free = berth.ready
        self._clear_sums(berth)
        self._kernels.wait_for(berth.ready)
        self._packer.sum(berth, self._kernels.number)
        self._packer.judge(berth, self._kernels.number)
        if step is not None:
            self._kernels.wait_for(step)
        self._packer.scatter(berth, self._kernels.number)
        berth.ended.record(self._kernels.handle)

    def _land(self, batch: _Batch) -> None:
        wrong = np.flatnonzero(batch.berth.told[: batch.berth.count])
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

    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        return np.concatenate(
            [np.atleast_2d(copy.source_slots), np.atleast_2d(copy.target_slots)], axis=0
        )

    def _launch(self, batch: _Batch, step: Event | None) -> None:
        berth = batch.berth
        if step is not None:
            self._kernels.wait_for(step)
        self._kernels.clear(berth.verdicts, berth.count * VERDICT_BYTES)
        self._packer.gather(berth, self._kernels.number, summed=False)
        self._packer.scatter(berth, self._kernels.number)
        berth.ended.record(self._kernels.handle)

    def _land(self, batch: _Batch) -> None:
        """Nothing left the device."""
