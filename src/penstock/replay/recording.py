"""A trace of live traffic: one line for each request, which `penstock replay` reads.

A line says when a request came, how many tokens it and its answer had, and names the blocks of its
prompt. A name is a hash of the block's key under a salt that is drawn for the recording and kept
nowhere: equal blocks have equal names within one file, and nothing else can be learnt from them.

The one rule: whoever serves never waits. Requests are put into a bounded queue, which costs about a
microsecond; a thread names the blocks and writes. It is woken once for all that comes within a
second, because to wake a thread costs more than the rest. With a full queue a request is left out
and counted; with a full file, or one that cannot be written, recording ends and says so once.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import ConfigError
from penstock.vocabulary.hints import NO_HINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.config import Config
    from penstock.vocabulary.hints import RetentionHints
    from penstock.vocabulary.ids import Key

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


class RecordedLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of a recording."""

    timestamp: float
    """Milliseconds since the recording began."""
    block_tokens: int
    input_length: int
    output_length: int
    blocks: str
    """The names of the prompt's full blocks, in hexadecimal digits, one after the other."""
    penstock: dict[str, float] = {}
    """The client's hints, as it would write them."""


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
        line = RecordedLine(
            timestamp=round(at_s * 1000, 3),
            block_tokens=block_tokens,
            input_length=token_count,
            output_length=request.output_tokens or 0,
            blocks=self._names.of(keys[: token_count // block_tokens]),
            penstock=hints.given,
        )
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
