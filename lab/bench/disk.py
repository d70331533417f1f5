"""The disk tier on this machine's disk, beside `fio` and beside plain threads.

All sides move as many bytes with operations of the same size, direct I/O and as many threads, in
turn in every round; the files lie in one folder. All but fio use the memory of one arena.

| side             | what it does                                                              |
|------------------|---------------------------------------------------------------------------|
| `penstock`       | jobs of 64 blocks from an arena to a `DiskTier` and back; sums verified   |
| `fio`            | `psync`, where fio is installed                                           |
| `threads`        | Python threads that call `pwritev` and `preadv` on one file               |
| `threads + sums` | the same, which sum what they read: the ceiling of `penstock`             |

`single` rows have jobs of one block: what blocks cost that have no neighbours.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lab.bench.measure import collector_paused, summarize
from penstock.errors import UnavailableError
from penstock.movers.packing import PackedSums
from penstock.store.base import LoadJob, MappedArena, SaveJob, Space, part_name
from penstock.store.disk.io import RUN_BYTES_MAX
from penstock.store.disk.tier import DiskTier
from penstock.tiers.host import HostTier
from penstock.transport.waiting import wait_readable
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KEY_BYTES
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from lab.bench.report import BenchReport

ROUNDS = 5
THREADS = 6
JOB_BLOCKS = 64
ROUND_BYTES = 512 << 20
TIER_BYTES = 8 << 30
"""So that segments have their full size; what the rounds do not write is not allocated."""
WAIT_S = 120.0
SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20, "2 MiB": 2 << 20}
KEPT_MIN = 0.9
LAYERS = 32
MIB = 1 << 20


class Way(NamedTuple):
    """One set of rows: the size of a block, and how many travel in one operation."""

    name: str
    block_bytes: int
    job_blocks: int
    round_bytes: int
    """What each side moves in a round, each way."""

    @property
    def operation_bytes(self) -> int:
        """What one system call moves."""
        blocks = min(self.job_blocks, max(1, RUN_BYTES_MAX // self.block_bytes))
        return blocks * self.block_bytes


def run_disk(
    report: BenchReport,
    *,
    folder: Path,
    rounds: int,
    round_bytes: int = ROUND_BYTES,
    sizes: Sequence[str] = tuple(SIZES),
) -> None:
    """Measures every side in turn, and adds rows and ratios.

    Raises:
        UnavailableError: the folder cannot be used, or blocks do not come back.
    """
    ways = [Way(name, SIZES[name], JOB_BLOCKS, round_bytes) for name in sizes]
    ways.append(Way("256 KiB, single", SIZES["256 KiB"], 1, round_bytes))
    if shutil.which("fio") is None:
        report.add_note("fio is not installed: its rows and the ratios to it are missing")
    try:
        for way in ways:
            with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=folder) as made:
                _measure(report, Path(made), way, rounds)
    except OSError as error:
        raise UnavailableError(f"bench disk cannot use {folder}: {error}") from error


def _measure(report: BenchReport, folder: Path, way: Way, rounds: int) -> None:
    sides: dict[str, Callable[[], tuple[float, float]]] = {}
    with DiskRounds(folder / "tier", way) as disk:
        sides["penstock"] = disk.round
        if shutil.which("fio") is not None:
            sides["fio"] = lambda: _fio(folder, way)
        sides["threads"] = lambda: _threads(folder, way, disk.memory)
        sides["threads + sums"] = lambda: _threads(folder, way, disk.memory, sums=disk.sums)
        rates: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for number in range(-1, rounds):  # The first round makes files and fills caches.
            report.progress(f"disk, blocks of {way.name}: round {number + 1} of {rounds}")
            order = list(sides) if number % 2 else list(sides)[::-1]
            for side in order:
                with collector_paused():
                    down_and_up = sides[side]()
                if number >= 0:
                    rates[side].append(down_and_up)
    for column, direction in enumerate(("save", "load")):
        for side, found in rates.items():
            report.add_row(
                bench="disk",
                side=side,
                params={
                    "block": way.name,
                    "operation_mib": way.operation_bytes / MIB,
                    "threads": THREADS,
                },
                metric=direction,
                unit="MB/s",
                summary=summarize([each[column] / 1e6 for each in found]),
            )
        for other in [side for side in ("fio", "threads + sums") if side in sides]:
            pairs = zip(rates["penstock"], rates[other], strict=True)
            value = float(np.median([mine[column] / theirs[column] for mine, theirs in pairs]))
            name = f"{way.name}, {direction}: rate of {other} kept"
            report.add_ratio(name, value, at_least=KEPT_MIN)


class DiskRounds:
    """An arena over a disk tier; every round saves new blocks and loads them again."""

    def __init__(self, folder: Path, way: Way) -> None:
        self._way = way
        self._count = way.round_bytes // way.block_bytes
        layout = Layout.opaque(
            layers=range(LAYERS),
            block_bytes=way.block_bytes // LAYERS,
            encoding="bench",
            block_tokens=16,
            block_count=self._count,
        )
        host = HostTier.create(layout, self._count)
        form = Form(layout=layout, checksum=Algorithm.XXH3)
        part = part_name(form, rank=0, rank_count=1, equal=False)
        self._arena = MappedArena(host, form, part)
        self._bytes = np.lib.stride_tricks.as_strided(
            host.blocks(()).buffers[0],
            shape=(self._count, way.block_bytes),
            strides=(host.slot_bytes, 1),
        )
        self._tier = DiskTier(folder, size_bytes=TIER_BYTES, threads=THREADS)
        self._tickets = 0
        self.memory = host.arena.bytes[host.blocks_offset :][: way.round_bytes]
        """All blocks. Rates depend on how its pages lie, so that other sides use it as well."""
        self.sums = PackedSums(layout, Algorithm.XXH3)

    def __enter__(self) -> DiskRounds:
        return self

    def __exit__(self, *_: object) -> None:
        self._tier.close(deadline=time.monotonic() + WAIT_S)
        self._arena.host.close()

    def round(self) -> tuple[float, float]:
        """Bytes a second down and up."""
        keys = [secrets.token_bytes(KEY_BYTES) for _ in range(self._count)]
        self._bytes[:] = np.random.default_rng().integers(0, 256, self._bytes.shape, np.uint8)
        slots = np.arange(self._count, dtype=np.int32)
        sums = self._arena.span.sum_blocks(self._bytes, keys, Algorithm.XXH3)
        self._arena.host.keep_sums(slots, sums)
        saved = self._time(lambda space: self._jobs(space, keys, load=False))
        expected = self._bytes[:: max(1, self._count // 16)].copy()
        self._bytes[:] = 0
        loaded = self._time(lambda space: self._jobs(space, keys, load=True))
        if not np.array_equal(self._bytes[:: max(1, self._count // 16)], expected):
            raise UnavailableError("bench disk: blocks came back with other bytes")
        return saved, loaded

    def _time(self, begin: Callable[[Space], int]) -> float:
        name = bytes(16)
        began = time.perf_counter()
        left = begin(Space(name, self._tier.generation(name)))
        deadline = time.monotonic() + WAIT_S
        while left:
            if not wait_readable(self._tier.descriptor, deadline):
                raise UnavailableError(f"bench disk: {left} jobs did not end within {WAIT_S:g} s")
            # Until these were asked for, the descriptor stays readable and this loop would spin.
            self._tier.state()
            self._tier.take_gone()
            for ended in self._tier.collect():
                left -= 1
                if ended.faults or ended.failure:
                    raise UnavailableError(f"bench disk: a job failed: {ended}")
        return self._way.round_bytes / (time.perf_counter() - began)

    def _jobs(self, space: Space, keys: list[bytes], *, load: bool) -> int:
        count = 0
        for first in range(0, len(keys), self._way.job_blocks):
            chain = keys[first : first + self._way.job_blocks]
            slots = range(first, first + len(chain))
            self._tickets += 1
            count += 1
            if load:
                self._tier.load(LoadJob(self._tickets, self._arena, space, chain, slots, 0))
            else:
                parents = [None, *chain[:-1]]
                job = SaveJob(self._tickets, self._arena, space, chain, parents, slots, 0)
                self._tier.save(job)
        return count


def _fio(folder: Path, way: Way) -> tuple[float, float]:
    """What fio writes to a new file and reads from it again, in bytes a second."""
    file = folder / "fio.img"
    share = way.round_bytes // THREADS // way.operation_bytes * way.operation_bytes
    rates = []
    for kind in ("write", "randread"):
        command = [
            *("fio", "--name=bench", f"--filename={file}", f"--rw={kind}", "--ioengine=psync"),
            *(f"--bs={way.operation_bytes}", "--direct=1", "--thread", f"--numjobs={THREADS}"),
            *(f"--size={share}", f"--offset_increment={share}", "--fallocate=posix"),
            *("--group_reporting", "--output-format=json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        if done.returncode:
            raise UnavailableError(f"bench disk: fio failed: {done.stderr.strip()}")
        [job] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        rates.append(float(job["write" if kind == "write" else "read"]["bw_bytes"]))
    file.unlink()
    return rates[0], rates[1]


def _threads(
    folder: Path, way: Way, memory: NDArray[np.uint8], *, sums: PackedSums | None = None
) -> tuple[float, float]:
    """The same with threads of Python, without a tier around it."""
    keys = [bytes(KEY_BYTES)] * (way.operation_bytes // way.block_bytes)

    def read(fd: int, buffers: list[memoryview], offset: int) -> None:
        os.preadv(fd, buffers, offset)
        if sums is not None:
            places = np.arange(offset, offset + way.operation_bytes, way.block_bytes)
            sums.sum_pairs(memory, places, keys, (0, 1))

    file = folder / "threads.img"
    count = way.round_bytes // way.operation_bytes
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    views = list(_pieces(memory.data, way))
    try:
        os.posix_fallocate(fd, 0, way.round_bytes)
        rates = []
        with ThreadPoolExecutor(THREADS) as pool:
            for call in (os.pwritev, read):
                began = time.perf_counter()
                offsets = range(0, count * way.operation_bytes, way.operation_bytes)
                list(pool.map(call, [fd] * count, views, offsets))
                rates.append(count * way.operation_bytes / (time.perf_counter() - began))
    finally:
        os.close(fd)
        file.unlink()
    return rates[0], rates[1]


def read_with_threads(folder: Path, way: Way) -> float:
    """Bytes a second that plain threads read, direct I/O, from a file that was just written."""
    memory = np.frombuffer(mmap.mmap(-1, way.round_bytes), dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 1  # An arena has its pages, too.
    return _threads(folder, way, memory)[1]


def _pieces(whole: memoryview, way: Way) -> Iterator[list[memoryview]]:
    for first in range(0, way.round_bytes - way.operation_bytes + 1, way.operation_bytes):
        yield [
            whole[at : at + way.block_bytes]
            for at in range(first, first + way.operation_bytes, way.block_bytes)
        ]
