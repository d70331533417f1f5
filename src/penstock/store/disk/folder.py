"""The folder of a disk tier: its lock, the heads of its segments, and which generations count.

One process at a time has a folder: `lock` holds its pid and an flock, which the kernel ends with
the process. Sums find accidents, not what somebody else wrote on purpose, so a folder that others
can write to is refused. Files are opened by their names in the folder that was found right,
wherever its path leads later, and links are not followed.

Only blocks of the generation that counts are found; a reset begins a new one. A generation is a
number that grows with each reset of its space, and random bits:

    generation = number << 40 | 40 random bits

The number says which of two generations is the later one. The random bits keep a reset from coming
to a generation that was in use before, whatever became of the file meanwhile.

A file that was put back to an older copy looks whole. It is found out by anything in the folder
that is of a later generation (`is_later`): the second record, which is written after the first, or
a row of any segment. Then the file counts as lost, as if it were damaged or gone: every space
begins a generation that was never used, and nothing old is found again.

The rules:

- A segment that this process cannot read, because of its key or its version, is neither changed nor
  removed unless the user said so.
- A generation is on the disk, twice, before a reset counts as done and before a row names it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError, UnavailableError
from penstock.store.base import DIGEST_BYTES
from penstock.store.disk.format import (
    CIPHER_NONE,
    FILE_MODE,
    GENERATIONS_COPY_NAME,
    GENERATIONS_NAME,
    HEAD,
    MAGIC,
    PAGE_BYTES,
    ROW_BYTES,
    VERSION,
    geometry_of,
    read_generations,
    read_head,
    seal_head,
    write_generations,
)
from penstock.store.disk.index import DiskSegment, TableScan, check_rows, read_table
from penstock.store.disk.io import expect_read, write_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.store.disk.format import DiskCipher, Folder
    from penstock.store.disk.io import DiskCalls


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
        fd = open_private_folder(self.path)
        try:
            return fd, self._lock(fd)
        except UnavailableError:
            os.close(fd)
            raise

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
            with segment.open(os.O_RDONLY, self._calls) as fd:
                page = os.pread(fd, PAGE_BYTES, 0)
                segment.file_bytes = os.fstat(fd).st_size
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


def open_private_folder(path: Path) -> int:
    """A descriptor of a folder that only this user can write to; it is made if it is missing.

    Raises `UnavailableError`: it cannot be made or used, or others can write to it.
    """
    if path.is_symlink():
        raise UnavailableError(
            f"folder {path} is a symbolic link to {os.path.realpath(path)}, must be "
            "a folder: others may turn the link; give the path that it leads to"
        )
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags)
    except OSError as error:
        raise UnavailableError(f"folder {path} cannot be used: {error.strerror}") from error
    problem = _why_not_ours(path, os.fstat(fd))
    if problem:
        os.close(fd)
        raise UnavailableError(problem)
    return fd


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
    with segment.open(os.O_RDWR | os.O_CREAT, calls) as fd:
        if os.fstat(fd).st_size != segment.file_bytes:
            os.ftruncate(fd, 0)
            calls.fallocate(fd, 0, segment.file_bytes)
        write_all(fd, [page], 0, calls)
        calls.sync(fd)


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


RANDOM_BITS = 40
NUMBER_MAX = (1 << 64 - RANDOM_BITS) - 1
"""A reset every ten seconds comes to it after five years. From then on the number stays, so that
each start finds rows that it cannot tell from later ones, and voids all."""
TABLES_AHEAD = 16
"""That the kernel reads while one is checked: 16 MiB with blocks of 256 KiB."""


def draw_generation(*, after: int) -> int:
    """A generation that was never used, later than another one."""
    number = min((after >> RANDOM_BITS) + 1, NUMBER_MAX)
    return number << RANDOM_BITS | secrets.randbits(RANDOM_BITS)


def is_later(generation: int, current: int) -> bool:
    """Whether a generation can exist only if `current` does not count any more.

    Two draws after the same generation have the same number. Whoever has one of them does not know
    of the other, so neither can be trusted. Generations were counted once, from 0: there the number
    is 0, and the higher generation is the later one.
    """
    number, own = generation >> RANDOM_BITS, current >> RANDOM_BITS
    if number != own:
        return number > own
    return generation != current if number else generation > current


class Generations:
    """The generation of each space in a folder, as long as this process has it.

    What this process has begun counts, whatever the folder says: it may be exchanged for an older
    one while the process lives.
    """

    def __init__(self, folder: DiskFolder) -> None:
        """Knows nothing before `take`."""
        self.times_lost = 0
        """How often the file was missing, damaged or older than something else in the folder."""
        self._folder = folder
        self._of: dict[bytes, int] = {}
        self._changed: dict[bytes, int] = {}
        self._lock = threading.Lock()
        """Held during I/O: of two that write at a time, the later must be the last."""

    def take(self, segments: Sequence[DiskSegment], calls: DiskCalls) -> None:
        """Reads what a folder with these segments says, and keeps what counts from now on.

        Raises `OSError`: the file cannot be read or written.
        """
        seen = generations_in(segments, calls)
        copy = self._read_copy()
        with self._lock:
            known = dict(self._of)
            problem, listed = read_listed(self._folder.fd, has_segments=bool(segments))
            counts = {**counts_of(listed, copy, seen), **known}
            if known:  # This process knows it better than the file.
                problem, counts = "", {**listed, **known}
            problem = problem or find_later(counts, listed, copy or {}, seen)
            if problem:
                self.times_lost += 1
                logger.warning(
                    "folder %s: %s: no block that was saved before is used again",
                    *(self._folder.path, problem),
                )
                counts = _draw_all(counts, listed, copy or {}, seen)
            self._of = counts
            self._changed |= {
                name: counts[name] for name, before in known.items() if counts[name] != before
            }
            self._save()

    def _read_copy(self) -> dict[bytes, int] | None:
        """The second record; damage to it alone does no harm."""
        try:
            return read_generations(self._folder.fd, GENERATIONS_COPY_NAME)
        except ValueError as error:
            logger.warning("folder %s: %s: it is written again", self._folder.path, error)
            return None

    def current(self, name: bytes) -> int | None:
        """The generation of a space; `None`: it has none yet, and no blocks."""
        return self._of.get(name)

    def of(self, name: bytes) -> int:
        """The generation of a space, which begins one if it has none.

        Raises `OSError`: see `begin`.
        """
        found = self._of.get(name)
        return self.begin(name) if found is None else found

    def begin(self, name: bytes) -> int:
        """A new one.

        Raises `OSError`: it counts for this process, and could not be written. What was written
        before is made unreadable, if it can be, so that nothing old is found after a restart.
        """
        with self._lock:
            begun = self._of[name] = draw_generation(after=self._of.get(name, 0))
            self._changed.pop(name, None)
            self._save()
            return begun

    def expect(self, name: bytes, generation: int) -> None:
        """Somebody knows of a generation: if it is a later one, nothing of before is found again.

        Raises `OSError`: see `begin`.
        """
        with self._lock:
            if not is_later(generation, self._of.get(name, 0)):
                return
            self.times_lost += 1
            logger.warning(
                "folder %s: an engine knows a later generation than %s: no block that was saved "
                "before is used again",
                *(self._folder.path, GENERATIONS_NAME),
            )
            begun = draw_generation(after=max(generation, self._of.get(name, 0)))
            self._of[name] = self._changed[name] = begun
            self._save()

    def save(self) -> None:
        """Writes all.

        Raises `OSError`: see `begin`.
        """
        with self._lock:
            self._save()

    def _save(self) -> None:
        try:
            write_generations(self._folder.fd, self._of)
        except OSError:
            with suppress(OSError):
                fd = os.open(
                    GENERATIONS_NAME,
                    os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                    dir_fd=self._folder.fd,
                )
                os.close(fd)
            raise
        # Only now: if the process ends in between, the file is the later one of the two.
        write_generations(self._folder.fd, self._of, GENERATIONS_COPY_NAME)

    def take_changed(self) -> list[tuple[bytes, int]]:
        """Spaces that `take` or `expect` had to begin anew, with their generations."""
        with self._lock:
            changed, self._changed = self._changed, {}
        return list(changed.items())


def read_listed(folder: Folder, *, has_segments: bool) -> tuple[str, dict[bytes, int]]:
    """What is wrong with the file of the generations, if something is, and what it says."""
    try:
        listed = read_generations(folder)
    except ValueError as error:
        return str(error), {}
    if listed is None:
        return f"{GENERATIONS_NAME} is missing" if has_segments else "", {}
    return "", listed


def counts_of(
    listed: dict[bytes, int], copy: Mapping[bytes, int] | None, seen: Iterable[bytes]
) -> dict[bytes, int]:
    """Which generation of each space counts by the records."""
    if copy is None:  # A folder of an earlier version, where a space that is not listed has 0.
        return {**dict.fromkeys(seen, 0), **listed}
    return listed


def find_later(
    counts: Mapping[bytes, int],
    listed: Mapping[bytes, int],
    copy: Mapping[bytes, int],
    seen: Mapping[bytes, set[int]],
) -> str:
    """What proves that `counts` is out of date; empty if nothing does."""
    for where, found in ((GENERATIONS_NAME, listed), (GENERATIONS_COPY_NAME, copy)):
        for name, generation in found.items():
            if is_later(generation, counts.get(name, 0)):
                return f"{GENERATIONS_NAME} is older than {where}, which knows a later generation"
    for name, generations in seen.items():
        if any(is_later(each, counts.get(name, 0)) for each in generations):
            return f"{GENERATIONS_NAME} is older than a segment, which has a later generation"
    return ""


def _draw_all(
    counts: Mapping[bytes, int],
    listed: Mapping[bytes, int],
    copy: Mapping[bytes, int],
    seen: Mapping[bytes, set[int]],
) -> dict[bytes, int]:
    """New generations for all spaces, later than all that are known."""

    def latest(name: bytes) -> int:
        found = [each[name] for each in (counts, listed, copy) if name in each]
        return max(*found, *seen.get(name, ()), 0)

    return {name: draw_generation(after=latest(name)) for name in {*counts, *listed, *copy, *seen}}


def generations_in(segments: Sequence[DiskSegment], calls: DiskCalls) -> dict[bytes, set[int]]:
    """All generations that rows name, by space; recovery uses what was read (`TableScan`)."""
    found: dict[bytes, set[int]] = {}
    used = [each for each in segments if each.geometry is not None]
    for at, segment in enumerate(used):
        for ahead in used[at + TABLES_AHEAD - 1 :][:1] if at else used[:TABLES_AHEAD]:
            expect_read(ahead, PAGE_BYTES, ahead.slot_count * ROW_BYTES, calls)
        try:
            rows = read_table(segment, calls)
        except OSError as error:
            # Its blocks will not be found either.
            logger.warning("the rows of %s cannot be read: %s", segment.path, error.strerror)
            continue
        sound, digests = check_rows(rows, segment.life, segment.part)
        pairs = frozenset(generations_of(rows, sound))
        if not segment.known:
            segment.scan = TableScan(digests, pairs)
        for name, generation in pairs:
            found.setdefault(name, set()).add(generation)
    return found


def generations_of(
    rows: NDArray[np.void], chosen: NDArray[np.bool_]
) -> Iterator[tuple[bytes, int]]:
    """Each space and generation that the chosen rows name, once; there are few of them."""
    halves = np.ascontiguousarray(rows["space"]).view(np.uint64).reshape(-1, 2)
    columns = np.column_stack((halves, rows["generation"]))[chosen]
    while len(columns):
        first = columns[0]
        yield first[:2].tobytes(), int(first[2])
        columns = columns[(columns != first).any(axis=1)]
