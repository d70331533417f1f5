"""Leases that wait for a store to say which of their blocks it has.

    acquire ──search_until──→ LOADING ─┬─ Searched, or the time is over: matched once more, and
                                       │  what was found now is brought to the device
                                       └─ released, lost: nobody waits for the answer any more

The blocks that were found at once are loaded meanwhile. The lease has its room already: what is
found later goes into the slots in which it would have been computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.settings import DEVICE
from penstock.cache.states import LeaseMove
from penstock.machine import acquire, leases, writes
from penstock.machine.matching import Finding, count_cached

if TYPE_CHECKING:
    from penstock.machine.books import Books, LeaseRecord
    from penstock.machine.events import Acquire, Searched


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
    found, miss, recomputed = acquire.match(books, wanted, now)
    lease.miss = miss
    books.counters.tokens_computed_instead += recomputed * books.settings.block_tokens
    matched = len(found.nodes)
    if matched <= first:
        return
    rest = Finding(found.nodes[first:], found.source[first:])
    # What others have brought to the device, or computed there, since it was asked for.
    here = rest.source == DEVICE
    device = books.device
    held = device.slot_of.take(rest.nodes[here])
    device.pool.hold(held)
    places = first + here.nonzero()[0]
    own = lease.table[places]
    lease.table = lease.table.copy()
    lease.table[places] = held
    leases.drop_slots(books, device, own)
    lease.matched_blocks = lease.published_blocks = matched
    lease.token_count = matched * books.settings.block_tokens
    lease.tail_key = wanted.keys[matched - 1]
    acquire.bring(books, lease, found, rest, held, wanted, now)
    more = count_cached(books, rest)
    lease.cached_by_tier = tuple(map(sum, zip(lease.cached_by_tier, more, strict=True)))
    keys = wanted.keys[first:matched]
    books.history.add(now, "found by search", lease.request, keys, f"lease={lease.id}")
    writes.after_hit(books, rest.nodes, now, lease.request)
