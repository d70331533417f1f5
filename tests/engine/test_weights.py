"""Other weights for a model that is loaded: the same answers as a model that began with them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import penstock
import penstock_serve
from penstock.errors import ConfigError
from penstock_serve.engine.architecture import share_of
from penstock_serve.engine.checkpoints import (
    RankWeights,
    WeightsNotLoaded,
    check_weights,
    find_model,
    load_weights,
    version_of,
)
from penstock_serve.engine.model import Alone, Decoder
from tests.engine.conftest import KINDS, make_model, telling

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = penstock.parse_config(
    'version = 1\nmodel.name = "m"\nengine = { threads = 1 }\n'
    'cache = { block_tokens = 8, blocks = 24, load_gate = "off" }\n'
    'tiers = [{ name = "host", kind = "memory", blocks = 64 }]\n'
)
PROMPT = [list(range(3, 40))]


def other_of(kind: str, folder: Path) -> Path:
    """A checkpoint of the same architecture with other weights."""
    model = make_model(kind)
    torch.manual_seed(12)
    telling(model).save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    architecture, checkpoint = find_model(str(folder)).open()
    share = share_of(architecture, rank=0, ranks=1)
    weights = RankWeights(
        checkpoint,
        share,
        head_dim=architecture.head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    decoder = Decoder(architecture, weights, Alone(share))
    checkpoint.close()
    return decoder


def tensors_of(decoder: Decoder) -> list[torch.Tensor]:
    return list(decoder.tensors())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_equal_those_of_a_new_model(
    checkpoint_of: Any, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    folder, _ = checkpoint_of(kind)
    other = other_of(kind, tmp_path / "other")
    decoder, fresh = loaded(folder, dtype), loaded(other, dtype)
    places = [tensor.data_ptr() for tensor in tensors_of(decoder)]
    assert any(
        not torch.equal(*pair) for pair in zip(tensors_of(decoder), tensors_of(fresh), strict=True)
    )

    load_weights(decoder, str(other), check_weights(str(other), decoder.architecture))

    assert all(
        torch.equal(*pair) for pair in zip(tensors_of(decoder), tensors_of(fresh), strict=True)
    )
    assert [tensor.data_ptr() for tensor in tensors_of(decoder)] == places


def test_a_loaded_checkpoint_does_not_depend_on_its_files(
    checkpoint_of: Any, tmp_path: Path
) -> None:
    folder, _ = checkpoint_of("llama")
    other = other_of("llama", tmp_path / "other")
    decoder, fresh = loaded(folder), loaded(other)
    load_weights(decoder, str(other), check_weights(str(other), decoder.architecture))
    before = (other / "model.safetensors").read_bytes()

    (other / "model.safetensors").write_bytes(bytes(len(before)))

    kept = [tensor.clone() for tensor in tensors_of(decoder)]
    (other / "model.safetensors").write_bytes(before)
    assert all(torch.equal(*pair) for pair in zip(kept, tensors_of(fresh), strict=True))


def test_a_checkpoint_of_another_model_is_refused(checkpoint_of: Any, tmp_path: Path) -> None:
    folder, _ = checkpoint_of("llama")
    qwen, _ = checkpoint_of("qwen2")
    architecture = loaded(folder).architecture

    with pytest.raises(ConfigError, match=r"path: is '.*', whose family is qwen2, must be llama"):
        check_weights(str(qwen), architecture)
    with pytest.raises(ConfigError, match=r"path: is '.*nowhere'.* must be a folder with a check"):
        check_weights(str(tmp_path / "nowhere"), architecture)
    shutil.copytree(folder, tmp_path / "cut")
    whole = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"path: is .*no whole safetensors file"):
        check_weights(str(tmp_path / "cut"), architecture)


def test_files_that_changed_since_they_were_checked_are_refused(
    checkpoint_of: Any, tmp_path: Path
) -> None:
    folder, _ = checkpoint_of("llama")
    other = other_of("llama", tmp_path / "other")
    decoder = loaded(folder)

    with pytest.raises(WeightsNotLoaded, match="must have 0123: they were changed"):
        load_weights(decoder, str(other), "0123")


def test_a_version_has_the_name_and_the_digest() -> None:
    assert version_of("step-4", "ab") == "step-4@ab"
    assert version_of("", "ab") == "ab"


def test_an_llm_answers_as_one_that_began_with_the_new_weights(
    checkpoint_of: Any, tmp_path: Path
) -> None:
    folder, _ = checkpoint_of("llama")
    other = other_of("llama", tmp_path / "other")
    with penstock_serve.LLM(other, config=CONFIG) as fresh:
        wanted = fresh.generate(PROMPT, max_tokens=12, temperature=0)[0].token_ids
    with penstock_serve.LLM(folder, config=CONFIG) as llm:
        old = llm.generate(PROMPT, max_tokens=12, temperature=0)[0].token_ids

        version = llm.load_weights(other, version="step-2")

        after = llm.generate(PROMPT, max_tokens=12, temperature=0)[0]
        assert (after.token_ids, after.cached_tokens) == (wanted, 0)
        assert version.startswith("step-2@")
        assert llm.generate(PROMPT, max_tokens=12, temperature=0)[0].cached_tokens > 0

        llm.load_weights(folder, version="step-2")

        back = llm.generate(PROMPT, max_tokens=12, temperature=0)[0]
        assert (back.token_ids, back.cached_tokens) == (old, 0)
        assert old != wanted


def test_an_llm_with_mixed_weights_answers_nothing(
    checkpoint_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint_of("llama")
    other = other_of("llama", tmp_path / "other")
    with penstock_serve.LLM(folder, config=CONFIG) as llm:
        with monkeypatch.context() as patched:
            patched.setattr(Decoder, "load", _fail)
            with pytest.raises(penstock.UnavailableError, match="the disk is gone"):
                llm.load_weights(other)
        with pytest.raises(penstock.UnavailableError, match="the engine is without weights"):
            llm.generate(PROMPT)
        llm.resume()
        with pytest.raises(penstock.UnavailableError, match="must be given whole weights first"):
            llm.generate(PROMPT)

        llm.load_weights(other)

        assert llm.generate(PROMPT, max_tokens=4, temperature=0)[0].cached_tokens == 0


def _fail(_decoder: Decoder, _weights: RankWeights) -> None:
    raise OSError("the disk is gone")
