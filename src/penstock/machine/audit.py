"""The whole state of a cache: every invariant checked.

`audit` recomputes everything from scratch and raises `InvariantViolation`, with the story of what
does not add up; the simulator calls it after every event. It works on plain lists of what is used:
the states it is run on most are small, and there lists are faster than arrays. A tier may have
millions of free slots, which it looks at as arrays: an operator audits an engine that serves.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Purpose
from penstock.cache.settings import DEVICE, HUB
from penstock.cache.states import (
    DOOMED,
    FILLING,
    FREE,
    LEAVING,
    READY,
    LeaseState,
    OperationState,
    SlotState,
)
from penstock.errors import InvariantViolation
from penstock.machine.stored import is_stored, saves_max

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.cache.operations import Operation
    from penstock.cache.tier import Tier
    from penstock.machine.books import Books, LeaseRecord


_SOUND = {
    (FREE, False, False),
    (FILLING, True, False),
    (FILLING, True, True),
    (READY, False, True),
    (READY, True, True),
    (LEAVING, True, True),
    (DOOMED, True, False),
}
"""What a slot may be: its state, whether something holds it, whether a block lies there."""
_LOADING, _LEASE_READY = LeaseState.LOADING, LeaseState.READY
_RUNNING, _ENDING = OperationState.RUNNING, OperationState.ENDING


def audit(books: Books) -> None:
    """Checks everything.

    Raises `InvariantViolation`: something does not add up.
    """
    if books.agenda:
        _fail(books, "the agenda is not empty between events")
    tiers = books.owned_tiers()
    parents, tenants = books.nodes.parent.tolist(), books.nodes.tenant.tolist()
    _audit_nodes(books, tiers, parents)
    for tier in tiers:
        _audit_slots(books, tier)
        _audit_residency(books, tier, parents, tenants)
        _audit_holders(books, tier)
        _audit_eviction(books, tier)
    device = books.tiers[DEVICE]
    if device is not None:
        states, nodes = device.pool.state.tolist(), device.pool.node.tolist()
        for lease in books.leases.values():
            _audit_lease(books, lease, states, nodes)
    if not books.searches.keys() <= books.leases.keys():
        _fail(books, "a lease that has ended waits for a store")
    aims = Counter(lease.frontier for lease in books.leases.values() if lease.frontier)
    if aims != books.frontiers:
        _fail(books, "the blocks being computed are not those the leases aim at")
    if Counter(key for keys in books.pins.values() for key in keys) != books.pinned:
        _fail(books, "the pinned keys are not those that somebody pinned")
    if books.expiries.entry_count > 3 * books.nodes.capacity:
        _fail(books, f"{books.expiries.entry_count} times to live are noted, more than blocks")
    _audit_operations(books)
    # Last: where a slot is wrong, its count is, too.
    _audit_counts(books, tiers)


def _audit_counts(books: Books, tiers: list[Tier]) -> None:
    """The numbers that are kept for whoever asks are those of the slots and nodes."""
    for tier in tiers:
        pool = tier.pool
        for state in SlotState:
            count = int(np.count_nonzero(pool.state == state))
            if count != pool.count(state):
                counted = f"{count} slots are {state.name}, not {pool.count(state)}"
                _fail(books, f"tier {tier.name}: {counted} as booked")
        held = int(np.count_nonzero(pool.holders))
        if held != pool.held_count:
            counted = f"{held} slots are held, not {pool.held_count}"
            _fail(books, f"tier {tier.name}: {counted} as booked")
    nodes = books.nodes
    hollow = len(nodes.ids) - sum(map(bool, nodes.copy_count.tolist()))
    if hollow != nodes.hollow_count():
        _fail(books, f"{hollow} blocks are hollow, not {nodes.hollow_count()} as booked")


def _fail(books: Books, problem: str, node: int = NOWHERE) -> NoReturn:
    raise InvariantViolation(problem, story=books.story_of_node(node), node=node)


def _audit_nodes(books: Books, tiers: list[Tier], parents: list[int]) -> None:
    """Keys and nodes map one to one, and every node is there for a reason."""
    nodes = books.nodes
    copies = _count((tier.placed_nodes().tolist() for tier in tiers), nodes.capacity)
    followers = _count([[parents[number] for number in nodes.ids.values()]], nodes.capacity)
    copy_count, child_count = nodes.copy_count.tolist(), nodes.child_count.tolist()
    pins = nodes.pins.tolist()
    for key, number in nodes.ids.items():
        if nodes.keys[number] != key:
            _fail(books, f"node {number} has another key than the index says")
        if copies[number] != copy_count[number]:
            _fail(books, f"node {number} has {copies[number]} copies, not as booked", number)
        if followers[number] != child_count[number]:
            _fail(books, f"node {number} has {followers[number]} followers", number)
        if not copies[number] and not followers[number]:
            _fail(books, f"node {number} has neither copies nor followers", number)
        if pins[number] != books.pinned.get(key, 0):
            _fail(books, f"node {number} has a wrong number of pins", number)
    known = set(nodes.ids.values())
    for number, (copied, followed) in enumerate(zip(copies, followers, strict=True)):
        if (copied or followed) and number not in known:
            _fail(books, f"node {number} is used but not known")


def _count(lists: Iterable[list[int]], capacity: int) -> list[int]:
    counts = [0] * capacity
    for numbers in lists:
        for number in numbers:
            if number != NOWHERE:
                counts[number] += 1
    return counts


def _audit_slots(books: Books, tier: Tier) -> None:
    """Free slots are free, once; every other slot is in use for a reason."""
    pool = tier.pool
    free = pool.free_slots()
    is_free = np.zeros(pool.slot_count, dtype=np.bool_)
    is_free[free] = True
    free_count = int(np.count_nonzero(pool.state == FREE))
    if np.count_nonzero(is_free) != len(free) or len(free) != free_count:
        _fail(books, f"tier {tier.name}: slots that are free and slots said to be differ")
    leaving_count = int(np.count_nonzero(pool.state == LEAVING))
    if leaving_count != pool.leaving_count:
        _fail(books, f"tier {tier.name}: {leaving_count} slots are leaving, not as booked")
    if np.count_nonzero(pool.state[free] != FREE):
        _fail(books, f"tier {tier.name}: a slot can be taken though it is in use")
    # Of a large tier most may be free: those without anything are sound.
    used = ((pool.state != FREE) | (pool.holders != 0) | (pool.node != NOWHERE)).nonzero()[0]
    columns = (used, pool.state[used], pool.holders[used], pool.node[used])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for slot, state, holders, node in rows:
        if (state, holders > 0, node != NOWHERE) not in _SOUND or holders < 0:
            held = f"held {holders} times, {'with' if node != NOWHERE else 'without'} a block"
            problem = f"tier {tier.name}: slot {slot} is {SlotState(state).name} but {held}"
            _fail(books, problem, node)


def _audit_residency(books: Books, tier: Tier, parents: list[int], tenants: list[int]) -> None:
    """Slots and nodes map one to one; counts of followers and of tenants are right."""
    slot_of = tier.slot_of.tolist()
    children = [0] * len(slot_of)
    used: dict[int, int] = {}
    placed = 0
    slots = (tier.pool.node != NOWHERE).nonzero()[0]
    columns = (slots, tier.pool.node[slots], tier.pool.state[slots])
    for slot, node, state in zip(*(column.tolist() for column in columns), strict=True):
        placed += 1
        used[tenants[node]] = used.get(tenants[node], 0) + 1
        if slot_of[node] != slot:
            _fail(books, f"tier {tier.name}: slot {slot} and its block do not agree", node)
        if state != LEAVING and parents[node] != NOWHERE:
            children[parents[node]] += 1
    if len(slot_of) - slot_of.count(NOWHERE) != placed:
        _fail(books, f"tier {tier.name}: a block is said to lie where it does not")
    if children != tier.children.tolist():
        _fail(books, f"tier {tier.name}: followers are {children}, booked {tier.children.tolist()}")
    if used != tier.used_by:
        _fail(books, f"tier {tier.name}: tenants use {used}, booked {tier.used_by}")
    _audit_priorities(books, tier, tenants)


def _audit_priorities(books: Books, tier: Tier, tenants: list[int]) -> None:
    """Copies have the priority of their node, or zero where their tenant has raised enough."""
    if not books.nodes.hinted:
        return
    wanted, given = books.nodes.priority.tolist(), tier.priority.tolist()
    raised: dict[int, int] = {}
    for node in tier.placed_nodes().tolist():
        if given[node] not in (wanted[node], min(wanted[node], 0)):
            problem = f"tier {tier.name}: a copy has priority {given[node]}, not {wanted[node]}"
            _fail(books, problem, node)
        if given[node] > 0:
            raised[tenants[node]] = raised.get(tenants[node], 0) + 1
    if raised != tier.raised_by:
        _fail(books, f"tier {tier.name}: tenants raised {raised}, booked {tier.raised_by}")


def _audit_holders(books: Books, tier: Tier) -> None:
    """A slot is held as often as leases and operations say."""
    held = Counter(_holds(books, tier))
    slots = tier.pool.holders.nonzero()[0]
    booked = dict(zip(slots.tolist(), tier.pool.holders[slots].tolist(), strict=True))
    if held != booked:
        slot = min(slot for slot in held.keys() | booked if held[slot] != booked.get(slot, 0))
        count = f"held {held[slot]} times, booked {booked.get(slot, 0)}"
        problem = f"tier {tier.name}: slot {slot} is {count}"
        _fail(books, problem, int(tier.pool.node[slot]))


def _holds(books: Books, tier: Tier) -> Iterator[int]:
    if tier.index == DEVICE:
        for lease in books.leases.values():
            yield from lease.table.tolist()
            yield from lease.twins
    for operation in books.ledger.operations.values():
        if operation.source == tier.index:
            yield from operation.source_slots.tolist()
        if operation.target == tier.index:
            yield from operation.target_slots.tolist()
        if operation.onward is not None and tier.index == DEVICE:
            yield from (slot for slot in operation.onward.tolist() if slot != NOWHERE)


def _audit_eviction(books: Books, tier: Tier) -> None:
    """The policies know exactly the blocks that may leave: none too many, none forgotten."""
    may_leave = {node for node in tier.placed_nodes().tolist() if tier.standing(node) is not None}
    candidates = tier.policy.candidates()
    if may_leave != candidates:
        wrong = may_leave ^ candidates
        _fail(books, f"tier {tier.name}: the policy is wrong about {wrong}", min(wrong))
    for tenant, policy in tier.quota_policies():
        own = {node for node in may_leave if books.nodes.tenant[node] == tenant}
        if own != policy.candidates():
            wrong = own ^ policy.candidates()
            problem = f"tier {tier.name}: the policy of tenant {tenant} is wrong about {wrong}"
            _fail(books, problem, min(wrong))


def _audit_lease(books: Books, lease: LeaseRecord, states: list[int], nodes: list[int]) -> None:
    table = lease.table.tolist()
    if (lease.state is _LOADING) != bool(lease.waiting or lease.id in books.searches):
        _fail(books, f"lease {lease.id} is {lease.state.name}, waits for {lease.waiting}")
    if len(set(table)) != len(table):
        _fail(books, f"lease {lease.id} has a slot twice")
    if any(states[slot] in (FREE, LEAVING) for slot in table):
        _fail(books, f"lease {lease.id} has slots that are free or leaving")
    if lease.state is _LEASE_READY and lease.era == books.era:
        for slot in table[: lease.matched_blocks]:
            # A block of its own that it shares with a fork has no name and is still filling.
            if states[slot] == DOOMED or (states[slot] == FILLING and nodes[slot] != NOWHERE):
                _fail(books, f"lease {lease.id} is ready with a block that is not")
    for operation_id in lease.waiting:
        operation = books.ledger.operations.get(operation_id)
        if operation is None or lease.id not in operation.waiters:
            _fail(books, f"lease {lease.id} waits for {operation_id}, which does not know")


def _audit_operations(books: Books) -> None:
    staging = {
        slot: operation.id
        for operation in books.ledger.running()
        if operation.purpose is Purpose.STAGE
        for slot in operation.target_slots.tolist()
    }
    if staging != books.staging:
        _fail(books, "the hub slots being staged are not those of the stages under way")
    queued = dict.fromkeys(books.rates.hops, 0)
    for operation in books.ledger.operations.values():
        hop = (operation.source, operation.target)
        if hop in queued:
            queued[hop] += len(operation.keys)
        if operation.state not in (_RUNNING, _ENDING) or not operation.waiting_ranks:
            _fail(books, f"operation {operation.id} has ended but is still in the ledger")
        if operation.state is _ENDING and operation.waiters:
            _fail(books, f"leases wait for operation {operation.id}, which was given up")
        if operation.state is _RUNNING:
            _audit_targets(books, operation)
    if queued != {hop: meter.queued for hop, meter in books.rates.hops.items()}:
        _fail(books, "the blocks queued on the hops are not those of the copies under way")
    _audit_stores(books, queued)
    _audit_backlogs(books)


def _audit_backlogs(books: Books) -> None:
    """What a stored tier missed lies in the hub, and is written only where the tier is on."""
    for index, backlog in books.backlogs.items():
        hub, tier = books.tier(HUB), books.tier(index)
        for key in (*backlog.missed, *backlog.due):
            node = books.nodes.get(key)
            if node == NOWHERE or hub.slot_of[node] == NOWHERE:
                _fail(books, f"tier {tier.name} is to be given a block that is not in the hub")
        if backlog.due and not tier.on:
            _fail(books, f"tier {tier.name} is off, and is given what it missed")


def _audit_stores(books: Books, queued: dict[tuple[int, int], int]) -> None:
    """Only a store process goes on for a rank that is lost, and saves into stores are bounded."""
    for operation in books.ledger.operations.values():
        waits_in_vain = not books.lost_ranks.isdisjoint(operation.waiting_ranks)
        if waits_in_vain and not is_stored(books, operation):
            _fail(books, f"operation {operation.id} waits for a rank that is lost")
    for tier in books.lower_tiers():
        # A hub that was made smaller has more of them, until they end.
        most = saves_max(books, books.tier(HUB).pool.slot_count)
        if tier.settings.stored and queued[HUB, tier.index] > most:
            _fail(books, f"{queued[HUB, tier.index]} blocks are on their way into {tier.name}")


def _audit_targets(books: Books, operation: Operation) -> None:
    """What a copy under way writes is not in use, nor what it is to be passed on to."""
    target = books.tiers[operation.target]
    if target is not None:
        for slot in operation.target_slots.tolist():
            if target.pool.state[slot] not in (FILLING, DOOMED):
                _fail(books, f"operation {operation.id} writes into slot {slot}, in use")
    # Whoever gave a slot up left it to the operation, which fills it for the next one.
    awaited = () if operation.onward is None else operation.onward.tolist()
    for slot in awaited:
        if slot != NOWHERE and books.device.pool.state[slot] != FILLING:
            _fail(books, f"operation {operation.id} passes on to slot {slot}, given up")
