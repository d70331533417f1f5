"""The audit finds every kind of inconsistency, and tells the story with it."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.operations import Purpose
from penstock.cache.settings import TierSettings
from penstock.cache.states import LeaseState, OperationState, SlotState
from penstock.errors import InvariantViolation
from penstock.machine.audit import audit
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.machine.books import Books, LeaseRecord
    from tests.machine.conftest import Driver


@pytest.fixture
def driver() -> Driver:
    """Cached, leased and pinned blocks, a load and a save under way, tenants with quotas."""
    device = TierSettings(name="device", slot_count=16, quotas={"ann": 0.5})
    driver: Driver = make_driver(device=device, host=8, disk=8)
    driver.discover(1, "pq")
    driver.store("abc")
    driver.store("x", tenant="ann")
    driver.pin("x")
    driver.commit(driver.acquire("abd").lease, "abd")
    driver.acquire("pq")
    audit(driver.books)
    return driver


def node(books: Books, word: str) -> int:
    return books.nodes.get(word.encode().rjust(16, b"."))


def slot(books: Books, word: str) -> int:
    return int(books.device.slot_of[node(books, word)])


def running(books: Books) -> LeaseRecord:
    return next(lease for lease in books.leases.values() if lease.state is LeaseState.READY)


def waiting(books: Books) -> LeaseRecord:
    return next(lease for lease in books.leases.values() if lease.state is LeaseState.LOADING)


def a_hold_too_few(books: Books) -> None:
    books.device.pool.holders[running(books).table[0]] -= 1


def a_hold_too_many(books: Books) -> None:
    books.device.pool.holders[slot(books, "abc")] += 1


def a_count_of_holders_below_zero(books: Books) -> None:
    books.device.pool.holders[slot(books, "abc")] = -1


def a_leaked_slot(books: Books) -> None:
    books.device.pool.take(1)


def a_slot_freed_twice(books: Books) -> None:
    pool = books.device.pool
    pool._free[pool.free_count] = pool._free[0]
    pool.free_count += 1


def a_slot_freed_while_in_use(books: Books) -> None:
    pool = books.device.pool
    pool._free[0] = slot(books, "abc")


def a_free_slot_that_cannot_be_taken(books: Books) -> None:
    books.device.pool.free_count -= 1


def a_free_slot_that_is_held(books: Books) -> None:
    pool = books.device.pool
    pool.holders[pool.free_slots()[0]] += 1


def a_ready_slot_without_a_block(books: Books) -> None:
    books.device.pool.node[slot(books, "abc")] = -1


def a_doomed_slot_that_nothing_holds(books: Books) -> None:
    books.device.pool.state[slot(books, "abc")] = SlotState.DOOMED


def a_leaving_slot_that_was_not_counted(books: Books) -> None:
    books.device.pool.state[slot(books, "abc")] = SlotState.LEAVING


def a_wrong_number_of_followers_in_a_tier(books: Books) -> None:
    books.device.children[node(books, "ab")] += 1


def a_wrong_number_of_followers(books: Books) -> None:
    books.nodes.child_count[node(books, "ab")] -= 1


def a_wrong_number_of_copies(books: Books) -> None:
    books.nodes.copy_count[node(books, "abc")] += 1


def a_block_without_copies_and_followers(books: Books) -> None:
    books.nodes.add_chain([b"new"], parent=-1, tenant=0)


def a_key_that_leads_to_another_node(books: Books) -> None:
    books.nodes.keys[node(books, "abc")] = b"other"


def a_used_node_without_a_key(books: Books) -> None:
    del books.nodes.ids[b"x".rjust(16, b".")]


def two_slots_exchanged(books: Books) -> None:
    tier = books.device
    first, second = node(books, "abc"), node(books, "x")
    tier.slot_of[first], tier.slot_of[second] = tier.slot_of[second], tier.slot_of[first]


def a_block_said_to_lie_where_nothing_is(books: Books) -> None:
    books.tier(2).slot_of[node(books, "pq")] = 3


def a_wrong_sum_of_a_tenant(books: Books) -> None:
    books.device.used_by[0] += 1


def a_block_of_another_tenant(books: Books) -> None:
    books.nodes.tenant[node(books, "abc")] = 1


def a_wrong_number_of_pins(books: Books) -> None:
    books.nodes.pins[node(books, "x")] = 0


def a_pinned_key_that_nobody_pinned(books: Books) -> None:
    books.pinned[b"nobody"] = 1


def a_block_forgotten_by_its_policy(books: Books) -> None:
    books.device.policy.forget([node(books, "abc")], [b"abc".rjust(16, b".")], evicted=False)


def a_block_forgotten_by_the_policy_of_its_tenant(books: Books) -> None:
    for _, policy in books.device.quota_policies():
        books.nodes.pins[node(books, "x")] = 0
        books.pinned.clear()
        books.pins.clear()
        books.device.policy.offer([node(books, "x")])
        policy.forget([node(books, "x")], [b"x".rjust(16, b".")], evicted=False)


def a_lease_that_waits_for_nothing(books: Books) -> None:
    running(books).state = LeaseState.LOADING


def a_ready_lease_that_waits(books: Books) -> None:
    waiting(books).state = LeaseState.READY


def a_lease_with_a_slot_twice(books: Books) -> None:
    lease = running(books)
    lease.table = np.append(lease.table, lease.table[0])
    books.device.pool.holders[lease.table[0]] += 1


def a_lease_with_a_leaving_block(books: Books) -> None:
    books.device.depart(np.array([node(books, "abd")], dtype=np.int32))


def a_ready_lease_with_a_block_that_is_still_filling(books: Books) -> None:
    lease = waiting(books)
    for operation in books.ledger.operations.values():
        operation.waiters.discard(lease.id)
    lease.waiting.clear()
    lease.state = LeaseState.READY


def a_lease_whose_copy_does_not_know(books: Books) -> None:
    for operation in books.ledger.operations.values():
        operation.waiters.clear()


def a_frontier_nobody_aims_at(books: Books) -> None:
    books.frontiers[b"nobody"] = 1


def an_ended_operation_in_the_ledger(books: Books) -> None:
    next(books.ledger.running()).state = OperationState.ENDED


def an_operation_nobody_will_report_on(books: Books) -> None:
    next(books.ledger.running()).waiting_ranks.clear()


def a_lease_that_waits_for_a_copy_that_was_given_up(books: Books) -> None:
    for operation in books.ledger.running():
        operation.state = OperationState.ENDING


def a_copy_that_writes_into_a_ready_block(books: Books) -> None:
    operation = next(o for o in books.ledger.running() if o.purpose is Purpose.LOAD)
    books.device.pool.state[operation.target_slots] = SlotState.READY


def a_stage_that_is_not_under_way(books: Books) -> None:
    operation = next(books.ledger.running())
    books.staging[5] = operation.id


def a_block_queued_on_a_hop_that_no_copy_moves(books: Books) -> None:
    next(iter(books.rates.hops.values())).begin(1, 0.0)


def a_slot_counted_in_another_state(books: Books) -> None:
    books.device.pool._counts[SlotState.READY] += 1


def a_held_slot_that_was_not_counted(books: Books) -> None:
    books.device.pool.held_count -= 1


def a_block_with_a_copy_that_was_not_counted(books: Books) -> None:
    books.nodes._copied -= 1


def work_left_over(books: Books) -> None:
    books.agenda.append((next(books.ledger.running()), np.empty(0, dtype=np.int32)))


PLANTED: list[tuple[Callable[[Books], None], str]] = [
    (a_hold_too_few, "is held 1 times, booked 0"),
    (a_hold_too_many, "is held 0 times, booked 1"),
    (a_count_of_holders_below_zero, "held -1 times"),
    (a_leaked_slot, "is FILLING but held 0 times, without a block"),
    (a_slot_freed_twice, "slots that are free and slots said to be differ"),
    (a_free_slot_that_cannot_be_taken, "slots that are free and slots said to be differ"),
    (a_slot_freed_while_in_use, "can be taken though it is in use"),
    (a_free_slot_that_is_held, "is FREE but held 1 times"),
    (a_ready_slot_without_a_block, "copies, not as booked"),
    (a_doomed_slot_that_nothing_holds, "is DOOMED but held 0 times, with a block"),
    (a_leaving_slot_that_was_not_counted, "1 slots are leaving, not as booked"),
    (a_wrong_number_of_followers_in_a_tier, "tier device: followers are"),
    (a_wrong_number_of_followers, "has 2 followers"),
    (a_wrong_number_of_copies, "copies, not as booked"),
    (a_block_without_copies_and_followers, "has neither copies nor followers"),
    (a_key_that_leads_to_another_node, "has another key than the index says"),
    (a_used_node_without_a_key, "is used but not known"),
    (two_slots_exchanged, "and its block do not agree"),
    (a_block_said_to_lie_where_nothing_is, "a block is said to lie where it does not"),
    (a_wrong_sum_of_a_tenant, "tenants use"),
    (a_block_of_another_tenant, "tenants use"),
    (a_wrong_number_of_pins, "has a wrong number of pins"),
    (a_pinned_key_that_nobody_pinned, "pin"),
    (a_block_forgotten_by_its_policy, "the policy is wrong about"),
    (a_block_forgotten_by_the_policy_of_its_tenant, "the policy of tenant 1 is wrong about"),
    (a_lease_that_waits_for_nothing, r"is LOADING, waits for set\(\)"),
    (a_ready_lease_that_waits, "is READY, waits for"),
    (a_lease_with_a_slot_twice, "has a slot twice"),
    (a_lease_with_a_leaving_block, "has slots that are free or leaving"),
    (a_ready_lease_with_a_block_that_is_still_filling, "is ready with a block that is not"),
    (a_lease_whose_copy_does_not_know, "which does not know"),
    (a_frontier_nobody_aims_at, "are not those the leases aim at"),
    (an_ended_operation_in_the_ledger, "has ended but is still in the ledger"),
    (an_operation_nobody_will_report_on, "has ended but is still in the ledger"),
    (a_lease_that_waits_for_a_copy_that_was_given_up, "which was given up"),
    (a_copy_that_writes_into_a_ready_block, "writes into slot"),
    (a_stage_that_is_not_under_way, "stage|staging"),
    (a_block_queued_on_a_hop_that_no_copy_moves, "the blocks queued on the hops are not those"),
    (a_slot_counted_in_another_state, r"slots are READY, not \d+ as booked"),
    (a_held_slot_that_was_not_counted, r"slots are held, not \d+ as booked"),
    (a_block_with_a_copy_that_was_not_counted, r"blocks are hollow, not \d+ as booked"),
    (work_left_over, "the agenda is not empty between events"),
]


@pytest.mark.parametrize(("plant", "says"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_the_audit_finds(driver: Driver, plant: Callable[[Books], None], says: str) -> None:
    plant(driver.books)

    with pytest.raises(InvariantViolation, match=says) as found:
        audit(driver.books)

    assert found.value.story


def test_the_audit_changes_nothing(driver: Driver) -> None:
    before, order = freeze(driver.machine), driver.leaving_order()

    audit(driver.books)

    assert freeze(driver.machine) == before
    assert driver.leaving_order() == order


def test_the_story_is_that_of_the_block_concerned(driver: Driver) -> None:
    a_wrong_number_of_copies(driver.books)

    with pytest.raises(InvariantViolation) as found:
        audit(driver.books)

    assert found.value.story == driver.machine.story(driver.key("abc"))


def test_blocks_of_a_fork_that_have_no_name_yet_are_no_finding() -> None:
    driver = make_driver()
    granted = driver.acquire("ab")
    driver.commit(granted.lease, "a", more_tokens=1)

    driver.fork(granted.lease)

    audit(driver.books)


def test_free_slots_of_a_large_tier_are_not_looked_at_one_by_one() -> None:
    slot_count = 1_000_000
    driver = make_driver(device=8, host=8, disk=slot_count)
    driver.discover(1, "pq")
    tracemalloc.start()

    audit(driver.books)

    # A list of all slots would take eight bytes for each.
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 * slot_count
