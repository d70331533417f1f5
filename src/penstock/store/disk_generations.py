"""Which generation of each space counts: drawn, kept twice, and doubted whenever a folder is read.

Only blocks of the generation that counts are found; a reset begins a new one. A generation is a
number that grows with each reset of its space, and random bits:

    generation = number << 40 | 40 random bits

The number says which of two generations is the later one. The random bits keep a reset from coming
to a generation that was in use before, whatever became of the file meanwhile.

A file that was put back to an older copy looks whole. It is found out by anything in the folder
that is of a later generation (`is_later`): the second record, which is written after the first, or
a row of any segment. Then the file counts as lost, as if it were damaged or gone: every space
begins a generation that was never used, and nothing old is found again.

The one rule: a generation is on the disk, twice, before a reset counts as done and before a row
names it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from penstock.store.disk_format import (
    GENERATIONS_COPY_NAME,
    GENERATIONS_NAME,
    PAGE_BYTES,
    ROW_BYTES,
    read_generations,
    write_generations,
)
from penstock.store.disk_index import TableScan, check_rows, read_table
from penstock.store.disk_io import expect_read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.store.disk_folder import DiskFolder
    from penstock.store.disk_index import DiskSegment
    from penstock.store.disk_io import DiskCalls

logger = logging.getLogger(__name__)

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
            problem, listed = self._read(has_segments=bool(segments))
            counts = {**listed, **known}
            if known:
                problem = ""  # This process knows it better than the file.
            elif copy is None:
                # A folder of an earlier version, where a space that is not listed has 0.
                counts = {**dict.fromkeys(seen, 0), **counts}
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

    def _read(self, *, has_segments: bool) -> tuple[str, dict[bytes, int]]:
        """What is wrong with the file, if something is, and what it says."""
        try:
            listed = read_generations(self._folder.fd)
        except ValueError as error:
            return str(error), {}
        if listed is None:
            return f"{GENERATIONS_NAME} is missing" if has_segments else "", {}
        return "", listed

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
