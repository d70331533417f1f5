"""Text that is told as it grows: never half a character, never a part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serve.conftest import make_tokenizer

from penstock.engine.text import Answer, Text
from penstock.errors import ConfigError

TEXT = Text(make_tokenizer())


def told(text: str, *stops: str) -> tuple[list[str], Answer]:
    """What is told with each token of a text, and at its end."""
    answer = Answer(TEXT, stops)
    pieces = []
    for token in TEXT.encode(text):
        pieces.append(answer.add(token))
        if answer.stopped:
            return pieces, answer
    return [*pieces, answer.end()], answer


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.text(max_size=40))
def test_pieces_are_the_whole_text_whatever_it_is_made_of(text: str) -> None:
    pieces, answer = told(text)

    assert "".join(pieces) == text == answer.so_far


def test_a_character_of_several_tokens_is_told_when_it_is_complete() -> None:
    assert len(TEXT.encode("🜂")) == 4

    pieces, _ = told("🜂!")

    assert pieces == ["", "", "", "🜂", "!", ""]


def test_an_unfinished_character_is_told_at_the_end() -> None:
    answer = Answer(TEXT)
    answer.add(TEXT.encode("🜂")[0])

    assert answer.end() == "\ufffd"


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    st.text(alphabet="abc ", max_size=30),
    st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), max_size=3),
)
def test_an_answer_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    pieces, answer = told(text, *stops)

    places = [text.find(stop) for stop in stops if stop in text]
    # Where several begin at different places, the text is cut where the first of them is known.
    assert answer.stopped == bool(places)
    if not places:
        assert "".join(pieces) == text
    else:
        said = "".join(pieces)
        assert text.startswith(said)
        assert not any(stop in said for stop in stops)


def test_a_stop_string_is_found_across_tokens_and_what_precedes_it_is_told() -> None:
    pieces, answer = told("one two three", "wo th")

    assert answer.stopped
    assert "".join(pieces) == "one t"
    assert answer.end() == ""


def test_what_only_begins_like_a_stop_string_is_told_later() -> None:
    pieces, answer = told("abab.", "abac")

    assert not answer.stopped
    assert "".join(pieces) == "abab."


def test_a_chat_needs_a_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None

    with pytest.raises(ValueError, match="no chat template"):
        Text(tokenizer).encode_chat([{"role": "user", "content": "x"}])


def test_a_template_s_own_refusal_is_told() -> None:
    with pytest.raises(ValueError, match="role is robot"):
        TEXT.encode_chat([{"role": "robot", "content": "x"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        Text.of(tmp_path)  # type: ignore[arg-type]
