"""Text to tokens and back: tokenizers, chat templates, and the text of a growing answer.

It has the part of the interface of Hugging Face's tokenizers that the engine uses, and is made

- from a folder with a `tokenizer.json`; the names of special tokens and the template for
  conversations come from the files beside it;
- from a GGUF file with a vocabulary of bytes, if the way it cuts text into words is in `SPLITS`.

For anything else there is `None`, and the caller falls back to `transformers`.

The one rule: the tokens are those that the model was trained with. A test compares them with
those of `transformers`, which cuts the text for every GGUF file in the same way.

The tokenizer is made from the checkpoint's own files, or from a GGUF file.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from penstock.errors import ConfigError
from penstock_serve.engine.gguf_file import read_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from jinja2.parser import Parser


SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
CONTROL = 3
USER_DEFINED = 4
"""Kinds of tokens in a GGUF file: those that no text has, and those that are never split."""

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level() -> Any:  # noqa: ANN401 - tokenizers has no types
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _llama_3() -> Any:  # noqa: ANN401
    words = pre_tokenizers.Split(Regex(_LLAMA_3), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, letters])


def _digits_alone() -> Any:  # noqa: ANN401
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _byte_level()])


SPLITS = {
    "default": _byte_level,
    "gpt-2": _byte_level,
    "smollm": _digits_alone,
    "llama-bpe": _llama_3,
}
"""How text is cut into words before merges, by `tokenizer.ggml.pre` of a GGUF file."""


class Tokenizer:
    """Text to tokens and back, and a template for conversations."""

    def __init__(
        self,
        backend: Any,  # noqa: ANN401
        *,
        chat_template: str | None,
        special: Mapping[str, str],
    ) -> None:
        # What a file says about lengths is for training.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._special = dict(special)
        self.chat_template = chat_template
        self._compiled = _environment().from_string(chat_template) if chat_template else None

    @classmethod
    def of_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of a folder; `None` if it has no `tokenizer.json`.

        Raises `ValueError`: a file cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        with _readable(path.name):
            backend = tokenizers.Tokenizer.from_file(str(path))
        config = _object_of(folder / "tokenizer_config.json")
        special = _special_of(_object_of(folder / "special_tokens_map.json") | config)
        more = [_content(each) for each in _list_of(config, "additional_special_tokens")]
        known = [
            name for name in {*special.values(), *more} if backend.token_to_id(name) is not None
        ]
        backend.add_special_tokens([AddedToken(name, normalized=False) for name in sorted(known)])
        return cls(backend, chat_template=_template_of(folder, config), special=special)

    @classmethod
    def of_gguf(cls, path: Path) -> Tokenizer | None:
        """The tokenizer of a GGUF file; `None` if its kind is another one.

        Raises `ConfigError`: the file cannot be read; `ValueError`: its vocabulary cannot be used.
        """
        found = read_fields(path, "tokenizer.")
        split = SPLITS.get(str(found.get("ggml.pre", "default")))
        if found.get("ggml.model") != "gpt2" or split is None:
            return None
        with _readable("its vocabulary"):
            special = _special_of_gguf(found)
            backend = _backend_of_gguf(found, split(), ignore_merges=split is _llama_3)
            if found.get("ggml.add_bos_token", split is _llama_3) and "bos_token" in special:
                bos = special["bos_token"]
                backend.post_processor = processors.TemplateProcessing(
                    single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
                )
        template = found.get("chat_template")
        return cls(
            backend, chat_template=template if isinstance(template, str) else None, special=special
        )

    # As Hugging Face's tokenizers have it.

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        found: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return found

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        """All tokens, as they stand in the vocabulary, and their numbers."""
        found: dict[str, int] = self._backend.get_vocab()
        return found

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """A token as it stands in the vocabulary."""
        found: str | None = self._backend.id_to_token(token)
        return found

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **variables: object,
    ) -> str:
        """A conversation as one text; the template may read further `variables`.

        Raises `ValueError`: tokens are asked for: `encode` makes them; `TemplateError`: the
        template does not take it.
        """
        if tokenize:
            raise ValueError("tokenize is True, must be False: encode the text")
        if self._compiled is None:
            raise TemplateError("there is no template")
        own = {
            "messages": [*messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._compiled.render({**variables, **self._special, **own})


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Says that a file is wrong, whatever the library that reads it raises."""
    try:
        yield
    except Exception as error:  # tokenizers raises nothing more precise
        raise ValueError(f"{what} cannot be used: {type(error).__name__}: {error}") from error


def _backend_of_gguf(found: Mapping[str, Any], split: Any, *, ignore_merges: bool) -> Any:  # noqa: ANN401
    tokens = found["ggml.tokens"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in found["ggml.merges"]],
            ignore_merges=ignore_merges,
        )
    )
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    for kind in (CONTROL, USER_DEFINED):
        kinds = zip(tokens, found["ggml.token_type"], strict=True)
        named = [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, of in kinds
            if of == kind
        ]
        add = backend.add_special_tokens if kind == CONTROL else backend.add_tokens
        add(named)
    return backend


def _special_of_gguf(found: Mapping[str, Any]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        f"{short}_token": found["ggml.tokens"][found[f"ggml.{long}_token_id"]]
        for short, long in names.items()
        if f"ggml.{long}_token_id" in found
    }


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: marks what an assistant says, for training."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 asks for it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """What is inside, and nothing else."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Where templates run, which come with the model: they can change nothing."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _refuse
    found.globals["strftime_now"] = _now
    return found


def _to_json(value: object, indent: int | None = None) -> str:
    # Not jinja2's own, which escapes what HTML has a meaning for.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now(UTC).astimezone().strftime(form)


def _object_of(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")  # noqa: TRY004 - what a file says
    return found


def _list_of(config: Mapping[str, Any], name: str) -> list[Any]:
    found = config.get(name) or []
    if not isinstance(found, list):
        raise ValueError(f"{name} is {found!r}, must be a list")  # noqa: TRY004 - what a file says
    return found


def _special_of(config: Mapping[str, Any]) -> dict[str, str]:
    return {name: _content(config[name]) for name in SPECIAL if config.get(name)}


def _content(token: Any) -> str:  # noqa: ANN401 - from JSON
    """A token is a string, or an object with more about it."""
    found = token.get("content") if isinstance(token, dict) else token
    if not isinstance(found, str):
        raise ValueError(f"a special token is {token!r}, must be a string")  # noqa: TRY004
    return found


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        # Several by name: the one that is for conversations without more.
        found = next(
            (
                each.get("template")
                for each in found
                if isinstance(each, dict) and each.get("name") == "default"
            ),
            None,
        )
    return found if isinstance(found, str) else None


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
