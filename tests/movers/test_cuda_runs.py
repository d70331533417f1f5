"""Extents for the link: together where they can be."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.movers.cuda.tables import Road
from penstock.testing import failing_seed


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
