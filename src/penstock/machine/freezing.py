"""The whole state of a cache as nested tuples, for comparing, hashing and exploring.

Left out is what explains rather than decides: history, counters, KV events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.nodes import NOWHERE

if TYPE_CHECKING:
    from penstock.cache.leases import Lease
    from penstock.cache.ledger import Operation
    from penstock.cache.tier import Tier
    from penstock.machine.books import Books
    from penstock.vocabulary.ids import Key

Frozen = tuple[object, ...]


def freeze(books: Books) -> Frozen:
    """The state of the books."""
    return (
        ("epoch", books.ledger.epoch),
        ("lost_ranks", tuple(sorted(books.lost_ranks))),
        ("tiers", tuple(_tier(books, tier) for tier in books.owned_tiers())),
        ("operations", tuple(_operation(o) for o in books.ledger.operations.values())),
        ("leases", tuple(_lease(lease) for lease in books.leases.values())),
        ("pinned", tuple(sorted(books.pinned.items()))),
        ("foreign", tuple(sorted(books.foreign.items()))),
        ("departed", books.departed.freeze()),
        ("hints", _hints(books)),
        ("rates", books.rates.freeze()),
    )


def _tier(books: Books, tier: Tier) -> Frozen:
    pool = tier.pool
    keys = tuple(_key(books, node) for node in pool.node.tolist())
    return (
        tier.name,
        tier.on,
        tuple(pool.state.tolist()),
        tuple(pool.holders.tolist()),
        keys,
        tuple(pool.free_slots().tolist()),
        tuple(sorted(tier.used_by.items())),
    )


def _operation(operation: Operation) -> Frozen:
    return (
        operation.id,
        operation.purpose.value,
        operation.source,
        operation.target,
        tuple(operation.keys),
        tuple(operation.source_slots.ravel().tolist()),
        tuple(operation.target_slots.ravel().tolist()),
        tuple(sorted(operation.waiting_ranks)),
        operation.deadline,
        None if operation.onward is None else tuple(operation.onward.tolist()),
        tuple(sorted(operation.waiters)),
        tuple(sorted((p, fault.value) for p, fault in operation.faults.items())),
        operation.state,
    )


def _lease(lease: Lease) -> Frozen:
    return (
        lease.id,
        lease.request,
        lease.tenant,
        lease.epoch,
        tuple(lease.table.tolist()),
        lease.matched_blocks,
        lease.token_count,
        lease.published_blocks,
        lease.tail_key,
        lease.frontier,
        lease.state,
        tuple(sorted(lease.waiting)),
        tuple(lease.twins),
    )


def _hints(books: Books) -> Frozen:
    rows = []
    for key, node in sorted(books.nodes.ids.items()):
        parent = _key(books, int(books.nodes.parent[node]))
        row = (key, parent, int(books.nodes.priority[node]), int(books.nodes.hits[node]))
        rows.append(row)
    return tuple(rows)


def _key(books: Books, node: int) -> Key | None:
    return None if node == NOWHERE else books.nodes.key_of(node)
