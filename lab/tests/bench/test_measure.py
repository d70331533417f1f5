from __future__ import annotations

import gc

import pytest

from lab.bench.measure import collector_paused, interleave, summarize, timed, times_faster
from lab.bench.report import describe_machine


def test_the_median_of_an_even_number_of_samples_lies_between_the_middle_two() -> None:
    summary = summarize([4, 1, 3, 2])

    assert summary.median == 2.5
    assert summary.samples == 4


@pytest.mark.parametrize(("count", "rank"), [(1, 1), (9, 9), (99, 99), (100, 99), (101, 100)])
def test_the_p99_is_the_smallest_sample_that_99_percent_do_not_exceed(
    count: int, rank: int
) -> None:
    samples = list(range(count, 0, -1))

    assert summarize(samples).p99 == rank


def test_no_samples_have_no_summary() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summarize([])


def test_a_machine_that_slows_down_between_rounds_does_not_change_who_is_faster() -> None:
    ours = [10.0, 10.0, 20.0, 20.0]
    theirs = [50.0, 50.0, 100.0, 100.0]

    assert times_faster(ours, theirs) == 5.0


def test_sides_with_different_numbers_of_rounds_are_not_compared() -> None:
    with pytest.raises(ValueError, match="got 1 and 2"):
        times_faster([1.0], [1.0, 2.0])


def test_timed_work_returns_its_result_and_a_time() -> None:
    elapsed_ns, result = timed(lambda: sum(range(1000)))

    assert result == 499500
    assert elapsed_ns > 0


def test_the_collector_rests_inside_the_block_and_runs_again_after_an_error() -> None:
    assert gc.isenabled()

    def fail_inside() -> None:
        with collector_paused():
            assert not gc.isenabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()

    assert gc.isenabled()


def test_an_inner_pause_does_not_end_the_outer_one() -> None:
    with collector_paused():
        with collector_paused():
            pass

        assert not gc.isenabled()


def test_sides_take_turns_and_swap_places_every_round() -> None:
    log: list[str] = []

    def side(name: str) -> int:
        log.append(name)
        assert not gc.isenabled()
        return len(log)

    results = interleave({"ours": lambda: side("ours"), "peer": lambda: side("peer")}, rounds=3)

    assert log == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert results == {"ours": [1, 4, 5], "peer": [2, 3, 6]}


def test_less_than_one_round_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds: must be at least 1, got 0"):
        interleave({"ours": lambda: 1}, rounds=0)


def test_a_machine_is_described_without_naming_it() -> None:
    machine = describe_machine()

    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_bytes > 1 << 20
    assert machine.python.split()[1].startswith("3.")
    assert "/" not in machine.kernel
