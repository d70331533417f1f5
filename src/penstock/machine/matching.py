"""Where the blocks of a prompt lie, and why there are no more of them.

Looking changes nothing: no recency, no state, no hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.explain import Miss, MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.settings import DEVICE, HUB
from penstock.cache.states import FILLING, LEAVING, READY, SlotState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.tier import Tier
    from penstock.machine.books import Books
    from penstock.vocabulary.keys import Key

_NOT_FOUND = 127
_USABLE = np.zeros(len(SlotState), dtype=np.bool_)
_USABLE[[READY, LEAVING]] = True
"""By the state of a slot: whether its block can be had."""
_USABLE_SOON = _USABLE.copy()
_USABLE_SOON[FILLING] = True


@dataclass(frozen=True, slots=True)
class Finding:
    """The longest prefix of a chain that can be had, in one ordered list."""

    nodes: NDArray[np.intp]
    source: NDArray[np.int8]
    """For each block, the index of the nearest tier it can be had from."""


_NOTHING = Finding(np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int8))


def find(books: Books, keys: Sequence[Key], *, deepest: int) -> Finding:
    """The longest prefix that lies on the device or can be had from a tier down to `deepest`."""
    nodes = books.nodes.match(keys)
    if not len(nodes):
        return _NOTHING
    source = np.full(len(nodes), _NOT_FOUND, dtype=np.int8)
    device = books.tiers[DEVICE]
    if device is not None:
        # A block that a copy is bringing to the device counts: requests share that copy, but
        # for one that would rather compute than wait.
        source[_usable(device, nodes, filling=deepest > DEVICE)] = DEVICE
    for tier in books.lower_tiers()[:deepest]:
        missing = (source == _NOT_FOUND).nonzero()[0]
        if not len(missing):
            break
        if _reachable(books, tier):
            usable = _usable(tier, nodes[missing], filling=False)
            if tier.index > HUB:
                # What is being written into the hub cannot be brought there a second time.
                usable &= books.tier(HUB).slot_of[nodes[missing]] == NOWHERE
            if tier.index == HUB and device is not None and books.staging:
                usable |= _on_its_way(books, tier, nodes[missing])
            source[missing[usable]] = tier.index
    return _without_gaps(nodes, source)


def count_cached(books: Books, found: Finding) -> list[int]:
    """Counts what a request found as cached tokens of each tier, and returns their numbers.

    A block that was brought into the hub ahead of this request counts for the tier it came from.
    """
    source = found.source
    hub = books.hub
    if hub is not None and hub.any_fetched:
        in_hub = source == HUB
        origins = hub.take_origins(found.nodes[in_hub])
        source = source.copy()
        source[in_hub] = np.where(origins, origins, HUB)
    by_tier = np.bincount(source, minlength=len(books.tiers)) * books.settings.block_tokens
    tokens: list[int] = by_tier.tolist()
    for index, count in enumerate(tokens):
        books.counters.tokens_cached_by_tier[index] += count
    return tokens


def explain(books: Books, keys: Sequence[Key], found: int) -> Miss:
    """Why the block after the first `found` could not be had."""
    if found >= len(keys):
        return Miss(reason=MissReason.NONE, block=found)
    key = keys[found]
    node = books.nodes.get(key)
    if node != NOWHERE and books.nodes.copy_count[node]:
        return Miss(reason=_why_not_usable(books, node), block=found)
    if key in books.frontiers:
        return Miss(reason=MissReason.FILLING, block=found)
    if key in books.foreign:
        return Miss(reason=MissReason.FORM, block=found)
    departure = books.departed.get(key)
    if departure is not None:
        return Miss(reason=departure.reason, block=found, departure=departure)
    return Miss(reason=MissReason.NEVER_SEEN, block=found)


def explain_first(books: Books, miss: Miss, content: int, namespace: bytes) -> Miss:
    """Sharpens "never seen": the same tokens may be known in another namespace."""
    if miss.reason is MissReason.NEVER_SEEN and miss.block == 0:
        known = books.contents.get(content)
        if known is not None and namespace not in known:
            return Miss(reason=MissReason.NAMESPACE, block=0)
        if content in books.weights.earlier_contents:
            return Miss(reason=MissReason.WEIGHTS, block=0)
    return miss


def fetchable(books: Books, keys: Sequence[Key]) -> Finding:
    """The longest prefix that lies in the hub, is on its way there, or could be fetched there.

    The source of a block is the hub, or the tier below it that it could be fetched from.
    """
    hub = books.hub
    nodes = books.nodes.match(keys)
    if not len(nodes):
        return _NOTHING
    source = np.full(len(nodes), _NOT_FOUND, dtype=np.int8)
    if hub is not None and hub.on and books.healthy:
        source[hub.slot_of[nodes] != NOWHERE] = HUB
        for tier in books.lower_tiers()[HUB:]:
            missing = np.flatnonzero(source == _NOT_FOUND)
            if _reachable(books, tier):
                source[missing[_usable(tier, nodes[missing], filling=False)]] = tier.index
    return _without_gaps(nodes, source)


def _without_gaps(nodes: NDArray[np.intp], source: NDArray[np.int8]) -> Finding:
    gap = (source == _NOT_FOUND).nonzero()[0]
    length = int(gap[0]) if len(gap) else len(nodes)
    return Finding(nodes[:length], source[:length])


def _usable(tier: Tier, nodes: NDArray[np.intp], *, filling: bool) -> NDArray[np.bool_]:
    slots = tier.slot_of[nodes]
    good = (_USABLE_SOON if filling else _USABLE).take(tier.pool.state.take(slots))
    good &= slots != NOWHERE
    return good


def _on_its_way(books: Books, hub: Tier, nodes: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Blocks a stage brings up to the hub: they are passed on when they arrive."""
    return np.array([slot in books.staging for slot in hub.slot_of[nodes].tolist()], dtype=bool)


def _reachable(books: Books, tier: Tier) -> bool:
    """Whether blocks of a tier can be read; those below the hub are read through it."""
    hub = books.hub
    if not books.healthy:
        return False
    return tier.on and (tier.index == HUB or (hub is not None and hub.on))


def _why_not_usable(books: Books, node: int) -> MissReason:
    for tier in books.lower_tiers():
        slot = tier.slot_of[node]
        if slot == NOWHERE:
            continue
        if tier.pool.state[slot] == FILLING:
            return MissReason.FILLING
        if not _reachable(books, tier):
            return MissReason.TIER_OFF
    return MissReason.OPTED_OUT
