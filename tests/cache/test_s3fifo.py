"""S3-FIFO: one-hit wonders leave first, what is reused stays, ghosts come back to main."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cache.eviction import S3FifoPolicy
from penstock.testing.policy_suite import Shelf

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOT_COUNT = 10


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(S3FifoPolicy, slot_count=SLOT_COUNT)


def policy_of(shelf: Shelf) -> S3FifoPolicy:
    assert isinstance(shelf.policy, S3FifoPolicy)
    return shelf.policy


def numbers() -> Iterator[int]:
    yield from range(20, 60)


def promote(shelf: Shelf, *nodes: int) -> None:
    """Brings blocks into the main queue: hit twice while small, then passed over."""
    for node in nodes:
        shelf.enter(node, priority=0)
        shelf.touch(node)
        shelf.touch(node)
    shelf.enter(18, 19, priority=0)
    assert shelf.evict() == 18
    shelf.remove(19, evicted=False)


def test_blocks_seen_once_leave_in_the_order_they_came(shelf: Shelf) -> None:
    for node in (7, 3, 5):
        shelf.enter(node, priority=0)

    assert shelf.drain() == [7, 3, 5]


def test_one_hit_does_not_save_a_block_from_the_small_queue(shelf: Shelf) -> None:
    for node in (1, 2):
        shelf.enter(node, priority=0)

    shelf.touch(1)

    assert shelf.drain() == [1, 2]


def test_a_block_hit_twice_outlives_a_burst_of_blocks_seen_once(shelf: Shelf) -> None:
    shelf.enter(1, priority=0)
    shelf.touch(1)
    shelf.touch(1)

    left = []
    for node in numbers():
        shelf.enter(node, priority=0)
        if node >= 20 + SLOT_COUNT:
            left.append(shelf.evict())

    assert 1 not in left
    assert left == list(range(20, 20 + len(left)))


def test_main_leaves_before_small_when_small_has_no_more_than_its_share(shelf: Shelf) -> None:
    promote(shelf, 1, 2)

    shelf.enter(3, priority=0)

    assert shelf.evict() == 1


def test_small_leaves_before_main_when_it_has_more_than_its_share(shelf: Shelf) -> None:
    promote(shelf, 1, 2)

    shelf.enter(3, 4, priority=0)

    assert shelf.evict() == 3


def test_a_hit_in_the_main_queue_gives_another_round(shelf: Shelf) -> None:
    promote(shelf, 1, 2, 3)

    shelf.touch(1)

    assert shelf.drain() == [2, 3, 1]


def test_hits_are_counted_up_to_three(shelf: Shelf) -> None:
    promote(shelf, 1, 2)
    for _ in range(200):
        shelf.touch(1)
    for _ in range(3):
        shelf.touch(2)

    assert shelf.drain() == [1, 2]


def test_a_block_that_comes_back_soon_after_leaving_small_enters_main(shelf: Shelf) -> None:
    shelf.enter(1, priority=0)
    assert shelf.evict() == 1

    shelf.enter(1, priority=0)
    shelf.enter(2, 3, priority=0)

    assert shelf.drain() == [2, 1, 3]


def test_a_block_that_was_not_evicted_leaves_no_ghost(shelf: Shelf) -> None:
    shelf.enter(1, priority=0)
    shelf.remove(1, evicted=False)

    shelf.enter(1, priority=0)
    shelf.enter(2, 3, priority=0)

    assert shelf.drain() == [1, 2, 3]


def test_a_block_evicted_from_main_leaves_no_ghost(shelf: Shelf) -> None:
    promote(shelf, 1)
    assert shelf.evict() == 1

    shelf.enter(1, priority=0)
    shelf.enter(2, 3, priority=0)

    assert shelf.drain() == [1, 2, 3]


def test_a_ghost_belongs_to_the_content_and_not_to_the_number(shelf: Shelf) -> None:
    shelf.enter(1, priority=0, name="first")
    shelf.evict()

    shelf.enter(1, priority=0, name="second")
    shelf.enter(2, 3, priority=0)

    assert shelf.drain() == [1, 2, 3]


def test_a_ghost_counts_once(shelf: Shelf) -> None:
    shelf.enter(1, priority=0)
    shelf.evict()
    shelf.enter(1, priority=0)
    shelf.remove(1, evicted=False)

    shelf.enter(1, priority=0)
    shelf.enter(2, 3, priority=0)

    assert shelf.drain() == [1, 2, 3]


def test_the_oldest_ghosts_fade(shelf: Shelf) -> None:
    for node in range(SLOT_COUNT + 1):
        shelf.enter(node, priority=0)
        shelf.evict()

    shelf.enter(0, priority=0)
    shelf.enter(SLOT_COUNT, priority=0)
    shelf.enter(30, 31, priority=0)

    assert len(policy_of(shelf)._ghosts) < SLOT_COUNT
    assert shelf.drain() == [0, 30, SLOT_COUNT, 31]


def test_priority_comes_before_the_choice_of_queue(shelf: Shelf) -> None:
    promote(shelf, 1)
    shelf.let_leave(1, priority=1)
    shelf.enter(2, priority=2)

    assert shelf.drain() == [1, 2]


def test_a_block_keeps_its_place_while_it_is_in_use(shelf: Shelf) -> None:
    for node in (1, 2):
        shelf.enter(node, priority=0)

    shelf.hold(1)
    shelf.let_leave(1)

    assert shelf.drain() == [1, 2]


def test_the_queues_stay_bounded_however_often_blocks_are_hit(shelf: Shelf) -> None:
    shelf.enter(*range(8), priority=0)

    for hit in range(2000):
        shelf.touch(hit % 8)

    assert all(len(queue) <= 2 * SLOT_COUNT + 64 + 1 for queue in policy_of(shelf)._queues)
    assert sorted(shelf.drain()) == list(range(8))


def test_a_block_that_leaves_for_another_reason_makes_room_in_the_small_queue(
    shelf: Shelf,
) -> None:
    promote(shelf, 1)
    shelf.enter(2, 3, priority=0)

    shelf.remove(2, evicted=False)

    assert shelf.evict() == 1


def refused_room(shelf: Shelf) -> None:
    """Room is planned and given back; on the way block 2 went to the main queue for a while."""
    promote(shelf, 1)
    shelf.enter(2, 3, priority=0)
    shelf.touch(2)
    shelf.touch(2)
    aside = shelf.set_aside(1)
    assert list(aside) == [1]
    shelf.put_back(aside)


def test_a_block_put_back_into_the_small_queue_counts_there_again(shelf: Shelf) -> None:
    refused_room(shelf)

    shelf.hold(2)

    assert shelf.evict() == 3


def test_a_block_put_back_into_the_small_queue_counts_there_once(shelf: Shelf) -> None:
    refused_room(shelf)

    shelf.remove(2, evicted=False)

    assert shelf.evict() == 1
