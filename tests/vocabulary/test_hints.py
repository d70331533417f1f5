"""Hints of clients: read alike wherever they come from, and refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.vocabulary.hints import NO_HINTS, RetentionHints, read_hints, with_retention


@pytest.mark.parametrize(
    ("given", "hints"),
    [
        ({}, NO_HINTS),
        ({"over": False, "ttl_s": None}, NO_HINTS),
        ({"over": True}, RetentionHints(keep_tokens=0)),
        ({"keep_tokens": 33.0}, RetentionHints(keep_tokens=33)),
        ({"ttl_s": 5}, RetentionHints(ttl_s=5.0)),
        ({"priority": -3}, RetentionHints(priority=-3)),
        ({"priority": 3, "ttl_s": 5}, RetentionHints(priority=3, ttl_s=5.0)),
        # A priority above 0 ends some day.
        ({"priority": 3}, RetentionHints(priority=3, ttl_s=3600.0)),
    ],
)
def test_hints_are_read(given: dict[str, Any], hints: RetentionHints) -> None:
    assert read_hints(given) == hints
    assert read_hints(hints.given) == hints


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"over": 1}, "penstock.over is 1, must be true or false"),
        ({"over": "yes"}, "penstock.over is 'yes', must be true or false"),
        ({"over": True, "keep_tokens": 5}, "penstock.keep_tokens is 5, must be left out"),
        ({"keep_tokens": -1}, "penstock.keep_tokens is -1, must be a whole number from 0 to"),
        ({"keep_tokens": True}, "penstock.keep_tokens is true, must be"),
        ({"keep_tokens": 10**400}, "penstock.keep_tokens is a number of 1329 bits, must be"),
        ({"ttl_s": 0}, "penstock.ttl_s is 0, must be a number of seconds above 0 and at most"),
        ({"ttl_s": math.nan}, "penstock.ttl_s is NaN, must be"),
        ({"ttl_s": math.inf}, "penstock.ttl_s is Infinity, must be"),
        ({"ttl_s": -1}, "penstock.ttl_s is -1, must be"),
        ({"ttl_s": 10**400}, "penstock.ttl_s is a number of 1329 bits, must be"),
        ({"ttl_s": "60"}, "penstock.ttl_s is '60', must be"),
        ({"ttl_s": False}, "penstock.ttl_s is false, must be"),
        ({"priority": 101}, "penstock.priority is 101, must be a whole number from -100 to 100"),
        ({"priority": 0.5}, "penstock.priority is 0.5, must be"),
        ({"priority": [1]}, r"penstock.priority is \[1\], must be"),
        ({"prio": 1}, "penstock.prio is no hint, must be one of over, keep_tokens, ttl_s"),
        ({5: 1}, "penstock.5 is no hint"),
        ({"x" * (1 << 20): 1}, "penstock.x{100,199} is no hint"),
        ({"\ud800": 1}, r"penstock.\\ud800 is no hint"),
    ],
)
def test_a_wrong_hint_is_refused_by_name(given: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        read_hints(given)


def test_a_retention_of_a_day_is_a_priority_for_a_day_unless_hints_say_more() -> None:
    day = with_retention(NO_HINTS, "24h")
    low = RetentionHints(priority=-1)

    assert day == RetentionHints(priority=1, ttl_s=86_400.0)
    assert with_retention(low, "24h") == low
    assert with_retention(NO_HINTS, "in_memory") == NO_HINTS
    with pytest.raises(ValueError, match="prompt_cache_retention is 5, must be one of 'in_memory'"):
        with_retention(NO_HINTS, 5)


@pytest.mark.parametrize(("tokens", "blocks"), [(None, None), (0, 0), (1, 1), (16, 1), (17, 2)])
def test_a_block_with_a_token_to_keep_is_kept(tokens: int | None, blocks: int | None) -> None:
    assert RetentionHints(keep_tokens=tokens).keep_blocks(16) == blocks
