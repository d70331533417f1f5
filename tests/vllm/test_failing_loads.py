"""Pools too small for all loads, of which some fail beside others, drawn from a seed."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, TAMPERED, agree, counted, generate

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.vllm

ROUNDS = 6
TIGHT_POOL: dict[str, Any] = {"pool": 60, "max_model_len": 1280, "max_num_batched_tokens": 1280}
TROUBLES = ("fail", "first", "flip", "tail", "sums", "")
"""What happens to loads (see `tampered_connector.py`); in a round without a word, nothing."""


def drawn_acts(seed: int) -> list[dict[str, Any]]:
    """Prompts that are computed, and then loaded while loads fail, some times over."""
    draw = Random(seed)
    acts = []
    for number, trouble in enumerate(draw.sample(TROUBLES, ROUNDS)):
        blocks = [draw.choice((1, 3, 8, 16, 32)) for _ in range(draw.randint(2, 6))]
        lengths = [count * BLOCK + draw.randrange(1, BLOCK) for count in blocks]
        prompts = generate(lengths=lengths, seed=100 * seed + number, max_tokens=4)
        acts += [{**prompts, "forget": True, "tamper": ""}]
        acts += [{**prompts, "forget": True, "tamper": trouble}]
    return acts


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))]
)
def test_every_request_is_answered_rightly_whatever_loads_fail_beside_others(
    run: Run, seed: int
) -> None:
    acts = drawn_acts(seed)

    results, _ = run("llama", acts, connector=TAMPERED, asynchronous=bool(seed % 2), **TIGHT_POOL)

    for computed, again in zip(results[::2], results[1::2], strict=True):
        assert agree(again, computed)
    troubled = [again for act, again in zip(acts, results, strict=True) if act["tamper"]]
    assert sum(counted(each, "loads_failed") for each in troubled) > 0
