"""Where the time to a first token went, for the slowest ones of `lab bench vllm`.

A p99 alone does not say whose doing it is. For each request the benchmark knows when it was
queued, scheduled and answered, and which steps of the worker lay between: what these took on the
clock, what of it was CPU time, and what of that the connector. A step that took far longer than
its CPU time did not run: the machine gave the core to somebody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TOLD = 3
"""So many of the slowest are told for each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCall:
    """A part of a step in the worker, on the monotonic clock, which all processes share."""

    began: float
    ended: float
    cpu_s: float
    connector_s: float
    """That part of the CPU time which the connector took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The scheduler's steps from a request's arrival to its first token."""

    queued_steps: int
    """Steps that began without it, while it waited for its turn or for room."""
    loading_steps: int
    """Steps that began while its blocks were being loaded."""
    computing_steps: int
    """Steps that computed some of its tokens."""
    step_tokens: int
    """All tokens that these steps computed, its own and those of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """One request, up to its first token."""

    request: int
    """Its place in the round."""
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    """From its arrival to its first token, as its client saw it."""
    outside_s: float
    """Of that, outside of the scheduler: it hears of requests between two steps, so one that comes
    just after a step has begun waits for the end of it."""
    waited_s: float
    """In the scheduler's queue, and for its blocks to be loaded."""
    calls: int
    """Calls of the worker between its arrival in the queue and its first token."""
    worker_s: float
    """What these took."""
    cpu_s: float
    connector_s: float
    counts: StepCounts

    def __str__(self) -> str:
        return (
            f"{self.seconds:.2f} s: request {self.request}, {self.prompt_tokens} tokens of which "
            f"{self.cached_tokens} cached; outside of the scheduler {self.outside_s:.2f} s, waited "
            f"{self.waited_s:.2f} s; {self.calls} worker calls of {self.worker_s:.2f} s, "
            f"{self.cpu_s:.2f} s on the CPU, "
            f"{1e3 * self.connector_s:.1f} ms in the connector; steps: "
            f"{self.counts.queued_steps} in the queue, {self.counts.loading_steps} for the load, "
            f"{self.counts.computing_steps} of its own, {self.counts.step_tokens} tokens in all"
        )


def first_token(
    calls: Iterable[WorkerCall],
    *,
    request: int,
    prompt_tokens: int,
    cached_tokens: int,
    seconds: float,
    queued: float,
    scheduled: float,
    answered: float,
    counts: StepCounts,
) -> FirstToken:
    """What lay between a request and its first token.

    Args:
        calls: The worker's, of the whole round.
        request: Its place in the round.
        prompt_tokens: What it asked for.
        cached_tokens: What of that was found.
        seconds: From arrival to first token.
        queued: When the engine took it in, on the monotonic clock.
        scheduled: When a step first had it.
        answered: When its first token was there.
        counts: The scheduler's steps between.
    """
    its = [call for call in calls if queued < call.ended and call.began < answered]
    return FirstToken(
        request=request,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        seconds=seconds,
        outside_s=seconds - (answered - queued),
        waited_s=scheduled - queued,
        calls=len(its),
        worker_s=sum(call.ended - call.began for call in its),
        cpu_s=sum(call.cpu_s for call in its),
        connector_s=sum(call.connector_s for call in its),
        counts=counts,
    )


def slowest(rounds: Iterable[Sequence[FirstToken]], most: int = TOLD) -> list[str]:
    """The slowest of all rounds, slowest first, each with its round, counted from 1."""
    found = [(each, number) for number, row in enumerate(rounds, start=1) for each in row]
    found.sort(key=lambda item: item[0].seconds, reverse=True)
    return [f"round {number}, {each}" for each, number in found[:most]]
