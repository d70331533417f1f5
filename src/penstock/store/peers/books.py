"""What a store process knows of its peers and they of it: a state without sockets or clock.

    conversation     one channel to a peer: we read from it (dialled), or it reads from us
    listing          what one engine of a peer lends, as far as the peer has said

`take` takes a message in; `next_message` is the next that a conversation is to send. Changes are
kept as keys, each once: what is true of a key is looked up when it is sent, so a peer that takes
little costs a bounded amount of memory.

The one rule: a listing may be stale, and is believed until a read says otherwise. Whoever was wrong
costs a miss, and never a wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import PeerError
from penstock.store.base import Space
from penstock.store.peers.generations import PeerGenerations
from penstock.store.peers.lending import Lendings
from penstock.store.peers.messages import (
    KEYS_MAX,
    SLOT,
    AnyPeerMessage,
    BlocksRead,
    LendingEnded,
    Lends,
    LentForms,
    PeerHello,
    ReadBlocks,
    Resets,
)
from penstock.store.shared.generations import GEOMETRIES_MAX, LINEAGES_MAX
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.base import LentBlocks, MappedArena
    from penstock.store.peers.lending import Lender
    from penstock.vocabulary.keys import Key

LENDERS_MAX = 64
"""Engines of one peer process."""
LISTED_MAX = 4 << 20
"""Keys that one peer may list: of 8 TiB of blocks of 2 MiB."""
CHANGES_MAX = 1 << 14
"""Keys of which a peer was not told, beside those that an engine has: with more it is told all
anew."""
SHAPES_BYTES_MAX = 4 << 20
"""Of the geometries that one peer may tell: those of a thousand engines are fewer."""
REQUESTS_MAX = 1024
"""Reads of one peer that wait for their turn."""


@dataclass(slots=True, eq=False)
class Listing:
    """What an engine of a peer lends."""

    space: Space
    pieces: frozenset[bytes]
    salt: int
    """Of the sums in its arenas."""
    keys: dict[Key, int] = field(default_factory=dict)
    """And the slot of each."""
    arenas: dict[bytes, MappedArena] = field(default_factory=dict)
    """By piece, if they are mapped here."""


@dataclass(slots=True, eq=False)
class Conversation:
    """What was said and is to be said on one channel."""

    reads: bool
    """Whether we read from the peer; if not, it reads from us."""
    process: int | None = None
    """The number of the peer, once it has said it."""
    hello_sent: bool = False
    resets_due: dict[bytes, bool] = field(default_factory=dict)
    """Spaces of which it is to be told, and whether it is asked."""
    known: dict[bytes, tuple[set[int], set[int]]] = field(default_factory=dict)
    """What the peer has said that it knows of resets."""
    # Where we read.
    listings: dict[int, Listing] = field(default_factory=dict)
    listed: int = 0
    shapes: dict[bytes, list[bytes]] = field(default_factory=dict)
    """By the name of a space."""
    # Where the peer reads.
    shapes_due: deque[LentForms] = field(default_factory=deque)
    ended_due: list[int] = field(default_factory=list)
    changed: dict[int, dict[Key, None]] = field(default_factory=dict)
    """Keys of which it is to be told, by their lender."""
    requests: deque[ReadBlocks] = field(default_factory=deque)

    def finds(self, space: Space, piece: bytes, key: Key) -> bool:
        return any(
            key in each.keys and each.space == space and piece in each.pieces
            for each in self.listings.values()
        )

    def forget(self, space: Space, piece: bytes, keys: Sequence[Key]) -> None:
        """The peer did not have these, or not what they should be."""
        for each in self.listings.values():
            if each.space == space and piece in each.pieces:
                self.listed -= sum(each.keys.pop(key, None) is not None for key in keys)

    def end_listing(self, number: int) -> None:
        ended = self.listings.pop(number, None)
        self.listed -= 0 if ended is None else len(ended.keys)


class NearKeys(NamedTuple):
    """Blocks in an arena that is mapped here."""

    arena: MappedArena
    source: Lender | Listing
    """Who lends them."""
    positions: list[int]
    slots: list[int]


class Known(NamedTuple):
    """What has changed by a message."""

    resets: tuple[bytes, ...] = ()
    """Spaces in which another generation counts."""
    answer: BlocksRead | None = None
    """To one of our reads."""


class PeerBooks:
    """The state of one process; whoever has it guards it."""

    def __init__(self, process: int, arena_address: str = "") -> None:
        self.process, self.arena_address = process, arena_address
        self.generations = PeerGenerations()
        self.lendings = Lendings()
        self.shapes: dict[bytes, list[bytes]] = {}
        """How the engines of this process cut their blocks, by the name of their space."""
        self.conversations: list[Conversation] = []

    # What the process itself says.

    def begin(self, *, reads: bool) -> Conversation:
        """A channel to a peer is open."""
        begun = Conversation(reads)
        begun.resets_due = dict.fromkeys(self.generations, True)
        if not reads:
            shapes = ((space, each) for space, known in self.shapes.items() for each in known)
            begun.shapes_due.extend(LentForms(space, record) for space, record in shapes)
            for lender in self.lendings.lenders:
                begun.changed[lender.number] = dict.fromkeys(lender.slots)
        self.conversations.append(begun)
        return begun

    def end(self, conversation: Conversation) -> None:
        self.conversations.remove(conversation)

    def lend(self, blocks: LentBlocks, gone: Sequence[Key]) -> None:
        lender, ended = self.lendings.lend(blocks, gone)
        if ended is not None:
            self._tell_ended([ended])
        for each in self._readers():
            changed = each.changed.setdefault(lender.number, {})
            changed.update(dict.fromkeys(blocks.keys))
            changed.update(dict.fromkeys(gone))
            if len(changed) > len(lender.slots) + CHANGES_MAX:
                each.changed[lender.number] = dict.fromkeys(lender.slots)
                if lender.number not in each.ended_due:
                    each.ended_due.append(lender.number)

    def give_up(self, lender: Lender, key: Key) -> None:
        """A block of this process is not what it should be."""
        if lender.slots.pop(key, None) is not None:
            for each in self._readers():
                each.changed.setdefault(lender.number, {})[key] = None

    def end_lending(self, life: int) -> None:
        ended = self.lendings.end(life)
        if ended is not None:
            self._tell_ended([ended])

    def withdraw(self, arena: MappedArena) -> None:
        self._tell_ended(self.lendings.withdraw(arena))

    def _tell_ended(self, numbers: Sequence[int]) -> None:
        for each in self._readers():
            for number in numbers:
                each.changed.pop(number, None)
                each.ended_due.append(number)

    def _readers(self) -> list[Conversation]:
        return [each for each in self.conversations if not each.reads]

    def add_shape(self, space: bytes, record: bytes) -> None:
        known = self.shapes.setdefault(space, [])
        if record not in known and len(known) < GEOMETRIES_MAX:
            known.append(record)
            for each in self._readers():
                each.shapes_due.append(LentForms(space, record))

    def shapes_of(self, space: bytes) -> list[bytes]:
        """How engines cut the blocks of a space, here and at the peers."""
        found = dict.fromkeys(self.shapes.get(space, ()))
        for each in self.conversations:
            found.update(dict.fromkeys(each.shapes.get(space, ())))
        return list(found)[:GEOMETRIES_MAX]

    def drop_shape(self, space: bytes, record: bytes) -> None:
        """One that cannot be read."""
        for known in (self.shapes, *(each.shapes for each in self.conversations)):
            if record in known.get(space, ()):
                known[space].remove(record)

    def tell_resets(self, space: bytes, besides: Conversation | None = None) -> None:
        """Another generation counts, or may: all are told, and asked what they know."""
        for each in self.conversations:
            if each is not besides:
                each.resets_due[space] = True

    def has_all(self, conversation: Conversation, space: bytes) -> bool:
        """Whether a peer has said that it knows every reset that is known here."""
        counting, ended = map(set, self.generations.said(space))
        theirs, their_ended = conversation.known.get(space, (set(), set()))
        return counting <= theirs | their_ended and ended <= their_ended

    # What is found, here and there.

    def find(self, space: Space, piece: bytes, key: Key) -> list[Lender | Conversation]:
        """Who has a block, as far as is known: those of this process first."""
        if self.generations.current(space.name) != space.generation:
            return []
        here = self.lendings.find(space, piece, key)
        there = [
            each for each in self.conversations if each.reads and each.finds(space, piece, key)
        ]
        return [*([] if here is None else [here]), *there]

    def find_near(self, space: Space, piece: bytes, keys: Sequence[Key]) -> list[NearKeys]:
        """Which blocks lie in arenas that are mapped here: each once."""
        if self.generations.current(space.name) != space.generation:
            return []
        sources: list[tuple[MappedArena, Lender | Listing, dict[Key, int]]] = [
            (each.places[piece][1], each, each.slots)
            for each in self.lendings.lenders
            if each.space == space and piece in each.places
        ]
        listings = (each for talk in self.conversations for each in talk.listings.values())
        sources += [
            (each.arenas[piece], each, each.keys)
            for each in listings
            if each.space == space and piece in each.arenas
        ]
        found: list[NearKeys] = []
        left = list(range(len(keys)))
        for arena, source, slots in sources:
            count = arena.host.slot_count
            there = {at: slot for at in left if 0 <= (slot := slots.get(keys[at], -1)) < count}
            if there:
                found.append(NearKeys(arena, source, list(there), list(there.values())))
                left = [at for at in left if at not in there]
        return found

    def is_lent(self, space: Space, source: Lender | Listing) -> bool:
        """Whether what was found near may still be used."""
        if self.generations.current(space.name) != space.generation:
            return False
        if isinstance(source, Listing):
            return any(source in talk.listings.values() for talk in self.conversations)
        return source in self.lendings.lenders

    # Messages.

    def take(self, said: Conversation, message: AnyPeerMessage) -> Known:
        """Takes in what a peer says.

        Raises `PeerError`: it makes no sense here; the conversation is to be ended.
        """
        match message:
            case PeerHello(process, _) if said.process is None:
                said.process = process
            case _ if said.process is None:
                raise PeerError(f"{type(message).__name__} came before PeerHello")
            case Resets():
                return self._take_resets(said, message)
            case ReadBlocks() if not said.reads and len(said.requests) < REQUESTS_MAX:
                said.requests.append(message)
            case BlocksRead() if said.reads:
                return Known(answer=message)
            case Lends() if said.reads:
                self._take_lends(said, message)
            case LendingEnded(lender) if said.reads:
                said.end_listing(lender)
            case LentForms(space, record) if said.reads:
                self._take_shape(said, space, record)
            case _:
                raise PeerError(f"{type(message).__name__} came where none belongs")
        return Known()

    def _take_resets(self, said: Conversation, message: Resets) -> Known:
        space = message.space
        before = said.known.pop(space, None)
        now = said.known[space] = (set(message.counting), set(message.ended))
        if len(said.known) > LINEAGES_MAX:
            del said.known[next(iter(said.known))]
        changed = self.generations.merge(space, message.counting, message.ended)
        if changed:
            self.tell_resets(space, besides=said)
        # Both forget what is very old: who says the same again is not asked again.
        lacks = now != before and not self.has_all(said, space)
        if message.asks or lacks:
            said.resets_due[space] = lacks
        return Known(resets=(space,)) if changed else Known()

    def _take_shape(self, said: Conversation, space: bytes, record: bytes) -> None:
        known = said.shapes.setdefault(space, [])
        if record not in known and len(known) < GEOMETRIES_MAX:
            known.append(record)
        size = sum(len(each) for known in said.shapes.values() for each in known)
        if size > SHAPES_BYTES_MAX:
            known.remove(record)
            raise PeerError(
                f"it tells {size} bytes of geometries, must tell at most {SHAPES_BYTES_MAX}"
            )

    def _take_lends(self, said: Conversation, message: Lends) -> None:
        space = Space(message.space, message.generation)
        listing = said.listings.get(message.lender)
        if listing is None:
            if len(said.listings) >= LENDERS_MAX:
                raise PeerError(f"it has more than {LENDERS_MAX} engines")
            listing = Listing(space, frozenset(message.pieces), message.salt)
            said.listings[message.lender] = listing
        said.listed -= len(listing.keys)
        for key in _split(message.gone):
            listing.keys.pop(key, None)
        keys, slots = _split(message.keys), np.frombuffer(message.slots, dtype=SLOT).tolist()
        if len(keys) != len(slots):
            raise PeerError(f"it lists {len(keys)} blocks in {len(slots)} slots")
        room = max(0, LISTED_MAX - said.listed - len(listing.keys))
        listing.keys.update(list(zip(keys, slots, strict=True))[:room])  # The rest is missed.
        said.listed += len(listing.keys)

    def next_message(self, to: Conversation) -> AnyPeerMessage | None:
        """What it is to be told next, but for answers to its reads."""
        if not to.hello_sent:
            to.hello_sent = True
            return PeerHello(self.process, self.arena_address)
        if to.resets_due:
            space = next(iter(to.resets_due))
            asks = to.resets_due.pop(space)
            return Resets(space, *self.generations.said(space), asks)
        if to.shapes_due:
            return to.shapes_due.popleft()
        if to.ended_due:
            return LendingEnded(to.ended_due.pop(0))
        while to.changed:
            number = next(iter(to.changed))
            lender, changed = self.lendings.of_number(number), to.changed[number]
            if lender is None or not changed:
                del to.changed[number]
            else:
                return _change_of(lender, changed)
        return None


def _change_of(lender: Lender, changed: dict[Key, None]) -> Lends:
    chosen = list(islice(changed, KEYS_MAX))
    for key in chosen:
        del changed[key]
    here = [key for key in chosen if key in lender.slots]
    gone = [key for key in chosen if key not in lender.slots]
    name, generation = lender.space
    slots = np.array([lender.slots[key] for key in here], dtype=SLOT).tobytes()
    where = (lender.number, name, generation, lender.pieces)
    return Lends(*where, b"".join(here), slots, lender.salt, b"".join(gone))


def _split(keys: bytes) -> list[Key]:
    if len(keys) % KEY_BYTES:
        raise PeerError(f"keys have {len(keys)} bytes, must have {KEY_BYTES} each")
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
