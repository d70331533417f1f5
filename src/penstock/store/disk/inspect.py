"""What lies in the folder of a disk tier, read without a lock and without writing anything.

    inspection = inspect_folder(Path("/var/cache/penstock"))   heads and tables
    inspection.report                                          segments, spaces, live and dead
    inspection.verify(cipher, on_block)                        reads every live block

The folder may be that of a running store. What changes meanwhile is not damage: a head or a row
that does not hold is read twice, and a block that fails counts only if its row still stands.

The one rule: what is live here is what a store would find that opens the folder
(docs/disk-format.md, "Reading a block").
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.store.disk.folder import (
    LOCK_NAME,
    counts_of,
    find_later,
    generations_of,
    read_listed,
)
from penstock.store.disk.format import (
    ASSOCIATED_BYTES,
    CIPHER_NONE,
    GENERATIONS_COPY_NAME,
    GENERATIONS_NAME,
    HEAD,
    PAGE_BYTES,
    ROW_BYTES,
    Geometry,
    read_form,
    read_generations,
    read_head,
    read_trailer,
    round_up,
    sound_rows,
)
from penstock.store.disk.index import bytes_of, keys_of, read_rows
from penstock.store.disk.io import DiskCalls, read_bytes
from penstock.vocabulary.checksums import CellSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.store.disk.format import DiskCipher
    from penstock.vocabulary.form import Form

SEGMENT_SUFFIX = ".segment"
CALLS = DiskCalls()
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NO_FILE = "is no regular file: a store ignores it"
DAMAGES_NAMED = 100
"""Damaged blocks that are described; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReport:
    """One file. Counts are of slots."""

    file: str
    file_bytes: int
    problem: str = ""
    """Why it is not read, or what is wrong with it."""
    damaged: bool = False
    """Whether the problem is damage: another version is none."""
    age: int = 0
    life: str = ""
    part: str = ""
    form: str = ""
    form_known: bool = False
    encrypted: bool = False
    block_bytes: int = 0
    slots: int = 0
    live: int = 0
    superseded: int = 0
    """A newer copy of the block counts."""
    outdated: int = 0
    """Of a generation that does not count."""
    skipped: int = 0
    """Without a row, before the last slot that has one: the block failed its sums and was
    forgotten, or it was never written."""
    torn: int = 0
    """Rows of this life that do not hold."""

    @property
    def dead(self) -> int:
        return self.superseded + self.outdated + self.skipped

    @property
    def free(self) -> int:
        """Slots that are not taken yet in this life."""
        return self.slots - self.live - self.dead - self.torn


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceReport:
    """The blocks of one model."""

    name: str
    generation: int
    """The one that counts now."""
    live: int
    live_bytes: int
    dead_by_generation: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReport:
    """All of a folder."""

    folder: str
    generations_problem: str
    """Why no block counts: the file of the generations is damaged."""
    segments: tuple[SegmentReport, ...]
    """Newest first."""
    spaces: tuple[SpaceReport, ...]
    written_at: tuple[int, ...]
    """When each live block was written, in seconds since 1970."""

    @property
    def live(self) -> int:
        return sum(each.live for each in self.segments)

    @property
    def live_bytes(self) -> int:
        return sum(each.live * each.block_bytes for each in self.segments)

    @property
    def dead_bytes(self) -> int:
        return sum(each.dead * each.block_bytes for each in self.segments)

    @property
    def file_bytes(self) -> int:
        return sum(each.file_bytes for each in self.segments)

    @property
    def damages(self) -> list[str]:
        """What is damaged, each in a line."""
        found = [self.generations_problem] if self.generations_problem else []
        for each in self.segments:
            if each.damaged:
                found.append(f"{each.file}: {each.problem}")
            if each.torn:
                found.append(f"{each.file}: {each.torn} rows do not hold")
        return found


class BlockDamage(NamedTuple):
    """A live block that cannot be delivered."""

    file: str
    slot: int
    key: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What reading all live blocks found."""

    whole: int
    """Blocks whose trailer and cell sums hold."""
    trailer_only: int
    """Blocks whose trailer holds, and whose cell sums could not be checked: the form is not known,
    or the block is encrypted and there was no key, or another one."""
    changed: int
    """Blocks that the store replaced meanwhile."""
    damaged: int
    damages: tuple[BlockDamage, ...]
    """The first of them."""


class _Table(NamedTuple):
    """A segment that was read, and which of its rows are live."""

    path: Path
    head: NDArray[np.void]
    rows: NDArray[np.void]
    live: NDArray[np.bool_]


class Inspection:
    """What was read of a folder."""

    def __init__(self, report: FolderReport, tables: list[_Table], forms: _FormFiles) -> None:
        self.report = report
        self._tables = tables
        self._forms = forms

    def verify(
        self,
        cipher: DiskCipher | None = None,
        on_block: Callable[[int], None] = lambda _: None,
    ) -> Verification:
        """Reads every live block and checks it. `on_block` gets the bytes of each that was read."""
        counts: Counter[str] = Counter()
        damages: list[BlockDamage] = []
        for table in self._tables:
            checker = _BlockChecker(table.head, self._forms.of(table.head), cipher)
            for slot, what in _verify_table(table, checker):
                counts[what] += 1
                if what not in (_WHOLE, _TRAILER_ONLY, _CHANGED):
                    counts["damaged"] += 1
                    if len(damages) < DAMAGES_NAMED:
                        key = keys_of(table.rows[slot])[0].hex()
                        damages.append(BlockDamage(table.path.name, slot, key, what))
                on_block(checker.block_bytes)
        return Verification(
            whole=counts[_WHOLE],
            trailer_only=counts[_TRAILER_ONLY],
            changed=counts[_CHANGED],
            damaged=counts["damaged"],
            damages=tuple(damages),
        )


_WHOLE = "whole"
_TRAILER_ONLY = "trailer only"
_CHANGED = "changed meanwhile"


class _BlockChecker:
    """Checks slots of one segment against their rows."""

    def __init__(
        self, head: NDArray[np.void], form: Form | None, cipher: DiskCipher | None
    ) -> None:
        self.block_bytes = int(head["block_bytes"])
        self.slot_bytes = int(head["slot_bytes"])
        self.encrypted = head["cipher"] != CIPHER_NONE
        self._head = head
        self._form = form
        ours = cipher is not None and cipher.key_check == head["key_check"].tobytes()
        self._cipher = cipher if self.encrypted and ours else None

    @cached_property
    def _span(self) -> CellSpan | None:
        return CellSpan.of(self._form.layout) if self._form is not None else None

    def check(self, row: NDArray[np.void], raw: bytes) -> str:
        """What is so about a slot: that it is whole, or what is wrong with it."""
        if len(raw) < self.slot_bytes:
            return "the file ends within the slot"
        at = round_up(self.block_bytes)
        trailer = read_trailer(raw[at:])
        if trailer is None:
            return "the trailer does not hold"
        named, sums = trailer
        same = ("life", "key", "space", "generation", "slot")
        if named["sum"] != row["trailer_sum"] or any(named[each] != row[each] for each in same):
            return "the trailer is of another block"
        if named["cell_count"] != self._head["cell_count"]:
            return "the trailer has another number of cells"
        block = bytearray(raw[: self.block_bytes])
        if self._span is None or self._form is None or (self.encrypted and self._cipher is None):
            return _TRAILER_ONLY
        if self._cipher is not None:
            nonce, tag = named["nonce"].tobytes(), named["tag"].tobytes()
            associated = raw[at : at + ASSOCIATED_BYTES]
            if not self._cipher.open(nonce, block, tag, associated, block):
                return "the block does not open: its bytes or its tag were changed"
        found = self._span.sum_blocks(
            np.frombuffer(block, dtype=np.uint8).reshape(1, -1),
            keys_of(row),
            self._form.checksum,
            salt=int(named["salt"]),
        )[0]
        bad = int((found != sums).sum())
        return f"{bad} of {len(sums)} cells fail their sums" if bad else _WHOLE


def _verify_table(table: _Table, checker: _BlockChecker) -> Iterator[tuple[int, str]]:
    """Each live slot of a segment, and what is so about it."""
    slots = [int(slot) for slot in np.flatnonzero(table.live)]
    if not slots:
        return
    first = Geometry.slots_offset(int(table.head["slot_count"]))
    try:
        descriptor = os.open(table.path, OPEN_FLAGS)
    except FileNotFoundError:
        yield from ((slot, _CHANGED) for slot in slots)
        return
    try:
        for slot in slots:
            at = first + slot * checker.slot_bytes
            what = checker.check(
                table.rows[slot], read_bytes(descriptor, checker.slot_bytes, at, CALLS)
            )
            if what not in (_WHOLE, _TRAILER_ONLY) and not _still_stands(descriptor, table, slot):
                what = _CHANGED
            # What is read once must not drive other files out of the page cache.
            os.posix_fadvise(descriptor, at, checker.slot_bytes, os.POSIX_FADV_DONTNEED)
            yield slot, what
    finally:
        os.close(descriptor)


def _still_stands(descriptor: int, table: _Table, slot: int) -> bool:
    """Whether head and row are as they were when the table was read."""
    head = read_bytes(descriptor, HEAD.itemsize, 0, CALLS)
    row = read_bytes(descriptor, ROW_BYTES, Geometry.row_offset(slot), CALLS)
    return head == table.head.tobytes() and row == table.rows[slot].tobytes()


def inspect_folder(folder: Path) -> Inspection:
    """Reads heads and tables of all segments.

    Raises `ConfigError`: there is no such folder, it is not one of a store, or it may not be read.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        raise ConfigError(str(folder), "there is no such folder") from None
    except NotADirectoryError:
        raise ConfigError(str(folder), "is a file, must be the folder of a store") from None
    except PermissionError:
        raise ConfigError(str(folder), "may not be read: no permission") from None
    files = [name for name in names if name.endswith(SEGMENT_SUFFIX)]
    if not files and not {LOCK_NAME, GENERATIONS_NAME} & {*names}:
        raise ConfigError(
            str(folder), "is not the folder of a store: it has no segments and no lock"
        )
    try:
        return _inspect(folder, files)
    except PermissionError as problem:
        raise ConfigError(str(problem.filename), "may not be read: no permission") from None


def _inspect(folder: Path, files: list[str]) -> Inspection:
    forms = _FormFiles(folder)
    read = (_read_segment(folder / file, forms) for file in files)
    found = [each for each in read if each is not None]
    tables_read = [content for _, content in found if content is not None]
    # After the tables: what a store has voided meanwhile is not found.
    generations, problem = _read_generations(folder, tables_read, has_segments=bool(files))
    # Newest first: the first copy of a block that is met is the one that counts.
    found.sort(key=lambda each: -each[0].age)
    census = _Census(generations)
    reports, tables = [], []
    for report, content in found:
        if content is None:
            reports.append(report)
            continue
        head, rows = content
        counted, live = census.count(report, head, rows)
        reports.append(counted)
        tables.append(_Table(folder / report.file, head, rows, live))
    return Inspection(
        FolderReport(
            folder=str(folder),
            generations_problem=problem,
            segments=tuple(reports),
            spaces=census.spaces(),
            written_at=tuple(sorted(census.written_at)),
        ),
        tables,
        forms,
    )


def _read_generations(
    folder: Path, tables: list[_Content], *, has_segments: bool
) -> tuple[dict[bytes, int] | None, str]:
    """Which generations count; if none do, why. A store then begins new ones."""
    seen: dict[bytes, set[int]] = {}
    for head, rows in tables:
        for name, generation in generations_of(rows, sound_rows(rows, int(head["life"]))):
            seen.setdefault(name, set()).add(generation)
    problem, listed = read_listed(folder, has_segments=has_segments)
    try:
        copy = read_generations(folder, GENERATIONS_COPY_NAME)
    except ValueError:
        copy = None
    counts = counts_of(listed, copy, seen)
    problem = problem or find_later(counts, {}, copy or {}, seen)
    return (None, f"{problem}: no block counts") if problem else (counts, "")


class _Census:
    """Tells live rows from dead ones, over segments that come newest first."""

    def __init__(self, generations: dict[bytes, int] | None) -> None:
        self.written_at: list[int] = []
        self._generations = generations
        self._seen: set[tuple[bytes, bytes, bytes]] = set()
        self._live: Counter[bytes] = Counter()
        self._live_bytes: Counter[bytes] = Counter()
        self._dead: dict[bytes, Counter[int]] = {}

    def count(
        self, report: SegmentReport, head: NDArray[np.void], rows: NDArray[np.void]
    ) -> tuple[SegmentReport, NDArray[np.bool_]]:
        """The report of a segment with its slots counted, and which rows are live."""
        sound = sound_rows(rows, int(head["life"]))
        torn = _torn_rows(rows, int(head["life"]))
        taken = sound | torn
        last = int(np.flatnonzero(taken)[-1]) if taken.any() else -1
        live = np.zeros(len(rows), dtype=np.bool_)
        part = head["part"].tobytes()
        fates: Counter[str] = Counter()
        # Of copies in one segment the one in the highest slot counts.
        slots = np.flatnonzero(sound)[::-1]
        written = rows[slots]
        spaces, keys = bytes_of(written, "space"), keys_of(written)
        generations = written["generation"].tolist()
        for slot, space, generation, key in zip(
            slots.tolist(), spaces, generations, keys, strict=True
        ):
            fate = self._fate(space, generation, (space, part, key))
            fates[fate] += 1
            if fate == "live":
                live[slot] = True
                self._live[space] += 1
                self._live_bytes[space] += report.block_bytes
            else:
                self._dead.setdefault(space, Counter())[generation] += 1
        self.written_at += rows["written_at"][live].tolist()
        counted = replace(
            report,
            live=fates["live"],
            superseded=fates["superseded"],
            outdated=fates["outdated"],
            skipped=last + 1 - int(taken.sum()),
            torn=int(torn.sum()),
        )
        return counted, live

    def _fate(self, space: bytes, generation: int, identity: tuple[bytes, bytes, bytes]) -> str:
        if self._generations is None or generation != self._generations.get(space):
            return "outdated"
        if identity in self._seen:
            return "superseded"
        self._seen.add(identity)
        return "live"

    def spaces(self) -> tuple[SpaceReport, ...]:
        known = self._generations or {}
        return tuple(
            SpaceReport(
                name=name.hex(),
                generation=known.get(name, 0),
                live=self._live[name],
                live_bytes=self._live_bytes[name],
                dead_by_generation=dict(sorted(self._dead.get(name, Counter()).items())),
            )
            for name in sorted({*known, *self._live, *self._dead})
        )


_Content = tuple["NDArray[np.void]", "NDArray[np.void]"]


def _read_segment(path: Path, forms: _FormFiles) -> tuple[SegmentReport, _Content | None] | None:
    """The report of a segment, not counted yet, with its head and rows if it can be read.

    `None`: the store has removed the file meanwhile.
    """
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as problem:
        if problem.errno not in {errno.ELOOP, errno.ENXIO}:
            raise
        return SegmentReport(file=path.name, file_bytes=0, problem=NO_FILE), None
    try:
        status = os.fstat(descriptor)
        report = SegmentReport(file=path.name, file_bytes=status.st_size)
        if not stat.S_ISREG(status.st_mode):
            return replace(report, file_bytes=0, problem=NO_FILE), None
        # Twice: the store may have been writing it.
        page = read_bytes(descriptor, PAGE_BYTES, 0, CALLS)
        try:
            head = read_head(page)
            if head is None:
                page = read_bytes(descriptor, PAGE_BYTES, 0, CALLS)
                head = read_head(page)
        except ValueError as problem:
            return replace(report, problem=str(problem)), None
        if head is None:
            if not any(page):
                return replace(report, problem="is not in use yet"), None
            return replace(report, problem="the head does not hold", damaged=True), None
        rows = _read_rows(descriptor, head)
    finally:
        os.close(descriptor)
    return _describe(report, head, forms), (head, rows)


def _describe(report: SegmentReport, head: NDArray[np.void], forms: _FormFiles) -> SegmentReport:
    slots = int(head["slot_count"])
    needed = Geometry.slots_offset(slots) + slots * int(head["slot_bytes"])
    short = report.file_bytes < needed
    return replace(
        report,
        problem=f"ends at byte {report.file_bytes}, must have {needed}" if short else "",
        damaged=short,
        age=int(head["age"]),
        life=f"{int(head['life']):016x}",
        part=head["part"].tobytes().hex(),
        form=head["form"].tobytes().hex(),
        form_known=forms.of(head) is not None,
        encrypted=bool(head["cipher"] != CIPHER_NONE),
        block_bytes=int(head["block_bytes"]),
        slots=slots,
    )


def _read_rows(descriptor: int, head: NDArray[np.void]) -> NDArray[np.void]:
    """The table of a segment; rows beyond the end of the file are zeros.

    A row that does not hold may be half of what the store is writing now. It is read again, and if
    it has changed by then it counts as not written yet.
    """
    slots, life = int(head["slot_count"]), int(head["life"])
    rows = read_rows(descriptor, 0, slots, CALLS)
    if _torn_rows(rows, life).any():
        before, rows = rows, read_rows(descriptor, 0, slots, CALLS)
        rows[_torn_rows(rows, life) & (rows != before)] = np.zeros((), dtype=rows.dtype)
    return rows


def _torn_rows(rows: NDArray[np.void], life: int) -> NDArray[np.bool_]:
    torn: NDArray[np.bool_] = (rows["life"] == life) & ~sound_rows(rows, life)
    return torn


class _FormFiles:
    """The forms that a folder has, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[bytes, Form | None] = {}

    def of(self, head: NDArray[np.void]) -> Form | None:
        """The form of a segment's blocks, if the folder has it and it is that of this head."""
        name = head["form"].tobytes()
        if name not in self._read:
            self._read[name] = read_form(self._folder, name)
        form = self._read[name]
        if form is None:
            return None
        fits = (
            form.layout.block_bytes == head["block_bytes"]
            and len(form.layout.cells) == head["cell_count"]
            and form.checksum.value.encode() == head["algorithm"]
        )
        return form if fits else None
