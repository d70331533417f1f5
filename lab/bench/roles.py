"""What changes of roles by load are worth: prompts in time, beside fixed splits of four instances.

The load shifts between long prompts with short answers and short prompts with long answers. A
prompt is in time if its first token comes within a given time.

| part   | is                                                                                   |
|--------|--------------------------------------------------------------------------------------|
| rates  | `lab.sim.roles`: instances as rates, in simulated time, from seeds                    |
| served | `penstock serve` with a model of random weights on this machine's cores, and clients  |
|        | that ask again as soon as they have their answer                                      |

Four instances that share few cores are not four instances: where all of them are busy, the cores
decide, not the split. So the served part says how the real thing behaves, and little about what a
split is worth on machines of their own.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import httpx

from lab.bench.measure import summarize
from lab.bench.pair import Scale, write_model
from lab.sim.roles import RoleWorld, long_answers, long_prompts
from lab.soak.world import SMALL
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.bench.report import BenchReport

SPLITS = ((1, 3), (2, 2), (3, 1))
SEEDS = 10
RATE_PHASE_S = 300.0
RATE_CYCLES = 3
RATE_PACES_S = (10.0, 30.0)
RATE_FIRST_TOKEN_S = 10.0
TARGET = 0.9
CLIENTS = 16
SERVED_CYCLES = 2
SERVED_FIRST_TOKEN_S = 3.0
SERVED_PACE_S = 4.0
START_S = 300.0
END_S = 60.0
ANSWER_S = 120.0
CONFIG = """
version = 1
model.name = "random"
cache = {{ blocks = 1024, block_tokens = 16 }}
engine = {{ step_requests = 4, threads = 1 }}
serve = {{ prefill = {prefill}, decode = {decode}, balance_s = {pace_s}, port = 0 }}
"""


class Load(NamedTuple):
    """What clients ask for in a phase, in tokens."""

    prompt: int
    answer: int


LOADS = (Load(1500, 2), Load(40, 120))


def run_rates(report: BenchReport, *, seeds: int = SEEDS) -> None:
    """Simulates each split and each pace, from the same seeds."""
    phases = [long_prompts(RATE_PHASE_S), long_answers(RATE_PHASE_S)] * RATE_CYCLES
    report.progress(f"rates from {seeds} seeds")
    fixed: dict[str, list[float]] = {}
    for prefills, decodes in SPLITS:
        fixed[f"{prefills} + {decodes}"] = [
            RoleWorld(seed=seed, prefills=prefills, decodes=decodes, phases=phases, pace_s=0)
            .run()
            .in_time(RATE_FIRST_TOKEN_S)
            for seed in range(seeds)
        ]
    for side, found in fixed.items():
        _add(report, "rates", side, "prompts in time", "/s", found)
    best = max(fixed.values(), key=median)
    for pace_s in RATE_PACES_S:
        worlds = [
            RoleWorld(seed=seed, prefills=2, decodes=2, phases=phases, pace_s=pace_s).run()
            for seed in range(seeds)
        ]
        rates = [world.in_time(RATE_FIRST_TOKEN_S) for world in worlds]
        side = f"balance_s = {pace_s:g}"
        _add(report, "rates", side, "prompts in time", "/s", rates)
        _add(report, "rates", side, "changes", "", [float(len(each.changes)) for each in worlds])
        report.add_ratio(
            f"rates: {side} ÷ best fixed split", median(rates) / median(best), at_least=TARGET
        )


@dataclass(slots=True)
class Tally:
    """What clients saw."""

    in_time: int = 0
    late: int = 0
    failed: list[str] = field(default_factory=list)


def run_served(report: BenchReport, *, phase_s: float) -> None:
    """Serves the same phases with each split and with a balance, one after the other."""
    with tempfile.TemporaryDirectory(prefix="penstock-roles-") as name:
        folder = Path(name)
        write_model(folder / "model", Scale(SMALL, "float32", (), 0, 0.0), device="cpu")
        found: dict[str, float] = {}
        for prefill, decode, pace_s in (*((*each, 0.0) for each in SPLITS), (2, 2, SERVED_PACE_S)):
            side = f"balance_s = {pace_s:g}" if pace_s else f"{prefill} + {decode}"
            report.progress(f"served: {side}, {2 * SERVED_CYCLES * phase_s:g} s")
            file = folder / "penstock.toml"
            file.write_text(CONFIG.format(prefill=prefill, decode=decode, pace_s=pace_s))
            with _serving(folder, file) as address:
                tally = asyncio.run(_ask(address, phase_s))
                changes = _changes(address)
            found[side] = tally.in_time / (2 * SERVED_CYCLES * phase_s)
            for metric, count in (("late", tally.late), ("failed", len(tally.failed))):
                _add(report, "served", side, metric, "", [float(count)])
            _add(report, "served", side, "prompts in time", "/s", [found[side]])
            if pace_s:
                _add(report, "served", side, "changes", "", [changes])
            if tally.failed:
                report.add_note(f"served, {side}: {tally.failed[0]}")
    side, rate = found.popitem()
    report.add_ratio(
        f"served: {side} ÷ best fixed split", rate / max(found.values()), at_least=TARGET
    )


async def _ask(address: str, phase_s: float) -> Tally:
    """Asks through all phases; an answer counts for the phase in which it was asked for."""
    loop = asyncio.get_running_loop()
    tally, rng = Tally(), Random(7)
    limits = httpx.Limits(max_keepalive_connections=0)
    began = loop.time()
    until = began + 2 * SERVED_CYCLES * phase_s

    async def client(http: httpx.AsyncClient) -> None:
        while (now := loop.time()) < until:
            load = LOADS[int((now - began) / phase_s) % len(LOADS)]
            prompt = [rng.randrange(256) for _ in range(load.prompt)]
            body = {
                "prompt": prompt,
                "max_tokens": load.answer,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            try:
                first_s = await _first_token(http, body)
            except (httpx.HTTPError, ValueError) as error:
                tally.failed.append(str(error) or type(error).__name__)
                continue
            if first_s <= SERVED_FIRST_TOKEN_S:
                tally.in_time += 1
            else:
                tally.late += 1

    async with httpx.AsyncClient(base_url=address, timeout=ANSWER_S, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return tally


async def _first_token(http: httpx.AsyncClient, body: dict[str, object]) -> float:
    """The time to first token of an answer that is read to its end.

    Raises `ValueError`: it broke off, or was refused.
    """
    loop = asyncio.get_running_loop()
    began, first, last = loop.time(), 0.0, ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line:
                first, last = first or loop.time(), line
    if last != "data: [DONE]":
        raise ValueError(f"an answer broke off: {last}")
    return first - began


def _changes(address: str) -> float:
    """How many roles were changed by load."""
    page = httpx.get(f"{address}/metrics", timeout=ANSWER_S).text
    return sum(
        float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("penstock_role_changes_total{")
    )


@contextmanager
def _serving(folder: Path, file: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "penstock.cli.entry", "serve", "--config", str(file)]
    state = {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--model", str(folder / "model")],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **state},
        )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline() if ready else ""
        if " at http://" not in line:
            raise UnavailableError(f"the server did not start: {(folder / 'log').read_text()}")
        yield "http://" + line.partition(" at http://")[2].split("/")[0]
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _add(
    report: BenchReport, bench: str, side: str, metric: str, unit: str, values: list[float]
) -> None:
    report.add_row(
        bench=bench,
        side=side,
        params={},
        metric=metric,
        unit=unit or "count",
        summary=summarize(values),
    )
