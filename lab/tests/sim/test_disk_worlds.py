"""Worlds of a disk tier above a simulated disk: clean, and bugs planted in the tier are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.sim.disk import DiskWorld
from lab.sim.disk.world import Crash
from lab.tests.sim.planting import Plant, first_failure
from penstock.store.disk import folder, threads
from penstock.store.disk.folder import Generations
from penstock.store.disk.segments import SegmentPool
from penstock.store.disk.threads import DiskThreads, SaveInHand
from penstock.store.disk.tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.store.base import LoadJob, SaveJob, Space
    from penstock.store.disk.index import DiskSegment
    from penstock.store.disk.io import AlignedMemory, DiskCalls, Run
    from penstock.store.disk.threads import RunToWrite
    from penstock.store.stored_tier import JobInHand
    from penstock.vocabulary.keys import Key

SEEDS_MAX = 120
"""None of them finds anything without a planted bug, and each planted bug is found in one."""


def crash_everywhere(seed: int, *, power: bool, every: int) -> int:
    """Has the process die in each call of a world (or in some); returns how many there were."""
    whole = DiskWorld(seed, crash=Crash(None))
    whole.run()
    count = whole.process.disk.call_count
    for call in range(1, count + 1, every):
        DiskWorld(seed, crash=Crash(call, power=power)).run()
    return count


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
@pytest.mark.parametrize("seed", [2, 5])
def test_a_process_may_die_in_any_call(seed: int, *, power: bool) -> None:
    assert crash_everywhere(seed, power=power, every=12) > 40


@pytest.mark.long
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
@pytest.mark.parametrize("seed", range(10))
def test_a_process_may_die_in_every_call_of_many_worlds(seed: int, *, power: bool) -> None:
    assert crash_everywhere(seed, power=power, every=1) > 40


# ---------------------------------------------------------------- planted bugs


def plant_row_before_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are written after the rows that name them."""
    write_run, write_rows_of = threads.write_run, DiskThreads._write_rows_of
    put_off: list[tuple[Run, DiskCalls]] = []

    def write_nothing(run: Run, calls: DiskCalls, scratch: AlignedMemory) -> NDArray[np.uint64]:
        put_off.append((run, calls))
        return write_run(run, _Deaf(calls), scratch)  # type: ignore[arg-type]

    def write_rows_first(self: DiskThreads, segment: DiskSegment, writes: list[RunToWrite]) -> None:
        write_rows_of(self, segment, writes)
        while put_off:
            write_run(*put_off.pop(), threads.AlignedMemory())

    monkeypatch.setattr(threads, "write_run", write_nothing)
    monkeypatch.setattr(DiskThreads, "_write_rows_of", write_rows_first)


class _Deaf:
    """Calls that write nothing, and say that they did."""

    def __init__(self, calls: DiskCalls) -> None:
        self.open = calls.open

    def pwritev(self, _fd: int, buffers: Sequence[memoryview], _offset: int) -> int:
        return sum(each.nbytes for each in buffers)


def plant_unchecked_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of every generation are taken for those that are asked for."""
    save, load, find = DiskTier.save, DiskTier.load, DiskTier.find

    def save_any(self: DiskTier, job: SaveJob) -> None:
        save(self, job._replace(space=job.space._replace(generation=0)))

    def load_any(self: DiskTier, job: LoadJob) -> None:
        load(self, job._replace(space=job.space._replace(generation=0)))

    def find_any(self: DiskTier, space: Space, part: bytes, keys: Sequence[Key]) -> list[bool]:
        return find(self, space._replace(generation=0), part, keys)

    monkeypatch.setattr(DiskTier, "save", save_any)
    monkeypatch.setattr(DiskTier, "load", load_any)
    monkeypatch.setattr(DiskTier, "find", find_any)
    monkeypatch.setattr(
        SegmentPool, "_are_current", lambda _self, rows: rows["generation"] == rows["generation"]
    )


def plant_early_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save is reported when its slots were chosen, before anything is written."""
    plan, end_job = DiskThreads._plan, DiskTier.end_job

    def plan_and_report(self: DiskThreads, save: SaveInHand) -> None:
        plan(self, save)
        with self._tier.lock:
            if self._tier.jobs.get(save.job.ticket) is save and save.load is None:
                self._tier.report(save.job.ticket, save.faults)
                save.nbytes = 0

    def end_silently(self: DiskTier, job: JobInHand) -> None:
        ended = len(self.ended)
        reported = any(each.ticket == job.job.ticket for each in self.ended) or not job.nbytes
        end_job(self, job)
        if reported and isinstance(job, SaveInHand) and job.load is None:
            del self.ended[ended:]

    monkeypatch.setattr(DiskThreads, "_plan", plan_and_report)
    monkeypatch.setattr(DiskTier, "end_job", end_silently)


def plant_reuse_of_slots_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment is given up while blocks of it are read."""
    coldest, give_up = SegmentPool._coldest, SegmentPool._give_up

    def without_readers(
        self: SegmentPool, act: Callable[[], DiskSegment | bool | None]
    ) -> DiskSegment | bool | None:
        busy = {each: each.busy for each in self.segments.values()}
        for each in busy:
            each.busy = each.writes
        try:
            return act()
        finally:
            for each, count in busy.items():
                each.busy = count

    monkeypatch.setattr(
        SegmentPool, "_coldest", lambda self: without_readers(self, lambda: coldest(self))
    )
    monkeypatch.setattr(
        SegmentPool,
        "_give_up",
        lambda self, victim: without_readers(self, lambda: give_up(self, victim)),
    )


def plant_blind_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that fail their sums stay in the index, and are delivered as they are."""
    monkeypatch.setattr(threads, "read_run", _read_blindly(threads.read_run))


def _read_blindly(read_run: Callable[..., dict[int, object]]) -> Callable[..., dict[int, object]]:
    def read(*arguments: object) -> dict[int, object]:
        read_run(*arguments)
        return {}

    return read


def plant_believed_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file `generations` that looks whole is believed, however old it is."""
    monkeypatch.setattr(folder, "find_later", lambda *_: "")


def plant_second_record_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows show that a file is old."""
    monkeypatch.setattr(Generations, "_read_copy", lambda _: {})


def plant_rows_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the second record shows that a file is old."""
    monkeypatch.setattr(folder, "generations_in", lambda *_: {})


def plant_counted_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset counts to the next number."""
    plant_believed_generations(monkeypatch)
    monkeypatch.setattr(folder, "draw_generation", lambda *, after: after + 1)


PLANTED = [
    pytest.param(plant_believed_generations, {"store"}, 0, id="old generations believed"),
    pytest.param(plant_second_record_not_read, {"store"}, 0, id="second record not read"),
    pytest.param(plant_rows_not_read, {"store"}, 58, id="rows not read"),
    pytest.param(plant_counted_generations, {"store", "bytes"}, 0, id="generations counted"),
    pytest.param(plant_row_before_payload, {"store"}, 11, id="row before payload"),
    pytest.param(plant_unchecked_generation, {"bytes", "store"}, 2, id="generation not checked"),
    pytest.param(plant_early_acknowledgement, {"store"}, 1, id="acknowledged before written"),
    pytest.param(plant_reuse_of_slots_being_read, {"store", "bytes"}, 5, id="slot reused"),
    pytest.param(plant_blind_reads, {"bytes"}, 2, id="sums not checked"),
]
"""What is planted, who finds it, and a seed in which it was found: looked at first."""


@pytest.mark.parametrize(("plant", "checkers", "seed"), PLANTED)
def test_a_bug_planted_in_the_disk_tier_is_found(
    plant: Plant, checkers: set[str], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    found = first_failure(DiskWorld, (seed, *range(SEEDS_MAX)))

    assert found is not None
    assert found.checker in checkers, found
