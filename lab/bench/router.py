"""What the router costs: a decision, a request through it, and what instances say they cached.

The real `Router` with its links, and instances at the other end of channels within this process
that answer each request with one token. Prompts are those of conversations: a start that all
have, then turns of one conversation, which one instance has cached.

| row      | is                                                                               |
|----------|----------------------------------------------------------------------------------|
| decision | CPU time of choosing the instances of one request, keys of its prompt included    |
| request  | CPU time of a request in the router, from its submission to its last token        |
| event    | CPU time of a change of what is cached, 16 blocks each, from its frame            |
| memory   | bytes of the router for each block that an instance has                            |
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
import tracemalloc
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lab.bench.measure import summarize
from lab.fixtures.inproc import channel_pair
from penstock import BlocksRemoved, BlocksStored
from penstock.config import parse_config
from penstock.transport.base import ReceivedFrame
from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import Sampled
from penstock_serve.engine.spec import EngineSpec
from penstock_serve.server.fleet import PromptKeys
from penstock_serve.server.instance_link import InstanceLink
from penstock_serve.server.router import Router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.bench.report import BenchReport
    from lab.fixtures.inproc import InprocChannel
    from penstock.config import Config

ENGINES = (1, 10, 100, 1000)
BLOCK_TOKENS = 16
START_BLOCKS = 20
"""What all prompts begin with."""
TURN_BLOCKS = 80
CONVERSATIONS = 40
"""Of each instance."""
UNDER_WAY = 4
"""Requests of each instance, on average."""
DECISIONS = 300
VOCABULARY = range(32_000)
EVENTS = 20_000
EVENT_KEYS = 16
DECISION_S_MAX = 1e-3
EVENTS_A_SECOND = 20_000
CONFIG = (
    f'version = 1\nmodel.name = "m"\ncache = {{ blocks = 4096, block_tokens = {BLOCK_TOKENS} }}\n'
)


@dataclass(slots=True, eq=False)
class Played:
    """An instance: what the router sees of it, and its own end of the channel."""

    link: InstanceLink
    channel: InprocChannel
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    """Its conversations, all turns."""

    def answer(self) -> int:
        """Answers what it was asked with a token each; how many requests those were."""
        answered = 0
        while isinstance(said := self.channel.receive(), ReceivedFrame):
            message = ms.read_by_instance(said.frame)
            if isinstance(message, Request):
                answered += 1
                output = Output(
                    request=message.id, answer=0, sampled=Sampled(1, 0.0), reason=Reason.STOP
                )
                self.channel.send(ms.encode(output))
        return answered


class Fleet:
    """A router and its instances, each with conversations of its own."""

    def __init__(self, count: int, *, pairs: bool, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.router = Router()
        start = self._tokens(START_BLOCKS)
        self.config = parse_config(CONFIG)
        self.instances = [self._join(number, pairs=pairs) for number in range(count)]
        for each in self.instances:
            each.prompts = [
                start + self._tokens(TURN_BLOCKS)
                for _ in range(min(CONVERSATIONS, max(1, 4000 // count)))
            ]

    def _tokens(self, blocks: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(VOCABULARY, k=blocks * BLOCK_TOKENS))

    def _join(self, number: int, *, pairs: bool) -> Played:
        near, far = channel_pair("server", f"instance {number}")
        link = InstanceLink(near, on_change=lambda _link: None)
        self.router.add(link)
        role: ms.RoleName = "both"
        if pairs:
            role = "decode" if number % 2 else "prefill"
        engine = (
            EngineSpec(name=f"instance {number}", address=f"ipc:///tmp/{number}", ranks=1)
            if pairs
            else None
        )
        ready = ms.InstanceReady(
            model="m",
            positions=1 << 20,
            stop_tokens=[],
            config=self.config,
            tiers=["device"],
            role=role,
            engine=engine if pairs else None,
        )
        far.send(ms.encode(ready))
        return Played(link, far)

    async def fill(self) -> None:
        """Instances say what they have cached."""
        await self.settle()
        for each in self.instances:
            for prompt in each.prompts:
                for frame in frames_of(self.config, prompt):
                    each.channel.send(frame)
                each.link.look()
        await self.settle()

    async def settle(self) -> None:
        """Lets the loop read what was sent."""
        for each in self.instances:
            each.link.look()
        for _ in range(5):
            await asyncio.sleep(0)

    def request(self, name: str) -> Request:
        """The next turn of a conversation, or a new one."""
        owner = self.rng.choice(self.instances)
        prompt = self.rng.choice(owner.prompts)
        blocks = START_BLOCKS + self.rng.choice((0, TURN_BLOCKS // 2, TURN_BLOCKS))
        return Request(
            id=name, prompt=prompt[: blocks * BLOCK_TOKENS] + self._tokens(5), max_tokens=4
        )

    def close(self) -> None:
        for each in self.instances:
            each.link.close()
            each.channel.close()


def frames_of(config: Config, prompt: Sequence[int]) -> list[bytes]:
    """What an instance says when it has cached a prompt."""
    chain = config.key_chain()
    chain.extend(prompt)
    keys = [bytes(key) for key in chain.keys]
    return [
        ms.encode(
            ms.CacheChanged(
                events=[
                    BlocksStored(
                        sequence=first + 1,
                        epoch=0,
                        tier="device",
                        keys=keys[first : first + EVENT_KEYS],
                        parent=keys[first - 1] if first else None,
                    )
                ]
            )
        )
        for first in range(0, len(keys), EVENT_KEYS)
    ]


def run_router(
    report: BenchReport,
    *,
    engines: Sequence[int] = ENGINES,
    decisions: int = DECISIONS,
    events: int = EVENTS,
) -> None:
    """Measures decisions with each number of instances, alone and in pairs, and events."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8 * max(engines))), hard))
    for count in engines:
        for pairs in (False, True):
            if count > 1 or not pairs:
                report.progress(f"{count} instances{' in pairs' if pairs else ''}")
                asyncio.run(
                    _measure(report, count, pairs=pairs, decisions=decisions, events=events)
                )


async def _measure(
    report: BenchReport, count: int, *, pairs: bool, decisions: int, events: int
) -> None:
    tracemalloc.start()
    fleet = Fleet(count, pairs=pairs)
    await fleet.settle()
    before = tracemalloc.get_traced_memory()[0]
    await fleet.fill()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    held = sum(len(prompt) // BLOCK_TOKENS for each in fleet.instances for prompt in each.prompts)
    params = {"instances": count, "pairs": pairs}

    choices, requests = await _serve(fleet, decisions, under_way=UNDER_WAY * count)
    _add(report, params, "decision", choices)
    _add(report, params, "request", requests)
    p99 = summarize(choices).p99
    report.add_ratio(
        f"decision p99 ÷ 1 ms, {count} instances{' in pairs' if pairs else ''}",
        p99 / DECISION_S_MAX,
        at_most=1.0,
    )
    if not pairs:
        times = _take_events(fleet, events)
        _add(report, params, "event", times)
        report.add_ratio(
            f"events a second of CPU, {count} instances",
            1 / summarize(times).median,
            at_least=EVENTS_A_SECOND,
        )
        report.add_row(
            bench="router",
            side="penstock",
            params=params,
            metric="memory",
            unit="bytes/block",
            summary=summarize([grown / held]),
        )
    fleet.close()


async def _serve(
    fleet: Fleet, decisions: int, *, under_way: int
) -> tuple[list[float], list[float]]:
    """CPU seconds of decisions, and of requests beside the instances' part."""
    router = fleet.router
    waiting: deque[asyncio.Task[int]] = deque()
    choices, requests = [], []
    for number in range(decisions):
        submit = fleet.request(f"r{number}")
        began = time.thread_time()
        router._choose(PromptKeys(submit), set())  # noqa: SLF001 - what is measured
        choices.append(time.thread_time() - began)
        waiting.append(asyncio.create_task(_drain(router, submit)))
        began = time.thread_time()
        await asyncio.sleep(0)
        requests.append(time.thread_time() - began)
        if len(waiting) > under_way:
            await _end(fleet, waiting)
    while waiting:
        await _end(fleet, waiting)
    return choices, requests


async def _drain(router: Router, submit: Request) -> int:
    return len([output async for output in router.generate(submit)])


async def _end(fleet: Fleet, waiting: deque[asyncio.Task[int]]) -> None:
    """Instances answer until the oldest request has ended."""
    oldest = waiting.popleft()
    while not oldest.done():
        for each in fleet.instances:
            if each.answer():
                each.link.look()
        await asyncio.sleep(0)
    oldest.result()


def _take_events(fleet: Fleet, events: int) -> list[float]:
    """CPU seconds of each event, from its frame; half of them remove what the others stored."""
    frames = []
    for number in range(events // 2):
        keys = [fleet.rng.randbytes(16) for _ in range(EVENT_KEYS)]
        stored = BlocksStored(sequence=number, epoch=0, tier="host", keys=keys, parent=None)
        removed = BlocksRemoved(sequence=number, epoch=0, tier="host", keys=keys)
        frames.append([ms.encode(ms.CacheChanged(events=[each])) for each in (stored, removed)])
    times = []
    for pair in frames:
        instance = fleet.rng.choice(fleet.instances)
        for frame in pair:
            instance.channel.send(frame)
        began = time.thread_time()
        instance.link.look()
        times.append((time.thread_time() - began) / 2)
    return times


def _add(
    report: BenchReport, params: dict[str, int | bool], metric: str, times: list[float]
) -> None:
    report.add_row(
        bench="router",
        side="penstock",
        params=params,
        metric=metric,
        unit="s",
        summary=summarize(times),
    )
