"""The store process and its disk tier as an engine sees them: CPU time, steps kept, a restart.

| what          | measured                                                                     |
|---------------|------------------------------------------------------------------------------|
| engine thread | its CPU time for a block on the way to or from the disk, 64 in an operation  |
| steps kept    | steps/s of a computing engine while the disk is saturated, of those alone    |
| recovery      | a folder with a million rows, against a plain read of the same tables        |
| first hit     | from the start of the store process to the first block that it finds         |

The rows of a million blocks are written without their blocks, into files with holes: 256 MB.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab.bench.measure import collector_paused, summarize
from penstock.cache.operations import Purpose
from penstock.errors import UnavailableError
from penstock.machine.effects import Copy
from penstock.machine.events import CopyReport
from penstock.store.base import Space, part_name
from penstock.store.disk.folder import write_head
from penstock.store.disk.format import (
    PAGE_BYTES,
    ROW_BYTES,
    SEGMENT_BYTES,
    Geometry,
    seal_rows,
    write_generations,
)
from penstock.store.disk.index import DiskSegment, make_rows
from penstock.store.disk.io import DiskCalls
from penstock.store.disk.tier import DiskTier
from penstock.store.process.client import ArenaOffer
from penstock.store.process.link import FoundInStore, StoreLink
from penstock.store.process.messages import StoreConfig, StoreState, StoreTierConfig
from penstock.tiers.host import HostTier
from penstock.transport.waiting import wait_any, wait_readable
from penstock.vocabulary.checksums import Algorithm, CellSpan, life_salt
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KEY_BYTES, OperationId
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from lab.bench.report import BenchReport, Param

BLOCK_BYTES = 256 << 10
LAYERS = 32
OPERATION_BLOCKS = 64
OPERATIONS_IN_HAND = 8
"""Enough to keep all threads of the tier busy: 128 MiB."""
WAIT_S = 120.0
HUB, DISK = 0, 1
SPACE = bytes(16)
LIFE = 1
STEP_NUMBERS = 100_000
"""Whose sines stand for an engine's step: about a millisecond of one core."""
KEPT_MIN = 0.98
CPU_US_MAX = 10.0
RECOVERY_MIN = 0.5
FIRST_HIT_S_MAX = 2.0


def run_store_process(
    report: BenchReport,
    *,
    folder: Path,
    rounds: int,
    round_s: float = 2.0,
    rows: int = 1_000_000,
) -> None:
    """Adds the rows of this module.

    Raises:
        UnavailableError: the folder cannot be used, or the store process does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=folder.resolve()) as made:
        with _Engine(Path(made) / "used", size_bytes=8 << 30) as engine:
            _measure_thread(report, engine, rounds)
            _measure_steps(report, engine, rounds, round_s)
        _measure_restart(report, Path(made) / "full", rounds, rows)


def _form() -> Form:
    layout = Layout.opaque(
        layers=range(LAYERS),
        block_bytes=BLOCK_BYTES // LAYERS,
        encoding="bench",
        block_tokens=16,
        block_count=OPERATION_BLOCKS * OPERATIONS_IN_HAND,
    )
    return Form(layout=layout, checksum=Algorithm.XXH3)


class _Engine:
    """A hub, a store process, and a link to it."""

    def __init__(self, folder: Path, *, size_bytes: int) -> None:
        form = _form()
        part = part_name(form, rank=0, rank_count=1, equal=False)
        tier = StoreTierConfig(
            name="disk", kind="disk", size_bytes=size_bytes, options={"path": str(folder)}
        )
        config = StoreConfig(
            socket=str(folder.parent / "socket"), tiers=(tier,), log_level="warning"
        )
        self._stack = ExitStack()
        self.process = subprocess.Popen([sys.executable, "-m", "penstock.store", config.to_json()])
        self._stack.callback(self._end_process)
        host = self._stack.enter_context(
            HostTier.create(form.layout, OPERATION_BLOCKS * OPERATIONS_IN_HAND)
        )
        self._offer = ArenaOffer(config.socket, host, form=form, part=part)
        self._stack.callback(self._offer.close)
        self.link = StoreLink(
            config, life=LIFE, space=SPACE, arenas=[self._offer.name], tiers={DISK: "disk"}
        )
        self._stack.callback(lambda: self.link.close(time.monotonic() + WAIT_S))
        self._numbers = 0
        self.keys = self.other_keys(host.slot_count)
        slots = np.arange(host.slot_count, dtype=np.int32)
        blocks = np.zeros((host.slot_count, BLOCK_BYTES), dtype=np.uint8)
        sums = CellSpan.of(form.layout).sum_blocks(
            blocks, self.keys, form.checksum, salt=life_salt(LIFE, 0)
        )
        host.keep_sums(slots, sums)

    def __enter__(self) -> Self:
        deadline = time.monotonic() + WAIT_S
        on = False
        while not on:  # A tier that is being opened refuses copies.
            self.wait(deadline)
            states = [each for each in self.link.collect() if isinstance(each, StoreState)]
            on = bool(states) and states[-1].state.on
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end_process(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def wait(self, deadline: float) -> None:
        """Until there may be something to collect."""
        if time.monotonic() > deadline:
            raise UnavailableError(f"bench disk: the store did not answer within {WAIT_S:g} s")
        alarms = [at for at in (self.link.alarm, self._offer.alarm) if at is not None]
        descriptors = [self.link.descriptor, self._offer.descriptor]
        if not self.link.ready:
            wait_any((), descriptors, deadline=min([deadline, *alarms]))
        self._offer.poll()

    def copy(self, keys: Sequence[bytes], first: int, *, load: bool) -> None:
        self._numbers += 1
        slots = np.arange(first, first + len(keys), dtype=np.int32)
        self.link.order(
            Copy(
                operation=OperationId(LIFE, 0, self._numbers),
                purpose=Purpose.STAGE if load else Purpose.SAVE,
                source=DISK if load else HUB,
                target=HUB if load else DISK,
                keys=keys,
                source_slots=slots,
                target_slots=slots,
                deadline=time.monotonic() + WAIT_S,
                cause="bench disk",
                parents=() if load else [None, *keys[:-1]],
            )
        )

    @staticmethod
    def other_keys(count: int) -> list[bytes]:
        joined = secrets.token_bytes(count * KEY_BYTES)
        return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]

    def collect(self) -> int:
        """How many copies ended; all of them well."""
        reports = [each for each in self.link.collect() if isinstance(each, CopyReport)]
        for each in reports:
            if each.failure or each.faults:
                raise UnavailableError(f"bench disk: a copy failed: {each}")
        return len(reports)

    def cpu_s(self) -> float:
        """Of the store process, so far."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def _measure_thread(report: BenchReport, engine: _Engine, rounds: int) -> None:
    """CPU time of the engine's thread, in operations of 64 blocks, one after the other."""
    groups = range(0, len(engine.keys), OPERATION_BLOCKS)
    for load in (False, True):
        found_us = []
        for _ in range(rounds):
            # Saves hash nothing: other keys for the same bytes and sums will do.
            known = engine.keys if load else engine.other_keys(len(engine.keys))
            with collector_paused():
                for first in groups:
                    keys = known[first : first + OPERATION_BLOCKS]
                    spent_s = _spend(engine, keys, first, load=load)
                    found_us.append(spent_s / OPERATION_BLOCKS * 1e6)
        if not load:  # And once with those that the loads ask for.
            for first in groups:
                _spend(engine, engine.keys[first : first + OPERATION_BLOCKS], first, load=False)
        way = "load" if load else "save"
        summary = summarize(found_us)
        report.add_row(
            bench="disk",
            side="penstock",
            params={"block": "256 KiB", "operation_blocks": OPERATION_BLOCKS},
            metric=f"engine thread, CPU a block, {way}",
            unit="µs",
            summary=summary,
        )
        name = f"{way}: µs of the engine's thread a block"
        report.add_ratio(name, summary.median, at_most=CPU_US_MAX)


def _spend(engine: _Engine, keys: Sequence[bytes], first: int, *, load: bool) -> float:
    """CPU seconds of this thread for one operation."""
    deadline = time.monotonic() + WAIT_S
    began = time.thread_time()
    engine.copy(keys, first, load=load)
    engine.link.dispatch()
    spent = time.thread_time() - began
    ended = 0
    while not ended:
        engine.wait(deadline)
        began = time.thread_time()
        ended = engine.collect()
        spent += time.thread_time() - began
    return spent


def _measure_steps(report: BenchReport, engine: _Engine, rounds: int, round_s: float) -> None:
    alone, beside, own, rates, store = [], [], [], [], []
    for number in range(rounds):
        report.progress(f"steps beside a busy disk: round {number + 1} of {rounds}")
        with collector_paused():
            alone.append(_Steps().run(round_s))
            before = engine.cpu_s()
            steps = _Steps(engine)
            beside.append(steps.run(round_s))
        own.append(steps.own_s / steps.took_s)
        rates.append(steps.bytes / steps.took_s / 1e6)
        store.append((engine.cpu_s() - before) / steps.took_s)
    params: dict[str, Param] = {
        "cores": os.cpu_count() or 1,
        "step": f"{STEP_NUMBERS} sines",
    }
    for side, metric, unit, found in (
        ("alone", "engine steps", "1/s", alone),
        ("penstock", "engine steps", "1/s", beside),
        ("penstock", "disk meanwhile", "MB/s", rates),
        ("penstock", "engine thread's time for the store", "share", own),
        ("penstock", "cores taken by the store process", "cores", store),
    ):
        report.add_row(
            bench="disk",
            side=side,
            params=params,
            metric=metric,
            unit=unit,
            summary=summarize(found),
        )
    kept = float(np.median([mine / other for mine, other in zip(beside, alone, strict=True)]))
    report.add_ratio("engine steps kept while the disk is saturated", kept, at_least=KEPT_MIN)
    report.add_note(
        f"of the steps lost, {np.median(own):.3f} is the engine's own thread; the rest is the "
        f"competition for {params['cores']} cores with the store process "
        f"({np.median(store):.2f} cores) and the kernel"
    )


class _Steps:
    """A loop of computing; with an engine, copies are kept in hand all the time, half each way."""

    def __init__(self, engine: _Engine | None = None) -> None:
        self._engine = engine
        self._numbers = np.linspace(0.0, 1.0, STEP_NUMBERS)
        self._free = deque(range(0, OPERATION_BLOCKS * OPERATIONS_IN_HAND, OPERATION_BLOCKS))
        self._in_hand: deque[int] = deque()
        self.bytes = 0
        self.own_s = 0.0
        self.took_s = 0.0

    def run(self, seconds: float) -> float:
        """Steps a second; for longer than that if no copy has ended yet, on a slow machine."""
        count, began = 0, time.perf_counter()
        while not self._has_run(seconds, time.perf_counter() - began):
            np.sin(self._numbers)
            count += 1
            if self._engine is not None:
                before = time.thread_time()
                self._attend(self._engine, more=True)
                self.own_s += time.thread_time() - before
        self.took_s = time.perf_counter() - began
        deadline = time.monotonic() + WAIT_S
        while self._engine is not None and self._in_hand:
            self._engine.wait(deadline)
            self._attend(self._engine, more=False)
        return count / self.took_s

    def _has_run(self, seconds: float, so_far_s: float) -> bool:
        moves = self._engine is None or self.bytes > 0 or so_far_s > WAIT_S
        return moves and so_far_s >= seconds

    def _attend(self, engine: _Engine, *, more: bool) -> None:
        for _ in range(engine.collect()):
            # Which one ended does not matter: slots of saves are not changed, and every load
            # brings what is there.
            self._free.append(self._in_hand.popleft())
            self.bytes += OPERATION_BLOCKS * BLOCK_BYTES if more else 0
        while more and self._free:
            first = self._free.popleft()
            self._in_hand.append(first)
            load = first // OPERATION_BLOCKS % 2 == 0
            keys = engine.keys[first : first + OPERATION_BLOCKS]
            if not load:
                keys = engine.other_keys(OPERATION_BLOCKS)
            engine.copy(keys, first, load=load)
        engine.link.dispatch()


# A restart


def _measure_restart(report: BenchReport, folder: Path, rounds: int, rows: int) -> None:
    report.progress(f"restart: writing the tables of {rows:,} blocks")
    paths, key = _write_tables(folder, rows)
    geometry = _geometry()
    table_bytes = geometry.slot_count * ROW_BYTES
    read_s, recovered_s, hit_s, memory = [], [], [], []
    for _ in range(rounds):
        _forget_pages(paths)
        with collector_paused():
            began = time.perf_counter()
            for path in paths:
                _read_head_of(path, table_bytes)
            read_s.append(time.perf_counter() - began)
        _forget_pages(paths)
        with collector_paused():
            resident = _resident_bytes()
            recovered_s.append(_recover(folder, len(paths) * SEGMENT_BYTES))
            memory.append(max(0, _resident_bytes() - resident) / rows)
        _forget_pages(paths)
        hit_s.append(_first_hit(folder, len(paths) * SEGMENT_BYTES, key))
    params = {"rows": rows, "segments": len(paths)}
    for side, metric, unit, found in (
        ("plain read", "tables read", "s", read_s),
        ("penstock", "tables recovered", "s", recovered_s),
        ("penstock", "memory a block, at most", "bytes", memory),
        ("penstock", "first hit after the start of a process", "s", hit_s),
    ):
        summary = summarize(found)
        report.add_row(
            bench="disk", side=side, params=params, metric=metric, unit=unit, summary=summary
        )
    kept = float(np.median([a / b for a, b in zip(read_s, recovered_s, strict=True)]))
    report.add_ratio("recovery: rate of a plain read of tables kept", kept, at_least=RECOVERY_MIN)
    report.add_ratio(
        "first hit after a restart, s", float(np.median(hit_s)), at_most=FIRST_HIT_S_MAX
    )


def _geometry() -> Geometry:
    return Geometry(segment_bytes=SEGMENT_BYTES, block_bytes=BLOCK_BYTES, cell_count=LAYERS)


def _write_tables(folder: Path, rows: int) -> tuple[list[str], bytes]:
    """Segments with rows and no blocks; their paths, and a key of the newest."""
    folder.mkdir(mode=0o700)
    write_generations(folder, {SPACE: 0})  # Segments without it would be void.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _write_segments(folder, descriptor, rows)
    finally:
        os.close(descriptor)


def _write_segments(folder: Path, descriptor: int, rows: int) -> tuple[list[str], bytes]:
    form, geometry = _form(), _geometry()
    calls = DiskCalls(fallocate=lambda fd, offset, length: os.ftruncate(fd, offset + length))
    paths: list[str] = []
    keys: list[bytes] = []
    for number in range(-(-rows // geometry.slot_count)):
        path = str(folder / f"{number:08d}.segment")
        segment = DiskSegment(number, path, SEGMENT_BYTES, descriptor)
        part = part_name(form, rank=0, rank_count=1, equal=False)
        segment.begin_life(geometry, life=secrets.randbits(64) | 1, age=number + 1, part=part)
        segment.form, segment.algorithm = form.fingerprint, form.checksum.value.encode()
        write_head(segment, None, calls)
        count = geometry.slot_count
        keys = _Engine.other_keys(count)
        made = make_rows(
            segment,
            range(count),
            Space(SPACE, 0),
            keys,
            [None, *keys[:-1]],
            np.zeros(count, dtype=np.uint64),
            now=time.time(),
        )
        fd = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(fd, seal_rows(made).tobytes(), PAGE_BYTES)
            os.fsync(fd)
        finally:
            os.close(fd)
        paths.append(path)
    return paths, keys[0]


def _forget_pages(paths: Sequence[str]) -> None:
    """So that the next read comes from the disk; there is nothing to write back."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _read_head_of(path: str, table_bytes: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.pread(fd, PAGE_BYTES + table_bytes, 0)
    os.close(fd)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _recover(folder: Path, size_bytes: int) -> float:
    """Seconds from opening the tier until all tables are known."""
    began = time.perf_counter()
    tier = DiskTier(folder, size_bytes)
    deadline = time.monotonic() + WAIT_S
    try:
        while tier.state().recovered < 1.0:
            if not wait_readable(tier.descriptor, deadline):
                raise UnavailableError(f"bench disk: recovery took more than {WAIT_S:g} s")
        return time.perf_counter() - began
    finally:
        tier.close(deadline=deadline)


def _first_hit(folder: Path, size_bytes: int, key: bytes) -> float:
    """Seconds from the start of a store process until a block of the newest segment is found."""
    began = time.perf_counter()
    with _Engine(folder, size_bytes=size_bytes) as engine:
        deadline = time.monotonic() + WAIT_S
        while True:
            engine.link.find(DISK, [key])
            engine.link.dispatch()
            found: list[FoundInStore] = []
            while not found:
                engine.wait(deadline)
                found = [each for each in engine.link.collect() if isinstance(each, FoundInStore)]
            if found[0].present[0]:
                return time.perf_counter() - began
