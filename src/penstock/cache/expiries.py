"""When the time of blocks passes: a time for each node, and which of them comes next.

A hit that gives blocks more time writes their new time, and notes all of them in one entry of a
heap. Entries are not searched when a time changes: a node of an entry counts only if its time is
still the entry's. When the heap has noted as many nodes as there can be, all of it is sorted anew
into one array, without what no longer counts.

The one rule: no call takes longer with the number of hits, only with the number of nodes.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEVER = float("-inf")
"""The time of a node that has none."""
_NOTED_MIN = 64
"""With fewer nodes than this, nothing is sorted again."""
_NOBODY = np.empty(0, dtype=np.intp)
"""No nodes."""
_GLANCE = 256
"""How many sorted nodes are looked at in one go."""


class Expiries:
    """The times to live of nodes."""

    def __init__(self, capacity: int = 0) -> None:
        self._until = np.full(capacity, NEVER)
        """Node to the time that was given it last."""
        self._heap: list[tuple[float, int, NDArray[np.intp]]] = []
        """Nodes that got their time by one call; the number keeps arrays from being compared."""
        self._calls = 0
        self._noted = 0
        """Nodes in the heap."""
        self._sorted = np.empty(0, dtype=np.intp)
        """Nodes by their times, which are in `_times`; from `_first` on."""
        self._times = np.empty(0)
        self._first = 0

    @property
    def entry_count(self) -> int:
        """How many nodes are noted, those included that no longer count."""
        return self._noted + len(self._sorted) - self._first

    def resize(self, node_capacity: int) -> None:
        """Makes room for more node numbers."""
        if len(self._until) < node_capacity:
            until = np.full(node_capacity, NEVER)
            until[: len(self._until)] = self._until
            self._until = until

    def extend(self, nodes: NDArray[np.intp], until: float) -> NDArray[np.intp]:
        """Gives nodes time; those of them that had less, which are the ones that now have it."""
        longer: NDArray[np.intp] = nodes[self._until[nodes] < until]
        if not len(longer):
            return longer
        self._until[longer] = until
        self._calls += 1
        heappush(self._heap, (until, self._calls, longer))
        self._noted += len(longer)
        if self._noted > max(_NOTED_MIN, len(self._until)):
            self._sort()
        return longer

    def forget(self, nodes: NDArray[np.intp]) -> None:
        """These numbers mean other blocks from now on, which have no time yet."""
        if self._calls:  # Before the first time was given, there is nothing to forget.
            self._until[nodes] = NEVER

    def next(self) -> float | None:
        """When the next time passes."""
        while self._heap and not self._counting(self._heap[0][2], self._heap[0][0]).any():
            self._pop()
        while self._first < len(self._sorted):
            part = slice(self._first, self._first + _GLANCE)
            counting = self._counting(self._sorted[part], self._times[part])
            if counting.any():
                self._first += int(counting.argmax())
                break
            self._first += len(counting)
        times = [self._heap[0][0]] if self._heap else []
        if self._first < len(self._sorted):
            times.append(float(self._times[self._first]))
        return min(times, default=None)

    def pop_passed(self, now: float) -> NDArray[np.intp]:
        """The nodes whose time has passed; they have none from now on."""
        due = self._first < len(self._sorted) and self._times[self._first] <= now
        if not due and not (self._heap and self._heap[0][0] <= now):
            return _NOBODY  # So it is in most steps of an engine, which should not pay for it.
        end = int(np.searchsorted(self._times, now, side="right"))
        part = slice(self._first, max(end, self._first))
        nodes = self._sorted[part]
        found = [nodes[self._counting(nodes, self._times[part])]]
        self._first = part.stop
        while self._heap and self._heap[0][0] <= now:
            until, nodes = self._pop()
            found.append(nodes[self._counting(nodes, until)])
        passed = np.unique(np.concatenate(found))
        self._until[passed] = NEVER
        return passed

    def _counting(
        self, nodes: NDArray[np.intp], times: float | NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        counting: NDArray[np.bool_] = self._until[nodes] == times
        return counting

    def _pop(self) -> tuple[float, NDArray[np.intp]]:
        until, _, nodes = heappop(self._heap)
        self._noted -= len(nodes)
        return until, nodes

    def _sort(self) -> None:
        nodes = np.flatnonzero(self._until != NEVER).astype(np.intp)
        order = np.argsort(self._until[nodes], kind="stable")
        self._sorted, self._first = nodes[order], 0
        self._times = self._until[self._sorted]
        self._heap, self._noted = [], 0
