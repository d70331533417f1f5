"""The engine benchmark: what a host tier gains and costs an engine on a GPU.

Two engines on one model take turns: one with a host tier, one without. `engine_parts` has the
workloads. A model with random weights is as fast as any other and needs no download.

The one rule: what is compared was measured in the same run, in turns, and every row is reported.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from lab.bench.engine_clients import Clients, prompt
from lab.bench.engine_model import Model
from lab.bench.engine_parts import (
    Chatted,
    Prefixes,
    Running,
    Wire,
    chat,
    computed_s,
    decode,
    hit_s,
    quantile,
    ratio_of_rounds,
)
from lab.bench.measure import collector_paused, summarize
from penstock_serve.engine.scheduler import SchedulerSettings
from penstock_serve.engine.spec import torch_dtype_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lab.bench.engine_parts import ChatPlan, EnginePlan
    from lab.bench.report import BenchReport, Param

BENCH = "engine"
ON, OFF = "host tier", "no host tier"
DECODE_MIN = 0.98
RECOMPUTE_MIN = 10.0
WIRE_MAX = 1.2
LATENCY_MAX = 1.1


class EngineBench:
    """One run of the benchmark."""

    def __init__(self, report: BenchReport, plan: EnginePlan) -> None:
        self._report = report
        self._plan = plan
        self._say = report.progress
        self._say("model")
        self._model = Model(plan.architecture, device=plan.device, dtype=torch_dtype_of(plan.dtype))
        self._words = plan.architecture.vocabulary
        flying = 2 if plan.device.startswith("cuda") else 1
        self._settings = SchedulerSettings(
            step_tokens=plan.step_tokens,
            step_requests=plan.step_requests + 1,
            steps_in_flight=flying,
        )

    def run(self) -> None:
        """Measures every part of the plan, and adds rows and ratios."""
        if "chats" in self._plan.parts:
            self._chats()
        if {"decode", "hits", "latency"} & set(self._plan.parts):
            self._long_ones()

    def _engines(
        self, stack: ExitStack, blocks: int, host_blocks: int, *, off_blocks: int = 0
    ) -> tuple[Clients, Clients]:
        """Clients of an engine with a host tier, and of one without."""
        found = []
        for size, below in ((blocks, host_blocks), (off_blocks or blocks, 0)):
            self._say(f"engine with {size} blocks, {below} below")
            engine = self._model.engine(
                block_tokens=self._plan.block_tokens,
                blocks=size,
                host_blocks=below,
                settings=self._settings,
                graphs=self._plan.graphs,
                load_gate=self._plan.load_gate,
                layer_wise=self._plan.layer_wise,
            )
            found.append(Clients(stack.enter_context(engine)))
        return found[0], found[1]

    def _chats(self) -> None:
        plan = self._plan
        with ExitStack() as stack:
            pool = plan.chat_blocks // 10
            sides = self._engines(stack, pool, plan.chat_blocks + pool)
            found: dict[str, list[Chatted]] = {ON: [], OFF: []}
            for number in range(-1, plan.rounds):
                for side, clients in _in_turn(sides, number):
                    with collector_paused():
                        chatted = chat(
                            clients, self._warmed(number), seed=number, vocabulary=self._words
                        )
                    self._say(f"chats, round {number}, {side}: {chatted.seconds:.1f} s")
                    if number >= 0:
                        found[side].append(chatted)
        self._add_chats(found)

    def _warmed(self, number: int) -> ChatPlan:
        """The first round is short and not counted: it compiles kernels and captures graphs."""
        plan = self._plan.chats
        return replace(plan, conversations=2 * plan.concurrent) if number < 0 else plan

    def _add_chats(self, found: Mapping[str, Sequence[Chatted]]) -> None:
        plan = self._plan.chats
        params: dict[str, Param] = {"conversations": plan.conversations, "tokens": plan.tokens}
        for side, rounds in found.items():
            self._add(side, params, "tokens/s", "1/s", [r.tokens / r.seconds for r in rounds])
            first = [s for r in rounds for s in r.first_turn_s]
            later = [s for r in rounds for s in r.later_turn_s]
            between = [s for r in rounds for s in r.between_s]
            self._add_s(side, params, "first token, first turns", first)
            self._add_s(side, params, "first token, later turns", later)
            self._add_s(side, params, "between tokens", between)
            shares = [r.cached_share for r in rounds]
            self._add(side, params, "later prompts from the device", "share", shares)
            shares = [r.cached_below_share for r in rounds]
            self._add(side, params, "later prompts from host memory", "share", shares)
        self._report.add_ratio(
            "chats: tokens/s with the host tier, of without",
            ratio_of_rounds(
                [r.tokens / r.seconds for r in found[ON]],
                [r.tokens / r.seconds for r in found[OFF]],
            ),
            at_least=1.0,
        )

    def _long_ones(self) -> None:
        plan = self._plan
        with ExitStack() as stack:
            on, off = self._engines(
                stack,
                plan.running_blocks + plan.prefix_blocks + 1,
                4 * plan.prefix_blocks,
                off_blocks=max(plan.decoding_blocks, plan.prefix_blocks + 1),
            )
            if "decode" in plan.parts:
                self._decode(on, off)
            if "hits" in plan.parts or "latency" in plan.parts:
                prefixes = Prefixes(
                    on, plan.hits, block_tokens=plan.block_tokens, words=self._words
                )
                if "hits" in plan.parts:
                    self._hits(on, off, prefixes)
                if "latency" in plan.parts:
                    self._latency(on, prefixes)

    def _decode(self, on: Clients, off: Clients) -> None:
        plan = self._plan.decode
        found: dict[str, list[float]] = {ON: [], OFF: []}
        for number in range(-1, self._plan.rounds):
            for side, clients in _in_turn((on, off), number):
                rate = decode(clients, plan, seed=number, vocabulary=self._words)
                self._say(f"decode, round {number}, {side}: {rate:.0f} tokens/s")
                if number >= 0:
                    found[side].append(rate)
        params: dict[str, Param] = {"requests": plan.requests, "prompt": plan.prompt_tokens}
        for side, rates in found.items():
            self._add(side, params, "decode, nothing reused", "1/s", rates)
        self._report.add_ratio(
            "decode, nothing reused: tokens/s with the host tier, of without",
            ratio_of_rounds(found[ON], found[OFF]),
            at_least=DECODE_MIN,
        )

    def _hits(self, on: Clients, off: Clients, prefixes: Prefixes) -> None:
        plan = self._plan.hits
        random = Random(plan.question_tokens)
        loaded_bytes = self._plan.blocks_of(plan.tokens) * self._plan.block_tokens
        wire = Wire(self._model.device, loaded_bytes * self._model.token_bytes)
        found: dict[str, list[float]] = {"hit": [], "computed": [], "wire": []}
        for number in range(-1, self._plan.hit_rounds):
            new = prompt(random, plan.tokens + plan.question_tokens, self._words)
            with collector_paused():
                round_s = {
                    "hit": hit_s(on, prefixes),
                    "computed": computed_s(off, new),
                    "wire": wire.copy_s(),
                }
            self._say(f"hits, round {number}: {round_s}, {on.engine.scheduler.joins} joined")
            if number >= 0:
                for side, seconds in round_s.items():
                    found[side].append(seconds)
        params: dict[str, Param] = {"tokens": plan.tokens, "new": plan.question_tokens}
        self._add_s(ON, params, "first token, prefix in host memory", found["hit"])
        self._add_s(OFF, params, "first token, computed", found["computed"])
        self._add_s("one large copy", params, "the same bytes", found["wire"])
        self._report.add_ratio(
            "prefix in host memory: times faster than computed",
            ratio_of_rounds(found["computed"], found["hit"]),
            at_least=RECOMPUTE_MIN,
        )
        self._report.add_ratio(
            "prefix in host memory: first token, of the time of the bytes alone",
            ratio_of_rounds(found["hit"], found["wire"]),
            at_most=WIRE_MAX,
        )

    def _latency(self, on: Clients, prefixes: Prefixes) -> None:
        plan = self._plan.latency
        prefixes.let_go()
        running = Running(on, plan, vocabulary=self._words)
        alone = [running.alone()]
        beside: list[list[float]] = []
        first: list[float] = []
        for number in range(-1, self._plan.rounds):
            # The first round compiles what the others need. Contexts grow by a token a step, so
            # each round is compared with what was measured before it and after it.
            busy, arrived = running.beside(prefixes)
            quiet = running.alone()
            p99 = [1e3 * quantile(each, 0.99) for each in (alone[-1], busy, quiet)]
            p50 = [1e3 * quantile(each, 0.5) for each in (alone[-1], busy, quiet)]
            joined = on.engine.scheduler.joins
            self._say(f"latency, round {number}: {p50} {p99} ms, {arrived}, {joined} joined")
            if number < 0:
                alone = [quiet]
            else:
                alone.append(quiet)
                beside.append(busy)
                first += arrived
        prefixes.let_go()
        on.stop()
        params: dict[str, Param] = {"requests": plan.requests, "context": plan.context_tokens}
        self._add_s("alone", params, "between tokens", [s for each in alone for s in each])
        self._add_s(
            "prefixes arrive", params, "between tokens", [s for each in beside for s in each]
        )
        self._add_s("prefixes arrive", params, "first token of a prefix", first)
        self._report.add_ratio(
            "between tokens, p99: while prefixes arrive, of alone",
            ratio_of_rounds(
                [quantile(each, 0.99) for each in beside],
                [
                    (quantile(before, 0.99) + quantile(after, 0.99)) / 2
                    for before, after in pairwise(alone)
                ],
            ),
            at_most=LATENCY_MAX,
        )

    def _add(
        self,
        side: str,
        params: Mapping[str, Param],
        metric: str,
        unit: str,
        values: Sequence[float],
    ) -> None:
        self._report.add_row(
            bench=BENCH,
            side=side,
            params=params,
            metric=metric,
            unit=unit,
            summary=summarize(values),
        )

    def _add_s(
        self, side: str, params: Mapping[str, Param], metric: str, seconds: Sequence[float]
    ) -> None:
        self._add(side, params, metric, "ns", [1e9 * each for each in seconds])


def run_engine(report: BenchReport, plan: EnginePlan) -> None:
    """Measures, and adds rows and ratios.

    Raises:
        UnavailableError: there is no such device, or the machine does not give the memory.
    """
    EngineBench(report, plan).run()


def _in_turn(sides: tuple[Clients, Clients], number: int) -> list[tuple[str, Clients]]:
    """Both sides, in the opposite order in every other round."""
    named = [(ON, sides[0]), (OFF, sides[1])]
    return named[::-1] if number % 2 else named
