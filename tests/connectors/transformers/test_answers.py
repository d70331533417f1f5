"""`generate` gives the same answers with a prompt from the cache, whatever the model keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import Gemma3nTextConfig, Gemma3TextConfig, Phi3Config

import penstock
from tests.connectors.transformers.conftest import (
    CONFIGS,
    SIZES,
    SMALL,
    WINDOW,
    answer,
    compare,
    model_of,
    new_model,
    padded,
    tokens_of,
)

if TYPE_CHECKING:
    from penstock.connectors.transformers.cache import PromptCache


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_alone_in_a_batch_and_with_its_answer_is_answered_as_without(name: str) -> None:
    model, prompt = model_of(name), tokens_of(100)
    other = torch.cat([prompt[:, :50], tokens_of(20, seed=2)], dim=1)
    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        first = compare(cache, model, prompt, keep=True)
        again = compare(cache, model, prompt)
        batch = compare(cache, model, *padded(prompt[:, :90], other))
        asked = answer(model, prompt, torch.ones_like(prompt)).sequences
        after = compare(cache, model, torch.cat([asked, tokens_of(9, seed=3)], dim=1))

    assert [each.right for each in (first, again, batch, after)] == [True] * 4
    # Of the answer, 3 of 4 tokens have KV: the last was not computed any more.
    assert (first.cached, again.cached, after.cached) == ((0,), (96,), (96,))
    # Of the second row 48 tokens are known, before which there are 20 columns of padding.
    assert batch.cached == (48 + 20, 48)


@pytest.mark.parametrize("name", ["Gemma 3", "GPT-OSS", "Mistral"])
@pytest.mark.parametrize("length", [WINDOW - 9, WINDOW, WINDOW + 1, WINDOW + 15, 3 * WINDOW])
def test_a_sliding_window_is_restored_at_every_length_of_whole_blocks(
    name: str, length: int
) -> None:
    model, prompt = model_of(name), tokens_of(120)
    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        compare(cache, model, prompt)
        found = compare(cache, model, torch.cat([prompt[:, :length], tokens_of(5, seed=4)], dim=1))

    assert found.cached == (length // 8 * 8,)
    assert found.right


def test_of_a_long_prompt_the_last_window_alone_is_loaded_for_sliding_layers() -> None:
    config = {**SIZES, "num_hidden_layers": 2}
    kinds = ["sliding_attention", "full_attention"]
    model = new_model(
        Gemma3TextConfig(**config, head_dim=16, sliding_window=WINDOW, layer_types=kinds)
    )
    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        prompt = tokens_of(200)
        compare(cache, model, prompt, max_new_tokens=1)
        saved = cache.report().bytes_saved
        compare(cache, model, prompt, max_new_tokens=1)
        report = cache.report()

    layer_block = saved // 25 // 2
    # 24 blocks of the layer that sees all; 31 tokens before the 192nd lie in 4 of the other.
    assert report.bytes_loaded == (24 + 4) * layer_block


def test_layers_that_use_the_kv_of_others_are_restored_or_refused_by_name() -> None:
    """Up to transformers 5.22 they have no layer in the cache, from 5.23 on one of their own."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = new_model(
        Gemma3nTextConfig(
            **SIZES,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=kinds,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=256,
            hidden_size_per_layer_input=16,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * 4,
        )
    )
    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        found = [compare(cache, model, tokens_of(100)) for _ in range(2)]
        unused = "".join(cache.report().unused)

    assert all(each.right for each in found)
    assert found[1].cached == (96,) or unused.startswith("layer 2 is a DummyLayer")


def test_beams_start_from_one_prompt(llama: Any, small: PromptCache) -> None:
    prompt = tokens_of(60)
    first = compare(small, llama, prompt, copies=3, num_beams=3)
    again = compare(small, llama, prompt, copies=3, num_beams=3)
    batch = compare(small, llama, *padded(prompt, prompt[:, :30]), copies=2, num_beams=2)

    assert first.right
    assert again.right
    assert batch.right
    assert (first.cached, again.cached, batch.cached) == ((0,), (56,), (54, 24))


@pytest.mark.skipif(
    transformers.__version__ < "5.22",
    reason="transformers gives wrong answers from any cache that is not empty, in chunks",
)
def test_a_prompt_in_chunks_is_saved_and_found_as_any_other(llama: Any, small: PromptCache) -> None:
    first = compare(small, llama, tokens_of(60), prefill_chunk_size=16)
    again = compare(small, llama, tokens_of(60), prefill_chunk_size=16)

    assert first.right
    assert again.right
    assert again.cached == (56,)


def test_assisted_decoding_computes_a_prompt_that_is_found(llama: Any, small: PromptCache) -> None:
    """It gives the model the whole prompt, and places it behind what a cache has of it."""
    prompt = tokens_of(60)
    first = compare(small, llama, prompt, prompt_lookup_num_tokens=3)
    again = compare(small, llama, prompt, prompt_lookup_num_tokens=3)
    plain = compare(small, llama, prompt)
    report = small.report()

    assert [each.right for each in (first, again, plain)] == [True] * 3
    assert (again.cached, plain.cached, report.hits) == ((0,), (56,), 1)
    assert report.unused == {"assisted decoding starts from no cache": 1}


def test_a_cache_that_is_asked_to_record_after_the_prompt_keeps_it(
    llama: Any, small: PromptCache
) -> None:
    """As `generate` does on devices where it looks for the end of an answer one step late."""
    prompt = tokens_of(60)
    compare(small, llama, prompt)
    with small.prompt(prompt) as kv:
        llama(prompt[:, 56:], past_key_values=kv)
        assert kv is not None
        kv.activate_past_recording()

        assert kv.get_seq_length() == 60


def test_what_assisted_decoding_has_dropped_from_a_window_is_not_saved() -> None:
    model, prompt = model_of("Gemma 3"), tokens_of(60)
    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        first = compare(cache, model, prompt, prompt_lookup_num_tokens=3)
        again = compare(cache, model, prompt)
        unused = cache.report().unused

    assert first.right
    assert again.right
    assert again.cached == (0,)
    assert [why.partition("tokens, ")[2] for why in unused] == ["a sliding window has dropped some"]


def test_a_prompt_is_never_cached_as_a_whole(llama: Any, small: PromptCache) -> None:
    prompt = tokens_of(64)
    compare(small, llama, prompt)

    assert compare(small, llama, prompt).cached == (56,)
    assert compare(small, llama, prompt[:, :1]).right


def test_a_prompt_in_several_pieces_of_the_stage_is_restored_whole(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.connectors.transformers.layers.STAGE_BLOCKS_MAX", 3)
    with penstock.transformers.open(llama, penstock.parse_config(SMALL)) as cache:
        compare(cache, llama, tokens_of(100))
        again = compare(cache, llama, tokens_of(100))

    assert again.cached == (96,)
    assert again.right


def test_a_prompt_beyond_the_length_at_which_longrope_changes_is_not_cached() -> None:
    limit = 80
    rotary = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0}
    rotary |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rotary["original_max_position_embeddings"] = limit
    model = new_model(
        Phi3Config(**SIZES, rope_parameters=rotary, original_max_position_embeddings=limit)
    )
    with penstock.transformers.open(model, penstock.parse_config(SMALL)) as cache:
        asked = [tokens_of(count) for count in (70, 110, 110, 70, limit - 2)]
        found = [compare(cache, model, prompt) for prompt in asked]
        unused = cache.report().unused

    assert all(each.right for each in found)
    # The last one grows beyond the length while it is answered.
    assert [each.cached for each in found] == [(0,), (), (), (64,), (64,)]
    assert list(unused) == [
        "rope_type is 'longrope': beyond 80 tokens, the KV of a prefix is another"
    ]


def test_tenants_share_nothing(llama: Any, small: PromptCache) -> None:
    prompt = tokens_of(40)
    with small.prompt(prompt, tenant="one") as kv:
        answer(llama, prompt, torch.ones_like(prompt), kv)
    with small.prompt(prompt, tenant="two") as kv:
        assert kv is not None
        assert kv.get_seq_length() == 0
