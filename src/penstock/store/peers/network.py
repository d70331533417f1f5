"""What a store process says to its peers and hears of them, over ZeroMQ, in a thread of its own.

    network = PeerNetwork(settings)
    network.run()                             # in that thread, until `stop`
    network.lock, network.books               # what is known, for whoever holds the lock
    network.ask([(conversation, request)], answers)
    network.tell()                            # the books have changed: look what is to be said

Channels are those of `penstock.transport`: CURVE keys, heartbeats, a window in each direction. A
peer that ends, is cut off or stands still is forgotten with all that it listed, and dialled again.

The one rule: whoever waits here has a deadline, and a lost channel answers all its reads at once.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.config.shared_stores import port_range
from penstock.errors import ConfigError, PeerError, UnavailableError
from penstock.store.base import Space
from penstock.store.clients.blobs import call_in_thread
from penstock.store.peers.books import PeerBooks
from penstock.store.peers.discovery import ENTRY_S, Discovery, address_of
from penstock.store.peers.landing import LandingSite
from penstock.store.peers.lending import ValuesToCopy, answer, fits
from penstock.store.peers.messages import (
    ANSWER_BYTES,
    AreaOffered,
    BlocksRead,
    LendingEnded,
    Lends,
    NoLanding,
    PeerHello,
    ReadBlocks,
    frames,
    read_frame,
)
from penstock.store.peers.near import ArenaListener, NearPeer
from penstock.store.shared.values import piece_of
from penstock.transport.base import (
    FRAME_BYTES_MAX,
    BacklogError,
    ChannelFailed,
    Empty,
    ReceivedFrame,
)
from penstock.transport.machine_keys import MachineKeys
from penstock.transport.waiting import wait_any
from penstock.transport.zeromq import Listener, dial
from penstock.transport.zmq_link import ChannelSettings
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from queue import SimpleQueue

    from penstock.config.shared_stores import PeerSettings
    from penstock.store.peers.books import Conversation
    from penstock.store.peers.discovery import LookedUp
    from penstock.store.peers.landing import LandedAnswer, Landing, LenderLink
    from penstock.store.peers.lending import Lender, Span
    from penstock.store.peers.messages import AnyPeerMessage
    from penstock.transport.base import Waitable
    from penstock.transport.zmq_channel import ZmqChannel
    from penstock.vocabulary.keys import Key

logger = logging.getLogger(__name__)

HEARTBEAT_S, SILENCE_S = 0.5, 2.0
"""A peer that stands still is forgotten after both; a read of it has its own, shorter time."""
RETRY_S, RETRY_MAX_S = 0.5, 10.0
"""Before a peer is dialled again; doubled each time."""
OWN_RETRY_S = 60.0
"""The same for an address that is our own, or a second one of a peer: pods change addresses."""
RESOLVE_S = ENTRY_S / 3
"""How often names, and what engines tell a Redis, are looked up."""
SLOW_S, SLOW_MAX_S = 1.0, 60.0
"""How long a peer is not asked that has not answered in time; doubled each time."""
GREETING_S = 10.0
"""How long who has dialled us may take to say who it is."""
FRAMES_MAX = 64
"""Frames that are read of one peer before the others have their turn."""
BLOCKED_S = 0.02
"""What a peer has taken may be seen by a look that wakes nobody; so a full window is tried anew."""
REASON_MAX = 200
"""Characters of a reason that a peer is told."""
KEPT_BYTES = 256 << 20
"""Of freed memory that this process keeps. Frames of some MiB come and go by the hundred a second:
from fresh pages each, which the kernel has to clear, they cost twice to five times as much."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # Of `mallopt`, as glibc numbers them.


class PeerAnswer(NamedTuple):
    """What came of one read."""

    number: int
    found: bytes
    """One byte a key; empty: the peer was lost."""
    content: memoryview
    done: Callable[[], None]
    """To be called once the content was copied: its memory is used again."""


@dataclass(slots=True, eq=False)
class _Talk:
    """A channel and what belongs to it."""

    channel: ZmqChannel
    conversation: Conversation
    opened_at: float
    address: str = ""
    """That was dialled; empty: the peer has dialled us."""
    to_ask: deque[ReadBlocks] = field(default_factory=deque)
    to_say: deque[AnyPeerMessage] = field(default_factory=deque)
    """What belongs to this channel alone, before what is to be asked."""
    asked: dict[int, SimpleQueue[PeerAnswer]] = field(default_factory=dict)
    near: NearPeer | None = None
    """The way to its arenas, if it is on this machine."""
    landing: Landing | None = None
    """Where it writes what we read from it, if it does so by NIXL."""
    link: LenderLink | None = None
    """The way to where it has what it reads written."""
    unsent: bytes = b""
    """A frame for which there was no room."""
    slow_until: float = -math.inf
    slow_s: float = SLOW_S


@dataclass(slots=True, eq=False)
class _Target:
    """An address that is dialled."""

    keys: MachineKeys | None
    host: str
    """By which it was given, or the Redis that has it."""
    talk: _Talk | None = None
    retry_at: float = -math.inf
    retry_s: float = RETRY_S
    met_at: float = math.inf
    """When it has last said who it is, on this channel."""
    needless: bool = False
    """Whether it is ours, or a second one of a peer."""


class PeerNetwork:
    """The channels of one store process."""

    def __init__(self, settings: PeerSettings) -> None:
        """Listens.

        Raises `ConfigError`: there is something wrong with the keys; `UnavailableError`: the
        address cannot be listened on.
        """
        _keep_freed_memory()
        self._keys = _keys_of(settings)
        self._discovery = Discovery(settings, self._keys)
        self.lock = threading.Lock()
        self.resets_told = threading.Condition(self.lock)
        """Of who waits for peers to know a reset."""
        process = secrets.randbits(63)
        self._arena_listener = _listen_for_readers(process)
        self.books = PeerBooks(
            process, "" if self._arena_listener is None else self._arena_listener.path
        )
        self.on_reset: Callable[[bytes], None] = lambda _: None
        """Called without the lock when another generation of a space counts, and"""
        self.on_listing: Callable[[], None] = lambda: None
        """when peers list other blocks than before."""
        self._channels = ChannelSettings(
            heartbeat_s=HEARTBEAT_S,
            silence_s=SILENCE_S,
            ports=port_range(settings.ports, key="ports"),
        )
        self._name = f"{self.books.process:016x}"
        address, secret = address_of(settings.listen), self._keys or b""
        self._listener = Listener(self._name, address, secret=secret, settings=self._channels)
        self._talks: dict[Conversation, _Talk] = {}
        self._targets: dict[str, _Target] = {}
        self._resolving: Future[LookedUp] | None = None
        self._resolve_at = -math.inf
        self._unknown = dict.fromkeys(self._discovery.places, "")
        """Whom to dial is not known: why a name server or Redis has not answered; empty: it was not
        asked yet."""
        self._number = 0
        self._by_nixl = settings.transport == "nixl"
        self._site: LandingSite | None = None
        """What carries blocks, beside the channels; the thread opens it."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._stopping = self._closed = False

    # What other threads call.

    def tell(self) -> None:
        """There may be something to say."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def ask(
        self, conversation: Conversation, request: ReadBlocks, answers: SimpleQueue[PeerAnswer]
    ) -> int:
        """Asks a peer; its answer comes to `answers`. Returns the number of the answer."""
        with self.lock:
            self._number += 1
            number = self._number
            talk = self._talks.get(conversation)
            if talk is None or self._stopping:
                answers.put(_lost(number))
            else:
                talk.asked[number] = answers
                talk.to_ask.append(replace(request, number=number))
        self.tell()
        return number

    def note_slow(self, conversation: Conversation, number: int) -> None:
        """A peer has not answered in time: it is not asked for a while."""
        with self.lock:
            talk = self._talks.get(conversation)
            if talk is not None and talk.asked.pop(number, None) is not None:
                now = time.monotonic()
                if now >= talk.slow_until:
                    talk.slow_until = now + talk.slow_s
                    talk.slow_s = min(2 * talk.slow_s, SLOW_MAX_S)
                    logger.warning("peer is slow: at=%s", talk.address)

    def is_slow(self, conversation: Conversation) -> bool:
        """Whether it is not to be asked now; the lock is held."""
        talk = self._talks.get(conversation)
        return talk is None or time.monotonic() < talk.slow_until

    def unaware(self, space: bytes) -> list[str]:
        """Who may not know a reset of a space that is known here; the lock is held."""
        away = [f"the address of {host} is not known" for host in self._unknown]
        away += [
            f"{address} is away"
            for address, target in self._targets.items()
            if not target.needless
            and (target.talk is None or target.talk.conversation.process is None)
        ]
        unaware = [
            f"{talk.address or 'a peer'} has not answered"
            for talk in self._talks.values()
            if not self.books.has_all(talk.conversation, space)
        ]
        return away + unaware

    def stop(self) -> None:
        """Ends `run`, and with it all channels."""
        with self.lock:
            self._stopping = True
        self.tell()

    def close(self) -> None:
        """Gives the descriptor back; `run` has ended, and others may still tell."""
        self._discovery.close()
        with self._wake_lock:
            self._closed = True
            os.close(self._wake)

    # The thread.

    def run(self) -> None:
        """Speaks with the peers until `stop`: what a thread is for."""
        try:
            self._site = self._open_site()
            while not self._stopping:
                now = time.monotonic()
                self._resolve(now)
                self._dial(now)
                while (channel := self._listener.accept()) is not None:
                    self._open(channel, "")
                self._take_landed()
                for talk in self._all():
                    self._exchange(talk)
                self._show_arenas()
                self._wait()
        finally:
            self._end_all()

    def _all(self) -> list[_Talk]:
        with self.lock:
            return list(self._talks.values())

    def _wait(self) -> None:
        talks = self._all()
        at = [self._resolve_at]
        at += [each.retry_at for each in self._targets.values() if each.talk is None]
        blocked = any(each.unsent for each in talks)
        if blocked:
            at.append(time.monotonic() + BLOCKED_S)
        if any(each.conversation.requests for each in talks) and not blocked:
            return  # One is answered in each turn.
        channels: list[Waitable] = [self._listener, *(each.channel for each in talks)]
        descriptors = [self._wake, *(each.near.descriptor for each in talks if each.near)]
        descriptors += self._arena_listener.descriptors if self._arena_listener else []
        if self._site is not None:
            descriptors += self._site.descriptors
            descriptors += [fd for each in talks if each.link for fd in each.link.descriptors]
            if self._site.waits:
                at.append(time.monotonic() + HEARTBEAT_S)
        wait_any(channels, descriptors, deadline=min(at))
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _resolve(self, now: float) -> None:
        """Looks up whom to dial, in a thread of its own: it may take its time."""
        if self._resolving is None and now >= self._resolve_at:
            self._resolving = call_in_thread(self._discovery.look_up, "peer names")
            self._resolving.add_done_callback(lambda _: self.tell())
            self._resolve_at = math.inf
        if self._resolving is None or not self._resolving.done():
            return
        found, failed = self._resolving.result()
        self._resolving, self._resolve_at = None, now + RESOLVE_S
        for host, why in failed.items():
            if not self._unknown.get(host):
                logger.warning("peers cannot be looked up: name=%s cause=%s", host, why)
        with self.lock:
            self._unknown = failed
            for address, target in list(self._targets.items()):
                if address not in found and target.talk is None and target.host not in failed:
                    del self._targets[address]
            for address, (host, keys) in found.items():
                target = self._targets.setdefault(address, _Target(keys, host))
                target.keys = keys  # Another machine may have the address by now.
            self.resets_told.notify_all()

    def _dial(self, now: float) -> None:
        for address, target in self._targets.items():
            if target.talk is None and now >= target.retry_at:
                try:
                    channel = dial(
                        address,
                        name=self._name,
                        secret=target.keys or b"",
                        settings=self._channels,
                    )
                except UnavailableError as error:
                    self._put_off(target, str(error))
                else:
                    target.talk = self._open(channel, address)

    def _put_off(self, target: _Target, why: str) -> None:
        now = time.monotonic()
        # One that goes as soon as it has come is not dialled at once again and again.
        if now >= target.met_at + RETRY_MAX_S:
            target.retry_s = RETRY_S
        if target.met_at < math.inf or target.retry_s == RETRY_S:
            logger.warning("peer is away: cause=%s", why)
        target.met_at = math.inf
        target.retry_at = now + target.retry_s
        target.retry_s = min(2 * target.retry_s, RETRY_MAX_S)

    def _open(self, channel: ZmqChannel, address: str) -> _Talk:
        with self.lock:
            begun = self.books.begin(reads=bool(address))
            talk = _Talk(channel, begun, time.monotonic(), address)
            self._talks[talk.conversation] = talk
        return talk

    def _exchange(self, talk: _Talk) -> None:
        """Takes what a peer says, and says what is due."""
        try:
            self._take_arenas(talk)
            self._receive(talk)
            self._look_at_nixl(talk)
            if talk.conversation.process is None and not talk.address:
                self._require_greeting(talk)
            if talk.channel.is_open:
                self._send(talk)
        except _NeedlessError:
            self._close(talk, "")
        except (PeerError, UnavailableError) as error:
            self._close(talk, str(error))

    def _require_greeting(self, talk: _Talk) -> None:
        # Until it is known who is there, no reset is kept. (Names are looked up more often.)
        if time.monotonic() >= talk.opened_at + GREETING_S:
            raise PeerError(f"it has not said who it is within {GREETING_S:g} s")

    def _receive(self, talk: _Talk) -> None:
        for _ in range(FRAMES_MAX):
            received = talk.channel.receive()
            match received:
                case ReceivedFrame(frame):
                    self._take(talk, frames.decode(frame))
                case Empty():
                    return
                case ChannelFailed(cause):
                    raise PeerError(cause)
                case _:
                    raise PeerError("it has ended")

    def _take(self, talk: _Talk, message: AnyPeerMessage) -> None:
        said = talk.conversation
        if isinstance(message, AreaOffered | NoLanding) and said.process is not None:
            self._take_of_nixl(talk, message)
            return
        with self.lock:
            new = said.process is None
            if isinstance(message, Lends) and message.lender not in said.listings:
                self._ask_arenas(talk, message.lender)
            known = self.books.take(said, message)
            if new and talk.address and isinstance(message, PeerHello):
                self._meet(talk, message.arena_address)
            if known.answer is not None:
                if talk.landing is not None:
                    talk.landing.give_up(known.answer.number)
                self._give(talk, known.answer, _nothing)
            self.resets_told.notify_all()
        for space in known.resets:
            self.on_reset(space)
        if isinstance(message, Lends | LendingEnded):
            self.on_listing()

    def _give(self, talk: _Talk, found: BlocksRead, done: Callable[[], None]) -> None:
        """Gives an answer to who has asked; the lock is held."""
        asker = talk.asked.pop(found.number, None)
        if asker is None:  # It was too late.
            done()
        else:
            talk.slow_s = SLOW_S
            asker.put(PeerAnswer(found.number, found.found, found.content, done))

    # Blocks that come by NIXL.

    def _open_site(self) -> LandingSite | None:
        if not self._by_nixl:
            return None
        try:
            return LandingSite(self._listener.address)
        except (ConfigError, UnavailableError) as error:
            logger.warning("blocks come over ZeroMQ, not NIXL: cause=%s", error)
            return None

    def _take_landed(self) -> None:
        """Takes what peers have written into the areas here."""
        landings = {id(each.landing.area): each for each in self._all() if each.landing}
        for area, notice in self._site.notices() if self._site else ():
            talk = landings.get(id(area))
            landed = talk.landing.take(notice) if talk is not None and talk.landing else None
            if talk is not None and landed is not None:
                with self.lock:
                    self._give(talk, landed.answer, partial(self._free, landed))

    def _free(self, landed: LandedAnswer) -> None:
        """Whoever has asked has copied an answer: there is room for another one."""
        landed.free()
        self.tell()

    def _look_at_nixl(self, talk: _Talk) -> None:
        """Tells a peer of its area once that is ready; notices what was lost."""
        landing = talk.landing
        if landing is not None and landing.area.failure:
            self._end_landing(talk, landing.area.failure)
        elif landing is not None and landing.area.ready and not landing.is_told:
            landing.is_told = True
            talk.to_say.append(AreaOffered(landing.area.description))
        if talk.link is not None:
            failed = talk.link.observe()
            if failed or talk.link.failure:
                self._end_link(talk, talk.link.failure, failed)

    def _take_of_nixl(self, talk: _Talk, message: AreaOffered | NoLanding) -> None:
        reads = talk.conversation.reads
        match message:
            case AreaOffered(description) if not reads and talk.link is None:
                if self._site is None:
                    talk.to_say.append(NoLanding("it has no NIXL"))
                    return
                try:
                    talk.link = self._site.connect(description)
                except UnavailableError as error:
                    talk.to_say.append(NoLanding(str(error)[:REASON_MAX]))
            case NoLanding(why) if reads:
                self._end_landing(talk, why)
            case _:
                raise PeerError(f"{type(message).__name__} came where none belongs")

    def _end_landing(self, talk: _Talk, why: str) -> None:
        """A peer writes nothing here any more; its blocks come over its channel from now on."""
        if talk.landing is not None and self._site is not None:
            self._site.retire(talk.landing)
            talk.landing = None
            logger.warning(
                "blocks of a peer come over ZeroMQ, not NIXL: at=%s cause=%s", talk.address, why
            )

    def _end_link(self, talk: _Talk, why: str, failed: Sequence[int] = ()) -> None:
        """Nothing can be written for a peer; what it awaits has failed."""
        link, talk.link = talk.link, None
        if link is not None:
            # First: what was begun may still land, so no berth there is used again.
            talk.to_say.append(NoLanding(why[:REASON_MAX]))
            for number in (*failed, *link.observe()):
                talk.to_say.append(BlocksRead(number, b"", memoryview(b"")))
            link.close()

    # Arenas of peers on this machine.

    def _show_arenas(self) -> None:
        for channel, number in self._arena_listener.asked() if self._arena_listener else ():
            with self.lock:
                lender = self.books.lendings.of_number(number)
                if lender is not None and self._arena_listener is not None:
                    self._arena_listener.show(channel, lender)

    def _ask_arenas(self, talk: _Talk, lender: int) -> None:
        if talk.near is not None:
            try:
                talk.near.ask(lender)
            except OSError as error:
                self._lose_arenas(talk, str(error))

    def _take_arenas(self, talk: _Talk) -> None:
        try:
            while talk.near is not None and (found := talk.near.take()) is not None:
                number, arena = found
                with self.lock:
                    listing = talk.conversation.listings.get(number)
                    name = piece_of(arena).name
                    if listing is not None and name in listing.pieces:
                        listing.arenas[name] = arena
        except PeerError as error:
            self._lose_arenas(talk, str(error))

    def _lose_arenas(self, talk: _Talk, why: str) -> None:
        """What is mapped stays so while it is listed; the rest comes over the channel."""
        if talk.near is not None:
            talk.near.close()
            talk.near = None
            logger.info("memory of a peer is not mapped: at=%s cause=%s", talk.address, why)

    def _meet(self, talk: _Talk, arena_address: str) -> None:
        """A peer has said who it is: itself, or one that we read from already, is not wanted."""
        process, target = talk.conversation.process, self._targets[talk.address]
        same = [
            each
            for each in self._talks.values()
            if each.address and each is not talk and each.conversation.process == process
        ]
        if process == self.books.process or same:
            target.needless = True
            raise _NeedlessError
        target.needless, target.met_at = False, time.monotonic()
        with suppress(UnavailableError):  # It is on another machine, or of another user.
            if arena_address and process is not None:
                talk.near = NearPeer(arena_address, process)
        if talk.near is None and self._site is not None:
            talk.landing = self._site.open(talk.address)
        far = "" if talk.near is None else " on this machine"
        logger.info("peer is here: at=%s%s", talk.address, far)

    def _send(self, talk: _Talk) -> None:
        for frame in self._frames_for(talk):
            try:
                talk.channel.send(frame)
            except BacklogError:
                talk.unsent = frame
                return

    def _frames_for(self, talk: _Talk) -> Iterator[bytes]:
        if talk.unsent:
            frame, talk.unsent = talk.unsent, b""
            yield frame
        while True:
            with self.lock:
                message = self.books.next_message(talk.conversation)
                if message is None and talk.to_say:
                    message = talk.to_say.popleft()
                if message is None:
                    message = _next_read(talk)
            if message is None:
                break
            yield frames.encode(message)
        with self.lock:
            requests = talk.conversation.requests
            request = requests.popleft() if requests else None
        if request is not None and not self._write(talk, request):
            yield self._read(request)

    def _write(self, talk: _Talk, request: ReadBlocks) -> bool:
        """Has NIXL write what a peer reads; whether it does."""
        if talk.link is None or request.berth < 0:
            return False
        keys, size = _keys_and_size(request)
        wanted = (Space(request.space, request.generation), request.piece, keys, request.spans)

        def fill(rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> list[bool]:
            found = self.read_here(*wanted, rows)
            for at, row in enumerate(each for each, is_there in enumerate(found) if is_there):
                if at < row:
                    rows[at] = rows[row]
            return found

        try:
            talk.link.write(request, (len(keys), size), fill)
        except UnavailableError as error:
            self._end_link(talk, str(error))
            return False
        return True

    def _read(self, request: ReadBlocks) -> bytes:
        """The answer to a peer that reads, as a frame."""
        keys, size = _keys_and_size(request)
        whole = len(keys)
        wanted = (Space(request.space, request.generation), request.piece, keys, request.spans)
        for lender, values in self._look_up(*wanted):
            if len(values.there) == whole:
                found = [True] * whole
                frame = read_frame(request.number, answer(found), values.all_of(request.spans))
                if self._is_there(lender, values) == found:
                    return frame
        content = np.empty((whole, size), dtype=np.uint8)
        found = self.read_here(*wanted, content)
        # Rows of others were never written: what they hold is ours alone.
        return read_frame(request.number, answer(found), [content[found].reshape(-1)])

    def _is_there(self, lender: Lender, values: ValuesToCopy) -> list[bool]:
        """Which values lie where they did; empty if their engine lends nothing any more."""
        with self.lock:
            return values.still_there() if lender in self.books.lendings.lenders else []

    def read_here(
        self,
        space: Space,
        piece: bytes,
        keys: Sequence[Key],
        spans: Sequence[Span],
        target: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
    ) -> list[bool]:
        """Copies what engines of this process lend, a row for each key; which keys were there."""
        found = [False] * len(keys)
        for lender, values in self._look_up(space, piece, keys, spans):
            for place, at in enumerate(values.there):
                values.copy(place, spans, target[at])
            there = self._is_there(lender, values)
            found = [a or b for a, b in zip(found, there or found, strict=True)]
        return found

    def _look_up(
        self, space: Space, piece: bytes, keys: Sequence[Key], spans: Sequence[Span]
    ) -> list[tuple[Lender, ValuesToCopy]]:
        with self.lock:
            if self.books.generations.current(space.name) != space.generation:
                return []
            lenders = [
                each
                for each in self.books.lendings.lenders
                if each.space == space and piece in each.places and each.has_any(keys)
            ]
            made = [(each, ValuesToCopy(each, piece, keys)) for each in lenders]
        return [each for each in made if fits(each[1].piece, spans)]

    def _close(self, talk: _Talk, why: str) -> None:
        """Ends a channel; what was asked on it is answered, and its peer is dialled again."""
        talk.channel.close()
        if talk.near is not None:
            talk.near.close()
        if talk.link is not None:
            talk.link.close()
        if talk.landing is not None and self._site is not None:
            self._site.retire(talk.landing)
        with self.lock:
            self._talks.pop(talk.conversation, None)
            self.books.end(talk.conversation)
            for number, asker in talk.asked.items():
                asker.put(_lost(number))
            self.resets_told.notify_all()
        self.on_listing()
        target = self._targets.get(talk.address)
        if target is not None and not self._stopping:
            target.talk = None
            if target.needless:
                target.retry_at = time.monotonic() + OWN_RETRY_S
            else:
                self._put_off(target, f"{talk.address}: {why}")

    def _end_all(self) -> None:
        for talk in self._all():
            self._close(talk, "this process ends")
        self._listener.close()
        if self._site is not None:
            self._site.close()
        if self._arena_listener is not None:
            self._arena_listener.close()


class _NeedlessError(Exception):
    """A channel that is not wanted."""


def _listen_for_readers(process: int) -> ArenaListener | None:
    try:
        return ArenaListener(process)
    except UnavailableError as error:
        logger.warning("peers of this machine get blocks over channels alone: cause=%s", error)
        return None


def _keep_freed_memory() -> None:
    with suppress(AttributeError):  # Another C library has no such call, and is only slower.
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2 * FRAME_BYTES_MAX)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_TOP_PAD, 4 * FRAME_BYTES_MAX)


def _lost(number: int) -> PeerAnswer:
    return PeerAnswer(number, b"", memoryview(b""), _nothing)


def _nothing() -> None:
    """What is to be done for content with memory of its own."""


def _next_read(talk: _Talk) -> ReadBlocks | None:
    """What a peer is to be asked next, and where it puts the answer; the lock is held."""
    while talk.to_ask and talk.to_ask[0].number not in talk.asked:
        talk.to_ask.popleft()  # Nobody waits for it any more.
    landing = talk.landing if talk.landing is not None and talk.landing.is_told else None
    if not talk.to_ask or (landing is not None and not landing.has_room()):
        return None
    request = talk.to_ask.popleft()
    if landing is None:
        return request
    size = sum(length for _, length in request.spans)
    return replace(request, berth=landing.take_berth(request.number, size))


def _keys_and_size(request: ReadBlocks) -> tuple[list[Key], int]:
    """What a peer reads, and how many bytes of each.

    Raises `PeerError`: it is not what a peer may ask for.
    """
    whole, rest = divmod(len(request.keys), KEY_BYTES)
    size = sum(length for _, length in request.spans)
    if rest or not whole or not 0 < whole * size <= ANSWER_BYTES:
        raise PeerError(f"it reads {len(request.keys)} bytes of keys, {size} bytes of each")
    keys = [request.keys[at : at + KEY_BYTES] for at in range(0, len(request.keys), KEY_BYTES)]
    return keys, size


def _keys_of(settings: PeerSettings) -> MachineKeys | None:
    if not settings.keys_file:
        return None
    try:
        return MachineKeys.read(Path(settings.keys_file))
    except (OSError, ValueError) as error:
        raise ConfigError("keys_file", f"is {settings.keys_file!r}: {error}") from error
