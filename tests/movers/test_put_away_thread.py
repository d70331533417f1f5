"""The thread that puts parts away: the same bytes and verdicts as in the caller's own thread."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from penstock.movers.packing import JOBS_MAX, Packing, PutAwayThread, seeds_of
from penstock.tiers.arrays import ArrayTier
from penstock.transport.waiting import wait_readable
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.layout import HeadRange, Layout
from penstock.vocabulary.planes import DType

LAYOUT = Layout.split(
    layers=range(2),
    heads=HeadRange.all_of(2),
    channels=64,
    dtype=DType.BF16,
    block_tokens=16,
    block_count=8,
)
KEYS = (b"one", b"two")
SEEDS = seeds_of(KEYS)
SOON_S = 120.0


class Parts:
    """Packed blocks of one tier, and where they go in another."""

    def __init__(self) -> None:
        chance = np.random.default_rng(7)
        sizes = LAYOUT.buffer_bytes
        self.source, self.target = (
            ArrayTier(
                LAYOUT,
                [chance.integers(0, 256, sizes[at], dtype=np.uint8) for at in sorted(sizes)],
            )
            for _ in range(2)
        )
        reads, self.packing = (
            Packing.of(LAYOUT, tier.blocks(()).buffers, Algorithm.XXH3)
            for tier in (self.source, self.target)
        )
        assert reads is not None
        assert self.packing is not None
        self.memory = np.empty(2 * LAYOUT.block_bytes, dtype=np.uint8)
        self.sums = reads.pack([3, 5], SEEDS, self.memory)
        self.thread = PutAwayThread()

    def submit(self, slots: list[int], memory: np.ndarray | None = None) -> None:
        assert self.packing is not None
        part = self.memory if memory is None else memory
        sums = self.sums.astype("<u8").tobytes()
        self.thread.submit(self.packing, part, KEYS, sums, tuple(slots))

    def ends(self, count: int) -> list[bool]:
        found: list[bool] = []
        deadline = time.monotonic() + SOON_S
        while len(found) < count:
            assert wait_readable(self.thread.descriptor, deadline), "the thread has not ended"
            found += self.thread.ended()
        return found

    def block(self, tier: ArrayTier, slot: int) -> list[bytes]:
        assert self.packing is not None
        return [
            bytes(buffer.reshape(LAYOUT.block_count, -1)[slot])
            for buffer in tier.blocks(()).buffers.values()
        ]


@pytest.fixture(name="parts")
def make_parts() -> Parts:
    return Parts()


def test_blocks_are_put_away_and_their_end_is_shown_once(parts: Parts) -> None:
    parts.submit([6, 1])

    assert parts.ends(1) == [True]

    assert parts.block(parts.target, 6) == parts.block(parts.source, 3)
    assert parts.block(parts.target, 1) == parts.block(parts.source, 5)
    assert not parts.thread.busy
    assert parts.thread.ended() == []
    assert not wait_readable(parts.thread.descriptor, 0.0)


def test_a_flipped_bit_is_found_and_nothing_of_its_block_is_put_away(parts: Parts) -> None:
    before = parts.block(parts.target, 1)
    flipped = parts.memory.copy()
    flipped[LAYOUT.block_bytes + 9] ^= 4

    parts.submit([6, 1], flipped)
    parts.submit([2, 4])

    assert parts.ends(2) == [False, True]
    assert parts.block(parts.target, 1) == before
    assert parts.block(parts.target, 4) == parts.block(parts.source, 5)


def test_there_is_room_for_so_many_jobs_and_all_end_in_order(parts: Parts) -> None:
    bad = parts.memory.copy()
    bad[0] ^= 1
    for number in range(JOBS_MAX):
        assert parts.thread.has_room
        parts.submit([6, 1], bad if number % 3 == 0 else None)
    assert not parts.thread.has_room

    assert parts.ends(JOBS_MAX) == [number % 3 != 0 for number in range(JOBS_MAX)]
    assert parts.thread.has_room


def test_close_waits_for_what_was_submitted_and_can_be_called_twice(parts: Parts) -> None:
    for _ in range(8):
        parts.submit([6, 1])

    parts.thread.close()
    parts.memory[:] = 0

    assert parts.block(parts.target, 1) == parts.block(parts.source, 5)
    assert not parts.thread.busy
    parts.thread.close()


def test_a_thread_that_never_had_a_job_closes_its_descriptor(parts: Parts) -> None:
    descriptor = parts.thread.descriptor

    parts.thread.close()

    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_wrong_arguments_are_refused_before_anything_is_submitted(parts: Parts) -> None:
    with pytest.raises(ValueError, match="memory has"):
        parts.submit([6, 1], parts.memory[1:])
    with pytest.raises(ValueError, match="memory has"):
        parts.submit([6, 1], np.repeat(parts.memory, 2)[::2])
    with pytest.raises(ValueError, match="1 slot and 2 keys, must be as many"):
        parts.submit([6])
    with pytest.raises(ValueError, match="sums have 8 bytes, must have"):
        parts.thread.submit(parts.packing, parts.memory, KEYS, b"8 bytes.", (6, 1))

    assert not parts.thread.busy


def test_the_thread_takes_no_signals(parts: Parts) -> None:
    before = {*os.listdir("/proc/self/task")}
    parts.submit([6, 1])
    parts.ends(1)

    (task,) = {*os.listdir("/proc/self/task")} - before

    assert _blocked(task) & 1 << (signal.SIGTERM - 1)
    parts.thread.close()


def _blocked(task: str) -> int:
    """The signals that a thread does not take."""
    with open(f"/proc/self/task/{task}/status") as status:
        line = next(line for line in status if line.startswith("SigBlk:"))
    return int(line.split()[1], 16)


def test_a_fork_can_end_although_it_has_no_such_thread(parts: Parts) -> None:
    parts.submit([6, 1])
    parts.ends(1)

    child = os.fork()
    if not child:
        parts.thread.close()
        os._exit(7)

    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    parts.thread.close()
