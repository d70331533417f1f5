"""Text to tokens and back: chat templates, and answers that are told as they grow.

The tokenizer is Hugging Face's, from the checkpoint's own files, or built from a GGUF file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_UNFINISHED = "\ufffd"
"""What an incomplete character is decoded to."""


class Text:
    """A model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers has no types
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, model: Path) -> Text:
        """The tokenizer of a checkpoint: a folder, or a GGUF file.

        Raises:
            ConfigError: there is none.
        """
        try:
            if model.suffix == ".gguf":
                found = AutoTokenizer.from_pretrained(
                    model.parent, gguf_file=model.name, local_files_only=True
                )
            else:
                found = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError("model", f"is {model}, which has no tokenizer: {error}") from error
        return cls(found)

    def encode(self, text: str) -> list[int]:
        """The tokens of plain text."""
        tokens: list[int] = self._tokenizer.encode(text)
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, ending where the assistant speaks.

        Raises:
            ValueError: the model has no chat template, or it does not take these messages.
        """
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template: use completions instead")
        try:
            tokens: list[int] = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


class Answer:
    """The text of one answer as it grows: `add` tells what is new and certain.

    A token may end in the middle of a character, and a stop string may begin at the end of what
    is known: both are held back until the next token decides.
    """

    def __init__(self, text: Text, stops: Sequence[str] = ()) -> None:
        self._text = text
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._settled = 0
        """Tokens before this one are decoded for good."""
        self._known = ""
        """Text of the settled tokens."""
        self._told = 0
        """Characters that were told."""
        self.stopped = False
        """Whether a stop string was met."""

    @property
    def so_far(self) -> str:
        """All that was told."""
        return self._known[: self._told]

    def add(self, token: int) -> str:
        """Takes the next token in; returns the text that is certain now and was not before."""
        self._tokens.append(token)
        # A few tokens before the new one are decoded again with it: spaces and characters of
        # several bytes depend on their neighbours.
        whole = self._text.decode(self._tokens[max(0, self._settled - 4) :])
        before = self._text.decode(self._tokens[max(0, self._settled - 4) : self._settled])
        if whole.endswith(_UNFINISHED):
            return ""
        self._known += whole[len(before) :]
        self._settled = len(self._tokens)
        return self._tell(self._certain())

    def end(self) -> str:
        """Nothing follows: returns what was held back."""
        if self.stopped:
            return ""
        if self._settled < len(self._tokens):
            start = max(0, self._settled - 4)
            before = self._text.decode(self._tokens[start : self._settled])
            self._known += self._text.decode(self._tokens[start:])[len(before) :]
            self._settled = len(self._tokens)
        return self._tell(len(self._known))

    def _certain(self) -> int:
        """How many characters of what is known cannot be part of a stop string."""
        # What was told cannot be part of a stop string: it would have been held back.
        places = (self._known.find(stop, self._told) for stop in self._stops)
        met = [place for place in places if place >= 0]
        if met:
            self.stopped = True
            return min(met)
        held = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._known)), 0, -1):
                if self._known.endswith(stop[:length]):
                    held = max(held, length)
                    break
        return max(self._told, len(self._known) - held)

    def _tell(self, upto: int) -> str:
        new = self._known[self._told : upto]
        self._told = upto
        return new
