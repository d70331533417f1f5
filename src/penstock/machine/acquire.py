"""Leases, from the first match of a prompt to the release of its last block; some wait for a store.

`acquire` is all or nothing: the matched blocks are held first, so that making room cannot
take them, and if room cannot be had everything is as it was.

    acquire ──search_until──→ LOADING ─┬─ Searched, or the time is over: matched once more, and
                                       │  what was found now is brought to the device
                                       └─ released, lost: nobody waits for the answer any more

The blocks that were found at once are loaded meanwhile. The lease has its room already: what is
found later goes into the slots in which it would have been computed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.explain import Miss, MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Operation, Purpose
from penstock.cache.settings import DEVICE, HUB
from penstock.cache.states import FILLING, LEAVING, READY, LeaseMove
from penstock.errors import CapacityError, NeverFitsError, UnavailableError
from penstock.machine import copies, leases, writes
from penstock.machine.books import LeaseRecord, require_count, require_sound_wishes
from penstock.machine.effects import Granted
from penstock.machine.gate import worth_loading
from penstock.machine.matching import Finding, count_cached, explain, explain_first, find
from penstock.vocabulary.keys import LeaseId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.tier import Room, Tier
    from penstock.machine.books import Books
    from penstock.machine.events import Acquire, Searched
    from penstock.vocabulary.keys import Key


_ONE = np.int32(1)
"""Of the counts' own type: adding it takes a third of the time that an int takes."""


def acquire(books: Books, event: Acquire, now: float) -> None:
    """Matches a prompt over all tiers, pins what was found, and takes room for the rest."""
    block_tokens, device = books.settings.block_tokens, books.device
    _check_acquire(books, event)
    block_count = -(-event.token_count // block_tokens)
    if block_count > device.pool.slot_count:
        books.counters.requests_refused += 1
        raise NeverFitsError(tier=device.name, wanted=block_count, available=device.pool.slot_count)
    tenant = books.tenant(event.tenant)
    _refuse_if_full(books, event, block_count)
    found, miss, recomputed = match(books, event, now)
    here = found.source == DEVICE
    held = device.slot_of[found.nodes[here]]
    wanted = block_count - len(held)
    device.pool.hold(held)
    room = device.plan_room(wanted, tenant)
    if room.slot_count < wanted:
        device.put_back(room.victims)
        device.pool.unhold(held)
        device.offer_slots(held)
        books.counters.requests_refused += 1
        raise CapacityError(tier=device.name, wanted=wanted, available=room.slot_count)
    slots, saves = _take_slots(books, room, wanted, found, event, now)
    device.pool.hold(slots)
    table = np.empty(block_count, dtype=np.intp)
    matched = len(found.nodes)
    table[:matched][here] = held
    arriving = (~here).nonzero()[0]
    table[arriving], table[matched:] = slots[: len(arriving)], slots[len(arriving) :]
    lease = _new_lease(books, event, tenant, table, matched, miss)
    for operation in saves:
        operation.waiters.add(lease.id)
        lease.waiting.add(operation.id)
    bring(books, lease, found, found, held, event, now)
    if event.search_until is not None and _may_be_elsewhere(books, event, matched, miss):
        books.searches[lease.id] = event
    if lease.waiting or lease.id in books.searches:
        lease.move(LeaseMove.LOAD)
    if event.store and matched < len(event.keys):
        books.aim(lease, event.keys[matched])
    books.counters.tokens_computed_instead += recomputed * block_tokens
    _account(books, lease, found, miss, event, now)


def _room_to_wait_for(wanted: int, found: Finding, event: Acquire) -> int:
    """How many of the slots that a request wants may still be read by saves of what lay there."""
    if event.deadline is not None or event.search_until is not None:
        return 0  # It does not wait long, or copies will write where it would compute.
    if np.count_nonzero(found.source > HUB):
        return 0  # It needs the room in the hub for itself.
    return wanted - int(np.count_nonzero(found.source != DEVICE))


def _take_slots(
    books: Books, room: Room, wanted: int, found: Finding, event: Acquire, now: float
) -> tuple[NDArray[np.intp], list[Operation]]:
    """Evicts what was planned, and takes the slots; those of blocks that are still saved come last.

    There are no more of these than blocks to be computed, which wait until they are saved.
    """
    device, hub = books.device, books.hub
    most = 0
    if hub is not None and hub.above is not None:
        most = _room_to_wait_for(wanted, found, event)
    if most <= 0:
        if room.victims:
            books.evict_planned(device, room, now, event.request)
        return device.pool.take(wanted), []
    assert hub is not None
    # What it has found is not evicted for what it evicts.
    mine = hub.slot_of[found.nodes]
    mine = mine[mine != NOWHERE]
    hub.pool.hold(mine)
    saved, saves = writes.save_evicted(books, room.victims, most, now, event.request)
    hub.offer_slots(hub.pool.unhold(mine))
    gone = set(saved)
    own = [node for node in room.victims[: room.own_count] if node not in gone]
    others = [node for node in room.victims[room.own_count :] if node not in gone]
    late = found.nodes[:0]
    if saved:
        late = books.evict(device, saved, MissReason.EVICTED, now, event.request, saving=True)
    books.evict_planned(
        device, room._replace(victims=own + others, own_count=len(own)), now, event.request
    )
    return np.concatenate((device.pool.take(wanted - len(late)), late)), saves


def _new_lease(
    books: Books, event: Acquire, tenant: int, table: NDArray[np.intp], matched: int, miss: Miss
) -> LeaseRecord:
    lease = LeaseRecord(
        id=LeaseId(books.lease_next),
        request=event.request,
        tenant=tenant,
        era=books.era,
        table=table,
        matched_blocks=matched,
        token_count=matched * books.settings.block_tokens,
        published_blocks=matched,
        tail_key=event.keys[matched - 1] if matched else None,
        frontier=None,
        store=event.store,
        priority=event.priority,
        ttl_s=event.ttl_s,
        keep_blocks=event.keep_blocks,
        namespace=event.namespace,
        content=event.content,
        miss=miss,
    )
    books.lease_next += 1
    books.leases[lease.id] = lease
    return lease


def _check_acquire(books: Books, event: Acquire) -> None:
    block_tokens = books.settings.block_tokens
    if type(event.token_count) is not int or event.token_count < 1:
        raise ValueError(f"token_count is {event.token_count}: a request has at least one token")
    if len(event.keys) != event.token_count // block_tokens:
        raise ValueError(
            f"{len(event.keys)} keys for {event.token_count} tokens: "
            f"one for each full block of {block_tokens} tokens is needed"
        )
    require_sound_wishes(priority=event.priority, ttl_s=event.ttl_s, deadline=event.deadline)
    if event.search_until is not None and not math.isfinite(event.search_until):
        raise ValueError(f"search_until is {event.search_until}, must be a time")
    if event.keep_blocks is not None:
        require_count("keep_blocks", event.keep_blocks)
    if not books.healthy:
        lost = ", ".join(map(str, sorted(books.lost_ranks)))
        raise UnavailableError(f"rank {lost} is lost: no block can be filled on every rank")


def _refuse_if_full(books: Books, event: Acquire, block_count: int) -> None:
    """Refuses what cannot be, were every slot free that nothing holds.

    An engine that is full asks again and again: to plan an eviction each time, and to put it back,
    would take far longer than to count.
    """
    device = books.device
    unheld = device.pool.slot_count - device.pool.held_count
    if block_count <= unheld:
        return
    nodes = books.nodes.match(_useful(books, event))
    slots = device.slot_of[nodes]
    slots = slots[slots != NOWHERE]
    shared = int(np.count_nonzero(device.pool.holders[slots]))
    if block_count <= unheld + shared:
        return
    books.counters.requests_refused += 1
    raise CapacityError(
        tier=device.name,
        wanted=block_count - len(slots),
        available=unheld - (len(slots) - shared),
    )


def _useful(books: Books, event: Acquire) -> Sequence[Key]:
    """The keys of blocks that may be matched."""
    # At least one token is left to compute, in a block of the request's own.
    full = (event.token_count - 1) // books.settings.block_tokens
    return event.keys[:full] if event.reuse else ()


def _may_be_elsewhere(books: Books, event: Acquire, matched: int, miss: Miss) -> bool:
    """Whether a store may have more blocks than were found, and they would be loaded."""
    known = miss.reason in (MissReason.NO_ROOM, MissReason.RECOMPUTE)
    return event.load and not known and matched < len(_useful(books, event))


def match(books: Books, event: Acquire, now: float) -> tuple[Finding, Miss, int]:
    """What a request gets, why not more, and how many blocks are quicker to compute."""
    useful = _useful(books, event)
    found = find(books, useful, deepest=len(books.tiers) if event.load else DEVICE)
    miss = _why(books, event, useful, len(found.nodes))
    found, miss = _fit_into_hub(books, found, miss)
    return _pass_gate(books, found, miss, now)


def _why(books: Books, event: Acquire, useful: Sequence[Key], found: int) -> Miss:
    if not event.reuse:
        return Miss(reason=MissReason.OPTED_OUT)
    miss = explain(books, useful, found)
    return explain_first(books, miss, event.content, event.namespace)


def _fit_into_hub(books: Books, found: Finding, miss: Miss) -> tuple[Finding, Miss]:
    """Blocks below the hub travel through it; without room there, the match ends earlier."""
    below = (found.source > HUB).nonzero()[0]
    if not len(below):
        return found, miss
    hub = books.tier(HUB)
    # Everything of this prompt that lies in the hub stays there while room is made.
    mine = hub.slot_of[found.nodes]
    mine = mine[mine != NOWHERE]
    hub.pool.hold(mine)
    room = hub.plan_room(len(below), None)
    hub.put_back(room.victims)
    hub.pool.unhold(mine)
    hub.offer_slots(mine)
    if room.slot_count >= len(below):
        return found, miss
    length = int(below[room.slot_count])
    cut = Finding(found.nodes[:length], found.source[:length])
    return cut, Miss(reason=MissReason.NO_ROOM, block=length)


def _pass_gate(books: Books, found: Finding, miss: Miss, now: float) -> tuple[Finding, Miss, int]:
    """Blocks that are quicker to compute than to load end the match; returns how many."""
    length = worth_loading(books, found.source, now)
    left = len(found.nodes) - length
    if not left:
        return found, miss, 0
    cut = Finding(found.nodes[:length], found.source[:length])
    return cut, Miss(reason=MissReason.RECOMPUTE, block=length), left


def _use(books: Books, found: Finding, event: Acquire, now: float) -> None:
    """Counts the hit for every block and every tier it was found in."""
    nodes = found.nodes
    if not len(nodes):
        return
    books.nodes.hits[nodes] += _ONE
    books.revive(nodes)
    for tier in books.owned_tiers():
        here = nodes[tier.slot_of[nodes] != NOWHERE]
        if len(here):
            tier.touch(here, tick=books.tick)
    if event.priority or event.ttl_s is not None:
        until = None if event.ttl_s is None else now + event.ttl_s
        books.hint(nodes, event.priority, until)


def _rejoin(tier: Tier, nodes: NDArray[np.intp], slots: NDArray[np.intp]) -> None:
    """A block on its way out is matched again at once; its copy goes on, it stays."""
    if not tier.pool.leaving_count:
        return
    leaving = tier.pool.state[slots] == LEAVING
    if leaving.any():
        tier.keep(nodes[leaving])


def _bring(
    books: Books,
    lease: LeaseRecord,
    found: Finding,
    arriving: NDArray[np.intp],
    event: Acquire,
    now: float,
) -> None:
    """Starts the copies of what is not on the device yet."""
    if not len(arriving):
        return
    device = books.device
    nodes = found.nodes[arriving]
    targets = lease.table[arriving]
    device.place(nodes, targets, tick=books.tick)
    deadline = now + books.settings.operation_timeout_s
    if event.deadline is not None:
        deadline = event.deadline
    for index in sorted(set(found.source[arriving].tolist())):
        chosen = found.source[arriving] == index
        source = books.tier(index)
        if index == HUB:
            started = _load_from_hub(
                books, source, nodes[chosen], targets[chosen], deadline, lease.request
            )
        else:
            started = stage(
                books, source, nodes[chosen], targets[chosen], deadline, lease.request, now
            )
        copies.wait_for(books, started, {lease.id})


def bring(
    books: Books,
    lease: LeaseRecord,
    found: Finding,
    rest: Finding,
    held: NDArray[np.intp],
    event: Acquire,
    now: float,
) -> None:
    """Brings blocks to the device that a lease has got room for: the `rest`, the last of a finding.

    Those that are on the device, or on their way, are `held`.
    """
    _use(books, rest, event, now)
    _rejoin(books.device, rest.nodes[rest.source == DEVICE], held)
    first = len(found.nodes) - len(rest.nodes)
    arriving = first + (rest.source != DEVICE).nonzero()[0]
    _bring(books, lease, found, arriving, event, now)
    _share_loads(books, lease, held)


def _load_from_hub(
    books: Books,
    hub: Tier,
    nodes: NDArray[np.intp],
    targets: NDArray[np.intp],
    deadline: float,
    cause: str,
) -> list[Operation]:
    """Loads what is in the hub; what is still on its way there is passed on when it arrives."""
    slots = hub.slot_of[nodes]
    _rejoin(hub, nodes, slots)
    ready = hub.pool.state[slots] == READY
    started = copies.start(
        books,
        Purpose.LOAD,
        source=HUB,
        target=DEVICE,
        keys=books.nodes.keys_of(nodes[ready].tolist()),
        source_slots=slots[ready],
        target_slots=targets[ready],
        deadline=deadline,
        cause=cause,
    )
    onward = dict(zip(slots[~ready].tolist(), targets[~ready].tolist(), strict=True))
    return started + (copies.pass_on(books, onward) if onward else [])


def stage(
    books: Books,
    source: Tier,
    nodes: NDArray[np.intp],
    onward: NDArray[np.intp] | None,
    deadline: float,
    cause: str,
    now: float,
) -> list[Operation]:
    """Brings blocks from below into the hub; the caller knows that there is room."""
    hub = books.tier(HUB)
    source_slots = source.slot_of[nodes]
    source.pool.hold(source_slots)
    parents = books.nodes.parent[nodes]
    mine = hub.slot_of[np.concatenate((nodes, parents[parents != NOWHERE]))]
    mine = np.unique(mine[mine != NOWHERE])
    hub.pool.hold(mine)
    books.make_room(hub, len(nodes), None, now, cause)
    slots = hub.pool.take(len(nodes))
    hub.pool.unhold(mine)
    hub.offer_slots(mine)
    hub.place(nodes, slots, tick=books.tick)
    started = copies.start(
        books,
        Purpose.STAGE,
        source=source.index,
        target=HUB,
        keys=books.nodes.keys_of(nodes.tolist()),
        source_slots=source_slots,
        target_slots=slots,
        deadline=deadline,
        cause=cause,
        onward=onward,
    )
    source.pool.unhold(source_slots)
    return started


def _share_loads(books: Books, lease: LeaseRecord, held: NDArray[np.intp]) -> None:
    """Waits for copies that other requests started into slots of this lease."""
    if not books.ledger.operations:
        return
    pool = books.device.pool
    filling = held[pool.state[held] == FILLING]
    if not len(filling):
        return
    bringing = [
        operation
        for operation in books.ledger.running()
        if operation.purpose in (Purpose.LOAD, Purpose.STAGE)
    ]
    copies.wait_for(books, bringing, {lease.id})


def _account(
    books: Books, lease: LeaseRecord, found: Finding, miss: Miss, event: Acquire, now: float
) -> None:
    counters = books.counters
    counters.requests += 1
    counters.tokens_asked += event.token_count
    lease.cached_by_tier = tuple(count_cached(books, found))
    searching = lease.id in books.searches
    if not searching:
        counters.misses[miss.reason] += 1
    keys = event.keys[: len(found.nodes)]
    books.history.add(now, "acquired", event.request, keys, f"lease={lease.id} miss={miss}")
    books.effects.append(
        Granted(
            lease=lease.id,
            table=lease.table,
            state=lease.state,
            cached_tokens=lease.token_count,
            cached_by_tier=lease.cached_by_tier,
            miss=miss,
            searching=searching,
        )
    )
    writes.after_hit(books, found.nodes, now, event.request)


def searched(books: Books, event: Searched, now: float) -> None:
    """The answer has come; what a store has was noted before."""
    lease = books.leases.get(event.lease)
    if lease is not None and lease.id in books.searches:
        _end(books, lease, now)


def expire(books: Books, now: float) -> None:
    """Leases whose time is over wait no longer for an answer."""
    for lease_id, wanted in list(books.searches.items()):
        assert wanted.search_until is not None
        if wanted.search_until <= now:
            _end(books, books.leases[lease_id], now)


def next_end(books: Books) -> float | None:
    """When the first search is over, whatever a store says."""
    times = (wanted.search_until for wanted in books.searches.values())
    return min((time for time in times if time is not None), default=None)


def _end(books: Books, lease: LeaseRecord, now: float) -> None:
    wanted = books.searches[lease.id]
    # What it would have computed next must not look as if another one computed it.
    books.aim(lease, None)
    if wanted.deadline is None or now < wanted.deadline:
        _match_more(books, lease, wanted, now)
    matched = lease.matched_blocks
    if wanted.store and matched < len(wanted.keys):
        books.aim(lease, wanted.keys[matched])
    leases.search_over(books, lease)
    if not lease.waiting:
        lease.move(LeaseMove.ARRIVE)
    leases.send_change(books, lease)


def _match_more(books: Books, lease: LeaseRecord, wanted: Acquire, now: float) -> None:
    """Matches the prompt again, and brings what was found since to the device."""
    first = lease.matched_blocks
    found, miss, recomputed = match(books, wanted, now)
    lease.miss = miss
    books.counters.tokens_computed_instead += recomputed * books.settings.block_tokens
    matched = len(found.nodes)
    if matched <= first:
        return
    rest = Finding(found.nodes[first:], found.source[first:])
    # What others have brought to the device, or computed there, since it was asked for.
    here = rest.source == DEVICE
    device = books.device
    held = device.slot_of[rest.nodes[here]]
    device.pool.hold(held)
    places = first + here.nonzero()[0]
    own = lease.table[places]
    lease.table = lease.table.copy()
    lease.table[places] = held
    leases.drop_slots(books, device, own)
    lease.matched_blocks = lease.published_blocks = matched
    lease.token_count = matched * books.settings.block_tokens
    lease.tail_key = wanted.keys[matched - 1]
    bring(books, lease, found, rest, held, wanted, now)
    more = count_cached(books, rest)
    lease.cached_by_tier = tuple(map(sum, zip(lease.cached_by_tier, more, strict=True)))
    keys = wanted.keys[first:matched]
    books.history.add(now, "found by search", lease.request, keys, f"lease={lease.id}")
    writes.after_hit(books, rest.nodes, now, lease.request)
