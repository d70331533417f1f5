"""Traces: files with one request a line, read as a stream.

| format    | a line has                                                                         |
|-----------|------------------------------------------------------------------------------------|
| Mooncake  | `timestamp`, `input_length`, `output_length`, `hash_ids` (one for 512 tokens)      |
| tokens    | `timestamp`, `tokens` (ids), and perhaps `output_length`, `tenant`                 |
| OpenAI    | `timestamp` or `created` (in seconds), `messages` or `prompt`, perhaps in a `body` |
| recording | what `recording` writes: names of blocks; a last line that is cut is left out      |

`timestamp` is in milliseconds. The first line of a file says which format the file has. Text is not
tokenized: four bytes of it count as a token, so that equal texts have equal blocks.

The one rule that must not break: a line that is wrong ends the replay with a message that names the
file, the line, the field, its value and what would be right. Nothing is skipped but empty lines.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from heapq import merge
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, cast

import msgspec
from xxhash import xxh3_64_digest, xxh3_128_digest

from penstock.errors import ConfigError, shown
from penstock.replay.recording import NAME_BYTES
from penstock.vocabulary.hints import (
    HINT_FIELDS,
    NO_HINTS,
    RETENTIONS,
    RetentionHints,
    read_hints,
    with_retention,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from typing import IO

    from penstock.config import Config
    from penstock.vocabulary.ids import Key

MOONCAKE_BLOCK_TOKENS = 512
"""The tokens of one of `hash_ids`."""
TEXT_TOKEN_BYTES = 4
"""English text has about four bytes a token."""
LINE_BYTES_MAX = 64 << 20
"""A prompt of a million tokens takes 8 MB; a longer line than this is no request."""
TOKENS_MAX = 1 << 27
"""Of one request: more than any model takes, and a bound on the memory of one line."""
ID_MAX = 2**63 - 1
BLOCK_TOKENS_MAX = 65_536
"""As in a configuration."""
MILLISECONDS_MAX = 1e15
"""Beyond any calendar; a time above it is a mistake of units."""
SHIPPED = ("conversation", "synthetic")
"""The traces that come with Penstock."""


class TraceRequest(NamedTuple):
    """One request of a trace."""

    at_s: float
    keys: Sequence[Key]
    """Of every full block of the prompt."""
    token_count: int
    """Of the prompt."""
    output_tokens: int = 0
    tenant: str = ""
    hints: RetentionHints = NO_HINTS


_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MILLISECONDS_MAX)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]
_Output = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class MooncakeLine(msgspec.Struct):
    """A line with ids of blocks."""

    timestamp: _Milliseconds
    input_length: _Tokens
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]]
    output_length: _Output = 0
    penstock: dict[str, Any] | None = None


class TokensLine(msgspec.Struct):
    """A line with the ids of tokens."""

    timestamp: _Milliseconds
    tokens: list[int]
    output_length: _Output = 0
    tenant: str = ""
    penstock: dict[str, Any] | None = None


class RecordingLine(msgspec.Struct):
    """A line with names of blocks."""

    timestamp: _Milliseconds
    input_length: _Tokens
    blocks: str
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)]
    output_length: _Output = 0
    penstock: dict[str, Any] | None = None


class OpenAiBody(msgspec.Struct):
    """What a client sends to `/v1/chat/completions` or `/v1/completions`."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    tools: list[Any] | None = None
    penstock: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


class OpenAiUsage(msgspec.Struct):
    """What the server counted."""

    completion_tokens: _Output | None = None


class OpenAiLine(OpenAiBody):
    """A line of a log of requests to OpenAI's API."""

    timestamp: _Milliseconds | None = None
    created: Annotated[float, msgspec.Meta(ge=0, le=MILLISECONDS_MAX / 1000)] | None = None
    """In seconds."""
    body: OpenAiBody | None = None
    """The request, where the line also says other things about it."""
    usage: OpenAiUsage | None = None


_WHOLE = "a whole number from {} to {}"
_RIGHT = {
    "timestamp": f"milliseconds from 0 to {MILLISECONDS_MAX:g}",
    "created": f"seconds from 0 to {MILLISECONDS_MAX / 1000:g}",
    "input_length": _WHOLE.format(1, TOKENS_MAX),
    "output_length": _WHOLE.format(0, TOKENS_MAX),
    "hash_ids": f"a list of whole numbers from 0 to {ID_MAX}",
    "tokens": "a list of whole numbers",
    "blocks": f"{2 * NAME_BYTES} hexadecimal digits for every full block",
    "block_tokens": _WHOLE.format(1, BLOCK_TOKENS_MAX),
    "tenant": "a text",
    "messages": "a list of objects with role and content",
    "prompt": "a text or a list of tokens",
    "tools": "a list",
    "penstock": f"an object with {', '.join(HINT_FIELDS)}",
    "prompt_cache_retention": f"one of {', '.join(map(repr, RETENTIONS))}",
    "body": "an object with messages or prompt",
    "usage": f"an object whose completion_tokens is {_WHOLE.format(0, TOKENS_MAX)}",
}


class TraceReader:
    """Reads files of a trace for a cache with blocks of a given size."""

    def __init__(self, config: Config) -> None:
        # Without the secret salt: it decides who can compute keys, not what is found.
        self._config = replace(config, salt="")
        self._block_tokens = config.cache.block_tokens
        self._formats: dict[str, tuple[type, Callable[[Any, bytes], TraceRequest]]] = {
            "hash_ids": (MooncakeLine, self._from_mooncake),
            "tokens": (TokensLine, self._from_tokens),
            "blocks": (RecordingLine, self._from_recording),
            "messages": (OpenAiLine, self._from_openai),
            "prompt": (OpenAiLine, self._from_openai),
            "body": (OpenAiLine, self._from_openai),
        }
        """By the field that only this format has."""

    def read_all(self, names: Sequence[str]) -> Iterator[TraceRequest]:
        """The requests of several files in the order of their times.

        Ids of Mooncake's format count for their own file only; equal tokens and texts are equal
        blocks in whatever file.

        Raises:
            ConfigError: a file cannot be read, or a line of it is wrong.
        """
        streams = [self.read(name, number) for number, name in enumerate(names)]
        return streams[0] if len(streams) == 1 else merge(*streams, key=lambda each: each.at_s)

    def read(self, name: str, number: int = 0) -> Iterator[TraceRequest]:
        """The requests of one file; `number` tells its ids from those of other files."""
        seed = number.to_bytes(16, "little")
        line_type: type = MooncakeLine
        convert: Callable[[Any, bytes], TraceRequest] = self._from_mooncake
        decoder: msgspec.json.Decoder[Any] | None = None
        last_s = 0.0
        for line_number, line in _lines(name):
            place = f"{name}:{line_number}"
            if decoder is None:
                line_type, convert = self._format_of(line, place)
                if line_type is MooncakeLine:
                    require_block_size(self._block_tokens)
                decoder = msgspec.json.Decoder(line_type)
            try:
                request = convert(decoder.decode(line), seed)
            except (ValueError, RecursionError) as error:
                if line_type is RecordingLine and _is_cut(line, error):
                    return  # Its process was killed as it wrote: the lines before are whole.
                _refuse_line(place, line, line_type, error)
            if request.at_s < last_s:
                raise ConfigError(
                    place,
                    f"the time is {request.at_s:g} s, must be at least that of the line before, "
                    f"{last_s:g} s: sort the file",
                )
            last_s = request.at_s
            yield request
        if decoder is None:
            raise ConfigError(name, "has no request, must have at least one line")

    def _format_of(
        self, line: bytes, place: str
    ) -> tuple[type, Callable[[Any, bytes], TraceRequest]]:
        fields = _object_in(line, place)
        for field, found in self._formats.items():
            if field in fields:
                return found
        known = ", ".join(self._formats)
        raise ConfigError(
            place, f"has the fields {shown(sorted(fields))}, must have one of {known}"
        )

    def _from_mooncake(self, line: MooncakeLine, seed: bytes) -> TraceRequest:
        ids = line.hash_ids
        wanted = -(-line.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(ids) != wanted:
            raise ValueError(
                f"hash_ids has {len(ids)} ids, must have {wanted}: one for each "
                f"{MOONCAKE_BLOCK_TOKENS} of {line.input_length} tokens"
            )
        full = line.input_length // self._block_tokens
        parts = MOONCAKE_BLOCK_TOKENS // self._block_tokens
        keys: list[bytes] = []
        key = seed
        # Each key contains those before it: an id that follows other blocks is another block.
        for block_id in ids:
            key = xxh3_128_digest(key + block_id.to_bytes(8, "little"))
            keys.append(key)
        if parts > 1:
            ends = [part.to_bytes(4, "little") for part in range(parts)]
            keys = [key[:12] + end for key in keys for end in ends]
        return TraceRequest(
            line.timestamp / 1000,
            keys[:full],
            line.input_length,
            line.output_length,
            hints=_hints(line.penstock),
        )

    def _from_tokens(self, line: TokensLine, _seed: bytes) -> TraceRequest:
        if not 1 <= len(line.tokens) <= TOKENS_MAX:
            raise ValueError(f"tokens has {len(line.tokens)} ids, must have 1 to {TOKENS_MAX}")
        keys = self._keys(line.tokens, line.tenant)
        return TraceRequest(
            line.timestamp / 1000,
            keys,
            len(line.tokens),
            line.output_length,
            line.tenant,
            _hints(line.penstock),
        )

    def _from_recording(self, line: RecordingLine, _seed: bytes) -> TraceRequest:
        times, rest = divmod(self._block_tokens, line.block_tokens)
        if rest:
            raise ValueError(
                f"block_tokens is {line.block_tokens}, must divide cache.block_tokens, "
                f"{self._block_tokens}: a recording names blocks of one size"
            )
        try:
            names = bytes.fromhex(line.blocks)
        except ValueError:
            raise ValueError(
                f"blocks is {shown(line.blocks)}, must be {_RIGHT['blocks']}"
            ) from None
        wanted = line.input_length // line.block_tokens * NAME_BYTES
        if len(names) != wanted:
            raise ValueError(
                f"blocks has {2 * len(names)} digits, must have {2 * wanted}: {2 * NAME_BYTES} "
                f"for each full block of {line.input_length} tokens"
            )
        keys: list[bytes] = []
        key = b""
        # A name stands for all before it as well, which a file that we did not write may not know.
        for at in range(0, wanted, NAME_BYTES):
            key = xxh3_64_digest(key + names[at : at + NAME_BYTES])
            keys.append(key)
        # The last of several names them all.
        return TraceRequest(
            line.timestamp / 1000,
            keys[times - 1 :: times],
            line.input_length,
            line.output_length,
            hints=_hints(line.penstock),
        )

    def _from_openai(self, line: OpenAiLine, _seed: bytes) -> TraceRequest:
        if line.timestamp is None and line.created is None:
            raise ValueError("timestamp is missing, must be milliseconds; or created, in seconds")
        at_s = line.created if line.timestamp is None else line.timestamp / 1000
        body = line.body or line
        output = (line.usage and line.usage.completion_tokens) or 0
        if isinstance(body.prompt, list):
            if not body.prompt:
                raise ValueError("prompt is [], must have at least one token")
            keys, count = self._keys(body.prompt, ""), len(body.prompt)
        else:
            text = _text_of(body)
            if not text:
                raise ValueError("messages and prompt are empty, must have a text")
            text += b"\0" * (-len(text) % TEXT_TOKEN_BYTES)
            keys, count = self._keys(text, ""), len(text) // TEXT_TOKEN_BYTES
        hints = _hints(body.penstock)
        if body.prompt_cache_retention is not None:
            hints = with_retention(hints, body.prompt_cache_retention)
        return TraceRequest(cast("float", at_s), keys, count, output, hints=hints)

    def _keys(self, tokens: list[int] | bytes, tenant: str) -> list[Key]:
        chain = self._config.key_chain(tenant=tenant)
        chain.extend(tokens)
        return chain.keys


def _hints(given: dict[str, Any] | None) -> RetentionHints:
    return NO_HINTS if given is None else read_hints(given)


class PerfectHints:
    """Says of every request which of its blocks are used again: the most that hints can say.

    The trace is read once before, and an entry is kept for every different block.
    """

    def __init__(self, requests: Iterable[TraceRequest], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._last: dict[Key, int] = {}
        """Block to the number of the last request that has it."""
        for number, request in enumerate(requests):
            self._last |= dict.fromkeys(request.keys, number)

    def written_into(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """The same requests, each with the hint of a client that knows the future."""
        for number, request in enumerate(requests):
            kept = 0
            # A block is used again if any after it is.
            while kept < len(request.keys) and self._last[request.keys[kept]] > number:
                kept += 1
            yield request._replace(hints=RetentionHints(keep_tokens=kept * self._block_tokens))


def natural_block_tokens(name: str) -> int:
    """The block size at which a file is read with the fewest blocks and nothing lost.

    Raises:
        ConfigError: the file cannot be read, or only once.
    """
    require_read_again(name)
    with closing(_lines(name)) as lines:
        for number, line in lines:
            fields = _object_in(line, f"{name}:{number}")
            if "hash_ids" in fields:
                return MOONCAKE_BLOCK_TOKENS
            recorded = fields.get("block_tokens", 16)
            known = type(recorded) is int and 1 <= recorded <= BLOCK_TOKENS_MAX
            return recorded if "blocks" in fields and known else 16
    raise ConfigError(name, "has no request, must have at least one line")


def require_read_again(name: str) -> None:
    """Refuses a pipe: what was read of it once is gone.

    Raises:
        ConfigError: it is one.
    """
    path = Path(name)
    if path.is_fifo() or path.is_socket() or path.is_char_device():
        raise ConfigError(
            name,
            "is a pipe or a device, which can be read once only, must be a file; `penstock replay` "
            "with --config and without --perfect-hints reads it once",
        )


def require_block_size(block_tokens: int) -> None:
    """Refuses blocks that ids of 512 tokens cannot be divided into.

    Raises:
        ConfigError: they cannot.
    """
    if MOONCAKE_BLOCK_TOKENS % block_tokens:
        raise ConfigError(
            "cache.block_tokens",
            f"is {block_tokens}, must divide {MOONCAKE_BLOCK_TOKENS}: the trace has an id for "
            f"every {MOONCAKE_BLOCK_TOKENS} tokens",
        )


def _text_of(body: OpenAiBody) -> bytes:
    """The text of a request, as a chat template would put it in order."""
    parts = [msgspec.json.encode(body.tools)] if body.tools else []
    for message in body.messages or ():
        content = message.get("content") or ""
        if isinstance(content, list):
            # Images and sounds count as what the request says of them.
            content = msgspec.json.encode(content).decode()
        if not isinstance(content, str):
            raise ValueError(f"content is {shown(content)}, must be a text or a list of parts")  # noqa: TRY004
        parts.append(f"{message.get('role', '')}\n{content}\n".encode())
        if calls := message.get("tool_calls"):
            parts.append(msgspec.json.encode(calls) + b"\n")
    if isinstance(body.prompt, str):
        parts.append(body.prompt.encode())
    return b"".join(parts)


@contextmanager
def _open(name: str) -> Iterator[IO[bytes]]:
    with ExitStack() as opened:
        if name in SHIPPED and not Path(name).exists():
            packed = files("penstock.replay").joinpath("traces", f"{name}.jsonl.xz")
            yield opened.enter_context(lzma.open(opened.enter_context(packed.open("rb"))))
        elif Path(name).suffix == ".gz":
            yield cast("IO[bytes]", opened.enter_context(gzip.open(name, "rb")))
        elif Path(name).suffix == ".xz":
            yield opened.enter_context(lzma.open(name, "rb"))
        else:
            yield opened.enter_context(Path(name).open("rb"))


def _lines(name: str) -> Generator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers."""
    number = 0
    try:
        with _open(name) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(
                        f"{name}:{number}",
                        f"is longer than {LINE_BYTES_MAX} bytes, must be one request",
                    )
                if line.strip():
                    yield number, line
    except FileNotFoundError as error:
        known = " and ".join(SHIPPED)
        raise ConfigError(
            name, f"is not there, must be a file or one of the traces {known}"
        ) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name}:{number + 1}", f"cannot be read: {why}") from error


def _is_cut(line: bytes, error: Exception) -> bool:
    """Whether a line is the beginning of one: it has no end, and is no JSON without the rest."""
    cut_short = isinstance(error, msgspec.DecodeError)
    return cut_short and not isinstance(error, msgspec.ValidationError) and line[-1:] != b"\n"


def _object_in(line: bytes, place: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(place, f"is {shown(_excerpt(line))}, must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(place, f"is {shown(found)}, must be an object with fields")
    return found


def _excerpt(line: bytes) -> str:
    return line[:200].decode("utf-8", errors="replace").rstrip("\n")


def _refuse_line(place: str, line: bytes, line_type: type, error: Exception) -> NoReturn:
    """Raises what is wrong with a line, in terms of the field that is."""
    fields = _object_in(line, place)
    if isinstance(error, msgspec.ValidationError):
        for known in msgspec.structs.fields(line_type):
            right = _RIGHT[known.name]
            if known.name not in fields:
                if known.required:
                    raise ConfigError(place, f"{known.name} is missing, must be {right}") from error
                continue
            try:
                msgspec.convert(fields[known.name], known.type)
            except msgspec.ValidationError:
                value = shown(fields[known.name])
                raise ConfigError(place, f"{known.name} is {value}, must be {right}") from error
    raise ConfigError(place, str(error)) from error
