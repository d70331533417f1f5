"""The folder of a disk tier: its lock, its generations, and the heads of its segments.

One process at a time has a folder: `lock` holds its pid and an flock, which the kernel ends with
the process. `generations` is replaced as a whole. If it is damaged, or gone while there are
segments, every space begins a generation that was never used: nothing old is found again.

The one rule: a segment that this process cannot read, because of its key or its version, is
neither changed nor removed unless the user said so.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError, UnavailableError
from penstock.store.base import DIGEST_BYTES
from penstock.store.disk_format import (
    CIPHER_NONE,
    FILE_MODE,
    GENERATIONS_NAME,
    HEAD,
    MAGIC,
    PAGE_BYTES,
    VERSION,
    Geometry,
    read_generations,
    read_head,
    seal_head,
    write_generations,
)
from penstock.store.disk_index import DiskSegment, check_rows, read_table
from penstock.store.disk_io import expect_read, write_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.store.disk_cipher import DiskCipher
    from penstock.store.disk_io import DiskCalls

logger = logging.getLogger(__name__)

FOLDER_MODE = 0o700
SEGMENT_DIGITS = 8
SEGMENT_NAME = re.compile(rf"\d{{{SEGMENT_DIGITS}}}\.segment")


class DiskFolder:
    """A folder that this process has locked.

    Raises:
        UnavailableError: it cannot be made or written to, or another process has it.
    """

    def __init__(self, path: Path, calls: DiskCalls) -> None:
        self.path = path
        self._calls = calls
        self._lock_fd = self._lock()

    def _lock(self) -> int:
        try:
            self.path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fd = self._calls.open(str(self.path / "lock"), flags, FILE_MODE)
        except OSError as error:
            raise UnavailableError(
                f"folder {self.path} cannot be used: {error.strerror}"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise UnavailableError(
                f"folder {self.path} is in use by another store process, pid {holder}"
            ) from error
        except OSError as error:
            os.close(fd)
            raise UnavailableError(
                f"folder {self.path} cannot be locked: {error.strerror}"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        mode = stat.S_IMODE(os.stat(self.path).st_mode)
        if mode & 0o022:
            logger.warning(
                "folder %s has mode %04o, must be 0700: others may change its blocks",
                *(self.path, mode),
            )
        return fd

    def is_ours(self) -> bool:
        """Whether the folder is still the one that was locked: it may have been removed."""
        try:
            found = os.stat(self.path / "lock")
        except OSError:
            return False
        own = os.fstat(self._lock_fd)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def lock_again(self) -> None:
        """After it was removed: makes it, and locks the new one.

        Raises:
            UnavailableError: as at the start.
        """
        fd = self._lock()
        os.close(self._lock_fd)
        self._lock_fd = fd

    def segment_path(self, number: int) -> str:
        return str(self.path / f"{number:08d}.segment")

    def sync(self) -> None:
        """Makes names of files outlive a power loss.

        Raises:
            OSError: the folder cannot be synced.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def find_segments(
        self, cipher: DiskCipher | None, *, ignore_other_versions: bool
    ) -> list[DiskSegment]:
        """All segments, with what their heads say.

        Raises:
            ConfigError: one is of another format version.
            OSError: the folder cannot be read.
        """
        found = []
        names = sorted(name for name in os.listdir(self.path) if SEGMENT_NAME.fullmatch(name))
        for name in names:
            expect_read(str(self.path / name), 0, PAGE_BYTES, self._calls)
        for name in names:
            path = str(self.path / name)
            fd = self._calls.open(path, os.O_RDONLY, FILE_MODE)
            try:
                page = os.pread(fd, PAGE_BYTES, 0)
                size = os.fstat(fd).st_size
            finally:
                os.close(fd)
            segment = DiskSegment(number=int(name[:SEGMENT_DIGITS]), path=path, file_bytes=size)
            try:
                _read_head_into(segment, page, cipher)
            except ValueError as error:
                if not ignore_other_versions:
                    raise ConfigError(
                        "path",
                        f"{path}: {error}; remove the file, or let files of other versions be "
                        "overwritten with `ignore_other_versions`",
                    ) from error
            found.append(segment)
        return found

    def close(self) -> None:
        os.close(self._lock_fd)


class Generations:
    """The generation of each space.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(
        self, folder: DiskFolder, segments: Sequence[DiskSegment], calls: DiskCalls
    ) -> None:
        self._folder = folder.path
        try:
            self._of = read_generations(self._folder)
            lost = bool(segments) and not (self._folder / GENERATIONS_NAME).exists()
        except ValueError as error:
            logger.warning("%s: no block that was saved before is used again", error)
            lost, self._of = True, {}
        if lost:
            # Later than any that was counted, and than any that was drawn like this.
            fresh = time.time_ns()
            self._of = dict.fromkeys(_spaces_in(segments, calls), fresh)
        self.save()

    def of(self, name: bytes) -> int:
        return self._of.get(name, 0)

    def begin(self, name: bytes) -> int:
        """A new one.

        Raises:
            OSError: it counts for this process, and could not be written. What was written before
                is made unreadable, if it can be, so that nothing old is found after a restart.
        """
        self._of[name] = self.of(name) + 1
        self.save()
        return self._of[name]

    def save(self) -> None:
        """Writes all.

        Raises:
            OSError: see `begin`.
        """
        try:
            write_generations(self._folder, self._of)
        except OSError:
            with suppress(OSError):
                os.truncate(self._folder / GENERATIONS_NAME, 0)
            raise


def _spaces_in(segments: Sequence[DiskSegment], calls: DiskCalls) -> set[bytes]:
    """All spaces that rows name."""
    names: set[bytes] = set()
    for segment in segments:
        rows = read_table(segment, calls)
        sound, _ = check_rows(rows, segment.life, segment.part)
        names.update(row.tobytes() for row in rows["space"][sound])
    return names


def write_head(segment: DiskSegment, cipher: DiskCipher | None, calls: DiskCalls) -> None:
    """Makes room for a segment and begins its life, so that it outlives a power loss.

    Raises:
        OSError: it did not begin.
    """
    geometry = segment.geometry
    assert geometry is not None
    head = np.zeros(1, dtype=HEAD)
    head["magic"], head["version"], head["life"] = MAGIC, VERSION, segment.life
    head["age"], head["part"], head["form"] = segment.age, np.void(segment.part), segment.form
    head["block_bytes"], head["slot_bytes"] = geometry.block_bytes, geometry.slot_bytes
    head["slot_count"], head["cell_count"] = geometry.slot_count, geometry.cell_count
    head["algorithm"] = segment.algorithm
    if cipher is not None:
        head["cipher"], head["key_check"] = cipher.number, np.void(cipher.key_check)
    page = memoryview(seal_head(head))
    fd = calls.open(segment.path, os.O_RDWR | os.O_CREAT, FILE_MODE)
    try:
        if os.fstat(fd).st_size != segment.file_bytes:
            os.ftruncate(fd, 0)
            calls.fallocate(fd, 0, segment.file_bytes)
        write_all(fd, [page], 0, calls)
        calls.sync(fd)
    finally:
        os.close(fd)


def _read_head_into(segment: DiskSegment, page: bytes, cipher: DiskCipher | None) -> None:
    """Raises ValueError if the head is of another version."""
    head = read_head(page)
    if head is None:
        return
    # Not from the length of the file: if that was cut, slots before the cut are where they were.
    slots, slot_bytes = int(head["slot_count"]), int(head["slot_bytes"])
    geometry = Geometry(
        segment_bytes=Geometry.slots_offset(slots) + slots * slot_bytes,
        block_bytes=int(head["block_bytes"]),
        cell_count=int(head["cell_count"]),
    )
    own = (
        (CIPHER_NONE, bytes(DIGEST_BYTES)) if cipher is None else (cipher.number, cipher.key_check)
    )
    segment.foreign = (int(head["cipher"]), head["key_check"].tobytes()) != own
    segment.begin_life(
        geometry, life=int(head["life"]), age=int(head["age"]), part=head["part"].tobytes()
    )
    segment.form, segment.algorithm = head["form"].tobytes(), bytes(head["algorithm"])
    segment.known = False
    segment.next_slot = segment.slot_count  # Until its table was read.
