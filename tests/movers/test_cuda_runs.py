"""Extents for the link: together where they can be, and in turns."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.movers.cuda.tables import Road, in_turns
from penstock.testing import failing_seed

MIB = 1 << 20


@pytest.mark.parametrize(
    ("slots", "run_slots", "runs"),
    [
        ([3, 4, 5, 6], 100, [(0, 4)]),
        ([3, 4, 6, 7], 100, [(0, 2), (2, 2)]),
        ([5, 4, 3], 100, [(0, 1), (1, 1), (2, 1)]),
        ([3, 4, 5, 6], 5, [(0, 2), (2, 2)]),
        ([5, 6, 9, 10, 11], 5, [(0, 2), (2, 1), (3, 2)]),
        ([7], 5, [(0, 1)]),
    ],
)
def test_slots_that_follow_each_other_are_a_run_within_one_extent(
    slots: list[int], run_slots: int, runs: list[tuple[int, int]]
) -> None:
    road = Road.survey(np.array(slots, dtype=np.int32), run_slots=run_slots)

    assert road.runs(0, len(slots)) == runs


def test_the_runs_of_a_part_are_those_of_the_whole_cut_at_its_ends() -> None:
    for seed in range(20):
        with failing_seed(seed):
            random = np.random.default_rng(seed)
            slots = np.flatnonzero(random.random(60) < 0.8).astype(np.int32)
            road = Road.survey(slots, run_slots=16)
            first, end = sorted(random.choice(len(slots) + 1, size=2, replace=False).tolist())

            runs = road.runs(first, end)

            part = Road.survey(slots[first:end], run_slots=16)
            assert runs == [(first + at, count) for at, count in part.runs(0, end - first)]


def test_short_extents_share_a_turn_as_long_as_they_fit() -> None:
    extents = [(at, 1000 + at, 40) for at in range(0, 500, 100)]

    turns = in_turns(extents, 100)

    assert turns == [
        ([0, 100], [1000, 1100], [40, 40]),
        ([200, 300], [1200, 1300], [40, 40]),
        ([400], [1400], [40]),
    ]


def test_a_long_extent_is_cut_into_about_equal_turns() -> None:
    turns = in_turns([(0, 0, 64 * MIB)], 12 * MIB)

    lengths = [length for _, _, (length,) in turns]
    assert len(lengths) == 6
    assert max(lengths) - min(lengths) < 64 << 10
    assert max(lengths) <= 12 * MIB


def test_every_byte_is_copied_once_and_in_order_whatever_the_turns() -> None:
    for seed in range(50):
        with failing_seed(seed):
            random = np.random.default_rng(seed)
            count = int(random.integers(1, 6))
            lengths = random.integers(1, 40_000, size=count).tolist()
            staged = np.cumsum(random.integers(50_000, 90_000, size=count)).tolist()
            extents = [(at, 7 * at, length) for at, length in zip(staged, lengths, strict=True)]
            turn_bytes = int(random.integers(1, 20_000))

            turns = in_turns(extents, turn_bytes)

            assert all(0 < sum(turn[2]) <= turn_bytes for turn in turns)
            parts = [part for turn in turns for part in zip(*turn, strict=True)]
            found, wanted = (
                np.hstack(
                    [
                        np.stack([np.arange(at, at + length), np.arange(host, host + length)])
                        for at, host, length in each
                    ]
                )
                for each in (parts, extents)
            )
            np.testing.assert_array_equal(found, wanted)
