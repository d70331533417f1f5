"""The kernels of one layout, compiled and bound to their tables, ready to be launched.

Compiled once, when a mover is made; a launch then costs a few microseconds of the engine's
time, since it goes past Triton's own search for the right compilation. The one rule: what is
passed at a launch has the types that were compiled for, whatever its value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.movers.cuda import kernels
from penstock.movers.cuda.chunks import chunk_tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.movers.cuda.staging import Berth, StagingRing
    from penstock.vocabulary.layout import Layout

TABLE_WIDTH = 128
_SOME_ADDRESS = 1 << 40
"""Stands for any address when a kernel is compiled: it needs 64 bits."""


class _Kernel(NamedTuple):
    """A compiled kernel and the constants that follow its arguments."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[int | bool, ...]

    def launch(self, rows: int, blocks: int, arguments: tuple[int, ...], stream: int) -> None:
        # Neither launch metadata nor hooks: looking for them takes longer than the launch.
        hooks = (None, None, None)
        self.run(
            *(rows, blocks, 1, stream, self.function, self.metadata, *hooks),
            *arguments,
            *self.constants,
        )


class _Bound(NamedTuple):
    """The kernels of one pattern, and the table of its chunks."""

    rows: int
    address: int
    gather: _Kernel
    move: _Kernel
    sum: _Kernel
    scatter: _Kernel


class Packer:
    """Packs, sums and scatters the batches of one ring, for one layout on the device."""

    def __init__(self, layout: Layout, addresses: Mapping[int, int], ring: StagingRing) -> None:
        self._ring = ring
        self._cells = len(layout.cells)
        tables = chunk_tables(layout, addresses, pitch=ring.pitch)
        device = torch.device("cuda", torch.cuda.current_device())
        # Kept, so that the memory behind the addresses stays.
        self._tables = [torch.from_numpy(table.rows).to(device) for table in tables]
        some = (_SOME_ADDRESS,) * 2
        gathered = (*some, ring.blocks, *some, ring.pitch, _SOME_ADDRESS, self._cells)
        summed = (*some, _SOME_ADDRESS, ring.pitch, _SOME_ADDRESS, self._cells)
        scattered = (*some, ring.blocks, *some, ring.pitch)
        self._bound = [
            _Bound(
                rows=len(table.rows),
                address=memory.data_ptr(),
                gather=_compile(
                    kernels.gather, gathered, {**table.pattern.constants, "SUMMED": True}
                ),
                move=_compile(
                    kernels.gather, gathered, {**table.pattern.constants, "SUMMED": False}
                ),
                sum=_compile(kernels.sum_staged, summed, table.pattern.packed_constants),
                scatter=_compile(kernels.scatter, scattered, table.pattern.constants),
            )
            for table, memory in zip(tables, self._tables, strict=True)
        ]
        self._publish = _compile(kernels.publish, (*some, self._cells), {"WIDTH": TABLE_WIDTH})
        judged = (*some, self._cells, *some)
        self._judge = _compile(kernels.judge, judged, {"WIDTH": TABLE_WIDTH})
        torch.cuda.current_stream().synchronize()

    def gather(self, berth: Berth, stream: int, *, summed: bool = True) -> None:
        """Packs the berth's blocks into staging; sums must be clear, if they are wanted."""
        for bound in self._bound:
            kernel = bound.gather if summed else bound.move
            kernel.launch(
                bound.rows,
                berth.count,
                (
                    *(bound.address, berth.slots_address, self._ring.blocks),
                    *(berth.seeds_address, berth.staged, self._ring.pitch),
                    *(berth.sums, self._cells),
                ),
                stream,
            )

    def publish(self, berth: Berth, stream: int) -> None:
        """Writes the sums to where the host reads them."""
        arguments = (berth.sums, berth.kept_address, self._cells)
        self._publish.launch(berth.count, 1, arguments, stream)

    def sum(self, berth: Berth, stream: int) -> None:
        """Sums the blocks in staging; sums must be clear."""
        for bound in self._bound:
            bound.sum.launch(
                bound.rows,
                berth.count,
                (
                    *(bound.address, berth.seeds_address, berth.staged, self._ring.pitch),
                    *(berth.sums, self._cells),
                ),
                stream,
            )

    def judge(self, berth: Berth, stream: int) -> None:
        """Compares the sums with those that were kept."""
        self._judge.launch(
            berth.count,
            1,
            (berth.sums, berth.kept_address, self._cells, berth.verdicts, berth.told_address),
            stream,
        )

    def scatter(self, berth: Berth, stream: int) -> None:
        """Writes the blocks that were found good to their slots."""
        for bound in self._bound:
            bound.scatter.launch(
                bound.rows,
                berth.count,
                (
                    *(bound.address, berth.targets_address, self._ring.blocks),
                    *(berth.verdicts, berth.staged, self._ring.pitch),
                ),
                stream,
            )


def _compile(
    kernel: Any,  # noqa: ANN401 - a Triton function, which has no type of its own
    arguments: tuple[int, ...],
    constants: Mapping[str, int | bool],
) -> _Kernel:
    compiled = kernel.warmup(*arguments, **constants, grid=(1, 1, 1), num_warps=4)
    # A launch passes the constants too, in the order of the kernel's parameters.
    names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    in_order = tuple(constants[name] for name in names)
    run = compiled.run
    return _Kernel(run, compiled.function, compiled.packed_metadata, in_order)
