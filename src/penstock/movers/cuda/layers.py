"""Loads that arrive layer by layer, so that a step can begin before they have ended.

    load.poll(…)                      # submits a load: a kernel a layer, which sums what it reads
    load.join([operation])            # the next step uses the blocks of this load
    load.wait_layer(i, stream)        # in the forward pass, before layer i: eager or captured
    load.poll(…)                      # the report: every block is verified, or corrupt

A kernel reads pinned host memory and writes the engine's slots directly, without staging and DMA,
with few programs, so that most of the device is free for the engine. Checksums are computed on the
way and compared when the last layer has arrived.

`wait_layer` waits for a *gate*, one event for each layer. `join` records the gates behind the loads
that the next step needs; a gate without a load is open. In a captured graph a gate is an external
event, so a replay needs only a `join` before it.

The one rule: results that were computed from a load do not leave the step until the load is
reported without a fault, since the bytes in its slots are unverified until then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from penstock.cache.operations import BlockFault
from penstock.cache.rates import joins_step
from penstock.movers.cuda import kernels
from penstock.movers.cuda.buffers import (
    BLOCKS_MAX,
    VERDICT_BYTES,
    Manifest,
    PinnedMemory,
    Sizes,
    aligned,
    take_device_memory,
)
from penstock.movers.cuda.calls import calls_for
from penstock.movers.cuda.packer import SOME_ADDRESS, TABLE_WIDTH, compile_kernel
from penstock.movers.cuda.queue import QueuedMover
from penstock.movers.cuda.streams import Stream, StreamEvent, TimedEvent, elapsed_s
from penstock.movers.cuda.tables import chunk_tables, layer_spans
from penstock.vocabulary.checksums import SUM_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from penstock.machine.effects import Copy
    from penstock.movers.cuda.buffers import PinnedArea
    from penstock.movers.cuda.packer import PackingKernel
    from penstock.movers.cuda.queue import CopyBatch, DeviceSlots, Job
    from penstock.movers.cuda.streams import Steps
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.keys import OperationId

PROGRAMS = 64
"""Thread blocks of a layer's kernel: of 128 threads, each with 4 KiB on its way."""
LOADS_MAX = 8
"""Loads in flight; each has an event a layer."""
_RATE_SAMPLES = 15
"""Odd, so that the median is a sample."""


class _Part(NamedTuple):
    """Chunks of one layer that lie alike."""

    kernel: PackingKernel
    address: int
    """Where their rows start."""
    rows: int


class LayerManifest(Manifest):
    """What a load carries, and when each layer of it is there."""

    __slots__ = ("arrived", "began", "finished")

    def __init__(
        self, host: PinnedMemory, start: int, device: int, sizes: Sizes, *, layer_count: int
    ) -> None:
        super().__init__(host, start, device, sizes)
        self.arrived = [StreamEvent() for _ in range(layer_count)]
        self.began = TimedEvent()
        self.finished = TimedEvent()

    def close(self) -> None:
        """Gives the events back."""
        super().close()
        for event in (*self.arrived, self.began, self.finished):
            event.close()


class LayerLoadMover(QueuedMover):
    """Out of pinned host memory into the device, layer by layer.

    Args:
        source: The host's slots.
        target: The engine's tier, on the current CUDA device.
        algorithm: Must be `MIX64`, which the kernels compute.
        steps: The engine's steps; movers of one device tier share them.
        programs: Thread blocks of a layer's kernel.
    """

    def __init__(
        self,
        source: PinnedArea,
        target: DeviceSlots,
        algorithm: Algorithm,
        *,
        steps: Steps | None = None,
        programs: int = PROGRAMS,
    ) -> None:
        super().__init__(target, algorithm, steps)
        self._host = source
        self._programs = programs
        self._cells = len(target.layout.cells)
        self._layers = sorted({cell.layer for cell in target.layout.cells})
        self._parts = self._bind(target, source.slot_stride)
        launched = [part.kernel for parts in self._parts for part in parts]
        self._calls = calls_for([*launched, self._judge])
        self._layer_ends = _layer_ends(target, self._layers)
        self._take_memory(target)
        self._gates = {layer: StreamEvent() for layer in self._layers}
        self._gate_stream = Stream()
        for gate in self._gates.values():
            gate.record(self._gate_stream.handle)
        self._rates: deque[float] = deque(maxlen=_RATE_SAMPLES)

    @property
    def staging_bytes(self) -> int:
        """Device memory taken for sums and tables."""
        return int(self._memory.numel())

    @property
    def layers(self) -> Sequence[int]:
        """The numbers of the layers, in the order in which they arrive."""
        return self._layers

    @property
    def unverified(self) -> set[OperationId]:
        """Loads that are not reported yet: nothing computed from them may leave the step."""
        return {job.copy.operation for job in self._jobs}

    def join(self, operations: Collection[OperationId]) -> None:
        """The next step uses the blocks of these loads: each of its layers waits for them.

        A load that has not been submitted to the device cannot be joined; `predict` knows.
        """
        joined = set(operations)
        if not joined:
            return
        manifests = [batch.manifest for batch in self._flying if batch.job.copy.operation in joined]
        for number, layer in enumerate(self._layers):
            for manifest in manifests:
                assert isinstance(manifest, LayerManifest)
                self._gate_stream.wait_for(manifest.arrived[number])
            self._gates[layer].record(self._gate_stream.handle)

    def wait_layer(self, layer: int, stream: int) -> None:
        """Makes a stream wait on the device for one layer of the loads that the step has joined.

        While the stream is captured, every replay waits for what is joined before it.
        """
        self._gates[layer].hold(stream)

    @property
    def bytes_per_s(self) -> float | None:
        """The median of what the last loads reached; `None` before the first one."""
        return median(self._rates) if self._rates else None

    def predict(self, operation: OperationId) -> list[float] | None:
        """In how many seconds each layer of a load will have arrived.

        `None` where that cannot be said: nothing was measured yet, or the load waits for its
        turn. What loads wait for before they begin is not in it.
        """
        rate = self.bytes_per_s
        if rate is None or any(job.left for job in self._jobs if _is(job, operation)):
            return None
        arrivals: list[float] | None = None
        ahead = 0
        for batch in self._flying:
            ends = batch.manifest.count * self._layer_ends
            there = _reached(self._manifest_of(batch).arrived)
            start = int(ends[there - 1]) if there else 0
            if _is(batch.job, operation):
                arrivals = (np.where(ends > start, ahead + ends - start, 0) / rate).tolist()
            ahead += int(ends[-1]) - start
        return arrivals

    def joinable(self, operation: OperationId, *, step_s: float) -> bool:
        """Whether a step of this length that begins now would hardly have to wait for a load.

        The layers are taken to need about equal shares of the step.
        """
        arrivals = self.predict(operation)
        if arrivals is None:
            return False
        needs = [step_s * number / len(arrivals) for number in range(len(arrivals))]
        return joins_step(arrivals, needs, step_s=step_s)

    def close(self) -> None:
        """Waits for what is in flight and gives everything back.

        Raises `UnavailableError`: it does not end; then nothing is given back, as it is still used.
        """
        self.wait()
        self._kernels.wait()
        self._gate_stream.wait()
        for manifest in self._manifests:
            manifest.close()
        for gate in self._gates.values():
            gate.close()
        self._kernels.close()
        self._gate_stream.close()
        self._bell.close()
        self._host_memory.close()

    @property
    def _room(self) -> int:
        return BLOCKS_MAX if self._free else 0

    def _take_manifest(self) -> Manifest:
        return self._free.pop()

    def _give_back(self, batch: CopyBatch) -> None:
        self._free.append(self._manifest_of(batch))

    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        return copy.target_slots

    def _launch(self, batch: CopyBatch, step: StreamEvent | None) -> None:
        manifest, stream, calls = self._manifest_of(batch), self._kernels, self._calls
        manifest.send(calls, stream)
        if step is not None:
            calls.wait(stream, step)
        calls.record(manifest.began, stream)
        for parts, arrived in zip(self._parts, manifest.arrived, strict=True):
            for part in parts:
                arguments = (
                    *(part.address, part.rows, part.rows * manifest.count),
                    *(manifest.slots_address, manifest.targets_address, BLOCKS_MAX),
                    manifest.seeds_address,
                    *(self._host.address, self._host.slot_stride, self._sums, self._cells),
                )
                calls.launch(part.kernel, self._programs, 1, arguments, stream)
            calls.record(arrived, stream)
        calls.record(manifest.finished, stream)
        sums = (self._sums, manifest.slots_address, self._host.sums_address, self._cells)
        found = (self._verdicts, manifest.bad_cells_address)
        calls.launch(self._judge, manifest.count, 1, (*sums, *found), stream)
        calls.record(manifest.ended, stream)

    def _land(self, batch: CopyBatch) -> None:
        manifest = self._manifest_of(batch)
        wrong = np.flatnonzero(manifest.bad_cells[: manifest.count])
        batch.job.faults += [(batch.first + int(at), BlockFault.CORRUPT) for at in wrong]
        seconds = elapsed_s(manifest.began, manifest.finished)
        if seconds > 0:
            self._rates.append(manifest.count * self._block_bytes / seconds)

    def _manifest_of(self, batch: CopyBatch) -> LayerManifest:
        assert isinstance(batch.manifest, LayerManifest)
        return batch.manifest

    def _bind(self, target: DeviceSlots, stride: int) -> list[list[_Part]]:
        """The kernels of each layer, with their tables."""
        device = torch.device("cuda", torch.cuda.current_device())
        some, count = SOME_ADDRESS, 1
        arguments = (
            *(some, count, count, some, some, BLOCKS_MAX, some),
            *(some, stride, some, self._cells),
        )
        parts: dict[int, list[_Part]] = {layer: [] for layer in self._layers}
        # Kept, so that the memory behind the addresses stays.
        self._tables: list[torch.Tensor] = []
        for table in chunk_tables(target.layout, target.addresses, pitch=stride):
            kernel = compile_kernel(kernels.fetch, arguments, table.pattern.constants)
            memory = torch.from_numpy(table.rows).to(device)
            self._tables.append(memory)
            for layer, first, rows in layer_spans(table, target.layout):
                address = memory.data_ptr() + first * table.rows.strides[0]
                parts[layer].append(_Part(kernel, address, rows))
        taken = (some, some, some, self._cells, some, some)
        self._judge = compile_kernel(kernels.judge, taken, {"WIDTH": TABLE_WIDTH})
        return [parts[layer] for layer in self._layers]

    def _take_memory(self, target: DeviceSlots) -> None:
        sizes = Sizes(
            blocks=BLOCKS_MAX,
            pitch=0,
            cells=self._cells,
            groups=len(target.layout.groups),
        )
        sums_bytes = aligned(BLOCKS_MAX * self._cells * SUM_BYTES)
        verdict_bytes = aligned(BLOCKS_MAX * VERDICT_BYTES)
        self._memory = take_device_memory(sums_bytes + verdict_bytes + LOADS_MAX * sizes.host_bytes)
        self._sums = self._memory.data_ptr()
        self._verdicts = self._sums + sums_bytes
        mirrors = self._verdicts + verdict_bytes
        self._host_memory = PinnedMemory(LOADS_MAX * sizes.host_bytes)
        self._manifests = [
            LayerManifest(
                self._host_memory,
                number * sizes.host_bytes,
                mirrors + number * sizes.host_bytes,
                sizes,
                layer_count=len(self._layers),
            )
            for number in range(LOADS_MAX)
        ]
        self._free = list(self._manifests)


def _is(job: Job, operation: OperationId) -> bool:
    return job.copy.operation == operation


def _reached(arrived: Sequence[StreamEvent]) -> int:
    """How many of these events, which are reached in order, were."""
    return bisect_left(arrived, 1, key=lambda event: int(not event.reached))


def _layer_ends(target: DeviceSlots, layers: Sequence[int]) -> NDArray[np.int64]:
    """Bytes of a block up to the end of each layer, in the order of the layers."""
    sizes = dict.fromkeys(layers, 0)
    for cell in target.layout.cells:
        sizes[cell.layer] += cell.length
    ends: NDArray[np.int64] = np.cumsum([sizes[layer] for layer in layers])
    return ends
