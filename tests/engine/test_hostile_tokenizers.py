"""Tokenizer files that are damaged or made to do harm: each is refused in one line, or works."""

from __future__ import annotations

import json
import shutil
from random import Random
from typing import TYPE_CHECKING

import pytest

from penstock.errors import ConfigError
from penstock_serve.engine.text import Text
from tests.serve.conftest import make_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

CHAT = [{"role": "user", "content": "hello"}]
FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """Files that may be spoiled."""
    return shutil.copytree(whole, tmp_path / "model")


def refusal_if_any(folder: Path) -> str:
    try:
        text = Text.of(folder)
    except ConfigError as refused:
        return str(refused)
    text.encode("hello")
    return ""


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"5", b"[" * 100_000, b"\xff", b"{"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_holds_something_else_is_refused_in_one_line(
    folder: Path, name: str, content: bytes
) -> None:
    (folder / name).write_bytes(content)

    message = refusal_if_any(folder)

    assert message.startswith(f"model: is {folder}, which has no tokenizer: ")
    assert "\n" not in message


@pytest.mark.parametrize("name", FILES[:2])
def test_a_file_with_bytes_changed_is_read_or_refused_in_one_line(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    random = Random(3)

    for _ in range(40):
        changed = bytearray(content)
        for _ in range(3):
            changed[random.randrange(len(changed))] = random.randrange(256)
        (folder / name).write_bytes(changed)

        assert "\n" not in refusal_if_any(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"additional_special_tokens": 5},
        {"additional_special_tokens": [5]},
        {"bos_token": 5},
        {"eos_token": {"content": []}},
        {"chat_template": "{% for"},
    ],
)
def test_settings_that_make_no_sense_are_refused(folder: Path, change: dict[str, object]) -> None:
    path = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    assert "which has no tokenizer: " in refusal_if_any(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**12) %}a{% endfor %}",
        "{{ 1/0 }}",
        "{{ 'a' * (10**15) }}",
        "{{ strftime_now(5) }}",
        "{{ x.y.z }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception(5) }}",
    ],
)
def test_a_template_that_fails_refuses_the_conversation(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    text = Text.of(folder)

    with pytest.raises(ValueError, match=r"^the model's chat template refuses the messages"):
        text.encode_chat(CHAT)
