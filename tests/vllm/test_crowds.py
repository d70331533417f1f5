"""Other models than a Llama with many requests at once and a pool too small for them.

`test_pressure.py` does the same with a Llama, and more. Latent attention is not here: what its
kernels compute depends on what else is computed in the same step, so that plain vLLM does not
agree with itself. `test_kinds.py` has a crowd of it whose answers are not compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from comparing import TAMPERED, agree, cached, counted, generate
from references import SHORTER_CROWD, SMALLER_CROWD

if TYPE_CHECKING:
    from conftest import Plain, Results, Run

pytestmark = pytest.mark.vllm

SMALL: dict[str, Any] = {"max_model_len": 416, "max_num_batched_tokens": 416}


@pytest.fixture(scope="module")
def hybrid(run: Run, plain_vllm: Plain) -> tuple[Results, Results]:
    """Six KV groups on two ranks: a block of tokens takes six blocks of the pool."""
    plain = [plain_vllm("hybrid")[name] for name in ("crowd", "cold")]
    acts = [SHORTER_CROWD, SHORTER_CROWD, generate(), generate(forget=True)]
    acts += [generate(forget=True, tamper="flip"), {"act": "events"}]
    results, _ = run("hybrid", acts, connector=TAMPERED, ranks=2, pool=240, events=True, **SMALL)
    return plain, results


def test_several_groups_under_pressure_give_the_same(hybrid: tuple[Results, Results]) -> None:
    plain, results = hybrid

    assert results[1]["metrics"]["vllm:num_preemptions"] > 0
    assert agree(results[0], plain[0])
    assert agree(results[1], plain[0])
    assert counted(results[1], "tokens_loaded") > 0


def test_several_groups_on_two_ranks_give_the_same(hybrid: tuple[Results, Results]) -> None:
    plain, results = hybrid

    assert agree(results[2], plain[1])
    assert sum(cached(results[3])) > 0
    assert counted(results[3], "tokens_loaded") > counted(results[2], "tokens_loaded")
    assert agree(results[3], plain[1])


def test_52234_several_groups_never_serve_what_one_rank_could_not_load(
    hybrid: tuple[Results, Results],
) -> None:
    plain, results = hybrid

    assert counted(results[4], "loads_failed") > counted(results[3], "loads_failed")
    assert agree(results[4], plain[1])


def test_events_tell_the_groups_of_a_block_as_vllm_does(hybrid: tuple[Results, Results]) -> None:
    """vLLM announces of a group with a window only what can still be matched."""
    stored, on_device = (hybrid[1][5]["events"][f"BlockStored {each}"] for each in ("CPU", "GPU"))
    both = {name: block for name, block in stored.items() if name in on_device}

    assert both == {name: on_device[name] for name in both}
    hashes = {name.partition(" ")[0] for name in stored}
    assert len(stored) == 6 * len(hashes)
    # What failed its checksum was saved anew.
    saved, failed = (counted(hybrid[1][5], name) for name in ("blocks_saved", "loads_failed"))
    assert saved - failed <= len(hashes) <= saved
    kinds = {name.rpartition(" ")[2]: block["group"] for name, block in both.items()}
    assert [kind for kind, _ in kinds.values()].count("sliding_window") == 5
    assert ["full_attention", None] in kinds.values()


@pytest.fixture(scope="module")
def trained(run: Run, plain_vllm: Plain) -> tuple[Results, Results]:
    acts = [SMALLER_CROWD, SMALLER_CROWD]
    results, _ = run("smollm2", acts, connector=TAMPERED, pool=16, **SMALL)
    return [plain_vllm("smollm2")["crowd"]], results


@pytest.mark.long  # Several groups, above; a trained model without pressure, in test_requests.
def test_a_trained_model_under_pressure_says_the_same(trained: tuple[Results, Results]) -> None:
    require_the_same_under_pressure(*trained)


@pytest.mark.long
def test_a_trained_model_in_a_large_crowd_says_the_same(run: Run) -> None:
    plain, _ = run("smollm2", [SHORTER_CROWD])
    acts = [SHORTER_CROWD, SHORTER_CROWD]
    results, _ = run("smollm2", acts, connector=TAMPERED, pool=20, **SMALL)

    require_the_same_under_pressure(plain, results)


def require_the_same_under_pressure(plain: Results, results: Results) -> None:
    assert results[1]["metrics"]["vllm:num_preemptions"] > 0
    assert counted(results[1], "tokens_loaded") > 0
    assert agree(results[0], plain[0])
    assert agree(results[1], plain[0])
