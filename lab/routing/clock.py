# ruff: noqa: ANN401 - the signatures are those of asyncio
"""An event loop without waiting: when nothing is left to do, its time is that of the next timer."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

TIE_S = 1e-12


class _NoWait(selectors.DefaultSelector):
    """Hands every wait over to the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: Callable[[float | None], None] = lambda _: None

    def select(self, timeout: float | None = None) -> list[Any]:
        self.passes(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs tasks and timers in the order of a time that nobody waits for."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._set_count = 0
        selector = _NoWait()
        super().__init__(selector)
        selector.passes = self._pass

    def time(self) -> float:
        return self._seconds

    def _pass(self, wait_s: float | None) -> None:
        if wait_s is None:
            raise RuntimeError("every task waits, and no timer is set")
        self._seconds += wait_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        # Of equal times the first one set comes first, so that connections keep their order.
        self._set_count += 1
        when += self._set_count * TIE_S
        return super().call_at(when, callback, *args, context=context)

    # Channels here have no descriptors: whoever sends calls the reader.

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Nothing is read."""
        del fd, callback, args

    def remove_reader(self, fd: Any) -> bool:
        """Nothing was read."""
        del fd
        return False
