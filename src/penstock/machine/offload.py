"""For an engine that manages its own device slots: what lies below them.

The engine names its slots, one row a KV group; a block is saved in all groups at once and
becomes ready when every rank has written all of them. So nothing half-saved can be found.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.explain import Miss, MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Purpose
from penstock.cache.settings import DEVICE, HUB, WriteKind
from penstock.errors import UnavailableError
from penstock.machine import copies, writes
from penstock.machine.acquire import stage
from penstock.machine.books import require_count, require_sound_wishes
from penstock.machine.effects import Found, Started
from penstock.machine.gate import worth_loading
from penstock.machine.matching import count_cached, explain, fetchable, find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.operations import Operation
    from penstock.cache.tier import Tier
    from penstock.machine.books import Books
    from penstock.machine.events import LetGo, Load, Lookup, Prefetch, Save
    from penstock.machine.matching import Finding
    from penstock.vocabulary.keys import Key


def lookup(books: Books, event: Lookup, now: float) -> None:
    """How much of a chain can be loaded now, how much soon, and how much is worth it."""
    ready = event.start + len(find(books, event.keys[event.start :], deepest=HUB).nodes)
    coming = fetchable(books, event.keys[ready:])
    soon = coming.source
    pending, below = len(soon), int(np.count_nonzero(soon > HUB))
    found = ready + pending
    worth = found if found <= event.held else _worth(books, event, ready, soon, now)
    if worth < found:
        miss = Miss(reason=MissReason.RECOMPUTE, block=worth)
        if not event.again:
            books.counters.misses[miss.reason] += 1
            books.counters.tokens_computed_instead += (found - worth) * books.settings.block_tokens
    else:
        miss = explain(books, event.keys, found)
    books.effects.append(
        Found(
            ready=ready,
            pending=pending,
            below=below,
            rising=_rising(books, coming),
            worth=worth,
            miss=miss,
            losses=books.losses,
        )
    )


def _rising(books: Books, coming: Finding) -> int:
    """How many of these blocks are being copied from below into the hub."""
    if not books.staging:
        return 0
    slots = books.tier(HUB).slot_of[coming.nodes].tolist()
    return sum(slot in books.staging for slot in slots)


def _worth(books: Books, event: Lookup, ready: int, soon: NDArray[np.int8], now: float) -> int:
    source = np.full(ready + len(soon), HUB, dtype=np.int8)
    source[ready:] = soon
    source[: event.held] = DEVICE
    return worth_loading(books, source, now)


def load(books: Books, event: Load, now: float) -> None:
    """Loads the leading blocks that are ready into the engine's slots."""
    _check_offload(books, event.keys, event.slots)
    require_sound_wishes(priority=event.priority, ttl_s=event.ttl_s, deadline=event.deadline)
    _require_ranks(books)
    found = find(books, event.keys, deepest=HUB)
    count = len(found.nodes)
    started: list[Operation] = []
    if count:
        hub = books.tier(HUB)
        books.nodes.hits[found.nodes] += 1
        books.revive(found.nodes)
        hub.touch(found.nodes, tick=books.tick)
        _hint(books, event, found.nodes, now)
        slots = hub.slot_of[found.nodes]
        started = copies.start(
            books,
            Purpose.LOAD,
            source=HUB,
            target=DEVICE,
            keys=event.keys[:count],
            source_slots=slots,
            target_slots=event.slots[:, :count].astype(np.intp),
            deadline=_deadline(books, event.deadline, now),
            cause=event.cause,
        )
        count_cached(books, found)
    miss = explain(books, event.keys, count)
    books.counters.misses[miss.reason] += 1
    books.history.add(now, "loading", event.cause, event.keys[:count], str(miss))
    _answer(books, started, range(count), miss)
    if count:
        writes.after_hit(books, found.nodes, now, event.cause)


def save(books: Books, event: Save, now: float) -> None:
    """Writes blocks into the hub that are not there yet, as many as there is room for."""
    _check_offload(books, event.keys, event.slots)
    if np.count_nonzero(event.slots < 0):
        raise ValueError("slots: a block is saved in every KV group, -1 is not a slot")
    known = books.nodes.get_all(event.keys)
    if event.parent in event.keys or max(known, default=NOWHERE) != NOWHERE:
        # A block that is not known comes before none: most saves need not look further.
        books.require_no_circle(event.keys, event.parent)
    require_sound_wishes(priority=event.priority, ttl_s=event.ttl_s, deadline=event.deadline)
    _require_ranks(books)
    hub = books.tier(HUB)
    chosen = _worth_saving(books, hub, event.keys, known) if hub.on and books.healthy else []
    nodes = _name(books, event, chosen, known)
    # What has just been made known lies nowhere yet: nothing needs to be kept for it.
    before = NOWHERE if event.parent is None else books.nodes.get(event.parent)
    beside = np.array([node for node in (*known, before) if node != NOWHERE], dtype=np.intp)
    taken, targets = writes.take_room(
        books, hub, nodes, now, event.cause, beside=beside, priority=event.priority
    )
    accepted = chosen
    if len(taken) < len(nodes):
        # Room is given tenant by tenant, so what was taken need not be the leading blocks.
        position_of = dict(zip(nodes.tolist(), chosen, strict=True))
        accepted = [position_of.pop(node) for node in taken.tolist()]
        books.forget_if_useless(list(position_of))
    started: list[Operation] = []
    if accepted:
        keys = [event.keys[position] for position in accepted]
        _hint(books, event, taken, now)
        started = copies.start(
            books,
            Purpose.SAVE,
            source=DEVICE,
            target=HUB,
            keys=keys,
            source_slots=event.slots[:, accepted].astype(np.intp),
            target_slots=targets,
            deadline=_deadline(books, event.deadline, now),
            cause=event.cause,
        )
    books.history.add(now, "saving", event.cause, list(event.keys))
    _answer(books, started, accepted, _why_not_saved(books, hub, event, chosen, accepted))


def _hint(books: Books, event: Load | Save, nodes: NDArray[np.intp], now: float) -> None:
    if event.priority or event.ttl_s is not None:
        until = None if event.ttl_s is None else now + event.ttl_s
        books.hint(nodes, event.priority, until)


def _why_not_saved(
    books: Books, hub: Tier, event: Save, chosen: list[int], accepted: list[int]
) -> Miss:
    if not hub.on:
        return Miss(reason=MissReason.TIER_OFF)
    if len(accepted) == len(chosen):
        return Miss(reason=MissReason.NONE)
    position = next(position for position in chosen if position not in accepted)
    departure = books.departed.get(event.keys[position])
    reason = MissReason.NO_ROOM
    if departure is not None and departure.reason in (MissReason.OVER_QUOTA, MissReason.REFUSED):
        reason = departure.reason
    return Miss(reason=reason, block=position)


def let_go(books: Books, event: LetGo, _now: float) -> None:
    """Blocks of a request that has ended are the first to leave, beyond the first of them."""
    require_count("keep", event.keep)
    known = books.nodes.match(event.keys)
    books.let_go(known[event.keep :])


def prefetch(books: Books, event: Prefetch, now: float) -> None:
    """Brings blocks that lie below the hub up into it."""
    require_sound_wishes(priority=0, ttl_s=None, deadline=event.deadline)
    hub = books.hub
    started: list[Operation] = []
    found = fetchable(books, event.keys)
    below = np.flatnonzero(found.source > HUB)
    chosen = below[:0]
    room = 0
    if hub is not None and len(below):
        here = hub.slot_of[found.nodes]
        here = here[here != NOWHERE]
        hub.pool.hold(here)
        plan = hub.plan_room(len(below), None)
        hub.put_back(plan.victims)
        room = plan.slot_count
        chosen = below[:room]
        # Tier by tier, and answered in that order: `accepted` goes with the operations.
        chosen = chosen[np.argsort(found.source[chosen], kind="stable")]
        for index in sorted(set(found.source[chosen].tolist())):
            positions = chosen[found.source[chosen] == index]
            deadline = _deadline(books, event.deadline, now)
            nodes = found.nodes[positions]
            started += stage(books, books.tier(index), nodes, None, deadline, event.cause, now)
            hub.note_fetched(nodes, index)
        hub.pool.unhold(here)
        hub.offer_slots(here)
    miss = explain(books, event.keys, len(found.nodes))
    if room < len(below):
        miss = Miss(reason=MissReason.NO_ROOM, block=int(below[room]))
    _answer(books, started, chosen.tolist(), miss)


def _check_offload(books: Books, keys: Sequence[Key], slots: NDArray[np.int32]) -> None:
    if books.tiers[DEVICE] is not None:
        raise ValueError("this engine's device slots are managed: use acquire and commit")
    groups = books.settings.group_count
    if slots.shape != (groups, len(keys)):
        raise ValueError(
            f"slots has shape {slots.shape}, must be {(groups, len(keys))}: "
            "one row a KV group, one column a key"
        )
    if len(set(keys)) != len(keys):
        raise ValueError("keys: a key occurs twice")


def _require_ranks(books: Books) -> None:
    if not books.healthy:
        lost = ", ".join(map(str, sorted(books.lost_ranks)))
        raise UnavailableError(f"rank {lost} is lost: no block can be copied on every rank")


def _worth_saving(books: Books, hub: Tier, keys: Sequence[Key], known: Sequence[int]) -> list[int]:
    """Positions of blocks that are not in the hub and have earned a place there."""
    absent = [
        position
        for position, node in enumerate(known)
        if node == NOWHERE or hub.slot_of[node] == NOWHERE
    ]
    write = hub.settings.write
    if write.kind is not WriteKind.SELECTIVE:
        return absent
    earned: list[int] = []
    for position in absent:
        key = keys[position]
        seen = books.sightings.pop(key, 0) + 1
        if seen >= write.hits:
            earned.append(position)
        else:
            books.sightings[key] = seen
    excess = len(books.sightings) - books.settings.departed_count
    for key in list(islice(books.sightings, max(0, excess))):
        del books.sightings[key]
    return earned


def _name(
    books: Books, event: Save, positions: list[int], known: Sequence[int]
) -> NDArray[np.intp]:
    """The nodes of the chosen blocks; unknown ones are made known, a run at a time."""
    tenant = books.tenant(event.tenant)
    nodes: list[int] = []
    place = 0
    while place < len(positions):
        first = positions[place]
        before = event.keys[first - 1] if first else event.parent
        parent = books.parent_node(before, tenant=tenant)
        node = known[first]
        if node == NOWHERE:
            count = _unknown_run(known, positions, place)
            run = event.keys[first : first + count]
            nodes += books.add_chain(run, parent=parent, tenant=tenant).tolist()
        else:
            count = 1
            books.link(node, parent)
            nodes.append(node)
        place += count
    return np.array(nodes, dtype=np.intp)


def _unknown_run(known: Sequence[int], positions: list[int], place: int) -> int:
    """How many chosen blocks from `place` on are unknown and follow each other."""
    first = positions[place]
    count = 1
    for position in positions[place + 1 :]:
        if position != first + count or known[position] != NOWHERE:
            break
        count += 1
    return count


def _deadline(books: Books, deadline: float | None, now: float) -> float:
    return now + books.settings.operation_timeout_s if deadline is None else deadline


def _answer(books: Books, started: list[Operation], accepted: Sequence[int], miss: Miss) -> None:
    books.effects.append(
        Started(
            operations=tuple(operation.id for operation in started),
            accepted=tuple(accepted),
            miss=miss,
        )
    )
