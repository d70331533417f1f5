"""Keys from vLLM's own request objects, with images in them; `test_seeing.py` runs a model."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.connectors.base.keys import KeyChains, RequestKeys, read_options

# What vLLM's own imports warn of is not ours.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK = 32
TOKENS = list(range(100, 100 + 5 * BLOCK))
IMAGE_AT = 2 * BLOCK + 3


def request_with(name: str, *identifiers: str, **other: Any) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415

    from vllm import SamplingParams  # noqa: PLC0415

    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=IMAGE_AT + 20 * number, length=16),
        )
        for number, identifier in enumerate(identifiers)
    ]
    return Request(
        request_id=name,
        prompt_token_ids=None if "prompt_embeds" in other else TOKENS,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        **other,
    )


def keys_of(request: Any) -> list[bytes]:
    config = penstock.parse_config(
        f"""
        version = 1
        model.name = "seeing"
        cache.block_tokens = {BLOCK}
        tiers = [{{ name = "host", kind = "memory", blocks = 8 }}]
        """
    )
    return list(RequestKeys(KeyChains(config), request).upto(5))


def test_the_same_image_gives_the_same_keys() -> None:
    assert keys_of(request_with("one", "a")) == keys_of(request_with("two", "a"))


def test_another_image_gives_other_keys_from_its_block_on() -> None:
    one, other = keys_of(request_with("one", "a")), keys_of(request_with("two", "b"))

    assert one[:2] == other[:2]
    assert not {*one[2:]} & {*other[2:]}


def test_a_second_image_or_none_gives_other_keys() -> None:
    alone = keys_of(request_with("one", "a"))
    both = keys_of(request_with("two", "a", "b"))
    without = keys_of(request_with("three"))

    assert len({alone[2], both[2], without[2]}) == 3


def test_prompt_embeddings_stay_out() -> None:
    import torch  # noqa: PLC0415

    options = read_options(request_with("one", prompt_embeds=torch.zeros(40, 8)))

    assert not options.load
    assert not options.save
