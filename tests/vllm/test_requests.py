"""Requests of every sort, and a trained model: the same output with the connector and without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from comparing import (
    BLOCK,
    DETECTED,
    HITS,
    LENGTHS,
    PENSTOCK,
    TAMPERED,
    agree,
    announced,
    cached,
    counted,
    generate,
)
from references import LONG

if TYPE_CHECKING:
    from conftest import Plain, Results, Run

pytestmark = pytest.mark.vllm

SORTS: dict[str, Any] = {
    "options": {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "enable_prompt_embeds": True,
    }
}
SPECULATIVE: dict[str, Any] = {
    "options": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    }
}
TRAINED: dict[str, Any] = {"pool": 40}
STRANGE = ["StrangeConnector", "strange_connector"]
NONE = [0] * len(HITS)
ANSWER = 24


@pytest.fixture(scope="module")
def plain(run: Run) -> Results:
    acts = [generate(adapter=1), generate(adapter=1), generate(adapter=2), generate()]
    return run("llama", [*acts, generate(embeds=True)], **SORTS)[0]


@pytest.fixture(scope="module")
def results(run: Run) -> Results:
    acts = [
        generate(adapter=1),
        generate(adapter=1, forget=True),
        generate(adapter=2, forget=True),
        generate(forget=True),
        generate(embeds=True, forget=True),
        generate(embeds=True, forget=True),
        generate(salt="pepper"),
        {"act": "events"},
    ]
    # As in a vLLM that was not tested, where it was asked for nevertheless.
    asked = {"any_version": True}
    return run("llama", acts, connector=STRANGE, extra=asked, events=True, **SORTS)[0]


def test_blocks_of_an_adapter_come_back_for_that_adapter(plain: Results, results: Results) -> None:
    assert cached(results[0]) == NONE
    assert agree(results[0], plain[0])
    assert cached(results[1]) == HITS
    assert counted(results[1], "tokens_loaded") == sum(HITS)
    assert agree(results[1], plain[1])


def test_blocks_of_an_adapter_are_not_found_by_another_or_by_none(
    plain: Results, results: Results
) -> None:
    assert cached(results[2]) == cached(results[3]) == NONE
    assert agree(results[2], plain[2])
    assert agree(results[3], plain[3])
    assert not agree(plain[2], plain[0])


def test_prompt_embeddings_are_neither_saved_nor_loaded(plain: Results, results: Results) -> None:
    before, first, second = results[3:6]

    assert cached(first) == cached(second) == NONE
    assert counted(second, "blocks_saved") == counted(before, "blocks_saved")
    assert agree(first, plain[4])
    assert agree(second, plain[4])


def test_events_tell_adapters_and_salts_as_vllm_does(results: Results) -> None:
    blocks = announced(results[7])

    extra_keys = [block["extra_keys"] for block in blocks.values()]
    # Prompts and their answers, of which the last token has no KV yet.
    blocks_of_one = sum((length + ANSWER - 1) // BLOCK for length in LENGTHS)
    assert len(blocks) == counted(results[7], "blocks_saved") == 4 * blocks_of_one
    assert extra_keys.count([["adapter-1"]]) == extra_keys.count([["adapter-2"]]) == blocks_of_one
    # Salt is in the first block of a prompt, and by way of it in those after it.
    assert extra_keys.count([["pepper"]]) == len(HITS)
    assert [1, "adapter-1"] in [block["adapter"] for block in blocks.values()]


def test_speculative_decoding_goes_on_from_loaded_blocks(run: Run, plain_vllm: Plain) -> None:
    """The answer, drafts and all, is saved and found as far as it was accepted."""
    results, _ = run("llama", [LONG, {**LONG, "forget": True}], connector=PENSTOCK, **SPECULATIVE)

    assert cached(results[1]) == HITS
    # What is accepted of drafts is what the model says without them.
    without = plain_vllm("llama")["long"]
    assert agree(results[0], without)
    assert agree(results[1], without)
    # Prompts and answers: of each the last token has no KV yet.
    assert counted(results[0], "blocks_saved") >= sum(HITS) // BLOCK + len(HITS) * 2


@pytest.fixture(scope="module")
def trained(run: Run, plain_vllm: Plain) -> tuple[Results, Results]:
    """SmolLM2-135M; the device's pool is filled by others; then blocks are damaged."""
    crowd = generate(lengths=[9 * BLOCK + 5] * 4, seed=9, max_tokens=1)
    without = [plain_vllm("smollm2")[name] for name in ("cold", "cached")]
    acts = [generate(), generate(), crowd, generate(tamper="remember"), {"act": "reset"}]
    acts += [generate(forget=True, tamper="")]
    acts += [generate(forget=True, tamper=word) for word in DETECTED]
    return without, run("smollm2", acts, connector=TAMPERED, **TRAINED)[0]


def test_a_trained_model_says_the_same_when_it_computes(trained: tuple[Results, Results]) -> None:
    without, results = trained

    assert agree(results[0], without[0])


def test_a_trained_model_says_the_same_from_the_device_cache(
    trained: tuple[Results, Results],
) -> None:
    without, results = trained

    assert cached(results[1]) == cached(without[1]) == HITS
    assert counted(results[1], "tokens_loaded") == 0
    assert agree(results[1], without[1])


def test_a_trained_model_says_the_same_from_host_memory_after_eviction(
    trained: tuple[Results, Results],
) -> None:
    without, results = trained

    assert cached(results[3]) == HITS
    assert counted(results[3], "tokens_loaded") > 0
    assert agree(results[3], without[1])


@pytest.mark.parametrize("word", DETECTED)
def test_a_trained_model_says_the_same_when_blocks_are_damaged(
    trained: tuple[Results, Results], word: str
) -> None:
    without, results = trained
    position = 6 + DETECTED.index(word)
    before, act = results[position - 1], results[position]

    assert counted(act, "loads_failed") - counted(before, "loads_failed") == len(HITS)
    assert agree(act, without[1])
