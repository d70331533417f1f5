"""`lab bench sglang`: what an SGLang computed, the next SGLang process answers from below.

| side               | the processes share                                                    |
|--------------------|------------------------------------------------------------------------|
| `plain`            | nothing: every prompt is computed                                      |
| `hicache file`     | a folder of HiCache's own file backend                                 |
| `penstock storage` | a disk of Penstock, as storage backend of HiCache                      |
| `penstock linker`  | a disk of Penstock, below SGLang's radix cache                         |
| `lmcache`          | a server of LMCache, which stays (SGLang's own connector for it)       |

The first process of a side computes prompts until all of them are stored, and is killed. Then the
second ones of all sides run together and are asked for each prompt once, in turns: seconds to the
first token, and CPU seconds of SGLang's scheduler thread and of its process.

The one rule: a side is compared only if it found what it should, and its log-probabilities are
those of `plain`. One that cannot run is a note that says why, and the others go on.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lab.bench.measure import summarize
from lab.bench.sglang_child import PAGE_TOKENS, TAIL_TOKENS
from lab.bench.store_servers import StoreServers
from lab.bench.vllm_engine import START_S, EngineProcess, ending_in_order
from lab.bench.vllm_model import block_bytes
from penstock.errors import UnavailableError
from penstock.store.disk.inspect import inspect_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab.bench.report import BenchReport

TOKENS = 2048
TOKENS_MAX = 4096 - 2 * PAGE_TOKENS
"""The model has 4,096 positions."""
PROMPTS = 6
LOGPROB_MAX = 1e-3
QUIET_S = 3.0
"""A store that has grown for so long no more has everything."""
STORED_S = 120.0
NUDGE_S = 0.25
NUDGE_SEED = 1_000_000
PLAIN = "plain"
LMCACHE = "lmcache"
MODEL = """
import sys
from pathlib import Path
from lab.bench.vllm_model import make_model
make_model(Path(sys.argv[1]))
"""
METRICS = {
    "seconds": "first token",
    "thread_s": "CPU of the scheduler's thread",
    "process_s": "CPU of its process",
}


@dataclass(slots=True)
class SglangSide:
    """One side while it is measured."""

    name: str
    python: Path
    folder: Path
    asked: dict[str, Any]
    """What its processes are told."""
    count: Callable[[], int]
    """How many pages or files its store has; counts of two kinds are not compared."""
    variables: dict[str, str] = field(default_factory=dict)
    answers: list[dict[str, float]] = field(default_factory=list)

    def start(self) -> EngineProcess:
        """Starts a process; the caller closes it."""
        return EngineProcess(
            self.name,
            self.python,
            self.asked,
            module="lab.bench.sglang_child",
            variables={"SGLANG_USE_CPU_ENGINE": "0", **self.variables},
        )


def run_sglang(
    report: BenchReport, *, python: Path, tokens: int, prompts: int, sides: Sequence[str]
) -> None:
    """Measures sides that keep pages beside one that computes; adds rows and ratios.

    Raises:
        UnavailableError: the environment of `python` lacks SGLang, or what makes a model.
    """
    with ending_in_order(), ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        report.progress("making a model")
        _make_model(python, place / "model")
        chosen = [_side(name, place, python, tokens, prompts) for name in sides]
        ready = _store_all(report, stack, chosen, tokens=tokens, prompts=prompts)
        tell(report, _ask_in_turns(report, ready, tokens, prompts), tokens=tokens)


def _side(name: str, place: Path, python: Path, tokens: int, prompts: int) -> SglangSide:
    folder = place / name.replace(" ", "-")
    folder.mkdir(mode=0o700)
    pages = tokens // PAGE_TOKENS
    stored_gib = (prompts + 2) * pages * block_bytes(PAGE_TOKENS) / (1 << 30)
    asked = {"model": str(place / "model"), "folder": str(folder), "pages": pages}
    asked["gib"] = round(4 * stored_gib, 3)
    # Below HiCache it holds what is on its way. The linker's own is where pages stay until a step
    # has begun to write them, and here steps take seconds.
    asked["host_pages"] = 2 * pages if name == "penstock storage" else (prompts + 2) * pages
    count = (lambda: _files(folder)) if "penstock" not in name else (lambda: _live(folder))
    return SglangSide(name, python, folder, asked, count)


def _files(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


def _live(folder: Path) -> int:
    return sum(each.live for each in inspect_folder(folder).report.spaces)


def _make_model(python: Path, folder: Path) -> None:
    made = subprocess.run(
        [str(python), "-c", MODEL, str(folder)],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    if made.returncode:
        raise UnavailableError(f"no model can be made by {python}: {made.stderr[-500:]}")


def _store_all(
    report: BenchReport,
    stack: ExitStack,
    sides: Sequence[SglangSide],
    *,
    tokens: int,
    prompts: int,
) -> list[SglangSide]:
    """First processes compute prompts until all of them are stored; the sides that could."""
    ready: list[SglangSide] = []
    processes: dict[str, EngineProcess] = {}
    try:
        for side in sides:
            try:
                if side.name == LMCACHE:
                    servers = stack.enter_context(StoreServers(side.folder, side.python))
                    side.asked["port"] = servers.start_lmcache(None, 2.0, chunk_tokens=PAGE_TOKENS)
            except UnavailableError as problem:
                _tell_absent(report, side.name, problem)
            else:
                ready.append(side)
                if side.name != PLAIN:
                    processes[side.name] = side.start()
        for side in [each for each in ready if each.name in processes]:
            report.progress(f"{side.name}: the first process computes")
            try:
                _store(side, processes[side.name], report, tokens=tokens, prompts=prompts)
            except UnavailableError as problem:
                _tell_absent(report, side.name, problem)
                ready.remove(side)
            processes[side.name].close()
    finally:
        for process in processes.values():
            process.close()
    return ready


def _store(
    side: SglangSide, process: EngineProcess, report: BenchReport, *, tokens: int, prompts: int
) -> None:
    process.wait_ready()
    for seed in range(prompts):
        process.ask([seed, tokens + TAIL_TOKENS])
    stored, grown_at = -1, time.monotonic()
    deadline = grown_at + STORED_S
    while (now := time.monotonic()) < min(deadline, grown_at + QUIET_S):
        process.require_running(NUDGE_S)
        process.ask([NUDGE_SEED, 1])  # HiCache hears of what it wrote between two steps.
        if (count := side.count()) != stored:
            stored, grown_at = count, now
    report.progress(f"{side.name}: has stored {stored}")


def _ask_in_turns(
    report: BenchReport, sides: Sequence[SglangSide], tokens: int, prompts: int
) -> list[SglangSide]:
    """Asks the second processes of all sides for each prompt; those that answered all of them."""
    processes: dict[str, EngineProcess] = {}
    left = list(sides)
    try:
        report.progress("the second processes start")
        for side in sides:
            processes[side.name] = side.start()
        for side in sides:
            try:
                processes[side.name].wait_ready()
                # The first request of a process takes longer.
                processes[side.name].ask([NUDGE_SEED + 1, 2 * PAGE_TOKENS])
            except UnavailableError as problem:
                _tell_absent(report, side.name, problem)
                left.remove(side)
        for seed in range(prompts):
            for side in left.copy():
                try:
                    answer = processes[side.name].ask([seed, tokens + TAIL_TOKENS])
                except UnavailableError as problem:
                    _tell_absent(report, side.name, problem)
                    left.remove(side)
                else:
                    side.answers.append(answer)
                    report.progress(f"{side.name}: prompt {seed}: {json.dumps(answer)}")
            # Who was first in this round is last in the next one.
            left = [*left[1:], *left[:1]]
    finally:
        for process in processes.values():
            process.close()
    return [side for side in sides if side in left]


def tell(report: BenchReport, sides: Sequence[SglangSide], *, tokens: int) -> None:
    """Adds what each side did, and compares those that found the prompts and were right."""
    reference = next((side.answers for side in sides if side.name == PLAIN), None)
    right: dict[str, list[dict[str, float]]] = {}
    for side in sides:
        for name, metric in METRICS.items():
            report.add_row(
                bench="sglang",
                side=side.name,
                params={"tokens": tokens},
                metric=metric,
                unit="s",
                summary=summarize([each[name] for each in side.answers]),
            )
        if _is_right(report, side, reference or side.answers, tokens=tokens):
            right[side.name] = side.answers
    for name, answers in right.items():
        for other, theirs in right.items():
            if name.startswith("penstock") and not other.startswith("penstock"):
                sooner = median(
                    there["seconds"] / here["seconds"]
                    for there, here in zip(theirs, answers, strict=True)
                )
                report.add_ratio(f"{name}: sooner than {other}, times", sooner, at_least=1.0)


def _is_right(
    report: BenchReport,
    side: SglangSide,
    reference: Sequence[dict[str, float]],
    *,
    tokens: int,
) -> bool:
    """Whether a side found what it should, and answered as if it had computed it."""
    worst = max(
        abs(one["logprob"] - other["logprob"])
        for one, other in zip(reference, side.answers, strict=True)
    )
    if worst > LOGPROB_MAX:
        report.add_note(f"WRONG: log-probabilities of {side.name} differ by {worst:.3g}")
    cached = [int(each["cached"]) for each in side.answers]
    whole = side.name == PLAIN or min(cached) >= tokens
    if side.name != PLAIN:
        report.add_note(f"{side.name}: {cached} of {tokens} tokens were found")
    if not whole:
        report.add_note(f"{side.name} is not compared: it had to compute what was not found")
    return whole and worst <= LOGPROB_MAX


def _tell_absent(report: BenchReport, name: str, problem: UnavailableError) -> None:
    lines = str(problem).strip().splitlines()
    errors = [line for line in lines if "Error" in line] or lines
    report.add_note(f"no side {name}: {lines[0][:200]} … {errors[-1][:300]}")


SIDES = (PLAIN, "hicache file", "penstock storage", "penstock linker", LMCACHE)
