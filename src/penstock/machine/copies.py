"""The life of an operation: started, reported on by every rank, ended once.

    start ──Copy──→ ranks ──CopyReport──→ report ─┬─ all ranks: complete ─→ give back what it held
                                              └─ a rank failed, a cancel, a deadline:
                                                 decide now, give back when all have reported

What an end means for leases and for further tiers is put on the books' agenda, and is dealt
with before the event is over.

The one rule that must not break: what an operation holds comes back exactly once, and only
when no rank can touch it any more.
"""

from __future__ import annotations

from itertools import compress, pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.explain import MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import BlockFault, Operation, Outcome, Purpose
from penstock.cache.settings import DEVICE, HUB
from penstock.cache.states import FILLING, LEAVING, READY, OperationMove, OperationState
from penstock.machine.effects import Abandon, Copy, Ended, Settled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.tier import Tier
    from penstock.machine.books import Books
    from penstock.machine.events import CopyReport
    from penstock.vocabulary.keys import Key, LeaseId, OperationId


_WORSE_THAN = {
    None: frozenset(BlockFault),
    BlockFault.UNREADABLE: frozenset({BlockFault.MISSING, BlockFault.CORRUPT}),
    BlockFault.MISSING: frozenset({BlockFault.CORRUPT}),
    BlockFault.CORRUPT: frozenset(),
}
"""Of what several ranks say about one block, what says most about the source counts."""


def start(
    books: Books,
    purpose: Purpose,
    *,
    source: int,
    target: int,
    keys: Sequence[Key],
    source_slots: NDArray[np.intp],
    target_slots: NDArray[np.intp],
    deadline: float,
    cause: str,
    onward: NDArray[np.intp] | None = None,
) -> list[Operation]:
    """Starts copies of blocks, in operations of bounded size; every slot is held until the end.

    Slots are one a block, or one row a KV group for an engine's own device slots.
    """
    limit = books.settings.operation_blocks_max
    started: list[Operation] = []
    for first in range(0, len(keys), limit):
        part = slice(first, first + limit)
        operation = Operation(
            id=books.ledger.next_id(),
            purpose=purpose,
            source=source,
            target=target,
            keys=list(keys[part]),
            source_slots=source_slots[..., part],
            target_slots=target_slots[..., part],
            waiting_ranks=set(range(books.settings.rank_count)),
            deadline=deadline,
            cause=cause,
            onward=None if onward is None else onward[part],
        )
        for tier, slots in _sides(books, operation):
            tier.pool.hold(slots)
        if operation.onward is not None:
            awaited = operation.onward[operation.onward != NOWHERE]
            books.device.pool.hold(awaited)
        if purpose is Purpose.STAGE:
            books.staging.update(dict.fromkeys(operation.target_slots.tolist(), operation.id))
        books.ledger.open(operation)
        books.rates.started(operation, books.now)
        books.effects.append(
            Copy(
                operation=operation.id,
                purpose=purpose,
                source=source,
                target=target,
                keys=operation.keys,
                source_slots=operation.source_slots.astype(np.int32),
                target_slots=operation.target_slots.astype(np.int32),
                deadline=deadline,
                cause=cause,
                parents=_parents_for_store(books, operation),
            )
        )
        started.append(operation)
    return started


def _parents_for_store(books: Books, operation: Operation) -> Sequence[Key | None]:
    """The keys of the blocks before those that are written into a stored tier."""
    tier = books.tiers[operation.target]
    if tier is None or not tier.settings.stored:
        return ()
    parents = books.nodes.parent[tier.pool.node[operation.target_slots]].tolist()
    keys = books.nodes.keys
    return [None if parent == NOWHERE else keys[parent] for parent in parents]


def wait_for(books: Books, operations: list[Operation], waiters: set[LeaseId]) -> None:
    """Leases wait for those of the operations that bring blocks of theirs."""
    for lease_id in waiters:
        lease = books.leases.get(lease_id)
        if lease is None:
            continue
        for operation in operations:
            slots = operation.target_slots if operation.onward is None else operation.onward
            if np.isin(slots, lease.table).any():
                lease.waiting.add(operation.id)
                operation.waiters.add(lease_id)


def pass_on(books: Books, onward: dict[int, int]) -> list[Operation]:
    """Has running stages load their blocks into device slots when they arrive in the hub.

    `onward` maps the hub slot a stage fills to the device slot that waits for it.
    """
    touched: dict[OperationId, Operation] = {}
    for hub_slot, device_slot in onward.items():
        operation = books.ledger.operations[books.staging[hub_slot]]
        touched[operation.id] = operation
        if operation.onward is None:
            operation.onward = np.full(len(operation.keys), NOWHERE, dtype=np.intp)
        position = operation.target_slots.tolist().index(hub_slot)
        operation.onward[position] = device_slot
        books.device.pool.hold(operation.onward[position : position + 1])
    return list(touched.values())


def report(books: Books, event: CopyReport, now: float) -> None:
    """A rank is through with its part."""
    operation = books.ledger.operations.get(event.operation)
    if operation is None or event.rank not in operation.waiting_ranks:
        # A duplicate, a rank that was given up, or an answer to an earlier life.
        books.counters.reports_late += 1
        return
    for position, _ in event.faults:
        if not 0 <= position < len(operation.keys):
            raise ValueError(
                f"faults: position {position} is outside of operation {operation.id}, "
                f"which has {len(operation.keys)} blocks"
            )
    operation.waiting_ranks.discard(event.rank)
    for position, fault in event.faults:
        if fault in _WORSE_THAN[operation.faults.get(position)]:
            operation.faults[position] = fault
    if event.failure and operation.state is OperationState.RUNNING:
        decide(books, operation, OperationMove.FAIL, now, failure=event.failure)
    if operation.waiting_ranks:
        operation.move(OperationMove.REPORT)
        return
    if operation.state is OperationState.RUNNING:
        _complete(books, operation, now)
    else:
        _settle(books, operation, now)


def decide(
    books: Books, operation: Operation, move: OperationMove, now: float, *, failure: str
) -> None:
    """Ends the interest in a running operation; its slots stay held until all reported."""
    operation.move(move)
    outcome = {
        OperationMove.FAIL: Outcome.FAILED,
        OperationMove.CANCEL: Outcome.CANCELLED,
        OperationMove.EXPIRE: Outcome.EXPIRED,
    }[move]
    operation.outcome = outcome
    operation.failure = failure
    if move is not OperationMove.FAIL:
        books.effects.append(Abandon(operation=operation.id))
    _end_staging(books, operation)
    everything = np.arange(len(operation.keys))
    bad_device_slots = _give_up_targets(books, operation, everything, now)
    _keep_sources(books, operation)
    _report_end(books, operation, settled=not operation.waiting_ranks)
    books.history.add(
        now, f"{operation.purpose.value} {outcome.value}", operation.cause, operation.keys, failure
    )
    books.agenda.append((operation, bad_device_slots))


def expire(books: Books, now: float) -> None:
    """Ends the interest in operations whose deadline has passed."""
    while (operation := books.ledger.pop_expired(now)) is not None:
        decide(
            books,
            operation,
            OperationMove.EXPIRE,
            now,
            failure=f"deadline {operation.deadline:.3f} passed",
        )


def _complete(books: Books, operation: Operation, now: float) -> None:
    """Ends an operation that every rank has reported on: good blocks are ready, bad ones not."""
    operation.move(OperationMove.LAST_REPORT)
    operation.outcome = Outcome.FAILED if operation.faults else Outcome.DONE
    bad = np.array(sorted(operation.faults), dtype=np.intp)
    good = np.full(len(operation.keys), fill_value=True)
    good[bad] = False
    _end_staging(books, operation)
    _fill_targets(books, operation, good, now)
    bad_device_slots = _give_up_targets(books, operation, bad, now)
    _drop_bad_sources(books, operation, now)
    onward = _slots_to_load_into(books, operation, good)
    _give_back(books, operation, now)
    _report_end(books, operation, settled=True)
    if operation.faults or operation.purpose is not Purpose.SAVE:
        books.history.add(
            now,
            f"{operation.purpose.value} {operation.outcome.value}",
            operation.cause,
            operation.keys,
        )
    if onward is not None:
        _load_onward(books, operation, onward, now)
    books.agenda.append((operation, bad_device_slots))


def _settle(books: Books, operation: Operation, now: float) -> None:
    """The last rank of an operation that was given up has reported."""
    operation.move(OperationMove.LAST_REPORT)
    _drop_bad_sources(books, operation, now)
    _give_back(books, operation, now)
    if not operation.settled_told:
        books.effects.append(Settled(operation=operation.id))


def _end_staging(books: Books, operation: Operation) -> None:
    if operation.purpose is Purpose.STAGE:
        for slot in operation.target_slots.tolist():
            del books.staging[slot]


def _fill_targets(books: Books, operation: Operation, good: NDArray[np.bool_], now: float) -> None:
    tier = books.tiers[operation.target]
    if tier is None:
        return
    slots = operation.target_slots
    nodes = tier.pool.node[slots]
    named = good & (tier.pool.state[slots] == FILLING) & (nodes != NOWHERE)
    if np.count_nonzero(named):
        keys = list(compress(operation.keys, named.tolist()))
        tier.pool.fill(slots[named])
        announce(books, tier, nodes[named], keys)
        books.history.add(now, f"filled {tier.name}", operation.cause, keys)


def announce(
    books: Books, tier: Tier, nodes: NDArray[np.intp], keys: Sequence[Key] | None = None
) -> Sequence[Key]:
    """Makes KV events of ready blocks, one for each chain; returns their keys.

    Readers are not told of blocks of other weights: no prompt can ask for them now.
    """
    if keys is None:
        keys = books.nodes.keys_of(nodes.tolist())
    if tier.index == HUB:
        books.hub_log.note(keys)
    known = books.nodes.of_weights_now(nodes)
    if not len(known):
        return keys
    told = keys if known is nodes else books.nodes.keys_of(known.tolist())
    parents = books.nodes.parent[known]
    heads = (parents[1:] != known[:-1]).nonzero()[0] + 1
    for first, end in pairwise([0, *heads.tolist(), len(told)]):
        parent = int(parents[first])
        parent_key = None if parent == NOWHERE else books.nodes.key_of(parent)
        books.kv_events.stored(tier.name, told[first:end], parent_key)
    return keys


def _give_up_targets(
    books: Books, operation: Operation, positions: NDArray[np.intp], now: float
) -> NDArray[np.intp]:
    """Condemns what was to be filled; returns the device slots that will not be."""
    none = np.empty(0, dtype=np.intp)
    if not len(positions):
        return none
    reason = MissReason.FILLING
    tier = books.tiers[operation.target]
    bad = none
    if tier is not None:
        slots = operation.target_slots[positions]
        filling = slots[tier.pool.state[slots] == FILLING]
        books.condemn(tier, filling, reason, now, operation.cause)
        if tier.index == DEVICE:
            bad = filling
    if operation.onward is not None:
        slots = operation.onward[positions]
        slots = slots[slots != NOWHERE]
        device = books.device
        bad = slots[device.pool.state[slots] == FILLING]
        books.condemn(device, bad, reason, now, operation.cause)
    return bad


def _keep_sources(books: Books, operation: Operation) -> None:
    """Blocks that were to leave stay where they are."""
    if operation.purpose is not Purpose.DEMOTE:
        return
    tier = books.tier(operation.source)
    slots = operation.source_slots
    leaving = slots[tier.pool.state[slots] == LEAVING]
    tier.keep(tier.pool.node[leaving])


def _drop_bad_sources(books: Books, operation: Operation, now: float) -> None:
    """Forgets blocks that failed their sums, or that the source turned out not to have."""
    if not operation.faults or operation.source == DEVICE:
        # Device blocks carry no sums of their own: there, a bad copy says nothing of the source.
        return
    tier = books.tier(operation.source)
    corrupt = [p for p, f in operation.faults.items() if f is BlockFault.CORRUPT]
    if corrupt:
        books.counters.blocks_corrupt += len(corrupt)
        slots = operation.source_slots[corrupt]
        books.condemn(tier, slots, MissReason.CORRUPT, now, operation.cause)
    missing = [p for p, f in operation.faults.items() if f is BlockFault.MISSING]
    if missing:
        books.counters.blocks_missing += len(missing)
        books.forget_reclaimed(tier, operation.source_slots[missing], now)


def _slots_to_load_into(
    books: Books, operation: Operation, good: NDArray[np.bool_]
) -> NDArray[np.intp] | None:
    """For a stage that is complete: the device slots still waiting for its blocks."""
    if operation.onward is None:
        return None
    device = books.device
    onward = operation.onward.copy()
    onward[~good] = NOWHERE
    wanted = onward != NOWHERE
    # Always so while a stage runs (see the audit): a slot that was given up stays its own.
    wanted[wanted] = device.pool.state[onward[wanted]] == FILLING
    hub = books.tier(operation.target)
    wanted &= hub.pool.state[operation.target_slots] == READY
    onward[~wanted] = NOWHERE
    return onward


def _load_onward(books: Books, operation: Operation, onward: NDArray[np.intp], now: float) -> None:
    wanted = onward != NOWHERE
    if not wanted.any():
        return
    keys = [key for key, want in zip(operation.keys, wanted.tolist(), strict=True) if want]
    started = start(
        books,
        Purpose.LOAD,
        source=operation.target,
        target=DEVICE,
        keys=keys,
        source_slots=operation.target_slots[wanted],
        target_slots=onward[wanted],
        deadline=max(operation.deadline, now),
        cause=operation.cause,
    )
    wait_for(books, started, operation.waiters)


def _give_back(books: Books, operation: Operation, now: float) -> None:
    """Unholds every slot; those that nothing else holds become free or evictable."""
    if operation.onward is not None:
        awaited = operation.onward[operation.onward != NOWHERE]
        _let_go(books, books.device, awaited)
    for tier, slots in _sides(books, operation):
        _let_go(books, tier, slots)
    if operation.purpose is Purpose.DEMOTE:
        _let_leave(books, operation, now)
    books.ledger.close(operation, operation.outcome or Outcome.FAILED)
    books.rates.ended(operation, now)


def _let_go(books: Books, tier: Tier, slots: NDArray[np.intp]) -> None:
    quiet = tier.pool.unhold(slots)
    if not len(quiet):
        return
    books.discard_unheld(tier, quiet)
    tier.offer_slots(quiet)


def _let_leave(books: Books, operation: Operation, now: float) -> None:
    """Frees the slots of blocks that were written down, unless a request holds them again."""
    tier = books.tier(operation.source)
    slots = operation.source_slots
    leaving = slots[tier.pool.state[slots] == LEAVING]
    if not len(leaving):
        return
    faulty = np.zeros(len(operation.keys), dtype=bool)
    faulty[list(operation.faults)] = True
    written = set(slots[~faulty].tolist())
    nodes = tier.pool.node[leaving]
    # Back among the ready ones first: eviction then takes those that may still leave, the
    # last block of a chain first.
    tier.keep(nodes)
    victims = [
        node
        for node, slot in zip(nodes[::-1].tolist(), leaving[::-1].tolist(), strict=True)
        if slot in written
    ]
    # Those that were leased again meanwhile are held, and are not set aside.
    gone = tier.set_aside_leaves(victims)
    if gone:
        books.evict(tier, gone, MissReason.EVICTED, now, operation.cause)
    tier.offer(nodes)


def _report_end(books: Books, operation: Operation, *, settled: bool) -> None:
    assert operation.outcome is not None
    operation.settled_told = settled
    books.effects.append(
        Ended(
            operation=operation.id,
            purpose=operation.purpose,
            outcome=operation.outcome,
            faults=tuple(sorted(operation.faults.items(), key=lambda item: item[0])),
            failure=operation.failure,
            settled=settled,
            cause=operation.cause,
            block_count=len(operation.keys),
        )
    )


def _sides(books: Books, operation: Operation) -> list[tuple[Tier, NDArray[np.intp]]]:
    """The tiers with slots of ours that an operation holds, and the slots."""
    sides = []
    for index, slots in (
        (operation.source, operation.source_slots),
        (operation.target, operation.target_slots),
    ):
        tier = books.tiers[index]
        if tier is not None:
            sides.append((tier, slots))
    return sides
