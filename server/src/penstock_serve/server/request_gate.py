"""Whether requests may begin: open while the server runs, held while it is paused.

    await gate.enter()      # raises `RequestRefusal`, or waits, as configured
    gate.begin()            # no `await` between the two
    gate.end()

Several causes may hold the gate at once, such as an operator's pause and a change of weights; it
opens when the last one is released.

The one rule: `enter` is called once for a request. A request that is retried after the loss of its
instance has begun before, so it may finish while others are held.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass

from penstock_serve.server.instance_link import RequestRefusal


class ServerState(enum.Enum):
    """What a server does; the last one that holds is shown."""

    RUNNING = "running"
    PAUSED = "paused"
    LOADING = "loading weights"
    ASLEEP = "asleep"


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseSettings:
    """What happens to requests that come while the server is paused."""

    waits: bool = False
    """They wait; otherwise they are refused with status 503."""
    wait_s: float = 600.0
    """After this time they are refused all the same."""


class RequestGate:
    """Counts the requests under way, and holds back new ones."""

    def __init__(self, settings: PauseSettings | None = None) -> None:
        self._settings = settings or PauseSettings()
        self._held: set[ServerState] = set()
        self._opened = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborts = False
        self.running = 0
        """Requests that are at an instance."""

    @property
    def state(self) -> ServerState:
        states = [state for state in ServerState if state in self._held]
        return states[-1] if states else ServerState.RUNNING

    @property
    def refuses(self) -> bool:
        """Whether a request that comes now is refused."""
        return bool(self._held) and not self._settings.waits

    def holds(self, state: ServerState) -> bool:
        return state in self._held

    def hold(self, state: ServerState) -> None:
        """Lets no further request begin; may be called twice."""
        self._held.add(state)
        self._opened.clear()

    def release(self, state: ServerState) -> None:
        """Takes one cause away; requests begin again after the last one."""
        self._held.discard(state)
        if not self._held:
            self._aborts = False
            self._opened.set()

    def abort(self) -> None:
        """No request is sent to another instance any more, until the gate opens."""
        self._aborts = bool(self._held)

    async def enter(self) -> None:
        """Returns when a request may begin.

        Raises `RequestRefusal`: the server is paused, and requests do not wait, or waited too long.
        """
        if self.refuses:
            raise self.refusal()
        try:
            async with asyncio.timeout(self._settings.wait_s):
                while self._held:
                    await self._opened.wait()
        except TimeoutError as error:
            raise self.refusal(waited=True) from error

    def begin(self) -> None:
        """A request is sent to an instance.

        Raises `RequestRefusal`: the requests under way are being aborted.
        """
        if self._aborts:
            raise self.refusal()
        self.running += 1
        self._idle.clear()

    def end(self) -> None:
        """A request ended at its instance; it may `begin` at another one."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is under way; returns whether that is so."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.running:
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def refusal(self, *, waited: bool = False) -> RequestRefusal:
        """The answer to a request that may not begin."""
        more = f" and was not resumed within {self._settings.wait_s:g} s" if waited else ""
        return RequestRefusal("paused", f"the server is {self.state.value}{more}; try again later")
