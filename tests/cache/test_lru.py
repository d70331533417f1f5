"""Least recently used: the order, and that its queue stays small."""

from __future__ import annotations

import pytest

from penstock.cache.eviction import LruPolicy
from penstock.testing.policy_suite import Shelf


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(LruPolicy, slot_count=8)


def test_the_block_that_entered_first_leaves_first(shelf: Shelf) -> None:
    for node in (5, 3, 4):
        shelf.enter(node, priority=0)

    assert shelf.drain() == [5, 3, 4]


def test_a_hit_moves_a_block_to_the_end(shelf: Shelf) -> None:
    for node in (1, 2, 3):
        shelf.enter(node, priority=0)

    shelf.touch(1)

    assert shelf.drain() == [2, 3, 1]


def test_only_the_last_hit_counts(shelf: Shelf) -> None:
    for node in (1, 2):
        shelf.enter(node, priority=0)

    for node in (1, 1, 1, 2):
        shelf.touch(node)

    assert shelf.drain() == [1, 2]


def test_being_in_use_does_not_count_as_a_use(shelf: Shelf) -> None:
    shelf.enter(1, 2, priority=0)
    shelf.touch(2)

    shelf.hold(1)
    shelf.let_leave(1)

    assert shelf.drain() == [1, 2]


def test_recency_decides_among_blocks_of_one_priority(shelf: Shelf) -> None:
    shelf.enter(1, priority=1)
    shelf.enter(2, priority=0)
    shelf.enter(3, priority=1)
    shelf.enter(4, priority=0)

    assert shelf.drain() == [2, 4, 1, 3]


def test_the_queue_stays_bounded_however_often_blocks_are_hit() -> None:
    policies: list[LruPolicy] = []

    def make(slot_count: int, standing: object) -> LruPolicy:
        policies.append(LruPolicy(slot_count, standing))  # type: ignore[arg-type]
        return policies[-1]

    shelf = Shelf(make, slot_count=8)
    shelf.enter(*range(8), priority=0)

    for hit in range(2000):
        shelf.touch(hit % 8)

    assert len(policies[0]._queue) <= 2 * 8 + 64 + 1
    assert shelf.drain() == list(range(8))
