"""A rank's offer of its host arena to the store process, made again when the process is lost.

    offer = ArenaOffer(socket, host, form=form, part=part)
    offer.poll()                            # whenever `descriptor` is readable, and at `alarm`

It has a session of its own beside the engine's (`StoreLink`): ranks in other processes each offer
theirs. The store maps the arena while that session lasts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.store.messages import ArenaMapped, ArenaOffered, arena_name, requests
from penstock.store.store_session import (
    CannotConnect,
    Connected,
    Disconnected,
    NobodyListens,
    StoreSession,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.tiers.host import HostTier
    from penstock.vocabulary.form import Form


class ArenaOffer:
    """Offers the hub of a rank to the store process, for as long as it is open.

    It belongs to one thread, and nothing here waits: call `poll` whenever `descriptor` is
    readable, and at `alarm`.
    """

    def __init__(
        self,
        socket: str,
        host: HostTier,
        *,
        form: Form,
        part: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = arena_name(host.arena.fd)
        """What the owner calls it."""
        self.mapped = False
        """Whether the store process has mapped it, as far as `poll` has seen."""
        self._fd = host.arena.fd
        offered = ArenaOffered(self.name, host.slot_count, form.to_bytes(), part)
        self._frame = requests.encode([offered])
        self._session = StoreSession(Path(socket))
        self._clock = clock
        self._closed = False

    @property
    def why(self) -> str:
        """Why it is not mapped; empty if it is, or will be in a moment."""
        return self._session.why

    @property
    def descriptor(self) -> int:
        return self._session.descriptor

    @property
    def alarm(self) -> float | None:
        return self._session.alarm

    def poll(self) -> None:
        """Connects where that is due, and takes what the store process says."""
        for news in self._session.poll(self._clock()):
            match news:
                case Connected():
                    self._session.send(self._frame, self._fd)
                case Disconnected():
                    self.mapped = False
                case NobodyListens() | CannotConnect():
                    pass
                case _:
                    if any(isinstance(each, ArenaMapped) for each in news):
                        self.mapped = True
                        self._session.keep_trying_soon()

    def close(self) -> None:
        """Withdraws the arena; the process unmaps it once no job uses it."""
        if not self._closed:
            self._closed = True
            self._session.close()
