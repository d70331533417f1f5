"""A small model with random weights that takes images: a vision transformer before a Llama.

Idefics3, because vLLM reads it without torchvision, which has no build for this environment. The
tokenizer is a list of words, one for each token; nothing is downloaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pictures import FEATURES, IMAGE, PATCH, SCALE, SIDE, SPECIAL, VOCABULARY
from tiny_llama import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

if TYPE_CHECKING:
    from pathlib import Path

PAD = SPECIAL.index("<pad>")


def make_seeing(folder: Path) -> None:
    """Writes the model, its tokenizer and its image processor to a folder."""
    edge = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    words = _tokenizer()
    Idefics3Processor(
        image_processor=images, tokenizer=words, image_seq_len=FEATURES
    ).save_pretrained(folder)
    config = Idefics3Config(
        vision_config=Idefics3VisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=256,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            pad_token_id=PAD,
        ),
        image_token_id=IMAGE,
        scale_factor=SCALE,
        pad_token_id=PAD,
    )
    torch.manual_seed(7)
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 1.0 if "lm_head" in name or "embed_tokens" in name else 0.08)
    model.to(torch.float32).save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), VOCABULARY))]
    numbered = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
