"""Writes what a stored tier missed while it was off, when it is on.

A store process starts after its engine, and may be away for a while. What its tier would have been
given meanwhile, by its policy, is written from the hub, some blocks at a time: neither a step of
the engine nor what is computed now waits for it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Outcome, Purpose
from penstock.cache.settings import HUB
from penstock.machine import stored, writes
from penstock.machine.backlog import miss

if TYPE_CHECKING:
    from penstock.cache.operations import Operation
    from penstock.cache.tier import Tier
    from penstock.machine.books import Books

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
            nodes = np.array(chosen, dtype=np.int32)
            if len(writes.save(books, HUB, tier, nodes, now, CAUSE)):
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


def after_operation(books: Books, operation: Operation, now: float) -> None:
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
        miss(books, tier, writes.wanted_in(books, tier, np.array(known, dtype=np.int32)))
    if operation.outcome is not Outcome.CANCELLED:
        go_on(books, tier, now)
