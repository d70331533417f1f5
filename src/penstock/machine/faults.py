"""Ranks and tiers that come and go, blocks that are found, and resets.

A reset cancels what is under way and starts a new epoch at once. What old operations hold
stays held until their ranks have reported, so a late answer finds its operation, gives its
slots back, and changes nothing else.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.explain import MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Purpose
from penstock.cache.settings import DEVICE
from penstock.cache.states import FREE, LEAVING, LeaseState, OperationMove, OperationState
from penstock.errors import counted
from penstock.machine import copies, leases, stored
from penstock.machine.events import CopyReport

if TYPE_CHECKING:
    from penstock.cache.operations import Operation
    from penstock.cache.tier import Tier
    from penstock.machine.books import Books
    from penstock.machine.events import (
        ChangeWeights,
        Discovered,
        EmptyDevice,
        RankBack,
        RankLost,
        Reset,
        TierOff,
        TierOn,
        TierVoided,
        Vanished,
    )
    from penstock.vocabulary.keys import Key


def reset(books: Books, event: Reset, now: float) -> None:
    """Voids everything cached. Running requests keep their blocks, unpublished."""
    books.history.add(now, "reset", event.why)
    for backlog in books.backlogs.values():
        backlog.clear()
    _stop_all(books, now, "reset")
    _void_all(books, MissReason.RESET, now, "reset")
    books.contents.clear()
    books.weights.earlier_contents.clear()
    _begin_era(books)


def change_weights(books: Books, event: ChangeWeights, now: float) -> None:
    """Keys are others from now on; running requests keep their blocks, unpublished.

    Blocks in memory below the device stay under their keys, which name their weights. The device
    is emptied: its room is needed at once. Stored tiers list what they have of the new weights.
    """
    books.history.add(now, "weights changed", event.after)
    for backlog in books.backlogs.values():
        backlog.give_up()  # A store keeps blocks of other weights apart, and none is asked for now.
    _stop_all(books, now, "the weights have changed")
    if not event.before or event.before == event.after:
        # The same keys may come back, for other bytes.
        _void_all(books, MissReason.WEIGHTS, now, "weights")
    for tier in books.owned_tiers():
        if tier.index == DEVICE or tier.settings.stored:
            _empty(books, tier, MissReason.WEIGHTS, now, "weights")
    books.weights.change(event.before, event.after, books.contents, books.lower_tiers())
    books.contents.clear()
    _begin_era(books)
    for tier in books.lower_tiers():
        back = books.nodes.of_weights_now(tier.ready_nodes())
        if len(back):
            # Those of a chain are mostly numbered one by one.
            copies.announce(books, tier, np.sort(back))


def _stop_all(books: Books, now: float, why: str) -> None:
    """Cancels what is under way; what running requests compute is not published."""
    for lease in list(books.leases.values()):
        books.aim(lease, None)
        if lease.state is LeaseState.LOADING:
            leases.lose(books, lease, now)
    for operation in books.ledger.running():
        copies.decide(books, operation, OperationMove.CANCEL, now, failure=why)


def _void_all(books: Books, reason: MissReason, now: float, cause: str) -> None:
    """Empties all tiers; sums of before do not pass any more, whatever still lies in slots."""
    for tier in books.owned_tiers():
        _empty(books, tier, reason, now, cause)
    books.ledger.epoch += 1


def _begin_era(books: Books) -> None:
    books.foreign.clear()
    books.sightings.clear()
    books.weights.era += 1
    books.kv_events.cleared(books.era)


def empty_device(books: Books, event: EmptyDevice, now: float) -> None:
    """Forgets every block on the device; no lease may be open."""
    if books.leases:
        raise ValueError(f"{len(books.leases)} leases are open, must be none")
    books.history.add(now, "device emptied", event.why)
    _empty(books, books.device, MissReason.RESET, now, event.why)


def rank_lost(books: Books, event: RankLost, now: float) -> None:
    """A rank is dead: what waits for it fails, and no device block is whole any more."""
    _check_rank(books, event.rank)
    if event.rank in books.lost_ranks:
        return
    books.lost_ranks.add(event.rank)
    books.history.add(now, "rank lost", f"rank {event.rank}")
    for lease in list(books.leases.values()):
        leases.lose(books, lease, now)
    failure = f"rank {event.rank} is lost"
    for operation in list(books.ledger.operations.values()):
        if stored.is_stored(books, operation):
            # The store process goes on in the arena of the dead rank. What it writes down is good;
            # what it brings up, no request waits for any more.
            if operation.purpose is Purpose.STAGE and operation.state is OperationState.RUNNING:
                copies.decide(books, operation, OperationMove.FAIL, now, failure=failure)
        elif event.rank in operation.waiting_ranks:
            report = CopyReport(operation=operation.id, rank=event.rank, failure=failure)
            copies.report(books, report, now)
    device = books.tiers[DEVICE]
    if device is not None:
        _empty(books, device, MissReason.LOST, now, f"rank {event.rank}")


def rank_back(books: Books, event: RankBack, now: float) -> None:
    """A rank is there again: blocks can be filled on every rank once more."""
    _check_rank(books, event.rank)
    books.lost_ranks.discard(event.rank)
    books.history.add(now, "rank back", f"rank {event.rank}")


def tier_off(books: Books, event: TierOff, now: float) -> None:
    """A tier cannot be used: what is under way there fails, what lies there waits."""
    tier = _lower_tier(books, event.tier)
    tier.on = False
    if tier.settings.stored:
        books.backlogs[tier.index].pause()
    books.losses += 1
    books.history.add(now, "tier off", tier.name, (), event.why)
    failure = f"tier {tier.name} is off"
    for operation in _operations_of(books, tier):
        if operation.state is OperationState.RUNNING:
            copies.decide(books, operation, OperationMove.FAIL, now, failure=failure)
        # The fence of the hub is about ranks: the store process may still use its slots.
        if event.fenced and (tier.settings.stored or not stored.is_stored(books, operation)):
            for rank in sorted(operation.waiting_ranks):
                report = CopyReport(operation=operation.id, rank=rank, failure=failure)
                copies.report(books, report, now)


def tier_on(books: Books, event: TierOn, now: float) -> None:
    """A tier can be used again; if its bytes are gone, so are its blocks."""
    tier = _lower_tier(books, event.tier)
    if not event.kept:
        _lose_bytes(books, tier, now, f"tier {tier.name} lost its bytes")
    tier.on = True
    books.history.add(now, "tier on", tier.name)
    if tier.settings.stored:
        # Written from the next step on: what lies in the tier stays as it is until then.
        books.backlogs[tier.index].resume()


def tier_voided(books: Books, event: TierVoided, now: float) -> None:
    """A reset has voided what lay in a stored tier; that of another engine leaves ours to us."""
    tier = _lower_tier(books, event.tier)
    if not tier.settings.stored:
        raise ValueError(f"tier {tier.name} is not stored, must be to be voided")
    _lose_bytes(books, tier, now, f"tier {tier.name} was voided")
    books.losses += 1
    books.history.add(now, "tier voided", tier.name)
    if event.own:
        return
    books.backlogs[tier.index].clear()
    books.nodes.outdate_all(tier.index)
    for lease in books.leases.values():
        lease.outdated.add(tier.index)


def _lose_bytes(books: Books, tier: Tier, now: float, failure: str) -> None:
    """What lay in a tier is there no more; what is under way there fails."""
    for operation in _operations_of(books, tier):
        if operation.state is OperationState.RUNNING:
            copies.decide(books, operation, OperationMove.FAIL, now, failure=failure)
    _empty(books, tier, MissReason.LOST, now, tier.name)


def discovered(books: Books, event: Discovered, now: float) -> None:
    """Blocks lie in a tier that this cache did not write: a restart, or another engine."""
    tier = _lower_tier(books, event.tier)
    if event.foreign:
        books.foreign.update(dict.fromkeys(event.keys, tier.index))
        excess = len(books.foreign) - books.settings.departed_count
        for key in list(islice(books.foreign, max(0, excess))):
            del books.foreign[key]
        return
    if tier.settings.stored:
        _check_page(tier, event)
        stored.discovered(books, tier, event, now)
        return
    slots_found = _check_found(books, tier, event)
    tenant = books.tenant("")
    nodes: list[int] = []
    slots: list[int] = []
    for key, parent_key, slot in zip(event.keys, event.parents, slots_found, strict=True):
        parent = books.parent_node(parent_key, tenant=tenant)
        node = books.nodes.get(key)
        if node == NOWHERE:
            node = int(books.add_chain([key], parent=parent, tenant=tenant)[0])
        else:
            books.link(node, parent)
        if tier.slot_of[node] != NOWHERE:
            continue
        placed = np.array([slot], dtype=np.intp)
        tier.pool.take_exactly(placed)
        tier.place(np.array([node], dtype=np.intp), placed, tick=books.tick)
        nodes.append(node)
        slots.append(slot)
    if nodes:
        found = np.array(nodes, dtype=np.intp)
        tier.pool.fill(np.array(slots, dtype=np.intp))
        tier.offer(found)
        copies.announce(books, tier, found)
        books.history.add(now, "discovered", tier.name, list(event.keys))


def vanished(books: Books, event: Vanished, now: float) -> None:
    """A store gave blocks up by itself."""
    tier = _lower_tier(books, event.tier)
    if not tier.settings.stored:
        raise ValueError(f"tier is {event.tier}, {tier.name!r}: only a stored tier gives blocks up")
    stored.vanished(books, tier, event, now)


def _check_page(tier: Tier, event: Discovered) -> None:
    if event.slots is not None:
        raise ValueError(
            f"slots: must be None for stored tier {tier.name!r}: its store alone knows where"
        )
    if len(event.keys) != len(event.parents):
        raise ValueError(
            f"{len(event.keys)} keys and {len(event.parents)} parents: "
            "there must be as many of each"
        )


def _check_found(books: Books, tier: Tier, event: Discovered) -> list[int]:
    if event.slots is None:
        raise ValueError(f"slots: is None, must name where in tier {tier.name!r} the blocks lie")
    if not len(event.keys) == len(event.parents) == len(event.slots):
        raise ValueError(
            f"{counted(len(event.keys), 'key')}, {counted(len(event.parents), 'parent')} and "
            f"{counted(len(event.slots), 'slot')}: "
            "there must be as many of each"
        )
    slots: list[int] = event.slots.tolist()
    if len(set(slots)) != len(slots) or len(set(event.keys)) != len(slots):
        raise ValueError("slots: a slot or a key occurs twice")
    _require_ends(books, event)
    for key, slot in zip(event.keys, slots, strict=True):
        if not 0 <= slot < tier.pool.slot_count:
            raise ValueError(
                f"slots: slot {slot} is outside of tier {tier.name!r}, "
                f"which has {tier.pool.slot_count}"
            )
        node = books.nodes.get(key)
        known_here = node != NOWHERE and tier.slot_of[node] == slot
        is_open = tier.pool.state[slot] == FREE
        if not is_open and not known_here:
            raise ValueError(f"slots: slot {slot} of tier {tier.name!r} is not free")
    return slots


def _require_ends(books: Books, event: Discovered) -> None:
    """Refuses parents that lead in a circle, as damaged headers may say."""
    before = dict(zip(event.keys, event.parents, strict=True))
    sound: set[Key] = set()
    for key in event.keys:
        walked: set[Key] = set()
        at: Key | None = key
        while at is not None and at not in sound:
            if at in walked:
                raise ValueError("parents: blocks would come before themselves")
            walked.add(at)
            at = before[at] if at in before else _key_before(books, at)
        sound |= walked


def _key_before(books: Books, key: Key) -> Key | None:
    node = books.nodes.get(key)
    parent = NOWHERE if node == NOWHERE else int(books.nodes.parent[node])
    return None if parent == NOWHERE else books.nodes.key_of(parent)


def _empty(books: Books, tier: Tier, reason: MissReason, now: float, cause: str) -> None:
    """Takes every block out of a tier: unused slots are free at once, others when let go."""
    pool = tier.pool
    slots = np.flatnonzero(pool.node != NOWHERE).astype(np.intp)
    if not len(slots):
        return
    leaving = slots[pool.state[slots] == LEAVING]
    if len(leaving):
        tier.keep(pool.node[leaving])
    books.condemn(tier, slots, reason, now, cause)


def _operations_of(books: Books, tier: Tier) -> list[Operation]:
    return [
        operation
        for operation in books.ledger.operations.values()
        if tier.index in (operation.source, operation.target)
    ]


def _lower_tier(books: Books, index: int) -> Tier:
    if not DEVICE < index < len(books.tiers):
        raise ValueError(f"tier is {index}, must be from 1 to {len(books.tiers) - 1}")
    return books.tier(index)


def _check_rank(books: Books, rank: int) -> None:
    if not 0 <= rank < books.settings.rank_count:
        raise ValueError(f"rank is {rank}, must be from 0 to {books.settings.rank_count - 1}")
