"""Text to tokens and back: tokenizers, chat templates, and the text of a growing answer.

The tokenizer is made from the checkpoint's own files, or from a GGUF file.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from penstock.errors import ConfigError
from penstock_serve.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_UNFINISHED = "\ufffd"
"""What an incomplete character is decoded to."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A token that is one byte, in vocabularies of characters."""
_SPACE = "\u2581"
"""A space, in vocabularies of characters."""
USUAL_CHARACTERS = 8
"""A text with more characters for each allowed token is probably too long: its start is encoded
first."""


class TextTooLong(ValueError):  # noqa: N818 - what a text is
    """A text has more tokens than are allowed."""


def _bytes_of_letters() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a letter: printable ones as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_LETTERS = _bytes_of_letters()


_TEMPLATE_FAILED = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, MemoryError)
"""Errors of a template, which is a program that comes with the model."""


class Text:
    """A model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers has no types
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, model: Path) -> Text:
        """The tokenizer of a checkpoint: a folder, or a GGUF file.

        Raises `ConfigError`: there is none.
        """
        is_file = model.suffix == ".gguf"
        try:
            light = Tokenizer.of_gguf(model) if is_file else Tokenizer.of_folder(model)
            return cls(light or _heavy(model))
        except (OSError, ValueError, TemplateError) as error:
            raise ConfigError("model", f"is {model}, which has no tokenizer: {error}") from error

    def encode(self, text: str, *, longest: int | None = None, plain: bool = True) -> list[int]:
        """The tokens of a text.

        Raises `TextTooLong`: it has more tokens; `ValueError`: it has no UTF-8 encoding, as a text
        with half a surrogate pair.
        """
        text.encode()
        if longest is not None:
            self._require_short(text, longest, plain)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=plain)
        if longest is not None and len(tokens) > longest:
            raise TextTooLong(f"has {len(tokens)} tokens")
        return tokens

    def _require_short(self, text: str, longest: int, plain: bool) -> None:  # noqa: FBT001
        """Refuses what is certainly too long, by its number of characters and by its start."""
        if len(text) > longest * self._characters_max:
            raise TextTooLong(f"has {len(text)} characters, more than {longest} tokens can have")
        usual = USUAL_CHARACTERS * longest
        if len(text) > usual:
            # A token may be split where the text is cut.
            count = len(self._tokenizer.encode(text[:usual], add_special_tokens=plain))
            if count > longest + self._characters_max:
                raise TextTooLong(f"has more than {longest} tokens")

    @cached_property
    def _characters_max(self) -> int:
        """The characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        longest: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation, up to the start of the assistant's turn.

        Raises `TextTooLong`: it has more than `longest` tokens; `ValueError`: the model has no chat
        template, or the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template: use completions instead")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **(variables or {})
            )
        except _TEMPLATE_FAILED as error:
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error
        return self.encode(text, longest=longest, plain=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character."""
        said = self.decode([token])
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if _UNFINISHED in said and piece is not None:
            byte = _BYTE.fullmatch(piece)
            if byte:
                return bytes([int(byte[1], 16)])
            if all(letter in _LETTERS for letter in piece):
                return bytes(_LETTERS[letter] for letter in piece)
        if piece is not None and piece.startswith(_SPACE) and not said.startswith(" "):
            # At the beginning of a text, where a single token stands, its space is left out.
            said = f" {said}"
        return said.encode()


def _heavy(model: Path) -> Any:  # noqa: ANN401 - transformers has no types
    """The tokenizer of `transformers`, for files that `Tokenizer` does not support."""
    from transformers import AutoTokenizer  # noqa: PLC0415  (takes seconds)

    if model.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(
            model.parent, gguf_file=model.name, local_files_only=True
        )
    return AutoTokenizer.from_pretrained(model, local_files_only=True)


class AnswerText:
    """The text of one answer as it grows; `add` returns the text that is final.

    A token may end within a character, and a stop string may begin at the end of the text: such
    text is held back until the next token decides.
    """

    def __init__(self, text: Text, stops: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        self._text = text
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        """The text of this many leading tokens is not searched for stop strings."""
        self._searched = 0
        """Where the search for stop strings begins."""
        self._tokens: list[int] = []
        self._settled = 0
        """Tokens before this one are decoded for good."""
        self._known = ""
        """Text of the settled tokens."""
        self._returned = 0
        """The number of characters that were returned."""
        self.stopped = False
        """Whether a stop string was found."""

    def add(self, token: int) -> str:
        """Adds the next token; returns the text that it makes final."""
        self._tokens.append(token)
        # A few tokens before the new one are decoded again with it: spaces and characters of
        # several bytes depend on their neighbours.
        whole = self._text.decode(self._tokens[max(0, self._settled - 4) :])
        before = self._text.decode(self._tokens[max(0, self._settled - 4) : self._settled])
        if whole.endswith(_UNFINISHED):
            return ""
        self._known += whole[len(before) :]
        self._settled = len(self._tokens)
        if self._settled <= self._min_tokens:
            self._searched = len(self._known)
        return self._return_up_to(self._final_characters())

    def end(self) -> str:
        """Ends the answer; returns the text that was held back."""
        if self.stopped:
            return ""
        if self._settled < len(self._tokens):
            start = max(0, self._settled - 4)
            before = self._text.decode(self._tokens[start : self._settled])
            self._known += self._text.decode(self._tokens[start:])[len(before) :]
            self._settled = len(self._tokens)
        return self._return_up_to(len(self._known))

    def _final_characters(self) -> int:
        """The number of characters that cannot be part of a stop string."""
        # Returned text cannot be part of one: it would have been held back.
        begin = max(self._returned, self._searched)
        places = (self._known.find(stop, begin) for stop in self._stops)
        met = [place for place in places if place >= 0]
        if met:
            self.stopped = True
            return min(met)
        held = 0
        for stop in self._stops:
            longest = min(len(stop) - 1, len(self._known) - self._searched)
            for length in range(longest, 0, -1):
                if self._known.endswith(stop[:length]):
                    held = max(held, length)
                    break
        return max(self._returned, len(self._known) - held)

    def _return_up_to(self, upto: int) -> str:
        new = self._known[self._returned : upto]
        self._returned = upto
        return new
