"""Pinned prefixes: blocks that stay in every tier they lie in, until they are unpinned.

A pin is on keys, not on copies: a pinned block that is lost or not computed yet is pinned
again the moment it comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.nodes import NOWHERE
from penstock.errors import CapacityError, NeverFitsError
from penstock.machine.effects import Pinned
from penstock.vocabulary.ids import PinId

if TYPE_CHECKING:
    from penstock.machine.books import Books
    from penstock.machine.events import Pin, Unpin


def pin(books: Books, event: Pin, now: float) -> None:
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


def unpin(books: Books, event: Unpin, now: float) -> None:
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
                tier.offer(np.array([node], dtype=np.int32))
    books.history.add(now, "unpinned", f"pin {event.pin}", keys)
