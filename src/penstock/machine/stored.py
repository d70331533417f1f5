"""Stored tiers: a directory of blocks that a store process keeps.

The store owns the index: it decides where a block lies, takes blocks of other engines in, and gives
blocks up to make room. The directory is what this cache knows of it. It may lack blocks that are
there, and may list some that are gone: a read of those ends with `BlockFault.MISSING`, and the
request computes them.

What the store says is checked, but never refused: a damaged answer is not the engine's bug. What
cannot be true is left out.

The one rule that must not break: the store process touches the arenas of all ranks. What a copy
holds there is given back when the store has reported, or is seen dead, whatever happens to ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.nodes import NOWHERE
from penstock.cache.settings import HUB
from penstock.cache.states import FILLING, LEAVING, READY
from penstock.machine import copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.operations import Operation
    from penstock.cache.tier import Tier
    from penstock.machine.books import Books
    from penstock.machine.events import Discovered, Vanished
    from penstock.vocabulary.keys import Key

_HUB_SHARE = 2
"""Saves into one stored tier hold at most one in so many slots of the hub, so that a store that
has stopped cannot keep the hub from taking new blocks."""


def is_stored(books: Books, operation: Operation) -> bool:
    """Whether a store process copies, not the ranks."""
    sides = (books.tiers[operation.source], books.tiers[operation.target])
    return any(tier is not None and tier.settings.stored for tier in sides)


def saves_max(books: Books, hub_slots: int) -> int:
    """How many blocks may be on their way into one stored tier, if the hub has so many slots."""
    return max(1, min(books.settings.stored_saves_max, hub_slots // _HUB_SHARE))


def admit_saves(books: Books, tier: Tier, nodes: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those of some blocks that may be written into a tier now; the others are counted.

    What was given up counts until the store has reported: it still holds slots of the hub.
    """
    if not tier.settings.stored:
        return nodes
    # A store keeps blocks of other weights apart: those that stayed in memory are not for now.
    nodes = books.nodes.not_outdated(books.nodes.of_weights_now(nodes), tier.index)
    under_way = books.rates.hops[HUB, tier.index].queued
    admitted = nodes[: max(0, saves_max(books, books.tier(HUB).pool.slot_count) - under_way)]
    books.counters.saves_skipped += len(nodes) - len(admitted)
    return admitted


def count_sinking(books: Books, keys: Sequence[Key]) -> int:
    """How many of these blocks are on their way into a stored tier."""
    nodes = np.array(books.nodes.get_all(list(keys)), dtype=np.intp)
    nodes = nodes[nodes != NOWHERE]
    sinking = np.zeros(len(nodes), dtype=bool)
    for tier in books.lower_tiers():
        if tier.settings.stored:
            slots = tier.slot_of[nodes]
            sinking |= (slots != NOWHERE) & (tier.pool.state[slots] == FILLING)
    return int(np.count_nonzero(sinking))


def vanished(books: Books, tier: Tier, event: Vanished, now: float) -> None:
    """A store gave blocks up: they are forgotten there, with the reason."""
    nodes = np.array(books.nodes.get_all(list(dict.fromkeys(event.keys))), dtype=np.intp)
    slots = tier.slot_of[nodes[nodes != NOWHERE]]
    slots = slots[slots != NOWHERE]
    state = tier.pool.state[slots]
    slots = slots[(state == READY) | (state == LEAVING)]
    tier.reclaims = tier.reclaims or len(slots) > 0
    books.forget_reclaimed(tier, slots, now)


def discovered(books: Books, tier: Tier, event: Discovered, now: float) -> None:
    """A store has these blocks: as many are noted as there are free entries."""
    if event.wanted:
        _make_room(books, tier, event, now)
    before = _without_entry(books, tier, event)
    links = {key: before.pop(key) for key in list(before) if key in books.nodes.ids}
    tenant = books.tenant("")
    nodes = np.concatenate(
        (_added(books, before, tenant), np.array(_linked(books, links, tenant), dtype=np.intp))
    )
    if not len(nodes):
        return
    slots = tier.pool.take(len(nodes))
    tier.place(nodes, slots, tick=books.tick)
    tier.pool.fill(slots)
    tier.offer(nodes)
    keys = copies.announce(books, tier, nodes)
    books.history.add(now, "discovered", tier.name, keys)


def _make_room(books: Books, tier: Tier, event: Discovered, now: float) -> None:
    """Forgets entries of other blocks, those that would leave next, until all of these fit."""
    ids, slot_of = books.nodes.ids, tier.slot_of.data
    wanted = dict.fromkeys(event.keys)
    near = {ids.get(key, NOWHERE) for key in (*wanted, *event.parents) if key is not None}
    held = tier.slot_of[[node for node in near if node != NOWHERE and slot_of[node] != NOWHERE]]
    listed = [ids.get(key, NOWHERE) for key in wanted]
    missing = sum(node == NOWHERE or slot_of[node] == NOWHERE for node in listed)
    # Held, or a block might take the place of the one it follows.
    tier.pool.hold(held)
    books.evict_planned(tier, tier.plan_room(missing, None), now, "prefetch")
    tier.offer_slots(tier.pool.unhold(held))


def _without_entry(books: Books, tier: Tier, event: Discovered) -> dict[Key, Key | None]:
    """The blocks before those that are to be noted, by their keys."""
    before: dict[Key, Key | None] = {}
    ids, slot_of = books.nodes.ids, tier.slot_of.data
    room = tier.pool.free_count
    for key, parent in zip(event.keys, event.parents, strict=True):
        if len(before) == room:
            break
        node = ids.get(key, NOWHERE)
        if node == NOWHERE or slot_of[node] == NOWHERE:
            before.setdefault(key, parent)
    return before


def _added(books: Books, before: dict[Key, Key | None], tenant: int) -> NDArray[np.intp]:
    """Makes unknown blocks known; blocks before them that are not get a node without a copy."""
    ordered = _chains(before)
    ids = books.nodes.ids
    parents = [before[key] for key in ordered]
    hollow = list(
        dict.fromkeys(
            parent
            for parent in parents
            if parent is not None and parent not in before and parent not in ids
        )
    )
    nodes = books.add_forest(hollow + ordered, [None] * len(hollow) + parents, tenant=tenant)
    return nodes[len(hollow) :]


def _chains(before: dict[Key, Key | None]) -> list[Key]:
    """Blocks in the order of their chains, none ahead of the one before it.

    Blocks that lead in a circle, or follow such blocks, are left out: no walk from the beginning
    of a chain comes to them.
    """
    follower: dict[Key, Key] = {}
    branches: dict[Key, list[Key]] = {}
    heads: list[Key] = []
    for key, parent in before.items():
        if parent is None or parent not in before:
            heads.append(key)
        elif parent not in follower:
            follower[parent] = key
        else:
            branches.setdefault(parent, []).append(key)
    heads.reverse()
    ordered: list[Key] = []
    while heads:
        at: Key | None = heads.pop()
        first = len(ordered)
        while at is not None:
            ordered.append(at)
            at = follower.get(at)
        if branches:
            heads += [key for each in ordered[first:] for key in branches.get(each, ())]
    return ordered


def _linked(books: Books, links: dict[Key, Key | None], tenant: int) -> list[int]:
    """Known blocks, of which some are now known to follow another one."""
    nodes = books.nodes
    sound: list[int] = []
    for key, parent_key in links.items():
        node = nodes.ids[key]
        if parent_key is not None and nodes.parent_view[node] == NOWHERE:
            if node in nodes.path_to(nodes.get(parent_key)):
                continue
            books.link(node, books.parent_node(parent_key, tenant=tenant))
        sound.append(node)
    return sound
