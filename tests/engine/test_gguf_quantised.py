"""A GGUF file like that of the default model: quantised, tied, with a rotary base of its own.

Every number here is checked against somebody else's: the bytes of a block against the format as
it is specified and against the `gguf` package, logits against `transformers`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock_serve.engine.checkpoints import find_model
from penstock_serve.engine.gguf_file import GgufFile
from tests.engine.conftest import telling
from tests.engine.gguf_writing import USUAL, Manner, as_they_are, stored_name, write_gguf
from tests.engine.test_gguf_file import logits_of

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, Any]

F32 = gguf.GGMLQuantizationType.F32
Q4_1 = gguf.GGMLQuantizationType.Q4_1
Q8_0 = gguf.GGMLQuantizationType.Q8_0
# float32 on other kernels: sums in another order.
BOUND = 2e-4
BLOCK = 32
HALF_ROUNDED = 2.0**-11
"""How far off a number in float16 is at most, as a share of it."""


def kind_in_the_default_model(name: str) -> Any:
    """Its 210 matrices in layers are Q4_1, its embedding is Q8_0, its 61 norms are F32."""
    if "norm" in name:
        return F32
    return Q8_0 if name == "token_embd.weight" else Q4_1


QUANTISED = Manner(kind_of=kind_in_the_default_model)


@pytest.fixture(scope="module")
def model() -> Any:
    """Rows of whole blocks, three query heads a KV head, and the default model's rotary base."""
    config = LlamaConfig(
        vocab_size=224,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(12)
    return telling(LlamaForCausalLM(config))


def expanded(packed: Array, kind: Any) -> Array:
    """The numbers of quantised rows, as the format says: written down once more, not imported."""
    if kind == Q8_0:
        # A scale in float16, then 32 signed bytes.
        blocks = packed.reshape(len(packed), -1, 2 + BLOCK)
        scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        values = blocks[..., 2:].view(np.int8) * scale
    else:
        # A scale and the least number in float16, then 16 bytes: low halves come first.
        assert kind == Q4_1
        blocks = packed.reshape(len(packed), -1, 4 + BLOCK // 2)
        scale, least = (
            blocks[..., at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2)
        )
        codes = np.concatenate((blocks[..., 4:] & 15, blocks[..., 4:] >> 4), axis=-1)
        values = codes * scale + least
    return values.reshape(len(packed), -1)


def furthest_off(values: Array, kind: Any) -> Array:
    """How far rounding may take each number: half a step, and scales are in float16."""
    blocks = values.reshape(len(values), -1, BLOCK)
    if kind == Q8_0:
        step = np.abs(blocks).max(-1) / 127
        off = step / 2 + 127 * step * HALF_ROUNDED
    else:
        step = (blocks.max(-1) - blocks.min(-1)) / 15
        off = step / 2 + (15 * step + np.abs(blocks.min(-1))) * HALF_ROUNDED
    # A last digit of float32 for the sums themselves.
    return np.repeat(off, BLOCK, axis=-1).reshape(values.shape) + 1e-6


def as_stored(model: Any) -> Any:
    """A copy with the numbers that are left of its weights after quantisation."""
    left = deepcopy(model)
    for name, weight in left.named_parameters():
        kind = kind_in_the_default_model(stored_name(name))
        if kind != F32:
            numbers = expanded(gguf.quantize(weight.detach().numpy(), kind), kind)
            weight.data.copy_(torch.from_numpy(numbers))
    return left


def furthest_logit(path: Path, reference: Any) -> float:
    """Our logits after every token of a prompt, beside those of transformers."""
    tokens = torch.randint(0, 224, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    return float((logits_of(*find_model(str(path)).open(), tokens) - expected).abs().max())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", Q8_0),
        ("model.layers.1.self_attn.q_proj.weight", Q4_1),
        ("model.layers.1.self_attn.k_proj.weight", Q4_1),
        ("model.layers.2.mlp.down_proj.weight", Q4_1),
    ],
)
def test_quantised_numbers_are_those_that_were_written(
    model: Any, tmp_path: Path, name: str, kind: Any
) -> None:
    original = model.state_dict()[name].numpy()
    packed = gguf.quantize(original, kind)
    write_gguf(tmp_path / "small.gguf", model, QUANTISED)

    read = GgufFile(tmp_path / "small.gguf").rows(name).numpy()

    np.testing.assert_array_equal(read, gguf.dequantize(packed, kind))
    np.testing.assert_array_equal(read, expanded(packed, kind))
    off = np.abs(read - original)
    assert (off <= furthest_off(original, kind)).all()
    assert off.max() > 0


def test_a_rank_reads_its_part_of_quantised_tensors(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", model, QUANTISED)
    file = GgufFile(tmp_path / "small.gguf")
    keys, down = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"
    left = as_stored(model).state_dict()

    # Neither begins at a block of the format.
    second_head, columns = file.rows(keys, range(16, 32)), file.columns(down, range(80, 160))

    torch.testing.assert_close(second_head, left[keys][16:], atol=0, rtol=0)
    torch.testing.assert_close(columns, left[down][:, 80:], atol=0, rtol=0)


def test_a_file_gives_the_logits_of_the_model_it_was_made_from(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", model)

    assert furthest_logit(tmp_path / "small.gguf", model) < BOUND


def test_a_quantised_file_gives_the_logits_of_what_is_left_of_the_model(
    model: Any, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "small.gguf", model, QUANTISED)

    assert furthest_logit(tmp_path / "small.gguf", as_stored(model)) < BOUND
    # What quantisation took is far outside the bound, so it would not hide a wrong number.
    assert furthest_logit(tmp_path / "small.gguf", model) > 1000 * BOUND


@pytest.mark.parametrize(
    "manner",
    [Manner(order=as_they_are), Manner(rope_theta=10000.0)],
    ids=["rows in another order", "another rotary base"],
)
def test_what_is_read_a_little_differently_is_far_off(
    model: Any, tmp_path: Path, manner: Manner
) -> None:
    write_gguf(tmp_path / "small.gguf", model, manner)

    assert furthest_logit(tmp_path / "small.gguf", model) > 1000 * BOUND


def test_an_embedding_that_is_tied_is_used_twice(model: Any, tmp_path: Path) -> None:
    apart = deepcopy(model)
    apart.config.tie_word_embeddings = False
    apart.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
    for name, each in (("tied", model), ("apart", apart)):
        write_gguf(tmp_path / f"{name}.gguf", each, USUAL)

    assert GgufFile(tmp_path / "tied.gguf").architecture.tied
    assert not GgufFile(tmp_path / "apart.gguf").architecture.tied
    assert furthest_logit(tmp_path / "apart.gguf", apart) < BOUND
