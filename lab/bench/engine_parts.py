"""What `lab bench engine` measures, part by part, and how large everything is (`EnginePlan`).

| part     | what happens                                                                   |
|----------|--------------------------------------------------------------------------------|
| chats    | conversations in turns, together ten times larger than the device's blocks       |
| decode   | answers to new prompts, host tier on and off: nothing is ever reused             |
| hits     | a long prefix in host memory, against computing it, against the bare bytes       |
| latency  | running answers, alone and while such prefixes arrive one after the other        |

The one rule: both sides of a comparison take turns within a round, and every round begins with new
prompts, or with the same state.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch

from lab.bench.engine_clients import Asked, Clients, prompt
from lab.bench.engine_model import EIGHT_B
from lab.bench.measure import collector_paused
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.cache import Lease
    from penstock_serve.engine.architecture import Architecture

FOUND_SHARE = 0.98
"""The share of a prefix that must come from host memory; a block or two may be on the device."""


@dataclass(slots=True, kw_only=True)
class Chatted:
    """One round of conversations."""

    seconds: float
    tokens: int
    """Generated."""
    first_turn_s: list[float] = field(default_factory=list)
    """From request to first token."""
    later_turn_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    cached_share: float = 0.0
    """Of the prompt tokens of later turns, by tier: the device and below."""
    cached_below_share: float = 0.0


def chat(clients: Clients, plan: ChatPlan, *, seed: int, vocabulary: int) -> Chatted:
    """Runs all conversations, turn by turn, with `plan.concurrent` requests at a time."""
    random = Random(seed)
    histories = [prompt(random, plan.first_tokens, vocabulary) for _ in range(plan.conversations)]
    result = Chatted(seconds=0.0, tokens=0)
    asked_tokens = cached = below = 0
    began = time.perf_counter()
    for turn in range(plan.turns):
        waiting = list(range(plan.conversations))
        running: dict[int, Asked] = {}
        while waiting or running:
            while waiting and len(running) < plan.concurrent:
                number = waiting.pop(0)
                if turn:
                    histories[number] += prompt(random, plan.question_tokens, vocabulary)
                running[number] = clients.ask(histories[number], max_tokens=plan.answer_tokens)
            clients.step()
            for number in [number for number, asked in running.items() if asked.ended]:
                asked = running.pop(number)
                if turn:
                    asked_tokens += len(histories[number])
                    cached, below = cached + asked.cached[0], below + sum(asked.cached[1:])
                histories[number] += asked.tokens
                (result.later_turn_s if turn else result.first_turn_s).append(asked.first_token_s)
                result.between_s += asked.between_s
                result.tokens += len(asked.tokens)
    result.seconds = time.perf_counter() - began
    result.cached_share = cached / max(1, asked_tokens)
    result.cached_below_share = below / max(1, asked_tokens)
    clients.settle()
    return result


def decode(clients: Clients, plan: DecodePlan, *, seed: int, vocabulary: int) -> float:
    """Tokens a second, from when all answers have begun until all have their tokens."""
    random = Random(seed)
    asked = [
        clients.ask(prompt(random, plan.prompt_tokens, vocabulary), max_tokens=plan.answer_tokens)
        for _ in range(plan.requests)
    ]
    clients.until(*asked, tokens=2)
    with collector_paused():
        had, began = sum(len(each.tokens) for each in asked), time.perf_counter()
        # The first answers are a few tokens ahead of the last ones, and must not end before.
        clients.until(*asked, tokens=plan.answer_tokens * 3 // 4)
        rate = (sum(len(each.tokens) for each in asked) - had) / (time.perf_counter() - began)
    clients.until(*asked)
    clients.settle()
    return rate


class Prefixes:
    """Three long prompts in host memory, requested in turn; the device has room for one of them.

    So each has left the device when it is requested again. A lease that is not computed on takes
    the rest of the device's blocks.
    """

    def __init__(self, clients: Clients, plan: HitPlan, *, block_tokens: int, words: int) -> None:
        self._random = Random(plan.tokens)
        self._clients = clients
        self._plan = plan
        self.block_tokens, self._words = block_tokens, words
        self._ballast: Lease | None = None
        self._kept = [prompt(self._random, plan.tokens, words) for _ in range(3)]
        self._next = 0
        self.leave_room(0)
        for each in self._kept:
            clients.answer(each, max_tokens=1)
            clients.settle()

    def leave_room(self, more_tokens: int) -> None:
        """Takes all device blocks except those of one prompt and of `more_tokens` tokens."""
        self.let_go()
        cache = self._clients.engine.cache
        device = cache.statistics().tiers[0]
        longest = self._plan.tokens + self._plan.question_tokens + 1
        kept = -(-longest // self.block_tokens) + -(-more_tokens // self.block_tokens)
        blocks = device.slots - device.held - kept
        if blocks > 0:
            tokens = np.zeros(blocks * self.block_tokens, dtype=np.uint32)
            self._ballast = cache.acquire(tokens, reuse=False, store=False)

    def let_go(self) -> None:
        """Releases those blocks."""
        if self._ballast is not None:
            self._ballast.release()
        self._ballast = None

    def question(self) -> list[int]:
        """The prefix that was requested longest ago, with a new question."""
        prefix = self._kept[self._next]
        self._next = (self._next + 1) % len(self._kept)
        return [*prefix, *prompt(self._random, self._plan.question_tokens, self._words)]

    def require_hit(self, asked: Asked) -> None:
        """Raises if a request was not answered from host memory."""
        found = asked.cached[1] if len(asked.cached) > 1 else 0
        if found < FOUND_SHARE * self._plan.tokens:
            raise UnavailableError(
                f"a prefix of {self._plan.tokens} tokens was to be found in host memory, "
                f"and {asked.cached} tokens were, by tier"
            )


def hit_s(clients: Clients, prefixes: Prefixes) -> float:
    """Seconds to the first token of a prompt whose prefix is in host memory."""
    asked = clients.answer(prefixes.question(), max_tokens=1)
    prefixes.require_hit(asked)
    clients.settle()
    return asked.first_token_s


def computed_s(clients: Clients, tokens: Sequence[int]) -> float:
    """Seconds to the first token of a prompt that is computed."""
    asked = clients.answer(tokens, max_tokens=1, reuse=False)
    clients.settle()
    return asked.first_token_s


class Wire:
    """The speed of the link to the device: large copies from pinned memory."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        pinned = device.type == "cuda"
        piece_bytes = min(size_bytes, 1 << 30)
        self._source = torch.zeros(piece_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._target = torch.empty(piece_bytes, dtype=torch.uint8, device=device)
        self._count = size_bytes / piece_bytes
        self._device = device

    def copy_s(self) -> float:
        """Seconds that the bytes take."""
        self._synchronize()
        began = time.perf_counter()
        for _ in range(max(1, int(self._count))):
            self._target.copy_(self._source, non_blocking=True)
        self._synchronize()
        return (time.perf_counter() - began) * self._count / max(1, int(self._count))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Running:
    """Answers that are generated while something else happens."""

    def __init__(self, clients: Clients, plan: LatencyPlan, *, vocabulary: int) -> None:
        random = Random(plan.requests)
        self._clients = clients
        self._plan = plan
        self._asked = [
            # Not stored: host memory is for the prefixes.
            clients.ask(
                prompt(random, plan.context_tokens, vocabulary),
                max_tokens=plan.answer_tokens,
                store=False,
            )
            for _ in range(plan.requests)
        ]
        clients.until(*self._asked, tokens=4)

    def alone(self) -> list[float]:
        """Seconds between tokens, without anything else."""
        return self._between(None)[0]

    def beside(self, prefixes: Prefixes) -> tuple[list[float], list[float]]:
        """Seconds between tokens while hits arrive, and to the first token of each hit."""
        return self._between(prefixes)

    def _between(self, prefixes: Prefixes | None) -> tuple[list[float], list[float]]:
        if prefixes is not None:
            # One more block for each than it needs in these steps and those of the last hit.
            grown = self._plan.window_steps + 3 * prefixes.block_tokens
            prefixes.leave_room(grown * len(self._asked))
        before = [len(each.times) for each in self._asked]
        arrived: list[Asked] = []
        steps = 0
        with collector_paused():
            while steps < self._plan.window_steps or (arrived and not arrived[-1].ended):
                due = steps < self._plan.window_steps and (not arrived or arrived[-1].ended)
                if prefixes is not None and due:
                    arrived.append(self._clients.ask(prefixes.question(), max_tokens=1))
                self._clients.step()
                steps += 1
        for each in arrived:
            if prefixes is not None:
                prefixes.require_hit(each)
        if any(each.ended for each in self._asked):
            raise UnavailableError("an answer that was to go on has ended: answer_tokens is small")
        between = [
            after - first
            for each, start in zip(self._asked, before, strict=True)
            for first, after in zip(each.times[start:-1], each.times[start + 1 :], strict=True)
        ]
        return between, [each.first_token_s for each in arrived]


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratio_of_rounds(ours: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of all rounds."""
    return statistics.median(our / other for our, other in zip(ours, others, strict=True))


PARTS = ("chats", "decode", "hits", "latency")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """Conversations that need ten times the device's blocks."""

    conversations: int = 100
    turns: int = 3
    first_tokens: int = 800
    question_tokens: int = 72
    answer_tokens: int = 24
    concurrent: int = 9

    @property
    def tokens(self) -> int:
        """Of one conversation, at its end."""
        more = (self.turns - 1) * (self.question_tokens + self.answer_tokens)
        return self.first_tokens + more + self.answer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Answers to new prompts."""

    requests: int = 64
    prompt_tokens: int = 512
    answer_tokens: int = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class HitPlan:
    """Prompts with a long prefix."""

    tokens: int = 32_768
    question_tokens: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPlan:
    """Answers that are generated beside such prompts."""

    requests: int = 64
    context_tokens: int = 4096
    answer_tokens: int = 1600
    window_steps: int = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The whole benchmark; the defaults are for an H200."""

    architecture: Architecture = EIGHT_B
    device: str = "cuda"
    dtype: str = "bfloat16"
    block_tokens: int = 64
    step_tokens: int = 4096
    step_requests: int = 64
    rounds: int = 3
    hit_rounds: int = 5
    graphs: bool = True
    load_gate: str = "measured"
    layer_wise: str = "off"
    parts: tuple[str, ...] = PARTS
    chats: ChatPlan = field(default_factory=ChatPlan)
    decode: DecodePlan = field(default_factory=DecodePlan)
    hits: HitPlan = field(default_factory=HitPlan)
    latency: LatencyPlan = field(default_factory=LatencyPlan)

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(f"parts are {', '.join(self.parts)}, must be of {', '.join(PARTS)}")

    def blocks_of(self, tokens: int) -> int:
        """The blocks that `tokens` tokens of one request need."""
        return -(-tokens // self.block_tokens)

    @property
    def chat_blocks(self) -> int:
        """The blocks of all conversations; the device has a tenth of them."""
        return self.chats.conversations * self.blocks_of(self.chats.tokens)

    @property
    def prefix_blocks(self) -> int:
        """The blocks of one long prompt with its question and a token."""
        return self.blocks_of(self.hits.tokens + self.hits.question_tokens + 1)

    @property
    def decoding_blocks(self) -> int:
        """The blocks of all answers to new prompts."""
        longest = self.decode.prompt_tokens + self.decode.answer_tokens
        return self.decode.requests * self.blocks_of(longest)

    @property
    def running_blocks(self) -> int:
        """The blocks of all answers beside arriving prefixes, or of those to new prompts."""
        if "latency" not in self.parts:
            return self.decoding_blocks
        longest = self.latency.context_tokens + self.latency.answer_tokens
        return max(self.latency.requests * self.blocks_of(longest), self.decoding_blocks)
