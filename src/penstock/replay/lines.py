"""Lines of files: plain ones, compressed ones, pipes, and the traces that come with Penstock.

What a file is says its content, not its name: gzip, xz and zstd begin with bytes that no JSON
begins with. What other programs put before a text, a byte order mark, is left out.

A pipe can be read once only. Whoever has to read a trace twice makes a copy of it first, and says
where that lies; messages name the pipe all the same.
"""

from __future__ import annotations

import gzip
import io
import lzma
import shutil
import tempfile
import zlib
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import ConfigError, UnavailableError, install_hint

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from typing import IO


LINE_BYTES_MAX = 64 << 20
"""A prompt of a million tokens takes 8 MB; a longer line than this is no request."""
SHIPPED = ("conversation", "synthetic")
"""The traces that come with Penstock."""
STANDARD_INPUT = "-"
GZIP, XZ, ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
READ_BYTES = 1 << 17
"""What is asked of a file at a time: every call goes through Python."""


def lines_of(name: str, copies: Mapping[str, str] | None = None) -> Generator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers.

    Args:
        name: The file, `-` for standard input, or a trace that comes with Penstock.
        copies: Where the content of pipes lies: those of `copies_of_pipes`.

    Raises:
        ConfigError: it cannot be read; the message has its name and the line.
        UnavailableError: a package that its compression needs is not installed.
    """
    number = 0
    try:
        with _open(name, (copies or {}).get(name)) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(
                        f"{name}:{number}",
                        f"is longer than {LINE_BYTES_MAX} bytes, must be one request",
                    )
                if number == 1:
                    line = line.removeprefix(BYTE_ORDER_MARK)
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


@contextmanager
def copies_of_pipes(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Copies what comes through pipes into files, so that it can be read again; by their names.

    Raises:
        ConfigError: one of them is a device, which may never end.
        UnavailableError: there is no room for the copy.
    """
    with ExitStack() as opened:
        copies: dict[str, str] = {}
        for name in dict.fromkeys(names):
            path = _path(name)
            if path.is_char_device():
                raise ConfigError(name, "is a device, must be a file or a pipe")
            if not (path.is_fifo() or path.is_socket()):
                continue
            try:
                copy = opened.enter_context(tempfile.NamedTemporaryFile(prefix="penstock-"))
                with path.open("rb") as pipe:
                    shutil.copyfileobj(pipe, copy, READ_BYTES)
                copy.flush()
            except OSError as error:
                raise UnavailableError(
                    f"{name} is a pipe, of which a copy is needed in {tempfile.gettempdir()}: "
                    f"{error.strerror or error}; set TMPDIR to a folder with room, or give a file"
                ) from error
            copies[name] = copy.name
        yield copies


def _path(name: str) -> Path:
    return Path("/dev/stdin" if name == STANDARD_INPUT else name)


@contextmanager
def _open(name: str, copy: str | None) -> Iterator[IO[bytes]]:
    """The content of a file, whatever it is compressed with."""
    with ExitStack() as opened:
        if copy is None and name in SHIPPED and not Path(name).exists():
            packed = files("penstock.replay").joinpath("traces", f"{name}.jsonl.xz")
            file: IO[bytes] = opened.enter_context(packed.open("rb"))
        else:
            file = opened.enter_context((Path(copy) if copy else _path(name)).open("rb"))
        head = file.read(len(XZ))
        if file.seekable():
            file.seek(0)
        else:
            file = io.BufferedReader(_HeadAgain(head, file), READ_BYTES)
        if head.startswith(GZIP):
            file = cast("IO[bytes]", opened.enter_context(gzip.open(file)))
        elif head.startswith(XZ):
            file = opened.enter_context(lzma.open(file))
        elif head.startswith(ZSTD):
            file = io.BufferedReader(_Unpacked(name, file), READ_BYTES)
        yield file


class _HeadAgain(io.RawIOBase):
    """A pipe of which the first bytes were read already."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:  # noqa: ANN401 - a buffer has no name in 3.11
        if not self._head:
            return cast("io.BufferedReader", self._rest).readinto1(room)
        target = memoryview(room)
        given, self._head = self._head[: len(target)], self._head[len(target) :]
        target[: len(given)] = given
        return len(given)


class _Unpacked(io.RawIOBase):
    """The content of a file that zstd made; `EOFError` where its end is missing."""

    def __init__(self, name: str, packed: IO[bytes]) -> None:
        try:
            import zstandard  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise UnavailableError(
                f"{name} is compressed by zstd, which needs a package that is not installed "
                f"({error.name}): {install_hint('compression')}"
            ) from error
        self._zstandard = zstandard
        self._packed = packed
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:  # noqa: ANN401 - a buffer has no name in 3.11
        while not self._ready:
            # A file may have several frames, one after the other.
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._packed.read(READ_BYTES)
            if not packed:
                if self._begun and not self._frame.eof:
                    raise EOFError("the file ends before its end marker was reached")
                return 0
            if self._frame.eof:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            self._begun = True
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from error
        target = memoryview(room)
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
