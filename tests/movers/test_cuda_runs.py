"""Extents for the link: together where they can be, and in turns."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.movers.cuda.runs import equal_in_turns, in_turns, run_ends

MIB = 1 << 20


@pytest.mark.parametrize(
    ("slots", "run_slots", "ends"),
    [
        ([3, 4, 5, 6], 100, [4, 4, 4, 4]),
        ([3, 4, 6, 7], 100, [2, 2, 4, 4]),
        ([5, 4, 3], 100, [1, 2, 3]),
        ([3, 4, 5, 6], 5, [2, 2, 4, 4]),
        ([5, 6, 9, 10, 11], 5, [2, 2, 3, 5, 5]),
        ([7], 5, [1]),
    ],
)
def test_slots_that_follow_each_other_are_a_run_within_one_extent(
    slots: list[int], run_slots: int, ends: list[int]
) -> None:
    assert run_ends(np.array(slots, dtype=np.int32), run_slots=run_slots) == ends


def test_short_extents_share_a_turn_as_long_as_they_fit() -> None:
    extents = [(at, 1000 + at, 40) for at in range(0, 500, 100)]

    turns = in_turns(extents, 100)

    assert turns == [
        ([0, 100], [1000, 1100], [40, 40]),
        ([200, 300], [1200, 1300], [40, 40]),
        ([400], [1400], [40]),
    ]


@pytest.mark.parametrize("turn_bytes", [40, 100, 1000])
def test_equal_extents_are_put_into_turns_as_any_others(turn_bytes: int) -> None:
    hosts = [700, 100, 1300, 900, 500]

    turns = equal_in_turns(0, 50, hosts, 40, turn_bytes)

    extents = [(50 * number, host, 40) for number, host in enumerate(hosts)]
    assert turns == in_turns(extents, turn_bytes)


def test_a_long_extent_is_cut_into_about_equal_turns() -> None:
    turns = in_turns([(0, 0, 64 * MIB)], 12 * MIB)

    lengths = [length for _, _, (length,) in turns]
    assert len(lengths) == 6
    assert max(lengths) - min(lengths) < 64 << 10
    assert max(lengths) <= 12 * MIB


@pytest.mark.parametrize("seed", range(50))
def test_every_byte_is_copied_once_and_in_order_whatever_the_turns(seed: int) -> None:
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
