"""Leases that go on: more room for more tokens, and a second request from the same blocks.

A fork shares every filled block. The unfinished one is copied when somebody is about to
write to it, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.departed import Miss, MissReason
from penstock.cache.leases import Lease
from penstock.cache.ledger import Purpose
from penstock.cache.settings import DEVICE
from penstock.cache.states import LeaseMove, LeaseState
from penstock.errors import CapacityError, LeaseError, NeverFitsError
from penstock.machine import copying, releasing
from penstock.machine.effects import Granted, Grown
from penstock.vocabulary.ids import LeaseId
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.machine.books import Books
    from penstock.machine.events import Fork, Grow

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


def shares_tail(books: Books, lease: Lease) -> bool:
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
    books: Books, lease: Lease, tail: int, target: NDArray[np.int32], now: float
) -> None:
    """Copy on write: the request gets the unfinished block for itself."""
    source = lease.table[tail : tail + 1].copy()
    lease.table = lease.table.copy()
    lease.table[tail] = target[0]
    started = copying.start(
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
    releasing.drop_slots(books, books.device, source)
    copying.wait_for(books, started, {lease.id})
    lease.move(LeaseMove.LOAD)


def fork(books: Books, event: Fork, now: float) -> None:
    """A second request shares everything that is filled; each goes on in blocks of its own."""
    lease = _running(books, event.lease, "fork")
    device = books.device
    filled = -(-lease.token_count // books.settings.block_tokens)
    twins = np.array(lease.twins, dtype=np.int32)
    device.pool.hold(lease.table[:filled])
    device.pool.hold(twins)
    other = Lease(
        id=LeaseId(books.lease_next),
        request=event.request,
        tenant=lease.tenant,
        epoch=lease.epoch,
        table=lease.table[:filled].copy(),
        matched_blocks=lease.published_blocks,
        token_count=lease.token_count,
        published_blocks=lease.published_blocks,
        tail_key=lease.tail_key,
        frontier=None,
        store=lease.store,
        priority=lease.priority,
        ttl_s=lease.ttl_s,
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


def _running(books: Books, lease_id: LeaseId, verb: str) -> Lease:
    lease = books.lease(lease_id)
    if lease.state is not LeaseState.READY:
        raise LeaseError(
            f"lease {lease_id} is {lease.state.name.lower()}: it can {verb} only when ready"
        )
    return lease
