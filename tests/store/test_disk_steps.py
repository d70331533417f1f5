"""Orders of events in a disk tier that its threads seldom take: each step is taken by hand."""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.store_tier_suite import LAYOUTS, SPACE, WAIT_S, StoreRig
from penstock.cache.operations import BlockFault
from penstock.errors import UnavailableError
from penstock.store.disk.format import PAGE_BYTES, ROW, Geometry, sound_rows
from penstock.store.disk.io import AlignedMemory, DiskCalls, open_within
from penstock.store.disk.tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from lab.fixtures.store_tier_suite import Saved
    from penstock.store.base import EndedJob
    from penstock.store.disk.threads import RunToRead, RunToWrite, SegmentToSync

LAYOUT = LAYOUTS["whole pages"]
GEOMETRY = Geometry(segment_bytes=1 << 30, block_bytes=LAYOUT.block_bytes, cell_count=4)
LEAST_BYTES = Geometry.least_bytes(block_bytes=LAYOUT.block_bytes, cell_count=4)
SIZE_BYTES = 8 << 20


class Steps:
    """A tier without threads, and what those would do."""

    def __init__(self, folder: Path, size_bytes: int, calls: DiskCalls | None = None) -> None:
        self.now = 0.0
        calls = replace(calls or DiskCalls(), clock=lambda: self.now)
        # Not directly: some file systems then fill the memory behind a short read with zeros.
        self.tier = DiskTier(folder, size_bytes, calls=calls, direct=False, stepped=True)
        self.threads = self.tier._threads
        self.rig = StoreRig(self.tier, LAYOUT)
        self.scratch = AlignedMemory()

    def take(self) -> RunToRead | RunToWrite | SegmentToSync:
        """An I/O thread takes its next task, which is under way from now on."""
        with self.tier.lock:
            task = self.tier.next_task()
        assert task is not None
        return task

    def do(self, task: RunToRead | RunToWrite | SegmentToSync) -> None:
        self.threads.do_task(task, self.scratch)

    def settle(self) -> None:
        """All get on until nothing is left to do."""
        while True:
            if self.threads.is_keeper_due():
                self.threads.keep()
            elif self.tier.reads or self.tier.writes:
                self.do(self.take())
            elif not self.threads.recover_next(self.tier.pool):
                return

    def save(self, saved: Saved) -> EndedJob:
        ticket = self.rig.save(saved)
        self.settle()
        return self.rig.wait(ticket)[0]

    def load(self, keys: Sequence[bytes], slots: Sequence[int]) -> EndedJob:
        ticket = self.rig.load(keys, slots)
        self.settle()
        return self.rig.wait(ticket)[0]

    def die(self) -> None:
        """As if the process were killed: nothing is written any more."""
        os.close(self.tier.descriptor)
        self.tier.folder.close()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Steps]]:
    """Begins a life of the tier; the one before it dies."""
    lives: list[Steps] = []

    def make(size_bytes: int = SIZE_BYTES, calls: DiskCalls | None = None) -> Steps:
        die()
        lives.append(Steps(tmp_path / "tier", size_bytes, calls))
        lives[-1].settle()
        return lives[-1]

    def die() -> None:
        while lives:
            lives.pop().die()

    yield make
    die()


def test_a_full_segment_is_synced_with_all_of_its_rows_before_anything_else_happens(
    tmp_path: Path,
) -> None:
    rows_synced: list[int] = []
    synced = threading.Semaphore(0)

    def sync(fd: int) -> None:
        os.fdatasync(fd)
        life = int.from_bytes(os.pread(fd, 8, 16), "little")
        raw = os.pread(fd, 4 * ROW.itemsize, PAGE_BYTES)
        rows_synced.append(int(sound_rows(np.frombuffer(raw, dtype=ROW), life).sum()))
        synced.release()

    size = 8 * (2 * PAGE_BYTES + 4 * GEOMETRY.slot_bytes)
    tier = DiskTier(tmp_path / "tier", size, calls=DiskCalls(sync=sync))
    try:
        rig = StoreRig(tier, LAYOUT)
        for seed in range(1, 5):
            assert rig.save_and_wait(rig.fill(1, seed=seed)).faults == ()

        for _ in ("its head", "all of it"):
            assert synced.acquire(timeout=WAIT_S)

        assert rows_synced == [0, 4]
    finally:
        tier.close(deadline=time.monotonic() + WAIT_S)


def test_after_a_short_read_trailers_of_an_earlier_read_are_not_taken(
    begin: Callable[..., Steps], tmp_path: Path
) -> None:
    steps = begin()
    saved = steps.rig.fill(4)
    steps.save(saved)
    slots = range(10, 14)
    assert steps.load(saved.keys, slots).faults == ()
    path = tmp_path / "tier" / "00000000.segment"
    whole = Geometry(
        segment_bytes=path.stat().st_size, block_bytes=LAYOUT.block_bytes, cell_count=4
    )
    os.truncate(path, whole.offset(2))

    # The thread has the trailers of the first read in its memory, and the arena its blocks.
    ended = steps.load(saved.keys, slots)

    assert ended.faults == ((2, BlockFault.CORRUPT), (3, BlockFault.CORRUPT))


def fill_both_segments(steps: Steps) -> tuple[Saved, Saved]:
    """Two segments of one block each: the folder is full."""
    first, second = steps.rig.fill(1, seed=1), steps.rig.fill(1, seed=2, first=1)
    assert steps.save(first).faults == steps.save(second).faults == ()
    assert [each.is_full for each in steps.tier.pool.segments.values()] == [True, True]
    return first, second


def test_a_segment_is_not_given_up_while_a_read_of_it_is_under_way(
    begin: Callable[..., Steps],
) -> None:
    steps = begin(2 * LEAST_BYTES)
    first, second = fill_both_segments(steps)
    tickets = [steps.rig.load(each.keys, [10 + n]) for n, each in enumerate((first, second))]
    reads = [steps.take(), steps.take()]

    dropped = steps.rig.save(steps.rig.fill(1, seed=3, first=2))
    steps.threads.keep()
    lives = [each.life for each in steps.tier.pool.segments.values()]
    for read in reads:
        steps.do(read)
    steps.settle()
    ended = steps.rig.wait(*tickets, dropped)

    assert all(lives)
    assert [each.faults for each in ended] == [(), (), ((0, BlockFault.UNREADABLE),)]
    steps.rig.require(first, [10])
    steps.rig.require(second, [11])
    assert steps.tier.state().saves_dropped >= 1


class LockWithHook:
    """A lock; `after` is called once, when it was released next."""

    def __init__(self, lock: threading.Lock, after: Callable[[], None]) -> None:
        self._lock = lock
        self._after: Callable[[], None] | None = after

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.__exit__(kind, error, trace)
        after, self._after = self._after, None
        if after is not None:
            after()


def test_a_segment_is_not_given_up_if_a_read_of_it_began_since_it_was_chosen(
    begin: Callable[..., Steps],
) -> None:
    steps = begin(2 * LEAST_BYTES)
    first, second = fill_both_segments(steps)
    pool, tickets = steps.tier.pool, []

    def read_both() -> None:
        pool._lock = steps.tier.lock
        tickets.extend(steps.rig.load(each.keys, [10]) for each in (first, second))
        reads.extend((steps.take(), steps.take()))

    reads: list[RunToRead | RunToWrite | SegmentToSync] = []
    chosen = pool._coldest()
    assert chosen is not None
    pool._lock = LockWithHook(steps.tier.lock, read_both)  # type: ignore[assignment]
    with pool._lock:
        assert pool._coldest() is chosen
    given_up = pool._give_up(chosen)
    for read in reads:
        steps.do(read)
    steps.settle()

    assert not given_up
    assert [each.faults for each in steps.rig.wait(*tickets)] == [(), ()]
    assert steps.rig.find([*first.keys, *second.keys]) == [True, True]


def test_a_write_into_a_folder_that_was_exchanged_does_not_count_as_saved(
    begin: Callable[..., Steps], tmp_path: Path
) -> None:
    steps = begin()
    steps.save(steps.rig.fill(2, seed=1))
    saved = steps.rig.fill(4, seed=2, first=4)
    ticket = steps.rig.save(saved)
    steps.threads.keep()
    write = steps.take()
    (tmp_path / "tier").rename(tmp_path / "moved")
    with steps.tier.lock:
        steps.tier.switch_off("the folder is gone")
    steps.now = steps.tier.retry_at
    steps.threads.keep()  # It takes the new folder.
    assert steps.tier.state().on

    steps.do(write)
    steps.settle()
    (ended,) = steps.rig.wait(ticket)

    assert [fault for _, fault in ended.faults] == [BlockFault.UNREADABLE] * 4
    assert steps.rig.find(saved.keys) == [False] * 4
    assert steps.save(saved).faults == ()
    shutil.rmtree(tmp_path / "moved")
    assert begin().rig.find(saved.keys) == [True] * 4


def test_a_new_folder_that_cannot_be_read_at_once_is_read_at_the_next_try(
    begin: Callable[..., Steps], tmp_path: Path
) -> None:
    """Or saves would go on into the folder of before, which no later process finds."""
    steps = begin()
    old = steps.rig.fill(2, seed=1)
    steps.save(old)
    under_way = steps.rig.save(steps.rig.fill(4, seed=2, first=4))
    steps.threads.keep()
    write = steps.take()
    (tmp_path / "tier").rename(tmp_path / "moved")
    (tmp_path / "tier").mkdir(mode=0o700)
    in_the_way = tmp_path / "tier" / "generations"
    in_the_way.mkdir()
    with steps.tier.lock:
        steps.tier.switch_off("the folder is gone")
    steps.now = steps.tier.retry_at
    steps.threads.keep()  # It locks the new folder, and cannot write there.
    steps.do(write)
    steps.settle()
    (ended,) = steps.rig.wait(under_way)
    assert [fault for _, fault in ended.faults] == [BlockFault.UNREADABLE] * 4
    assert not steps.tier.state().on
    in_the_way.rmdir()

    steps.now = steps.tier.retry_at
    steps.settle()

    assert steps.tier.state().on
    assert steps.rig.find(old.keys) == [False] * 2
    saved = steps.rig.fill(4, seed=3, first=8)
    assert steps.save(saved).faults == ()
    assert begin().rig.find(saved.keys) == [True] * 4


def test_the_row_of_a_forgotten_block_is_left_alone_in_the_next_life_of_its_segment(
    begin: Callable[..., Steps],
) -> None:
    """The block fails its sums just before its segment is chosen for another block."""
    meanwhile: list[Callable[[], None]] = []

    def statvfs(folder: int) -> os.statvfs_result:  # The last call before a segment is chosen.
        while meanwhile:
            meanwhile.pop()()
        return os.fstatvfs(folder)

    steps = begin(2 * LEAST_BYTES, DiskCalls(statvfs=statvfs))
    bad, hot = fill_both_segments(steps)
    for _ in range(3):
        steps.load(hot.keys, [10])
    victim = steps.tier.pool.segments[0]
    with open(victim.path, "r+b") as file:
        file.seek(Geometry.slots_offset(1) + 100)
        file.write(b"rotten")
    load = steps.rig.load(bad.keys, [11])
    read = steps.take()
    meanwhile.append(lambda: steps.do(read))

    fresh = steps.rig.fill(1, seed=3, first=2)
    save = steps.rig.save(fresh)
    steps.threads.keep()
    steps.do(steps.take())
    steps.settle()
    loaded, saved = steps.rig.wait(load, save)

    assert loaded.faults == ((0, BlockFault.CORRUPT),)
    assert saved.faults == ()
    assert steps.tier.pool.index.find(only_digest(steps, 0)) is not None
    again = begin(2 * LEAST_BYTES)
    assert again.rig.find([*fresh.keys, *hot.keys]) == [True, True]


def only_digest(steps: Steps, number: int) -> int:
    (digest,) = steps.tier.pool.segments[number].digests.tolist()
    return int(digest)


@pytest.mark.parametrize("dies", [True, False], ids=["killed", "writable again"])
def test_a_reset_that_cannot_be_written_is_not_forgotten(
    begin: Callable[..., Steps], tmp_path: Path, *, dies: bool
) -> None:
    steps = begin()
    saved = steps.rig.fill(4)
    steps.save(saved)
    before = steps.rig.generation(SPACE.name)
    in_the_way = tmp_path / "tier" / "generations.new"
    in_the_way.mkdir()

    with pytest.raises(UnavailableError, match="generations cannot be written: Is a directory"):
        steps.tier.void(SPACE.name)
    found = steps.rig.find(saved.keys)
    begun = steps.rig.generation(SPACE.name)
    in_the_way.rmdir()
    if not dies:
        steps.now = steps.tier.retry_at
        steps.settle()
        assert steps.tier.state().on
        assert steps.rig.generation(SPACE.name) == begun
    again = begin()

    assert found == [False] * 4
    assert begun > before
    assert again.rig.generation(SPACE.name) > before
    assert again.rig.find(saved.keys) == [False] * 4
    assert dies or again.rig.generation(SPACE.name) == begun


def test_blocks_that_are_listed_while_a_segment_is_begun_do_not_take_it_for_removed(
    begin: Callable[..., Steps],
) -> None:
    listed = []

    def open_listing(name: str, flags: int, mode: int, folder: int) -> int:
        if flags & os.O_CREAT and name.endswith(".segment"):
            listed.append(steps.tier.page(SPACE, steps.rig.arena.part, None, 10))
        return open_within(name, flags, mode, folder)

    steps = begin(calls=DiskCalls(open=open_listing))
    saved = steps.rig.fill(3)

    assert steps.save(saved).faults == ()
    assert [page.keys for page in listed] == [[]]
    assert steps.load(saved.keys, range(3)).faults == ()


def test_a_segment_that_somebody_removes_while_it_is_begun_switches_the_tier_off_for_a_while(
    begin: Callable[..., Steps],
) -> None:
    left = [1]

    def sync(_fd: int) -> None:
        if left and left.pop():
            [path] = steps.tier.folder.path.glob("*.segment")
            path.unlink()
            steps.tier.pool.forget_if_removed(steps.tier.pool.segments[0])

    steps = begin(calls=DiskCalls(sync=sync))
    saved = steps.rig.fill(3)

    assert "no segment can be begun" in steps.save(saved).failure
    assert not steps.tier.state().on
    steps.now += 60
    steps.settle()
    assert steps.tier.state().on
    assert steps.save(saved).faults == ()


def test_blocks_of_several_jobs_share_a_call_once_all_threads_have_work(
    begin: Callable[..., Steps],
) -> None:
    moved: list[tuple[str, int]] = []

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        moved.append(("read", os.preadv(fd, buffers, offset)))
        return moved[-1][1]

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        moved.append(("write", os.pwritev(fd, buffers, offset)))
        return moved[-1][1]

    steps = begin(calls=DiskCalls(preadv=read, pwritev=write))
    blocks = [steps.rig.fill(1, seed=1 + n, first=n) for n in range(4)]
    counts = []
    for idle in (6, 0):
        steps.tier.idle_workers = idle
        for way in ("write", "read"):
            if way == "write":
                tickets = [steps.rig.save(each) for each in blocks]
            else:
                tickets = [steps.rig.load(each.keys, [10 + n]) for n, each in enumerate(blocks)]
            steps.settle()
            assert [each.faults for each in steps.rig.wait(*tickets)] == [()] * 4
            counts.append([size for kind, size in moved if kind == way and size > PAGE_BYTES])
            moved.clear()
        for n, each in enumerate(blocks):
            steps.rig.require(each, [10 + n])
        blocks = [steps.rig.fill(1, seed=5 + n, first=n) for n in range(4)]

    alone, together = [GEOMETRY.slot_bytes] * 4, [4 * GEOMETRY.slot_bytes]
    assert counts == [alone, alone, together, together]


def test_a_file_that_is_gone_concerns_its_blocks_alone_in_a_call_that_jobs_share(
    begin: Callable[..., Steps], tmp_path: Path
) -> None:
    steps = begin(2 * LEAST_BYTES)
    first, second = fill_both_segments(steps)
    steps.tier.idle_workers = 0
    (tmp_path / "tier" / "00000000.segment").unlink()

    tickets = [steps.rig.load(each.keys, [10 + n]) for n, each in enumerate((first, second))]
    steps.settle()

    assert [each.faults for each in steps.rig.wait(*tickets)] == [((0, BlockFault.MISSING),), ()]
    steps.rig.require(second, [11])
