"""Layers that keep states in place of KV: the connector is off, and vLLM serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from comparing import PENSTOCK, cached, generate

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.vllm

LENGTH = 900
"""vLLM makes blocks as large as a state: of 288 or 544 tokens, depending on the processor."""
REASON = "Penstock is off, vLLM runs without it: a KV group is of kind MambaSpec, must be attention"


def test_vllm_serves_a_model_with_states_and_says_why_penstock_is_off(run: Run) -> None:
    act = generate(lengths=[LENGTH, LENGTH + 5], max_tokens=4)

    # Its kernels for CPUs know no other dtype.
    results, output = run("states", [act, act], connector=PENSTOCK, dtype="bfloat16")

    first, again = results
    assert output.count(REASON) == 1
    assert cached(first) == [0, 0]
    # It is vLLM's own cache that has them.
    assert all(0 < found < LENGTH for found in cached(again))
    assert [row["tokens"] for row in again["rows"]] == [row["tokens"] for row in first["rows"]]
