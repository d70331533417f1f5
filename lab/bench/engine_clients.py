"""Clients of an engine: they send requests and record when each token was returned.

The one rule: a token's time is when the engine returned it, not when a device computed it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock_serve.engine.requests import Request

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from penstock_serve.engine.engine import Engine

PATIENCE_S = 120.0


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request with its tokens and times."""

    began: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    cached: tuple[int, ...] = ()
    ended: bool = False

    @property
    def first_token_s(self) -> float:
        """From the request to its first token."""
        return self.times[0] - self.began

    @property
    def between_s(self) -> list[float]:
        """From each token to the next."""
        return [after - before for before, after in pairwise(self.times)]


class Clients:
    """The clients of one engine, in its thread: they run between its steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.asked: dict[str, Asked] = {}
        self._count = 0

    def ask(
        self, prompt: Sequence[int], *, max_tokens: int, reuse: bool = True, store: bool = True
    ) -> Asked:
        self._count += 1
        asked = Asked(began=time.perf_counter())
        self.asked[str(self._count)] = asked
        request = Request(
            id=str(self._count),
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            reuse=reuse,
            store=store,
        )
        self.engine.add(request)
        return asked

    def step(self) -> None:
        """One step of the engine; waits for copies when nothing else can be done."""
        for output in self.engine.step():
            asked = self.asked[output.request]
            if output.sampled is not None:
                asked.tokens.append(output.sampled.token)
                asked.times.append(time.perf_counter())
            if output.cached_by_tier:
                asked.cached = output.cached_by_tier
            if output.reason is not None:
                asked.ended = True
                del self.asked[output.request]
        if self.engine.idle and self.engine.cache.busy:
            self.engine.cache.wait(time.monotonic() + PATIENCE_S)

    def until(self, *wanted: Asked, tokens: int = 0) -> None:
        """Steps until each of these has `tokens` tokens, or has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while any(not each.ended and (not tokens or len(each.tokens) < tokens) for each in wanted):
            self.step()
            if time.monotonic() > deadline:
                raise UnavailableError(f"a request has not ended within {PATIENCE_S} s")

    def answer(self, prompt: Sequence[int], *, max_tokens: int, reuse: bool = True) -> Asked:
        """Sends a request and waits for its end."""
        asked = self.ask(prompt, max_tokens=max_tokens, reuse=reuse)
        self.until(asked)
        return asked

    def settle(self) -> None:
        """Waits until all copies have ended."""
        deadline = time.monotonic() + PATIENCE_S
        while self.engine.cache.busy or self.engine.unfinished:
            self.step()
            if time.monotonic() > deadline:
                raise UnavailableError(f"copies have not ended within {PATIENCE_S} s")

    def stop(self) -> None:
        for name in list(self.asked):
            self.engine.abort(name)
        self.settle()


def prompt(random: Random, count: int, vocabulary: int) -> list[int]:
    return random.choices(range(vocabulary), k=count)
