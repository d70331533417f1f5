"""One stretch of an engine's steps beside one side, timed step by step.

    begin side ─→ steps until the copies flow ─→ [ window: steps for `seconds` ] ─→ end side

A step is run piece by piece (a layer, or a whole captured graph), because some sides slow a
step down a thousandfold: a step that has not ended when the window is over is given up, and
the share of its pieces that were done counts.

The one rule: nothing but the loop and the side runs inside the window.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from lab.bench.interference.shares import Window

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM_STEPS = 4
"""Steps before the window: the two in flight, and as many for the copies to fill their queue."""


class Loop(Protocol):
    """An engine's loop, with one or two steps in flight."""

    piece_count: int
    """Pieces of one step."""

    def step(self) -> Iterator[None]:
        """Submits a step, and pauses after each of its pieces."""
        ...

    def read_oldest(self) -> bool:
        """Reads the result of the oldest step if enough are in flight; whether one has ended."""
        ...

    def settle(self) -> None:
        """Reads all that is in flight, and forgets a step that was given up."""
        ...


class Side(Protocol):
    """Who drives the copies beside the loop."""

    def begin(self) -> None:
        """Starts the copies."""
        ...

    def at_boundary(self) -> None:
        """A step has been submitted; the engine's thread is here."""
        ...

    def end(self, began: float, ended: float) -> int:
        """Stops the copies and waits for them; returns the bytes that ended between two times."""
        ...


def run_window(loop: Loop, side: Side, *, seconds: float) -> Window:
    """Runs the loop beside the side and tells what both did."""
    side.begin()
    began = last = time.monotonic()
    moved_bytes = 0
    step_s: list[float] = []
    part = boundary_s = 0.0
    try:
        _warm(loop, side, began + seconds)
        began = last = time.monotonic()
        while last < began + seconds:
            # Twice as late as the window ends: a step that is slow but not hopeless goes on.
            done = _step(loop, began + 2 * seconds)
            if done < loop.piece_count:
                part = done / loop.piece_count
                last = time.monotonic()
                break
            boundary = time.monotonic()
            side.at_boundary()
            boundary_s += time.monotonic() - boundary
            if loop.read_oldest():
                now = time.monotonic()
                step_s.append(now - last)
                last = now
    finally:
        # Whatever happened: a thread of the side would outlive the window.
        moved_bytes = side.end(began, last)
    loop.settle()
    return Window(
        step_s=tuple(step_s),
        steps=len(step_s) + part,
        seconds=last - began,
        moved_bytes=moved_bytes,
        boundary_s=boundary_s,
    )


def _warm(loop: Loop, side: Side, give_up: float) -> None:
    for _ in range(WARM_STEPS):
        if _step(loop, give_up) < loop.piece_count:
            return
        side.at_boundary()
        loop.read_oldest()


def _step(loop: Loop, give_up: float) -> int:
    """Submits a step, or the part of it that can be done until then; returns the pieces done."""
    done = 0
    for _ in loop.step():
        done += 1
        if done < loop.piece_count and time.monotonic() > give_up:
            break
    return done
