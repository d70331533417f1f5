"""The thread that runs the handoffs of a process, beside the engine's own.

    thread = HandoffThread("prefill-0", handoffs)
    thread.post(handoffs.first_token, "request-1", 42)      # from the engine's thread
    thread.close()

The one rule: after it was started, only the thread calls what it runs. Calls that were posted are
made in their order.
"""

from __future__ import annotations

import os
import time
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, ParamSpec, Protocol

from penstock.errors import InvariantViolation
from penstock.transport.waiting import wait_any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.transport.base import Waitable

    Arguments = ParamSpec("Arguments")

LOOK_S = 1.0
"""How often it steps at least: the longest that a timer nobody told it about is late."""
MAKE_S = 60.0
"""How long `make` waits for a call: the thread does bounded work in between."""
CLOSE_S = 10.0
"""How long `close` waits for a step that is under way."""


class ThreadHandoffs(Protocol):
    """What the thread runs."""

    def step(self) -> None:
        """Does what there is to do; never waits."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do at once."""
        ...

    @property
    def waitables(self) -> list[Waitable]:
        """Connections to wait for."""
        ...

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors to wait for beside them."""
        ...

    def next_deadline(self) -> float | None:
        """When to step at the latest, on the monotonic clock."""
        ...

    def close(self) -> None:
        """Ends everything."""
        ...


class HandoffThread:
    """Runs handoffs until it is closed."""

    def __init__(self, name: str, handoffs: ThreadHandoffs) -> None:
        self._name = name
        self._handoffs = handoffs
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stops = False
        self._thread = Thread(target=self._run, name=f"penstock handoff {name}", daemon=True)
        self._thread.start()

    def post(
        self,
        call: Callable[Arguments, object],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        """Has the thread make a call.

        Raises `InvariantViolation`: the thread has ended by an error of ours, which it has logged.
        """
        self.require()
        self._calls.put(lambda: call(*args, **kwargs))
        os.eventfd_write(self._wake, 1)

    def make(
        self,
        call: Callable[Arguments, object],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        """Has the thread make a call, and waits until it was made.

        Raises `InvariantViolation`: the thread has ended by an error of ours, or hangs.
        """
        made = Event()

        def making() -> None:
            call(*args, **kwargs)
            made.set()

        self.post(making)
        if not made.wait(MAKE_S):
            raise InvariantViolation(
                f"the handoff thread of {self._name!r} did not make a call within {MAKE_S:g} s"
            )

    def require(self) -> None:
        """Checks that it runs: otherwise nothing that is under way would ever end.

        Raises `InvariantViolation`: it has ended by an error of ours.
        """
        if not self._thread.is_alive() and not self._stops:
            raise InvariantViolation(f"the handoff thread of {self._name!r} has ended")

    def close(self) -> None:
        """Ends the thread and what it runs; a second call changes nothing."""
        if self._stops:
            return
        self._stops = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        try:
            while not self._stops:
                self._make_calls()
                self._handoffs.step()
                if not self._handoffs.has_work and self._calls.empty():
                    self._wait()
        finally:
            self._handoffs.close()

    def _make_calls(self) -> None:
        # Those that are there now: a caller without end does not keep `step` waiting.
        for _ in range(self._calls.qsize()):
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            call()

    def _wait(self) -> None:
        due = self._handoffs.next_deadline()
        latest = time.monotonic() + LOOK_S
        descriptors = [*self._handoffs.descriptors, self._wake]
        deadline = latest if due is None else min(due, latest)
        ready = wait_any(self._handoffs.waitables, descriptors, deadline=deadline)
        if self._wake in ready.descriptors:
            os.eventfd_read(self._wake)
