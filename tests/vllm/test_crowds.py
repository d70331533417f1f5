"""Other models than a Llama with 32 requests at once and a pool too small for them.

`test_pressure.py` does the same with a Llama, and more. Latent attention is not here: what its
kernels compute depends, in the third digit, on what else is computed in the same step.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from comparing import TAMPERED, agree, cached, counted, generate

if TYPE_CHECKING:
    from conftest import Run, Told

pytestmark = pytest.mark.vllm

CONCURRENCY = 32
DRAWN = random.Random(13)
CROWD = generate(
    lengths=[DRAWN.randrange(40, 120) for _ in range(CONCURRENCY)], max_tokens=24, seed=5
)
SMALL: dict[str, Any] = {"max_model_len": 416, "max_num_batched_tokens": 416}


@pytest.fixture(scope="module")
def hybrid(run: Run) -> tuple[Told, Told]:
    """Six KV groups on two ranks: a block of tokens takes six blocks of the pool."""
    plain, _ = run("hybrid", [CROWD, generate()], pool=2048)
    acts = [CROWD, CROWD, generate(), generate(forget=True), generate(forget=True, tamper="flip")]
    told, _ = run("hybrid", acts, connector=TAMPERED, ranks=2, pool=240, **SMALL)
    return plain, told


def test_several_groups_under_pressure_give_the_same(hybrid: tuple[Told, Told]) -> None:
    plain, told = hybrid

    assert told[1]["metrics"]["vllm:num_preemptions"] > 0
    assert agree(told[0], plain[0])
    assert agree(told[1], plain[0])
    assert counted(told[1], "tokens_loaded") > 0


def test_several_groups_on_two_ranks_give_the_same(hybrid: tuple[Told, Told]) -> None:
    plain, told = hybrid

    assert agree(told[2], plain[1])
    assert sum(cached(told[3])) > 0
    assert counted(told[3], "tokens_loaded") > counted(told[2], "tokens_loaded")
    assert agree(told[3], plain[1])


def test_52234_several_groups_never_serve_what_one_rank_could_not_load(
    hybrid: tuple[Told, Told],
) -> None:
    plain, told = hybrid

    assert counted(told[4], "loads_failed") > counted(told[3], "loads_failed")
    assert agree(told[4], plain[1])


@pytest.fixture(scope="module")
def trained(run: Run) -> tuple[Told, Told]:
    plain, _ = run("smollm2", [CROWD], pool=512)
    return plain, run("smollm2", [CROWD, CROWD], connector=TAMPERED, pool=20, **SMALL)[0]


def test_a_trained_model_under_pressure_says_the_same(trained: tuple[Told, Told]) -> None:
    plain, told = trained

    assert told[1]["metrics"]["vllm:num_preemptions"] > 0
    assert counted(told[1], "tokens_loaded") > 0
    assert agree(told[0], plain[0])
    assert agree(told[1], plain[0])
