"""Model files that are damaged, cut off or made to do harm: each is refused in one line."""

from __future__ import annotations

import json
import shutil
import struct
from random import Random
from typing import TYPE_CHECKING, Any

import gguf
import pytest

from penstock.errors import ConfigError
from penstock_serve.engine.checkpoints import ModelFiles, find_model
from tests.engine.gguf_writing import Manner, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

UINT32, INT32 = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.INT32
FLOAT32, STRING = gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(checkpoint_of: Any, tmp_path: Path) -> Path:
    """A checkpoint that may be spoiled."""
    whole, _ = checkpoint_of("llama")
    return shutil.copytree(whole, tmp_path / "model")


@pytest.fixture
def file(checkpoint_of: Any, tmp_path: Path) -> Path:
    """The same in one GGUF file."""
    _, model = checkpoint_of("llama")
    write_gguf(tmp_path / "model.gguf", model)
    return tmp_path / "model.gguf"


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        find_model(str(path)).open()
    message = str(refused.value)
    assert "\n" not in message
    return message


def refusal_if_any(path: Path) -> str:
    try:
        _, checkpoint = find_model(str(path)).open()
    except ConfigError as refused:
        return str(refused)
    checkpoint.close()
    return ""


def change(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# Configurations.

WRONG_NUMBERS: list[object] = [
    2.5,
    -5,
    0,
    10**9 * 10,
    "3",
    True,
    [3],
    {"a": 1},
    float("nan"),
    1e300,
]


@pytest.mark.parametrize("value", WRONG_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "name",
    [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_size_that_is_none_is_refused_by_its_name(folder: Path, name: str, value: object) -> None:
    change(folder, **{name: value})

    message = refusal(folder)

    assert message.startswith(f"config.json: {name}: is ")
    assert ", must be a whole number from 1 to " in message


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"num_hidden_layers": 4}, "model: has no tensor 'model.layers.3."),
        ({"hidden_size": 64}, "tensor model.embed_tokens.weight: has shape [211, 48], must have"),
        ({"vocab_size": 210}, "tensor model.embed_tokens.weight: has shape [211, 48], must have"),
        ({"intermediate_size": 75}, "tensor model.layers.0.mlp.gate_proj.weight: has shape [74, "),
        ({"head_dim": 15}, "config.json: head_dim: is 15, must be even"),
        ({"head_dim": 32}, "tensor model.layers.0.self_attn.q_proj.weight: has shape"),
        ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps: is NaN, must be a number"),
        ({"rms_norm_eps": float("inf")}, "config.json: rms_norm_eps: is Infinity, must be"),
        ({"rms_norm_eps": "1e-6"}, "config.json: rms_norm_eps: is '1e-6', must be a number"),
        ({"rope_theta": -1}, "config.json: rope_theta: is -1, must be a number above 0"),
        ({"rope_theta": 10**400}, "config.json: rope_theta: is a number of 1329 bits"),
        (
            {"rope_parameters": {"rope_theta": []}, "rope_theta": None},
            "config.json: rope_theta: is",
        ),
        ({"rope_parameters": 5}, "config.json: rope_parameters: is 5, must be an object"),
        ({"rope_parameters": None, "rope_scaling": "x"}, "config.json: rope_scaling: is 'x', must"),
        ({"rope_parameters": {"rope_type": []}}, ""),
        ({"rope_parameters": {"rope_type": ["llama3"]}}, "config.json: rope_parameters: rope_type"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "config.json: rope_parameters: low_freq_factor: is missing",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "config.json: rope_parameters: high_freq_factor: is 4.0, must be a number above 4",
        ),
        ({"model_type": ["llama"]}, 'config.json: model_type: is ["llama"], must be one of'),
        ({"model_type": None}, "config.json: model_type: is null, must be one of"),
        ({"layer_types": [[]]}, "config.json: layer_types: is [[]], must have"),
        ({"layer_types": 5}, "config.json: layer_types: is 5, must have"),
        ({"tie_word_embeddings": "no"}, "config.json: tie_word_embeddings: is 'no', must be true"),
        ({"eos_token_id": "</s>"}, "config.json: eos_token_id: is '</s>', must be a token id"),
        ({"eos_token_id": [1, [2]]}, "config.json: eos_token_id: is [1, [2]], must be"),
        ({"eos_token_id": -1}, "config.json: eos_token_id: is -1, must be"),
        ({"eos_token_id": 2.0}, "config.json: eos_token_id: is 2.0, must be"),
        ({"num_attention_heads": 7}, "config.json: num_attention_heads: is 7, must be a multiple"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_by_its_name(
    folder: Path, fields: dict[str, Any], reported: str
) -> None:
    change(folder, **fields)

    if not reported:
        find_model(str(folder)).open()[1].close()
        return
    assert refusal(folder).startswith(reported)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"null", b"[" * 100_000, b'{"a":' * 100_000, b'"llama"', b"{} {}"],
    ids=lambda content: repr(content[:9]),
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_json_file_that_is_none_is_refused_by_its_name(
    folder: Path, name: str, content: bytes
) -> None:
    (folder / name).write_bytes(content)

    assert refusal(folder).startswith(f"{name}: is ")


def test_a_config_that_is_a_folder_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()

    assert refusal(folder) == f"model: is {folder}, must be a folder with a config.json"


# Safetensors.


def test_a_download_that_was_cut_off_is_refused_wherever_it_ends(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    ends = [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]

    for end in ends:
        (folder / WEIGHTS).write_bytes(whole[:end])

        message = refusal(folder)

        assert message.startswith(f"{WEIGHTS}: ")
        assert "cut off" in message or "cannot be read" in message


def test_a_header_with_any_byte_changed_is_read_as_it_was_or_refused(folder: Path) -> None:
    whole = bytearray((folder / WEIGHTS).read_bytes())
    (length,) = struct.unpack("<Q", whole[:8])
    random = Random(7)

    for _ in range(150):
        at = random.choice([random.randrange(8), random.randrange(8, 8 + length)])
        changed = bytearray(whole)
        changed[at] ^= 1 << random.randrange(8)
        (folder / WEIGHTS).write_bytes(changed)

        assert "\n" not in refusal_if_any(folder)


def test_tensors_of_whole_numbers_are_refused(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))

    assert "has elements of I32, must have them of one of BF16, F16, F32, F64" in refusal(folder)


@pytest.mark.parametrize(
    ("weight_map", "reported"),
    [
        (None, "weight_map: is missing"),
        ({}, "weight_map: is missing"),
        ([], "weight_map: is [], must be an object"),
        ({"a": 5}, "weight_map: a: is 5, must be the name of a .safetensors file in the folder"),
        ({"a": "../model.safetensors"}, "weight_map: a: is '../model.safetensors', must be"),
        ({"a": "/etc/passwd"}, "weight_map: a: is '/etc/passwd', must be the name of"),
        ({"a": "sub/model.safetensors"}, "weight_map: a: is 'sub/model.safetensors', must be"),
        ({"a": "\0.safetensors"}, "weight_map: a: is "),
        ({"a": "gone.safetensors"}, "weight_map: names 'gone.safetensors', must name files that"),
    ],
)
def test_an_index_names_files_of_its_own_folder_alone(
    folder: Path, weight_map: object, reported: str
) -> None:
    shutil.copy(folder / WEIGHTS, folder.parent / WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    assert refusal(folder).startswith(f"{INDEX}: {reported}")


def test_all_files_that_an_index_names_are_in_the_version_of_the_weights(folder: Path) -> None:
    shutil.move(folder / WEIGHTS, folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    first = ModelFiles(folder, "m").weights_version()

    damaged = bytearray((folder / "a.safetensors").read_bytes())
    damaged[-1] ^= 1
    (folder / "a.safetensors").write_bytes(damaged)

    assert ModelFiles(folder, "m").weights_version() != first


# GGUF.


def test_a_gguf_file_that_was_cut_off_is_refused_wherever_it_ends(file: Path) -> None:
    whole = file.read_bytes()
    random = Random(5)
    ends = [
        0,
        1,
        4,
        8,
        16,
        24,
        30,
        *(random.randrange(len(whole)) for _ in range(40)),
        len(whole) - 1,
    ]

    for end in ends:
        file.write_bytes(whole[:end])

        assert refusal(file).startswith("model.gguf: ")


def test_a_gguf_header_with_any_byte_changed_is_read_or_refused(file: Path) -> None:
    whole = file.read_bytes()
    random = Random(6)

    for _ in range(150):
        changed = bytearray(whole)
        changed[random.randrange(3_000)] ^= 1 << random.randrange(8)
        file.write_bytes(changed)

        assert "\n" not in refusal_if_any(file)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("llama.block_count", 2**31, UINT32),
        ("llama.block_count", 0, UINT32),
        ("llama.block_count", -1, INT32),
        ("llama.block_count", 2.5, FLOAT32),
        ("llama.block_count", "3", STRING),
        ("llama.attention.head_count", 0, UINT32),
        ("llama.attention.head_count_kv", 0, UINT32),
        ("llama.attention.key_length", 2**30, UINT32),
        ("llama.embedding_length", 0, UINT32),
        ("llama.feed_forward_length", "wide", STRING),
        ("llama.context_length", -5, INT32),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), FLOAT32),
        ("llama.rope.freq_base", float("inf"), FLOAT32),
        ("tokenizer.ggml.eos_token_id", -1, INT32),
    ],
)
def test_a_gguf_field_that_makes_no_sense_is_refused_by_its_name(
    checkpoint_of: Any, tmp_path: Path, name: str, value: Any, kind: Any
) -> None:
    _, model = checkpoint_of("llama")
    path = tmp_path / "odd.gguf"
    write_gguf(path, model, Manner(fields={name: (value, kind)}))

    message = refusal(path)

    assert message.startswith(f"odd.gguf: {name}: is ")
    assert ", must be " in message


def test_a_gguf_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    assert refusal(tmp_path / "bare.gguf").startswith("model: is a GGUF file without a tensor")
