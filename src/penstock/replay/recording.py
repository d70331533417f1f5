"""A trace of live traffic: one line for each request, which `penstock replay` reads.

A line says when a request came, how many tokens it and its answer had, and names the blocks of its
prompt. A name is a hash of the block's key under a salt that is drawn for the recording and kept
nowhere: equal blocks have equal names within one file, and nothing else can be learnt from them.

The one rule: whoever serves never waits. Requests are put into a bounded queue; a thread names the
blocks and writes. With a full queue a request is left out and counted; with a full file, or one
that cannot be written, recording ends and says so once.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from contextlib import suppress
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


@dataclass(slots=True, eq=False)
class _Open:
    """A request whose line is not written yet."""

    at_s: float
    keys: Sequence[Key]
    token_count: int
    block_tokens: int
    hints: RetentionHints
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
        self._salt = secrets.token_bytes(32)
        self._queue: queue.Queue[tuple[str, _Open | int] | None] = queue.Queue(QUEUE_MAX)
        self._open: dict[str, _Open] = {}
        self.left_out = 0
        """Requests that the writer was too slow for."""
        self._ended = False
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
            keys: Those of its full blocks; the caller does not change the list.
            token_count: Of its prompt.
            block_tokens: Of a block.
            hints: What its client said about its blocks.
        """
        if not self._ended:
            came = _Open(self._clock() - self._began_s, keys, token_count, block_tokens, hints)
            self.left_out += not self._put((request, came))

    def end(self, request: str, output_tokens: int) -> None:
        """A request ended, after so many tokens."""
        if not self._ended:
            self._put((request, output_tokens))

    def close(self) -> None:
        """Writes what is still open, and ends; may be called twice."""
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._queue.put(None, timeout=CLOSE_S)
                self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            # The disk does not answer: the process need not wait for it.
            logger.warning(
                "recording: the last requests are not written, the file takes too long: file=%s",
                self.path,
            )

    def _put(self, what: tuple[str, _Open | int]) -> bool:
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            return False
        return True

    def _write(self) -> None:
        try:
            while not self._ended and (found := self._queue.get()) is not None:
                self._take(*found)
            for request in list(self._open):
                self._write_line(self._open.pop(request))
        except OSError as error:
            logger.warning("recording ended: file=%s cause=%s", self.path, error.strerror)
        finally:
            self._ended = True
            self._open.clear()
            os.close(self._file)
            if self.left_out:
                logger.warning(
                    "recording: requests left out, the file is slower than they come: file=%s "
                    "requests=%d",
                    self.path,
                    self.left_out,
                )

    def _take(self, request: str, what: _Open | int) -> None:
        if isinstance(what, _Open):
            self._open[request] = what
        elif request in self._open:
            self._open[request].output_tokens = what
        while self._open:
            first = next(iter(self._open))
            if self._open[first].output_tokens is None and len(self._open) <= OPEN_MAX:
                return
            self._write_line(self._open.pop(first))

    def _write_line(self, request: _Open) -> None:
        if self._ended:
            return
        salt = self._salt
        line = RecordedLine(
            timestamp=round(request.at_s * 1000, 3),
            block_tokens=request.block_tokens,
            input_length=request.token_count,
            output_length=request.output_tokens or 0,
            blocks="".join(
                blake2b(key, digest_size=NAME_BYTES, key=salt).hexdigest() for key in request.keys
            ),
            penstock=request.hints.given,
        )
        text = msgspec.json.encode(line) + b"\n"
        if len(text) > self._bytes_left:
            self._ended = True
            logger.warning(
                "recording ended: file=%s cause=it is full (serve.record_mib)", self.path
            )
            return
        while text:
            # A line that is cut, by a full disk or a kill, is the last one: reading leaves it out.
            written = os.write(self._file, text)
            self._bytes_left -= written
            text = text[written:]


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
