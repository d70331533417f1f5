"""A case that fails names its seed."""

from __future__ import annotations

import pytest

from penstock.testing import failing_seed


def require_not(wrong: int) -> None:
    for seed in range(10):
        with failing_seed(seed):
            assert seed != wrong, f"found: {seed}"


def divide() -> None:
    for seed in range(10):
        with failing_seed(seed):
            assert 1 / (4 - seed)


def test_a_failed_assertion_names_the_seed_that_failed() -> None:
    with pytest.raises(AssertionError, match=r"^seed 3: found: 3"):
        require_not(3)


def test_another_error_names_the_seed_too() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        divide()

    assert caught.value.__notes__ == ["seed 4"]
