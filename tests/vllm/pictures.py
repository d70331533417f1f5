"""Prompts with pictures in them, for the model of `tiny_seeing.py`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

VOCABULARY = 2048
SPECIAL = [
    *("<unk>", "<s>", "</s>", "<pad>", "<image>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
]
IMAGE = SPECIAL.index("<image>")
SIDE, PATCH, SCALE = 128, 16, 2
FEATURES = (SIDE // PATCH // SCALE) ** 2
IMAGE_LENGTH = FEATURES + 3
"""vLLM puts so many tokens in the place of the one: the features, and what tells of them."""


def pictured(act: dict[str, Any]) -> list[Any]:
    """For each row of `pictures` a prompt: text of `lengths[0]` tokens, then a picture and text
    of the next length, and so on. Which picture it is, its number says."""
    return [
        {
            "prompt_token_ids": _tokens(act["lengths"][: len(row) + 1], act.get("seed", 3)),
            "multi_modal_data": {"image": [_picture(number) for number in row]},
        }
        for row in act["pictures"]
    ]


def _tokens(lengths: list[int], seed: int) -> list[int]:
    draw = random.Random(seed)
    tokens: list[int] = []
    for number, length in enumerate(lengths):
        tokens += [IMAGE] if number else []
        tokens += [draw.randrange(len(SPECIAL), VOCABULARY) for _ in range(length)]
    return tokens


def _picture(number: int) -> Any:
    from PIL import Image  # noqa: PLC0415 - only vLLM's environment has it

    draw = np.random.default_rng(number)
    return Image.fromarray(draw.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))
