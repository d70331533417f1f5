"""Whatever is wrong with the cache or the model, `Llama` answers, and one line says why."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("llama_cpp", reason="no llama-cpp-python: `make test-long` compiles it")

import llama_cpp
from llama_cpp.llama_chat_format import Llava15ChatHandler

import penstock
from penstock.connectors.llama_cpp import cache as connector
from tests.connectors.llama_cpp.tiny_models import (
    answer,
    config_in,
    load,
    prompt_of,
    with_cache,
    write_model,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llama_cpp import Llama

pytestmark = pytest.mark.long

PROMPT = prompt_of(60)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def off(llm: Llama) -> str:
    """The one line that says why prompts are computed without the cache."""
    (line,) = llm.cache.report().unused
    assert line in str(llm.cache.report())
    return str(line)


def found_by(llm: Llama) -> int:
    """How many tokens of the prompt a cache finds for a model that has nothing in memory."""
    answer(llm, PROMPT)
    return int(llm.cache.report().tokens_cached)


@pytest.mark.parametrize(
    ("family", "what"), [("cohere2", "sliding windows"), ("mamba", "recurrent layers")]
)
def test_a_model_whose_state_is_not_restored_whole_is_refused_by_name(
    tmp_path: Path, family: str, what: str
) -> None:
    llm = with_cache(write_model(tmp_path / "m.gguf", family), config_in(tmp_path / "disk"))

    assert answer(llm, PROMPT).text == answer(load(tmp_path / "m.gguf"), PROMPT).text
    assert off(llm) == f"{family} has {what}: its state may not be restored right"
    assert PROMPT not in llm.cache
    assert llm.cache.report().prompts == 0
    assert not [*(tmp_path / "disk").rglob("*.state")]


def test_other_models_are_refused_by_what_they_have(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, lines = config_in(tmp_path / "disk"), []
    for change in (
        lambda llm: llm.metadata.update({"tiny.attention.indexer.top_k": "8"}),
        lambda llm: setattr(llm, "chat_handler", object.__new__(Llava15ChatHandler)),
        lambda llm: setattr(llm.context_params, "embeddings", True),
    ):
        llm = load(model)
        change(llm)
        llm.set_cache(penstock.llama_cpp.open(llm, config))
        answer(llm, PROMPT)
        lines.append(off(llm))
    monkeypatch.setattr(Llava15ChatHandler, "__del__", lambda _: None, raising=False)

    assert lines == [
        "llama has indexed attention: its state may not be restored right",
        "chat_handler takes images: KV depends on more than the tokens",
        "embedding is set, must not be",
    ]
    with pytest.raises(ValueError, match="llm is a list, must be a Llama of llama_cpp"):
        penstock.llama_cpp.open([], config)


def test_a_configuration_must_have_a_disk_that_is_not_encrypted(
    model: Path, tmp_path: Path
) -> None:
    text = config_in(tmp_path / "disk").to_toml()
    file = tmp_path / "penstock.toml"
    file.write_text(text.replace('key_file = ""', 'key_file = "/a/key"'))
    memory = penstock.parse_config(text[: text.rindex("[[tiers]]")])

    with pytest.raises(penstock.ConfigError, match=r"key_file: is set, but states of llama\.cpp"):
        penstock.llama_cpp.open(load(model), str(file))
    with pytest.raises(penstock.ConfigError, match="tiers: have none of kind 'disk'"):
        penstock.llama_cpp.open(load(model), memory)


@pytest.mark.parametrize(
    "settings",
    [
        {"n_ctx": 320},
        {"flash_attn": True},
        {"type_k": llama_cpp.GGML_TYPE_F32},
        {"rope_freq_base": 20_000.0},
        {"logits_all": True},
    ],
    ids=str,
)
def test_a_state_of_other_settings_is_not_found(
    model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = config_in(tmp_path / "disk")
    answer(with_cache(model, config), PROMPT)
    other = with_cache(model, config, **settings)

    assert found_by(other) == 0
    assert other.cache.report().misses == {"never seen": 1}
    assert found_by(with_cache(model, config, n_batch=16)) == len(PROMPT) - 1


def test_a_state_of_other_weights_is_not_found(model: Path, tmp_path: Path) -> None:
    config, named = config_in(tmp_path / "disk"), config_in(tmp_path / "named", version="1")
    for each in (config, named):
        answer(with_cache(model, each), PROMPT)
    copied = model.rename(tmp_path / "copied.gguf")
    os.utime(copied, (1, 1))

    # The same weights, later; a version that the user gives stands for the time.
    assert found_by(with_cache(copied, config)) == 0
    assert found_by(with_cache(copied, named)) == len(PROMPT) - 1
    write_model(model, seed=1)
    assert found_by(with_cache(model, named)) == 0
    assert found_by(with_cache(copied, config_in(tmp_path / "named", version="2"))) == 0


def test_all_parts_of_a_model_are_in_its_key(model: Path, tmp_path: Path) -> None:
    llm = load(model)
    shards = [tmp_path / f"big-0000{n}-of-00002.gguf" for n in (1, 2)]
    for each in (*shards, tmp_path / "big-00001-of-00003.gguf", tmp_path / "lora.gguf"):
        each.write_bytes(b"a part")
    llm.model_path, llm.lora_path = str(shards[0]), str(tmp_path / "lora.gguf")

    files = connector._files_of(llm)
    before = connector._key_of(llm, config_in(tmp_path), files)
    shards[1].write_bytes(b"another part")

    assert files == [*shards, tmp_path / "lora.gguf"]
    assert connector._key_of(llm, config_in(tmp_path), files) != before


def test_a_model_file_that_was_changed_in_place_turns_the_cache_off(
    model: Path, tmp_path: Path
) -> None:
    llm = with_cache(model, config_in(tmp_path / "disk"))
    answer(llm, PROMPT)
    os.utime(model)

    answer(llm, prompt_of(60, seed=2))
    answer(llm, prompt_of(60, seed=3))

    assert off(llm) == connector.CHANGED
    assert llm.cache.report().unused == {connector.CHANGED: 2}
    assert len([*(tmp_path / "disk").rglob("*.state")]) == 1


def test_a_cache_that_serves_another_model_than_its_own_is_off(model: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path / "disk")
    one, other = with_cache(model, config), load(model)
    other.set_cache(one.cache)
    alone = load(model)
    alone.set_cache(penstock.llama_cpp.open(load(model), config))

    answer(one, PROMPT)
    answer(other, prompt_of(60, seed=2))
    answer(one, prompt_of(60, seed=3))
    answer(alone, PROMPT)

    assert off(one) == off(alone) == connector.OTHER_MODEL
    assert len([*(tmp_path / "disk").rglob("*.state")]) == 1


def test_a_damaged_state_is_a_miss(model: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path / "disk")
    said = answer(with_cache(model, config), PROMPT)
    (state,) = (tmp_path / "disk").rglob("*.state")
    raw = bytearray(state.read_bytes())
    raw[-100] ^= 1
    state.write_bytes(raw)
    llm = with_cache(model, config)

    again = answer(llm, PROMPT)

    assert again.text == said.text
    assert llm.cache.report().misses == {"corrupt": 1}
    assert found_by(with_cache(model, config)) == len(PROMPT) - 1


def test_a_short_prefix_and_one_that_is_hardly_longer_are_not_loaded(
    model: Path, tmp_path: Path
) -> None:
    config = config_in(tmp_path / "disk")
    answer(with_cache(model, config), PROMPT)
    llm = with_cache(model, config)
    answer(llm, PROMPT[:10], max_tokens=1)
    answer(llm, [*PROMPT[:15], 99])

    answer(llm, prompt_of(60, seed=2))

    assert llm.cache.report().misses == {"recompute is quicker": 2, "never seen": 1}


@contextmanager
def no_large_files() -> Iterator[None]:
    """As a disk that is full: the kernel refuses to write on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_one_line(model: Path, tmp_path: Path) -> None:
    llm = with_cache(model, config_in(tmp_path / "disk"))

    with no_large_files():
        said = [answer(llm, each).text for each in (PROMPT, prompt_of(60, seed=2))]

    assert all(said)
    assert off(llm) == f"{tmp_path / 'disk' / 'llama_cpp'}: File too large"
    assert not [*(tmp_path / "disk" / "llama_cpp").iterdir()]


def test_a_state_that_is_too_large_and_a_folder_of_others_are_one_line(
    model: Path, tmp_path: Path
) -> None:
    small = with_cache(model, config_in(tmp_path / "small"))
    small.cache._folder.capacity_bytes = 5_000
    theirs = tmp_path / "theirs" / "llama_cpp"
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    open_to_all = with_cache(model, config_in(tmp_path / "theirs"))
    later = with_cache(model, config_in(tmp_path / "later"))
    (tmp_path / "later" / "llama_cpp").chmod(0o777)
    for llm in (small, open_to_all, later):
        assert answer(llm, PROMPT).text

    assert "a state is larger than the 0.0 MB of" in off(small)
    assert "theirs/llama_cpp has mode 0777, must have 0700" in off(open_to_all)
    assert "later/llama_cpp has mode 0777, must have 0700" in off(later)
    assert "folder: folder" in str(later.cache.report())
