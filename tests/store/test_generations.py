"""Generations of a space: which record is followed, and which one is of an earlier time."""

from __future__ import annotations

from penstock.store.shared.generations import ANCESTORS_MAX, KnownGenerations, Lineage

SPACE, OTHER = bytes(16), bytes([1] * 16)


def test_a_record_says_what_was_written_and_nothing_else() -> None:
    lineage = Lineage(7, (6, 5))
    record = lineage.to_record(SPACE)

    assert Lineage.from_record(SPACE, record) == lineage
    assert Lineage.from_record(OTHER, record) is None
    for wrong in (b"", record[:8], record[:-1], record + bytes(8), bytes(len(record)), b"12345678"):
        assert Lineage.from_record(SPACE, wrong) is None
    for place in range(len(record)):
        flipped = bytearray(record)
        flipped[place] ^= 1
        assert Lineage.from_record(SPACE, bytes(flipped)) is None


def test_who_knows_nothing_follows_any_record() -> None:
    assert KnownGenerations().accepts(SPACE, Lineage(1))


def test_a_record_is_followed_forward_and_never_back() -> None:
    known = KnownGenerations()
    known.follow(SPACE, Lineage(2, (1,)))

    assert known.accepts(SPACE, Lineage(2, (1,)))
    assert known.accepts(SPACE, Lineage(4, (3, 2, 1)))
    assert not known.accepts(SPACE, Lineage(1))
    assert not known.accepts(SPACE, Lineage(3, (1,)))  # Of somebody who did not know of 2.
    assert known.accepts(OTHER, Lineage(1))


def test_what_an_engine_knows_counts_until_a_record_descends_from_it() -> None:
    known = KnownGenerations()

    assert not known.expect(SPACE, 2)
    assert not known.accepts(SPACE, Lineage(1))
    known.follow(SPACE, Lineage(3, (2, 1)))
    assert known.expect(SPACE, 2)
    assert known.expect(SPACE, 3)
    assert not known.expect(SPACE, 9)
    assert not known.accepts(SPACE, Lineage(3, (2, 1)))


def test_a_new_generation_descends_from_all_that_is_known_and_read() -> None:
    known = KnownGenerations()
    known.follow(SPACE, Lineage(2, (1,)))
    known.expect(SPACE, 9)

    fresh = known.successor(SPACE, 10, Lineage(5, (4, 1)))

    assert fresh.current == 10
    assert set(fresh.ancestors) == {1, 2, 4, 5, 9}
    assert known.accepts(SPACE, fresh)


def test_a_record_does_not_grow_for_ever_and_what_it_forgets_is_no_ancestor() -> None:
    known = KnownGenerations()
    for number in range(2 * ANCESTORS_MAX):
        known.follow(SPACE, known.successor(SPACE, number, None))
    late = KnownGenerations()
    late.follow(SPACE, Lineage(0))

    newest = known.successor(SPACE, 10_000, None)

    assert len(newest.ancestors) == ANCESTORS_MAX
    assert not late.accepts(SPACE, newest)
    assert late.accepts(SPACE, late.successor(SPACE, 10_001, newest))
