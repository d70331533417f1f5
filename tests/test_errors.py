"""Errors carry what they say: also into another process."""

from __future__ import annotations

import copy
import pickle

import pytest

from penstock.errors import (
    CapacityError,
    ConfigError,
    InvariantViolation,
    NeverFitsError,
    PeerError,
    PenstockError,
    counted,
)


def test_a_number_has_its_noun_in_the_singular_where_it_is_one() -> None:
    assert [counted(n, "block") for n in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
    assert [counted(n, "copy", "copies") for n in (1, 2)] == ["1 copy", "2 copies"]


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("cache.blocks", "is 0", further=(ConfigError("tiers", "is 5"),)),
        CapacityError(tier="host", wanted=5, available=3),
        NeverFitsError(tier="host", wanted=5, available=3),
        InvariantViolation("a block is lost", story=("it was there",), node=4),
        PeerError("it said nonsense"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_out_of_another_process_as_it_was(error: PenstockError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert {name: str(value) for name, value in vars(again).items()} == {
            name: str(value) for name, value in vars(error).items()
        }
