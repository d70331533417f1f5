"""Workloads of `lab bench traffic`: slices of traces, and sessions of agents.

A workload is a list of turns in the order of their times. Those before the measured ones are its
history: what a server that has run for long holds in its cache. Times are stretched to the rate
that is tried, so the order of the turns, and with it what is used between two turns of a session,
stays the same at every rate.

The one rule: a prompt is made of a seed a block, the same for equal prefixes, so that every engine
finds the same blocks and no tokenizer or file of texts is needed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from lab.bench.prompts import draw_tokens
from penstock import parse_config
from penstock.replay.trace import TraceReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.replay.trace import TraceRequest
    from penstock.vocabulary.keys import Key

TRACE_BLOCK_TOKENS = 64
"""The size of blocks in which traces are read; plans of small engines have smaller ones."""
SESSION_BLOCKS = 16
"""Requests of a trace with the same first 1,024 tokens are of one session."""
_REST = 1 << 63
"""Seeds of what only one turn has are above this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficTurn:
    """One request."""

    at_s: float
    blocks: tuple[int, ...]
    """A seed of 64 bits for each full block of the prompt; equal ones for equal prefixes."""
    rest_tokens: int
    """Tokens after the last full block, at least one; no other turn has them."""
    answer_tokens: int
    after: int | None = None
    """The index of a turn that must have been answered before, if it is a measured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Turns to measure and those that came before."""

    name: str
    block_tokens: int
    vocabulary: int
    turns: tuple[TrafficTurn, ...]
    history: tuple[TrafficTurn, ...]
    seen: frozenset[int] = frozenset()
    """Blocks of turns before the history."""
    known_blocks: tuple[int, ...] = field(init=False)
    """For every turn: the leading blocks that any turn before it had."""
    _prompts: dict[int, tuple[int, ...]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(f"turns of {self.name!r} are none, must be at least one")
        seen = {seed for turn in self.history for seed in turn.blocks} | self.seen
        known = []
        for turn in self.turns:
            fresh = (at for at, seed in enumerate(turn.blocks) if seed not in seen)
            known.append(next(fresh, len(turn.blocks)))
            seen.update(turn.blocks)
        object.__setattr__(self, "known_blocks", tuple(known))

    @property
    def longest_tokens(self) -> int:
        """Of all prompts with their answers."""
        return max(
            len(turn.blocks) * self.block_tokens + turn.rest_tokens + turn.answer_tokens
            for turn in self.turns
        )

    @property
    def new_tokens_mean(self) -> float:
        """Tokens of a prompt that no turn before it had."""
        new = sum(
            (len(turn.blocks) - known) * self.block_tokens + turn.rest_tokens
            for turn, known in zip(self.turns, self.known_blocks, strict=True)
        )
        return new / len(self.turns)

    def prompt(self, number: int) -> tuple[int, ...]:
        """The tokens of a turn's prompt."""
        if number not in self._prompts:
            self._prompts[number] = tuple(self._drawn(self.turns[number], number).tolist())
        return self._prompts[number]

    @property
    def history_prompts(self) -> Iterator[NDArray[np.int32]]:
        """The prompts that came before, in their order."""
        for number, turn in enumerate(self.history):
            yield self._drawn(turn, len(self.turns) + number)

    def _drawn(self, turn: TrafficTurn, number: int) -> NDArray[np.int32]:
        parts = [draw_tokens(seed, self.block_tokens) for seed in turn.blocks]
        parts.append(draw_tokens(_REST + number, turn.rest_tokens))
        return np.concatenate(parts) % np.int32(self.vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePlan:
    """A slice of a trace: some of its sessions, as a router by prefix gives them to one GPU."""

    trace: str
    """A file, or the name of a trace that comes with Penstock."""
    one_of: int
    """Every `one_of`-th session is taken."""
    turns_min: int = 1
    """Sessions with fewer turns are left out."""
    prompt_tokens_max: int = 65_536
    answer_tokens_max: int = 32

    def __post_init__(self) -> None:
        for name in ("one_of", "turns_min", "prompt_tokens_max", "answer_tokens_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """Sessions of agents: each calls a tool, waits for it, and sends all so far with its output."""

    sessions: int = 16
    """At a time; when one is at its end, a new one begins."""
    shared_tokens: int = 8192
    """Instructions and tools, the same in all sessions."""
    first_tokens: int = 20_480
    last_tokens: int = 61_440
    tool_tokens: tuple[int, int] = (1024, 6144)
    """What a turn adds, from and to."""
    tool_s: tuple[float, float] = (2.0, 6.0)
    """The time of a tool, from and to; stretched with the rate."""
    answer_tokens: int = 32
    turns: int = 400
    """Turns that are made, of all sessions."""
    seed: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.sessions <= self.turns:
            raise ValueError(f"sessions is {self.sessions}, must be from 1 to {self.turns}, turns")
        if not 0 <= self.shared_tokens <= self.first_tokens <= self.last_tokens:
            raise ValueError(
                f"first_tokens is {self.first_tokens}, must be from shared_tokens, "
                f"{self.shared_tokens}, to last_tokens, {self.last_tokens}"
            )


def trace_workload(
    name: str, plan: TracePlan, *, block_tokens: int, vocabulary: int, history_tokens: int
) -> Workload:
    """The second half of a slice of a trace; the history is the end of the first half.

    Args:
        name: What the slice is called.
        plan: Which requests it has.
        block_tokens: The engine's blocks: each stands for `TRACE_BLOCK_TOKENS` of the trace.
        vocabulary: Token ids lie below this.
        history_tokens: How much the history has at most, so that it fills a cache.

    Raises:
        ConfigError: the trace cannot be read.
        ValueError: the slice has no requests.
    """
    requests = _of_sessions(_read(plan.trace), plan)
    turns = [_turn(each, plan, block_tokens) for each in requests]
    middle = len(turns) // 2
    blocks: set[int] = set()
    first = middle
    while first and len(blocks) * block_tokens < history_tokens:
        first -= 1
        blocks.update(turns[first].blocks)
    return Workload(
        name=name,
        block_tokens=block_tokens,
        vocabulary=vocabulary,
        turns=tuple(turns[middle:]),
        history=tuple(turns[first:middle]),
        seen=frozenset(seed for turn in turns[:middle] for seed in turn.blocks),
    )


def _read(trace: str) -> list[TraceRequest]:
    config = parse_config(
        f"version = 1\nmodel.name = 'trace'\nmodel.weights_version = '1'\n"
        f"cache.block_tokens = {TRACE_BLOCK_TOKENS}\ncache.blocks = 1"
    )
    return list(TraceReader(config).read(trace))


def _of_sessions(requests: Iterable[TraceRequest], plan: TracePlan) -> list[TraceRequest]:
    fitting = [each for each in requests if each.token_count <= plan.prompt_tokens_max]
    named = [(_session(each), each) for each in fitting]
    turns = Counter(session for session, _ in named)
    long_ones = [session for session, count in turns.items() if count >= plan.turns_min]
    taken = set(long_ones[:: plan.one_of])
    return [each for session, each in named if session in taken]


def _session(request: TraceRequest) -> bytes:
    return bytes(request.keys[min(SESSION_BLOCKS, len(request.keys)) - 1]) if request.keys else b""


def _turn(request: TraceRequest, plan: TracePlan, block_tokens: int) -> TrafficTurn:
    rest = request.token_count - len(request.keys) * TRACE_BLOCK_TOKENS
    return TrafficTurn(
        at_s=request.at_s,
        blocks=tuple(map(_seed, request.keys)),
        rest_tokens=max(1, rest * block_tokens // TRACE_BLOCK_TOKENS),
        answer_tokens=max(1, min(request.output_tokens, plan.answer_tokens_max)),
    )


def _seed(key: Key) -> int:
    """Of a block's name, whose halves may each be shared with other blocks."""
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    return (low ^ (high * 0x9E3779B97F4A7C15)) & (_REST - 1)


class _Session:
    """One agent: how long its prompt is, and when it sends it next."""

    def __init__(self, number: int, plan: AgentPlan, random: Random) -> None:
        self.number = number
        self._plan = plan
        self._random = random
        self.tokens = plan.first_tokens
        self.at_s = 0.0
        self.turn: int | None = None
        """The index of its last turn."""

    def grow(self) -> None:
        self.tokens += self._random.randint(*self._plan.tool_tokens)
        self.at_s += self._random.uniform(*self._plan.tool_s)

    @property
    def ended(self) -> bool:
        return self.tokens > self._plan.last_tokens

    def as_turn(self, block_tokens: int) -> TrafficTurn:
        full, rest = divmod(self.tokens, block_tokens)
        if not rest:
            full, rest = full - 1, block_tokens
        shared = min(self._plan.shared_tokens // block_tokens, full)
        own = range(shared, full)
        return TrafficTurn(
            at_s=self.at_s,
            blocks=(
                *range(shared),
                *(((self.number + 1) << 32) + at for at in own),
            ),
            rest_tokens=rest,
            answer_tokens=self._plan.answer_tokens,
            after=self.turn,
        )


def agent_workload(name: str, plan: AgentPlan, *, block_tokens: int, vocabulary: int) -> Workload:
    """Agents in the middle of their sessions; the history is what each has sent last."""
    random = Random(plan.seed)
    live = [_Session(number, plan, random) for number in range(plan.sessions)]
    for session in live:
        while session.tokens < random.randint(plan.first_tokens, plan.last_tokens - 1):
            session.grow()
        if session.ended:
            session.tokens = plan.first_tokens
        session.at_s = random.uniform(0.0, plan.tool_s[1])
    history = [session.as_turn(block_tokens) for session in random.sample(live, len(live))]
    turns: list[TrafficTurn] = []
    begun = len(live)
    for session in live:
        session.grow()
    while len(turns) < plan.turns:
        session = min(live, key=lambda each: each.at_s)
        if session.ended:
            following = _Session(begun, plan, random)
            following.at_s, begun = session.at_s, begun + 1
            live[live.index(session)] = session = following
        turns.append(session.as_turn(block_tokens))
        session.turn = len(turns) - 1
        session.grow()
    return Workload(
        name=name,
        block_tokens=block_tokens,
        vocabulary=vocabulary,
        turns=tuple(turns),
        history=tuple(history),
    )


def due_s(turns: Sequence[TrafficTurn], count: int, window_s: float) -> list[float]:
    """When each of the first `count` turns is due if they are spread over a window."""
    first = turns[0].at_s
    span = turns[min(count, len(turns) - 1)].at_s - first
    if span <= 0.0:
        return [window_s * number / count for number in range(count)]
    return [(turn.at_s - first) * window_s / span for turn in turns[:count]]
