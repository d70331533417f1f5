"""Leases that end, or whose blocks do not arrive.

A request whose blocks could not be loaded computes them instead, in slots of its own. Only
if not even those can be had is its lease lost: it is then released and acquired again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.departed import Miss, MissReason
from penstock.cache.ledger import BlockFault, Purpose
from penstock.cache.nodes import NOWHERE
from penstock.cache.settings import DEVICE
from penstock.cache.states import FILLING, LeaseMove, LeaseState, OperationMove, OperationState
from penstock.machine import copying, writing
from penstock.machine.effects import LeaseChanged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cache.leases import Lease
    from penstock.cache.ledger import Operation
    from penstock.cache.tier import Tier
    from penstock.machine.books import Books
    from penstock.vocabulary.ids import LeaseId, OperationId


def release(books: Books, lease_id: LeaseId, now: float, *, returning: bool) -> None:
    """Gives every block back; what was published stays cached.

    A request that means to return has its blocks written down now, whatever the policy.
    """
    lease = books.lease(lease_id)
    if returning:
        _save_for_return(books, lease, now)
    lease.move(LeaseMove.RELEASE)
    del books.leases[lease_id]
    books.aim(lease, None)
    books.history.add(now, "preempted" if returning else "released", lease.request)
    device = books.device
    slots = lease.table
    if lease.twins:
        slots = np.concatenate((slots, np.array(lease.twins, dtype=np.int32)))
    drop_slots(books, device, slots)
    _leave_operations(books, lease, now)


def _save_for_return(books: Books, lease: Lease, now: float) -> None:
    hub = books.hub
    device = books.device
    if lease.tail_key is None or lease.epoch != books.ledger.epoch:
        return
    nodes = books.nodes.path_to(books.nodes.get(lease.tail_key))
    nodes = nodes[device.slot_of[nodes] != NOWHERE]
    device.touch(nodes, tick=books.tick)
    if hub is not None:
        writing.save(books, DEVICE, hub, nodes, now, lease.request)


def drop_slots(books: Books, device: Tier, slots: NDArray[np.int32]) -> None:
    """Lets go of device slots: published blocks stay cached, the rest is freed."""
    pool = device.pool
    quiet = pool.unhold(slots)
    nodes = pool.node[slots]
    cached = nodes[nodes != NOWHERE]
    device.touch(cached, tick=books.tick)
    own = slots[(nodes == NOWHERE) & (pool.state[slots] == FILLING)]
    if len(own):
        free = pool.holders[own] == 0
        pool.discard(own[free])
        # A copy may still be writing here, or a fork reads it: the last one frees it.
        busy = own[~free]
        pool.condemn(busy[_only_operations_hold(books, busy)])
    books.discard_unheld(device, quiet)
    device.offer_slots(quiet)


def _only_operations_hold(books: Books, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
    leased = [lease.table for lease in books.leases.values()]
    if not leased or not len(slots):
        return np.ones(len(slots), dtype=bool)
    return ~np.isin(slots, np.concatenate(leased))


def _leave_operations(books: Books, lease: Lease, now: float) -> None:
    """Copies that nobody waits for any more are cancelled."""
    waiting, lease.waiting = lease.waiting, set()
    for operation_id in sorted(waiting):
        _leave(books, lease, operation_id, now)


def _leave(books: Books, lease: Lease, operation_id: OperationId, now: float) -> None:
    lease.waiting.discard(operation_id)
    operation = books.ledger.operations.get(operation_id)
    if operation is None:
        return  # It ended within this very event and is still on the agenda.
    operation.waiters.discard(lease.id)
    if not operation.waiters and operation.state is OperationState.RUNNING:
        copying.decide(books, operation, OperationMove.CANCEL, now, failure="nobody waits for it")


def after_operation(
    books: Books, operation: Operation, bad_slots: NDArray[np.int32], now: float
) -> None:
    """Tells the leases that waited: some may run, some have to compute more, some are lost."""
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
        elif np.isin(lease.table[: lease.matched_blocks], bad_slots).any():
            missing[lease.id] = _drop_missing(books, lease, operation, bad_slots, now)
    for lease in leases:
        if lease.id in missing:
            _recompute(books, lease, missing[lease.id], now)
        if lease.state is LeaseState.LOADING and not lease.waiting:
            lease.move(LeaseMove.ARRIVE)
            _tell(books, lease)


def _drop_missing(
    books: Books, lease: Lease, operation: Operation, bad_slots: NDArray[np.int32], now: float
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
        slots = other.target_slots if other.onward is None else other.onward
        if not np.isin(slots, lease.table).any():
            _leave(books, lease, operation_id, now)
    return len(dropped)


def _recompute(books: Books, lease: Lease, wanted: int, now: float) -> None:
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


def lose(books: Books, lease: Lease, now: float) -> None:
    """The lease is of no use any more: it keeps its slots only until it is released."""
    if lease.state is LeaseState.LOST:
        return
    lease.move(LeaseMove.LOSE)
    books.aim(lease, None)
    books.counters.leases_lost += 1
    books.history.add(now, "lost", lease.request)
    _leave_operations(books, lease, now)
    _tell(books, lease)


def _tell(books: Books, lease: Lease) -> None:
    books.effects.append(
        LeaseChanged(
            lease=lease.id,
            request=lease.request,
            state=lease.state,
            table=lease.table,
            cached_tokens=lease.token_count,
            miss=lease.miss,
        )
    )
