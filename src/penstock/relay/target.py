"""The side of NIXL that is written to: landing areas of this process, in the hands of its relay.

An area is memory of this process that the relay maps and registers with an agent of its own. It is
ready, and has a description, some time after it was opened; nobody waits for that.

The one rule (the fence): an area's memory is given again only when its agent was destroyed, or the
relay is seen dead. Over TCP nobody else puts bytes there; over RDMA the agent's regions go with it.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.relay.messages import (
    FAILED,
    NOTICE,
    READY,
    NixlDescription,
    OpenSession,
    encode_description,
    session_readies,
)
from penstock.relay.process import hold_relay
from penstock.transport.posted import Areas, ArenaPool
from penstock.transport.remote import Fenced, Notice, NotYet

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.relay.process import RelayProcess, RelaySession
    from penstock.tiers.arena import Arena
    from penstock.transport.remote import Area, HandoffAddresses, PinMemory


class NixlArea:
    """Memory for one writer."""

    def __init__(self, peer: str, size: int, arena: Arena, session: RelaySession) -> None:
        self.peer = peer
        self.arena = arena
        self.memory: NDArray[np.uint8] = arena.bytes[:size]
        self.session = session
        self.description = b""
        self.failure = ""
        self.watched = True
        """Whether its target waits for what the relay says of it."""

    @property
    def ready(self) -> bool:
        """Whether its memory is registered, so that a writer can connect."""
        return bool(self.description)

    def take(self) -> list[bytes]:
        """Notices that have come; also takes what the relay says about the area itself."""
        found = []
        for frame in self.session.frames():
            kind, rest = frame[:1], frame[1:]
            if kind == NOTICE:
                found.append(rest)
            elif kind == READY:
                ready = session_readies.decode(rest)
                self.description = encode_description(
                    NixlDescription(
                        peer=self.peer[:200],
                        metadata=ready.metadata,
                        address=ready.address,
                        size=len(self.memory),
                    )
                )
            elif kind == FAILED:
                self.failure = rest.decode(errors="replace")
        if self.session.lost and not self.failure:
            self.failure = "the relay has ended"
        return found


class NixlTarget:
    """The side that is written to; see `Target`.

    Args:
        relay: to use instead of the one that this process shares; it is released in the end.
        pin: makes the memory fit for a device; see `PinMemory`.
        addresses: whose interface is used; left out, writers are on this machine.

    Raises:
        ConfigError: NIXL is not installed.
        UnavailableError: its relay does not start.
    """

    def __init__(
        self,
        *,
        pin: PinMemory | None = None,
        addresses: HandoffAddresses | None = None,
        relay: RelayProcess | None = None,
    ) -> None:
        self.relay = hold_relay(addresses, given=relay)
        self._arenas = ArenaPool(huge_pages=False, pin=pin)
        self._areas: Areas[NixlArea] = Areas()
        self._epoll = select.epoll()
        self._epoll.register(self.relay.descriptor, select.EPOLLIN)

    def open_area(self, peer: str, size: int) -> NixlArea:
        """Memory for one writer; that of an area that was freed, if there is any.

        Raises `UnavailableError`: there is no relay at the moment.
        """
        arena = self._arenas.take(size)
        try:
            session = self.relay.open_session(OpenSession("target", arena.size), arena.fd)
        except UnavailableError:
            self._arenas.give_back(arena)
            raise
        self._epoll.register(session.descriptor, select.EPOLLIN)
        return self._areas.add(NixlArea(peer, size, arena, session))

    def notices(self) -> list[Notice]:
        """Takes the notices that arrived; never waits."""
        self.relay.poll()
        found: list[Notice] = []
        for area in self._areas.open:
            found += [Notice(area, payload) for payload in area.take()]
            if area.session.lost:
                self._unwatch(area)
        if self._areas.retired:
            sessions = [area.session for area in self._areas.retired if not area.session.is_closed]
            self.relay.kill_overdue(sessions, time.monotonic())
        return found

    @property
    def descriptor(self) -> int:
        """Readable while there are notices to take, and when an area has become ready."""
        return self._epoll.fileno()

    def retire(self, area: Area) -> None:
        known = self._areas.retire(area)
        if known is not None:
            known.session.begin_close()

    def fence(self, area: Area) -> Fenced | NotYet:
        """Whether the agent of the area was destroyed."""
        known = self._areas.require_retired(area)
        if known.session.is_closed:
            self._unwatch(known)
            return Fenced()
        return NotYet(f"the agent of the area of {area.peer!r} is not destroyed yet")

    @property
    def watches_fences(self) -> bool:
        """No: they hold within milliseconds, or the relay has to be killed by who asks."""
        return False

    def fence_descriptor(self, _area: Area) -> None:
        """Nothing; see `watches_fences`."""

    def free(self, area: Area) -> None:
        known = self._areas.free(area, self.fence(area))
        known.session.forget()
        self._arenas.give_back(known.arena)

    @property
    def open_bytes(self) -> int:
        return self._areas.open_bytes

    @property
    def retired_bytes(self) -> int:
        """Bytes of areas that wait for a fence, or to be freed."""
        return self._areas.retired_bytes

    def close(self) -> None:
        """Ends the relay, and gives everything back."""
        self._epoll.close()
        self.relay.release()
        areas = (*self._areas.open, *self._areas.retired)
        for area in areas:
            area.session.forget()
        self._arenas.close(area.arena for area in areas)

    def _unwatch(self, area: NixlArea) -> None:
        """A socket that has ended is readable for ever."""
        if area.watched:
            area.watched = False
            self._epoll.unregister(area.session.descriptor)
