"""The whole state of one engine's cache, and the few verbs that keep its books straight.

    save not made, or failed ─→ missed ──tier on──→ due ──written──→ in the tier
                                  ↑                  │
                                  └─────tier off─────┘      left the hub: dropped, and counted

`writes` writes them. The one rule: only what is in the hub is noted here, so it never is more
than the hub holds.

It is changed only inside `CacheMachine.handle`. The modules beside this one (`acquire`, `leases`,
`copies`, `writes`, `matching`, `offload`, `faults`) handle its events; they share these books and
nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.expiries import Expiries
from penstock.cache.explain import Departed, Departure, History, Miss, MissReason
from penstock.cache.nodes import NOWHERE, NodeTable
from penstock.cache.operations import Ledger
from penstock.cache.settings import DEVICE, HUB, CacheSettings, WriteKind
from penstock.cache.states import (
    DOOMED,
    FILLING,
    LEASE_TABLE,
    LEAVING,
    READY,
    LeaseMove,
    LeaseState,
    SlotState,
)
from penstock.cache.tier import Room, Tier
from penstock.errors import InvariantViolation, LeaseError
from penstock.machine.effects import DropBlocks, Effect
from penstock.machine.gate import Rates
from penstock.machine.hub_log import HubLog
from penstock.machine.kv_events import EventLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.operations import Operation
    from penstock.machine.events import Acquire
    from penstock.vocabulary.keys import Key, LeaseId, OperationId, PinId


@dataclass(slots=True)
class Backlog:
    """What one stored tier missed, in the order in which it would have been written."""

    missed: dict[Key, None] = field(default_factory=dict)
    """Is written when the tier comes on."""
    due: dict[Key, None] = field(default_factory=dict)
    """Is written now, some blocks at a time."""
    dropped: int = 0
    """Blocks that left the hub before they could be written, since the beginning."""

    def __len__(self) -> int:
        return len(self.missed) + len(self.due)

    def resume(self) -> None:
        """The tier came on."""
        self.due |= self.missed
        self.missed = {}

    def pause(self) -> None:
        """The tier went off."""
        self.missed = self.due | self.missed
        self.due = {}

    def give_up(self) -> None:
        """What is noted cannot be written any more."""
        self.dropped += len(self)
        self.clear()

    def clear(self) -> None:
        """What is noted must not be written any more: it is void."""
        self.missed.clear()
        self.due.clear()


def miss(books: Books, tier: Tier, nodes: NDArray[np.intp]) -> None:
    """Notes blocks that would be written into a tier now, if it could be used."""
    hub = books.tier(HUB)
    slots = hub.slot_of[nodes]
    state = hub.pool.state[slots]
    there = (slots != NOWHERE) & ((state == READY) | (state == LEAVING))
    there &= tier.slot_of[nodes] == NOWHERE
    backlog = books.backlogs[tier.index]
    backlog.missed |= dict.fromkeys(books.nodes.keys_of(nodes[there].tolist()))


def leave_hub(books: Books, numbers: Sequence[int], keys: Sequence[Key]) -> None:
    """Blocks leave the hub: what a tier should have been given of them is dropped."""
    for index, backlog in books.backlogs.items():
        if not backlog:
            continue
        slot_of = books.tier(index).slot_of
        for node, key in zip(numbers, keys, strict=True):
            if key in backlog.due or key in backlog.missed:
                backlog.due.pop(key, None)
                backlog.missed.pop(key, None)
                backlog.dropped += int(slot_of[node] == NOWHERE)


PRIORITY_MAX = int(np.iinfo(np.int16).max)
FIRST_TO_LEAVE = -PRIORITY_MAX - 1
"""The priority of blocks that were let go, or whose time to live has passed: below any that can be
asked for."""

_TENANTS_MIN = 64
"""How many tenants are remembered in any case."""
_STORY_LENGTH = 20
"""How much of the history goes with a defect that concerns no block in particular."""
_WEIGHTS_MIN = 64
"""How many versions of the weights are remembered in any case."""
_CONTENT_LIMIT = 4096
"""How many prompts' first blocks are remembered, each with its namespaces."""
_NAMESPACE_LIMIT = 64
"""How many namespaces are remembered for each; further ones are not."""


def require_sound_wishes(*, priority: int, ttl_s: float | None, deadline: float | None) -> None:
    """Refuses wishes that no block could be given."""
    if type(priority) is not int or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise ValueError(f"priority is {priority}, must be from {-PRIORITY_MAX} to {PRIORITY_MAX}")
    if ttl_s is not None and not 0 < ttl_s < math.inf:
        raise ValueError(f"ttl_s is {ttl_s}, must be a number of seconds above 0")
    if deadline is not None and math.isnan(deadline):
        raise ValueError("deadline is nan, must be a time")


def require_count(name: str, count: int) -> None:
    """Refuses what is no number of blocks."""
    if type(count) is not int or count < 0:
        raise ValueError(f"{name} is {count!r}, must be a whole number of at least 0")


@dataclass(slots=True)
class MachineCounters:
    """Counts of what happened; they only grow."""

    requests: int = 0
    requests_refused: int = 0
    tokens_asked: int = 0
    tokens_cached_by_tier: list[int] = field(default_factory=list)
    tokens_not_delivered: int = 0
    """Of those, tokens whose blocks could not be brought to the device."""
    misses: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    blocks_published: int = 0
    blocks_twinned: int = 0
    """Blocks computed twice at the same time; the second copy lives as long as its request."""
    blocks_evicted_by_tier: list[int] = field(default_factory=list)
    blocks_refused_by_tier: list[int] = field(default_factory=list)
    """Blocks that were not written into a full tier: what lies there is worth more."""
    blocks_dropped_unsaved: int = 0
    """Evicted in a hurry, before they could be written back."""
    blocks_corrupt: int = 0
    blocks_missing: int = 0
    """Blocks that were asked for and that the tier did not have."""
    saves_refused: int = 0
    """Blocks not written down: no room, over quota."""
    saves_skipped: int = 0
    """Blocks not written into a stored tier because too many were on their way."""
    reports_late: int = 0
    """Reports on operations that are not in the ledger: duplicates, or from an earlier life."""
    leases_lost: int = 0
    tokens_computed_instead: int = 0
    """Found below the device, but quicker to compute."""
    blocks_let_go: int = 0
    """Blocks that their request did not expect to be used again, when it ended."""


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseRecord:
    """What one request holds: one list of device slots, wherever the blocks came from.

    Some of the blocks are *published*: they have a key, and others may match them. The rest is the
    request's own until it commits.
    """

    id: LeaseId
    request: str
    tenant: int
    era: int
    """Blocks computed before a reset are not published after it."""
    table: NDArray[np.intp]
    """Device slots in token order."""
    matched_blocks: int
    """How many leading blocks were found rather than computed."""
    token_count: int
    """How many leading tokens have their KV, or will have it when the loads arrive."""
    published_blocks: int
    """How many leading blocks have been offered to the index."""
    tail_key: Key | None
    """The key of the last published block."""
    frontier: Key | None
    """The key this request will publish next, where it is known."""
    store: bool = True
    priority: int = 0
    ttl_s: float | None = None
    keep_blocks: int | None = None
    """Leading blocks that are expected to be used again; the others are let go at its end."""
    namespace: bytes = b""
    content: int = 0
    miss: Miss = field(default_factory=lambda: Miss(reason=MissReason.NONE))
    """Why no more was found."""
    state: LeaseState = LeaseState.READY
    waiting: set[OperationId] = field(default_factory=set)
    """The copies it waits for."""
    cached_by_tier: tuple[int, ...] = ()
    """Tokens found in each tier, device first."""
    outdated: set[int] = field(default_factory=set)
    """Tiers that another engine has voided since it began: nothing of it is written there."""
    twins: list[int] = field(default_factory=list)
    """Slots of blocks that another request published first; held, so that the blocks this
    request publishes after them stay reachable."""

    def move(self, move: LeaseMove) -> None:
        """Changes the state by the table."""
        self.state = LEASE_TABLE.after(self.state, move, subject=f"lease of {self.request!r}")

    def append(self, slots: NDArray[np.intp]) -> None:
        """Adds slots at the end of the table."""
        self.table = np.concatenate((self.table, slots))


class Weights:
    """The versions of the weights that the model has and had, and what was known under them."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._numbers: dict[str, int] = {}
        """The number of each version, as nodes have it."""
        self._last = 0
        self.era = 0
        """How often everything was voided, or the weights changed."""
        self.earlier_contents: dict[int, None] = {}
        """First blocks by their tokens alone that were known under other weights."""

    def change(
        self, before: str, after: str, contents: Iterable[int], lower: Sequence[Tier]
    ) -> None:
        """New nodes are of other weights from now on; those in lower tiers keep theirs."""
        numbers = self._numbers
        numbers.setdefault(before, self._nodes.weights_now)
        if after not in numbers:
            if len(numbers) >= _WEIGHTS_MIN:
                self._forget_unused(lower)
            self._last += 1
            self._numbers[after] = self._last
        self._nodes.use_weights(self._numbers[after])
        self.earlier_contents.update(dict.fromkeys(contents))
        excess = len(self.earlier_contents) - _CONTENT_LIMIT
        for content in list(islice(self.earlier_contents, max(0, excess))):
            del self.earlier_contents[content]

    def _forget_unused(self, lower: Sequence[Tier]) -> None:
        left = {self._nodes.weights_now}
        for tier in lower:
            left.update(np.unique(self._nodes.weights[tier.placed_nodes()]).tolist())
        self._numbers = {name: each for name, each in self._numbers.items() if each in left}


class Books:
    """State of the cache of one engine."""

    def __init__(self, settings: CacheSettings, incarnation: int) -> None:
        self.settings = settings
        self.nodes = NodeTable()
        self.tiers: list[Tier | None] = [
            None if tier is None else Tier(index, tier, self.nodes, hint_share=settings.hint_share)
            for index, tier in enumerate((settings.device, *settings.tiers))
        ]
        """By index; the device is `None` when the engine manages its own slots."""
        self._owned = [tier for tier in self.tiers if tier is not None]
        self._lower = [tier for tier in self.tiers[HUB:] if tier is not None]
        self._fed_by = self._feed_tiers()
        self.ledger = Ledger(incarnation)
        self.rates = Rates(settings)
        self.leases: dict[LeaseId, LeaseRecord] = {}
        self.searches: dict[LeaseId, Acquire] = {}
        """Leases that wait for a store's answer, and what they asked for."""
        self.lease_next = self.pin_next = 1
        self.pins: dict[PinId, tuple[Key, ...]] = {}
        self.pinned: dict[Key, int] = {}
        """Key to the number of pins; it outlives the block, which may come back."""
        self.departed = Departed(settings.departed_count)
        self.history = History(settings.story_count)
        self.kv_events = EventLog(settings.event_count)
        self.hub_log = HubLog()
        self.counters = MachineCounters(
            tokens_cached_by_tier=[0] * len(self.tiers),
            blocks_evicted_by_tier=[0] * len(self.tiers),
            blocks_refused_by_tier=[0] * len(self.tiers),
        )
        self.effects: list[Effect] = []
        self.agenda: list[tuple[Operation, NDArray[np.intp]]] = []
        """Operations that ended within this event, and the device slots they did not fill."""
        self.tick = 0
        """The logical clock: one for each event."""
        self.now = 0.0
        """The time that came with the last event."""
        self.losses = 0
        """How often blocks below the device became unreadable."""
        self.lost_ranks: set[int] = set()
        self.tenants: dict[str, int] = {}
        self.foreign: dict[Key, int] = {}
        """Blocks that lie somewhere in a form we cannot read, and in which tier."""
        self.frontiers: dict[Key, int] = {}
        """Blocks being computed right now, one a lease: the next it will publish."""
        self.contents: dict[int, set[bytes]] = {}
        """First blocks by their tokens alone, and the namespaces they are known in."""
        self.weights = Weights(self.nodes)
        self.staging: dict[int, OperationId] = {}
        """Hub slots that a stage is filling, and which one: their blocks can be passed on."""
        self.sightings: dict[Key, int] = {}
        """How often an engine that offloads showed a block that had not earned its place."""
        self.backlogs = {tier.index: Backlog() for tier in self._lower if tier.settings.stored}
        """By the index of a stored tier: what it missed while it was off."""
        self.expiries = Expiries(self.nodes.capacity)
        self._tenants_max = _TENANTS_MIN
        """With more tenants than this, those without blocks are forgotten."""
        self._tenants_free: list[int] = []

    def _feed_tiers(self) -> dict[int, list[Tier]]:
        """Tells tiers whose blocks they need not keep; returns the tiers that each one feeds."""
        fed_by = {DEVICE: self._lower[:1], HUB: self._lower[1:]}
        late = (WriteKind.WRITE_BACK, WriteKind.EXCLUSIVE)
        for feeder, tiers in fed_by.items():
            for tier in tiers:
                source = self.tiers[feeder]
                if source is not None and tier.settings.write.kind in late:
                    source.saves_late = True
                # What a store gives up, it decides itself.
                if tier.settings.write.kind is WriteKind.EXCLUSIVE and not tier.settings.stored:
                    tier.above = source
        return fed_by

    # ---------------------------------------------------------------- finding things

    @property
    def device(self) -> Tier:
        """The device tier of an engine whose slots Penstock manages."""
        tier = self.tiers[DEVICE]
        if tier is None:
            raise ValueError("this engine manages its own device slots: use lookup, load and save")
        return tier

    @property
    def hub(self) -> Tier | None:
        """The first tier below the device."""
        return self.tiers[HUB] if len(self.tiers) > HUB else None

    def tier(self, index: int) -> Tier:
        """A tier that has slots of ours."""
        tier = self.tiers[index]
        if tier is None:
            raise InvariantViolation(f"tier {index} has no slots of ours")
        return tier

    @property
    def era(self) -> int:
        """What requests of an earlier era compute is not published."""
        return self.weights.era

    def owned_tiers(self) -> list[Tier]:
        """All tiers with slots of ours."""
        return self._owned

    def lower_tiers(self) -> list[Tier]:
        return self._lower

    def fed_by(self, index: int) -> list[Tier]:
        """The tiers that take their blocks from tier `index`."""
        return self._fed_by.get(index, [])

    def lease(self, lease_id: LeaseId) -> LeaseRecord:
        """A lease that has not ended.

        Raises `LeaseError`: it has, or never was.
        """
        lease = self.leases.get(lease_id)
        if lease is None:
            raise LeaseError(f"lease {lease_id} is not open: it was released, or never given")
        return lease

    def tenant(self, name: str) -> int:
        number = self.tenants.get(name)
        if number is None:
            if len(self.tenants) >= self._tenants_max:
                self._forget_tenants()
            number = self._tenants_free.pop() if self._tenants_free else len(self.tenants)
            self.tenants[name] = number
            for tier in self.owned_tiers():
                tier.introduce(number, name)
        return number

    def _forget_tenants(self) -> None:
        """Forgets tenants that have neither blocks nor leases; clients name them as they like."""
        known = (self.nodes.copy_count > 0) | (self.nodes.child_count > 0)
        needed = set(np.unique(self.nodes.tenant[known]).tolist())
        needed |= {lease.tenant for lease in self.leases.values()}
        for name, number in list(self.tenants.items()):
            if number not in needed:
                del self.tenants[name]
                self._tenants_free.append(number)
                for tier in self.owned_tiers():
                    tier.dismiss(number)
        # Twice as many as are needed, so that the work is in proportion to the newcomers.
        self._tenants_max = max(_TENANTS_MIN, 2 * len(self.tenants))

    @property
    def healthy(self) -> bool:
        return not self.lost_ranks

    # ---------------------------------------------------------------- blocks come

    def add_chain(self, keys: Sequence[Key], *, parent: int, tenant: int) -> NDArray[np.intp]:
        """Makes unknown blocks known; the caller places a copy at once."""
        nodes = self._add_nodes(keys, parent=parent, tenant=tenant)
        self.departed.discard(keys)
        if self.pinned:
            pinned = self.pinned
            self.nodes.pins[nodes] = [pinned.get(key, 0) for key in keys]
        return nodes

    def add_forest(
        self, keys: Sequence[Key], parents: Sequence[Key | None], *, tenant: int
    ) -> NDArray[np.intp]:
        """Makes unknown blocks of many chains known, each after the one before it.

        The caller places copies at once, except of blocks that others of them follow.
        """
        nodes = self.nodes.add_forest(keys, parents, tenant=tenant)
        self._fit(nodes)
        self.departed.discard(keys)
        if self.pinned:
            pinned = self.pinned
            self.nodes.pins[nodes] = [pinned.get(key, 0) for key in keys]
        return nodes

    def _add_nodes(self, keys: Sequence[Key], *, parent: int, tenant: int) -> NDArray[np.intp]:
        nodes = self.nodes.add_chain(keys, parent=parent, tenant=tenant)
        self._fit(nodes)
        return nodes

    def _fit(self, nodes: NDArray[np.intp]) -> None:
        """Nodes were added: everything that has an entry for each has room for them."""
        for tier in self.owned_tiers():
            tier.fit()
        self.expiries.resize(self.nodes.capacity)
        self.expiries.forget(nodes)

    def parent_node(self, key: Key | None, *, tenant: int) -> int:
        """The node of the block before another one; made, without a copy, if it is unknown.

        The caller adds the block that follows at once.
        """
        if key is None:
            return NOWHERE
        node = self.nodes.get(key)
        if node == NOWHERE:
            node = int(self._add_nodes([key], parent=NOWHERE, tenant=tenant)[0])
            self.nodes.pins[node] = self.pinned.get(key, 0)
        return node

    def require_no_circle(self, keys: Sequence[Key], before: Key | None) -> None:
        """Refuses blocks that would follow themselves: no walk along them would ever end."""
        if before is None:
            return
        path = self.nodes.path_to(self.nodes.get(before)).tolist()
        if before in keys or not {self.nodes.get(key) for key in keys}.isdisjoint(path):
            raise ValueError("parent: a block would come before itself")

    def link(self, node: int, parent: int) -> None:
        """A known block turns out to follow another one that was not known to come before it."""
        if parent == NOWHERE or self.nodes.parent[node] != NOWHERE:
            return
        self.nodes.parent[node] = parent
        self.nodes.child_count[parent] += 1
        for tier in self.owned_tiers():
            slot = tier.slot_of[node]
            if slot != NOWHERE and tier.pool.state[slot] != LEAVING:
                tier.children[parent] += 1

    def hint(self, nodes: NDArray[np.intp], priority: int, until: float | None) -> None:
        """Applies a request's wishes to blocks: the highest priority and the latest end win."""
        if priority:
            self.nodes.priority[nodes] = np.maximum(self.nodes.priority[nodes], priority)
        if until is not None:
            longer = self.expiries.extend(nodes, until)
            back = longer[self.nodes.priority[longer] == FIRST_TO_LEAVE]
            self.nodes.priority[back] = priority
        self._reprioritize(nodes)

    def let_go(self, nodes: NDArray[np.intp]) -> None:
        """Blocks of a chain, its end included, leave before all others: a request expects so.

        Those that another one has, and all before them, stay as they are: blocks that a lease or a
        copy holds on the device, that are pinned, or that several known blocks follow.
        """
        table = self.nodes
        others = (table.child_count[nodes] > 1) | (table.pins[nodes] > 0)
        others[-1:] |= table.child_count[nodes[-1:]] > 0
        device = self.tiers[DEVICE]
        if device is not None:
            slots = device.slot_of[nodes]
            others |= (slots != NOWHERE) & (device.pool.holders[slots] > 0)
        shared = others.nonzero()[0]
        alone = nodes[int(shared[-1]) + 1 :] if len(shared) else nodes
        if len(alone):
            table.priority[alone] = FIRST_TO_LEAVE
            self.counters.blocks_let_go += len(alone)
            self._reprioritize(alone)

    def revive(self, nodes: NDArray[np.intp]) -> None:
        """Blocks were used: those that were to leave first are like any other again."""
        if self.nodes.hinted:
            back = nodes[self.nodes.priority[nodes] == FIRST_TO_LEAVE]
            if len(back):
                self.nodes.priority[back] = 0
                self._reprioritize(back)

    def _reprioritize(self, nodes: NDArray[np.intp]) -> None:
        self.nodes.hinted = True
        for tier in self.owned_tiers():
            tier.prioritize(nodes)
            tier.offer(nodes)

    def next_expiry(self) -> float | None:
        """When the next block's time to live passes."""
        return self.expiries.next()

    def expire_blocks(self, now: float) -> None:
        """Blocks whose time has passed are the first to leave from now on."""
        until = self.expiries.next()
        if until is None or until > now:
            return
        passed = self.expiries.pop_passed(now)
        if not len(passed):
            return
        known = (self.nodes.copy_count[passed] > 0) | (self.nodes.child_count[passed] > 0)
        passed = passed[known]
        if not len(passed):
            return
        self.nodes.priority[passed] = FIRST_TO_LEAVE
        self._reprioritize(passed)

    # ---------------------------------------------------------------- blocks go

    def make_room(self, tier: Tier, wanted: int, tenant: int | None, now: float, cause: str) -> int:
        """Evicts until `wanted` slots can be taken, or nothing at all; returns what could be."""
        room = tier.plan_room(wanted, tenant)
        if room.slot_count < wanted:
            tier.put_back(room.victims)
        else:
            self.evict_planned(tier, room, now, cause)
        return room.slot_count

    def evict_planned(self, tier: Tier, room: Room, now: float, cause: str) -> None:
        """Forgets the victims of a plan, each for its own reason."""
        own, others = room.victims[: room.own_count], room.victims[room.own_count :]
        spares, others = others[: room.spare_count], others[room.spare_count :]
        if spares:
            self.evict(tier, spares, MissReason.EVICTED, now, cause, spares=True)
        # A victim for the quota may follow one that merely had its turn, so all in one go.
        if own and others:
            keys = self.nodes.keys_of(own)
            self.evict(tier, own + others, MissReason.EVICTED, now, cause)
            gone = [key for key in keys if self.departed.get(key) is not None]
            self.departed.add(gone, Departure(MissReason.OVER_QUOTA, tier.name, "", now))
        elif own or others:
            reason = MissReason.OVER_QUOTA if own else MissReason.EVICTED
            self.evict(tier, own or others, reason, now, cause)

    def evict(
        self,
        tier: Tier,
        victims: list[int],
        reason: MissReason,
        now: float,
        cause: str,
        *,
        spares: bool = False,
        saving: bool = False,
    ) -> NDArray[np.intp]:
        """Forgets victims that were set aside in a tier; returns the slots they lay in.

        The tier above keeps the `spares`; the slots of blocks that are `saving` are the caller's.
        """
        keys = self.nodes.keys_of(victims)
        self._count_unsaved(tier, victims)
        slots = tier.evict(victims, keys, spares=spares, saving=saving)
        self.counters.blocks_evicted_by_tier[tier.index] += len(victims)
        policy = tier.policy.name if reason is MissReason.EVICTED else ""
        self._gone(tier, victims, keys, slots, Departure(reason, tier.name, policy, now), cause)
        return slots

    def refused_by(self, tier: Tier, nodes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of some blocks that a tier has refused, and that it has not taken since."""
        absent = nodes[tier.slot_of[nodes] == NOWHERE]
        keys = self.nodes.keys_of(absent.tolist())
        refused = [self.departed.refused_by(key) == tier.name for key in keys]
        chosen: NDArray[np.intp] = absent[np.array(refused, dtype=bool)]
        return chosen

    def refuse(self, tier: Tier, nodes: NDArray[np.intp], now: float, cause: str) -> None:
        """Blocks of one tenant are not written into a tier: what lies there is worth more."""
        keys = self.nodes.keys_of(nodes.tolist())
        tier.refuse(nodes, keys, tick=self.tick)
        self.counters.blocks_refused_by_tier[tier.index] += len(keys)
        reason = MissReason.REFUSED
        self.departed.add(keys, Departure(reason, tier.name, tier.policy.name, now))
        self.history.add(now, reason.value, cause, keys, f"by {tier.name}")

    def forget_reclaimed(self, tier: Tier, slots: NDArray[np.intp], now: float) -> None:
        """Takes entries of a stored tier out: the store does not have their blocks any more."""
        here = slots[tier.pool.node[slots] != NOWHERE]
        self.counters.blocks_evicted_by_tier[tier.index] += len(here)
        self.condemn(tier, here, MissReason.EVICTED, now, "reclaimed by the store")

    def condemn(
        self, tier: Tier, slots: NDArray[np.intp], reason: MissReason, now: float, cause: str
    ) -> None:
        """Makes copies unreadable at once; their slots come back when nothing uses them.

        Slots whose block was already taken out are left as they are.
        """
        slots = slots[tier.pool.node[slots] != NOWHERE]
        if not len(slots):
            return
        nodes = tier.pool.node[slots].copy()
        numbers = nodes.tolist()
        keys = self.nodes.keys_of(numbers)
        readable = tier.pool.state[slots] != FILLING
        tier.displace(nodes, evicted=False)
        tier.pool.condemn(slots)
        self.discard_unheld(tier, slots)
        if readable.any():
            policy = "store" if reason is MissReason.EVICTED else ""
            self._gone(tier, numbers, keys, slots, Departure(reason, tier.name, policy, now), cause)
        else:
            self._remove_nodes(numbers, keys, None)

    def discard_unheld(self, tier: Tier, slots: NDArray[np.intp]) -> None:
        """Frees those of the slots that are condemned and that nothing holds."""
        pool = tier.pool
        if not pool.count(SlotState.DOOMED):
            return
        quiet = (pool.state[slots] == DOOMED) & (pool.holders[slots] == 0)
        if np.count_nonzero(quiet):
            pool.discard(slots[quiet])

    def _gone(
        self,
        tier: Tier,
        numbers: list[int],
        keys: list[Key],
        slots: NDArray[np.intp],
        departure: Departure,
        cause: str,
    ) -> None:
        if tier.index == HUB:
            leave_hub(self, numbers, keys)
            self.hub_log.note(keys)
        evicted = departure.reason is MissReason.EVICTED
        refusable = evicted and any(fed.may_refuse for fed in self.fed_by(tier.index))
        announced = self._announced(numbers, keys)
        self._remove_nodes(numbers, keys, departure, refusable=refusable)
        if announced:
            self.kv_events.removed(tier.name, announced)
        self.history.add(departure.at, departure.reason.value, cause, keys, f"from {tier.name}")
        if tier.index == DEVICE:
            return
        self.losses += 1
        if not tier.settings.stored:
            self.effects.append(
                DropBlocks(tier=tier.index, keys=keys, slots=slots.astype(np.int32))
            )

    def _announced(self, numbers: list[int], keys: list[Key]) -> list[Key]:
        """Those of some blocks that readers of KV events know; other weights' were cleared."""
        if not self.nodes.is_mixed:
            return keys
        known = self.nodes.weights[numbers] == self.nodes.weights_now
        return list(compress(keys, known.tolist()))

    def _remove_nodes(
        self,
        numbers: list[int],
        keys: list[Key],
        departure: Departure | None,
        *,
        refusable: bool = False,
    ) -> None:
        """Removes what is known nowhere any more; blocks that were never ready do not depart.

        Of blocks that a tier below may have refused, that is the reason if it has.
        """
        nodes = np.array(numbers, dtype=np.intp)
        copies = self.nodes.copy_count[nodes]
        kept_count = np.count_nonzero(copies)
        if kept_count == len(nodes):
            return
        if kept_count:
            lost = copies == 0
            nodes, keys = nodes[lost], list(compress(keys, lost.tolist()))
        if departure is not None:
            gone = keys
            if refusable:
                gone = [key for key in gone if not self.departed.refused_by(key)]
            self.departed.add(gone, departure)
        self.forget_if_useless(self.nodes.remove_all(nodes, keys)[::-1])

    def forget_if_useless(self, numbers: list[int]) -> None:
        """Removes those of a chain's nodes that nothing needs, deepest first."""
        for node in reversed(numbers):
            # A node further up may have gone together with the one below it.
            if self.nodes.keys[node] is not None:
                self.nodes.remove_if_useless(node)

    def _count_unsaved(self, tier: Tier, victims: list[int]) -> None:
        if tier.saves_late:
            alone = self.nodes.copy_count[victims] == 1
            self.counters.blocks_dropped_unsaved += int(np.count_nonzero(alone))

    # ---------------------------------------------------------------- explaining

    def story_of_node(self, node: int | None) -> tuple[str, ...]:
        """What last happened to a block, or lately where that is not known."""
        key = None if node is None or node == NOWHERE else self.nodes.keys[node]
        story = () if key is None else self.history.of_key(key)
        return story or self.history.lately(_STORY_LENGTH)

    def remember_content(self, content: int, namespace: bytes) -> None:
        """The first block of a prompt is known in a namespace."""
        if not content:
            return
        known = self.contents.setdefault(content, set())
        if len(known) < _NAMESPACE_LIMIT:
            known.add(namespace)
        if len(self.contents) > _CONTENT_LIMIT:
            del self.contents[next(iter(self.contents))]

    def aim(self, lease: LeaseRecord, frontier: Key | None) -> None:
        """Notes which block a lease will publish next."""
        if lease.frontier is not None:
            left = self.frontiers[lease.frontier] - 1
            if left:
                self.frontiers[lease.frontier] = left
            else:
                del self.frontiers[lease.frontier]
        lease.frontier = frontier
        if frontier is not None:
            self.frontiers[frontier] = self.frontiers.get(frontier, 0) + 1
