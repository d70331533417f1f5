"""The handoff benchmark: what a handoff costs, and what of it decode has to wait for.

| side                    | what is measured                                                    |
|-------------------------|---------------------------------------------------------------------|
| `copy + checksum`       | one process copies the same bytes and runs over them once            |
| `copy + checksum, pieces` | the same, each piece summed while it is in the cache               |
| `pack + sums, alone`, `verify + put away, alone` | what each side does, in one process's memory |
| `handoff, at once`      | all layers are there: throughput; also "sent after the last layer"   |
| `handoff, by layers`    | layers become ready one after the other, and leave meanwhile         |
| `handoff, slow layers`  | the same with much time between: each layer is sent by itself        |

Two rank processes, each on a core of its own, over ZeroMQ and shared memory; both schedulers in
this process. The one rule: sides take turns in every round, and ratios are medians over rounds.
"""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING, NamedTuple

from penstock.bench.handoff_engines import Copied, Engines, Ran, engines
from penstock.bench.handoff_rank import BenchShape
from penstock.bench.measure import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.bench.report import BenchReport

ROUNDS = 9
SHAPES = (
    BenchShape(layers=16, tokens=1024, block_tokens=64, order="head major"),
    BenchShape(layers=16, tokens=1024, block_tokens=64, order="token major"),
    BenchShape(layers=16, tokens=1024, block_tokens=16, order="head major"),
    BenchShape(layers=16, tokens=1024, block_tokens=16, order="token major"),
)
"""64 MiB each: 8 KV heads of 128 numbers of two bytes, slots in random order at the source."""
PACE = 1.3
"""A layer of the played device takes so many times as long as sending one does in a row."""
SLOW_PACE = 6.0
"""The same, where layers have nothing to do with each other."""
THROUGHPUT_MIN = 0.85
BENCH = "handoff"


class Round(NamedTuple):
    """Each side once."""

    copied: Copied
    at_once: Ran
    by_layers: Ran
    slow: Ran


def run_handoff(
    report: BenchReport, *, rounds: int = ROUNDS, shapes: Sequence[BenchShape] = SHAPES
) -> None:
    """Measures every shape, and adds rows and ratios."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < 2:
        report.add_note("one core: source and target share it, so the ratios say little")
    for shape in shapes:
        with engines(shape, cores) as both:
            both.run()  # Connects, and touches every page.
            layer_s = statistics.median(both.run().total_s for _ in range(3)) / shape.layers
            found = [_round(both, layer_s, number) for number in range(rounds)]
        _add_rows(report, shape, found)
        _add_ratios(report, shape, found)
    report.add_note("source and target are pinned to the first and the last core")
    report.add_note(f"by layers: a layer takes {PACE} × the time to send one; the clock plays it")


def _round(both: Engines, layer_s: float, number: int) -> Round:
    """Every other round goes the other way round."""
    sides: list[Callable[[], Copied | Ran]] = [
        both.copy,
        both.run,
        lambda: both.run(layer_s=PACE * layer_s),
        lambda: both.run(layer_s=SLOW_PACE * layer_s),
    ]
    order = range(4) if number % 2 == 0 else range(3, -1, -1)
    found = {at: sides[at]() for at in order}
    copied = found.pop(0)
    runs = [found[at] for at in (1, 2, 3)]
    assert isinstance(copied, Copied)
    return Round(copied, *(run for run in runs if isinstance(run, Ran)))


def _params(shape: BenchShape) -> dict[str, str | int | float | bool]:
    return {
        "layers": shape.layers,
        "tokens": shape.tokens,
        "block_tokens": shape.block_tokens,
        "order": shape.order,
    }


def _add_rows(report: BenchReport, shape: BenchShape, found: Sequence[Round]) -> None:
    def add(side: str, metric: str, seconds: Sequence[float]) -> None:
        report.add_row(
            bench=BENCH,
            side=side,
            params=_params(shape),
            metric=metric,
            unit="ns",
            summary=summarize([1e9 * each for each in seconds]),
        )

    add("copy + checksum", "all bytes", [each.copied.total_s for each in found])
    add("copy + checksum", "CPU", [each.copied.cpu_s for each in found])
    add("copy + checksum, pieces", "all bytes", [each.copied.pieces_s for each in found])
    add("pack + sums, alone", "CPU", [each.copied.packed_cpu_s for each in found])
    add("verify + put away, alone", "CPU", [each.copied.taken_cpu_s for each in found])
    add("handoff, at once", "all bytes", [each.at_once.total_s for each in found])
    add("handoff, at once", "one layer", [each.at_once.total_s / shape.layers for each in found])
    add("handoff, at once", "exposed", [each.at_once.exposed_s for each in found])
    add("handoff, by layers", "exposed", [each.by_layers.exposed_s for each in found])
    add("handoff, slow layers", "exposed", [each.slow.exposed_s for each in found])
    for side, runs in (
        ("handoff, at once", [each.at_once for each in found]),
        ("handoff, by layers", [each.by_layers for each in found]),
    ):
        add(side, "source CPU a part", [run.source_cpu_s / run.parts for run in runs])
        add(side, "target CPU a part", [run.target_cpu_s / run.parts for run in runs])


def _add_ratios(report: BenchReport, shape: BenchShape, found: Sequence[Round]) -> None:
    name = f"{shape.order}, blocks of {shape.block_tokens}"
    report.add_ratio(
        f"throughput against copy + checksum, {name}",
        statistics.median(each.copied.total_s / each.at_once.total_s for each in found),
        at_least=THROUGHPUT_MIN,
    )
    report.add_ratio(
        f"the same by CPU time of the busier side, {name}",
        statistics.median(
            each.copied.cpu_s / max(each.at_once.source_cpu_s, each.at_once.target_cpu_s)
            for each in found
        ),
        at_least=THROUGHPUT_MIN,
    )
    report.add_ratio(
        f"exposed, against sending one layer, {name}",
        statistics.median(each.by_layers.exposed_s / each.slow.exposed_s for each in found),
        at_most=1.5,
    )
    report.add_ratio(
        f"exposed, by layers against after the last, {name}",
        statistics.median(each.by_layers.exposed_s / each.at_once.exposed_s for each in found),
        at_most=0.5,
    )
