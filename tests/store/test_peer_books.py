"""What peers know of resets and of each other's blocks, whoever is cut off or restarted meanwhile.

A block is marked with the resets that its engine knew when it lent it. Nobody who knows of a reset
may find a block whose engine did not.
"""

from __future__ import annotations

from collections import deque
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import PeerError
from penstock.store.base import LentBlocks, Space
from penstock.store.peers import books, lending
from penstock.store.peers.books import CHANGES_MAX, SHAPES_BYTES_MAX, PeerBooks
from penstock.store.peers.generations import FIRST, PeerGenerations
from penstock.store.peers.messages import LentForms, PeerHello, Resets
from penstock.store.shared.generations import ANCESTORS_MAX, LINEAGES_MAX, Lineage
from penstock.store.shared.values import RECORD_BYTES_MAX

if TYPE_CHECKING:
    from penstock.store.peers.books import Conversation
    from penstock.store.peers.messages import AnyPeerMessage

SPACE = b"a space of tests"
PIECE = b"a piece of tests"
ARENA: Any = SimpleNamespace()


@pytest.fixture(autouse=True)
def arenas_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Books never look into an arena: its piece has a name, and that is all."""
    monkeypatch.setattr(lending, "piece_of", lambda _: SimpleNamespace(name=PIECE))


class Site:
    """A store process and its engine, which remembers the last generation for it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.life = number
        self.knows: frozenset[int] = frozenset()
        self.told = FIRST
        self.books = PeerBooks(number)
        self.blocks: list[bytes] = []

    def restart(self, *, engine: bool) -> None:
        """Its process begins anew; with its engine, all is forgotten."""
        self.books = PeerBooks(self.number)
        if engine:
            self.life += 100
            self.knows, self.told, self.blocks = frozenset(), FIRST, []
        else:
            self.books.generations.adopt(SPACE, self.told)
            self.lend(self.blocks)

    def lend(self, keys: list[bytes]) -> None:
        space = Space(SPACE, self.told)
        slots = list(range(len(keys)))
        self.books.lend(LentBlocks(self.life, [ARENA], space, keys, slots, 0), [])

    def follow(self) -> None:
        """Its engine hears which generation counts: what it has is of before."""
        now = self.books.generations.current(SPACE)
        if now != self.told:
            self.told, self.blocks = now, []


class Fleet:
    """Sites that dial each other, and what is on its way between them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.sites = [Site(number) for number in range(4)]
        self.lines: dict[tuple[int, int], tuple[Conversation, Conversation]] = {}
        self.wires: dict[tuple[int, int, bool], deque[tuple[AnyPeerMessage, frozenset[int]]]] = {}
        self.marks: dict[bytes, frozenset[int]] = {}

    def dial(self, reader: int, lender: int) -> None:
        if reader != lender and (reader, lender) not in self.lines:
            ends = (
                self.sites[reader].books.begin(reads=True),
                self.sites[lender].books.begin(reads=False),
            )
            self.lines[reader, lender] = ends
            for forth in (True, False):
                self.wires[reader, lender, forth] = deque()

    def cut(self, reader: int, lender: int) -> None:
        ends = self.lines.pop((reader, lender), None)
        if ends is not None:
            for site, end in zip((reader, lender), ends, strict=True):
                if end in self.sites[site].books.conversations:
                    self.sites[site].books.end(end)

    def carry(self, reader: int, lender: int, *, forth: bool) -> bool:
        """One side says something, and what it said longest ago arrives; whether there was any."""
        if (reader, lender) not in self.lines:
            return False
        ends = self.lines[reader, lender]
        here, there = (reader, lender) if forth else (lender, reader)
        says, hears = ends if forth else ends[::-1]
        wire = self.wires[reader, lender, forth]
        message = self.sites[here].books.next_message(says)
        if message is not None:
            wire.append((message, self.sites[here].knows))
        if not wire:
            return False
        arrived, knew = wire.popleft()
        self.sites[there].books.take(hears, arrived)
        if isinstance(arrived, Resets):
            self.sites[there].knows |= knew
        return True

    def settle(self) -> None:
        """All reach each other, and say all that they have to say."""
        pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
        for pair in pairs:
            self.dial(*pair)
        ways = [(*pair, forth) for pair in pairs for forth in (True, False)]
        while sum(self.carry(reader, lender, forth=forth) for reader, lender, forth in ways):
            pass

    def reset(self, site: Site, number: int) -> None:
        generations = site.books.generations
        lineage = generations.lineage(SPACE)
        after = Lineage(number, (lineage.current, *lineage.ancestors)[:ANCESTORS_MAX])
        generations.replace(SPACE, after)
        site.books.tell_resets(SPACE)
        site.knows |= {number}
        site.follow()

    def check(self) -> None:
        for site in self.sites:
            now = site.books.generations.current(SPACE)
            # Its engine asks by the generation that it was told last.
            for key, known in self.marks.items():
                if any(
                    site.books.find(Space(SPACE, each), PIECE, key) for each in {now, site.told}
                ):
                    assert known >= site.knows, (site.number, known, site.knows)

    def step(self, number: int) -> None:
        one, other = self.random.sample(range(4), 2)
        site = self.sites[one]
        match self.random.choices(
            ["carry", "dial", "lend", "cut", "reset", "restart"], [60, 20, 10, 3, 2, 2]
        )[0]:
            case "carry":
                self.carry(one, other, forth=self.random.random() < 0.5)
            case "dial":
                self.dial(one, other)
            case "cut":
                self.cut(one, other)
            case "lend":
                site.follow()
                key = number.to_bytes(16, "big")
                self.marks[key] = site.knows
                site.blocks.append(key)
                site.lend([key])
            case "reset":
                self.reset(site, number)
            case "restart":
                site.follow()
                for each in range(4):
                    self.cut(one, each)
                    self.cut(each, one)
                site.restart(engine=self.random.random() < 0.3)


@pytest.mark.parametrize("seed", range(60))
def test_nobody_who_knows_a_reset_finds_a_block_of_before_it(seed: int) -> None:
    fleet = Fleet(seed)

    for number in range(1, 400):
        fleet.step(number)
        fleet.check()
    fleet.settle()

    fleet.check()
    assert len({site.books.generations.current(SPACE) for site in fleet.sites}) == 1
    everything = frozenset[int]().union(*(site.knows for site in fleet.sites))
    assert all(site.knows == everything for site in fleet.sites)


@pytest.mark.parametrize("seed", range(10))
def test_in_the_end_everyone_finds_what_is_still_lent(seed: int) -> None:
    fleet = Fleet(seed)
    for number in range(1, 300):
        fleet.step(number)

    fleet.settle()
    for site in fleet.sites:
        site.follow()
        key = bytes([site.number]) * 16
        site.lend([key])
    fleet.settle()

    space = Space(SPACE, fleet.sites[0].told)
    for site in fleet.sites:
        for other in range(4):
            assert len(site.books.find(space, PIECE, bytes([other]) * 16)) == 1


def test_a_space_that_was_never_reset_has_one_generation_everywhere() -> None:
    assert PeerGenerations().current(SPACE) == FIRST
    assert PeerGenerations().lineage(SPACE) == Lineage(FIRST)


def test_resets_that_did_not_know_of_each_other_are_one_generation_when_they_meet() -> None:
    one, other, third = PeerGenerations(), PeerGenerations(), PeerGenerations()
    for known, number in ((one, 1), (other, 2), (third, 3)):
        known.replace(SPACE, Lineage(number, (FIRST,)))
    before = one.current(SPACE)

    for known in (one, other, third):
        for said in (third, other, one):
            known.merge(SPACE, *said.said(SPACE))

    assert one.current(SPACE) == other.current(SPACE) == third.current(SPACE)
    assert one.current(SPACE) not in {1, 2, 3, FIRST}
    assert one.lineage(SPACE).descends_from(before)
    one.replace(SPACE, Lineage(9, (*one.lineage(SPACE).ancestors, one.current(SPACE))))
    assert one.current(SPACE) == 9


def test_what_was_ended_does_not_count_again_when_somebody_comes_back_with_it() -> None:
    known = PeerGenerations()
    known.replace(SPACE, Lineage(1, (FIRST,)))
    known.replace(SPACE, Lineage(2, (1, FIRST)))

    assert not known.merge(SPACE, {1: 1}, {})
    assert not known.adopt(SPACE, 1)

    assert known.current(SPACE) == 2


def test_many_resets_are_remembered_in_bounded_memory() -> None:
    known = PeerGenerations()
    for number in range(1, 3 * ANCESTORS_MAX):
        known.replace(SPACE, Lineage(number, (number - 1,)))

    begun, ended = known.said(SPACE)

    assert known.current(SPACE) == 3 * ANCESTORS_MAX - 1
    assert len(begun) <= ANCESTORS_MAX
    assert len(ended) <= ANCESTORS_MAX
    assert len(known.lineage(SPACE).ancestors) <= ANCESTORS_MAX


def resets(known: PeerGenerations, numbers: range) -> None:
    """One after the other, each of which knows of all before it."""
    for number in numbers:
        before = known.lineage(SPACE)
        ancestors = (before.current, *before.ancestors)[:ANCESTORS_MAX]
        known.replace(SPACE, Lineage(number, ancestors))


@pytest.mark.parametrize("count", [1, 511, 512, 2000])
def test_a_reset_that_nobody_has_ended_counts_however_many_others_are_heard_of(count: int) -> None:
    one, other = PeerGenerations(), PeerGenerations()
    resets(one, range(1, 2))
    resets(other, range(2, 2 + count))

    one.merge(SPACE, *other.said(SPACE))
    other.merge(SPACE, *one.said(SPACE))

    # What others have computed since does not know of reset 1.
    assert one.current(SPACE) == other.current(SPACE)
    assert one.current(SPACE) not in {1 + count, 1, FIRST}
    assert max(map(len, one.said(SPACE))) <= ANCESTORS_MAX


def test_a_space_that_was_forgotten_is_not_as_if_it_had_never_been_reset() -> None:
    known = PeerGenerations()
    resets(known, range(1, 2))

    for number in range(2 * LINEAGES_MAX):
        known.merge(number.to_bytes(16, "big"), {number + 1: 1}, {})

    assert known.current(SPACE) not in {1, FIRST}
    assert not known.lineage(SPACE).descends_from(1)
    assert known.said(SPACE)[0].keys() == {known.current(SPACE)}
    assert len(list(known)) <= LINEAGES_MAX


def test_who_says_that_all_generations_have_ended_brings_none_back() -> None:
    known = PeerGenerations()
    resets(known, range(1, 2))
    counted = {FIRST, 1}

    for number in range(2, 9):
        known.merge(SPACE, {}, {known.current(SPACE): number})
        assert known.current(SPACE) not in counted
        counted.add(known.current(SPACE))
        resets(known, range(number, number + 1))
        assert known.current(SPACE) not in counted
        counted.add(known.current(SPACE))


@pytest.mark.parametrize("count", [400, 600])
def test_after_very_many_resets_that_did_not_know_of_each_other_peers_agree_and_fall_silent(
    count: int,
) -> None:
    fleet = Fleet(1)
    for site in fleet.sites:
        first = 1 + count * site.number
        for number in range(first, first + count):
            fleet.reset(site, number)
    for pair in ((0, 1), (0, 2), (1, 2), (3, 0), (3, 1), (3, 2), (1, 0), (2, 0), (2, 1)):
        fleet.dial(*pair)
    carried = 0

    while said := sum(
        fleet.carry(*pair, forth=forth) for pair in list(fleet.lines) for forth in (True, False)
    ):
        carried += said
        assert carried < 1000

    assert len({site.books.generations.current(SPACE) for site in fleet.sites}) == 1
    fleet.check()


def listed_by(reader: PeerBooks, lender: PeerBooks) -> tuple[Conversation, Conversation]:
    """A reader that has taken in all that a lender has to say, and both ends of their channel."""
    hears, says = reader.begin(reads=True), lender.begin(reads=False)
    while (message := lender.next_message(says)) is not None:
        reader.take(hears, message)
    return hears, says


def test_a_reader_that_takes_nothing_costs_no_more_than_what_is_lent() -> None:
    site, reader = Site(1), PeerBooks(2)
    site.lend([number.to_bytes(16, "big") for number in range(8)])
    hears, says = listed_by(reader, site.books)

    for number in range(8, 50_000):
        key, before = number.to_bytes(16, "big"), (number - 8).to_bytes(16, "big")
        blocks = LentBlocks(1, [ARENA], Space(SPACE, FIRST), [key], [0], 0)
        site.books.lend(blocks, [before])

    assert sum(map(len, says.changed.values())) <= CHANGES_MAX + 8
    while (message := site.books.next_message(says)) is not None:
        reader.take(hears, message)
    here = {number.to_bytes(16, "big") for number in range(49_992, 50_000)}
    assert set(next(iter(hears.listings.values())).keys) == here
    assert hears.listed == 8


def test_more_than_a_peer_may_list_is_not_noted_and_the_rest_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(books, "LISTED_MAX", 10)
    site, reader = Site(1), PeerBooks(2)
    keys = [number.to_bytes(16, "big") for number in range(30)]
    site.lend(keys)

    hears, _ = listed_by(reader, site.books)

    assert hears.listed == 10
    assert sum(bool(reader.find(Space(SPACE, FIRST), PIECE, key)) for key in keys) == 10


def test_a_peer_that_speaks_of_ever_new_spaces_costs_bounded_memory() -> None:
    reader = PeerBooks(2)
    said = reader.begin(reads=True)
    reader.take(said, PeerHello(1, ""))

    for number in range(2 * LINEAGES_MAX):
        reader.take(said, Resets(number.to_bytes(16, "big"), {1: 1}, {}, asks=False))
    record, count = bytes(RECORD_BYTES_MAX), SHAPES_BYTES_MAX // RECORD_BYTES_MAX
    for number in range(count):
        reader.take(said, LentForms(number.to_bytes(16, "big"), record))
    with pytest.raises(PeerError, match="bytes of geometries"):
        reader.take(said, LentForms(count.to_bytes(16, "big"), record))

    assert len(said.known) <= LINEAGES_MAX
    assert sum(map(len, said.shapes.values())) * RECORD_BYTES_MAX <= SHAPES_BYTES_MAX
