"""A shared store in a file of SQLite: `kind = "shared"`, `store = "sqlite:/var/cache/kv.db"`."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

from penstock.store.clients import blobs

if TYPE_CHECKING:
    from collections.abc import Sequence

TABLE = "CREATE TABLE IF NOT EXISTS blobs (name TEXT PRIMARY KEY, value BLOB NOT NULL)"
ADD = "INSERT OR IGNORE INTO blobs VALUES (?, ?)"


class SqliteBlobs(blobs.BlobStore):
    """Each call has a connection of its own, so several threads may call at once."""

    def __init__(self, address: str, *, threads: int) -> None:
        super().__init__(threads)
        self._path = address
        self._run(TABLE, [()], timeout_s=10.0)

    def exists(self, names: Sequence[str], *, timeout_s: float) -> list[bool]:
        blobs.check_names(names, timeout_s=timeout_s)
        command = "SELECT 1 FROM blobs WHERE name = ?"
        return [bool(rows) for rows in self._run(command, [(n,) for n in names], timeout_s)[0]]

    def read(self, reads: Sequence[blobs.BlobRead], *, timeout_s: float) -> list[blobs.BlobOutcome]:
        blobs.check_reads(reads, timeout_s=timeout_s)
        found = self._values([each.name for each in reads], timeout_s)
        return [_fill(read, value) for read, value in zip(reads, found, strict=True)]

    def write(self, writes: Sequence[blobs.BlobWrite], *, timeout_s: float) -> list[str]:
        blobs.check_names([name for name, _ in writes], timeout_s=timeout_s)
        self._run(ADD, [(name, b"".join(buffers)) for name, buffers in writes], timeout_s)
        return [""] * len(writes)

    def forget(self, names: Sequence[str], *, timeout_s: float) -> None:
        blobs.check_names(names, timeout_s=timeout_s)
        self._run("DELETE FROM blobs WHERE name = ?", [(name,) for name in names], timeout_s)

    def get(self, name: str, *, timeout_s: float) -> bytes | None:
        blobs.check_names([name], timeout_s=timeout_s)
        return self._values([name], timeout_s)[0]

    def create(self, name: str, record: bytes, *, timeout_s: float) -> bool:
        blobs.check_record(name, record, timeout_s=timeout_s)
        return self._run(ADD, [(name, record)], timeout_s)[1] == 1

    def replace(self, name: str, record: bytes, *, timeout_s: float) -> None:
        blobs.check_record(name, record, timeout_s=timeout_s)
        self._run("INSERT OR REPLACE INTO blobs VALUES (?, ?)", [(name, record)], timeout_s)

    def close(self) -> None:
        """Nothing: no connection stays open."""

    def _values(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        command = "SELECT value FROM blobs WHERE name = ?"
        found, _ = self._run(command, [(name,) for name in names], timeout_s)
        return [rows[0][0] if rows else None for rows in found]

    def _run(self, command: str, asked: list[Any], timeout_s: float) -> tuple[list[Any], int]:
        """The rows of each answer, and how many were changed."""
        try:
            with closing(sqlite3.connect(self._path, timeout_s)) as db, db:
                return [db.execute(command, each).fetchall() for each in asked], db.total_changes
        except sqlite3.Error as error:
            raise blobs.BlobStoreError(f"SQLite: {error}") from error


def _fill(read: blobs.BlobRead, value: bytes | None) -> blobs.BlobOutcome:
    if value is None or (read.end > len(value) and not read.whole):
        return blobs.BlobOutcome.MISSING if value is None else blobs.BlobOutcome.SHORT
    for offset, target in read.ranges:
        part = value[offset : offset + target.nbytes]
        target[: len(part)] = part
    return blobs.BlobOutcome.READ
