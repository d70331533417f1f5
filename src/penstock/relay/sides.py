"""The two sides of remote writes by NIXL: areas that are written to, and links that write.

An area is memory of this process that the relay maps and registers with an agent of its own. It is
ready, and has a description, some time after it was opened; nobody waits for that.

The one rule (the fence): an area's memory is given again only when its agent was destroyed, or the
relay is seen dead. Over TCP nobody else puts bytes there; over RDMA the agent's regions go with it.

    writer = NixlWriter()
    link = writer.connect(description)        a `WriterLink`
    writer.close()

A link has a mirror of its area in shared memory. Parts are packed into the mirror (`window`), and a
posted write has the relay write the same ranges to the same offsets of the area. The one rule:
ranges of a write that has not ended are left as they are.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import UnavailableError
from penstock.relay.messages import (
    FAILED,
    NOTICE,
    ORDER_ROOM_BYTES,
    READY,
    SPANS_MAX,
    WRITE_ENDED,
    NixlDescription,
    OpenSession,
    WriteOrder,
    decode_description,
    encode_description,
    session_readies,
    write_reports,
)
from penstock.relay.process import hold_relay
from penstock.tiers.arena import Arena
from penstock.transport.remote import (
    NOTICE_BYTES_MAX,
    POSTED_MAX,
    AreaBooks,
    ArenaPool,
    Delivery,
    Fenced,
    Notice,
    NotYet,
    PostedFullError,
    PostedWrites,
    WriteDone,
    WriteFailed,
    require_notice_fits,
    require_within,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.relay.process import RelayProcess, RelaySession
    from penstock.transport.remote import Area, HandoffAddresses, PinMemory, Span, WriteEnd


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


class NixlTarget(AreaBooks[NixlArea]):
    """The side that is written to; see `Target`.

    Args:
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
    ) -> None:
        super().__init__()
        self.relay = hold_relay(addresses)
        self._arenas = ArenaPool(huge_pages=False, pin=pin)
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
        return self._add(NixlArea(peer, size, arena, session))

    def notices(self) -> list[Notice]:
        """Takes the notices that arrived; never waits."""
        self.relay.poll()
        found: list[Notice] = []
        for area in self.open_areas:
            found += [Notice(area, payload) for payload in area.take()]
            if area.session.lost:
                self._unwatch(area)
        if self.retired_areas:
            sessions = [area.session for area in self.retired_areas if not area.session.is_closed]
            self.relay.kill_overdue(sessions, time.monotonic())
        return found

    @property
    def descriptor(self) -> int:
        """Readable while there are notices to take, and when an area has become ready."""
        return self._epoll.fileno()

    def retire(self, area: Area) -> None:
        known = self._mark_retired(area)
        if known is not None:
            known.session.begin_close()

    def fence(self, area: Area) -> Fenced | NotYet:
        """Whether the agent of the area was destroyed."""
        known = self._require_retired(area)
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
        known = self._forget(area, self.fence(area))
        known.session.forget()
        self._arenas.give_back(known.arena)

    def close(self) -> None:
        """Ends the relay, and gives everything back."""
        self._epoll.close()
        self.relay.release()
        areas = (*self.open_areas, *self.retired_areas)
        for area in areas:
            area.session.forget()
        self._arenas.close(area.arena for area in areas)

    def _unwatch(self, area: NixlArea) -> None:
        """A socket that has ended is readable for ever."""
        if area.watched:
            area.watched = False
            self._epoll.unregister(area.session.descriptor)


STALLED_S = 30.0
"""A link of which no write has ended for so long has failed: the cable may be cut."""


class NixlWriter:
    """Connects to areas that targets described; has the relay that all its links use.

    Args:
        pin: makes the mirrors fit for a device; see `PinMemory`.
        addresses: whose interface is used; left out, targets are on this machine.

    Raises:
        ConfigError: NIXL is not installed.
        UnavailableError: its relay does not start.
    """

    def __init__(
        self,
        *,
        pin: PinMemory | None = None,
        addresses: HandoffAddresses | None = None,
    ) -> None:
        self.relay = hold_relay(addresses)
        self._pin = pin
        self._links: list[NixlLink] = []

    def connect(self, description: bytes) -> NixlLink:
        """A link to the area that a target described.

        Raises `ValueError`: it is not a description of such an area; `UnavailableError`: there is
        no relay at the moment.
        """
        found = decode_description(description)
        self._links = [link for link in self._links if not link.closed]
        link = NixlLink(self.relay, found, pin=self._pin)
        self._links.append(link)
        return link

    def close(self) -> None:
        """Closes all links, and ends the relay."""
        for link in self._links:
            link.close()
        self.relay.release()


class NixlLink:
    """The way of this process to one area; see `WriterLink`."""

    def __init__(
        self, relay: RelayProcess, description: NixlDescription, *, pin: PinMemory | None
    ) -> None:
        self._peer = description.peer
        self._size = description.size
        self._relay = relay
        self._arena = Arena.create(description.size, name="mirror", huge_pages=False)
        opened = OpenSession("source", self._arena.size, description.metadata, description.address)
        self._session = relay.open_session(opened, self._arena.fd)
        self._unpin: Callable[[], None] | None = None if pin is None else pin(self._arena.bytes)
        self._posted = PostedWrites(
            self._peer, self._size, notice_bytes_max=NOTICE_BYTES_MAX + ORDER_ROOM_BYTES
        )
        self._next_number = 0
        self._under_way: set[int] = set()
        """Writes that the relay has."""
        self._ended: list[WriteEnd] = []
        """Writes whose end was not observed yet."""
        self._ended_at = time.monotonic()
        self.closed = False
        self.failure: str | None = None
        """Why nothing can be written any more, if so."""

    def post(
        self, spans: Sequence[Span], notice: bytes, *, packed: Sequence[tuple[int, int]] = ()
    ) -> int:
        if self.closed:
            raise UnavailableError(f"link to {self._peer!r} was closed")
        require_notice_fits(notice)
        for offset, length in packed:
            require_within(offset, length, self._size)
        if len(spans) + len(packed) > SPANS_MAX:
            raise ValueError(f"spans are {len(spans) + len(packed)}, must be at most {SPANS_MAX}")
        if self._waiting >= POSTED_MAX:
            raise PostedFullError(link=self._peer, posted=self._waiting)
        if not self._waiting:
            self._ended_at = time.monotonic()
        ranges = [*((span.offset, len(span.source)) for span in spans), *packed]
        order = WriteOrder(self._next_number, [each for each in ranges if each[1]], bytes(notice))
        number = self._posted.post(spans, msgspec.msgpack.encode(order))
        self._next_number = number + 1
        return number

    def window(self, offset: int, length: int) -> NDArray[np.uint8]:
        """These bytes of the mirror."""
        if not self.closed and self.failure is None:
            self._look()
        if self.closed or self.failure is not None:
            why = self.failure or "it was closed"
            raise UnavailableError(f"no way to the area of {self._peer!r}: {why}")
        require_within(offset, length, self._size)
        return self._arena.bytes[offset : offset + length]

    def observe(self, *, budget_bytes: int) -> tuple[list[WriteEnd], int]:
        """Copies some bytes into the mirror; returns which writes have ended."""
        if self.closed:
            return [], 0
        if self.failure is None:
            self._look()
        ends, self._ended = self._ended, []
        spent = 0
        if self.failure is None:
            given, spent = self._posted.advance(
                self._arena.bytes[: self._size], budget_bytes, self._deliver
            )
            self._under_way |= {end.number for end in given if isinstance(end, WriteDone)}
            ends += [end for end in given if isinstance(end, WriteFailed)]
        if self.failure is not None:
            failed = [WriteFailed(number, self.failure) for number in sorted(self._under_way)]
            self._under_way.clear()
            ends += [*failed, *self._posted.fail(self.failure)]
        return ends, spent

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def descriptor(self) -> int | None:
        """Readable when a write has ended, or the relay is gone; nothing once closed."""
        return None if self.closed or self._session.lost else self._session.descriptor

    def close(self) -> None:
        """Gives the way back. A write under way may still land: the target's fence is for that."""
        if self.closed:
            return
        self.closed = True
        self._posted.fail("closed")
        self._under_way.clear()
        self._relay.close_later(self._session)
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._arena.close()

    @property
    def _waiting(self) -> int:
        return len(self._posted) + len(self._under_way) + len(self._ended)

    def _look(self) -> None:
        """Takes what the relay says."""
        self._relay.poll()
        now = time.monotonic()
        for frame in self._session.frames():
            kind, rest = frame[:1], frame[1:]
            if kind == WRITE_ENDED:
                report = write_reports.decode(rest)
                self._under_way.discard(report.number)
                self._ended.append(WriteDone(report.number))
                self._ended_at = now
            elif kind == FAILED:
                self.failure = f"{self._peer}: {rest.decode(errors='replace')}"
        if self._session.lost and self.failure is None:
            self.failure = "the relay has ended"
        elif self._under_way and now >= self._ended_at + STALLED_S and self.failure is None:
            self.failure = f"{self._peer} has taken nothing in {STALLED_S:g} s"

    def _deliver(self, order: bytes) -> Delivery:
        try:
            return Delivery.GIVEN if self._session.send(order) else Delivery.FULL
        except OSError:
            return Delivery.GONE
