"""A GGUF file and a safetensors folder of one model give the same logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch

from penstock.engine.architecture import read_architecture
from penstock.engine.batch import Span, on_device
from penstock.engine.checkpoints import find_model
from penstock.engine.gguf_file import GgufFile
from penstock.engine.model import Decoder
from penstock.engine.ranks import Alone
from penstock.engine.sharding import share_of
from penstock.engine.weights import RankWeights, SafetensorsCheckpoint
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
CPU = torch.device("cpu")


def pairs_together(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The order in which llama.cpp keeps the rows of a head: rotary pairs side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, family: str = "llama", **more: Any) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    for name, value in more.get("fields", {}).items():
        writer.add_key_value(name, *value)
    for name in more.get("tensors", ()):
        writer.add_tensor(name, np.ones(8, dtype=np.float32))
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if ".q_proj." in name:
            values = pairs_together(values, config.num_attention_heads)
        elif ".k_proj." in name:
            values = pairs_together(values, config.num_key_value_heads)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)  # noqa: PLW2901 - one name, step by step
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(architecture: Any, checkpoint: Any) -> torch.Tensor:
    share = share_of(architecture, rank=0, ranks=1)
    weights = RankWeights(
        checkpoint, share, head_dim=architecture.head_dim, dtype=torch.float32, device=CPU
    )
    decoder = Decoder(architecture, weights, Alone(share))
    shape = (2, 4, 8, architecture.kv_heads, architecture.head_dim)
    kv = [torch.zeros(shape) for _ in range(architecture.layers)]
    span = Span(0, 0, list(range(5, 30)), [3, 0, 2, 1])
    logits = decoder.forward(on_device([span], block_tokens=8, device=CPU), kv)
    assert logits is not None
    return logits


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_a_gguf_file_computes_what_its_checkpoint_does(
    checkpoint_of: Any, tmp_path: Path, kind: str
) -> None:
    folder, model = checkpoint_of(kind)
    path = tmp_path / "small.gguf"
    write_gguf(path, model)

    architecture, file = find_model(str(path)).open()
    read = read_architecture(folder)

    assert architecture.stop_tokens == (2,)
    assert (architecture.heads, architecture.kv_heads, architecture.vocabulary) == (
        read.heads,
        read.kv_heads,
        read.vocabulary,
    )
    expected = logits_of(read, SafetensorsCheckpoint(folder))
    torch.testing.assert_close(logits_of(architecture, file), expected, atol=1e-5, rtol=0)


def test_ranges_of_a_tensor_are_parts_of_the_whole(checkpoint_of: Any, tmp_path: Path) -> None:
    _, model = checkpoint_of("llama")
    write_gguf(tmp_path / "small.gguf", model)
    file = GgufFile(tmp_path / "small.gguf")
    name = "model.layers.1.self_attn.q_proj.weight"

    whole = file.rows(name)

    torch.testing.assert_close(whole, model.state_dict()[name])
    torch.testing.assert_close(file.rows(name, range(16, 48)), whole[16:48])
    torch.testing.assert_close(file.columns(name, range(3, 9)), whole[:, 3:9])


def test_a_file_of_another_family_is_refused(checkpoint_of: Any, tmp_path: Path) -> None:
    _, model = checkpoint_of("llama")
    write_gguf(tmp_path / "other.gguf", model, family="gemma")

    with pytest.raises(ConfigError, match="family 'gemma', must be 'llama'"):
        GgufFile(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tensors": ["rope_freqs.weight"]}, "a tensor 'rope_freqs.weight', which this engine"),
        ({"tensors": ["blk.1.attn_q.bias"]}, r"a tensor 'blk\.1\.attn_q\.bias', which"),
        ({"tensors": ["blk.3.ffn_up.weight"]}, r"a tensor 'blk\.3\.ffn_up\.weight', which"),
        (
            {"fields": {"llama.rope.scaling.type": ("linear", gguf.GGUFValueType.STRING)}},
            r"llama\.rope\.scaling\.type is 'linear', must be 'none'",
        ),
        (
            {"fields": {"llama.rope.dimension_count": (8, gguf.GGUFValueType.UINT32)}},
            r"llama\.rope\.dimension_count is 8, must be 16",
        ),
    ],
)
def test_what_a_file_needs_and_is_not_done_is_refused(
    checkpoint_of: Any, tmp_path: Path, more: dict[str, Any], told: str
) -> None:
    _, model = checkpoint_of("llama")
    write_gguf(tmp_path / "other.gguf", model, **more)

    with pytest.raises(ConfigError, match=told):
        GgufFile(tmp_path / "other.gguf")


def test_a_tensor_that_is_missing_is_named(checkpoint_of: Any, tmp_path: Path) -> None:
    _, model = checkpoint_of("llama")
    write_gguf(tmp_path / "small.gguf", model)

    with pytest.raises(ConfigError, match=r"without a tensor for 'model\.layers\.9\.mlp"):
        GgufFile(tmp_path / "small.gguf").rows("model.layers.9.mlp.up_proj.weight")
