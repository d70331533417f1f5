"""What will happen in a simulated world, and when: one clock for everything in it."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from lab.explore.world import Violation

if TYPE_CHECKING:
    from collections.abc import Callable


class Agenda:
    """Actions in the order of their times; those of one time, in the order they were entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._entered = 0

    def after(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Lets something happen after a while."""
        self.at(self.now + delay_s, action, *arguments)

    def at(self, when: float, action: Callable[..., None], *arguments: object) -> None:
        """Lets something happen at a time.

        Two entries for one time keep their order. `after` would not do for that: `now` plus what
        is left until `when` may be a rounding less than `when`.
        """
        self._entered += 1
        heappush(self._entries, (when, self._entered, action, arguments))

    def run(self, *, step_count_max: int) -> None:
        """Lets everything happen, until nothing is left.

        Raises:
            Violation: something is left after so many steps.
        """
        for _ in range(step_count_max):
            if not self._entries:
                return
            self.now, _, action, arguments = heappop(self._entries)
            action(*arguments)
        raise Violation("liveness", "the world does not come to rest")
