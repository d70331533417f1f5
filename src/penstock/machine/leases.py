"""Leases after they were granted: grow, fork, commit, pin, release, and blocks that do not arrive.

Fork: every filled block is shared. The unfinished one is copied when one of them is about to write
to it, never before.

Commit: full blocks become matchable, each content once. Two requests may compute the same block
at the same time: the first to commit publishes its copy, the other keeps its own, unpublished,
until it ends. So a block table never changes under a step that is in flight.

Release: a request whose blocks could not be loaded computes them instead, in slots of its own.
Only if there are none is its lease lost: it is then released and acquired again.

PinBlocks: it is on keys, not on copies. A pinned block that is lost, or not computed yet, is pinned
again when it comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.explain import Miss, MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import DEVICE
from penstock.cache.states import (
    FILLING,
    LEAVING,
    LeaseMove,
    LeaseState,
    OperationMove,
    OperationState,
)
from penstock.errors import CapacityError, LeaseError, NeverFitsError, counted
from penstock.machine import copies, writes
from penstock.machine.books import LeaseRecord
from penstock.machine.effects import Granted, Grown, LeaseChanged, Pinned
from penstock.vocabulary.keys import KEY_BYTES, LeaseId, PinId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.operations import Operation
    from penstock.cache.tier import Tier
    from penstock.machine.books import Books
    from penstock.machine.events import Commit, Fork, Grow, PinBlocks, UnpinBlocks
    from penstock.vocabulary.keys import Key, OperationId


NAMELESS = bytes(KEY_BYTES)
"""In place of the key that an unfinished block does not have yet: as long, so that it travels."""


def grow(books: Books, event: Grow, now: float) -> None:
    """Takes room for more tokens; an unfinished block shared with a fork is duplicated."""
    lease = _running(books, event.lease, "grow")
    if type(event.token_count) is not int or event.token_count < 0:
        raise ValueError(f"token_count is {event.token_count!r}, must be an int of at least 0")
    block_tokens = books.settings.block_tokens
    device = books.device
    block_count = -(-event.token_count // block_tokens)
    if block_count > device.pool.slot_count:
        raise NeverFitsError(tier=device.name, wanted=block_count, available=device.pool.slot_count)
    more = max(0, block_count - len(lease.table))
    tail = lease.token_count // block_tokens
    shared = event.token_count > lease.token_count and shares_tail(books, lease)
    wanted = more + shared
    available = books.make_room(device, wanted, lease.tenant, now, lease.request)
    if available < wanted:
        raise CapacityError(tier=device.name, wanted=wanted, available=available)
    slots = device.pool.take(wanted)
    device.pool.hold(slots)
    if shared:
        _duplicate(books, lease, tail, slots[:1], now)
        slots = slots[1:]
    if len(slots):
        lease.append(slots)
    books.effects.append(Grown(lease=lease.id, table=lease.table, state=lease.state))


def shares_tail(books: Books, lease: LeaseRecord) -> bool:
    """Whether another lease has the same unfinished block, or a copy of it is being made.

    Neither may write to it then: a copy made meanwhile might be torn.
    """
    tail, rest = divmod(lease.token_count, books.settings.block_tokens)
    if not rest or books.device.pool.holders[lease.table[tail]] < 2:
        return False
    slot = lease.table[tail]
    if any(other is not lease and slot in other.table for other in books.leases.values()):
        return True
    return any(
        operation.purpose is Purpose.DUPLICATE and operation.source_slots[0] == slot
        for operation in books.ledger.operations.values()
    )


def _duplicate(
    books: Books, lease: LeaseRecord, tail: int, target: NDArray[np.intp], now: float
) -> None:
    """Copy on write: the request gets the unfinished block for itself."""
    source = lease.table[tail : tail + 1].copy()
    lease.table = lease.table.copy()
    lease.table[tail] = target[0]
    started = copies.start(
        books,
        Purpose.DUPLICATE,
        source=DEVICE,
        target=DEVICE,
        keys=[NAMELESS],
        source_slots=source,
        target_slots=target,
        deadline=now + books.settings.operation_timeout_s,
        cause=lease.request,
    )
    drop_slots(books, books.device, source)
    copies.wait_for(books, started, {lease.id})
    lease.move(LeaseMove.LOAD)


def fork(books: Books, event: Fork, now: float) -> None:
    """A second request shares everything that is filled; each goes on in blocks of its own."""
    lease = _running(books, event.lease, "fork")
    device = books.device
    filled = -(-lease.token_count // books.settings.block_tokens)
    twins = np.array(lease.twins, dtype=np.intp)
    device.pool.hold(lease.table[:filled])
    device.pool.hold(twins)
    other = LeaseRecord(
        id=LeaseId(books.lease_next),
        request=event.request,
        tenant=lease.tenant,
        era=lease.era,
        table=lease.table[:filled].copy(),
        matched_blocks=lease.published_blocks,
        token_count=lease.token_count,
        published_blocks=lease.published_blocks,
        tail_key=lease.tail_key,
        frontier=None,
        store=lease.store,
        outdated=set(lease.outdated),
        priority=lease.priority,
        ttl_s=lease.ttl_s,
        keep_blocks=lease.keep_blocks,
        namespace=lease.namespace,
        content=lease.content,
        twins=list(lease.twins),
    )
    books.lease_next += 1
    books.leases[other.id] = other
    books.history.add(now, "forked", event.request, (), f"lease={other.id} of={lease.id}")
    books.effects.append(
        Granted(
            lease=other.id,
            table=other.table,
            state=other.state,
            cached_tokens=other.token_count,
            cached_by_tier=(other.token_count,) + (0,) * (len(books.tiers) - 1),
            miss=Miss(reason=MissReason.NONE, block=filled),
        )
    )


def _running(books: Books, lease_id: LeaseId, verb: str) -> LeaseRecord:
    lease = books.lease(lease_id)
    if lease.state is not LeaseState.READY:
        raise LeaseError(
            f"lease {lease_id} is {lease.state.name.lower()}: it can {verb} only when ready"
        )
    return lease


def commit(books: Books, event: Commit, now: float) -> None:
    """The KV of more tokens is computed: publishes the blocks that are full now."""
    lease = books.lease(event.lease)
    _check(books, lease, event)
    lease.token_count = event.token_count
    if not lease.store or lease.era != books.era:
        return
    first = lease.published_blocks
    count = len(event.keys)
    if count:
        slots = lease.table[first : first + count]
        parent = books.parent_node(lease.tail_key, tenant=lease.tenant)
        if first == 0:
            books.remember_content(lease.content, lease.namespace)
        published = _publish(books, lease, event.keys, slots, parent)
        lease.published_blocks = first + count
        lease.tail_key = event.keys[-1]
        books.history.add(now, "published", lease.request, list(event.keys), f"lease={lease.id}")
        if len(published):
            for tier in lease.outdated:
                books.nodes.outdate(published, tier)
            keys = event.keys if len(published) == count else None
            copies.announce(books, books.device, published, keys)
            if lease.priority or lease.ttl_s is not None:
                until = None if lease.ttl_s is None else now + lease.ttl_s
                books.hint(published, lease.priority, until)
            writes.after_fill(books, DEVICE, _kept(lease, published, first), now, lease.request)
    books.aim(lease, event.frontier)


def _kept(lease: LeaseRecord, published: NDArray[np.intp], first: int) -> NDArray[np.intp]:
    """Of blocks from `first` on, those that are worth a copy below: others are let go soon."""
    if lease.keep_blocks is None:
        return published
    return published[: max(0, lease.keep_blocks - first)]


def _check(books: Books, lease: LeaseRecord, event: Commit) -> None:
    block_tokens = books.settings.block_tokens
    if lease.state is not LeaseState.READY:
        raise LeaseError(
            f"lease {lease.id} is {lease.state.name.lower()}: it can commit only when ready"
        )
    room = len(lease.table) * block_tokens
    if not lease.token_count <= event.token_count <= room:
        raise ValueError(
            f"token_count is {event.token_count}: lease {lease.id} has {lease.token_count} "
            f"tokens and room for {room}"
        )
    if event.token_count > lease.token_count and shares_tail(books, lease):
        raise LeaseError(
            f"lease {lease.id} shares its unfinished block with a fork: grow it before computing"
        )
    if len(set(event.keys)) != len(event.keys):
        raise ValueError("keys: a key occurs twice")
    if not books.nodes.ids.keys().isdisjoint(event.keys):
        books.require_no_circle(event.keys, lease.tail_key)
    full = event.token_count // block_tokens - lease.published_blocks
    if lease.store and lease.era == books.era and len(event.keys) != full:
        keys, blocks = counted(len(event.keys), "key"), counted(full, "block")
        raise ValueError(f"{keys} for {blocks} full now")


def _publish(
    books: Books, lease: LeaseRecord, keys: Sequence[Key], slots: NDArray[np.intp], parent: int
) -> NDArray[np.intp]:
    """Gives names to computed blocks; returns those that can be matched now and could not."""
    if books.nodes.ids.keys().isdisjoint(keys):
        nodes = books.add_chain(keys, parent=parent, tenant=lease.tenant)
        _place(books, nodes, slots, keys)
        return nodes
    known = [books.nodes.get(key) for key in keys]
    published: list[NDArray[np.intp]] = []
    first = 0
    while first < len(keys):
        if known[first] == NOWHERE:
            end = first + 1
            while end < len(keys) and known[end] == NOWHERE:
                end += 1
            nodes = books.add_chain(keys[first:end], parent=parent, tenant=lease.tenant)
            _place(books, nodes, slots[first:end], keys[first:end])
            published.append(nodes)
            parent = int(nodes[-1])
            first = end
            continue
        node = known[first]
        books.link(node, parent)
        there = int(books.device.slot_of[node])
        if there == NOWHERE:
            # Known from below, or hollow: the computed copy is as good as a loaded one.
            nodes = np.array([node], dtype=np.intp)
            _place(books, nodes, slots[first : first + 1], keys[first : first + 1])
            published.append(nodes)
        elif there != slots[first]:
            _keep_twin(books, lease, there)
        _use_below(books, node)
        parent = node
        first += 1
    if not published:
        return np.empty(0, dtype=np.intp)
    return published[0] if len(published) == 1 else np.concatenate(published)


def _use_below(books: Books, node: int) -> None:
    """A block that was computed though a copy lies below was used, as if it had been loaded."""
    for tier in books.owned_tiers():
        if tier is not books.device and tier.slot_of[node] != NOWHERE:
            tier.touch(np.array([node], dtype=np.intp), tick=books.tick)


def _place(
    books: Books, nodes: NDArray[np.intp], slots: NDArray[np.intp], keys: Sequence[Key]
) -> None:
    device = books.device
    device.place(nodes, slots, tick=books.tick, keys=keys)
    device.pool.fill(slots)
    books.counters.blocks_published += len(nodes)


def _keep_twin(books: Books, lease: LeaseRecord, slot: int) -> None:
    """Somebody published this block first: hold that copy, so that ours stay reachable."""
    if books.device.pool.state[slot] == LEAVING:
        node = books.device.pool.node[slot]
        books.device.keep(np.array([node], dtype=np.intp))
    books.device.pool.hold(np.array([slot], dtype=np.intp))
    lease.twins.append(slot)
    books.counters.blocks_twinned += 1


def release(books: Books, lease_id: LeaseId, now: float, *, returning: bool) -> None:
    """Gives every block back; what was published stays cached.

    A request that means to return has its blocks written down now, whatever the policy.
    """
    lease = books.lease(lease_id)
    if returning:
        _save_for_return(books, lease, now)
    lease.move(LeaseMove.RELEASE)
    search_over(books, lease)
    del books.leases[lease_id]
    books.aim(lease, None)
    books.history.add(now, "preempted" if returning else "released", lease.request)
    device = books.device
    slots = lease.table
    if lease.twins:
        slots = np.concatenate((slots, np.array(lease.twins, dtype=np.intp)))
    drop_slots(books, device, slots)
    _leave_operations(books, lease, now)
    if lease.keep_blocks is not None and not returning:
        _let_go(books, lease, lease.keep_blocks)


def _let_go(books: Books, lease: LeaseRecord, keep: int) -> None:
    """What the request does not expect to be used again is the first to leave."""
    if lease.tail_key is not None and lease.era == books.era:
        books.let_go(books.nodes.path_to(books.nodes.get(lease.tail_key))[keep:])


def _save_for_return(books: Books, lease: LeaseRecord, now: float) -> None:
    hub = books.hub
    device = books.device
    if lease.tail_key is None or lease.era != books.era:
        return
    nodes = books.nodes.path_to(books.nodes.get(lease.tail_key))
    nodes = nodes[device.slot_of[nodes] != NOWHERE]
    device.touch(nodes, tick=books.tick)
    if hub is not None:
        writes.save(books, DEVICE, hub, nodes, now, lease.request, needed=True)


def drop_slots(books: Books, device: Tier, slots: NDArray[np.intp]) -> None:
    """Lets go of device slots: published blocks stay cached, the rest is freed."""
    pool = device.pool
    quiet = pool.unhold(slots)
    nodes = pool.node[slots]
    named = nodes != NOWHERE
    device.release(nodes[named], tick=books.tick)
    own = slots[~named]
    if len(own):
        own = own[pool.state.take(own) == FILLING]
    if len(own):
        free = pool.holders[own] == 0
        pool.discard(own[free])
        # A copy may still be writing here, or a fork reads it: the last one frees it.
        busy = own[~free]
        if len(busy):
            pool.condemn(busy[_only_operations_hold(books, busy)])
    books.discard_unheld(device, quiet)


def _only_operations_hold(books: Books, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
    leased = [lease.table for lease in books.leases.values()]
    if not leased:
        return np.ones(len(slots), dtype=bool)
    return ~np.isin(slots, np.concatenate(leased))


def _leave_operations(books: Books, lease: LeaseRecord, now: float) -> None:
    """Cancels copies that no lease waits for any more."""
    waiting, lease.waiting = lease.waiting, set()
    for operation_id in sorted(waiting):
        _leave(books, lease, operation_id, now)


def _leave(books: Books, lease: LeaseRecord, operation_id: OperationId, now: float) -> None:
    lease.waiting.discard(operation_id)
    operation = books.ledger.operations.get(operation_id)
    if operation is None:
        return  # It ended within this very event and is still on the agenda.
    operation.waiters.discard(lease.id)
    unwanted = not operation.waiters and operation.purpose is not Purpose.SAVE
    if unwanted and operation.state is OperationState.RUNNING:
        copies.decide(books, operation, OperationMove.CANCEL, now, failure="nobody waits for it")


def after_operation(
    books: Books, operation: Operation, bad_slots: NDArray[np.intp], now: float
) -> None:
    """Updates the leases that waited: some may run, some must compute more, some are lost."""
    waiters, operation.waiters = operation.waiters, set()
    leases = [books.leases[lease_id] for lease_id in sorted(waiters)]
    missing: dict[LeaseId, int] = {}
    # Every lease lets go of what did not arrive before the first one takes slots for it: several
    # may hold the same slots, and what one gives back may be all that another needs.
    for lease in leases:
        lease.waiting.discard(operation.id)
        if lease.state is LeaseState.LOST:
            continue
        if operation.purpose is Purpose.DUPLICATE and len(bad_slots):
            lose(books, lease, now)  # It cannot go on without the block that it shares.
        elif operation.purpose is Purpose.SAVE and operation.waiting_ranks:
            lose(books, lease, now)  # A rank may still read what it would write to.
        elif np.isin(lease.table[: lease.matched_blocks], bad_slots).any():
            missing[lease.id] = _drop_missing(books, lease, operation, bad_slots, now)
    for lease in leases:
        if lease.id in missing:
            _recompute(books, lease, missing[lease.id], now)
        waits = lease.waiting or lease.id in books.searches
        if lease.state is LeaseState.LOADING and not waits:
            lease.move(LeaseMove.ARRIVE)
            send_change(books, lease)


def _drop_missing(
    books: Books, lease: LeaseRecord, operation: Operation, bad_slots: NDArray[np.intp], now: float
) -> int:
    """Lets go of blocks from the first that did not arrive on; how many."""
    first = int(np.flatnonzero(np.isin(lease.table[: lease.matched_blocks], bad_slots))[0])
    lease.miss = _why_not_arrived(operation, int(lease.table[first]), first)
    books.counters.tokens_not_delivered += (
        lease.matched_blocks - first
    ) * books.settings.block_tokens
    device = books.device
    dropped = lease.table[first : lease.matched_blocks]
    kept = lease.table[:first]
    own = lease.table[lease.matched_blocks :]
    block_tokens = books.settings.block_tokens
    lease.table = np.concatenate((kept, own))
    lease.matched_blocks = lease.published_blocks = first
    lease.token_count = first * block_tokens
    node = device.pool.node[kept[-1]] if first else NOWHERE
    lease.tail_key = None if node == NOWHERE else books.nodes.key_of(int(node))
    books.aim(lease, None)
    drop_slots(books, device, dropped)
    for operation_id in sorted(lease.waiting):
        other = books.ledger.operations.get(operation_id)
        if other is None:
            continue  # It ended within this very event; its turn on the agenda comes.
        if other.purpose is Purpose.SAVE:
            continue  # It reads where this one computes.
        slots = other.target_slots if other.onward is None else other.onward
        if not np.isin(slots, lease.table).any():
            _leave(books, lease, operation_id, now)
    return len(dropped)


def _recompute(books: Books, lease: LeaseRecord, wanted: int, now: float) -> None:
    """What did not arrive is computed by the request, in slots of its own."""
    device = books.device
    if books.make_room(device, wanted, lease.tenant, now, lease.request) < wanted:
        lose(books, lease, now)
        return
    slots = device.pool.take(wanted)
    device.pool.hold(slots)
    lease.append(slots)
    books.history.add(now, "recomputes", lease.request, (), f"from block {lease.matched_blocks}")


def _why_not_arrived(operation: Operation, slot: int, block: int) -> Miss:
    slots = operation.target_slots if operation.onward is None else operation.onward
    fault = operation.faults.get(slots.tolist().index(slot))
    corrupt = fault is BlockFault.CORRUPT
    return Miss(reason=MissReason.CORRUPT if corrupt else MissReason.FAILED, block=block)


def lose(books: Books, lease: LeaseRecord, now: float) -> None:
    """The lease is of no use any more: it keeps its slots only until it is released."""
    if lease.state is LeaseState.LOST:
        return
    lease.move(LeaseMove.LOSE)
    search_over(books, lease)
    books.aim(lease, None)
    books.counters.leases_lost += 1
    books.history.add(now, "lost", lease.request)
    _leave_operations(books, lease, now)
    send_change(books, lease)


def search_over(books: Books, lease: LeaseRecord) -> None:
    """A lease waits for no answer of a store any more."""
    if books.searches.pop(lease.id, None) is not None:
        books.counters.misses[lease.miss.reason] += 1


def send_change(books: Books, lease: LeaseRecord) -> None:
    books.effects.append(
        LeaseChanged(
            lease=lease.id,
            request=lease.request,
            state=lease.state,
            table=lease.table,
            cached_tokens=lease.token_count,
            cached_by_tier=lease.cached_by_tier,
            miss=lease.miss,
        )
    )


def pin(books: Books, event: PinBlocks, now: float) -> None:
    """Keeps blocks from leaving; refused when too much would be pinned."""
    new = sum(1 for key in event.keys if key not in books.pinned)
    if len(set(event.keys)) != len(event.keys):
        raise ValueError("keys: a key occurs twice")
    smallest = min(books.owned_tiers(), key=lambda tier: tier.pool.slot_count)
    limit = int(books.settings.pin_share * smallest.pool.slot_count)
    if len(event.keys) > limit:
        raise NeverFitsError(tier=smallest.name, wanted=len(event.keys), available=limit)
    if len(books.pinned) + new > limit:
        available = limit - len(books.pinned)
        raise CapacityError(tier=smallest.name, wanted=new, available=available)
    present = 0
    for key in event.keys:
        books.pinned[key] = books.pinned.get(key, 0) + 1
        node = books.nodes.get(key)
        if node != NOWHERE:
            books.nodes.pins[node] += 1
            present += bool(books.nodes.copy_count[node])
    pin_id = PinId(books.pin_next)
    books.pin_next += 1
    books.pins[pin_id] = tuple(event.keys)
    books.history.add(now, "pinned", f"pin {pin_id}", books.pins[pin_id])
    books.effects.append(Pinned(pin=pin_id, present=present))


def unpin(books: Books, event: UnpinBlocks, now: float) -> None:
    """Lets pinned blocks leave again when their turn comes."""
    keys = books.pins.pop(event.pin, None)
    if keys is None:
        raise ValueError(f"pin is {event.pin}: it was unpinned, or never given")
    for key in keys:
        left = books.pinned[key] - 1
        if left:
            books.pinned[key] = left
        else:
            del books.pinned[key]
        node = books.nodes.get(key)
        if node != NOWHERE:
            books.nodes.pins[node] -= 1
            for tier in books.owned_tiers():
                tier.offer(np.array([node], dtype=np.intp))
    books.history.add(now, "unpinned", f"pin {event.pin}", keys)
