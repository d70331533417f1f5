"""What the tests here compare, and with what."""

from __future__ import annotations

from typing import Any

import pytest

PAGE = 16
LENGTHS = [400, 420, 440, 460, 470, 485]
HITS = [(length - 1) // PAGE * PAGE for length in LENGTHS]
"""Tokens of each prompt that can be restored: the last token is always computed."""
SIX = {"lengths": LENGTHS, "alone": True, "max_tokens": 8}
"""Together more tokens than a device pool of `SMALL` has."""
OTHERS = {**SIX, "seed": 4, "max_tokens": 2}
"""As many, which evict them."""
SMALL = 2048
PENSTOCK = {"linker": True, "pool": SMALL}


def host_hits(result: dict[str, Any]) -> list[int]:
    """Tokens of each prompt that came from below the device."""
    return [(row["where"] or {"host": 0})["host"] for row in result["rows"]]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both gave the same tokens, with the same probabilities but for rounding."""
    return len(one["rows"]) == len(other["rows"]) and all(
        mine["tokens"] == plain["tokens"]
        and mine["logprobs"] == pytest.approx(plain["logprobs"], abs=2e-4)
        and mine["ended"]["type"] == plain["ended"]["type"] == "length"
        for mine, plain in zip(one["rows"], other["rows"], strict=True)
    )
