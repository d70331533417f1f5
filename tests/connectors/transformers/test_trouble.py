"""Whatever is wrong with the cache or the model, `generate` goes on, and one line says why."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    DeepseekV32Config,
    Gemma3Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import penstock
from tests.connectors.transformers.conftest import (
    CONFIGS,
    SIZES,
    SMALL,
    answer,
    compare,
    new_model,
    padded,
    tokens_of,
)

if TYPE_CHECKING:
    from penstock.connectors.transformers.cache import PromptCache

ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
REFUSED = {
    "layer 0 is a LinearAttentionLayer: only DynamicLayer and Dynamic": Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention"] * 2
    ),
    "is a LinearAttentionLayer: ": Qwen3NextConfig(**SIZES, head_dim=16),
    "layer 0 is a DynamicIndexedLayer: ": DeepseekV32Config(
        **{**SIZES, "num_key_value_heads": 4}, q_lora_rank=32, kv_lora_rank=16
    ),
    "Gemma3ForConditionalGeneration has an encoder, or takes images": Gemma3Config(
        text_config={**SIZES, "head_dim": 16},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
    "use_bidirectional_attention is set": Gemma3TextConfig(
        **SIZES, head_dim=16, use_bidirectional_attention=True
    ),
    "rope_type is 'dynamic'": LlamaConfig(**SIZES, rope_parameters=ROPE),
}


def off(cache: PromptCache) -> str:
    """The one line that says why prompts are computed without the cache."""
    (line,) = cache.report().unused
    assert line in str(cache.report())
    return line


@pytest.mark.parametrize("why", REFUSED)
def test_a_model_whose_cache_holds_more_is_refused_by_name(why: str) -> None:
    model = new_model(REFUSED[why])
    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        with cache.prompt(tokens_of(8)) as kv:
            assert kv is None

        assert why in off(cache)


def test_a_model_with_an_encoder_or_adapters_and_what_is_no_model_are_refused() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    encoder = T5ForConditionalGeneration(T5Config(vocab_size=256, **sizes))
    adapted = new_model(CONFIGS["Llama"])
    adapted._hf_peft_config_loaded = True
    found = []
    for model in (encoder, adapted, object()):
        with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
            found.append(off(cache))

    assert found[0].startswith("T5ForConditionalGeneration has an encoder")
    assert "has adapters" in found[1]
    assert found[2] == "object is no PreTrainedModel of transformers"


def test_a_model_that_peft_has_put_layers_into_is_refused() -> None:
    """As `get_peft_model` does with the model that it is given."""
    layer = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model = new_model(CONFIGS["Llama"])
    model.model.layers[0].self_attn.v_proj = layer(64, 64)

    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        assert "has adapters" in off(cache)


@pytest.mark.parametrize("kind", ["static", "offloaded_static", "quantized", "offloaded"])
def test_other_caches_that_a_model_asks_for_are_used_instead(kind: str) -> None:
    model, prompt = new_model(CONFIGS["Llama"]), tokens_of(40)
    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        model.generation_config.cache_implementation = kind
        with cache.prompt(prompt) as kv:
            assert kv is None
        assert off(cache) == f"cache_implementation is {kind!r}, must be None"
        model.generation_config.cache_implementation = None

        assert compare(cache, model, prompt).right


def test_weights_that_were_changed_in_place_are_noticed() -> None:
    model, prompt = new_model(CONFIGS["Llama"]), tokens_of(40)
    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        compare(cache, model, prompt)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] += 1

        changed = compare(cache, model, prompt)

        assert changed.right
        assert changed.cached == ()
        assert off(cache).startswith("the weights were changed since the cache was opened")


def test_a_step_of_training_within_a_prompt_keeps_it_from_being_saved() -> None:
    model, prompt = new_model(CONFIGS["Llama"]), tokens_of(40)
    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        with cache.prompt(prompt) as kv:
            answer(model, prompt, torch.ones_like(prompt), kv)
            torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
            model.load_state_dict(new_model(CONFIGS["Llama"], seed=1).state_dict())

        assert off(cache).startswith("not saved: the weights were changed")
        assert cache.report().bytes_saved == 0


def test_padding_that_is_not_on_the_left_or_not_named_is_not_cached(
    llama: Any, small: PromptCache
) -> None:
    ids, mask = padded(tokens_of(40), tokens_of(30))
    with small.prompt(ids.flip(1), mask.flip(1)) as right, small.prompt(ids) as unnamed:
        assert right is unnamed is None

    assert list(small.report().unused) == [
        "attention_mask has padding that is not on the left",
        "input_ids have padding, and no attention_mask is given",
    ]
    assert compare(small, llama, ids, mask).right


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ((torch.ones(4, dtype=torch.long),), "must be token ids of shape"),
        ((torch.ones((1, 4)),), "input_ids are torch.float32 of shape"),
        ((torch.ones((0, 4), dtype=torch.long),), "must be token ids of shape"),
        (
            (tokens_of(4), torch.ones((1, 5))),
            r"attention_mask has shape \[1, 5\], must be \[1, 4\]",
        ),
    ],
)
def test_what_is_no_batch_of_prompts_is_an_error(
    small: PromptCache, given: Any, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        small.prompt(*given)


def test_an_answer_to_another_prompt_is_not_kept(small: PromptCache) -> None:
    with pytest.raises(ValueError, match="do not begin with the prompts"):
        small.prompt(tokens_of(8)).keep(tokens_of(12, seed=9))


def test_an_error_of_the_model_goes_through_and_nothing_is_saved(
    llama: Any, small: PromptCache
) -> None:
    def stopped(prompt: torch.Tensor) -> None:
        with small.prompt(prompt) as kv:
            answer(llama, prompt, torch.ones_like(prompt), kv)
            raise KeyboardInterrupt

    prompt = tokens_of(40)
    with pytest.raises(KeyboardInterrupt):
        stopped(prompt)

    assert small.report().bytes_saved == 0
    assert compare(small, llama, prompt).cached == (0,)


def test_a_cache_that_generate_was_not_given_is_not_saved(llama: Any, small: PromptCache) -> None:
    prompt = tokens_of(40)
    with small.prompt(prompt):
        answer(llama, prompt, torch.ones_like(prompt))

    assert off(small) == "not saved: the prompt was not computed with this cache"


def test_beams_that_nobody_told_of_are_not_saved(llama: Any, small: PromptCache) -> None:
    compare(small, llama, tokens_of(40), num_beams=2)

    assert off(small) == "not saved: the cache has 2 rows, not 1 of each prompt: see copies"


def test_a_closed_cache_computes_all(llama: Any) -> None:
    cache = penstock.transformers.open(llama, penstock.parse_config(SMALL))
    cache.close()
    cache.close()

    assert compare(cache, llama, tokens_of(40)).right
    assert off(cache) == "the cache is closed"


def test_a_prompt_that_host_memory_has_no_room_for_is_answered(llama: Any) -> None:
    tiny = SMALL.replace("gib = 0.01", "blocks = 4")
    with penstock.transformers.open(llama, penstock.parse_config(tiny)) as cache:
        first = compare(cache, llama, tokens_of(100))
        again = compare(cache, llama, tokens_of(100))
        other = compare(cache, llama, *padded(tokens_of(30), tokens_of(60, seed=2)))

        assert [each.right for each in (first, again, other)] == [True] * 3


def test_a_wrong_configuration_is_an_error(llama: Any) -> None:
    with pytest.raises(penstock.ConfigError, match="gib"):
        penstock.transformers.open(
            llama, penstock.parse_config(SMALL.replace("gib = 0.01", "gib = 60000"))
        )


def test_threads_may_take_turns(llama: Any, small: PromptCache) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(compare(small, llama, tokens_of(40))))
    thread.start()
    thread.join()

    assert found[0].right
    assert compare(small, llama, tokens_of(40)).cached == (32,)


def test_the_report_counts_hits_misses_and_bytes(llama: Any, small: PromptCache) -> None:
    compare(small, llama, tokens_of(41))
    compare(small, llama, tokens_of(41))

    block_bytes = 4 * 2 * 2 * 16 * 8 * 4
    report = small.report()
    assert (report.prompts, report.hits, report.tokens, report.tokens_cached) == (2, 1, 82, 40)
    assert (report.bytes_saved, report.bytes_loaded) == (5 * block_bytes, 5 * block_bytes)
    assert str(report).splitlines() == [
        "prompts: 2, 1 with a hit",
        "tokens: 40 of 82 were not computed (49%)",
        "bytes: 0.04 MB loaded, 0.04 MB saved",
        "misses: 1 never seen, 1 complete",
        "tier host: 5 blocks, room for 1,305",
    ]
