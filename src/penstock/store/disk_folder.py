"""The folder of a disk tier: who may write to it, its lock, and the heads of its segments.

One process at a time has a folder: `lock` holds its pid and an flock, which the kernel ends with
the process. Sums find accidents, not what somebody else wrote on purpose, so a folder that others
can write to is refused. Files are opened by their names in the folder that was found right,
wherever its path leads later, and links are not followed.

The one rule: a segment that this process cannot read, because of its key or its version, is
neither changed nor removed unless the user said so.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError, UnavailableError
from penstock.store.base import DIGEST_BYTES
from penstock.store.disk_format import (
    CIPHER_NONE,
    FILE_MODE,
    HEAD,
    MAGIC,
    PAGE_BYTES,
    VERSION,
    geometry_of,
    read_head,
    seal_head,
)
from penstock.store.disk_index import DiskSegment
from penstock.store.disk_io import expect_read, write_all

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.store.disk_cipher import DiskCipher
    from penstock.store.disk_io import DiskCalls

logger = logging.getLogger(__name__)

FOLDER_MODE = 0o700
LOCK_NAME = "lock"
SEGMENT_DIGITS = 8
SEGMENT_NAME = re.compile(rf"\d{{{SEGMENT_DIGITS}}}\.segment")
RETIRED_MAX = 8
"""Descriptors of folders that were exchanged: operations of before may be about to use them."""


class DiskFolder:
    """A folder that this process has locked.

    Raises:
        UnavailableError: it cannot be made or written to, others can write to it, or another
            process has it.
    """

    def __init__(self, path: Path, calls: DiskCalls) -> None:
        self.path = path
        self._calls = calls
        self.fd, self._lock_fd = self._take()
        self._retired: list[int] = []

    def _take(self) -> tuple[int, int]:
        """Descriptors of the folder, which is made if need be, and of its lock."""
        fd = self._open()
        try:
            return fd, self._lock(fd)
        except UnavailableError:
            os.close(fd)
            raise

    def _open(self) -> int:
        if self.path.is_symlink():
            raise UnavailableError(
                f"folder {self.path} is a symbolic link to {os.path.realpath(self.path)}, must be "
                "a folder: others may turn the link; give the path that it leads to"
            )
        try:
            self.path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self.path, flags)
        except OSError as error:
            raise UnavailableError(
                f"folder {self.path} cannot be used: {error.strerror}"
            ) from error
        problem = _why_not_ours(self.path, os.fstat(fd))
        if problem:
            os.close(fd)
            raise UnavailableError(problem)
        return fd

    def _lock(self, folder: int) -> int:
        try:
            fd = self._calls.open(LOCK_NAME, os.O_RDWR | os.O_CREAT, FILE_MODE, folder)
        except OSError as error:
            raise UnavailableError(
                f"folder {self.path} cannot be used: {error.strerror}"
            ) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise UnavailableError(f"{self.path / LOCK_NAME} is no regular file: remove it")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
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
        return fd

    def is_ours(self) -> bool:
        """Whether the path still leads to what was locked: it may have been removed or exchanged.

        What is written to a folder without a path is not found after a restart.
        """
        try:
            found = os.stat(self.path / LOCK_NAME, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._lock_fd))

    def lock_again(self) -> None:
        """After it was removed or exchanged: makes it if need be, and locks what is there now.

        Raises `UnavailableError`: as at the start.
        """
        fd, lock_fd = self._take()
        os.close(self._lock_fd)
        self._retired.append(self.fd)
        if len(self._retired) > RETIRED_MAX:
            os.close(self._retired.pop(0))
        self.fd, self._lock_fd = fd, lock_fd

    def segment(self, number: int, file_bytes: int) -> DiskSegment:
        path = str(self.path / f"{number:0{SEGMENT_DIGITS}d}.segment")
        return DiskSegment(number, path, file_bytes, self.fd)

    def remove(self, segment: DiskSegment) -> None:
        """Removes the file of a segment.

        Raises `OSError`: it cannot be removed.
        """
        os.unlink(os.path.basename(segment.path), dir_fd=segment.folder)

    def sync(self) -> None:
        """Makes names of files outlive a power loss.

        Raises `OSError`: the folder cannot be synced.
        """
        os.fsync(self.fd)

    def find_segments(
        self, cipher: DiskCipher | None, *, ignore_other_versions: bool
    ) -> tuple[list[DiskSegment], set[int]]:
        """All segments, with what their heads say, and numbers that other things have.

        Raises `ConfigError`: one is of another format version; `OSError`: the folder cannot be
        read.
        """
        names = sorted(name for name in os.listdir(self.fd) if SEGMENT_NAME.fullmatch(name))
        listed = [self.segment(int(name[:SEGMENT_DIGITS]), 0) for name in names]
        files = [each for each in listed if self.has_file(each)]
        for odd in [each for each in listed if each not in files]:
            logger.warning("%s is ignored: it is no regular file", odd.path)
        for segment in files:
            expect_read(segment, 0, PAGE_BYTES, self._calls)
        found = [
            segment
            for segment in files
            if self._read_head(segment, cipher, ignore_other_versions=ignore_other_versions)
        ]
        return found, {each.number for each in listed} - {each.number for each in found}

    def has_file(self, segment: DiskSegment) -> bool:
        """Whether there is a file for it: not a link, a folder or a pipe."""
        name = os.path.basename(segment.path)
        try:
            found = os.stat(name, dir_fd=segment.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode)

    def _read_head(
        self, segment: DiskSegment, cipher: DiskCipher | None, *, ignore_other_versions: bool
    ) -> bool:
        """Whether a segment can be read; others are ignored."""
        try:
            fd = segment.open(os.O_RDONLY, self._calls)
            try:
                page = os.pread(fd, PAGE_BYTES, 0)
                segment.file_bytes = os.fstat(fd).st_size
            finally:
                os.close(fd)
        except OSError as error:
            logger.warning("%s is ignored: %s", segment.path, error.strerror)
            return False
        try:
            _read_head_into(segment, page, cipher)
        except ValueError as error:
            if not ignore_other_versions:
                raise ConfigError(
                    "path",
                    f"{segment.path}: {error}; remove the file, or let files of other versions be "
                    "overwritten with `ignore_other_versions`",
                ) from error
        return True

    def close(self) -> None:
        for fd in (self._lock_fd, self.fd, *self._retired):
            os.close(fd)


def _why_not_ours(path: Path, found: os.stat_result) -> str:
    """Why others could write to a folder; empty if they cannot.

    Root can write anywhere: a folder of root's is as safe as one of this user's.
    """
    mode, user = stat.S_IMODE(found.st_mode), os.geteuid()
    below = "or give a path below it that does not exist yet: that folder is made right"
    if found.st_uid not in {user, 0}:
        return (
            f"folder {path} belongs to user {found.st_uid}, must belong to user {user}, who runs "
            f"this process: `chown {user} {path}`, {below}"
        )
    if mode & 0o022:
        return (
            f"folder {path} has mode {mode:04o}, must have 0700: others can write to it and forge "
            f"blocks; `chmod 700 {path}`, {below}"
        )
    return ""


def write_head(segment: DiskSegment, cipher: DiskCipher | None, calls: DiskCalls) -> None:
    """Makes room for a segment and begins its life, so that it outlives a power loss.

    Raises `OSError`: it did not begin.
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
    fd = segment.open(os.O_RDWR | os.O_CREAT, calls)
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
    geometry = geometry_of(head)
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
