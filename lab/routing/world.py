"""A router and its engines, from one seed: everything but CPU times follows from it."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lab.routing.clock import VirtualLoop
from lab.routing.engine import CONFIG, PREFILL_RATE, Line, PeerGroup, SimulatedEngine
from lab.routing.faults import Fault, Faults
from lab.routing.policies import ROUTERS, Policy, TimedRouter
from lab.routing.traffic import Arrival, arrivals_of, mean_tokens
from penstock_serve.engine.requests import Request
from penstock_serve.server.instance_link import InstanceLink, InstanceLost, RequestRefusal

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 120.0
LOAD = 0.9
RACKS = 20
PEERS = 8
"""Engines that read each other's host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a world is made of."""

    engines: int
    policy: Policy = Policy.OURS
    traffic: str = "conversation"
    seconds: float = SECONDS
    """How long requests come."""
    load: float = LOAD
    """Prompt tokens of the requests, as a share of what all engines compute without a cache."""
    faults: frozenset[Fault] = frozenset({Fault.DEATHS})
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was measured in one world."""

    conditions: Conditions
    requests: int = 0
    failed: int = 0
    retried: int = 0
    hit_rate: float = 0.0
    first_token_p50_s: float = 0.0
    first_token_p99_s: float = 0.0
    choice_cpu_p50_ms: float = 0.0
    choice_cpu_p99_ms: float = 0.0
    event_keys: int = 0
    event_keys_a_cpu_s: float = 0.0
    """With the reading of their frames."""
    directory_blocks: int = 0
    """Of all engines, as the router knows them at the end."""
    directory_bytes: int = 0
    wall_s: float = 0.0


@dataclass(slots=True)
class _Seen:
    """What clients have seen."""

    first_s: list[float] = field(default_factory=list)
    prompt_blocks: int = 0
    cached_blocks: int = 0
    failed: int = 0


class RoutingWorld:
    """A router, its engines and their clients."""

    def __init__(self, conditions: Conditions, router: TimedRouter | None = None) -> None:
        self.conditions = conditions
        self.seconds = conditions.seconds
        self.router = router or ROUTERS[conditions.policy]()
        self.engines: list[SimulatedEngine] = []
        self.slow_store = 1.0
        """How many times slower host memory and peers are."""
        self._loop = asyncio.get_running_loop()
        self._links: dict[Line, InstanceLink] = {}
        self._groups: list[PeerGroup] = []
        self._keys: dict[str, list[bytes]] = {}
        """Of the prompts under way."""
        self._event_keys = 0
        self._events_cpu_s = 0.0

    # ---------------------------------------------------------------- for engines

    def after(self, delay_s: float, action: Callable[..., object], *arguments: object) -> None:
        self._loop.call_later(delay_s, action, *arguments)

    def connect(self, engine: SimulatedEngine) -> Line:
        """A new connection of an engine to the router."""
        line = Line(engine.name, engine, engine.life)
        link = InstanceLink(line, on_change=self._changed)
        self._links[line] = link
        self.router.add(link)
        return line

    def _changed(self, link: InstanceLink) -> None:
        # As `service.Service` does.
        if link.lost:
            self.router.remove(link)

    def look(self, line: Line, event_keys: int = 0) -> None:
        """The router reads what has come."""
        began = time.thread_time()
        self._links[line].look()
        if event_keys:
            self._events_cpu_s += time.thread_time() - began
            self._event_keys += event_keys

    def keys_of(self, request: Request) -> list[bytes]:
        """The keys of a prompt; attempts of one request have one."""
        name = request.id.partition("/")[0]
        if name not in self._keys:
            chain = CONFIG.key_chain()
            chain.extend(request.prompt)
            self._keys[name] = chain.keys
        return self._keys[name]

    def hand_over(self, decode: str, handoff: str) -> None:
        """The KV of a prompt reaches another engine."""
        self.engines[int(decode.partition("-")[2])].take_over(handoff)

    def add_engines(self, count: int) -> None:
        """Engines start, with nothing."""
        in_rack = max(1, self.conditions.engines // RACKS)
        for number in range(len(self.engines), len(self.engines) + count):
            if number % PEERS == 0:
                self._groups.append(PeerGroup())
            engine = SimulatedEngine(self, number, number // in_rack, self._groups[-1])
            self.engines.append(engine)
            engine.join()

    # ---------------------------------------------------------------- clients

    async def run(self, arrivals: list[Arrival]) -> Outcome:
        """Lets all requests come, and ends."""
        conditions, began = self.conditions, time.perf_counter()
        self.add_engines(conditions.engines)
        await asyncio.sleep(1.0)
        Faults(self, conditions.faults, random.Random(conditions.seed + 1))
        seen, tasks = _Seen(), set[asyncio.Task[None]]()
        starts = self._loop.time()
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(max(0.0, starts + arrival.at_s - self._loop.time()))
            task = asyncio.create_task(self._ask(f"r{number}", arrival, seen))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            await asyncio.wait(tasks)
        return self._outcome(seen, len(arrivals), time.perf_counter() - began)

    async def _ask(self, name: str, arrival: Arrival, seen: _Seen) -> None:
        """A client: it takes the answer token by token, and does not ask again."""
        request = Request(id=name, prompt=arrival.prompt, max_tokens=arrival.output_tokens)
        began, waits = self._loop.time(), True
        try:
            async for output in self.router.generate(request):
                if waits:
                    waits = False
                    seen.first_s.append(self._loop.time() - began)
                    seen.prompt_blocks += len(arrival.prompt)
                    seen.cached_blocks += sum(output.cached_by_tier)
        except (InstanceLost, RequestRefusal):
            seen.failed += 1
        finally:
            self._keys.pop(name, None)

    def _outcome(self, seen: _Seen, requests: int, wall_s: float) -> Outcome:
        choices_ms = [1000 * each for each in self.router.choices_s]
        return Outcome(
            conditions=self.conditions,
            requests=requests,
            failed=seen.failed,
            retried=self.router.retries,
            hit_rate=seen.cached_blocks / max(1, seen.prompt_blocks),
            first_token_p50_s=_percentile(seen.first_s, 0.5),
            first_token_p99_s=_percentile(seen.first_s, 0.99),
            choice_cpu_p50_ms=_percentile(choices_ms, 0.5),
            choice_cpu_p99_ms=_percentile(choices_ms, 0.99),
            event_keys=self._event_keys,
            event_keys_a_cpu_s=self._event_keys / max(1e-9, self._events_cpu_s),
            directory_blocks=self.router.directory_blocks(),
            directory_bytes=self.router.directory_bytes(),
            wall_s=wall_s,
        )


def simulate(
    conditions: Conditions, make_router: Callable[[], TimedRouter] | None = None
) -> Outcome:
    """Runs one world to its end."""
    requests = round(
        conditions.load
        * PREFILL_RATE
        / mean_tokens(conditions.traffic)
        * conditions.engines
        * conditions.seconds
    )
    arrivals = arrivals_of(
        conditions.traffic, requests=requests, seconds=conditions.seconds, seed=conditions.seed
    )

    async def live() -> Outcome:
        world = RoutingWorld(conditions, None if make_router is None else make_router())
        return await world.run(arrivals)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(live())


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
