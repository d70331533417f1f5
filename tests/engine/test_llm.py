"""`penstock_serve.LLM`: prompts in, answers out, without a server."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import penstock
import penstock_serve
from penstock_serve.engine import instance
from tests.serve.conftest import make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = penstock.parse_config(
    """
    version = 1
    model.name = "small"
    cache = { block_tokens = 8, blocks = 24, load_gate = "off" }
    tiers = [{ name = "host", kind = "memory", blocks = 64 }]
    engine = { threads = 1 }
    """
)
TEXT = "a tier has fewer slots to give than were asked for"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llm") / "small-model"
    make_checkpoint(made)
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[penstock_serve.LLM]:
    with penstock_serve.LLM(folder, config=CONFIG) as made:
        yield made


def reference(folder: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([prompt])
    made = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False
    )
    return made[0, len(prompt) :].tolist()


def test_answers_are_those_of_the_reference_model(llm: penstock_serve.LLM, folder: Path) -> None:
    [answer] = llm.generate([TEXT], max_tokens=6, temperature=0)

    assert list(answer.token_ids) == reference(folder, answer.prompt_token_ids, 6)
    assert answer.finish_reason == "length"
    assert answer.text


def test_prompts_are_text_or_tokens_or_messages_and_answers_keep_their_order(
    llm: penstock_serve.LLM,
) -> None:
    [text] = llm.generate([TEXT], max_tokens=4, temperature=0)
    chat = [{"role": "user", "content": TEXT}]

    answers = llm.generate(
        [chat, list(text.prompt_token_ids), np.array(text.prompt_token_ids), TEXT],
        max_tokens=4,
        temperature=0,
    )

    assert [answer.token_ids for answer in answers[1:]] == [text.token_ids] * 3
    assert answers[0].prompt_token_ids != text.prompt_token_ids
    assert len(answers[0].prompt_token_ids) > len(text.prompt_token_ids)


def test_a_prefix_is_found_on_the_device_and_in_host_memory(folder: Path) -> None:
    prompt = list(range(40))
    with penstock_serve.LLM(folder, config=CONFIG) as llm:
        [first] = llm.generate([prompt], max_tokens=1, temperature=0)
        [second] = llm.generate([prompt], max_tokens=1, temperature=0)
        # Enough to push the first prompt out of the 24 blocks of the device.
        llm.generate([[n] * 100 for n in range(4)], max_tokens=1, temperature=0)
        [third] = llm.generate([prompt], max_tokens=1, temperature=0)

    assert (first.cached_tokens, first.cached_by_tier) == (0, {"device": 0, "host": 0})
    assert second.cached_by_tier == {"device": 32, "host": 0}
    assert third.cached_by_tier["host"] > 0
    assert third.cached_tokens == 32
    assert first.token_ids == second.token_ids == third.token_ids


def test_the_next_llm_finds_on_disk_what_the_last_one_computed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A store process that a busy machine keeps from answering is not taken for one that hangs.
    monkeypatch.setattr("penstock.store.process.link.SILENT_S", 60.0)
    disk = f'{{ name = "disk", kind = "disk", path = "{tmp_path / "disk"}", gib = 0.05 }}'
    config = penstock.parse_config(
        f"""
        version = 1
        model.name = "small"
        cache = {{ block_tokens = 8, blocks = 24, load_gate = "off" }}
        tiers = [{{ name = "host", kind = "host", blocks = 64 }}, {disk}]
        engine = {{ threads = 1 }}
        """
    )
    with penstock_serve.LLM(folder, config=config) as llm:
        [first] = llm.generate([TEXT], max_tokens=6, temperature=0)
    with penstock_serve.LLM(folder, config=config) as llm:
        [again] = llm.generate([TEXT], max_tokens=6, temperature=0)

    assert first.cached_tokens == 0
    assert again.cached_tokens == (len(first.prompt_token_ids) - 1) // 8 * 8
    assert again.token_ids == first.token_ids


def test_a_disk_that_cannot_be_used_is_not_waited_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "DISK_S", 1000.0)
    (tmp_path / "disk").write_text("not a folder")
    disk = f'{{ name = "disk", kind = "disk", path = "{tmp_path / "disk"}", gib = 0.05 }}'
    config = penstock.parse_config(
        f"""
        version = 1
        model.name = "small"
        cache = {{ block_tokens = 8, blocks = 24 }}
        tiers = [{{ name = "host", kind = "host", blocks = 64 }}, {disk}]
        """
    )
    began = time.monotonic()

    with penstock_serve.LLM(folder, config=config) as llm:
        assert llm.generate([TEXT], max_tokens=1, temperature=0)

    assert time.monotonic() - began < 900, "it waited for the disk"


def test_a_stop_string_ends_an_answer_and_is_no_part_of_its_text(llm: penstock_serve.LLM) -> None:
    [whole] = llm.generate([TEXT], max_tokens=12, temperature=0)
    stop = whole.text[4:6]

    [cut] = llm.generate([TEXT], max_tokens=12, temperature=0, stop=stop)

    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)


def test_a_seed_gives_the_same_answers_beside_whatever_else_runs(llm: penstock_serve.LLM) -> None:
    alone = llm.generate([TEXT], max_tokens=8, temperature=1.5, seed=7)

    beside = llm.generate([TEXT, "tier", [1, 2, 3]], max_tokens=8, temperature=1.5, seed=7)
    others = {llm.generate([TEXT], max_tokens=8, temperature=1.5)[0].token_ids for _ in range(4)}

    assert beside[0].token_ids == alone[0].token_ids
    assert len(others) > 1


def test_more_prompts_than_may_wait_are_all_answered(folder: Path) -> None:
    table = penstock.parse_config(
        """
        version = 1
        model.name = "small"
        cache = { block_tokens = 8, blocks = 16 }
        engine = { waiting_max = 2, step_requests = 2, step_tokens = 32, threads = 1 }
        """
    )
    with penstock_serve.LLM(folder, config=table) as llm:
        answers = llm.generate([[n + 1, n + 2] for n in range(9)], max_tokens=2, temperature=0)

        assert [answer.prompt_token_ids[0] for answer in answers] == list(range(1, 10))
        assert llm.statistics().leases == 0
    assert llm.generate.__doc__


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": TEXT}, r"prompts is 'a tier .*', must be a list of prompts: \[prompt\]"),
        ({"prompts": [1, 2]}, r"prompts\[0\] is 1, must be a text, token ids, or chat messages"),
        ({"prompts": [[]]}, r"prompts\[0\] is empty, must be a text, token ids"),
        ({"prompts": [""]}, r"prompts\[0\] is empty"),
        ({"prompts": [[1, 400]]}, r"prompts\[0\]\[1\] is 400, must be an int from 0 to 399"),
        ({"prompts": [[1, "a"]]}, r"prompts\[0\]\[1\] is 'a', must be an int"),
        ({"prompts": [[{"role": "user"}]]}, r"prompts\[0\]\[0\] is .*'role' and 'content'"),
        ({"prompts": [[{"role": "pet", "content": ""}]]}, r"prompts\[0\]: .* role is pet"),
        ({"prompts": ["half \ud800"]}, r"prompts\[0\]: .* surrogates not allowed"),
        ({"prompts": [[{"role": "user", "content": "\ud800"}]]}, r"prompts\[0\]: .*surrogates"),
        ({"max_tokens": 0}, "max_tokens is 0, must be an int from 1 to"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0, must be an int"),
        ({"temperature": 3}, "temperature is 3.0, must be from 0 to 2"),
        ({"temperature": "hot"}, "temperature is 'hot', must be a number"),
        ({"temperature": float("nan")}, "temperature is nan, must be a number"),
        ({"temperature": 10**400}, "temperature is 1000.*, must be a number"),
        ({"top_p": 0}, "top_p is 0.0, must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k is -1, must be an int from 0 to"),
        ({"stop": [""]}, r"stop is \[''\], must be one or several texts that are not empty"),
        ({"stop": [3]}, r"stop\[0\] is 3, must be a str"),
        ({"seed": 2**64}, "seed is .*, must be an int from"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_what_is_right(
    llm: penstock_serve.LLM, given: dict[str, Any], message: str
) -> None:
    before = llm.statistics().requests
    arguments: dict[str, Any] = {"prompts": [TEXT], **given}

    with pytest.raises(ValueError, match=message):
        llm.generate(**arguments)

    assert llm.statistics().requests == before


def test_what_can_never_fit_is_refused_before_anything_is_computed(llm: penstock_serve.LLM) -> None:
    before = llm.statistics().requests

    with pytest.raises(penstock.NeverFitsError) as refused:
        llm.generate(["fits", [1] * 150], max_tokens=60)

    assert (refused.value.wanted, refused.value.available) == (27, 24)
    assert refused.value.__notes__ == ["prompts[1] has 150 tokens, and max_tokens is 60"]
    with pytest.raises(ValueError, match="max_tokens is 600, must be at most 512 together"):
        llm.generate([TEXT], max_tokens=600)
    assert llm.statistics().requests == before


def test_without_max_tokens_an_answer_has_what_the_prompt_leaves(llm: penstock_serve.LLM) -> None:
    [answer] = llm.generate([[5] * 180], temperature=0)

    assert len(answer.token_ids) == 24 * 8 - 180


def test_a_model_without_a_tokenizer_takes_tokens_alone(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    with penstock_serve.LLM(folder, config=CONFIG) as llm:
        [answer] = llm.generate([[1, 2, 3]], max_tokens=3, temperature=0)

        assert len(answer.token_ids) == 3
        assert answer.text == ""
        with pytest.raises(ValueError, match=r"prompts\[0\] is text, must be token ids"):
            llm.generate(["text"])
        with pytest.raises(ValueError, match="stop is 'x', must be left out"):
            llm.generate([[1]], stop="x")


def test_closed_it_refuses_every_call_but_another_close(folder: Path) -> None:
    llm = penstock_serve.LLM(folder, config=CONFIG)
    assert repr(llm) == "<LLM small on cpu: 24 blocks of 8>"

    llm.close()
    llm.close()

    assert repr(llm) == "<LLM small on cpu: closed>"
    for call in (lambda: llm.generate([TEXT]), llm.statistics, llm.adopt_thread, llm.__enter__):
        with pytest.raises(penstock.UnavailableError, match="the LLM 'small' is closed"):
            call()


def test_another_thread_is_refused_until_it_adopts(folder: Path) -> None:
    refused: list[BaseException] = []
    answers: list[penstock_serve.Completion] = []

    def use() -> None:
        try:
            llm.generate([TEXT], max_tokens=1)
        except penstock.AccessError as error:
            refused.append(error)
        llm.adopt_thread()
        answers.extend(llm.generate([TEXT], max_tokens=1))
        llm.close()

    llm = penstock_serve.LLM(folder, config=CONFIG)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join(600)

    assert len(refused) == len(answers) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("cache.ranks = 2", "cache.ranks: is 2, must be 1 for an LLM in one process"),
        ('engine.role = "router"', "engine.role: is 'router', must be 'both'"),
        ("engine = { prefill_tp = 1, decode_tp = 1 }", "engine.prefill_tp: is 1, must be 0"),
    ],
)
def test_what_takes_several_processes_is_left_to_the_server(
    folder: Path, tmp_path: Path, more: str, message: str
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(f'version = 1\nmodel.name = "small"\ncache.blocks = 8\n{more}\n')

    with pytest.raises(penstock.ConfigError, match=message):
        penstock_serve.LLM(folder, config=path)


def test_arguments_of_another_kind_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="config is 3, must be a Config or a path"):
        penstock_serve.LLM(folder, config=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model is 3, must be a path or None"):
        penstock_serve.LLM(3)  # type: ignore[arg-type]
    with pytest.raises(penstock.ConfigError, match="model: is 'nowhere', must be a folder"):
        penstock_serve.LLM("nowhere")
    with pytest.raises(penstock.ConfigError, match=r"model: is 'x+.*' \(File name too long\)"):
        penstock_serve.LLM("x" * 5000)


def test_penstock_itself_needs_neither_torch_nor_a_tokenizer() -> None:
    script = (
        "import sys, penstock_serve; penstock_serve.LLM\n"
        "print({'torch', 'tokenizers', 'jinja2', 'gguf'} & set(sys.modules))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout == "set()\n"


def test_a_paused_llm_refuses_prompts_until_it_is_resumed(llm: penstock_serve.LLM) -> None:
    before = llm.generate([[1, 2, 3]], max_tokens=4, temperature=0)
    llm.pause()
    llm.pause()
    with pytest.raises(penstock.UnavailableError, match="the engine is paused, must be resumed"):
        llm.generate([[1, 2, 3]], max_tokens=4)

    llm.resume()

    after = llm.generate([[1, 2, 3]], max_tokens=4, temperature=0)
    assert after[0].token_ids == before[0].token_ids
