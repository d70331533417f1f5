"""The whole measurement on a GPU: every loop, alone and beside every kind of work.

In each round the loop runs alone once and once beside each side, in turn. All sides move the
blocks of one pool by the same kernels and streams (`penstock.movers.cuda`), with sums; only
who calls them differs.

| side                     | driven by                                                       |
|--------------------------|-----------------------------------------------------------------|
| `penstock, 27 GB/s`      | the engine, once a step, with a budget made for this rate        |
| `penstock, no limit`     | the same; what a mover may have in flight is the only bound      |
| `bare copies, 27 GB/s`   | the same, but one extent a step and nothing else: the ceiling    |
| `thread that polls`      | a Python thread, without pause                                   |
| `thread that blocks`     | a Python thread a direction, on the event of what it submitted   |
| `second process`         | a process of its own over CUDA IPC, which polls without pause    |

The one rule: nothing is compared that was not measured in the same round.
"""

from __future__ import annotations

import contextlib
import gc
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from lab.bench.interference.bare import BareCopies
from lab.bench.interference.cuda_pool import DevicePool, Rig
from lab.bench.interference.decoding import DecodeLoop, Decoder
from lab.bench.interference.plan import bare_rate
from lab.bench.interference.second_process_link import InSecondProcess, SecondProcess
from lab.bench.interference.shapes import EIGHT_B, SMALL
from lab.bench.interference.sides import (
    Alone,
    AtBoundaries,
    BlockingThreads,
    PollingThread,
)
from lab.bench.interference.telling import ALONE, BARE, PENSTOCK, add_rows, add_verdicts
from lab.bench.interference.windows import run_window
from lab.bench.measure import interleave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lab.bench.interference.cuda_pool import Sample
    from lab.bench.interference.plan import Plan, Work
    from lab.bench.interference.shares import Window
    from lab.bench.interference.windows import Side
    from lab.bench.report import BenchReport

_BLOCK_STEPS = 16
"""A request needs a new block every so many steps."""


def run_on_cuda(report: BenchReport, plan: Plan, *, tell: Callable[[str], None]) -> None:
    """Measures everything the plan names; `tell` hears how far it is."""
    report.add_note(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"{plan.in_flight} step(s) in flight, windows of {plan.seconds:g} s"
    )
    with contextlib.ExitStack() as stack:
        pool = DevicePool.take()
        stack.callback(pool.close)
        rig = Rig(pool)
        stack.callback(rig.close)
        second = stack.enter_context(SecondProcess([pool.handle.hex()]))
        second.wait_until_ready()
        tell("ready: pool, movers and second process")
        # Torch has brought half a million objects, which every collection before a window would
        # look at again.
        gc.freeze()
        stack.callback(gc.unfreeze)
        for name, loop in _loops(plan):
            _measure_loop(report, plan, _Bench(rig, second, name, loop), tell)


def _loops(plan: Plan) -> Iterator[tuple[str, DecodeLoop]]:
    """The loops, one after the other, so that the large model's memory is given back."""
    if {"eager", "graph"} & set(plan.loops):
        decoder = Decoder(EIGHT_B, device="cuda")
        for name in ("eager", "graph"):
            if name in plan.loops:
                captured = name == "graph"
                yield name, DecodeLoop(decoder, captured=captured, in_flight=plan.in_flight)
        del decoder
    if "small" in plan.loops:
        small = Decoder(SMALL, device="cuda")
        yield "small", DecodeLoop(small, captured=False, in_flight=plan.in_flight)


class _Bench(NamedTuple):
    """A loop, and all that drives copies beside it."""

    rig: Rig
    second: SecondProcess
    name: str
    loop: DecodeLoop


def _measure_loop(
    report: BenchReport, plan: Plan, bench: _Bench, tell: Callable[[str], None]
) -> None:
    run_window(bench.loop, Alone(), seconds=plan.seconds)  # Compiled, chosen and warm.
    alone = run_window(bench.loop, Alone(), seconds=plan.seconds)
    tell(f"{bench.name}: {alone.seconds / alone.steps * 1e3:.2f} ms a step alone")
    for work in plan.works:
        sides = _sides(plan, bench, work)
        runs: dict[str, Callable[[], Window]] = {
            side: partial(run_window, bench.loop, driven, seconds=plan.seconds)
            for side, driven in sides.items()
        }
        windows = interleave(runs, plan.rounds)
        for side in sides.values():
            if isinstance(side, BareCopies):
                side.close()
        outcomes = add_rows(report, windows, loop=bench.name, work=work, in_flight=plan.in_flight)
        add_verdicts(report, outcomes, loop=bench.name, work=work)
        for outcome in outcomes:
            tell(
                f"{bench.name} beside {work}, {outcome.side}: kept {outcome.share:.3f} "
                f"at {outcome.rate:.1f} GB/s"
            )


def _sides(plan: Plan, bench: _Bench, work: Work) -> dict[str, Side]:
    rig = bench.rig
    traffic = rig.traffic(work)
    told = _StepTold(rig, work, bench.loop)
    sides: dict[str, Side] = {ALONE: Alone()}
    for wanted in (*plan.wanted, None):
        side = AtBoundaries(traffic, gb_per_s=wanted, step_submitted=told)
        name = "no limit" if wanted is None else f"{wanted:g} GB/s"
        sides[f"{PENSTOCK}, {name}"] = Verified(side, rig, work)
    rate = bare_rate(bench.name, plan.wanted)
    if rate is not None:
        sides[f"{BARE}, {rate:g} GB/s"] = BareCopies(rig.bare_ways(work), gb_per_s=rate)
    polling = PollingThread(traffic, prepare=_use_device)
    sides["thread that polls"] = Verified(polling, rig, work)
    pairs = list(zip(traffic, rig.movers(work), strict=True))
    blocking = BlockingThreads(pairs, prepare=_use_device)
    sides["thread that blocks"] = Verified(blocking, rig, work)
    sides["second process"] = InSecondProcess(bench.second, work)
    return sides


def _use_device() -> None:
    torch.cuda.set_device(0)


class _StepTold:
    """What an engine tells the movers in each step: the slots it writes, and which are new."""

    def __init__(self, rig: Rig, work: Work, loop: DecodeLoop) -> None:
        self._rig = rig
        self._movers = rig.movers(work)
        self._stream: int = loop.stream.cuda_stream
        self._number = 0

    def __call__(self) -> None:
        written = self._rig.pool.slots.written
        self._rig.steps.submitted(self._stream, written)
        self._number += 1
        # The requests take new blocks in turn, and one that was copied may still be read.
        new = written[self._number % _BLOCK_STEPS :: _BLOCK_STEPS]
        for mover in self._movers:
            mover.guard(self._stream, new)


class Verified:
    """A side of this process, and the proof that it moved the right bytes."""

    def __init__(self, side: Side, rig: Rig, work: Work) -> None:
        self._side = side
        self._rig = rig
        self._work = work
        self._samples: list[Sample] = []

    def begin(self) -> None:
        """Wipes a sample of what comes next."""
        self._samples = self._rig.wipe(self._work)
        self._side.begin()

    def at_boundary(self) -> None:
        """As the side does it."""
        self._side.at_boundary()

    def end(self, began: float, ended: float) -> int:
        """Compares the sample with where it came from."""
        moved_bytes = self._side.end(began, ended)
        self._rig.require_moved(self._samples)
        return moved_bytes
