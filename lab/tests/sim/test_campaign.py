"""Campaigns: the same result over any number of processes, and honest about what they saw."""

from __future__ import annotations

import pytest

from lab.sim import campaign
from lab.sim.campaign import Failure, Outcome, run_campaign, run_seeds
from lab.sim.coverage import (
    EVENT_KINDS,
    FAULT_KINDS,
    SEEDS_MIN,
    Coverage,
    counting_moves,
)
from lab.sim.report import document_of, failure_lines, lines_of
from penstock.cache.states import SLOT_TABLE, SlotMove, SlotState


def coverage_that_saw_everything() -> Coverage:
    seen = run_seeds(range(1)).coverage
    seen.seed_count = SEEDS_MIN
    seen.event_count = 66 * SEEDS_MIN
    seen.event_seeds.update(dict.fromkeys(EVENT_KINDS, SEEDS_MIN))
    seen.fault_seeds.update(dict.fromkeys(FAULT_KINDS, SEEDS_MIN))
    seen.moves = {
        name: [[count + 1 for count in row] for row in counts]
        for name, counts in seen.moves.items()
    }
    return seen


@pytest.fixture(name="_small_batches")
def take_few_seeds_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "_BATCH_SEEDS", 5)


@pytest.mark.usefixtures("_small_batches")
def test_the_number_of_processes_does_not_change_the_result() -> None:
    seeds = range(12)

    alone = run_campaign(seeds, jobs=1)
    together = run_campaign(seeds, jobs=2)

    assert together.coverage == alone.coverage
    assert together.failures == alone.failures


@pytest.mark.usefixtures("_small_batches")
def test_progress_counts_every_seed() -> None:
    steps: list[int] = []

    run_campaign(range(12), progress=steps.append)

    assert steps == [5, 5, 2]


def test_failures_are_told_in_the_order_of_seeds() -> None:
    later, sooner = (
        Failure(seed=seed, checker="bytes", problem="slot 3 is wrong", where="ranks.py:1")
        for seed in (9, 2)
    )
    whole = Outcome(failures=[later])

    whole.add(Outcome(failures=[sooner]))

    assert [failure.seed for failure in whole.failures] == [2, 9]


def test_failures_that_differ_in_numbers_only_are_told_together() -> None:
    failures = [
        Failure(seed=seed, checker="bytes", problem=f"slot {seed} is wrong", where="ranks.py:1")
        for seed in (3, 4)
    ]

    lines = list(failure_lines(Outcome(failures=failures), "cache"))

    assert lines == [
        "2 failed: bytes: slot 3 is wrong (ranks.py:1)",
        "  seeds 3, 4",
        "  lab sim --scenario cache --seed 3 --trace",
    ]


def test_enough_of_everything_is_no_shortfall() -> None:
    assert coverage_that_saw_everything().shortfalls() == []


def test_an_event_or_a_fault_in_too_few_seeds_is_a_shortfall() -> None:
    seen = coverage_that_saw_everything()
    seen.event_seeds["Fork"] = SEEDS_MIN // 100 - 1
    seen.fault_seeds["rank dies"] = 0

    assert seen.shortfalls() == [
        "event 'Fork' in 0.95% of the seeds, 1% are due",
        "fault 'rank dies' in 0.00% of the seeds, 1% are due",
    ]


def test_a_move_that_never_happened_is_a_shortfall() -> None:
    seen = coverage_that_saw_everything()
    seen.moves["slot"][SlotMove.KEEP][SlotState.LEAVING] = 0

    assert seen.shortfalls() == ["slot: KEEP in state LEAVING never happened"]


def test_too_few_events_are_a_shortfall() -> None:
    seen = coverage_that_saw_everything()
    seen.event_count = 59 * SEEDS_MIN

    assert seen.shortfalls() == ["59.0 events a seed, at least 60 are due"]


def test_a_short_campaign_is_not_held_to_rare_things() -> None:
    assert run_seeds(range(2)).coverage.shortfalls() == []


def test_counting_moves_leaves_the_tables_as_they_were() -> None:
    before = SLOT_TABLE.counts

    with counting_moves() as moves:
        SLOT_TABLE.after(SlotState.FREE, SlotMove.TAKE, subject="a slot")

    assert moves["slot"][SlotMove.TAKE][SlotState.FREE] == 1
    assert SLOT_TABLE.counts is before


def test_the_report_shows_every_kind_and_every_pair() -> None:
    outcome = run_seeds(range(3))

    text = "\n".join(lines_of(outcome))

    for kind in (*EVENT_KINDS, *FAULT_KINDS):
        assert kind in text
    assert "impossible" in text
    assert text.startswith("3 seeds, ")


@pytest.mark.parametrize(
    ("state", "move", "possible"), [("FREE", "TAKE", True), ("FREE", "FILL", False)]
)
def test_the_document_tells_what_is_impossible(state: str, move: str, *, possible: bool) -> None:
    document = document_of(run_seeds(range(1)))

    moves = document["moves"]

    assert isinstance(moves, dict)
    assert (moves["slot"][state][move] is not None) is possible
