"""The tiers of a cache that the store process serves, as its driver sees them.

Copies between the hub and such a tier go to the store process, for all ranks at once; its answers
become events of the machine. Nothing here waits: a step sends one message at most, and takes what
has arrived.

| the store says                    | the machine is told                                        |
|-----------------------------------|------------------------------------------------------------|
| a rank's part of a copy has ended | `CopyReport`                                               |
| blocks are there                  | `Discovered`: page by page, or as a prefetch has asked     |
| blocks were given up              | `Vanished`                                                 |
| a reset has voided the blocks     | `TierVoided`                                               |
| a tier is off, or on again        | `TierOff`, `TierOn` with what was there                    |
| nothing: it is lost               | `TierOff`; the link reports on copies when it is seen dead |
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import select
import tempfile
import time
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.config.values import NOT_PERSISTED
from penstock.errors import UnavailableError
from penstock.machine.effects import Copy
from penstock.machine.events import (
    Acquire,
    CopyReport,
    Discovered,
    Prefetch,
    Searched,
    TierOff,
    TierOn,
    TierVoided,
    Vanished,
)
from penstock.machine.statistics import StoreStatistics
from penstock.store.base import DIGEST_BYTES, OPENING
from penstock.store.process.link import (
    FoundInStore,
    Paged,
    StoreBack,
    StoreLost,
    Voided,
)
from penstock.store.process.messages import CHANGES_MAX, StoreConfig, StoreState, StoreTierConfig
from penstock.transport.unix_sockets import shared_folder
from penstock.transport.waiting import wait_any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from penstock.config import Config
    from penstock.machine.effects import Abandon
    from penstock.machine.events import Event
    from penstock.machine.machine import CacheMachine
    from penstock.store.base import TierState
    from penstock.store.process.client import ArenaOffer
    from penstock.store.process.link import StoreLink, StoreResult
    from penstock.vocabulary.keys import Key, LeaseId, OperationId

logger = logging.getLogger(__name__)

SPACE_DOMAIN = b"penstock.space.v1"
SOCKET = "socket"
"""The name of the Unix socket in the folder of the first stored tier."""
PREFETCHES_MAX = 256
"""Prefetches that wait for an answer of the store; the store is not asked for more."""
ANSWERS = 2
"""A request waits so many times as long for an answer as the question may take: it travels, too."""
LISTS_S = 1.0
"""A lease waits so long for a disk that has not listed its blocks: it answers from memory, within
milliseconds."""
FIND_KEYS_MAX = 256
"""Keys of a prefetch that the store is asked for at once: noting what it has takes an engine some
microseconds a key, in one step."""
GIB = 1 << 30


def space_name(config: Config) -> bytes:
    """A name for the blocks of a model: equal where equal tokens have equal keys."""
    said = (config.namespace().encode(), config.hash.encode())
    framed = (len(each).to_bytes(4, "little") + each for each in said)
    return sha256(SPACE_DOMAIN + b"".join(framed)).digest()[:DIGEST_BYTES]


def store_config(config: Config) -> StoreConfig | None:
    """What the store process of a cache serves; `None` if the cache has no stored tiers.

    It listens in the folder of the first of them: engines that name the same folder share it.
    """
    tiers = tuple(
        StoreTierConfig(
            name=tier.name,
            kind=kind.name,
            size_bytes=int(kind.gib * GIB),
            options=dict(kind.options),
        )
        for tier, kind in zip(config.cache.tiers, config.tier_kinds, strict=True)
        if tier.stored
    )
    if not tiers:
        return None
    folders = [tier.folder.rstrip("/") for tier in tiers if tier.folder]
    return StoreConfig(
        socket=f"{folders[0] if folders else _own_folder(tiers)}/{SOCKET}", tiers=tiers
    )


def _own_folder(tiers: tuple[StoreTierConfig, ...]) -> str:
    """Where a store process without a folder listens: engines with the same tiers share it."""
    said = StoreConfig(socket="/", tiers=tiers).to_json()
    try:
        return str(shared_folder(said))
    except UnavailableError as error:
        # The process cannot listen there either, and its tiers are off with the reason.
        logger.warning("the store process has no place for its socket: %s", error)
        return f"{tempfile.gettempdir()}/penstock-{os.getuid()}"


class StoreStatus(NamedTuple):
    """The store process as an engine sees it; cheap enough to ask in every step."""

    due: bool
    """Whether the next `step` finds something that the store has said, or has to tell it."""
    settled: bool
    """Whether it is known of every tier whether it is on; not so while the store starts."""
    searching: bool
    """Whether a prefetch asked the store for blocks that may be there, and has no answer yet."""
    asked: bool
    """The same, also of blocks that only other engines can have written since a disk was listed."""
    on: bool
    """Whether a tier of it can be used."""
    blocks: int
    """Blocks that it has, for all engines, on each rank."""
    saves_dropped: int
    """Blocks that it did not write because it was too slow."""
    failed: bool
    """Whether there is no process, and none that starts; another try follows."""


def _is_off(state: TierState) -> bool:
    return not state.on and state.why != OPENING


class _Wanted(NamedTuple):
    """Blocks that a prefetch or a lease wants and nobody here knows of."""

    wish: Prefetch | Acquire
    start: int
    """The first of its keys that the store was asked for."""
    until: float
    """When the request waits no longer for the answer."""
    lease: LeaseId | None = None
    """That waits for it."""


class StoredTiers:
    """The stored tiers of one cache, and the link to the process that has them.

    Args:
        link: To the store process.
        tiers: The indices of the tiers.
        offer: The arena of a rank in this process; others offer theirs themselves.
        asked: How long a question may take, in seconds, by the index of tiers that do not list what
            they have.
        lent_in: The index of the tier by which other engines read the hub, if there is one.
        clock: In seconds.
    """

    def __init__(
        self,
        link: StoreLink,
        tiers: Sequence[int],
        *,
        offer: ArenaOffer | None = None,
        asked: Mapping[int, float] | None = None,
        lent_in: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = link
        self._offer = offer
        self.tiers = tuple(tiers)
        self._asked = dict(asked or {})
        self._lent_in = lent_in
        self._lending = False
        """Whether the store is told what lies in the hub."""
        self._lends_anew = self._lends_more = False
        self._clock = clock
        self.states: dict[int, TierState] = {}
        """What the store last said of each tier."""
        self._on = dict.fromkeys(self.tiers, False)
        self._off = ""
        """Why the tiers are off, whatever the store says."""
        self.starting = set(self.tiers)
        """Those that are off only because a process, a session or a tier begins."""
        self._operations: set[OperationId] = set()
        self._wanted: dict[int, _Wanted] = {}
        self._searches: dict[LeaseId, int] = {}
        """Leases that wait, and how many answers they wait for."""
        self._watch: select.poll | None = None
        """Watches `descriptors`, which stay the same."""
        self._answered: list[LeaseId] = []
        """Leases that nobody could be asked for."""
        self._paging: set[int] = set()
        """Tiers of which a page was asked for."""
        self._listed: set[int] = set()
        """Tiers of which the last page has come: what others store later, prefetches find."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Readable when `collect` may have something."""
        if self._offer is None:
            return (self.link.descriptor,)
        return self.link.descriptor, self._offer.descriptor

    def has_news(self) -> bool:
        """Whether `collect` may have something before `next_due`; cheap."""
        if self._answered or self.link.ready or self._lends_more:
            return True
        if self._watch is None:
            self._watch = select.poll()
            for descriptor in self.descriptors:
                self._watch.register(descriptor, select.POLLIN)
        return bool(self._watch.poll(0))

    @property
    def next_due(self) -> float:
        """When time alone gives `collect` something to do."""
        if self.link.ready or self._answered or self._lends_more:
            return -math.inf
        alarms = (self.link.alarm, None if self._offer is None else self._offer.alarm)
        now = self._clock()
        answers = (each.until for each in self._wanted.values() if each.until > now)
        return min((at for at in (*alarms, *answers) if at is not None), default=math.inf)

    def status(self, cause: str, now: float) -> StoreStatus:
        """How the store is; `searching` is said of the prefetches of one cause."""
        states = self.states.values()
        asked = any(
            isinstance(each.wish, Prefetch) and each.wish.cause == cause and now < each.until
            for each in self._wanted.values()
        )
        return StoreStatus(
            due=now >= self.next_due
            or bool(wait_any((), (self.link.descriptor,), deadline=None).descriptors),
            settled=self.link.is_up and self._is_each_known(),
            searching=asked
            and not self._listed.issuperset(tier for tier in self.tiers if self._on[tier]),
            asked=asked,
            on=any(self._on.values()),
            blocks=sum(state.blocks for state in states),
            saves_dropped=sum(state.saves_dropped for state in states),
            failed=self.link.is_failed,
        )

    def _is_each_known(self) -> bool:
        return all(
            self._on[tier] or (tier in self.states and _is_off(self.states[tier]))
            for tier in self.tiers
        )

    def statistics(self) -> dict[int, StoreStatistics]:
        """What the store last said of each tier, by its index."""
        unconfirmed = self.unconfirmed_resets
        return {
            tier: msgspec.structs.replace(
                msgspec.convert(state, StoreStatistics, from_attributes=True),
                reset_confirmed=tier not in unconfirmed,
            )
            for tier, state in self.states.items()
        }

    def serves(self, effect: Copy | Abandon) -> bool:
        """Whether the store carries an effect out, and not the ranks."""
        if isinstance(effect, Copy):
            return effect.source in self.tiers or effect.target in self.tiers
        return effect.operation in self._operations

    def order(self, effect: Copy | Abandon) -> None:
        if isinstance(effect, Copy):
            self._operations.add(effect.operation)
        self.link.order(effect)

    def prefetch(self, prefetch: Prefetch, known: int) -> None:
        """Asks the store for the keys of a prefetch from `known` on, which nobody here knows."""
        for tier in self.tiers:
            if self._on[tier]:
                self._find(tier, prefetch, known)

    def search_s(self, wanted_s: float | None, block_count: int) -> float:
        """How long a lease waits for the answer; 0 if there is nobody to ask.

        By default a tier is asked that has not listed its blocks, and as long as it may take.
        """
        if wanted_s is not None:
            return wanted_s if any(self._on.values()) else 0.0
        questions = -(-block_count // FIND_KEYS_MAX)
        times = [
            ANSWERS * self._asked[tier] if tier in self._asked else LISTS_S
            for tier in self.tiers
            if self._on[tier] and tier not in self._listed
        ]
        return questions * max(times, default=0.0)

    def search(self, wish: Acquire, lease: LeaseId, known: int) -> None:
        """Asks the store for the blocks of a lease from `known` on; `Searched` follows."""
        self._searches[lease] = 0
        for tier in self.tiers:
            if self._on[tier]:
                self._find(tier, wish, known, lease)
        if not self._searches[lease]:
            self._answered.append(lease)

    def _find(
        self, tier: int, wish: Prefetch | Acquire, start: int, lease: LeaseId | None = None
    ) -> None:
        if start < len(wish.keys) and len(self._wanted) < PREFETCHES_MAX:
            keys = wish.keys[start : start + FIND_KEYS_MAX]
            number = self.link.find(tier, keys, first=start)
            until = self._clock() + ANSWERS * self._asked[tier] if tier in self._asked else math.inf
            if isinstance(wish, Acquire) and wish.search_until is not None:
                until = wish.search_until
            self._wanted[number] = _Wanted(wish, start, until, lease)
            if lease is not None:
                self._searches[lease] += 1

    def void(self) -> None:
        """A reset: blocks that were stored are not found again, by any engine."""
        for tier in self.tiers:
            self.link.void(tier)

    def forget_prefetches(self) -> None:
        """What the store answers to prefetches from now on starts no copies."""
        self._wanted = {number: each for number, each in self._wanted.items() if each.lease}

    def is_on(self, tier: int) -> bool:
        return self._on[tier]

    @property
    def is_complete(self) -> bool:
        """Whether all tiers are on, and all is known that those have which list their blocks."""
        return all(
            self._on[tier] and (tier in self._listed or tier in self._asked) for tier in self.tiers
        )

    @property
    def unconfirmed_resets(self) -> set[int]:
        """Tiers that have not confirmed a reset: it would be lost with this process."""
        return self.link.resets.unconfirmed

    @property
    def unkept_resets(self) -> dict[int, str]:
        """Those of them that count for all engines, with why the store may still lose them."""
        return self.link.resets.unkept

    def enter_space_of(self, config: Config) -> None:
        """From now on the blocks of another model are meant; nothing of it is known yet.

        With weights that are not known, nothing is stored: the tiers are off.
        """
        self._off = "" if config.persists else f"model.weights_version {NOT_PERSISTED}"
        space = space_name(config) if config.persists else secrets.token_bytes(DIGEST_BYTES)
        self._on = dict.fromkeys(self.tiers, False)
        self.link.enter_space(space)

    def dispatch(self) -> None:
        self.link.dispatch()

    def collect(self) -> Iterator[Event]:
        """What has happened since the last call, as events for the machine."""
        if self._offer is not None:
            self._offer.poll()
        for result in self.link.collect():
            yield from self._events_of(result)
        while self._answered:
            lease = self._answered.pop()
            self._searches.pop(lease, None)
            yield Searched(lease=lease)

    def lend(self, machine: CacheMachine) -> None:
        """Tells the store what has come to the hub and left it, for other engines to read."""
        tier = self._lent_in
        if tier is None:
            return
        if self._on[tier] is not self._lending or self._lends_anew:
            self._lending, self._lends_anew = self._on[tier], False
            machine.follow_hub(follow=self._lending)
        if machine.has_hub_changes:
            changes, salt = machine.take_hub_changes(tier, CHANGES_MAX)
            self.link.tell_hub(tier, changes.keys, changes.slots, salt, changes.gone)
        self._lends_more = machine.has_hub_changes

    def forget_all_but(self, under_way: Collection[OperationId]) -> None:
        """Forgets operations that have ended."""
        self._operations.intersection_update(under_way)

    def close(self, deadline: float) -> None:
        if self._offer is not None:
            self._offer.close()
        self.link.close(deadline)

    def _events_of(self, result: StoreResult) -> Iterator[Event]:
        match result:
            case CopyReport() | Vanished():
                yield result
            case Paged():
                yield from self._page(result)
            case FoundInStore():
                yield from self._found(result)
            case Voided():
                self._listed.discard(result.tier)
                if result.tier == self._lent_in:
                    self._lends_anew = True  # What came since the reset is all that it lends.
                yield TierVoided(tier=result.tier, own=result.own)
            case StoreState():
                self.states[result.tier] = result.state
                yield from self._switch(result.tier)
            case StoreLost():
                for tier in self.tiers:
                    yield from self._switch_off(tier, result.why, starts=result.starts)
            case StoreBack():
                yield from chain(*map(self._switch, self.tiers))

    def _page(self, page: Paged) -> Iterator[Event]:
        self._paging.discard(page.tier)
        state = self.states.get(page.tier)
        if state is None or not state.on or not self.link.is_up:
            # It was asked for before the tier went off: once it is on again, all is listed anew.
            self.link.forget_pages(page.tier)
            return
        if not self._on[page.tier]:
            self._on[page.tier] = True
            yield TierOn(tier=page.tier, kept=True)
        if page.keys:
            yield Discovered(tier=page.tier, keys=page.keys, parents=page.parents)
        recovering = state.recovered < 1
        # A store that is still reading its tables has more later: its next state brings us back.
        if page.tier in self._asked:
            return  # What it has is known by asking alone.
        if page.last and not recovering:
            self._listed.add(page.tier)
        elif not page.last and (page.keys or not recovering):
            self._request_page(page.tier)

    def _found(self, found: FoundInStore) -> Iterator[Event]:
        wanted = self._wanted.pop(found.number, None)
        if wanted is None:
            return
        yield from self._note_found(found, wanted)
        lease = wanted.lease
        if lease is not None:
            self._searches[lease] -= 1
            if not self._searches[lease]:
                self._answered.append(lease)

    def _note_found(self, found: FoundInStore, wanted: _Wanted) -> Iterator[Event]:
        count = found.present.index(False) if False in found.present else len(found.present)
        keys, start = wanted.wish.keys, wanted.start
        if found.foreign:
            first = keys[start + count]
            yield Discovered(tier=found.tier, keys=[first], parents=[None], foreign=True)
        if not count:
            return
        before: list[Key | None] = [keys[start - 1] if start else None]
        before += keys[start : start + count - 1]
        yield Discovered(
            tier=found.tier, keys=keys[start : start + count], parents=before, wanted=True
        )
        if isinstance(wanted.wish, Prefetch):
            yield wanted.wish
        if count == len(found.present):
            self._find(found.tier, wanted.wish, start + count, wanted.lease)

    def _switch(self, tier: int) -> Iterator[Event]:
        """A tier can be on when the store is there and says that the tier is."""
        state = self.states.get(tier)
        if state is None or not self.link.is_up:
            return
        if self._off:
            yield from self._switch_off(tier, self._off)
            return
        if not state.on:
            yield from self._switch_off(tier, state.why, starts=state.why == OPENING)
            return
        # It is on from the first page on: who waits for it finds what was stored last.
        is_asked = tier in self._asked and self._on[tier]
        if tier not in self._paging | self._listed and not is_asked:
            self._request_page(tier)

    def _request_page(self, tier: int) -> None:
        self._paging.add(tier)
        self.link.request_page(tier)

    def _switch_off(self, tier: int, why: str, *, starts: bool = False) -> Iterator[Event]:
        # One that was on, and has to begin again, was lost.
        if starts and not self._on[tier]:
            self.starting.add(tier)
        else:
            self.starting.discard(tier)
        self._on[tier] = False
        self._paging.discard(tier)
        self._listed.discard(tier)
        yield TierOff(tier=tier, fenced=False, why=why)
