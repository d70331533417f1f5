"""Traces: files with one request a line, recorded from live traffic and read as a stream.

A line says when a request came, how many tokens it and its answer had, and names the blocks of its
prompt. A name is a hash of the block's key under a salt that is drawn for the recording and kept
nowhere: equal blocks have equal names within one file, and nothing else can be learnt from them.

The one rule: whoever serves never waits. Requests are put into a bounded queue, which costs about a
microsecond; a thread names the blocks and writes. It is woken once for all that comes within a
second, because to wake a thread costs more than the rest. With a full queue a request is left out
and counted; with a full file, or one that cannot be written, recording ends and says so once.

| format    | a line has                                                                         |
|-----------|------------------------------------------------------------------------------------|
| Mooncake  | `timestamp`, `input_length`, `output_length`, `hash_ids` (one for N tokens)        |
| tokens    | `timestamp`, `tokens` (ids), and perhaps `output_length`, `tenant`                 |
| OpenAI    | `timestamp` or `created` (in seconds), `messages` or `prompt`, perhaps in a `body` |
| recording | what `recording` writes: names of blocks; a last line that is cut is left out      |

`timestamp` is in milliseconds. The first line of a file says which format the file has. Text is not
tokenized: four bytes of it count as a token, so that equal texts have equal blocks.

The one rule that must not break: a line that is wrong ends the replay with a message that names the
file, the line, the field, its value and what would be right. Nothing is skipped but empty lines.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import blake2b
from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, cast

import msgspec
from xxhash import xxh3_64_digest, xxh3_128_digest

from penstock.errors import ConfigError, shown
from penstock.replay.lines import lines_of
from penstock.vocabulary.hints import (
    HINT_FIELDS,
    NO_HINTS,
    RETENTIONS,
    RetentionHints,
    read_hints,
    with_retention,
)
from penstock.vocabulary.keys import BLOCK_TOKENS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.config import Config
    from penstock.vocabulary.keys import Key


logger = logging.getLogger(__name__)

NAME_BYTES = 8
"""Of a block: among 30 million blocks, two have the same one in 1 of 40,000 recordings."""
QUEUE_MAX = 4096
"""Beginnings and ends of requests that wait to be written."""
LINGER_S = 1.0
"""How long the writing thread lets more of them come, once there is one."""
EARLY = 1024
"""With so many it does not wait any longer."""
WRITE_BYTES = 1 << 15
"""Lines are written together up to this length: 2,000 blocks or so, in 2 ms. To write lets the
engine's thread run, which shares the interpreter."""
NAMES_KEPT = 1 << 16
"""Blocks whose names are kept: those of a conversation come again with every turn."""
OPEN_MAX = 1024
"""Requests that are held back because an earlier one has not ended: lines are in the order of
arrival. With more, the earliest is written without the length of its answer."""
CLOSE_S = 10.0
FILES_MAX = 1000
"""Recordings of one name; a server that is restarted in a loop does not fill a folder."""


_Came = tuple[str, float, "Sequence[Key]", int, int, "RetentionHints"]
"""A request, when it came, its keys, tokens, tokens a block, and hints."""
_Ended = tuple[str, int]
"""A request, and the tokens of its answer."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request whose line is not written yet."""

    came: _Came
    output_tokens: int | None = None


class Recorder:
    """Writes the requests of one server or engine into a file of its own.

    Args:
        path: The file. If it is there, as after a restart, one with a number in its name.
        bytes_max: Where recording ends.
        clock: Seconds, for the times of requests.

    Raises:
        ConfigError: the file cannot be made.
    """

    def __init__(
        self, path: str, *, bytes_max: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_left = bytes_max
        self._clock = clock
        self._began_s = clock()
        self._names = _Names(secrets.token_bytes(32))
        self._waiting: deque[_Came | _Ended] = deque()
        self._some, self._many = threading.Event(), threading.Event()
        """Whether requests wait, and whether the writing thread should not wait for more."""
        self._open: deque[_Open] = deque()
        """In the order in which they came."""
        self._running: dict[str, _Open] = {}
        """Those of them that have not ended."""
        self._unwritten = bytearray()
        self.left_out = 0
        """Requests that the writer was too slow for."""
        self._closing = self._ended = False
        self.path, self._file = _make_file(path)
        """Where it records."""
        self._thread = threading.Thread(target=self._write, name="penstock-record", daemon=True)
        self._thread.start()

    def begin(
        self,
        request: str,
        keys: Sequence[Key],
        *,
        token_count: int,
        block_tokens: int,
        hints: RetentionHints = NO_HINTS,
    ) -> None:
        """A request came.

        Args:
            request: Its name until it ends, which is not written.
            keys: Those of its full blocks; more may be added to the list meanwhile.
            token_count: Of its prompt.
            block_tokens: Of a block.
            hints: What its client said about its blocks.
        """
        at_s = self._clock() - self._began_s
        if not self._put((request, at_s, keys, token_count, block_tokens, hints)):
            self.left_out += not self._ended

    def end(self, request: str, output_tokens: int) -> None:
        """A request ended, after so many tokens."""
        self._put((request, output_tokens))

    def close(self) -> None:
        """Writes what is still open, and ends; may be called twice."""
        self._closing = True
        self._some.set()
        self._many.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            # The disk does not answer: the process need not wait for it.
            logger.warning(
                "recording: the last requests are not written, the file takes too long: file=%s",
                self.path,
            )

    def _put(self, what: _Came | _Ended) -> bool:
        waiting = self._waiting
        if self._ended or len(waiting) >= QUEUE_MAX:
            return False
        waiting.append(what)
        # Looked at first: it costs a tenth of what setting it again does.
        if not self._some.is_set():
            self._some.set()
        elif len(waiting) >= EARLY and not self._many.is_set():
            self._many.set()
        return True

    def _write(self) -> None:
        try:
            while not self._ended:
                self._some.wait()
                self._many.wait(LINGER_S)
                last = self._closing
                # Before the queue is emptied: what comes from now on wakes this thread again.
                self._many.clear()
                self._some.clear()
                self._take_all()
                if last:
                    break
            while self._open:
                self._add_line(self._take_first())
            self._flush()
        except OSError as error:
            logger.warning("recording ended: file=%s cause=%s", self.path, error.strerror)
        finally:
            self._ended = True
            self._waiting.clear()
            self._open.clear()
            self._running.clear()
            os.close(self._file)
            if self.left_out:
                logger.warning(
                    "recording: requests left out, the file is slower than they come: file=%s "
                    "requests=%d",
                    self.path,
                    self.left_out,
                )

    def _take_all(self) -> None:
        for _ in range(len(self._waiting)):
            self._take(self._waiting.popleft())
        self._flush()

    def _take(self, what: _Came | _Ended) -> None:
        name = what[0]
        # A name that comes again stands for another request: clients may choose names.
        before = self._running.pop(name, None)
        if before is not None:
            before.output_tokens = what[1] if len(what) == 2 else 0
        if len(what) != 2:
            came = _Open(what)
            self._running[name] = came
            self._open.append(came)
        while self._open and (
            self._open[0].output_tokens is not None or len(self._open) > OPEN_MAX
        ):
            self._add_line(self._take_first())

    def _take_first(self) -> _Open:
        first = self._open.popleft()
        if self._running.get(first.came[0]) is first:
            del self._running[first.came[0]]
        return first

    def _add_line(self, request: _Open) -> None:
        if self._ended:
            return
        _, at_s, keys, token_count, block_tokens, hints = request.came
        # The fields of `RecordingLine`.
        line: dict[str, object] = {
            "timestamp": round(at_s * 1000, 3),
            "block_tokens": block_tokens,
            "input_length": token_count,
            "output_length": request.output_tokens or 0,
            "blocks": self._names.of(keys[: token_count // block_tokens]),
        }
        if hints.given:
            line["penstock"] = hints.given
        text = msgspec.json.encode(line) + b"\n"
        if len(text) > self._bytes_left:
            self._flush()
            self._ended = True
            logger.warning(
                "recording ended: file=%s cause=it is full (serve.record_mib)", self.path
            )
            return
        self._bytes_left -= len(text)
        self._unwritten += text
        if len(self._unwritten) >= WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        while self._unwritten:
            # A line that is cut, by a full disk or a kill, is the last one: reading leaves it out.
            written = os.write(self._file, self._unwritten)
            del self._unwritten[:written]


class _Names:
    """Names of blocks under a salt; of some that were named lately the name is kept."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._kept: dict[Key, bytes] = {}
        self._older: dict[Key, bytes] = {}
        """Of the time before `_kept` was full; what is used again goes over."""

    def of(self, keys: Sequence[Key]) -> str:
        """The names of blocks in hexadecimal digits, one after the other."""
        kept, older, salt = self._kept, self._older, self._salt
        names = []
        for key in keys:
            name = kept.get(key)
            if name is None:
                name = older.get(key)
                if name is None:
                    # The salt first, in the same block: two thirds of the time of a keyed hash.
                    name = blake2b(salt + key, digest_size=NAME_BYTES).digest()
                kept[key] = name
            names.append(name)
        if len(kept) >= NAMES_KEPT // 2:
            self._older, self._kept = kept, {}
        return b"".join(names).hex()


def _make_file(path: str) -> tuple[str, int]:
    """A new file of this name, or of this name with a number: each recording has its own salt."""
    stem, extension = os.path.splitext(path)
    names = (path, *(f"{stem}-{number}{extension}" for number in range(2, FILES_MAX + 1)))
    # Only for its owner: when somebody asked for what length is nobody else's affair.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for name in names:
        try:
            return name, os.open(name, flags, 0o600)
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError("serve.record", f"is {path!r}, cannot be written: {why}") from error
    raise ConfigError(
        "serve.record", f"is {path!r}, and there are {FILES_MAX} such files: remove some"
    )


def recorder_of(config: Config) -> Recorder | None:
    """The recorder that a configuration asks for.

    Raises:
        ConfigError: its file cannot be made.
    """
    serve = config.serve
    if serve is None or not serve.record:
        return None
    recorder = Recorder(serve.record, bytes_max=serve.record_mib << 20)
    logger.info("recording: file=%s mib=%d", Path(recorder.path).resolve(), serve.record_mib)
    return recorder


ID_TOKENS = 512
"""The tokens of one of `hash_ids`, as Mooncake writes them."""
LIKELY_ID_TOKENS = tuple(2**power for power in range(13))
"""Sizes of blocks that engines have, from 1 to 4096."""
TEXT_TOKEN_BYTES = 4
"""English text has about four bytes a token."""
TOKENS_MAX = 1 << 27
"""Of one request: more than any model takes, and a bound on the memory of one line."""
ID_MAX = 2**63 - 1
MILLISECONDS_MAX = 1e15
"""Beyond any calendar; a time above it is a mistake of units."""


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
    """Since the recording began."""
    input_length: _Tokens
    blocks: str
    """The names of the prompt's full blocks, in hexadecimal digits, one after the other."""
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)]
    output_length: _Output = 0
    penstock: dict[str, Any] | None = None
    """The client's hints, as it would write them."""


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
    """Reads files of a trace for a cache with blocks of a given size.

    Args:
        config: That of the cache.
        id_tokens: The tokens that one of `hash_ids` stands for, where it is not `ID_TOKENS`.
        copies: Where the content of pipes lies, see `penstock.replay.lines`.
    """

    def __init__(
        self,
        config: Config,
        *,
        id_tokens: int | None = None,
        copies: Mapping[str, str] | None = None,
    ) -> None:
        # Without the secret salt: it decides who can compute keys, not what is found.
        self._config = replace(config, salt="")
        self._block_tokens = config.cache.block_tokens
        self._id_tokens = id_tokens or ID_TOKENS
        self._only_ids = id_tokens is not None
        self._copies = copies or {}
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
        for line_number, line in lines_of(name, self._copies):
            place = f"{name}:{line_number}"
            if decoder is None:
                line_type, convert = self._format_of(line, place)
                self._require_sizes(line_type, place)
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

    def _require_sizes(self, line_type: type, place: str) -> None:
        """Refuses blocks that the ids of a file cannot be divided into, or be put together to."""
        if line_type is not MooncakeLine:
            if self._only_ids:
                raise ConfigError(
                    "--trace-block-tokens",
                    f"is {self._id_tokens}, must be left out: {place} has no hash_ids",
                )
        elif self._id_tokens % self._block_tokens and self._block_tokens % self._id_tokens:
            raise ConfigError(
                "cache.block_tokens",
                f"is {self._block_tokens}, must divide {self._id_tokens} or be a multiple of it: "
                f"the trace has an id for every {self._id_tokens} tokens",
            )

    def _from_mooncake(self, line: MooncakeLine, seed: bytes) -> TraceRequest:
        ids, id_tokens = line.hash_ids, self._id_tokens
        wanted = -(-line.input_length // id_tokens)
        # Some name full blocks only; those of a cache with smaller ones need the last id, too.
        least = line.input_length // id_tokens if self._block_tokens >= id_tokens else wanted
        if not least <= len(ids) <= wanted:
            raise ValueError(_wrong_count(line, id_tokens, wanted))
        full = line.input_length // self._block_tokens
        keys: list[bytes] = []
        key = seed
        # Each key contains those before it: an id that follows other blocks is another block.
        for block_id in ids:
            key = xxh3_128_digest(key + block_id.to_bytes(8, "little"))
            keys.append(key)
        if self._block_tokens > id_tokens:
            # The last of several ids names them all.
            times = self._block_tokens // id_tokens
            keys = keys[times - 1 :: times]
        elif self._block_tokens < id_tokens:
            parts = range(id_tokens // self._block_tokens)
            ends = [part.to_bytes(4, "little") for part in parts]
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


def natural_block_tokens(
    name: str, *, id_tokens: int | None = None, copies: Mapping[str, str] | None = None
) -> int:
    """The block size at which a file is read with the fewest blocks and nothing lost.

    Raises:
        ConfigError: the file cannot be read.
    """
    with closing(lines_of(name, copies)) as lines:
        for number, line in lines:
            fields = _object_in(line, f"{name}:{number}")
            if "hash_ids" in fields:
                return id_tokens or ID_TOKENS
            recorded = fields.get("block_tokens", 16)
            known = type(recorded) is int and 1 <= recorded <= BLOCK_TOKENS_MAX
            return recorded if "blocks" in fields and known else 16
    raise ConfigError(name, "has no request, must have at least one line")


def _wrong_count(line: MooncakeLine, id_tokens: int, wanted: int) -> str:
    count, tokens = len(line.hash_ids), line.input_length
    text = (
        f"hash_ids has {count} ids, must have {wanted}: one for each {id_tokens} of {tokens} tokens"
    )
    likely = [size for size in LIKELY_ID_TOKENS if -(-tokens // size) == count]
    return f"{text}; or --trace-block-tokens {likely[0]}" if len(likely) == 1 else text


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
