"""Prompts of whole blocks, whose last token vLLM computes in any case, for the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from comparing import BLOCK, PENSTOCK, WHOLE, agree, cached, generate

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("llama", WHOLE),
        # vLLM keeps windows for the token behind what is found, and computes one within it.
        ("hybrid", [WHOLE[0] - BLOCK]),
    ],
)
def test_all_of_a_prompt_comes_from_host_memory_where_no_window_forbids_it(
    run: Run, kind: str, found: list[int]
) -> None:
    act = generate(lengths=WHOLE)
    acts = [act, act, {**act, "forget": True}, {**act, "forget": True}]

    (computed, device, host, again), _ = run(kind, acts, connector=PENSTOCK)

    assert cached(computed) == [0]
    assert cached(device) == [WHOLE[0] - BLOCK]
    assert cached(host) == cached(again) == found
    assert agree(device, computed)
    assert agree(host, computed)
    assert agree(again, computed)
