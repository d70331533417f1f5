"""The version of a model's weights: equal for equal weights, and for nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.connectors.transformers.weights import weight_marks, weights_version
from tests.connectors.transformers.conftest import CONFIGS, new_model

if TYPE_CHECKING:
    from pathlib import Path


def test_a_model_that_was_saved_and_read_again_has_one_version(tmp_path: Path) -> None:
    new_model(CONFIGS["Llama"]).save_pretrained(tmp_path)
    read = [AutoModelForCausalLM.from_pretrained(tmp_path) for _ in range(2)]

    first, second = (weights_version(model, "") for model in read)

    assert first == second != ""
    assert weights_version(read[0], "by hand").startswith("by hand@")
    assert weights_version(new_model(CONFIGS["Llama"]), "") == ""


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_type_are_other_weights(tmp_path: Path, kind: torch.dtype) -> None:
    new_model(CONFIGS["Llama"]).save_pretrained(tmp_path)

    read = [AutoModelForCausalLM.from_pretrained(tmp_path, dtype=each) for each in (None, kind)]

    assert weights_version(read[0], "") != weights_version(read[1], "")


def test_trained_or_merged_weights_and_another_configuration_have_other_versions() -> None:
    model = new_model(CONFIGS["Llama"])
    before = weights_version(model, "v1")
    marks = weight_marks(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(1e-3)
    trained = weights_version(model, "v1")
    model.config.rope_parameters["rope_theta"] = 2e4

    assert len({before, trained, weights_version(model, "v1")}) == 3
    assert weight_marks(model) != marks


def test_tensors_of_all_kinds_can_be_sampled() -> None:
    model = new_model(CONFIGS["Llama"])
    for number, kind in enumerate((torch.float8_e4m3fn, torch.int8, torch.bool, torch.uint8)):
        model.register_buffer(f"buffer_{number}", torch.ones((3, 5)).to(kind).t())
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("nothing", torch.zeros((0, 2)))
    model.register_buffer("elsewhere", torch.zeros((2, 2), device="meta"))
    first = weights_version(model, "v1")

    model.count += 1

    assert weights_version(model, "v1") != first
