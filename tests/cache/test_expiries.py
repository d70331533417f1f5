"""Times to live of blocks: which passes next, and how much is kept of those that were replaced."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.cache.expiries import NEVER, Expiries


def nodes_of(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, dtype=np.int32)


def expiries_of(capacity: int = 64) -> Expiries:
    expiries = Expiries()
    expiries.resize(capacity)
    return expiries


def test_nothing_passes_where_no_time_was_given() -> None:
    expiries = expiries_of()

    assert expiries.next() is None
    assert expiries.pop_passed(1e9).tolist() == []


def test_nodes_pass_at_their_times_and_once() -> None:
    expiries = expiries_of()
    expiries.extend(nodes_of(3, 5), 20.0)
    expiries.extend(nodes_of(1), 10.0)

    assert expiries.next() == 10.0
    assert expiries.pop_passed(10.0).tolist() == [1]
    assert expiries.next() == 20.0
    assert expiries.pop_passed(30.0).tolist() == [3, 5]
    assert expiries.next() is None


def test_the_latest_time_counts() -> None:
    expiries = expiries_of()

    assert expiries.extend(nodes_of(1, 2), 10.0).tolist() == [1, 2]
    assert expiries.extend(nodes_of(1), 5.0).tolist() == []
    assert expiries.extend(nodes_of(1), 15.0).tolist() == [1]

    assert expiries.pop_passed(12.0).tolist() == [2]
    assert expiries.next() == 15.0


def test_a_number_that_means_another_block_has_no_time() -> None:
    expiries = expiries_of()
    expiries.extend(nodes_of(1, 2), 10.0)

    expiries.forget(nodes_of(1))

    assert expiries.pop_passed(10.0).tolist() == [2]
    assert expiries.next() is None


def test_what_is_kept_does_not_grow_with_the_hits() -> None:
    expiries = expiries_of(64)
    for hit in range(10_000):
        expiries.extend(nodes_of(*range(50)), 100.0 + hit)
        assert expiries.entry_count <= 64 + 64 + 50

    assert expiries.next() == 10_099.0
    assert expiries.pop_passed(10_098.0).tolist() == []
    assert expiries.pop_passed(10_099.0).tolist() == list(range(50))
    assert expiries.entry_count == 0


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_a_dictionary_would(seed: int) -> None:
    chance = np.random.default_rng(seed)
    expiries, model = expiries_of(), {}
    now = 0.0
    for _ in range(400):
        some = np.unique(chance.integers(0, 64, chance.integers(1, 8))).astype(np.int32)
        what = chance.random()
        if what < 0.7:
            until = now + float(chance.integers(1, 40))
            longer = [node for node in some.tolist() if model.get(node, NEVER) < until]
            assert expiries.extend(some, until).tolist() == longer
            model.update(dict.fromkeys(longer, until))
        elif what < 0.8:
            expiries.forget(some)
            for node in some.tolist():
                model.pop(node, None)
        else:
            now += float(chance.integers(0, 10))
            passed = sorted(node for node, until in model.items() if until <= now)
            assert expiries.pop_passed(now).tolist() == passed
            for node in passed:
                del model[node]
        assert expiries.next() == min(model.values(), default=None)
