"""The memory of blocks that left."""

from __future__ import annotations

from lab.fixtures.frozen import freeze_departed
from penstock.cache.explain import Departed, Departure, Miss, MissReason

EVICTED = Departure(MissReason.EVICTED, "host", "lru", 1.0)
CORRUPT = Departure(MissReason.CORRUPT, "disk", "", 2.0)


def test_a_departure_is_remembered_by_key() -> None:
    departed = Departed(limit=4)

    departed.add([b"a", b"b"], EVICTED)

    assert departed.get(b"a") == departed.get(b"b") == EVICTED
    assert departed.get(b"c") is None


def test_the_last_departure_of_a_block_counts() -> None:
    departed = Departed(limit=4)
    departed.add([b"a"], EVICTED)

    departed.add([b"a"], CORRUPT)

    assert departed.get(b"a") == CORRUPT
    assert len(departed) == 1


def test_a_block_that_comes_back_is_no_longer_departed() -> None:
    departed = Departed(limit=4)
    departed.add([b"a", b"b"], EVICTED)

    departed.discard([b"b", b"never seen"])

    assert departed.get(b"b") is None
    assert departed.get(b"a") == EVICTED


def test_the_oldest_departures_are_forgotten_first() -> None:
    departed = Departed(limit=2)
    departed.add([b"a", b"b"], EVICTED)

    departed.add([b"c"], EVICTED)

    assert len(departed) == 2
    assert departed.get(b"a") is None
    assert departed.get(b"c") == EVICTED


def test_a_block_that_leaves_again_is_among_the_newest() -> None:
    departed = Departed(limit=2)
    departed.add([b"a", b"b"], EVICTED)
    departed.add([b"a"], EVICTED)

    departed.add([b"c"], EVICTED)

    assert departed.get(b"a") == EVICTED
    assert departed.get(b"b") is None


def test_more_departures_at_once_than_fit_leave_the_last_ones() -> None:
    departed = Departed(limit=2)

    departed.add([b"a", b"b", b"c", b"d"], EVICTED)

    assert [departed.get(key) for key in (b"a", b"b")] == [None, None]
    assert [departed.get(key) for key in (b"c", b"d")] == [EVICTED, EVICTED]


def test_the_memory_freezes_in_order_of_departure() -> None:
    departed = Departed(limit=4)
    departed.add([b"a"], EVICTED)
    departed.add([b"b"], CORRUPT)

    assert freeze_departed(departed) == ((b"a", "evicted", "host"), (b"b", "corrupt", "disk"))


def test_a_miss_says_which_block_and_why() -> None:
    miss = Miss(reason=MissReason.NEVER_SEEN, block=3)

    assert str(miss) == "block 3: never seen"


def test_a_miss_says_when_from_where_and_by_which_policy() -> None:
    miss = Miss(reason=MissReason.EVICTED, block=3, departure=EVICTED)

    assert str(miss) == "block 3: evicted (at 1.000, tier host, policy lru)"
