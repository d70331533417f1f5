"""Finding a model, and telling its weights from others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.config import EngineTable, parse_config
from penstock.errors import ConfigError, UnavailableError
from penstock_serve.engine.architecture import architecture_from_config, read_architecture
from penstock_serve.engine.checkpoints import find_model
from penstock_serve.engine.spec import InstanceSpec
from penstock_serve.engine.worker import load_rank

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 100,
    "vocab_size": 100,
}


@pytest.fixture
def copied(checkpoint_of: Any, tmp_path: Path) -> Path:
    folder, _ = checkpoint_of("llama")
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def changed(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_equal_files_have_one_version_wherever_they_lie(checkpoint_of: Any, copied: Path) -> None:
    folder, _ = checkpoint_of("llama")

    assert find_model(str(copied)).weights_version() == find_model(str(folder)).weights_version()


@pytest.mark.parametrize("at", [0, 5000, -1])
def test_other_weights_have_another_version(copied: Path, at: int) -> None:
    before = find_model(str(copied)).weights_version()

    changed(copied / "model.safetensors", at)

    assert find_model(str(copied)).weights_version() != before


def test_a_later_life_does_not_read_other_weights_under_the_same_name(copied: Path) -> None:
    spec = InstanceSpec(
        name="one",
        engine=EngineTable(model=str(copied)),
        digest=find_model(str(copied)).weights_version(),
        config=parse_config(
            'version = 1\nmodel.name = "m"\ncache = { blocks = 4, block_tokens = 4 }\n'
        ),
        server="",
    )
    load_rank(spec)
    # Of a norm: the model loads as before, and computes something else.
    changed(copied / "model.safetensors", -1)

    with pytest.raises(UnavailableError, match="have changed since the server started"):
        load_rank(spec)


def test_another_config_is_another_version(copied: Path) -> None:
    before = find_model(str(copied)).weights_version()
    config = copied / "config.json"

    config.write_text(config.read_text().replace("10000", "20000"))

    assert find_model(str(copied)).weights_version() != before


def test_large_files_are_sampled_all_over(tmp_path: Path) -> None:
    file = tmp_path / "large.gguf"
    file.write_bytes(bytes(33 << 20))
    before = find_model(str(file)).weights_version()

    changed(file, 100 * (256 << 10) + 7)

    assert find_model(str(file)).weights_version() != before


@pytest.mark.parametrize("tensor", ["large.weight", "norm.weight", "last.bias"])
def test_weights_of_which_one_tensor_was_trained_have_another_version(
    copied: Path, tensor: str
) -> None:
    file = copied / "model.safetensors"
    tensors = {
        "large.weight": torch.zeros(9 << 20),
        "norm.weight": torch.zeros(64),
        "last.bias": torch.zeros(100),
    }
    save_file(tensors, file)
    before = find_model(str(copied)).weights_version()

    save_file({**tensors, tensor: torch.ones_like(tensors[tensor])}, file)

    assert find_model(str(copied)).weights_version() != before


@pytest.mark.parametrize(
    "header", [b"[]", b'{"x": 1}', b'{"x": {"data_offsets": [0, 99999999999]}}', b"\xff" * 9]
)
def test_a_large_file_with_a_damaged_header_has_a_version_all_the_same(
    copied: Path, header: bytes
) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(33 << 20))
    before = find_model(str(copied)).weights_version()

    changed(file, 100 * (256 << 10) + 7)

    assert find_model(str(copied)).weights_version() != before


@pytest.mark.parametrize("name", ["missing", "model.bin"])
def test_what_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a folder with a checkpoint, or a \.gguf file"):
        find_model(str(tmp_path / name))


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"model_type": "mamba"}, "model_type: is 'mamba', must be one of llama"),
        ({"hidden_act": "gelu"}, "hidden_act: is 'gelu', must be 'silu'"),
        ({"mlp_bias": True}, "mlp_bias: is true"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: is"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window: is 8"),
        ({"attention_bias": True}, "attention_bias: is true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: is 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor: is 0.25",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: is"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: rope_type: is 'yarn'"),
        ({"num_key_value_heads": 3}, "num_attention_heads: is 4, must be a multiple"),
        ({"vocab_size": None}, "vocab_size: is missing"),
    ],
)
def test_what_the_engine_would_compute_wrongly_is_refused(
    change: dict[str, Any], reported: str
) -> None:
    config = {name: value for name, value in {**CONFIG, **change}.items() if value is not None}

    with pytest.raises(ConfigError) as refused:
        architecture_from_config(config)

    assert str(refused.value).startswith(f"config.json: {reported}")


def test_the_tokens_that_end_an_answer_are_those_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')

    assert read_architecture(tmp_path).stop_tokens == (7, 9)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_config_that_is_no_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)

    with pytest.raises(ConfigError, match=r"^config\.json: is .*JSON"):
        read_architecture(tmp_path)
