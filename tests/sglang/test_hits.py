"""What SGLang has evicted comes back from host memory, and what it had forgotten from a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.sglang

SIX = {"lengths": [400, 420, 440, 460, 470, 485], "alone": True}
"""Together more tokens than the small device pool has."""


def test_pages_that_were_evicted_come_back_and_answers_are_those_of_sglang_alone(run: Run) -> None:
    alone = run([SIX], options={"disable_radix_cache": True})[0][0]

    first, second = run([SIX, SIX], linker=True, pool=2048)[0]

    assert [row["where"] for row in second["rows"]] == [
        {"device": 0, "host": (length - 1) // 16 * 16} for length in SIX["lengths"]
    ]
    assert_same(first, alone)
    assert_same(second, alone)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Both gave the same tokens, with the same probabilities but for rounding."""
    for mine, plain in zip(one["rows"], other["rows"], strict=True):
        assert mine["tokens"] == plain["tokens"]
        assert mine["logprobs"] == pytest.approx(plain["logprobs"], abs=2e-4)
        assert mine["ended"]["type"] == "length"
