"""Requests for simulated engines. One token of a simulated prompt stands for a block of a real one.

A trace is taken apart into conversations: requests with the same beginning, but for blocks that
very many requests have. Each is played as often as needed, at times of its own and with blocks of
its own. So one trace gives the traffic of any number of engines. Gaps within a conversation are
divided by `PACE`, so that a run of minutes sees several turns.

Half of the conversations begin with one of `SYSTEM_PROMPTS`, some of them much oftener than others.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from functools import cache
from typing import NamedTuple

import msgspec

from penstock.replay.lines import lines_of
from penstock.replay.trace import ID_TOKENS, MooncakeLine

BLOCK_TOKENS = ID_TOKENS
"""What a token of a simulated prompt stands for."""
TRACES = ("conversation", "synthetic")
CHATS = "chats"
PACE = 4.0
COMMON_SHARE = 0.02
"""A block of more requests than that belongs to no conversation."""
SYSTEM_PROMPTS = 32
SYSTEM_BLOCKS = (1, 8)
SYSTEM_SHARE = 0.5
WARM_S = 900.0
"""Conversations may have begun so long before; their earlier turns are left out."""


class Turn(NamedTuple):
    """A request of a conversation."""

    after_s: float
    """Since the conversation began."""
    blocks: tuple[int, ...]
    output_tokens: int


class Arrival(NamedTuple):
    """A request."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


Conversation = list[Turn]


@cache
def conversations_of(traffic: str) -> list[Conversation]:
    """The conversations of a trace that comes with Penstock, or generated ones."""
    if traffic == CHATS:
        rng = random.Random(1)
        return [_chat(rng) for _ in range(2000)]
    decode = msgspec.json.Decoder(MooncakeLine).decode
    lines = [decode(line) for _, line in lines_of(traffic)]
    counts = Counter(itertools.chain.from_iterable(each.hash_ids for each in lines))
    least = COMMON_SHARE * len(lines)
    found: dict[int, list[MooncakeLine]] = {}
    for line in lines:
        own = (each for each in line.hash_ids if counts[each] < least)
        found.setdefault(next(own, -1), []).append(line)
    # Requests of nothing but common blocks are none of one conversation.
    alone = [[each] for each in found.pop(-1, [])]
    return [_turns(each) for each in (*found.values(), *alone)]


def _turns(lines: list[MooncakeLine]) -> Conversation:
    began = lines[0].timestamp
    return [
        Turn((line.timestamp - began) / 1000, tuple(line.hash_ids), max(1, line.output_length))
        for line in lines
    ]


def _chat(rng: random.Random) -> Conversation:
    """Turns that grow, with pauses between them."""
    turns, blocks, after_s = [], 0, 0.0
    for _ in range(rng.randint(1, 8)):
        blocks += rng.choice((1, 1, 2, 4, 12))
        turns.append(Turn(after_s, tuple(range(blocks)), rng.randint(20, 400)))
        after_s += rng.expovariate(1 / 60)
    return turns


def mean_tokens(traffic: str) -> float:
    """Of the prompts of a kind of traffic, system prompts included."""
    lengths = [len(turn.blocks) for each in conversations_of(traffic) for turn in each]
    system = SYSTEM_SHARE * sum(_system_prompt(number)[1] for number in range(SYSTEM_PROMPTS))
    return (sum(lengths) / len(lengths) + system / SYSTEM_PROMPTS) * BLOCK_TOKENS


def arrivals_of(traffic: str, *, requests: int, seconds: float, seed: int) -> list[Arrival]:
    """About so many requests within a time, in the order in which they come."""
    rng = random.Random(seed)
    conversations = conversations_of(traffic)
    shared = _shared_blocks(traffic)
    fresh = itertools.count(1 << 20)
    found: list[Arrival] = []
    while len(found) < requests:
        turns = rng.choice(conversations)
        begins = rng.uniform(-WARM_S, seconds)
        first = _draw_system_prompt(rng) if rng.random() < SYSTEM_SHARE else ()
        own: dict[int, int] = {}
        for turn in turns:
            at_s = begins + turn.after_s / PACE
            if 0 <= at_s < seconds:
                blocks = [
                    each if each in shared else own.get(each) or own.setdefault(each, next(fresh))
                    for each in turn.blocks
                ]
                found.append(Arrival(at_s, (*first, *blocks), turn.output_tokens))
    found.sort()
    return found


@cache
def _shared_blocks(traffic: str) -> frozenset[int]:
    """Blocks that different conversations of a trace have."""
    if traffic == CHATS:
        return frozenset()
    counts: Counter[int] = Counter()
    for each in conversations_of(traffic):
        counts.update({block for turn in each for block in turn.blocks})
    return frozenset(block for block, count in counts.items() if count > 1)


def _system_prompt(number: int) -> tuple[int, int]:
    """Where the blocks of a system prompt begin, and how many there are."""
    least, most = SYSTEM_BLOCKS
    return (1 << 19) + number * most, least + number % (most - least + 1)


def _draw_system_prompt(rng: random.Random) -> tuple[int, ...]:
    # The first is drawn about a quarter of the time, as by Zipf's law.
    number = int(SYSTEM_PROMPTS ** rng.random()) - 1
    first, count = _system_prompt(number)
    return tuple(range(first, first + count))
