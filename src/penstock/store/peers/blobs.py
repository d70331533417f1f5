"""The host memory of other engines as a store that can only be read: a `BlobStore` of peers.

| call             | what it is here                                                            |
|------------------|----------------------------------------------------------------------------|
| `exists`         | what peers have listed; nobody is asked                                    |
| `near`           | what lies in arenas of this process, or of peers on this machine            |
| `read`           | from an engine of this process, or a peer; who lacks a block loses its line |
| `forget`         | what failed its sums is not asked for again where it came from             |
| `get`, `replace` | the record of the generation, made of what peers know of resets            |
| `create`         | the geometry of engines here, which is told to peers                       |
| `write`          | nothing is written                                                          |

The one rule: a peer that is slow, gone or wrong makes misses, and no error of the store: the tier
stays on for the others.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.store.base import NearBlocks, Space
from penstock.store.clients.blobs import (
    BlobOutcome,
    BlobStore,
    NotKeptError,
    check_names,
    check_reads,
    check_record,
)
from penstock.store.peers.lending import Lender
from penstock.store.peers.messages import ANSWER_BYTES, FOUND, KEYS_MAX, SPANS_MAX, ReadBlocks
from penstock.store.peers.network import PeerNetwork
from penstock.store.shared.generations import Lineage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.config.shared_stores import PeerSettings
    from penstock.store.clients.blobs import BlobRead, BlobWrite
    from penstock.store.peers.books import Conversation, Listing
    from penstock.store.peers.lending import Span
    from penstock.store.peers.network import PeerAnswer
    from penstock.vocabulary.keys import Key

TRIES = 2
"""Peers that a block is read from, one after the other: the second may have it still."""

ASKED_MAX = 1 << 14
"""Blocks of which is known who was asked for them: those of the reads under way are fewer."""


class _Name(NamedTuple):
    """The name of a value, taken apart."""

    space: Space
    piece: bytes
    key: Key


class _Wanted(NamedTuple):
    """Reads of one piece, with the same spans: one request."""

    positions: list[int]
    names: list[_Name]
    spans: list[Span]


class PeerBlobs(BlobStore):
    """The client; the tier over it runs the network."""

    def __init__(self, settings: PeerSettings) -> None:
        super().__init__(settings.threads)
        self.network = PeerNetwork(settings)
        self._turn = 0
        self._asked: OrderedDict[_Name, Lender | Conversation] = OrderedDict()
        """Who was asked last for what was read last; the lock of the network guards it."""

    def exists(self, names: Sequence[str], *, timeout_s: float) -> list[bool]:
        check_names(names, timeout_s=timeout_s)
        parsed = [_parse(name) for name in names]
        with self.network.lock:
            return [each is not None and bool(self._holders(each)) for each in parsed]

    def _holders(self, name: _Name) -> list[Lender | Conversation]:
        """Who may be asked for a value; the lock is held."""
        found = self.network.books.find(*name)
        return [
            each for each in found if isinstance(each, Lender) or not self.network.is_slow(each)
        ]

    def read(self, reads: Sequence[BlobRead], *, timeout_s: float) -> list[BlobOutcome]:
        deadline = time.monotonic() + check_reads(reads, timeout_s=timeout_s)
        names = [_parse(each.name) for each in reads]
        outcomes = [BlobOutcome.MISSING] * len(reads)
        left = [at for at, name in enumerate(names) if name is not None]
        for _ in range(TRIES):
            left = self._try(reads, names, left, outcomes, deadline)
            if not left:
                break
        return outcomes

    def _try(
        self,
        reads: Sequence[BlobRead],
        names: Sequence[_Name | None],
        left: Sequence[int],
        outcomes: list[BlobOutcome],
        deadline: float,
    ) -> list[int]:
        """Reads from one holder each; returns what may be tried again."""
        answers: SimpleQueue[PeerAnswer] = SimpleQueue()
        asked: dict[int, tuple[Conversation, _Wanted]] = {}
        missing: set[int] = set()
        for holder, chosen in self._by_holder(names, left):
            for wanted in _requests(reads, names, chosen):
                if isinstance(holder, Lender):
                    missing.update(self._copy_here(reads, wanted))
                    continue
                space, piece, _ = wanted.names[0]
                keys = b"".join(each.key for each in wanted.names)
                request = ReadBlocks(0, space.name, space.generation, piece, keys, wanted.spans)
                asked[self.network.ask(holder, request, answers)] = (holder, wanted)
            for position in chosen:
                outcomes[position] = BlobOutcome.READ
        while asked:
            try:
                found = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            holder, wanted = asked.pop(found.number)
            missing.update(self._place(reads, holder, wanted, found))
            found.done()
        for number, (holder, wanted) in asked.items():
            self.network.note_slow(holder, number)
            missing.update(wanted.positions)
        with suppress(Empty):
            while True:  # What came at the last moment; nothing comes any more.
                answers.get_nowait().done()
        for position in missing:
            outcomes[position] = BlobOutcome.MISSING
        return sorted(missing) if time.monotonic() < deadline else []

    def near(self, space: Space, piece: bytes, keys: Sequence[Key]) -> list[NearBlocks]:
        network = self.network
        with network.lock:
            found = network.books.find_near(space, piece, keys)

        def is_lent(source: Lender | Listing) -> bool:
            with network.lock:
                return network.books.is_lent(space, source)

        return [
            NearBlocks(arena, source.salt, positions, slots, partial(is_lent, source))
            for arena, source, positions, slots in found
        ]

    def _by_holder(
        self, names: Sequence[_Name | None], positions: Sequence[int]
    ) -> list[tuple[Lender | Conversation, list[int]]]:
        """Who is asked for what: peers in turn, each for neighbours of a chain."""
        chosen: dict[Lender | Conversation, list[int]] = {}
        with self.network.lock:
            self._turn += 1
            for position in positions:
                name = names[position]
                holders = [] if name is None else self._holders(name)
                if name is None or not holders:
                    continue
                here = holders[0]
                at = here if isinstance(here, Lender) else holders[self._turn % len(holders)]
                chosen.setdefault(at, []).append(position)
                self._asked[name] = at
            while len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)
        return list(chosen.items())

    def _copy_here(self, reads: Sequence[BlobRead], wanted: _Wanted) -> list[int]:
        """Copies what an engine of this process has; what was not there."""
        size = sum(length for _, length in wanted.spans)
        rows = np.empty((len(wanted.names), size), dtype=np.uint8)
        space, piece, _ = wanted.names[0]
        keys = [each.key for each in wanted.names]
        found = self.network.read_here(space, piece, keys, wanted.spans, rows)
        for position, row, is_there in zip(wanted.positions, rows, found, strict=True):
            if is_there:
                _scatter(reads[position], wanted.spans, row.data)
        return [at for at, is_there in zip(wanted.positions, found, strict=True) if not is_there]

    def _place(
        self, reads: Sequence[BlobRead], holder: Conversation, wanted: _Wanted, answer: PeerAnswer
    ) -> list[int]:
        """Puts what a peer has sent where it belongs; what it did not send."""
        size = sum(length for _, length in wanted.spans)
        count = len(wanted.positions)
        space, piece, _ = wanted.names[0]
        there = [at for at, each in enumerate(answer.found) if each == FOUND]
        if len(answer.found) != count or len(answer.content) != len(there) * size:
            there = []
        lacking = sorted(set(range(count)) - set(there))
        with self.network.lock:
            holder.forget(space, piece, [wanted.names[at].key for at in lacking])
            if self.network.books.generations.current(space.name) != space.generation:
                return wanted.positions  # A reset came meanwhile.
        for row, at in enumerate(there):
            content = answer.content[row * size : (row + 1) * size]
            _scatter(reads[wanted.positions[at]], wanted.spans, content)
        return [wanted.positions[at] for at in lacking]

    def write(self, writes: Sequence[BlobWrite], *, timeout_s: float) -> list[str]:
        check_names([write.name for write in writes], timeout_s=timeout_s)
        return ["nothing is written into the memory of peers"] * len(writes)

    def forget(self, names: Sequence[str], *, timeout_s: float) -> None:
        check_names(names, timeout_s=timeout_s)
        with self.network.lock:
            books = self.network.books
            for name in names:
                parsed = _parse(name)
                if parsed is not None:
                    self._forget(parsed)
                elif (record := _shape_number(name)) is not None:
                    space, number = record
                    known = books.shapes_of(space)
                    if number < len(known):
                        books.drop_shape(space, known[number])
        self.network.tell()

    def _forget(self, name: _Name) -> None:
        """Of who has sent it; the lock is held."""
        holder = self._asked.pop(name, None)
        if isinstance(holder, Lender):
            self.network.books.give_up(holder, name.key)
        elif holder is not None:
            holder.forget(name.space, name.piece, [name.key])

    def get(self, name: str, *, timeout_s: float) -> bytes | None:
        check_names([name], timeout_s=timeout_s)
        with self.network.lock:
            books = self.network.books
            if (shape := _shape_number(name)) is not None:
                space, number = shape
                known = books.shapes_of(space)
                return known[number] if number < len(known) else None
            found = _space_of(name)
            return books.generations.lineage(found).to_record(found)

    def create(self, name: str, record: bytes, *, timeout_s: float) -> bool:
        check_record(name, record, timeout_s=timeout_s)
        shape = _shape_number(name)
        if shape is None:
            return False  # A generation counts always.
        with self.network.lock:
            self.network.books.add_shape(shape[0], bytes(record))
        self.network.tell()
        return True

    def replace(self, name: str, record: bytes, *, timeout_s: float) -> None:
        deadline = time.monotonic() + check_record(name, record, timeout_s=timeout_s)
        space = _space_of(name)
        lineage = Lineage.from_record(space, record)
        assert lineage is not None, "written by the keeper"
        network = self.network
        with network.lock:
            network.books.generations.replace(space, lineage)
            network.books.tell_resets(space)
            network.tell()
            network.resets_told.wait_for(
                lambda: not network.unaware(space), max(0.0, deadline - time.monotonic())
            )
            unaware = network.unaware(space)
        if unaware:
            raise NotKeptError(f"peers may not know it: {'; '.join(unaware[:3])}")

    def adopt(self, space: bytes, generation: int) -> None:
        """An engine knows of a generation, of before this process."""
        with self.network.lock:
            if self.network.books.generations.adopt(space, generation):
                self.network.books.tell_resets(space)
        self.network.tell()

    def close(self) -> None:
        self.network.close()


def _scatter(read: BlobRead, spans: Sequence[Span], content: memoryview) -> None:
    """Puts the spans of a value into the ranges of a read."""
    at = 0
    for start, length in spans:
        for offset, target in read.ranges:
            first, end = max(start, offset), min(start + length, offset + target.nbytes)
            if first < end:
                target[first - offset : end - offset] = content[
                    at + first - start : at + end - start
                ]
        at += length


def _requests(
    reads: Sequence[BlobRead], names: Sequence[_Name | None], positions: Iterable[int]
) -> list[_Wanted]:
    """Reads as requests of bounded size: neighbours of one piece and with equal ranges together."""

    def alike(position: int) -> tuple[Space, bytes, tuple[Span, ...]]:
        name = names[position]
        assert name is not None
        spans = tuple((offset, target.nbytes) for offset, target in reads[position].ranges)
        return name.space, name.piece, spans

    found: list[_Wanted] = []
    for (_, _, spans), group in groupby(positions, alike):
        members = list(group)
        for some in _parts_of(spans):
            size = sum(length for _, length in some)
            at_once = max(1, min(KEYS_MAX, ANSWER_BYTES // max(1, size)))
            for first in range(0, len(members), at_once):
                chosen = members[first : first + at_once]
                parsed = [name for at in chosen if (name := names[at]) is not None]
                found.append(_Wanted(chosen, parsed, some))
    return found


def _parts_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans of one value, in parts that one answer has room for."""
    parts: list[list[Span]] = [[]]
    room = ANSWER_BYTES
    for start, length in spans:
        at, end = start, start + length
        while at < end:
            taken = min(end - at, room)
            if not taken or len(parts[-1]) >= SPANS_MAX:
                parts.append([])
                room = ANSWER_BYTES
                continue
            parts[-1].append((at, taken))
            at, room = at + taken, room - taken
    return parts


def _parse(name: str) -> _Name | None:
    """The name of a value; `None`: it is of something else."""
    parts = name.split("/")
    if len(parts) != 5 or parts[3] == "geometry":
        return None
    _, space, generation, piece, key = parts
    try:
        whose = Space(bytes.fromhex(space), int(generation, 16))
        return _Name(whose, bytes.fromhex(piece), bytes.fromhex(key))
    except ValueError:
        return None


def _shape_number(name: str) -> tuple[bytes, int] | None:
    """The space and number of a record of a geometry."""
    parts = name.split("/")
    if len(parts) != 5 or parts[3] != "geometry":
        return None
    return bytes.fromhex(parts[1]), int(parts[4])


def _space_of(name: str) -> bytes:
    """The space of a record of generations."""
    return bytes.fromhex(name.split("/")[1])
