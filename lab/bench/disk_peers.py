"""Disk tiers of peers beside Penstock's: the same blocks, jobs, threads and folder, in turns.

| side      | what it does                                                                       |
|-----------|------------------------------------------------------------------------------------|
| vllm fs   | `FileSystemTierManager` of vLLM: a file for each block, direct I/O, no sums         |
| lmcache   | `LocalDiskBackend` of LMCache: a file for each block, direct I/O, no sums           |

Each peer runs in its own process, with the Python of an environment that has it (for LMCache,
`PYTHONPATH` may name a folder with it). The process prints a line for every round.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab.bench.disk import JOB_BLOCKS, ROUND_BYTES, SIZES, THREADS, DiskRounds, Way
from lab.bench.measure import summarize
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.bench.report import BenchReport

SIDES = ("vllm fs", "lmcache")
CHILD = Path(__file__).parent / "disk_peer_child.py"
START_S = 180.0
ROUND_S = 180.0

Rates = tuple[float, float]


def run_disk_peers(
    report: BenchReport,
    *,
    python: Path,
    folder: Path,
    rounds: int,
    round_bytes: int = ROUND_BYTES,
    sizes: Sequence[str] = tuple(SIZES),
) -> None:
    """Adds rows for Penstock and for each peer that runs, and their ratios; a note for others."""
    for name in sizes:
        way = Way(name, SIZES[name], JOB_BLOCKS, round_bytes)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=folder.resolve()) as made:
            _measure(report, way, Path(made), python, rounds)


def _measure(report: BenchReport, way: Way, folder: Path, python: Path, rounds: int) -> None:
    peers = {side: _Peer(side, way, folder / side.replace(" ", "-"), python) for side in SIDES}
    found: dict[str, list[Rates]] = {"penstock": []}
    with DiskRounds(folder / "penstock", way) as own:
        for number in range(-1, rounds):
            rates = {"penstock": own.round()}
            for side, peer in list(peers.items()):
                try:
                    rates[side] = peer.round()
                except UnavailableError as error:
                    report.add_note(f"{way.name}, {side}: {error}")
                    del peers[side]
            if number >= 0:
                for side, each in rates.items():
                    found.setdefault(side, []).append(each)
    for peer in peers.values():
        peer.close()
    for column, direction in enumerate(("save", "load")):
        for side, moved in found.items():
            report.add_row(
                bench="disk",
                side=side,
                params={"block": way.name, "threads": THREADS},
                metric=direction,
                unit="MB/s",
                summary=summarize([rates[column] / 1e6 for rates in moved]),
            )
        for side in peers:
            pairs = zip(found["penstock"], found[side], strict=True)
            times = float(np.median([mine[column] / theirs[column] for mine, theirs in pairs]))
            report.add_ratio(f"{way.name}, {direction}: times {side}", times, at_least=1.0)


class _Peer:
    """A process that runs a round for every line it gets."""

    def __init__(self, side: str, way: Way, folder: Path, python: Path) -> None:
        self._folder = folder
        folder.mkdir()
        wanted: dict[str, str | int] = {
            "side": side,
            "folder": str(folder),
            "block_bytes": way.block_bytes,
        }
        wanted |= {"count": way.round_bytes // way.block_bytes, "threads": THREADS}
        wanted |= {"job_blocks": way.job_blocks}
        self._process = subprocess.Popen(
            [str(python), str(CHILD), json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def round(self) -> Rates:
        """Bytes a second down and up.

        Raises:
            UnavailableError: the peer does not run here.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(START_S + ROUND_S, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write("round\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith("["):
                    save, load = json.loads(line)
                    return save, load
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        _, errors = self._process.communicate()
        last = errors.strip().splitlines()[-1:] or ["no message"]
        raise UnavailableError(f"does not run here: {last[0]}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._folder)
