"""A folder as a shared store: a file for each value, for engines of one machine or a network mount.

A file gets its name when it is whole: it is written under another name and linked, which fails if
there is one already, so a value is written once whoever writes it. Bytes are not synced: what a
loss of power leaves is found out by their sums.

The one rule: names of values cannot leave the folder, nor meet those of folders. Files begin with
`=`, which no name has.

A system call on a mount that hangs cannot be ended: a call's time is checked between values.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import time
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.store.clients.blobs import (
    RECORD_BYTES_MAX,
    BlobOutcome,
    BlobRange,
    BlobStore,
    BlobStoreError,
    check_names,
    check_reads,
    check_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.store.clients.blobs import BlobRead, BlobWrite

PART_CHARACTERS_MAX = 200
"""A file's name has at most 255 bytes; a longer part of a name becomes several folders."""
LEFT_OVER_S = 3_600.0
"""An unfinished file of that age was left by a process that ended."""
FOLDERS_KEPT = 256
"""Folders whose paths are remembered: one for each model, generation and piece."""
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Without following a link, nor waiting for the other end of a pipe."""
NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
OF_THE_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO})
"""Errors of one file: the value is none, and is removed. Where that fails too, the folder does."""
BUFFERS_MAX = 512
"""Of one system call; Linux takes 1,024."""


class FolderBlobs(BlobStore):
    """A `BlobStore` of files."""

    def __init__(self, folder: Path, *, threads: int = 8) -> None:
        """Opens a folder, which is made if it is missing.

        Raises `UnavailableError`: it cannot be made or used.
        """
        # Texts, not paths: of a small value, a path's arithmetic takes as long as a system call.
        root = os.fspath(folder)
        self._values, self._records = f"{root}/values", f"{root}/records"
        self._unfinished = f"{root}/unfinished"
        super().__init__(threads)
        try:
            for each in (self._values, self._records, self._unfinished):
                os.makedirs(each, exist_ok=True)
            self._remove_left_over()
        except OSError as error:
            raise UnavailableError(f"{folder} cannot be used: {error.strerror}") from error

    def exists(self, names: Sequence[str], *, timeout_s: float) -> list[bool]:
        timer = _Timer(check_names(names, timeout_s=timeout_s))
        return [timer.in_time() and os.path.exists(_path(self._values, name)) for name in names]

    def read(self, reads: Sequence[BlobRead], *, timeout_s: float) -> list[BlobOutcome]:
        timer = _Timer(check_reads(reads, timeout_s=timeout_s))
        return [self._read(each) for each in reads if timer.in_time()]

    def _read(self, read: BlobRead) -> BlobOutcome:
        try:
            file = os.open(_path(self._values, read.name), READ_FLAGS)
        except (FileNotFoundError, PermissionError):
            return BlobOutcome.MISSING  # One that another user has written is not ours to remove.
        except OSError as error:
            if error.errno in OF_THE_FILE:
                return BlobOutcome.SHORT
            raise _problem(error) from error
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                return BlobOutcome.SHORT
            size = found.st_size
            ranges = read.ranges
            if read.whole:
                ranges = [BlobRange(offset, wanted[:size]) for offset, wanted in ranges]
            whole = all(offset + wanted.nbytes <= size for offset, wanted in ranges) and all(
                _fill(file, *each) for each in _adjoining(ranges)
            )
        except OSError as error:
            if error.errno in OF_THE_FILE:
                return BlobOutcome.SHORT
            raise _problem(error) from error
        finally:
            os.close(file)
        return BlobOutcome.READ if whole else BlobOutcome.SHORT

    def write(self, writes: Sequence[BlobWrite], *, timeout_s: float) -> list[str]:
        timer = _Timer(check_names([write.name for write in writes], timeout_s=timeout_s))
        problems = []
        for name, buffers in writes:
            timer.in_time()
            try:
                self._link(_path(self._values, name), buffers)
            except OSError as error:
                problems.append(error.strerror or str(error))
            else:
                problems.append("")
        return problems

    def forget(self, names: Sequence[str], *, timeout_s: float) -> None:
        timer = _Timer(check_names(names, timeout_s=timeout_s))
        for name in names:
            timer.in_time()
            for root in (self._values, self._records):
                try:
                    _remove(_path(root, name))
                except OSError as error:
                    raise _problem(error) from error

    def get(self, name: str, *, timeout_s: float) -> bytes | None:
        check_names([name], timeout_s=timeout_s)
        try:
            file = os.open(_path(self._records, name), READ_FLAGS)
            try:
                is_file = stat.S_ISREG(os.fstat(file).st_mode)
                return os.read(file, RECORD_BYTES_MAX) if is_file else b""
            finally:
                os.close(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in OF_THE_FILE:
                return b""
            raise _problem(error) from error

    def create(self, name: str, record: bytes, *, timeout_s: float) -> bool:
        check_record(name, record, timeout_s=timeout_s)
        try:
            return self._link(_path(self._records, name), [memoryview(record)])
        except OSError as error:
            raise _problem(error) from error

    def replace(self, name: str, record: bytes, *, timeout_s: float) -> None:
        check_record(name, record, timeout_s=timeout_s)
        path = _path(self._records, name)
        try:
            unfinished = self._write([memoryview(record)])
            try:
                _in_folder_of(path, _replace, unfinished)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(unfinished)
        except OSError as error:
            raise _problem(error) from error

    def close(self) -> None:
        """Nothing: no file stays open."""

    def _link(self, path: str, buffers: Sequence[memoryview]) -> bool:
        """Makes a file of this content unless there is one; whether it did.

        Neither the name nor its folder is asked for: mostly the one is free and the other there.
        """
        unfinished = self._write(buffers)
        try:
            _in_folder_of(path, os.link, unfinished)
        except FileExistsError:
            return False
        finally:
            os.unlink(unfinished)
        return True

    def _write(self, buffers: Sequence[memoryview]) -> str:
        path = f"{self._unfinished}/{secrets.token_hex(16)}"
        try:
            file = os.open(path, NEW_FLAGS, 0o600)
        except FileNotFoundError:  # Somebody has removed all there was.
            os.makedirs(self._unfinished, exist_ok=True)
            file = os.open(path, NEW_FLAGS, 0o600)
        try:
            _write_all(file, [each.cast("B") for each in buffers if each.nbytes])
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        return path

    def _remove_left_over(self) -> None:
        before = time.time() - LEFT_OVER_S
        with os.scandir(self._unfinished) as entries:
            for each in entries:
                with suppress(FileNotFoundError):
                    if each.stat().st_mtime < before:
                        os.unlink(each.path)


class _Timer:
    """The time of one call."""

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    def in_time(self) -> bool:
        """True, or the call ends."""
        if time.monotonic() > self._until:
            raise BlobStoreError("the folder did not answer in time")
        return True


def _path(root: str, name: str) -> str:
    before, _, last = name.rpartition("/")
    *more, file = _cut(last)
    return "/".join((_folder(root, before), *more, f"={file}"))


@lru_cache(maxsize=FOLDERS_KEPT)
def _folder(root: str, before: str) -> str:
    """Where values lie whose names begin alike: most of them have few beginnings."""
    parts = [piece for part in before.split("/") if part for piece in _cut(part)]
    return "/".join((root, *parts))


def _cut(part: str) -> list[str]:
    """A part of a name, in pieces that a file system takes; all but the last end with `+`."""
    size = PART_CHARACTERS_MAX
    pieces = [part[first : first + size] for first in range(0, len(part), size)]
    return [f"{piece}+" for piece in pieces[:-1]] + pieces[-1:]


def _in_folder_of(path: str, name: Callable[[str, str], None], unfinished: str) -> None:
    """Gives a file its name, in a folder that is made if it is missing."""
    try:
        name(unfinished, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        name(unfinished, path)


def _replace(unfinished: str, path: str) -> None:
    """Gives a file a name, whatever has it."""
    try:
        os.replace(unfinished, path)
    except IsADirectoryError:
        shutil.rmtree(path)
        os.replace(unfinished, path)


def _remove(path: str) -> None:
    """Removes what has the name of a value or a record, whatever it is."""
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path)


def _adjoining(ranges: Sequence[BlobRange]) -> list[tuple[int, list[memoryview]]]:
    """Ranges that follow each other without a gap as one, with where each begins."""
    runs: list[tuple[int, list[memoryview]]] = []
    end = -1
    for offset, target in ranges:
        if offset == end:
            runs[-1][1].append(target)
        else:
            runs.append((offset, [target]))
        end = offset + target.nbytes
    return runs


def _fill(file: int, offset: int, targets: list[memoryview]) -> bool:
    """Reads from a place on until all targets are full; whether the file was long enough."""
    while targets:
        count = os.preadv(file, targets[:BUFFERS_MAX], offset)
        if not count and any(each.nbytes for each in targets):
            return False  # It was cut just now.
        offset += count
        _pass_over(targets, count)
    return True


def _pass_over(buffers: list[memoryview], count: int) -> None:
    """Takes bytes off that are done, and empty buffers in front."""
    while buffers and count >= buffers[0].nbytes:
        count -= buffers.pop(0).nbytes
    if count:
        buffers[0] = buffers[0][count:]


def _write_all(file: int, buffers: list[memoryview]) -> None:
    while buffers:
        _pass_over(buffers, os.writev(file, buffers[:BUFFERS_MAX]))


def _problem(error: OSError) -> BlobStoreError:
    return BlobStoreError(f"a file cannot be used: {error.strerror or error}")
