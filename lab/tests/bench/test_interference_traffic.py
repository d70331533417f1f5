"""Windows, traffic and sides, on the CPU: real movers between tiers in memory."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.bench.interference import windows
from lab.bench.interference.pool import (
    PoolSlots,
    block_keys,
    packed_blocks,
    pool_layout,
    sums_hold,
)
from lab.bench.interference.sides import Alone, AtBoundaries, BlockingThreads, PollingThread
from lab.bench.interference.traffic import Freight, Traffic
from lab.bench.interference.windows import run_window
from penstock.cache.operations import BlockFault, Purpose
from penstock.errors import InvariantViolation
from penstock.movers.memcpy import MemcpyMover
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.memory import MemoryTier
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.bench.interference.windows import Side
    from penstock.vocabulary.layout import Layout

MOVED = 12
COPY = 3


def small_layout(count: int) -> Layout:
    return pool_layout(count, layers=3, kv_heads=2, head_dim=8, block_tokens=4)


class Yard:
    """A pool in host memory, a tier below it, and copies from one to the other."""

    def __init__(self) -> None:
        self.slots = PoolSlots(MOVED, written=2)
        self.layout = small_layout(self.slots.count)
        drawn = np.random.default_rng(3)
        self.bytes = drawn.integers(0, 256, self.layout.buffer_bytes[0], dtype=np.uint8)
        self.below = MemoryTier(self.layout, MOVED)
        device = ArrayTier(self.layout, [self.bytes])
        self.mover = MemcpyMover(device, self.below, Algorithm.MIX64)
        freight = Freight(
            purpose=Purpose.SAVE,
            keys=block_keys(MOVED),
            source_slots=self.slots.saved,
            target_slots=self.slots.host,
        )
        self.traffic = Traffic(
            self.mover,
            freight.copies(COPY),
            block_bytes=self.layout.block_bytes,
            ahead_bytes=2 * COPY * self.layout.block_bytes,
        )


class CountingLoop:
    """A loop of two pieces a step, each of which takes as long as it is told."""

    piece_count = 2

    def __init__(self, piece_s: float = 0.0005) -> None:
        self.piece_s = piece_s
        self.pieces = self.steps = 0
        self.settled = False

    def step(self) -> Iterator[None]:
        for _ in range(self.piece_count):
            over = time.perf_counter() + self.piece_s
            while time.perf_counter() < over:
                pass
            self.pieces += 1
            yield
        self.steps += 1

    def read_oldest(self) -> bool:
        return True

    def settle(self) -> None:
        self.settled = True


def test_freight_is_cut_into_copies_of_equal_size() -> None:
    freight = Freight(
        purpose=Purpose.SAVE,
        keys=block_keys(6),
        source_slots=np.arange(6, dtype=np.int32),
        target_slots=np.arange(6, dtype=np.int32) + 10,
    )

    copies = freight.copies(2)

    assert [copy.source_slots.tolist() for copy in copies] == [[0, 1], [2, 3], [4, 5]]
    assert [copy.target_slots.tolist() for copy in copies] == [[10, 11], [12, 13], [14, 15]]
    assert len({copy.operation for copy in copies}) == 3
    with pytest.raises(ValueError, match="must divide the 6"):
        freight.copies(4)


def test_what_a_step_leaves_of_its_budget_is_for_the_next() -> None:
    yard = Yard()
    began = time.monotonic()
    budget_bytes = yard.layout.block_bytes * 3 // 2

    moved = []
    for _ in range(4):
        yard.traffic.advance(budget_bytes)
        moved.append(yard.traffic.moved_between(began, time.monotonic()))

    copy_bytes = COPY * yard.layout.block_bytes
    assert moved == [0, copy_bytes, 0, copy_bytes]


def test_traffic_never_runs_out_and_counts_what_ended() -> None:
    yard = Yard()
    began = time.monotonic()

    for _ in range(40):
        yard.traffic.advance()
    yard.traffic.drain()

    moved_bytes = yard.traffic.moved_between(began, time.monotonic())
    assert moved_bytes >= 40 * COPY * yard.layout.block_bytes
    assert moved_bytes % (COPY * yard.layout.block_bytes) == 0
    assert not yard.mover.busy


def test_what_ended_before_the_window_does_not_count() -> None:
    yard = Yard()
    yard.traffic.advance()
    yard.traffic.drain()
    began = time.monotonic()

    assert yard.traffic.moved_between(began, began + 1) == 0


def test_a_budget_bounds_what_a_step_moves() -> None:
    yard = Yard()
    began = time.monotonic()

    for _ in range(6):
        yard.traffic.advance(budget_bytes=yard.layout.block_bytes)

    # A block a step: two copies of three blocks in six steps.
    moved_bytes = yard.traffic.moved_between(began, time.monotonic())
    assert moved_bytes == 2 * COPY * yard.layout.block_bytes


def test_a_block_that_is_not_delivered_ends_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    yard = Yard()
    poll = yard.mover.poll

    def damaged(*, budget_bytes: int) -> object:
        moved, spent = poll(budget_bytes=budget_bytes)
        return [each._replace(faults=((0, BlockFault.CORRUPT),)) for each in moved], spent

    monkeypatch.setattr(yard.mover, "poll", damaged)

    with pytest.raises(InvariantViolation, match="good blocks were not delivered"):
        yard.traffic.advance()


class TimedLoop(CountingLoop):
    """The same on a clock of its own, which stands still but for its pieces."""

    def __init__(self, piece_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(piece_s)
        self.now = 100.0
        monkeypatch.setattr(windows, "time", SimpleNamespace(monotonic=lambda: self.now))

    def step(self) -> Iterator[None]:
        for _ in range(self.piece_count):
            self.now += self.piece_s
            yield


def test_a_loop_alone_keeps_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TimedLoop(1.0, monkeypatch)

    window = run_window(loop, Alone(), seconds=20.0)

    assert window.moved_bytes == 0
    assert window.step_s == (2.0,) * 10
    assert (window.steps, window.seconds) == (10, 20.0)
    assert loop.settled


def test_a_step_that_takes_far_too_long_is_given_up_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = TimedLoop(5.0, monkeypatch)

    window = run_window(loop, Alone(), seconds=1.0)

    assert window.steps == 0.5
    assert window.step_s == ()


def side_of(kind: str, yard: Yard, told: list[int]) -> Side:
    if kind == "polling":
        return PollingThread([yard.traffic], prepare=lambda: None)
    if kind == "blocking":
        return BlockingThreads([(yard.traffic, _Never())], prepare=lambda: None)
    return AtBoundaries([yard.traffic], gb_per_s=None, step_submitted=lambda: told.append(1))


@pytest.mark.parametrize("kind", ["boundaries", "polling", "blocking"])
def test_every_side_moves_the_right_bytes_and_leaves_nothing_in_flight(kind: str) -> None:
    told: list[int] = []
    # On a machine that is busy enough, a thread does next to nothing for a tenth of a second.
    for seconds in (0.1, 1.0, 30.0):
        yard = Yard()
        window = run_window(CountingLoop(), side_of(kind, yard, told), seconds=seconds)
        if window.moved_bytes >= MOVED * yard.layout.block_bytes and window.step_s:
            break

    assert window.moved_bytes >= MOVED * yard.layout.block_bytes
    assert not yard.mover.busy
    assert bool(told) == (kind == "boundaries")
    assert 0 < window.boundary_s < window.seconds
    planes = yard.bytes.reshape(3, 2, yard.slots.count, -1)[:, :, yard.slots.saved]
    expected = packed_blocks(small_layout(MOVED), np.ascontiguousarray(planes))
    packed = yard.below.blocks(range(MOVED)).buffers[0].reshape(MOVED, -1)
    assert np.array_equal(packed, expected)
    kept = yard.below.sums(yard.slots.host)
    assert sums_hold(yard.layout, packed, block_keys(MOVED), kept)
    assert not sums_hold(yard.layout, packed[::-1].copy(), block_keys(MOVED), kept)


def test_a_steps_budget_is_what_the_rate_moves_in_the_time_since_the_step_before() -> None:
    yard = Yard()
    block_bytes = yard.layout.block_bytes
    times = iter([0.0, 2.0, 3.0])
    side = AtBoundaries(
        [yard.traffic],
        gb_per_s=3 * block_bytes / 1e9,
        step_submitted=lambda: None,
        clock=lambda: next(times),
    )
    began = time.monotonic()

    side.begin()
    side.at_boundary()
    side.at_boundary()

    # Six blocks in the first two seconds, three in the third: three copies of three.
    assert yard.traffic.moved_between(began, time.monotonic()) == 9 * block_bytes


def test_an_error_in_a_thread_is_raised_by_the_engine_and_the_thread_ends() -> None:
    yard = Yard()

    def fail() -> None:
        raise InvariantViolation("bench: as told")

    began = threading.Event()

    class Failing:
        def wait(self) -> None:
            began.set()
            fail()

    class Patient(CountingLoop):
        def step(self) -> Iterator[None]:
            assert began.wait(60), "the thread did nothing"
            return super().step()

    side = BlockingThreads([(yard.traffic, Failing())], prepare=lambda: None)

    with pytest.raises(InvariantViolation, match="as told"):
        run_window(Patient(), side, seconds=0.02)


def test_saved_loaded_and_written_slots_do_not_meet() -> None:
    slots = PoolSlots(8, written=4)

    together = np.concatenate([slots.saved, slots.loaded, slots.written])

    assert sorted(together.tolist()) == list(range(20))


class _Never:
    """Copies of the CPU have ended when they were made: there is nothing to block on."""

    def wait(self) -> None:
        return
