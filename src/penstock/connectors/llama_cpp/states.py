"""Whole states in a folder: a file for each, bounded in bytes, found by the tokens they are of.

    folder/KEY-SUM-SUM.state    front, tokens │ state of llama.cpp, logits; the sums of both parts
    folder/RANDOM.new           one that is being written

A file gets its name when it is whole and is never changed: processes share a folder, and none waits
for another. Of two that make room at once each may take it: then the folder has one state too many
until the next is written. Nothing is synced: what a loss of power leaves is found out by the sums.

The one rule: a longer state that begins like another one serves for both, so it alone stays.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_128

from penstock.errors import UnavailableError
from penstock.store.disk.folder import open_private_folder

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

FRONT = struct.Struct("<QQ")
"""Bytes of tokens and of the state; what follows are logits."""
STATE, NEW = ".state", ".new"
NAME = re.compile(rf"([0-9a-f]{{32}})-([0-9a-f]{{32}})-([0-9a-f]{{32}}){re.escape(STATE)}")
"""Of a state: its key, and both sums."""
OF_THE_FILE = frozenset({errno.EIO, errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENXIO})
"""Errors of one file: the other states are as good as before."""
LEFT_OVER_S = 3_600.0
"""An unfinished file of that age was left by a process that ended."""


class StoredState(NamedTuple):
    """A state that was read and verified."""

    tokens: NDArray[np.intc]
    state: bytes
    logits: NDArray[np.single]


class StateFolder:
    """States of any models.

    Its calls raise `OSError`, and `UnavailableError` if others can write to the folder.
    """

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self.damaged = 0
        """Files that were removed because a sum was wrong."""
        self._tokens: dict[str, NDArray[np.intc]] = {}
        """Of each file that was looked at."""

    def files(self) -> dict[str, os.stat_result]:
        """What lies there, the least recently used first."""
        os.close(open_private_folder(self.path))
        found = {}
        for name in os.listdir(self.path):
            with suppress(FileNotFoundError):  # Another process has removed it.
                found[name] = (self.path / name).lstat()
        return dict(sorted(found.items(), key=lambda each: each[1].st_mtime_ns))

    def find(self, key: bytes, tokens: NDArray[np.intc]) -> list[tuple[int, str]]:
        """How many of these leading tokens states have, and the names of those: most first."""
        named = map(NAME.fullmatch, self.files())
        names = [match.string for match in named if match and match[1] == key.hex()]
        self._tokens = {name: self._tokens[name] for name in names if name in self._tokens}
        for name in names:
            if name not in self._tokens and (found := self._read(name, whole=False)):
                self._tokens[name] = found.tokens
        reaches = [(common_tokens(each, tokens), name) for name, each in self._tokens.items()]
        return sorted((each for each in reaches if each[0]), reverse=True)

    def read(self, name: str) -> StoredState | None:
        """A state, the most recently used one from now on; `None` if it is damaged or gone."""
        self._touch(name)
        return self._read(name, whole=True)

    def write(
        self, key: bytes, tokens: NDArray[np.intc], state: bytes, logits: NDArray[np.single]
    ) -> int:
        """Writes a state, unless another one serves for it; how many bytes were written."""
        found = self.find(key, tokens)
        if found and found[0][0] == len(tokens):
            self._touch(found[0][1])
            return 0
        covered = {name for reach, name in found if reach == len(self._tokens[name])}
        parts = [FRONT.pack(tokens.nbytes, len(state)), tokens.tobytes()]
        parts += [state, logits.tobytes()]
        name = f"{key.hex()}-{_sum_of(*parts[:2])}-{_sum_of(*parts[2:])}{STATE}"
        size = sum(map(len, parts))
        self._make_room(size, covered)
        new = self.path / f"{secrets.token_hex(16)}{NEW}"
        try:
            with new.open("xb") as file:
                file.writelines(parts)
            new.rename(self.path / name)
        finally:
            new.unlink(missing_ok=True)
        for each in covered:
            (self.path / each).unlink(missing_ok=True)
        return size

    def _touch(self, name: str) -> None:
        with suppress(FileNotFoundError):  # Another process has removed it.
            os.utime(self.path / name, follow_symlinks=False)

    def _make_room(self, size: int, covered: set[str]) -> None:
        if size > self.capacity_bytes:
            room = self.capacity_bytes / 1e6
            raise UnavailableError(f"a state is larger than the {room:,.1f} MB of {self.path}")
        files = self.files()
        total = size + sum(each.st_size for each in files.values())
        for name in sorted(files, key=lambda name: name not in covered):
            is_old = files[name].st_mtime < time.time() - LEFT_OVER_S
            if (name.endswith(STATE) and total > self.capacity_bytes) or (
                name.endswith(NEW) and is_old
            ):
                (self.path / name).unlink(missing_ok=True)
                total -= files[name].st_size

    def _read(self, name: str, *, whole: bool) -> StoredState | None:
        """A state, or its tokens alone; a damaged one is removed."""
        try:
            with (self.path / name).open("rb") as file:
                most = os.fstat(file.fileno()).st_size  # A damaged front may say more.
                front = file.read(FRONT.size).ljust(FRONT.size)
                token_bytes, state_bytes = FRONT.unpack(front)
                tokens = file.read(min(token_bytes, most))
                state = file.read(min(state_bytes, most)) if whole else b""
                logits = file.read() if whole else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in OF_THE_FILE:
                raise
            self._remove_damaged(name)
            return None
        _, sum_of_tokens, sum_of_rest = name.removesuffix(STATE).split("-")
        is_right = sum_of_tokens == _sum_of(front, tokens)
        if is_right and (not whole or sum_of_rest == _sum_of(state, logits)):
            read = np.frombuffer(tokens, dtype=np.intc)
            return StoredState(read, state, np.frombuffer(logits, dtype=np.single))
        self._remove_damaged(name)
        return None

    def _remove_damaged(self, name: str) -> None:
        self.damaged += 1
        with suppress(OSError):  # It is none of ours, or the disk takes no more changes.
            (self.path / name).unlink()


def common_tokens(one: NDArray[np.intc], other: NDArray[np.intc]) -> int:
    """How many leading tokens are equal."""
    count = min(len(one), len(other))
    different = np.flatnonzero(one[:count] != other[:count])
    return int(different[0]) if len(different) else count


def _sum_of(*parts: bytes) -> str:
    digest = xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
