"""A GGUF file and a safetensors folder of one model give the same logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch

from penstock.errors import ConfigError
from penstock_serve.engine.architecture import read_architecture, share_of
from penstock_serve.engine.batch import TokenSpan, on_device
from penstock_serve.engine.checkpoints import RankWeights, SafetensorsCheckpoint, find_model
from penstock_serve.engine.gguf_file import GgufFile
from penstock_serve.engine.model import Alone, Decoder
from tests.engine.gguf_writing import Manner, write_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CPU = torch.device("cpu")
BLOCK = 8


def logits_of(
    architecture: Any, checkpoint: Any, tokens: Sequence[int] = range(5, 30)
) -> torch.Tensor:
    """What comes after each of these tokens, whose KV lies in blocks in no order."""
    share = share_of(architecture, rank=0, ranks=1)
    weights = RankWeights(
        checkpoint, share, head_dim=architecture.head_dim, dtype=torch.float32, device=CPU
    )
    decoder = Decoder(architecture, weights, Alone(share))
    blocks = -(-len(tokens) // BLOCK)
    shape = (2, blocks, BLOCK, architecture.kv_heads, architecture.head_dim)
    kv = [torch.zeros(shape) for _ in range(architecture.layers)]
    table = [*range(1, blocks, 2), *range(0, blocks, 2)]
    batch = on_device([TokenSpan(0, 0, list(tokens), table)], block_tokens=BLOCK, device=CPU)
    logits = decoder.forward(replace(batch, outputs=torch.arange(len(tokens))), kv)
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
    assert architecture.tied is (kind == "llama-tied")
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
    write_gguf(tmp_path / "other.gguf", model, Manner(family="gemma"))

    with pytest.raises(ConfigError, match="family 'gemma', must be 'llama'"):
        GgufFile(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("manner", "reported"),
    [
        (Manner(tensors=("rope_freqs.weight",)), "a tensor 'rope_freqs.weight', which this engine"),
        (Manner(tensors=("blk.1.attn_q.bias",)), r"a tensor 'blk\.1\.attn_q\.bias', which"),
        (Manner(tensors=("blk.3.ffn_up.weight",)), r"a tensor 'blk\.3\.ffn_up\.weight', which"),
        (
            Manner(fields={"llama.rope.scaling.type": ("linear", gguf.GGUFValueType.STRING)}),
            r"llama\.rope\.scaling\.type is 'linear', must be 'none'",
        ),
        (
            Manner(fields={"llama.rope.dimension_count": (8, gguf.GGUFValueType.UINT32)}),
            r"llama\.rope\.dimension_count is 8, must be 16",
        ),
    ],
)
def test_what_a_file_needs_and_is_not_done_is_refused(
    checkpoint_of: Any, tmp_path: Path, manner: Manner, reported: str
) -> None:
    _, model = checkpoint_of("llama")
    write_gguf(tmp_path / "other.gguf", model, manner)

    with pytest.raises(ConfigError, match=reported):
        GgufFile(tmp_path / "other.gguf")


def test_a_tensor_that_is_missing_is_named(checkpoint_of: Any, tmp_path: Path) -> None:
    _, model = checkpoint_of("llama")
    write_gguf(tmp_path / "small.gguf", model)

    with pytest.raises(ConfigError, match=r"without a tensor for 'model\.layers\.9\.mlp"):
        GgufFile(tmp_path / "small.gguf").rows("model.layers.9.mlp.up_proj.weight")
