"""The text of a growing answer: never half a character, never a part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from penstock.errors import ConfigError
from penstock_serve.engine.text import AnswerText, Text, TextTooLong
from tests.serve.conftest import make_tokenizer

TEXT = Text(make_tokenizer())


def reported(text: str, *stops: str) -> tuple[list[str], AnswerText]:
    """The text that is returned with each token, and at the end."""
    answer = AnswerText(TEXT, stops)
    pieces = []
    for token in TEXT.encode(text):
        pieces.append(answer.add(token))
        if answer.stopped:
            return pieces, answer
    return [*pieces, answer.end()], answer


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.text(max_size=40))
def test_pieces_are_the_whole_text_whatever_it_is_made_of(text: str) -> None:
    pieces, _ = reported(text)

    assert "".join(pieces) == text


def test_a_character_of_several_tokens_is_returned_when_it_is_complete() -> None:
    assert len(TEXT.encode("🜂")) == 4

    pieces, _ = reported("🜂!")

    assert pieces == ["", "", "", "🜂", "!", ""]


def test_an_unfinished_character_is_returned_at_the_end() -> None:
    answer = AnswerText(TEXT)
    answer.add(TEXT.encode("🜂")[0])

    assert answer.end() == "\ufffd"


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    st.text(alphabet="abc ", max_size=30),
    st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), max_size=3),
)
def test_an_answer_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    pieces, answer = reported(text, *stops)

    places = [text.find(stop) for stop in stops if stop in text]
    # Where several begin at different places, the text is cut where the first of them is known.
    assert answer.stopped == bool(places)
    if not places:
        assert "".join(pieces) == text
    else:
        said = "".join(pieces)
        assert text.startswith(said)
        assert not any(stop in said for stop in stops)


def test_a_stop_string_is_found_across_tokens_and_the_text_before_it_is_returned() -> None:
    pieces, answer = reported("one two three", "wo th")

    assert answer.stopped
    assert "".join(pieces) == "one t"
    assert answer.end() == ""


def test_text_that_only_begins_like_a_stop_string_is_returned_later() -> None:
    pieces, answer = reported("abab.", "abac")

    assert not answer.stopped
    assert "".join(pieces) == "abab."


def test_a_chat_needs_a_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None

    with pytest.raises(ValueError, match="no chat template"):
        Text(tokenizer).encode_chat([{"role": "user", "content": "x"}])


def test_a_template_s_own_refusal_is_reported() -> None:
    with pytest.raises(ValueError, match="role is robot"):
        TEXT.encode_chat([{"role": "robot", "content": "x"}])


def test_a_template_reads_what_a_request_gives_it() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}"
    text, chat = Text(tokenizer), [{"role": "user", "content": "x"}]

    def said(**variables: object) -> str:
        return text.decode(text.encode_chat(chat, variables=variables))

    assert said(enable_thinking=True) == "<think>x"
    assert said(enable_thinking=False) == said() == said(another=1) == "x"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        Text.of(tmp_path)  # type: ignore[arg-type]


def test_a_text_that_is_too_long_is_refused_by_its_characters_or_by_its_beginning() -> None:
    tokens = len(TEXT.encode("ab ab ab"))

    assert len(TEXT.encode("ab ab ab", longest=tokens)) == tokens
    with pytest.raises(TextTooLong, match=f"has {tokens} tokens"):
        TEXT.encode("ab ab ab", longest=tokens - 1)
    with pytest.raises(TextTooLong, match="has 1000000 characters, more than 10 tokens can have"):
        TEXT.encode("x" * 1_000_000, longest=10)
    with pytest.raises(TextTooLong, match="has more than 100 tokens"):
        TEXT.encode("qz" * 600, longest=100)
    with pytest.raises(TextTooLong, match="characters"):
        TEXT.encode_chat([{"role": "user", "content": "x" * 1_000_000}], longest=10)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.text(max_size=40))
def test_the_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    assert b"".join(map(TEXT.token_bytes, TEXT.encode(text))) == text.encode()


def test_tokens_of_vocabularies_of_characters_have_their_spaces_and_their_bytes() -> None:
    vocabulary = {"<unk>": 0, "\u2581Hello": 1, "<0xE6>": 2, "<0xBC>": 3, "<0xA2>": 4, "lo": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    text = Text(PreTrainedTokenizerFast(tokenizer_object=tokenizer))

    assert [text.token_bytes(token) for token in range(1, 6)] == [
        b" Hello",
        b"\xe6",
        b"\xbc",
        b"\xa2",
        b"lo",
    ]


def test_the_text_of_the_first_tokens_is_not_searched_for_stop_strings() -> None:
    tokens = TEXT.encode("stop and stop again")
    found = []
    for least in (0, 1, 2, 99):
        answer = AnswerText(TEXT, ["stop"], min_tokens=least)
        said = "".join(answer.add(token) for token in tokens if not answer.stopped)
        found.append((said + answer.end(), answer.stopped))

    assert found[0] == ("", True)
    assert found[-1] == ("stop and stop again", False)
    first = len(TEXT.encode("stop"))
    answer = AnswerText(TEXT, ["stop"], min_tokens=first)
    assert "".join(answer.add(token) for token in tokens if not answer.stopped) == "stop and "
