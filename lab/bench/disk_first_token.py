"""A long prompt whose prefix lies on disk: time to its first token.

| side       | what it does                                                             |
|------------|--------------------------------------------------------------------------|
| disk       | an engine finds the prefix on disk: disk to host memory to device        |
| computed   | the same engine computes a prompt of that length                         |
| plain read | threads read as many bytes from a file with direct I/O, and do no more   |

Every round begins with a new engine on the same folder, as after a restart: device and host memory
are empty, so that what is found comes from disk.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from lab.bench.disk import Way, read_with_threads
from lab.bench.engine_clients import Clients, prompt
from lab.bench.engine_model import EIGHT_B, Model
from lab.bench.engine_parts import ratio_of_rounds
from lab.bench.measure import collector_paused, summarize
from penstock.errors import UnavailableError
from penstock_serve.engine.scheduler import SchedulerSettings
from penstock_serve.engine.spec import torch_dtype_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lab.bench.report import BenchReport, Param
    from penstock_serve.engine.architecture import Architecture

START_S = 30.0
WAIT_S = 1.0
"""How long to wait for news at a time."""
FOUND_SHARE = 0.98
SOONER_MIN = 1.0
RAW_MAX = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenPlan:
    """The sizes; the defaults are for an H200."""

    architecture: Architecture = EIGHT_B
    device: str = "cuda"
    dtype: str = "bfloat16"
    block_tokens: int = 64
    step_tokens: int = 4096
    tokens: int = 32_768
    question_tokens: int = 32

    @classmethod
    def small(cls, tokens: int = 32_768) -> FirstTokenPlan:
        """For a CPU: a model of two layers, with as many tokens."""
        architecture = replace(
            EIGHT_B,
            layers=2,
            hidden=64,
            heads=2,
            kv_heads=2,
            head_dim=32,
            intermediate=128,
            vocabulary=997,
        )
        return cls(
            architecture=architecture,
            device="cpu",
            dtype="float32",
            step_tokens=2048,
            tokens=tokens,
        )


def run_first_token(
    report: BenchReport, plan: FirstTokenPlan, *, folder: Path, rounds: int
) -> None:
    """Adds rows and ratios.

    Raises:
        UnavailableError: there is no such device, or prompts do not come from disk.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=folder.resolve()) as made:
        _measure(report, plan, Path(made), rounds)


def _measure(report: BenchReport, plan: FirstTokenPlan, folder: Path, rounds: int) -> None:
    model = Model(plan.architecture, device=plan.device, dtype=torch_dtype_of(plan.dtype))
    words, random = plan.architecture.vocabulary, Random(plan.tokens)
    block_bytes = plan.block_tokens * model.token_bytes
    prompt_blocks = -(-(plan.tokens + plan.question_tokens + 1) // plan.block_tokens)
    settings = SchedulerSettings(
        step_tokens=plan.step_tokens,
        step_requests=2,
        steps_in_flight=2 if plan.device.startswith("cuda") else 1,
    )
    whole = plan.tokens // plan.block_tokens
    way = Way("prefix", block_bytes, whole, whole * block_bytes)
    prefix = prompt(random, plan.tokens, words)
    found: dict[str, list[float]] = {"disk": [], "computed": [], "plain read": []}
    for number in range(-2, rounds):
        report.progress(f"first token: round {number + 1} of {rounds}")
        engine = model.engine(
            block_tokens=plan.block_tokens,
            blocks=prompt_blocks + 1,
            host_blocks=2 * prompt_blocks + 2,  # Half of it may be on its way to the disk.
            settings=settings,
            load_gate="off",
            disk=folder / "tier",
        )
        with engine as running:
            clients = Clients(running)
            _wait_for_blocks(clients, whole if number > -2 else 0)
            question = prompt(random, plan.question_tokens, words)
            with collector_paused():
                if number == -2:
                    _save(clients, prefix, plan.step_tokens)
                    continue
                round_s = {
                    "disk": _from_disk_s(clients, [*prefix, *question], plan),
                    "computed": _computed_s(clients, prompt(random, plan.tokens, words)),
                    "plain read": way.round_bytes / read_with_threads(folder, way),
                }
        if number >= 0:  # The first one compiles what the others need.
            for side, seconds in round_s.items():
                found[side].append(seconds)
    _add_rows(report, plan, way.round_bytes, found)


def _add_rows(
    report: BenchReport, plan: FirstTokenPlan, nbytes: int, found: Mapping[str, Sequence[float]]
) -> None:
    params: dict[str, Param] = {
        "tokens": plan.tokens,
        "bytes": nbytes,
        "device": plan.device,
    }
    for side, values in found.items():
        report.add_row(
            bench="disk",
            side=side,
            params=params,
            metric="first token",
            unit="ns",
            summary=summarize([1e9 * each for each in values]),
        )
    report.add_ratio(
        "prefix on disk: times sooner than computed",
        ratio_of_rounds(found["computed"], found["disk"]),
        at_least=SOONER_MIN,
    )
    report.add_ratio(
        "prefix on disk: first token, of the time of a plain read",
        ratio_of_rounds(found["disk"], found["plain read"]),
        at_most=RAW_MAX,
    )


def _wait_for_blocks(clients: Clients, count: int) -> None:
    """Until the store process has started, and the engine knows of so many blocks on disk."""
    cache, deadline = clients.engine.cache, time.monotonic() + START_S
    while not (cache.health().ok and cache.statistics().tiers[-1].ready >= count):
        if time.monotonic() > deadline:
            raise UnavailableError(f"bench disk: blocks are not found on disk: {cache.health()}")
        cache.wait(min(deadline, time.monotonic() + WAIT_S))
        cache.step()


def _save(clients: Clients, prefix: list[int], tokens: int) -> None:
    """Computes the prefix and saves it on disk.

    A piece at a time: a disk that is slower than computing would drop what its queue has no room
    for.
    """
    for end in range(tokens, len(prefix) + tokens, tokens):
        clients.answer(prefix[:end], max_tokens=1)
        clients.settle()


def _from_disk_s(clients: Clients, tokens: list[int], plan: FirstTokenPlan) -> float:
    asked = clients.answer(tokens, max_tokens=1)
    clients.settle()
    if sum(asked.cached) < FOUND_SHARE * plan.tokens:
        raise UnavailableError(
            f"a prefix of {plan.tokens} tokens was to be found on disk, and {asked.cached} tokens "
            "were found, by tier"
        )
    return asked.first_token_s


def _computed_s(clients: Clients, tokens: list[int]) -> float:
    # Not stored: the next engine would learn of these blocks first, and ask before it knows of the
    # prefix, which is older.
    asked = clients.ask(tokens, max_tokens=1, reuse=False, store=False)
    clients.until(asked)
    clients.settle()
    return asked.first_token_s
