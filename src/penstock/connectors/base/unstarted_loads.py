"""Loads that an engine was offered and cannot start: finds them, so that no request waits for ever.

An engine may keep a load from starting until other requests have given up room. vLLM starts an
asynchronous load only if it fits beside the room that it reserves for requests under way, and
asks about the request again in each step. If nothing is under way that could give up room, the
same question gets the same answer for ever, and everything behind that request waits with it.

    find_tokens  ─→ offered     the engine was told that so many tokens can be loaded
    start_load   ─→ started
    plan_step    ─→ end_step    returns the requests whose loads are given up

The one rule: only steps count in which the engine asked for the load, computed nothing, and had
nothing under way that ends by itself. A request that waits for others is never given up.
"""

from __future__ import annotations

STEPS_MAX = 64
"""Such steps in a row. Results of earlier steps that may free room arrive within a few; 64 steps
without work take an engine some hundredths of a second."""


class UnstartedLoads:
    """The offers of one scheduler that have not been taken."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        """Requests whose offer was not taken, and in how many such steps."""
        self._offered: set[str] = set()
        """Requests that were offered a load since the last step."""

    def offered(self, request: str) -> None:
        """The engine was told what can be loaded for a request."""
        self._offered.add(request)

    def started(self, request: str) -> None:
        """The engine has made room for the load, or the request has ended."""
        self._offered.discard(request)
        self._steps.pop(request, None)

    def end_step(self, *, idle: bool) -> list[str]:
        """A step was put together.

        Returns:
            Requests that are to be computed: their loads would never start.
        """
        if not self._offered and not self._steps:
            return []
        before = self._steps if idle else {}
        self._steps = {name: before.get(name, 0) + 1 for name in self._offered} if idle else {}
        self._offered.clear()
        over = [name for name, steps in self._steps.items() if steps >= STEPS_MAX]
        for name in over:
            del self._steps[name]
        return over
