"""The arithmetic of interference: shares of steps kept, rates, and which rows are compared."""

from __future__ import annotations

import sys

import pytest

from lab.bench.interference.plan import Plan, bare_rate
from lab.bench.interference.shares import (
    Outcome,
    Window,
    budget_bytes,
    shares_kept,
    slowest_that_moves,
    times_as_many_kept,
)
from lab.bench.interference.telling import add_rows, add_verdicts
from lab.bench.measure import summarize
from lab.bench.report import BenchReport
from penstock.errors import ConfigError


def window(steps: int, *, seconds: float = 1.0, moved_gb: float = 0.0) -> Window:
    return Window(
        step_s=(seconds / steps,) * steps if steps else (),
        steps=steps,
        seconds=seconds,
        moved_bytes=round(moved_gb * 1e9),
    )


def outcome(side: str, share: float, rate: float) -> Outcome:
    return Outcome(side=side, kept=(share,) * 3, gb_per_s=(rate,) * 3)


def report() -> BenchReport:
    return BenchReport(version="0", command="test")


def test_a_share_compares_steps_a_second_of_the_same_round() -> None:
    alone = [window(100), window(50, seconds=1.0)]
    beside = [window(98), window(49)]

    assert shares_kept(alone, beside) == [0.98, 0.98]


def test_windows_of_different_length_are_compared_by_their_rates() -> None:
    assert shares_kept([window(100, seconds=2.0)], [window(50, seconds=1.0)]) == [1.0]


def test_rounds_that_have_no_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        shares_kept([window(1), window(1)], [window(1)])


def test_a_step_that_was_given_up_counts_by_the_part_that_was_done() -> None:
    slow = Window(step_s=(), steps=0.25, seconds=2.0, moved_bytes=0)

    assert shares_kept([window(10)], [slow]) == [0.0125]


def test_a_window_cannot_tell_more_steps_than_it_did() -> None:
    with pytest.raises(ValueError, match="at least the 2 told"):
        Window(step_s=(0.1, 0.1), steps=1.5, seconds=1.0, moved_bytes=0)


def test_time_at_the_boundary_is_told_per_step() -> None:
    spent = Window(step_s=(0.1,) * 4, steps=4, seconds=0.4, moved_bytes=0, boundary_s=0.002)

    assert spent.boundary_ns == pytest.approx(500_000)


def test_an_outcome_is_the_median_of_its_rounds() -> None:
    alone = [window(100)] * 3
    beside = [window(90, moved_gb=10), window(99, moved_gb=30), window(95, moved_gb=20)]

    found = Outcome.of("penstock", alone, beside)

    assert found.share == 0.95
    assert found.rate == pytest.approx(20.0)


def test_a_target_is_judged_by_the_row_that_moves_enough_and_no_more() -> None:
    rows = [outcome("a", 0.99, 15), outcome("b", 0.98, 31), outcome("c", 0.90, 54)]

    assert slowest_that_moves(rows, 25).side == "b"


def test_where_no_row_moves_enough_the_fastest_one_is_judged() -> None:
    rows = [outcome("a", 0.99, 15), outcome("b", 0.98, 20)]

    assert slowest_that_moves(rows, 25).side == "b"


def test_we_are_compared_with_a_peer_at_no_lower_rate_than_its_own() -> None:
    ours = [outcome("slow", 1.0, 10), outcome("fast", 0.9, 50)]

    value, row = times_as_many_kept(ours, outcome("peer", 0.6, 40))

    assert row.side == "fast"
    assert value == pytest.approx(1.5)


def test_a_peer_that_ends_no_step_does_not_divide_by_zero() -> None:
    value, _ = times_as_many_kept([outcome("ours", 1.0, 10)], outcome("peer", 0.0, 1))

    assert value == pytest.approx(1e6)


def test_a_budget_is_the_rate_times_the_step_shared_by_the_directions() -> None:
    assert budget_bytes(30.0, 0.01, 1) == 300_000_000
    assert budget_bytes(30.0, 0.01, 2) == 150_000_000


@pytest.mark.parametrize(("rate", "step_s", "ways"), [(0.0, 1.0, 1), (1.0, 0.0, 1), (1.0, 1.0, 0)])
def test_a_budget_of_nothing_is_refused(rate: float, step_s: float, ways: int) -> None:
    with pytest.raises(ValueError, match="need a positive"):
        budget_bytes(rate, step_s, ways)


def test_a_plan_names_loops_that_there_are() -> None:
    with pytest.raises(ConfigError, match="only: is eager,tiny, must be of eager, graph, small"):
        Plan(loops=("eager", "tiny"))


def test_share_and_rate_of_a_verdict_come_from_one_row() -> None:
    found = report()

    add_verdicts(
        found,
        [
            outcome("penstock, 15 GB/s", 0.99, 15),
            outcome("penstock, 30 GB/s", 0.96, 30),
            outcome("thread", 0.5, 20),
        ],
        loop="eager",
        work="save",
    )
    found.add_row(**_any_row())

    ratios = {ratio.name: ratio for ratio in found.document().ratios}
    assert ratios["eager beside save: share of steps kept"].value == 0.96
    assert not ratios["eager beside save: share of steps kept"].holds
    assert ratios["eager beside save: GB/s then"].value == 30
    assert ratios["eager beside save: GB/s then"].holds
    assert ratios["eager beside save: steps kept, times those beside thread"].value == 1.92


def test_the_small_loop_has_no_target_but_is_compared_with_the_others() -> None:
    found = report()

    add_verdicts(
        found,
        [outcome("penstock, no limit", 0.4, 50), outcome("thread", 0.5, 20)],
        loop="small",
        work="save",
    )
    found.add_row(**_any_row())

    (ratio,) = found.document().ratios
    assert ratio.name == "small beside save: steps kept, times those beside thread"
    assert not ratio.holds


def test_every_side_has_rows_and_one_that_ended_no_step_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report()
    windows = {
        "alone": [window(10)],
        "penstock, no limit": [window(9, moved_gb=20)],
        "thread": [Window(step_s=(), steps=0.5, seconds=1.0, moved_bytes=10**9)],
    }

    outcomes = add_rows(found, windows, loop="eager", work="save", in_flight=2)

    assert [each.side for each in outcomes] == ["penstock, no limit", "thread"]
    rows = {(row.side, row.metric): row.median for row in found.document().rows}
    assert rows["alone", "step"] == 1e8
    assert rows["penstock, no limit", "share of steps kept"] == 0.9
    assert rows["penstock, no limit", "rate"] == 20
    assert ("penstock, no limit", "at the boundary") in rows
    assert rows["thread", "share of steps kept"] == 0.05
    assert ("thread", "step") not in rows
    found.show(sys.stdout)
    assert "eager beside save, thread: no step ended" in capsys.readouterr().out


def test_bare_copies_are_a_ceiling_and_nobody_is_compared_with_them() -> None:
    found = report()
    windows = {
        "alone": [window(10)],
        "penstock, 27 GB/s": [window(9, moved_gb=26)],
        "bare copies, 27 GB/s": [window(10, moved_gb=27)],
        "thread": [window(8, moved_gb=26)],
    }

    outcomes = add_rows(found, windows, loop="eager", work="save", in_flight=2)
    add_verdicts(found, outcomes, loop="eager", work="save")

    document = found.document()
    rows = {(row.side, row.metric): row.median for row in document.rows}
    assert rows["bare copies, 27 GB/s", "share of steps kept"] == 1.0
    assert ("bare copies, 27 GB/s", "at the boundary") in rows
    assert not [ratio.name for ratio in document.ratios if "bare" in ratio.name]
    assert [ratio.value for ratio in document.ratios] == [0.9, 26.0, 1.125]


@pytest.mark.parametrize(
    ("loop", "rates", "bare"),
    [
        ("eager", (15.0, 30.0, 50.0), 30.0),
        ("graph", (15.0, 30.0, 50.0), 50.0),
        ("graph", (27.0, 47.0), 47.0),
        ("graph", (27.0,), None),
        ("small", (27.0, 47.0), None),
    ],
)
def test_bare_copies_have_the_rate_of_the_row_that_a_target_is_read_from(
    loop: str, rates: tuple[float, ...], bare: float | None
) -> None:
    assert bare_rate(loop, rates) == bare


def _any_row() -> dict[str, object]:
    return {
        "bench": "interference",
        "side": "alone",
        "params": {},
        "metric": "step",
        "unit": "ns",
        "summary": summarize([1.0]),
    }
