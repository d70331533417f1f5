"""The kernels of one layout, compiled and bound to their tables, ready to be launched.

They are compiled once, when a mover is made. A launch then takes a few microseconds, since it skips
Triton's search for the right compilation. The one rule: the arguments of a launch have the types
that the kernel was compiled for, whatever their values.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.movers.cuda import kernels
from penstock.movers.cuda.tables import chunk_tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.movers.cuda.buffers import Manifest, StagingBuffer, StagingRing
    from penstock.movers.cuda.calls import Calls
    from penstock.movers.cuda.streams import Stream
    from penstock.vocabulary.layout import Layout

TABLE_WIDTH = 128
WARP_THREADS = 32
_SCRATCH = ("global_scratch_size", "profile_scratch_size")
"""Of which not every version of Triton knows."""
SOME_ADDRESS = 1 << 40
"""Stands for any address when a kernel is compiled: it needs 64 bits."""


class PackingKernel(NamedTuple):
    """A compiled kernel."""

    function: int
    argument_count: int
    threads: int
    shared_bytes: int
    scratch_bytes: int
    """Memory that Triton's own launcher would have to bring."""


class _Bound(NamedTuple):
    """The kernels of one pattern, and the table of its chunks."""

    rows: int
    address: int
    gather: PackingKernel
    move: PackingKernel
    """Without sums."""
    sum: PackingKernel
    scatter: PackingKernel


class Packer:
    """Packs, sums and scatters the batches of one ring, for one layout on the device."""

    def __init__(self, layout: Layout, addresses: Mapping[int, int], ring: StagingRing) -> None:
        self._ring = ring
        self._cells = len(layout.cells)
        tables = chunk_tables(layout, addresses, pitch=ring.pitch)
        device = torch.device("cuda", torch.cuda.current_device())
        # Kept, so that the memory behind the addresses stays.
        self._tables = [torch.from_numpy(table.rows).to(device) for table in tables]
        some = (SOME_ADDRESS,) * 2
        gathered = (*some, ring.blocks, *some, ring.pitch, SOME_ADDRESS, self._cells)
        summed = (*some, SOME_ADDRESS, ring.pitch, SOME_ADDRESS, self._cells)
        scattered = (*some, ring.blocks, *some, ring.pitch)
        self._bound = [
            _Bound(
                rows=len(table.rows),
                address=memory.data_ptr(),
                gather=compile_kernel(
                    kernels.gather, gathered, {**table.pattern.constants, "SUMMED": True}
                ),
                move=compile_kernel(
                    kernels.gather, gathered, {**table.pattern.constants, "SUMMED": False}
                ),
                sum=compile_kernel(kernels.sum_staged, summed, table.pattern.packed_constants),
                scatter=compile_kernel(kernels.scatter, scattered, table.pattern.constants),
            )
            for table, memory in zip(tables, self._tables, strict=True)
        ]
        taken = (*some, SOME_ADDRESS, self._cells)
        self._publish = compile_kernel(kernels.publish, taken, {"WIDTH": TABLE_WIDTH})
        self._judge = compile_kernel(kernels.judge, (*taken, *some), {"WIDTH": TABLE_WIDTH})
        torch.cuda.current_stream().synchronize()

    @property
    def kernels(self) -> list[PackingKernel]:
        """All that can be launched."""
        bound = [(each.gather, each.move, each.sum, each.scatter) for each in self._bound]
        return [*chain.from_iterable(bound), self._publish, self._judge]

    def gather(
        self,
        calls: Calls,
        manifest: Manifest,
        berth: StagingBuffer,
        stream: Stream,
        *,
        summed: bool = True,
        into: int | None = None,
    ) -> None:
        """Packs a batch into its berth, or to an address in the place of its staging."""
        for bound in self._bound:
            arguments = (
                *(bound.address, manifest.slots_address, self._ring.blocks),
                *(manifest.seeds_address, berth.staged if into is None else into, self._ring.pitch),
                *(berth.sums, self._cells),
            )
            kernel = bound.gather if summed else bound.move
            calls.launch(kernel, bound.rows, manifest.count, arguments, stream)

    def publish(
        self, calls: Calls, manifest: Manifest, berth: StagingBuffer, kept: int, stream: Stream
    ) -> None:
        """Writes the sums to the rows of their slots in host memory, which start at `kept`."""
        arguments = (berth.sums, manifest.targets_address, kept, self._cells)
        calls.launch(self._publish, manifest.count, 1, arguments, stream)

    def sum(self, calls: Calls, manifest: Manifest, berth: StagingBuffer, stream: Stream) -> None:
        """Sums the blocks in a berth."""
        for bound in self._bound:
            arguments = (
                *(bound.address, manifest.seeds_address, berth.staged, self._ring.pitch),
                *(berth.sums, self._cells),
            )
            calls.launch(bound.sum, bound.rows, manifest.count, arguments, stream)

    def judge(
        self, calls: Calls, manifest: Manifest, berth: StagingBuffer, kept: int, stream: Stream
    ) -> None:
        """Compares the sums with those of their slots in host memory, which start at `kept`."""
        arguments = (
            *(berth.sums, manifest.slots_address, kept, self._cells),
            *(berth.verdicts, manifest.bad_cells_address),
        )
        calls.launch(self._judge, manifest.count, 1, arguments, stream)

    def scatter(
        self, calls: Calls, manifest: Manifest, berth: StagingBuffer, stream: Stream
    ) -> None:
        """Writes the blocks that were found good to their slots."""
        for bound in self._bound:
            arguments = (
                *(bound.address, manifest.targets_address, self._ring.blocks),
                *(berth.verdicts, berth.staged, self._ring.pitch),
            )
            calls.launch(bound.scatter, bound.rows, manifest.count, arguments, stream)


def compile_kernel(
    kernel: Any,  # noqa: ANN401 - a Triton function, which has no type of its own
    arguments: tuple[int, ...],
    constants: Mapping[str, int | bool],
) -> PackingKernel:
    """Compiles a kernel for arguments of the types of these."""
    compiled = kernel.warmup(*arguments, **constants, grid=(1, 1, 1), num_warps=4)
    # Before it is asked for its launcher, it is not loaded and has no function.
    launcher = compiled.run
    assert launcher is not None
    metadata = compiled.metadata
    return PackingKernel(
        function=compiled.function,
        argument_count=len(arguments),
        threads=WARP_THREADS * metadata.num_warps,
        shared_bytes=metadata.shared,
        scratch_bytes=sum(getattr(metadata, name, 0) or 0 for name in _SCRATCH),
    )
