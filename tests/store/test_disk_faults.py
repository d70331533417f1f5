"""What the disk tier does when the disk fails: the jobs concerned fail, the rest goes on."""

from __future__ import annotations

import errno
import logging
import os
import select
import shutil
import threading
import time
from typing import TYPE_CHECKING

import pytest

from lab.fixtures.store_tier_suite import (
    LAYOUTS,
    WAIT_S,
    StoreRig,
    wait_for_news,
    wait_until_recovered,
)
from penstock.cache.operations import BlockFault
from penstock.store.disk.io import DiskCalls, open_within
from penstock.store.disk.tier import DiskTier
from penstock.vocabulary.layout import Layout
from tests.store.faulty_disk import FaultyDisk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.store.base import EndedJob

LAYOUT = LAYOUTS["whole pages"]
SIZE_BYTES = 8 << 20


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def tier(tmp_path: Path, disk: FaultyDisk) -> Iterator[DiskTier]:
    made = DiskTier(tmp_path / "tier", SIZE_BYTES, calls=disk.calls, retry_s=0.02)
    yield made
    disk.mend()
    for name in ("preadv", "pwritev"):
        disk.go_on(name)
    made.close(deadline=time.monotonic() + WAIT_S)


def wait_until(tier: DiskTier, *, on: bool) -> None:
    deadline = time.monotonic() + WAIT_S
    while tier.state().on is not on:
        left = deadline - time.monotonic()
        assert left > 0, tier.state()
        select.select([tier.descriptor], [], [], left)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["pwritev", "fallocate", "sync"])
def test_a_write_that_fails_fails_its_job_and_the_tier_comes_back(
    tier: DiskTier, disk: FaultyDisk, call: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(4)
    disk.fail(call, number)
    caplog.set_level(logging.WARNING)

    ended = rig.save_and_wait(saved)
    disk.mend()
    wait_until(tier, on=True)
    again = rig.save_and_wait(saved)

    assert [fault for _, fault in ended.faults] == [BlockFault.UNREADABLE] * 4
    assert ended.failure
    assert again.faults == ()
    assert rig.find(saved.keys) == [True] * 4
    messages = [each.message for each in caplog.records if "disk tier" in each.message]
    # It may be on again by now: the probe of a tier that is off syncs nothing.
    assert ["is off" in each for each in messages] == [True, False]
    assert ended.failure in messages[0]
    assert "is on again" in messages[1]


def test_a_file_system_that_is_smaller_than_the_folder_may_be_is_used_as_far_as_it_goes(
    tier: DiskTier, disk: FaultyDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = StoreRig(tier, LAYOUT)
    groups = []
    while len(list((tmp_path / "tier").glob("*.segment"))) < 3:
        groups.append(rig.fill(8, seed=len(groups) + 1))
        assert rig.save_and_wait(groups[-1]).faults == ()
    disk.fail("fallocate", errno.ENOSPC)

    for seed in range(100, 100 + 2 * len(groups)):
        groups.append(rig.fill(8, seed=seed))
        assert rig.save_and_wait(groups[-1]).faults == ()

    assert tier.state().on
    assert len(list((tmp_path / "tier").glob("*.segment"))) == 3
    assert rig.find(groups[0].keys) == [False] * 8
    assert rig.load_and_wait(groups[-1].keys, list(range(8, 16))).faults == ()
    rig.require(groups[-1], list(range(8, 16)))
    assert len([each for each in caplog.messages if "is full" in each]) == 1


def test_reads_go_on_while_writes_fail(tier: DiskTier, disk: FaultyDisk) -> None:
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(4)
    rig.save_and_wait(saved)
    disk.fail("pwritev", errno.ENOSPC)
    rig.save_and_wait(rig.fill(4, seed=2, first=4))

    found = rig.find(saved.keys)
    ended = rig.load_and_wait(saved.keys, [10, 11, 12, 13])

    assert not tier.state().on
    assert found == [True] * 4
    assert ended.faults == ()
    rig.require(saved, [10, 11, 12, 13])


def test_one_bad_sector_is_a_fault_of_its_blocks_and_many_switch_the_tier_off(
    tier: DiskTier, disk: FaultyDisk
) -> None:
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(4)
    rig.save_and_wait(saved)
    disk.fail("preadv", errno.EIO)

    first = rig.load_and_wait(saved.keys, [10, 11, 12, 13])
    after_one = tier.state().on
    for _ in range(2):
        rig.load_and_wait(saved.keys, [10, 11, 12, 13])
    after_three = tier.state()
    disk.mend()
    wait_until(tier, on=True)
    again = rig.load_and_wait(saved.keys, [10, 11, 12, 13])

    assert [fault for _, fault in first.faults] == [BlockFault.UNREADABLE] * 4
    assert "Input/output error" in first.failure
    assert after_one
    assert not after_three.on
    assert again.faults == ()


def test_a_folder_that_is_removed_switches_the_tier_off_and_is_made_again(
    tier: DiskTier, tmp_path: Path
) -> None:
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(4)
    rig.save_and_wait(saved)
    shutil.rmtree(tmp_path / "tier")

    lost = rig.load_and_wait(saved.keys, [10, 11, 12, 13])
    wait_until(tier, on=True)
    missing = rig.load_and_wait(saved.keys, [10, 11, 12, 13])
    again = rig.save_and_wait(rig.fill(4))
    found = rig.load_and_wait(saved.keys, [10, 11, 12, 13])

    assert [fault for _, fault in lost.faults] == [BlockFault.UNREADABLE] * 4
    assert [fault for _, fault in missing.faults] == [BlockFault.MISSING] * 4
    assert again.faults == found.faults == ()


def test_a_folder_that_another_process_took_meanwhile_is_left_to_it(
    tier: DiskTier, tmp_path: Path
) -> None:
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(4)
    rig.save_and_wait(saved)
    (tmp_path / "tier").rename(tmp_path / "elsewhere")
    other = DiskTier(tmp_path / "tier", SIZE_BYTES)
    try:
        ended = rig.save_and_wait(rig.fill(4, seed=2))
        for _ in range(5):
            wait_for_news(tier, 0.1)

        assert [fault for _, fault in ended.faults] == [BlockFault.UNREADABLE] * 4
        assert not tier.state().on
    finally:
        other.close(deadline=time.monotonic() + WAIT_S)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_unexpected_error_switches_the_tier_off_with_its_text(
    tier: DiskTier, disk: FaultyDisk, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(4)
    rig.save_and_wait(saved)
    disk.crash(call, RuntimeError("a mistake of ours"))

    ended = [rig.load_and_wait(saved.keys, [10, 11, 12, 13])]
    ended += [rig.save_and_wait(rig.fill(4, seed=2))]
    state = tier.state()
    disk.mend()

    assert any("unexpected RuntimeError: a mistake of ours" in each.failure for each in ended)
    assert state.why == (
        f"unexpected RuntimeError: a mistake of ours; off until process {os.getpid()} is restarted"
    )
    assert "Traceback" in caplog.text
    assert rig.save_and_wait(rig.fill(4, seed=3)).failure == state.why


def test_a_tier_that_breaks_while_it_is_off_says_that_it_is_not_tried_again(
    tier: DiskTier, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(4)
    rig.save_and_wait(saved)
    disk.fail("pwritev", errno.ENOSPC)
    rig.save_and_wait(rig.fill(4, seed=2))
    assert "No space left" in tier.state().why

    disk.crash("preadv", RuntimeError("a mistake of ours"))
    rig.load_and_wait(saved.keys, [10, 11, 12, 13])

    assert "a mistake of ours" in tier.state().why
    assert caplog.messages[-1].endswith(
        f"off until process {os.getpid()} is restarted; next try after that"
    )


def test_reads_go_before_writes(disk: FaultyDisk, tier: DiskTier) -> None:
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(4)
    rig.save_and_wait(saved)
    disk.hold("pwritev")
    slow = [rig.save(rig.fill(2, seed=seed, first=2 * seed)) for seed in range(2, 12)]
    for _ in range(5):  # All threads that may write do, and wait.
        assert disk.waiting["pwritev"].acquire(timeout=WAIT_S)

    ended = rig.load_and_wait(saved.keys, [30, 31, 32, 33])
    unfinished = [each for each in slow if each not in {done.ticket for done in rig.ended}]
    disk.go_on("pwritev")

    assert ended.faults == ()
    assert unfinished == slow
    assert [each.faults for each in rig.wait(*slow)] == [()] * len(slow)


def test_a_cancelled_job_is_reported_at_once_or_when_its_io_ends(
    disk: FaultyDisk, tier: DiskTier
) -> None:
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(4)
    rig.save_and_wait(saved)
    disk.hold("preadv")
    under_way = [rig.load(saved.keys[n : n + 1], [20 + n]) for n in range(4)]
    under_way += [rig.load(saved.keys[n : n + 1], [24 + n]) for n in range(2)]
    for _ in under_way:
        assert disk.waiting["preadv"].acquire(timeout=WAIT_S)
    waiting = rig.load(saved.keys, [30, 31, 32, 33])

    for ticket in (*under_way, waiting):
        tier.cancel(ticket)
    (at_once,) = rig.wait(waiting)
    early = {each.ticket for each in rig.ended} & {*under_way}
    disk.go_on("preadv")
    later = rig.wait(*under_way)

    assert [fault for _, fault in at_once.faults] == [BlockFault.UNREADABLE] * 4
    assert not early
    assert [each.faults for each in later] == [()] * 6


def test_a_segment_with_a_read_under_way_is_not_given_up(tmp_path: Path, disk: FaultyDisk) -> None:
    slot_bytes = 8192 + 4096
    tier = DiskTier(tmp_path / "small", 2 * (8192 + 2 * slot_bytes), calls=disk.calls)
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(2)
    rig.save_and_wait(saved)
    disk.hold("preadv", bytes_min=slot_bytes)
    ticket = rig.load(saved.keys, [20, 21])
    assert disk.waiting["preadv"].acquire(timeout=WAIT_S)

    others = [rig.save_and_wait(rig.fill(1, seed=seed, first=seed)) for seed in range(2, 9)]
    disk.go_on("preadv")
    (ended,) = rig.wait(ticket)
    tier.close(deadline=time.monotonic() + WAIT_S)

    assert ended.faults == ()
    rig.require(saved, [20, 21])
    assert any(each.faults for each in others) or tier.state().blocks_reclaimed


def test_blocks_travel_in_few_large_operations(tmp_path: Path, disk: FaultyDisk) -> None:
    tier = DiskTier(tmp_path / "large", 64 << 20, calls=disk.calls)
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(48)
    disk.written.clear()

    rig.save_and_wait(saved)
    disk.read.clear()
    rig.load_and_wait(saved.keys, saved.slots)
    tier.close(deadline=time.monotonic() + WAIT_S)

    slot_bytes = 8192 + 4096
    assert sum(each > 4096 for each in disk.written) == 2  # 48 blocks of 12 KiB, and their rows.
    assert disk.read == [48 * slot_bytes]


def test_a_segment_is_synced_once_it_is_full_with_its_rows_and_at_close(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    slot_bytes = 8192 + 4096
    tier = DiskTier(tmp_path / "synced", 8 * (8192 + 4 * slot_bytes), calls=disk.calls)
    rig = StoreRig(tier, LAYOUT)
    disk.events.clear()

    for seed in range(1, 7):
        rig.save_and_wait(rig.fill(1, seed=seed, first=seed))
    tier.close(deadline=time.monotonic() + WAIT_S)

    writes, head = ["pwritev", "pwritev"], ["pwritev", "sync"]
    filled = [*head, *(4 * writes)]
    rest = disk.events[len(filled) :]
    assert disk.events[: len(filled)] == filled
    # The first sync of the rest is that of the full segment or of the next head.
    assert sorted(rest) == sorted(["sync", *head, *(2 * writes), "sync"])
    assert rest[-1] == "sync"


def test_close_at_its_deadline_reports_what_was_not_written(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path / "held", SIZE_BYTES, calls=disk.calls)
    rig = StoreRig(tier, LAYOUT)
    rig.save_and_wait(rig.fill(2))
    disk.hold("pwritev")
    tickets = [rig.save(rig.fill(2, seed=seed, first=2 * seed)) for seed in range(2, 12)]
    for _ in range(5):
        assert disk.waiting["pwritev"].acquire(timeout=WAIT_S)

    ended: list[EndedJob] = []

    def collect_until(count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while len(ended) < count and time.monotonic() < deadline:
            ended.extend(tier.collect())

    def let_go_when_some_are_dropped() -> None:
        collect_until(1)
        disk.go_on("pwritev")

    release = threading.Thread(target=let_go_when_some_are_dropped)
    release.start()
    monkeypatch.setattr("penstock.store.stored_tier.THREADS_END_S", WAIT_S)
    tier.close(deadline=time.monotonic() + WAIT_S)
    release.join()
    collect_until(len(tickets))

    assert sorted(each.ticket for each in ended) == tickets
    assert any(each.faults for each in ended)


def test_blocks_that_are_asked_for_outlive_the_segment_they_were_in(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    slot_bytes = 8192 + 4096
    tier = DiskTier(tmp_path / "hot", 8 * (8192 + 4 * slot_bytes), calls=disk.calls)
    rig = StoreRig(tier, LAYOUT)
    groups = [rig.fill(4, seed=seed) for seed in range(1, 9)]
    for seed in range(1, 9):
        rig.save_and_wait(rig.fill(4, seed=seed))
    old, parents = groups[0], [None, *groups[0].keys[:-1]]

    first = rig.load_and_wait(old.keys, [40, 41, 42, 43])
    rig.require(old, [40, 41, 42, 43])
    for seed in range(9, 15):  # All segments but one are filled anew.
        rig.save_and_wait(rig.fill(4, seed=seed))
    found = rig.find(old.keys)
    paged = {k: p for page in rig.pages(8) for k, p in zip(page.keys, page.parents, strict=True)}
    again = rig.load_and_wait(old.keys, [40, 41, 42, 43])
    tier.close(deadline=time.monotonic() + WAIT_S)

    assert first.faults == again.faults == ()
    assert found == [True] * 4
    assert [paged[key] for key in old.keys] == parents
    rig.require(old, [40, 41, 42, 43])


def test_without_direct_io_the_page_cache_does_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def without(name: str, flags: int, mode: int, folder: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_within(name, flags, mode, folder)

    tier = DiskTier(tmp_path / "tier", SIZE_BYTES, calls=DiskCalls(open=without))
    wait_until_recovered(tier)
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(4)

    rig.save_and_wait(saved)
    ended = rig.load_and_wait(saved.keys, [10, 11, 12, 13])
    tier.close(deadline=time.monotonic() + WAIT_S)

    assert ended.faults == ()
    assert "has no direct I/O" in caplog.text


def test_a_job_is_split_among_idle_threads_only(tmp_path: Path, disk: FaultyDisk) -> None:
    layout = Layout.opaque(
        layers=range(4), block_bytes=64 << 10, encoding="x", block_tokens=16, block_count=48
    )
    tier = DiskTier(tmp_path / "split", 256 << 20, threads=6, calls=disk.calls)
    rig = StoreRig(tier, layout)
    saved = rig.fill(16)
    rig.save_and_wait(saved)
    tier.close(deadline=time.monotonic() + WAIT_S)
    tier = rig.tier = DiskTier(tmp_path / "split", 256 << 20, threads=6, calls=disk.calls)
    wait_until_recovered(tier)
    disk.hold("preadv")

    # Six threads are idle, then two, then none: runs of 1 MiB (the least), 2 MiB, and all of it.
    tickets = [rig.load(saved.keys, range(first, first + 16)) for first in (0, 16, 32)]
    for _ in range(6):
        assert disk.waiting["preadv"].acquire(timeout=WAIT_S)
    disk.go_on("preadv")
    ended = rig.wait(*tickets)
    tier.close(deadline=time.monotonic() + WAIT_S)

    assert [each.faults for each in ended] == [(), (), ()]
    slot_bytes = (256 << 10) + 4096
    reads = sorted(nbytes // slot_bytes for nbytes in disk.read if nbytes >= slot_bytes)
    assert reads == [4, 4, 4, 4, 8, 8, 16]
