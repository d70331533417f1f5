"""Who chooses an engine: the router of `penstock serve`, or another with everything else alike."""

from __future__ import annotations

import time
from enum import StrEnum
from sys import getsizeof
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from lab.routing.traffic import BLOCK_TOKENS
from penstock.config import RoutingTable
from penstock_serve.server.instance_link import InstanceLost
from penstock_serve.server.router import Router
from penstock_serve.server.routes import RequestRoute

if TYPE_CHECKING:
    from penstock_serve.server.fleet import PromptKeys
    from penstock_serve.server.instance_link import InstanceLink

USUAL_TOKENS = 16
"""Of a block, with the default settings."""
AFFINE_BLOCKS = 8
"""Prompts that begin with the same 4,096 tokens go to the same engine."""
SMALL_INT_MAX = 256


class Policy(StrEnum):
    """Who chooses."""

    OURS = "ours"
    ROUND_ROBIN = "round-robin"
    AFFINE = "prefix-affine"
    LEAST_LOADED = "least-loaded"


def settings() -> RoutingTable:
    """The default weights, which count blocks of 16 tokens, for the blocks that are simulated."""
    usual, scale = RoutingTable(), USUAL_TOKENS / BLOCK_TOKENS
    return RoutingTable(
        load_weight=usual.load_weight * scale,
        computing_weight=usual.computing_weight * scale,
        failed_weight=usual.failed_weight * scale,
        equal_blocks=usual.equal_blocks * scale,
    )


class TimedRouter(Router):
    """The router of `penstock serve`, and how much CPU time its choices take."""

    def __init__(self) -> None:
        super().__init__(settings())
        self.choices_s: list[float] = []

    def _choose(self, prompt: PromptKeys, tried: set[InstanceLink]) -> RequestRoute:
        began = time.thread_time()
        try:
            return self._decide(prompt, tried)
        finally:
            self.choices_s.append(time.thread_time() - began)

    def _decide(self, prompt: PromptKeys, tried: set[InstanceLink]) -> RequestRoute:
        return super()._choose(prompt, tried)

    def directory_blocks(self) -> int:
        """Blocks of all instances that it knows of."""
        return sum(len(each._tiers_of) for each in self._fleet._cached.values())  # noqa: SLF001

    def directory_bytes(self) -> int:
        """The memory of what it knows of blocks: tables, keys and sets of instances."""
        tables = [self._fleet._holders]  # noqa: SLF001 - what is measured
        tables += [each._tiers_of for each in self._fleet._cached.values()]  # noqa: SLF001
        seen: dict[int, int] = {}
        for table in tables:
            seen[id(table)] = getsizeof(table)
            for key, value in table.items():
                seen[id(key)] = getsizeof(key)
                # Small numbers are one object each for all.
                seen[id(value)] = getsizeof(value) if value > SMALL_INT_MAX else 0
        return sum(seen.values())


class _Compared(TimedRouter):
    """Another choice among the same instances."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def _decide(self, prompt: PromptKeys, tried: set[InstanceLink]) -> RequestRoute:
        there = self.answering
        links = [link for link in there if link not in tried] if tried else there
        if not links:
            raise InstanceLost("no instance is ready")
        self._turn += 1
        return RequestRoute(self._pick(links, prompt), None, 0)

    def _pick(self, links: list[InstanceLink], prompt: PromptKeys) -> InstanceLink:
        raise NotImplementedError


class RoundRobin(_Compared):
    """One engine after the other."""

    def _pick(self, links: list[InstanceLink], _prompt: PromptKeys) -> InstanceLink:
        return links[self._turn % len(links)]


class LeastLoaded(_Compared):
    """The engine with the fewest requests under way; of equals the one after the last choice."""

    def _pick(self, links: list[InstanceLink], _prompt: PromptKeys) -> InstanceLink:
        at = self._turn % len(links)
        return min(links[at:] + links[:at], key=_load)


class PrefixAffine(_Compared):
    """The engine with the highest hash of its name and the beginning of the prompt."""

    def _pick(self, links: list[InstanceLink], prompt: PromptKeys) -> InstanceLink:
        ready = links[0].ready
        assert ready is not None
        start = prompt.under(ready.config)[:AFFINE_BLOCKS][-1]
        return max(links, key=lambda link: xxh3_64_intdigest(start + link.name.encode()))


def _load(link: InstanceLink) -> int:
    return link.load


ROUTERS = {
    Policy.OURS: TimedRouter,
    Policy.ROUND_ROBIN: RoundRobin,
    Policy.AFFINE: PrefixAffine,
    Policy.LEAST_LOADED: LeastLoaded,
}
