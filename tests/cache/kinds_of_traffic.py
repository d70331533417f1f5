"""Traffic of many kinds, each drawn from a seed: for what must hold whatever the traffic."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from penstock.replay.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable

Prompts = list[tuple[float, list[bytes]]]
"""When each prompt came, and its blocks."""


def requests_of(prompts: Prompts) -> list[TraceRequest]:
    """In the order of time; a block has two tokens, and each prompt ends in half a block."""
    prompts = sorted(prompts, key=lambda prompt: prompt[0])
    return [TraceRequest(at_s, keys, 2 * len(keys) + 1) for at_s, keys in prompts]


def _chain(name: str, count: int) -> list[bytes]:
    return [f"{name} {block}".encode() for block in range(count)]


def _length(draw: Random, mean: float) -> int:
    return max(1, min(400, round(draw.lognormvariate(math.log(mean), 0.8))))


def documents(draw: Random, count: int) -> Prompts:
    """Questions about documents of which some are more popular than others."""
    number = draw.choice((20, 100, 500, 3000))
    steepness = draw.choice((0.6, 0.9, 1.2))
    weights = list(accumulate((rank + 1) ** -steepness for rank in range(number)))
    lengths = [_length(draw, 12) for _ in range(number)]
    pause_s = draw.choice((0.05, 0.5, 5.0))
    at_s, prompts = 0.0, []
    for asked in range(count):
        at_s += draw.expovariate(1 / pause_s)
        which = draw.choices(range(number), cum_weights=weights)[0]
        prompts.append((at_s, _chain(f"d{which}", lengths[which]) + _chain(f"q{asked}", 1)))
    return prompts


def chats(draw: Random, count: int) -> Prompts:
    """Conversations that grow turn by turn; users come back after a while, or never."""
    goes_on = draw.uniform(0.3, 0.95)
    gap_s = draw.choice((5.0, 30.0, 200.0))
    spread = draw.choice((0.3, 1.0, 1.8))
    start_s = gap_s * draw.choice((0.005, 0.02, 0.1))
    shared = draw.choice((0, 0, 3, 20))
    at_s, prompts = 0.0, []
    for user in range(count):
        at_s += draw.expovariate(1 / start_s)
        turn_s, length = at_s, _length(draw, draw.choice((4, 15)))
        for _ in range(40):
            if len(prompts) == count:
                return prompts
            prompts.append((turn_s, _chain("system", shared) + _chain(f"u{user}", length)))
            if draw.random() > goes_on:
                break
            length += _length(draw, 3)
            turn_s += gap_s * draw.lognormvariate(0, spread)
    return prompts


def agents(draw: Random, count: int) -> Prompts:
    """Agents that call tools: each step repeats all before it, seconds later, many steps long."""
    active = draw.choice((3, 10, 40))
    tool_s = draw.choice((2.0, 10.0, 40.0))
    shared = draw.choice((0, 10, 60))
    due: list[tuple[float, int]] = [(draw.uniform(0, tool_s), agent) for agent in range(active)]
    due.sort()
    lengths, steps, prompts, born = {}, {}, [], active
    while len(prompts) < count:
        at_s, agent = heappop(due)
        if agent not in lengths:
            lengths[agent], steps[agent] = _length(draw, 10), draw.randint(1, 60)
        prompts.append((at_s, _chain("tools", shared) + _chain(f"a{agent}", lengths[agent])))
        lengths[agent] += draw.randint(1, 4)
        steps[agent] -= 1
        if steps[agent] == 0:
            agent, born = born, born + 1
        heappush(due, (at_s + tool_s * draw.lognormvariate(0, 0.6), agent))
    return prompts


def scans(draw: Random, count: int) -> Prompts:
    """The same prompts in the same order, round and round, with others between them."""
    number = draw.choice((10, 50, 200, 700))
    others = draw.choice((0.0, 0.2, 0.6))
    length = draw.choice((2, 10, 30))
    prompts, at, at_s = [], 0, 0.0
    for asked in range(count):
        at_s += draw.choice((0.2, 1.0))
        if draw.random() < others:
            prompts.append((at_s, _chain(f"o{asked}", length)))
        else:
            prompts.append((at_s, _chain(f"s{at % number}", length)))
            at += 1
    return prompts


def recency(draw: Random, count: int) -> Prompts:
    """Prompts come back by how lately they were used, and by nothing else: LRU is right."""
    again = draw.uniform(0.3, 0.95)
    depth = draw.choice((5.0, 30.0, 150.0))
    heavy = draw.random() < 0.5
    length = draw.choice((1, 8, 25))
    stack: list[int] = []
    prompts, at_s, born = [], 0.0, 0
    for _ in range(count):
        at_s += draw.expovariate(1.0)
        back = int(depth * (draw.paretovariate(1.1) - 1) if heavy else draw.expovariate(1 / depth))
        if draw.random() < again and back < len(stack):
            which = stack.pop(-1 - back)
        else:
            which, born = born, born + 1
        stack.append(which)
        prompts.append((at_s, _chain(f"r{which}", length)))
    return prompts


def reversals(draw: Random, count: int) -> Prompts:
    """What never came back begins to, and what always did ends: whoever learned it is wrong."""
    number, length = draw.choice((5, 30)), draw.choice((3, 12))
    once_each = draw.choice((2, 6))
    delay = draw.choice((10, 60, 300))
    prompts, at_s = [], 0.0
    turns_at = sorted(draw.randint(count // 10, count) for _ in range(draw.choice((1, 1, 3))))
    fresh: list[int] = []
    while len(prompts) < count:
        at_s += 1.0
        turned = sum(len(prompts) >= turn for turn in turns_at) % 2
        asked = len(prompts)
        if turned and len(fresh) > delay:
            prompts.append((at_s, _chain(f"n{fresh[-delay]}", length)))
        elif not turned and asked % once_each == 0:
            prompts.append((at_s, _chain(f"b{asked // once_each % number}", length)))
        else:
            prompts.append((at_s, _chain(f"n{asked}", length)))
        if asked % 2 or not turned:
            fresh.append(asked)
    return prompts


def pauses(draw: Random, count: int) -> Prompts:
    """Each prompt comes twice, after a pause that changes its length as time goes by."""
    length = draw.choice((2, 10, 40))
    pause_s = 20.0
    prompts: Prompts = []
    at_s = 0.0
    for asked in range(count // 2):
        at_s += 1.0
        pause_s = max(1.0, min(400.0, pause_s * draw.lognormvariate(0, 0.1)))
        if draw.random() < 0.005:
            pause_s *= draw.choice((0.2, 5.0))
        name = _chain(f"p{asked}", length)
        prompts.append((at_s, name))
        prompts.append((at_s + pause_s * draw.uniform(0.9, 1.1), name))
    return prompts


def drift(draw: Random, count: int) -> Prompts:
    """Documents whose popularity shifts over the day, and more questions at noon."""
    number = draw.choice((200, 1000))
    weights = list(accumulate((rank + 1) ** -draw.choice((0.8, 1.1)) for rank in range(number)))
    period, shift = count * draw.choice((0.3, 0.6, 1.0)), draw.choice((0.5, 1.0)) * number
    lengths = [_length(draw, 10) for _ in range(number)]
    at_s, prompts = 0.0, []
    for asked in range(count):
        tide = math.sin(2 * math.pi * asked / period)
        at_s += draw.expovariate(2 / (1.2 + tide))
        which = draw.choices(range(number), cum_weights=weights)[0]
        which = (which + int(shift * (1 + tide) / 2)) % number
        prompts.append((at_s, _chain(f"d{which}", lengths[which]) + _chain(f"q{asked}", 1)))
    return prompts


def crowds(draw: Random, count: int) -> Prompts:
    """Documents; now and then most questions are about a new one, for a while."""
    number, begins = draw.choice((100, 1000)), draw.choice((0.005, 0.02))
    lasts, share = draw.choice((20, 80, 200)), draw.choice((0.5, 0.9))
    weights = list(accumulate((rank + 1) ** -0.8 for rank in range(number)))
    lengths = [_length(draw, 10) for _ in range(number)]
    at_s, prompts, left, born = 0.0, [], 0, 0
    for asked in range(count):
        at_s += draw.expovariate(1.0)
        if not left and draw.random() < begins:
            left, born, length = lasts, born + 1, _length(draw, 20)
        if left and draw.random() < share:
            left -= 1
            name = _chain(f"c{born}", length)
        else:
            which = draw.choices(range(number), cum_weights=weights)[0]
            name = _chain(f"d{which}", lengths[which])
        prompts.append((at_s, name + _chain(f"q{asked}", 1)))
    return prompts


def waits(draw: Random, count: int) -> Prompts:
    """Agents that wait for a person now and then, for many minutes."""
    active, shared = draw.choice((5, 20, 60)), draw.choice((0, 20))
    rarely, wait_s = draw.choice((0.05, 0.2)), draw.choice((300.0, 1800.0))
    due = sorted((draw.uniform(0, 10), agent) for agent in range(active))
    lengths, steps, prompts, born = {}, {}, [], active
    while len(prompts) < count:
        at_s, agent = heappop(due)
        if agent not in lengths:
            lengths[agent], steps[agent] = _length(draw, 15), draw.randint(3, 80)
        prompts.append((at_s, _chain("tools", shared) + _chain(f"a{agent}", lengths[agent])))
        lengths[agent] += draw.randint(1, 5)
        steps[agent] -= 1
        if steps[agent] == 0:
            agent, born = born, born + 1
        pause_s = wait_s if draw.random() < rarely else 6.0
        heappush(due, (at_s + pause_s * draw.lognormvariate(0, 0.8), agent))
    return prompts


def wonders(draw: Random, count: int) -> Prompts:
    """Most prompts come once; some are asked again and again."""
    number, share = draw.choice((10, 50, 200)), draw.choice((0.1, 0.3, 0.5))
    lengths = [_length(draw, 10) for _ in range(number)]
    at_s, prompts = 0.0, []
    for asked in range(count):
        at_s += draw.expovariate(1.0)
        if draw.random() < share:
            which = draw.randrange(number)
            prompts.append((at_s, _chain(f"h{which}", lengths[which]) + _chain(f"q{asked}", 1)))
        else:
            prompts.append((at_s, _chain(f"o{asked}", _length(draw, 10))))
    return prompts


def comebacks(draw: Random, count: int) -> Prompts:
    """Users talk for some turns, leave for long, and come back; some begin anew."""
    users, goes_on = draw.choice((30, 150, 600)), draw.choice((0.3, 0.75))
    away_s, gap_s = draw.choice((200.0, 1500.0)), draw.choice((5.0, 20.0))
    lengths = [_length(draw, 8) for _ in range(users)]
    due = sorted((draw.uniform(0, away_s), user) for user in range(users))
    prompts: Prompts = []
    while len(prompts) < count:
        at_s, user = heappop(due)
        prompts.append((at_s, _chain(f"u{user}", lengths[user])))
        lengths[user] = min(200, lengths[user] + draw.randint(1, 3))
        if draw.random() < goes_on:
            heappush(due, (at_s + gap_s * draw.lognormvariate(0, 0.8), user))
        else:
            lengths[user] = 1 if draw.random() < 0.2 else lengths[user]
            heappush(due, (at_s + draw.expovariate(1 / away_s), user))
    return prompts


def regimes(draw: Random, count: int) -> Prompts:
    """What is popular is replaced as a whole every so often; other prompts come once."""
    every = max(50, int(count * draw.choice((0.1, 0.25, 0.5))))
    number, share, length = draw.choice((20, 100)), draw.choice((0.4, 0.8)), draw.choice((4, 12))
    prompts = []
    for asked in range(count):
        popular = f"r{asked // every} {draw.randrange(number)}"
        name = popular if draw.random() < share else f"o{asked}"
        prompts.append((float(asked), _chain(name, length)))
    return prompts


def tenants(draw: Random, count: int) -> Prompts:
    """Several tenants at a time, each with traffic of a kind of its own."""
    prompts: Prompts = []
    for tenant in range(draw.choice((2, 3, 5))):
        kind = draw.choice((documents, chats, agents, scans, recency))
        own = sorted(kind(draw, count), key=lambda prompt: prompt[0])
        hour_s = draw.uniform(0.3, 1.7) * (own[-1][0] or 1.0)
        prompts += [
            (at_s / hour_s, [b"%d %b" % (tenant, key) for key in keys]) for at_s, keys in own
        ]
    return sorted(prompts, key=lambda prompt: prompt[0])[:count]


def phases(draw: Random, count: int) -> Prompts:
    """One kind after another."""
    prompts: Prompts = []
    parts = draw.choice((2, 3, 5))
    for part in range(parts):
        kind = draw.choice((documents, chats, agents, scans, recency, pauses))
        more = sorted(kind(draw, count // parts), key=lambda prompt: prompt[0])
        start_s = prompts[-1][0] if prompts else 0.0
        prompts += [
            (start_s + at_s, [b"%d %b" % (part % 2, key) for key in keys]) for at_s, keys in more
        ]
    return prompts


KINDS: dict[str, Callable[[Random, int], Prompts]] = {
    kind.__name__: kind
    for kind in (
        documents,
        drift,
        crowds,
        chats,
        comebacks,
        agents,
        waits,
        tenants,
        scans,
        recency,
        wonders,
        reversals,
        regimes,
        pauses,
        phases,
    )
}


def traffic_of(seed: int) -> tuple[str, list[TraceRequest], int]:
    """A kind of traffic, some of it, and a number of blocks that the cache may have."""
    draw = Random(seed)
    name = draw.choice(sorted(KINDS))
    count = draw.choice((200, 400, 700, 1000, 2000, 4000))
    requests = requests_of(KINDS[name](draw, count))
    different = len({key for request in requests for key in request.keys})
    longest = max(len(request.keys) for request in requests)
    share = draw.choice((0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.8))
    return name, requests, max(longest + 1, round(share * different))
