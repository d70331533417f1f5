"""Computed blocks become matchable: full ones only, and each content once.

Two requests may compute the same block at the same time. The first to commit publishes its
copy; the other keeps its own, unpublished, until it ends. So a block table never changes
under a step that is in flight, and in the end there is one copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.nodes import NOWHERE
from penstock.cache.settings import DEVICE
from penstock.cache.states import LEAVING, LeaseState
from penstock.errors import LeaseError
from penstock.machine import copying, writing
from penstock.machine.growing import shares_tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.leases import Lease
    from penstock.machine.books import Books
    from penstock.machine.events import Commit
    from penstock.vocabulary.ids import Key


def commit(books: Books, event: Commit, now: float) -> None:
    """The KV of more tokens is computed: publishes the blocks that are full now."""
    lease = books.lease(event.lease)
    _check(books, lease, event)
    lease.token_count = event.token_count
    if not lease.store or lease.epoch != books.ledger.epoch:
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
            copying.announce(books, books.device, published)
            if lease.priority or lease.ttl_s is not None:
                until = None if lease.ttl_s is None else now + lease.ttl_s
                books.hint(published, lease.priority, until)
            writing.after_fill(books, DEVICE, published, now, lease.request)
    books.aim(lease, event.frontier)


def _check(books: Books, lease: Lease, event: Commit) -> None:
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
    if lease.store and lease.epoch == books.ledger.epoch and len(event.keys) != full:
        raise ValueError(f"{len(event.keys)} keys for {full} blocks that are full now")


def _publish(
    books: Books, lease: Lease, keys: Sequence[Key], slots: NDArray[np.int32], parent: int
) -> NDArray[np.int32]:
    """Gives names to computed blocks; returns those that can be matched now and could not."""
    if books.nodes.ids.keys().isdisjoint(keys):
        nodes = books.add_chain(keys, parent=parent, tenant=lease.tenant)
        _place(books, nodes, slots, keys)
        return nodes
    known = [books.nodes.get(key) for key in keys]
    published: list[NDArray[np.int32]] = []
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
            nodes = np.array([node], dtype=np.int32)
            _place(books, nodes, slots[first : first + 1], keys[first : first + 1])
            published.append(nodes)
        elif there != slots[first]:
            _keep_twin(books, lease, there)
        parent = node
        first += 1
    if not published:
        return np.empty(0, dtype=np.int32)
    return published[0] if len(published) == 1 else np.concatenate(published)


def _place(
    books: Books, nodes: NDArray[np.int32], slots: NDArray[np.int32], keys: Sequence[Key]
) -> None:
    device = books.device
    device.place(nodes, slots, tick=books.tick, keys=keys)
    device.pool.fill(slots)
    books.counters.blocks_published += len(nodes)


def _keep_twin(books: Books, lease: Lease, slot: int) -> None:
    """Somebody published this block first: hold that copy, so that ours stay reachable."""
    if books.device.pool.state[slot] == LEAVING:
        node = books.device.pool.node[slot]
        books.device.keep(np.array([node], dtype=np.int32))
    books.device.pool.hold(np.array([slot], dtype=np.int32))
    lease.twins.append(slot)
    books.counters.blocks_twinned += 1
