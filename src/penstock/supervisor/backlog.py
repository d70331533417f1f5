"""Events that wait to be taken, of which there is a bound.

The one rule: what had to be dropped is counted, and the count is told in its place. An event
that is missing never looks like one that did not happen.
"""

from __future__ import annotations

from collections import deque

from penstock.supervisor.messages import Event, Missed

EVENTS_MAX = 1024
"""Sixteen for each process that there may be: more than a restart storm tells before it ends."""


class Backlog:
    """A queue of events that forgets the oldest rather than grow."""

    def __init__(self, limit: int = EVENTS_MAX) -> None:
        self._events: deque[Event] = deque()
        self._limit = limit
        self._missed = 0

    def add(self, event: Event) -> None:
        """Appends an event; one that says how many were lost elsewhere adds to the count."""
        if isinstance(event, Missed):
            self._missed += event.count
            return
        if len(self._events) == self._limit:
            self._events.popleft()
            self._missed += 1
        self._events.append(event)

    def next(self) -> Event | None:
        """The event that is to be taken now; stays until `drop`."""
        if self._missed:
            return Missed(count=self._missed)
        return self._events[0] if self._events else None

    def drop(self) -> None:
        """Forgets what `next` last returned."""
        if self._missed:
            self._missed = 0
        else:
            self._events.popleft()

    def __len__(self) -> int:
        return len(self._events) + bool(self._missed)
