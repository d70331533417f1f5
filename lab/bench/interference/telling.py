"""From windows to the rows and ratios of a report.

| metric                | of                                                                 |
|-----------------------|--------------------------------------------------------------------|
| `share of steps kept` | steps a second beside the copies ÷ alone, of the same round          |
| `rate`                | bytes of copies that ended in the window                             |
| `at the boundary`     | time of the engine's thread that the copies took, per step           |
| `step`                | time from one step's end to the next; the p99 is of all steps        |

The one rule: every side that ran has its rows, whatever they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.bench.interference.plan import TARGETS
from lab.bench.interference.shares import Outcome, slowest_that_moves, times_as_many_kept
from lab.bench.measure import summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lab.bench.interference.shares import Window
    from lab.bench.report import BenchReport, Param

BENCH = "interference"
ALONE = "alone"
PENSTOCK = "penstock"
BARE = "bare copies"
"""The link's own cost: a ceiling, which nobody is compared with."""


def add_rows(
    report: BenchReport,
    windows: Mapping[str, Sequence[Window]],
    *,
    loop: str,
    work: str,
    in_flight: int,
) -> list[Outcome]:
    """Adds the rows of all sides of one loop beside one kind of work."""
    params: dict[str, Param] = {"loop": loop, "beside": work, "in_flight": in_flight}
    outcomes: list[Outcome] = []
    for side, found in windows.items():
        steps = [each for window in found for each in window.step_s]
        if steps:
            _add(report, side, params, "step", "ns", [each * 1e9 for each in steps])
        else:
            report.add_note(f"{loop} beside {work}, {side}: no step ended within its window")
        if side == ALONE:
            continue
        outcome = Outcome.of(side, windows[ALONE], found)
        _add(report, side, params, "share of steps kept", "of 1", outcome.kept)
        _add(report, side, params, "rate", "GB/s", outcome.gb_per_s)
        if side.startswith((PENSTOCK, BARE)):
            spent = [window.boundary_ns for window in found]
            _add(report, side, params, "at the boundary", "ns", spent)
        outcomes.append(outcome)
    return outcomes


def add_verdicts(report: BenchReport, outcomes: Sequence[Outcome], *, loop: str, work: str) -> None:
    """Adds what is claimed of one loop beside one kind of work."""
    ours = [outcome for outcome in outcomes if outcome.side.startswith(PENSTOCK)]
    others = [each for each in outcomes if not each.side.startswith((PENSTOCK, BARE))]
    if not ours:
        return
    target = TARGETS.get(loop)
    if target is not None:
        row = slowest_that_moves(ours, target.gb_per_s)
        report.add_ratio(
            f"{loop} beside {work}: share of steps kept", row.share, at_least=target.share
        )
        report.add_ratio(f"{loop} beside {work}: GB/s then", row.rate, at_least=target.gb_per_s)
    for other in others:
        value, row = times_as_many_kept(ours, other)
        name = f"{loop} beside {work}: steps kept, times those beside {other.side}"
        report.add_ratio(name, value, at_least=1.0)
        if row.rate < other.rate:
            report.add_note(
                f"{name}: it moved {other.rate:.1f} GB/s, Penstock at most {row.rate:.1f}"
            )


def _add(
    report: BenchReport,
    side: str,
    params: Mapping[str, Param],
    metric: str,
    unit: str,
    samples: Sequence[float],
) -> None:
    report.add_row(
        bench=BENCH,
        side=side,
        params=params,
        metric=metric,
        unit=unit,
        summary=summarize(samples),
    )
