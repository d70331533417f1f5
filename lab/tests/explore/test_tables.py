"""Sets and maps of numbers that take whole arrays at a time."""

from __future__ import annotations

import numpy as np
import pytest

from lab.explore.tables import MISSING, Lookup, Seen, mixed


def keys_of(*numbers: int) -> np.ndarray:
    return mixed(np.array(numbers, dtype=np.uint64))


def test_of_equal_keys_one_is_new_and_none_is_the_next_time() -> None:
    seen = Seen()

    fresh = seen.add(keys_of(1, 2, 1, 3, 1))

    assert fresh.sum() == 3
    assert not seen.add(keys_of(1, 2, 3)).any()
    assert len(seen) == 3


@pytest.mark.parametrize("seed", range(5))
def test_a_set_that_grows_knows_what_a_set_of_python_knows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seen, known = Seen(), set[int]()

    for _ in range(40):
        keys = mixed(rng.integers(0, 1 << 17, 10_000).astype(np.uint64))
        fresh = seen.add(keys)

        assert sorted(keys[fresh].tolist()) == sorted(set(keys.tolist()) - known)
        known |= set(keys.tolist())
    assert len(seen) == len(known)


def test_a_map_says_what_was_put_there_and_what_is_missing() -> None:
    lookup, numbers = Lookup(), np.arange(200_000)
    keys = mixed(numbers.astype(np.uint64))

    lookup.put(keys[:100_000], numbers[:100_000] * 3)

    assert (lookup.find(keys[:100_000]) == numbers[:100_000] * 3).all()
    assert (lookup.find(keys[100_000:]) == MISSING).all()
