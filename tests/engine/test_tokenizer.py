"""The light tokenizer gives the tokens that `transformers` gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from penstock.errors import ConfigError, UnavailableError
from penstock_serve.engine import text as tokenizer
from penstock_serve.engine.checkpoints import find_model
from penstock_serve.engine.text import Text, Tokenizer
from tests.serve.conftest import make_tokenizer

CHAT = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": " 2 + 2?\n"}]
PIECES = (
    *("<end>", "<|im_start|>", "<|im_end|>", " ", "  ", "\n", "\r\n", " 2024", "123", "I'll", "é"),
    *(
        "def f():\n    return 1",
        "漢字",
        "👩\u200d👧",
        "\u00a0",
        "\u0301",
        "word",
        " Word",
        "\x00",
        "…",
    ),
)
# Transformers takes seconds to read a GGUF file.
BOTH = ["of_folder", pytest.param("of_gguf", marks=pytest.mark.long)]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5)).map("".join)


@pytest.fixture(scope="module")
def of_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return Tokenizer.of_folder(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def gguf() -> Path:
    try:
        return find_model(None).path
    except UnavailableError:
        pytest.skip("the default model is not installed")


@pytest.fixture(scope="module")
def of_gguf(gguf: Path) -> tuple[Any, Any]:
    path = gguf
    known = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # It cuts the text of every GGUF file as GPT-2 did; this model was trained with single digits.
    known.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return Tokenizer.of_gguf(path), known


@pytest.mark.parametrize("of", BOTH)
@settings(deadline=None, max_examples=150, derandomize=True)
@given(text=TEXTS)
def test_text_and_tokens_are_the_same_both_ways(
    of: str, text: str, request: pytest.FixtureRequest
) -> None:
    light, known = request.getfixturevalue(of)

    tokens = light.encode(text)

    assert tokens == known.encode(text)
    assert light.encode(text, add_special_tokens=False) == known.encode(
        text, add_special_tokens=False
    )
    for skips in (True, False):
        assert light.decode(tokens, skip_special_tokens=skips) == known.decode(
            tokens, skip_special_tokens=skips
        )


@pytest.mark.parametrize("of", BOTH)
def test_vocabulary_and_conversations_are_the_same(of: str, request: pytest.FixtureRequest) -> None:
    light, known = request.getfixturevalue(of)

    assert light.get_vocab() == known.get_vocab()
    assert light.convert_ids_to_tokens(7) == known.convert_ids_to_tokens(7)
    assert light.convert_ids_to_tokens(10**6) is None
    for turns in (CHAT, CHAT[1:]):
        text = light.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        assert text == known.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)


def test_digits_of_the_default_model_stand_alone(gguf: Path) -> None:
    light = Tokenizer.of_gguf(gguf)

    assert [light.convert_ids_to_tokens(each) for each in light.encode("  24")] == ["ĠĠ", "2", "4"]


def with_template(folder: Path, template: object) -> Tokenizer:
    make_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": template, "bos_token": {"content": "<end>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = Tokenizer.of_folder(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ bos_token }}{{ messages[0].content | tojson }}", '<end>"Be <brief>."'),
        ("{% generation %}x{% endgeneration %}{{ tools is none }}", "xTrue"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "system"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
    ],
)
def test_templates_have_what_those_of_models_use(
    tmp_path: Path, template: object, said: str
) -> None:
    found = with_template(tmp_path, template)

    assert found.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False) == said


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}"],
)
def test_a_template_can_do_nothing_else(tmp_path: Path, template: str) -> None:
    found = with_template(tmp_path, template)

    with pytest.raises(TemplateError):
        found.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "nonsense"}}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("chat_template.jinja", "{% for %}"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, name: str, content: str) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)

    with pytest.raises(ConfigError, match="which has no tokenizer: "):
        Text.of(tmp_path)


def test_neither_torch_nor_transformers_is_imported_for_it(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    script = (
        "import sys\nfrom pathlib import Path\nfrom penstock_serve.engine.text import Text\n"
        "print(Text.of(Path(sys.argv[1])).encode('x'))\n"
        "print({'torch', 'transformers'} & set(sys.modules))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )

    assert done.stdout.endswith("\nset()\n")


@pytest.mark.parametrize(
    "wrong",
    [
        {"ggml.tokens": None},
        {"ggml.token_type": [1]},
        {"ggml.merges": ["a b c"]},
        {"ggml.merges": ["never seen"]},
        {"ggml.bos_token_id": 99},
        {"ggml.bos_token_id": "x"},
        {"ggml.tokens": [1, 2]},
    ],
)
def test_a_gguf_file_with_a_broken_vocabulary_is_one_line(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"ggml.model": "gpt2", "ggml.tokens": ["a", "b"], "ggml.token_type": [1, 1]}
    fields = {**usual, "ggml.merges": [], **wrong}
    monkeypatch.setattr(tokenizer, "read_fields", lambda *_: fields)

    with pytest.raises(ConfigError, match="which has no tokenizer: its vocabulary cannot be used"):
        Text.of(Path("x.gguf"))
