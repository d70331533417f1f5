"""Wishes that no block could be given are refused before anything changes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.fixtures.frozen import freeze
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

BAD_WISHES = [
    ({"priority": 40_000}, "priority is 40000, must be from -32767 to 32767"),
    ({"priority": -32_768}, "priority is -32768"),
    ({"ttl_s": math.nan}, "ttl_s is nan"),
    ({"ttl_s": 0.0}, "ttl_s is 0.0, must be a number of seconds above 0"),
    ({"deadline": math.nan}, "deadline is nan"),
]


@pytest.mark.parametrize(("wish", "message"), BAD_WISHES)
def test_a_request_with_impossible_wishes_changes_nothing(
    wish: dict[str, float], message: str
) -> None:
    driver = make_driver(device=8, host=8)
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match=message):
        driver.handle(
            ev.Acquire(request="r", keys=driver.keys("ab"), token_count=4, **wish)  # type: ignore[arg-type]
        )

    assert freeze(driver.machine) == before


@pytest.mark.parametrize(("wish", "message"), BAD_WISHES)
def test_a_save_with_impossible_wishes_changes_nothing(
    wish: dict[str, float], message: str
) -> None:
    driver = make_driver(device=None, host=8)
    slots = np.array([[0, 1]], dtype=np.int32)
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match=message):
        driver.handle(
            ev.Save(keys=driver.keys("ab"), slots=slots, cause="r", **wish)  # type: ignore[arg-type]
        )

    assert freeze(driver.machine) == before
