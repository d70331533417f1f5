"""Sliding windows: how much of a long prompt comes back from host memory.

Six KV groups share the pool, five of them with a window of three blocks. The prompt is computed in
one step, and in the next one vLLM takes the blocks that have left the windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, PENSTOCK, agree, cached, counted, generate

if TYPE_CHECKING:
    from conftest import Results, Run

pytestmark = pytest.mark.vllm

SMALL: dict[str, Any] = {"max_model_len": 416, "max_num_batched_tokens": 416}


@pytest.mark.parametrize(("pool", "tokens", "setup"), [(2048, 900, {}), (210, 400, SMALL)])
def test_a_prompt_comes_back_whole_where_the_pool_has_room(
    run: Run, pool: int, tokens: int, setup: dict[str, Any]
) -> None:
    acts = [generate(lengths=[tokens]), generate(lengths=[tokens], forget=True)]

    results: Results = run("hybrid", acts, connector=PENSTOCK, pool=pool, **setup)[0]

    assert cached(results[0]) == [0]
    assert cached(results[1]) == [tokens // BLOCK * BLOCK]
    assert counted(results[1], "tokens_loaded") == tokens // BLOCK * BLOCK
    assert counted(results[1], "blocks_dropped_window") == 0
    assert agree(results[0], results[1])
