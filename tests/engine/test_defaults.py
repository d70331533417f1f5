"""What a request gets that says nothing about how its tokens are chosen."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import ConfigError
from penstock_serve.engine.checkpoints import DEFAULT_NAME, ModelFiles
from penstock_serve.engine.defaults import GREEDY, defaults_of
from penstock_serve.engine.sampling_options import Sampling

if TYPE_CHECKING:
    from pathlib import Path


def defaults(folder: Path, given: Any) -> Sampling:
    (folder / "generation_config.json").write_text(json.dumps(given))
    return defaults_of(ModelFiles(folder, "model"))


def test_the_default_model_is_calm_and_a_model_that_says_nothing_is_openai_s(
    tmp_path: Path,
) -> None:
    assert defaults_of(ModelFiles(tmp_path / "model.gguf", DEFAULT_NAME)) == GREEDY
    assert defaults_of(ModelFiles(tmp_path, "model")) == Sampling(temperature=1.0, top_p=1.0)
    assert GREEDY.temperature == 0


def test_a_model_s_own_file_says_how(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2, "min_p": None}

    assert defaults(tmp_path, given) == Sampling(temperature=0.6, top_p=0.95, top_k=20)
    assert defaults(tmp_path, {**given, "do_sample": False}).temperature == 0
    assert defaults(tmp_path, {"repetition_penalty": 1.1}).repetition_penalty == 1.1


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ([], "no JSON object"),
        ({"temperature": "hot"}, "has temperature 'hot' in generation_config.json"),
        ({"temperature": 9}, "temperature is 9, must be from 0 to 2"),
        ({"top_k": 1.5}, "has top_k 1.5 in generation_config.json, must be a whole number"),
        ({"top_p": True}, "has top_p True"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, given: Any, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        defaults(tmp_path, given)
