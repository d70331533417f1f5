"""Blocks on their way down: before their slot is needed, or later, if the tier was off.

| policy          | a block is written into a tier                                           |
|-----------------|--------------------------------------------------------------------------|
| `write_through` | when it becomes ready in the tier that feeds it                           |
| `selective`     | when it was hit often enough                                              |
| `write_back`    | when the feeding tier falls under its low watermark                       |
| `exclusive`     | when it becomes ready above and there is free room, or shortly before the |
|                 | feeding tier evicts it                                                    |

Eviction on the hot path only changes metadata: it never waits for a copy.

A store process starts after its engine, and may be away for a while. What its tier would have been
given meanwhile, by its policy, is written from the hub, some blocks at a time: neither a step of
the engine nor what is computed now waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.explain import Departure, MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Operation, Outcome, Purpose
from penstock.cache.settings import DEVICE, HUB, WriteKind
from penstock.cache.states import LEAVING, READY
from penstock.machine import copies, stored
from penstock.machine.books import FIRST_TO_LEAVE, miss

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cache.eviction import Judge
    from penstock.cache.tier import Room, Tier
    from penstock.machine.books import Books


def after_fill(books: Books, feeder: int, nodes: NDArray[np.intp], now: float, cause: str) -> None:
    """Blocks became ready in a tier: writes them through to the tiers it feeds."""
    for tier in books.fed_by(feeder):
        wanted = wanted_in(books, tier, nodes)
        if tier.settings.stored and not tier.on:
            miss(books, tier, wanted)
        elif tier.settings.write.kind is WriteKind.EXCLUSIVE:
            _save_early(books, feeder, tier, nodes, now, cause)
        elif tier.settings.write.kind is WriteKind.WRITE_THROUGH:
            save(books, feeder, tier, _with_those_before(books, tier, nodes), now, cause)
        else:
            save(books, feeder, tier, wanted, now, cause)


def _save_early(
    books: Books, feeder: int, tier: Tier, nodes: NDArray[np.intp], now: float, cause: str
) -> None:
    """Saves blocks that will not leave soon, as many as there is free room for.

    All of them, if a tier further down gets every block at once: they pass through this one.
    """
    # Those that were here before, and have become spares by coming to the tier above.
    tier.offer(nodes[tier.slot_of[nodes] != NOWHERE])
    absent = nodes[tier.slot_of[nodes] == NOWHERE]
    passing = any(
        fed.settings.write.kind is WriteKind.WRITE_THROUGH for fed in books.fed_by(tier.index)
    )
    if not passing:
        free = 0 if tier.reclaims else tier.pool.free_count
        absent = absent[:free]
        if len(absent) and tier.over_quota(int(books.nodes.tenant[absent[0]]), len(absent)):
            return
    save(books, feeder, tier, absent, now, cause)


def wanted_in(books: Books, tier: Tier, nodes: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those of some blocks that a tier is given as soon as they are above it."""
    write = tier.settings.write
    if write.kind is WriteKind.SELECTIVE:
        return nodes[books.nodes.hits[nodes] >= write.hits]
    return nodes if write.kind is WriteKind.WRITE_THROUGH else nodes[:0]


def _with_those_before(books: Books, tier: Tier, nodes: NDArray[np.intp]) -> NDArray[np.intp]:
    """The blocks and what the tier lost of those before the first: it is written once more.

    A block in a lower tier is of no use there without the blocks before it.
    """
    if not len(nodes):
        return nodes
    before = books.nodes.path_to(int(books.nodes.parent[nodes[0]]))
    before = before[tier.slot_of[before] == NOWHERE]
    if not len(before):
        return nodes
    return np.concatenate((before[~np.isin(before, nodes)], nodes))


def after_hit(books: Books, nodes: NDArray[np.intp], now: float, cause: str) -> None:
    """Blocks were hit: some may have earned a copy further down."""
    for feeder in books.owned_tiers():
        for tier in books.fed_by(feeder.index):
            write = tier.settings.write
            if write.kind is WriteKind.SELECTIVE:
                often = wanted_in(books, tier, nodes)
                if tier.settings.stored and not tier.on:
                    miss(books, tier, often)
                else:
                    save(books, feeder.index, tier, often, now, cause)
                    _pass_through(books, feeder, often[tier.slot_of[often] == NOWHERE], now, cause)
            elif write.kind is WriteKind.WRITE_THROUGH and tier.may_refuse:
                # A block that was hit is worth more than when it was refused.
                save(books, feeder.index, tier, books.refused_by(tier, nodes), now, cause)


def _pass_through(books: Books, hub: Tier, nodes: NDArray[np.intp], now: float, cause: str) -> None:
    """Blocks have earned a copy below the hub, which need not have them while the device has."""
    if hub.above is not None:
        save(books, hub.above.index, hub, nodes, now, cause)


def after_operation(books: Books, operation: Operation, now: float) -> None:
    """Blocks that arrived below the device may go further down."""
    if operation.target == DEVICE or operation.outcome not in (Outcome.DONE, Outcome.FAILED):
        return
    tier = books.tier(operation.target)
    if not books.fed_by(tier.index):
        return
    slots = operation.target_slots
    nodes = tier.pool.node[slots[tier.pool.state[slots] == READY]]
    after_fill(books, tier.index, nodes[nodes != NOWHERE], now, operation.cause)


def save(
    books: Books,
    feeder: int,
    tier: Tier,
    nodes: NDArray[np.intp],
    now: float,
    cause: str,
    *,
    purpose: Purpose = Purpose.SAVE,
    needed: bool = False,
    started: list[Operation] | None = None,
) -> NDArray[np.intp]:
    """Writes blocks from a tier into one that it feeds, as many as there is room for.

    Blocks that lie there already, or on their way, are left alone. Those that a request will
    come back for, which are `needed`, are never refused. Returns the blocks that are being written;
    the copies are added to those `started`.
    """
    source = books.tier(feeder)
    if not (tier.on and source.on and books.healthy) or not len(nodes):
        return nodes[:0]
    slots = source.slot_of[nodes]
    state = source.pool.state[slots]
    wanted = (state == READY) | (state == LEAVING)
    wanted &= (tier.slot_of[nodes] == NOWHERE) & (slots != NOWHERE)
    nodes = stored.admit_saves(books, tier, nodes[wanted])
    nodes, slots = take_room(books, tier, nodes, now, cause, needed=needed)
    if len(nodes):
        operations = copies.start(
            books,
            purpose,
            source=feeder,
            target=tier.index,
            keys=books.nodes.keys_of(nodes.tolist()),
            source_slots=source.slot_of[nodes],
            target_slots=slots,
            deadline=now + books.settings.operation_timeout_s,
            cause=cause,
        )
        if started is not None:
            started += operations
    return nodes


def take_room(
    books: Books,
    tier: Tier,
    nodes: NDArray[np.intp],
    now: float,
    cause: str,
    *,
    beside: NDArray[np.intp] | None = None,
    priority: int = 0,
    needed: bool = False,
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Takes slots of a lower tier for blocks: of every chain as many leading ones as it can.

    A tenant over its quota gets no more room here than its own blocks leave. Blocks before
    the given ones, and those `beside` them, are not evicted for it. Neither are blocks that are
    worth more than those that would take their place: unless these are `needed`, they are refused,
    with all that follow. A `priority` other than 0 counts for all of them where it is higher.
    """
    chains = _chains(books, nodes)
    near = _near(books, tier, chains, beside)
    tier.pool.hold(tier.slot_of[near])
    # Counted as if they lay here already, or a block without a copy might be forgotten now.
    bare = nodes[books.nodes.copy_count[nodes] == 0]
    books.nodes.add_copies(bare)
    judges = tier.may_refuse and not needed
    taken: list[NDArray[np.intp]] = []
    slots: list[NDArray[np.intp]] = []
    outside: set[int] = set()
    for chain in chains:
        tenants = books.nodes.tenant[chain]
        refused = books.nodes.parent_view[chain[0]] in outside
        for run in _cut(chain, tenants[1:] != tenants[:-1]):
            count = 0
            judge = None
            if judges and not refused:
                judge = _judge_of(books, tier, run, priority)
                refused = judge is not None and _follows_refused(books, tier, int(run[0]))
            if not refused:
                room = _make_room_below(books, tier, run, now, cause, judge)
                count, refused = room.slot_count, room.refused
                taken.append(run[:count])
                slots.append(tier.pool.take(count))
                tier.place(taken[-1], slots[-1], tick=books.tick)
            if refused:
                outside.update(run[count:].tolist())
                books.refuse(tier, run[count:], now, cause)
            elif count < len(run):
                break  # What follows in this chain could not be reached.
    books.nodes.drop_copies(bare)
    tier.pool.unhold(tier.slot_of[near])
    tier.offer(near)
    chosen = _joined(taken)
    if tier.may_refuse:
        books.departed.discard(books.nodes.keys_of(chosen.tolist()))
    books.counters.saves_refused += len(nodes) - len(chosen) - len(outside)
    return chosen, _joined(slots)


def _near(
    books: Books, tier: Tier, chains: list[NDArray[np.intp]], beside: NDArray[np.intp] | None
) -> NDArray[np.intp]:
    """What is held while room is made, or a block might evict the one it follows."""
    # Only the first blocks of chains follow one that may lie here: the others follow each other.
    before = [books.nodes.parent_view[chain[0]] for chain in chains]
    near = np.array([node for node in before if node != NOWHERE], dtype=np.intp)
    near = near if beside is None else np.concatenate((near, beside))
    return _once_each(near[tier.slot_of[near] != NOWHERE])


def _follows_refused(books: Books, tier: Tier, node: int) -> bool:
    """Whether a full tier has refused the block before: what follows it would be of no use."""
    parent = books.nodes.parent_view[node]
    if parent == NOWHERE or tier.slot_of[parent] != NOWHERE:
        return False
    if tier.pool.free_count > 0 and not tier.reclaims:
        return False
    key = books.nodes.keys[parent]
    return key is not None and books.departed.refused_by(key) == tier.name


def _judge_of(books: Books, tier: Tier, nodes: NDArray[np.intp], priority: int) -> Judge | None:
    """What says which blocks are worth those that would leave for them; `None`: none would."""
    tenant = int(books.nodes.tenant[nodes[0]])
    fits = len(nodes) <= tier.pool.free_count and not tier.over_quota(tenant, len(nodes))
    if fits and not tier.reclaims:
        return None
    own = int(books.nodes.priority[nodes].max())
    keys = books.nodes.keys_of(nodes.tolist())
    return tier.judge_of(keys, priority=max(own, priority) if priority else own)


def _chains(books: Books, nodes: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """The blocks in groups that follow each other one by one."""
    if not len(nodes):
        return []
    return _cut(nodes, books.nodes.parent[nodes[1:]] != nodes[:-1])


def _cut(nodes: NDArray[np.intp], ends: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """The nodes in groups; `ends` says of each but the last whether it ends one."""
    places = (ends.nonzero()[0] + 1).tolist()
    if not places:
        return [nodes]
    return [nodes[first:end] for first, end in pairwise([0, *places, len(nodes)])]


def _joined(parts: list[NDArray[np.intp]]) -> NDArray[np.intp]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.intp)


def _once_each(nodes: NDArray[np.intp]) -> NDArray[np.intp]:
    """The nodes, sorted, each once: `np.unique` without what it does for masked arrays."""
    if len(nodes) < 2:
        return nodes
    ordered = np.sort(nodes)
    first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    once: NDArray[np.intp] = ordered[first]
    return once


def _make_room_below(
    books: Books,
    tier: Tier,
    nodes: NDArray[np.intp],
    now: float,
    cause: str,
    judge: Judge | None,
) -> Room:
    """Makes room for blocks of one tenant, as far as there can be and they are worth it."""
    tenant = int(books.nodes.tenant[nodes[0]])
    over = tier.over_quota(tenant, len(nodes))
    room = tier.plan_room(len(nodes), tenant, strict=True, judge=judge)
    books.evict_planned(tier, room, now, cause)
    if over > room.own_count and not room.refused:
        departure = Departure(MissReason.OVER_QUOTA, tier.name, "", now)
        books.departed.add(books.nodes.keys_of(nodes[room.slot_count :].tolist()), departure)
    return room


def keep_watermark(books: Books, tier: Tier, now: float) -> None:
    """Lets blocks leave a tier until enough slots are free, or soon will be.

    Blocks that a lower tier should get first are written down before they go.
    """
    settings = tier.settings
    free = tier.pool.free_count + tier.pool.leaving_count
    if free >= settings.low_slots or not tier.on:
        return
    below = [
        fed
        for fed in books.fed_by(tier.index)
        if fed.settings.write.kind in (WriteKind.WRITE_BACK, WriteKind.EXCLUSIVE)
        and fed.on
        and books.healthy
    ]
    budget = min(settings.high_slots - free, books.settings.operation_blocks_max)
    going: list[int] = []
    leaving: list[int] = []
    while len(going) + len(leaving) < budget:
        node = tier.pop_victim()
        if node is None:
            break
        if any(fed.slot_of[node] == NOWHERE for fed in below):
            tier.depart_victim(node)
            leaving.append(node)
        else:
            going.append(node)
    if going:
        books.evict(tier, going, MissReason.EVICTED, now, "watermark")
    if leaving:
        _write_back(books, tier, below, leaving, now)


def _write_back(
    books: Books, tier: Tier, below: list[Tier], leaving: list[int], now: float
) -> None:
    """Writes leaving blocks into every tier that should have them; the first frees the slot."""
    nodes = np.array(leaving, dtype=np.intp)
    demoted = nodes[:0]
    for fed in below:
        # Room is given to leading blocks first, and a block is worth most with those before it.
        rest = nodes[~np.isin(nodes, demoted)][::-1]
        taken = save(books, tier.index, fed, rest, now, "watermark", purpose=Purpose.DEMOTE)
        save(books, tier.index, fed, demoted, now, "watermark")
        demoted = np.concatenate((demoted, taken))
    staying = nodes[~np.isin(nodes, demoted)]
    if not len(staying):
        return
    # No room below: what cannot be written down is dropped, or the tier would stay full.
    tier.keep(staying)
    gone = tier.set_aside_leaves(staying.tolist())
    if gone:
        books.evict(tier, gone, MissReason.EVICTED, now, "watermark")
    tier.offer(staying)


BURSTS = 2
"""What leaves next is saved ahead of the room that so many requests take, on average."""
ZONE_SHARE = 48
"""But it is at most one in so many slots of both tiers: a block that is kept twice has the room of
another. A request that takes more waits until it is saved."""


@dataclass(slots=True, eq=False)
class Zone:
    """What a tier evicts next: these blocks have a copy in the tier below it, or get one.

    It is looked at anew when a fifth of it was evicted, not with every block.
    """

    above: Tier
    tier: Tier
    """The tier below."""
    burst: float = 0.0
    """How many slots one event takes."""
    margin: int = 0
    """How many slots were free or in the zone when it was looked at."""
    taken: int = 0
    """How many had ever been taken then."""
    seen: int = 0
    """And after the last event."""
    held: int = 0
    """How many were held then, if too few others were left."""


def zones_of(books: Books) -> list[Zone]:
    """One for each tier that is given blocks shortly before they leave."""
    return [
        Zone(above, tier)
        for above in books.owned_tiers()
        for tier in books.fed_by(above.index)
        if tier.settings.write.kind is WriteKind.EXCLUSIVE
    ]


def save_leaving(books: Books, zones: list[Zone], now: float) -> None:
    """Saves what tiers will evict next, ahead of time: no request waits for it."""
    for zone in zones:
        pool = zone.above.pool
        burst = pool.taken_count - zone.seen
        if burst:
            zone.seen = pool.taken_count
            # That of an average slot: while requests grow by a block each, most take one.
            zone.burst += (burst - zone.burst) * min(1.0, burst / pool.slot_count)
        if not _is_usable(books, zone):
            zone.margin = zone.held = 0
            continue
        most = -(-(pool.slot_count + zone.tier.pool.slot_count) // ZONE_SHARE)
        wanted = min(int(BURSTS * zone.burst), most, pool.slot_count)
        left = zone.margin - (pool.taken_count - zone.taken)
        # With quotas, who asks decides what leaves; and what was held may be the next to leave.
        others = burst > 0 and zone.above.quota_arrays is not None
        if left < wanted or others or pool.held_count < zone.held:
            _save_zone(books, zone, wanted + wanted // 4, now)


def _is_usable(books: Books, zone: Zone) -> bool:
    return zone.above.on and zone.tier.on and books.healthy


def _save_zone(books: Books, zone: Zone, wanted: int, now: float) -> None:
    """Sees to it that so many slots are free, or have blocks that leave next and are saved."""
    above, tier = zone.above, zone.tier
    free = above.pool.free_count + above.pool.leaving_count
    leaving = above.next_to_leave(wanted - free, above.asked_by)
    zone.taken = above.pool.taken_count
    zone.margin = free + len(leaving)
    zone.held = above.pool.held_count if zone.margin < wanted else 0
    if not len(leaving):
        return
    absent = _unsaved(books, above, tier, leaving)
    # A block is worth most with those before it: leading ones get room first.
    saved = save(books, above.index, tier, absent[::-1], now, "about to leave")
    tier.keep_for_above(saved)


def _unsaved(books: Books, above: Tier, tier: Tier, leaving: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those of some blocks that should get a copy before they leave; the others' are no spares."""
    tier.keep_for_above(leaving)
    absent = leaving[tier.slot_of[leaving] == NOWHERE]
    absent = absent[above.priority[absent] != FIRST_TO_LEAVE]
    refused = books.refused_by(tier, absent) if tier.may_refuse else absent[:0]
    wanted: NDArray[np.intp] = absent[~np.isin(absent, refused)]
    return wanted


def save_evicted(
    books: Books, victims: list[int], most: int, now: float, cause: str
) -> tuple[list[int], list[Operation]]:
    """Saves up to `most` victims that the device is about to evict, of which there is no copy.

    Returns them, and the copies: until these have ended, nothing else may be written there.
    """
    hub, started = books.hub, list[Operation]()
    if hub is None or hub.above is None or most <= 0:
        return [], started
    absent = _unsaved(books, hub.above, hub, np.array(victims, dtype=np.intp))
    # Those that leave last are worth most.
    saved = save(books, DEVICE, hub, absent[::-1][:most], now, cause, started=started)
    return saved.tolist(), started


BLOCKS_AT_ONCE = 64
"""So many are ordered by one event: a fraction of a millisecond of the engine's step."""
LOOKED_AT_ONCE = 1024
"""So many are looked at by one event; those that the tier turns out to have cost little."""
SHARE = 2
"""They take one in so many of the places for saves: the others are for what is computed now."""
CAUSE = "write behind"


def go_on_everywhere(books: Books, now: float) -> None:
    """A step of the engine: time to write some more."""
    for index, backlog in books.backlogs.items():
        if backlog.due:
            go_on(books, books.tier(index), now)


def go_on(books: Books, tier: Tier, now: float) -> None:
    """Writes some of what a tier missed, if there are places for it."""
    due = books.backlogs[tier.index].due
    if not due or not _is_possible(books, tier):
        return
    under_way = books.rates.hops[HUB, tier.index].queued
    most = max(1, stored.saves_max(books, books.tier(HUB).pool.slot_count) // SHARE)
    wanted = min(BLOCKS_AT_ONCE, most - under_way)
    looked_at = list(islice(due, LOOKED_AT_ONCE if wanted > 0 else 0))
    chosen: list[int] = []
    for place, key in enumerate(looked_at, start=1):
        del due[key]
        node = books.nodes.get(key)
        if node != NOWHERE and tier.slot_of[node] == NOWHERE:
            chosen.append(node)
        if len(chosen) == wanted or place == len(looked_at):
            nodes = np.array(chosen, dtype=np.intp)
            if len(save(books, HUB, tier, nodes, now, CAUSE)):
                return
            chosen = []  # There was no room for them; perhaps there is for others.


def is_overdue(books: Books) -> bool:
    """Whether there is something to write, and no end of a copy will remind us of it."""
    return any(
        backlog.due
        and not books.rates.hops[HUB, index].queued
        and _is_possible(books, books.tier(index))
        for index, backlog in books.backlogs.items()
    )


def _is_possible(books: Books, tier: Tier) -> bool:
    return tier.on and books.tier(HUB).on and books.healthy


def write_missed_after_operation(books: Books, operation: Operation, now: float) -> None:
    """A save into a stored tier has ended: the next may begin; one that failed waits its turn."""
    backlog = books.backlogs.get(operation.target)
    if backlog is None or operation.purpose is not Purpose.SAVE:
        return
    tier = books.tier(operation.target)
    if operation.outcome in (Outcome.FAILED, Outcome.EXPIRED):
        keys = operation.keys
        if not operation.failure:
            keys = [keys[position] for position in sorted(operation.faults)]
        known = [node for node in books.nodes.get_all(keys) if node != NOWHERE]
        miss(books, tier, wanted_in(books, tier, np.array(known, dtype=np.intp)))
    if operation.outcome is not Outcome.CANCELLED:
        go_on(books, tier, now)
