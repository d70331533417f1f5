"""Stored tiers: what a store process says is noted, and what it may still touch is not reused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Outcome, Purpose
from penstock.cache.settings import TierSettings, WriteKind, WritePolicy
from penstock.cache.states import LeaseState
from penstock.errors import InvariantViolation
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.kv_events import BlocksRemoved, BlocksStored
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from penstock.vocabulary.keys import Key
    from tests.machine.conftest import Driver

STORE = 2


def stored(slot_count: int = 16, **settings: Any) -> TierSettings:
    return TierSettings(name="store", slot_count=slot_count, stored=True, **settings)


def found(driver: Driver, *prompts: str) -> None:
    """A page of the store: the blocks of some prompts, newest first."""
    rows: dict[Key, Key | None] = {}
    for prompt in prompts:
        keys = driver.keys(prompt)
        rows |= dict(zip(keys, [None, *keys[:-1]], strict=True))
    page(driver, list(rows)[::-1], list(rows.values())[::-1])


def page(driver: Driver, keys: Sequence[Key], parents: Sequence[Key | None]) -> None:
    driver.handle(ev.Discovered(tier=STORE, keys=keys, parents=parents))


def vanish(driver: Driver, *prefixes: str) -> None:
    driver.handle(ev.Vanished(tier=STORE, keys=[driver.key(prefix) for prefix in prefixes]))


def outcomes(driver: Driver) -> list[Outcome]:
    return [ended.outcome for ended in driver.told(ef.Ended)]


# -------------------------------------------------------------------- what is written down


def test_a_copy_into_a_store_names_the_block_before_each() -> None:
    driver = make_driver(host=8, disk=stored())

    driver.compute("abc")
    driver.complete(driver.copy(Purpose.SAVE))

    copy = driver.copy(Purpose.SAVE)
    assert copy.target == STORE
    assert list(copy.parents) == [None, *driver.keys("ab")]


def test_copies_that_no_store_makes_name_no_parents() -> None:
    driver = make_driver(host=8, disk=stored())

    driver.compute("abc")

    assert driver.copy(Purpose.SAVE).parents == ()


def test_a_directory_that_is_full_forgets_an_entry_and_drops_no_block() -> None:
    driver = make_driver(host=8, disk=stored(2))

    driver.store("ab", "xy")

    assert driver.cached_in("store") == {"x", "xy"}
    assert not driver.told(ef.DropBlocks)
    assert driver.machine.take_kv_events()


# -------------------------------------------------------------------- what is found


def test_blocks_of_a_page_are_matched_whatever_their_order() -> None:
    driver = make_driver(host=8, disk=stored())

    found(driver, "abc", "abxy", "q")

    assert driver.cached_in("store") == {"a", "ab", "abc", "abx", "abxy", "q"}
    assert driver.acquire("abxy").cached_by_tier == (0, 0, 8)


def test_a_chain_over_several_pages_is_whole_when_the_last_has_come() -> None:
    driver = make_driver(host=8, disk=stored())
    keys = driver.keys("abcdef")
    parents = [None, *keys[:-1]]

    for first in (4, 2, 0):
        waiting = driver.acquire("abcdef")
        assert waiting.cached_tokens == 0
        driver.release(waiting.lease)
        page(driver, keys[first : first + 2][::-1], parents[first : first + 2][::-1])

    assert driver.books.nodes.path_to(driver.books.nodes.get(keys[-1])).size == 6
    assert driver.acquire("abcdef").cached_by_tier == (0, 0, 12)


def test_one_chain_of_a_page_is_one_event_for_routers() -> None:
    driver = make_driver(host=8, disk=stored())

    found(driver, "abc", "abxy")

    events = driver.machine.take_kv_events()
    assert all(isinstance(event, BlocksStored) for event in events)
    stored_keys = [driver.words(event.keys) for event in events if isinstance(event, BlocksStored)]
    assert sorted(map(len, stored_keys)) == [1, 4]


def test_a_page_takes_free_entries_only_and_the_newest_blocks_first() -> None:
    driver = make_driver(host=8, disk=stored(3))
    found(driver, "q")

    page(driver, [driver.key(word) for word in "cba"], [None] * 3)

    assert driver.cached_in("store") == {"q", "c", "b"}
    assert driver.machine.statistics().blocks_evicted == 0


def want(driver: Driver, prompt: str, start: int) -> None:
    """The store's answer to a prefetch: it has the blocks of a prompt from `start` on."""
    keys = driver.keys(prompt)
    parents = [None, *keys[:-1]]
    driver.handle(
        ev.Discovered(tier=STORE, keys=keys[start:], parents=parents[start:], wanted=True)
    )


def test_blocks_that_a_prefetch_asked_for_take_the_entries_of_others() -> None:
    driver = make_driver(host=8, disk=stored(4))
    found(driver, "abcd")

    want(driver, "xyz", 0)

    driver.handle(ev.Prefetch(keys=driver.keys("xyz"), cause="queued"))
    assert list(driver.copy(Purpose.STAGE).keys) == driver.keys("xyz")
    driver.machine.audit()


def test_blocks_that_a_prefetch_asked_for_do_not_take_the_entries_before_them() -> None:
    driver = make_driver(host=8, disk=stored(4))
    found(driver, "xy", "ab")

    want(driver, "abcd", 2)
    want(driver, "abcdefgh", 4)

    driver.handle(ev.Prefetch(keys=driver.keys("abcd"), cause="queued"))
    assert list(driver.copy(Purpose.STAGE).keys) == driver.keys("abcd")
    driver.machine.audit()


def test_a_page_of_blocks_that_are_known_changes_nothing() -> None:
    driver = make_driver(host=8, disk=stored())
    driver.store("abc")
    before = freeze(driver.machine)

    found(driver, "abc")

    assert freeze(driver.machine) == before


def test_a_block_that_lies_in_the_hub_is_also_noted_in_the_store() -> None:
    driver = make_driver(host=8, disk=stored())
    driver.compute("ab")
    driver.complete(driver.copy(Purpose.SAVE))
    driver.report(driver.copy(Purpose.SAVE), failure="disk full")
    assert driver.cached_in("store") == set()

    found(driver, "ab")

    assert driver.cached_in("store") == {"a", "ab"}


def test_a_block_that_occurs_twice_in_a_page_is_noted_once() -> None:
    driver = make_driver(host=8, disk=stored())
    key = driver.key("a")

    page(driver, [key, key], [None, None])

    assert driver.free_in("store") == 15


def test_damaged_parents_cost_their_blocks_and_nothing_else() -> None:
    driver = make_driver(host=8, disk=stored())
    a, b, c, d, q = (driver.key(word) for word in "abcdq")

    page(driver, [a, b, c, d, q], [b, a, c, b, None])

    assert driver.cached_in("store") == {"q"}


def test_damaged_parents_of_known_blocks_make_no_circle() -> None:
    driver = make_driver(host=8, disk=stored())
    driver.store("ab")
    vanish(driver, "a", "ab")
    first, second = driver.keys("ab")

    page(driver, [first, driver.key("z")], [driver.key("z"), second])

    assert driver.tiers_with("a") == {"device", "host"}
    assert driver.acquire("ab").cached_tokens == 4


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"slots": np.zeros(1, np.int32)}, "slots: must be None for stored tier 'store'"),
        ({"parents": []}, "1 keys and 0 parents"),
        ({"tier": 1}, "slots: is None, must name where in tier 'host'"),
    ],
)
def test_a_page_that_the_driver_got_wrong_is_refused(event: dict[str, Any], says: str) -> None:
    driver = make_driver(host=8, disk=stored())
    right: dict[str, Any] = {"tier": STORE, "keys": [driver.key("a")], "parents": [None]}
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match=says):
        driver.handle(ev.Discovered(**(right | event)))

    assert freeze(driver.machine) == before


# -------------------------------------------------------------------- what goes by itself


def test_blocks_that_a_store_reclaimed_are_forgotten_with_the_reason() -> None:
    driver = make_driver(host=8, disk=stored())
    found(driver, "abc")
    driver.machine.take_kv_events()

    vanish(driver, "abc", "ab", "never seen")

    assert driver.cached_in("store") == {"a"}
    (event,) = driver.machine.take_kv_events()
    assert isinstance(event, BlocksRemoved)
    assert sorted(driver.words(event.keys)) == ["ab", "abc"]
    miss = driver.acquire("abc").miss
    assert (miss.reason, miss.block) == (MissReason.EVICTED, 1)
    assert "evicted cause=reclaimed by the store" in driver.machine.story(driver.key("ab"))[-1]
    assert not driver.told(ef.DropBlocks)
    (_, _, tier) = driver.machine.statistics().tiers
    assert tier.blocks_evicted == 2


def test_a_read_of_blocks_that_are_reclaimed_meanwhile_is_left_to_the_store() -> None:
    driver = make_driver(host=8, disk=stored())
    found(driver, "ab")
    granted = driver.acquire("ab")

    vanish(driver, "a", "ab")
    assert driver.free_in("store") == 14
    driver.finish()

    lease = driver.books.leases[granted.lease]
    assert (lease.state, lease.token_count) == (LeaseState.READY, 4)


def test_a_block_that_is_being_written_does_not_vanish() -> None:
    driver = make_driver(host=8, disk=stored())
    driver.compute("a")
    driver.complete(driver.copy(Purpose.SAVE))

    vanish(driver, "a")
    driver.finish()

    assert driver.cached_in("store") == {"a"}


def test_only_a_store_gives_blocks_up() -> None:
    driver = make_driver(host=8, disk=stored())

    with pytest.raises(ValueError, match="tier is 1, 'host': only a stored tier"):
        driver.handle(ev.Vanished(tier=1, keys=[]))


# -------------------------------------------------------------------- reading it again


def test_an_acquire_stages_from_the_store_and_then_loads() -> None:
    driver = make_driver(host=8, disk=stored())
    found(driver, "abc")

    granted = driver.acquire("abc")

    assert granted.state is LeaseState.LOADING
    driver.complete(driver.copy(Purpose.STAGE))
    assert driver.books.leases[granted.lease].state is LeaseState.LOADING
    driver.complete(driver.copy(Purpose.LOAD))
    (changed,) = driver.told(ef.LeaseChanged)
    assert (changed.state, changed.cached_tokens) == (LeaseState.READY, 6)


def test_a_prefetch_stages_from_the_store() -> None:
    driver = make_driver(device=None, host=8, disk=stored())
    found(driver, "abc")
    keys = driver.keys("abc")

    started = driver.answer(ev.Prefetch(keys=keys, cause="queued"), ef.Started)
    driver.finish()

    assert started.accepted == (0, 1, 2)
    assert driver.answer(ev.Lookup(keys=keys), ef.Found).ready == 3


@pytest.mark.parametrize("fault", [BlockFault.MISSING, BlockFault.CORRUPT])
def test_a_part_that_one_rank_lacks_makes_a_shorter_hit_and_no_wait(fault: BlockFault) -> None:
    driver = make_driver(host=8, disk=stored(), ranks=3)
    found(driver, "abc")
    granted = driver.acquire("abc")
    stage = driver.copy(Purpose.STAGE)

    driver.report(stage, rank=0)
    driver.report(stage, rank=1, faults=[(1, fault)])
    driver.report(stage, rank=2, faults=[(1, BlockFault.UNREADABLE)])
    driver.finish()

    lease = driver.books.leases[granted.lease]
    assert (lease.state, lease.token_count) == (LeaseState.READY, 2)
    assert driver.cached_in("store") == {"a", "abc"}


def test_a_missing_block_is_counted_as_missing_not_as_corrupt() -> None:
    driver = make_driver(host=8, disk=stored())
    found(driver, "ab")
    driver.acquire("ab")

    driver.report(driver.copy(Purpose.STAGE), faults=[(1, BlockFault.MISSING)])

    statistics = driver.machine.statistics()
    assert (statistics.blocks_missing, statistics.blocks_corrupt) == (1, 0)
    assert driver.acquire("ab").miss.reason is MissReason.EVICTED


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_corrupt_says_more_than_missing(order: tuple[int, int]) -> None:
    driver = make_driver(host=8, disk=stored(), ranks=2)
    found(driver, "a")
    driver.acquire("a")
    stage = driver.copy(Purpose.STAGE)
    faults = (BlockFault.CORRUPT, BlockFault.MISSING)

    for rank in order:
        driver.report(stage, rank=rank, faults=[(0, faults[rank])])

    statistics = driver.machine.statistics()
    assert (statistics.blocks_missing, statistics.blocks_corrupt) == (0, 1)


# -------------------------------------------------------------------- saves never delay


def test_saves_beyond_the_bound_are_skipped_and_counted() -> None:
    driver = make_driver(host=32, disk=stored(), stored_saves_max=3)

    driver.compute("abcdef")
    driver.complete(driver.copy(Purpose.SAVE))

    assert driver.words(driver.copy(Purpose.SAVE).keys) == ["a", "ab", "abc"]
    assert driver.machine.statistics().saves_skipped == 3


def test_saves_hold_at_most_half_of_the_hub() -> None:
    driver = make_driver(host=8, disk=stored())

    driver.compute("abcdef")
    driver.complete(driver.copy(Purpose.SAVE))

    assert len(driver.copy(Purpose.SAVE).keys) == 4


def test_a_save_that_was_given_up_counts_until_the_store_reports() -> None:
    driver = make_driver(host=8, disk=stored(), stored_saves_max=2)
    driver.compute("ab")
    driver.complete(driver.copy(Purpose.SAVE))
    late = driver.copy(Purpose.SAVE)
    driver.tick(after_s=31.0)
    assert outcomes(driver) == [Outcome.EXPIRED]

    driver.compute("xy")
    driver.complete(max(driver.copies.values(), key=lambda copy: copy.operation))
    assert driver.machine.statistics().saves_skipped == 2

    driver.complete(late)
    driver.store("pq")
    assert driver.cached_in("store") == {"p", "pq"}


def test_reads_do_not_count_against_the_bound_of_saves() -> None:
    driver = make_driver(host=8, disk=stored(), stored_saves_max=2)
    found(driver, "abcd")
    driver.acquire("abcd")
    assert len(driver.copy(Purpose.STAGE).keys) == 4

    driver.compute("xy")
    save = next(copy for copy in driver.copies.values() if copy.purpose is Purpose.SAVE)
    driver.complete(save)

    assert driver.words(driver.copy(Purpose.SAVE).keys) == ["x", "xy"]
    assert driver.machine.statistics().saves_skipped == 0


def test_a_hub_that_cannot_write_back_drops_instead_of_waiting() -> None:
    host = TierSettings(name="host", slot_count=8, low_watermark=0.5, high_watermark=0.75)
    write_back = WritePolicy(kind=WriteKind.WRITE_BACK)
    driver = make_driver(host=host, disk=stored(write=write_back), stored_saves_max=2)
    driver.store("abcdef")

    driver.tick()

    assert len(driver.copy(Purpose.DEMOTE).keys) == 2
    assert driver.free_in("host") == 4
    assert driver.machine.statistics().saves_skipped == 2


# -------------------------------------------------------------------- who may still touch slots


def test_a_lost_rank_does_not_settle_a_read_of_the_store() -> None:
    driver = make_driver(device=None, host=4, disk=stored(), ranks=2)
    found(driver, "abc")
    driver.handle(ev.Prefetch(keys=driver.keys("abc"), cause="queued"))
    stage = driver.copy(Purpose.STAGE)
    driver.report(stage, rank=0)

    driver.handle(ev.RankLost(rank=1))

    assert outcomes(driver) == [Outcome.FAILED]
    assert not driver.told(ef.Settled)
    assert driver.free_in("host") == 1
    driver.report(stage, rank=1)
    assert driver.told(ef.Settled)
    assert driver.free_in("host") == 4


def test_a_lost_rank_does_not_end_a_save_into_the_store() -> None:
    driver = make_driver(host=8, disk=stored(), ranks=2)
    driver.compute("ab")
    driver.complete(driver.copy(Purpose.SAVE))
    save = driver.copy(Purpose.SAVE)

    driver.handle(ev.RankLost(rank=1))
    assert outcomes(driver) == []
    driver.complete(save)

    assert outcomes(driver) == [Outcome.DONE]
    assert driver.cached_in("store") == {"a", "ab"}


def test_a_rank_with_a_new_arena_leaves_the_old_read_its_slots() -> None:
    driver = make_driver(host=4, disk=stored(), ranks=2)
    found(driver, "abc")
    driver.acquire("abc")
    stage = driver.copy(Purpose.STAGE)

    driver.handle(ev.RankLost(rank=1))
    driver.handle(ev.TierOff(tier=1, fenced=True))
    driver.handle(ev.RankBack(rank=1))
    driver.handle(ev.TierOn(tier=1, kept=False))

    assert driver.free_in("host") == 1
    driver.complete(stage)
    assert driver.free_in("host") == 4
    assert driver.acquire("abc").cached_by_tier == (0, 0, 6)


def test_a_store_that_is_seen_dead_gives_everything_back() -> None:
    driver = make_driver(host=4, disk=stored(), ranks=2)
    found(driver, "abc")
    granted = driver.acquire("abc")
    stage = driver.copy(Purpose.STAGE)

    driver.handle(ev.TierOff(tier=STORE, fenced=True, why="the store process died"))

    assert outcomes(driver) == [Outcome.FAILED]
    assert driver.free_in("host") == 4
    lease = driver.books.leases[granted.lease]
    assert (lease.state, lease.token_count) == (LeaseState.READY, 0)
    driver.complete(stage)
    assert driver.machine.statistics().reports_late == 2


def test_a_store_that_is_silent_keeps_its_slots_until_it_reports() -> None:
    driver = make_driver(host=4, disk=stored())
    found(driver, "abc")
    driver.acquire("abc")
    stage = driver.copy(Purpose.STAGE)

    driver.handle(ev.TierOff(tier=STORE, fenced=False))
    assert driver.free_in("host") == 1
    driver.handle(ev.TierOn(tier=STORE, kept=True))
    assert driver.free_in("host") == 1

    driver.complete(stage)
    assert driver.free_in("host") == 4


@pytest.mark.parametrize("end", ["reset", "cancel", "expiry"])
def test_a_late_answer_gives_slots_back_and_changes_nothing_else(end: str) -> None:
    driver = make_driver(device=None, host=4, disk=stored())
    found(driver, "abc")
    keys = driver.keys("abc")
    driver.handle(ev.Prefetch(keys=keys, cause="queued"))
    stage = driver.copy(Purpose.STAGE)

    if end == "reset":
        driver.reset()
    elif end == "cancel":
        driver.handle(ev.Cancel(operation=stage.operation))
    else:
        driver.tick(after_s=31.0)

    assert [abandon.operation for abandon in driver.told(ef.Abandon)] == [stage.operation]
    assert driver.free_in("host") == 1
    driver.complete(stage)
    assert driver.free_in("host") == 4
    assert driver.answer(ev.Lookup(keys=keys), ef.Found).ready == 0


def test_a_reset_forgets_the_directory_and_drops_no_block() -> None:
    driver = make_driver(host=8, disk=stored())
    found(driver, "abc")

    driver.reset()

    assert driver.cached_in("store") == set()
    assert not driver.told(ef.DropBlocks)


# -------------------------------------------------------------------- load or compute


def stage_at(driver: Driver, prompt: str, blocks_per_s: float) -> None:
    """A request whose blocks come from the store at some rate, and at once from the hub."""
    granted = driver.acquire(prompt)
    driver.now += len(prompt) / blocks_per_s
    for _ in range(9):
        driver.tick()
    driver.complete(driver.copy(Purpose.STAGE))
    driver.tick()
    driver.finish()
    driver.release(granted.lease)


def test_a_store_that_was_never_measured_is_tried() -> None:
    driver = make_driver(device=16, host=32, disk=stored())
    found(driver, "abcd")
    driver.handle(ev.Computed(token_count=1000, seconds=1.0))

    assert driver.acquire("abcd").cached_by_tier == (0, 0, 8)


@pytest.mark.parametrize(("blocks_per_s", "cached"), [(1.0, 0), (1e6, 8)])
def test_the_measured_rate_of_a_store_decides(blocks_per_s: float, cached: int) -> None:
    driver = make_driver(device=16, host=32, disk=stored(32))
    found(driver, "abcd", "mno")

    stage_at(driver, "mno", blocks_per_s)
    driver.handle(ev.Computed(token_count=200, seconds=1.0))

    granted = driver.acquire("abcd")
    assert granted.cached_tokens == cached
    assert (granted.miss.reason is MissReason.RECOMPUTE) == (not cached)


def test_blocks_that_a_store_does_not_have_say_nothing_of_its_speed() -> None:
    driver = make_driver(host=8, disk=stored())
    found(driver, "ab")
    driver.acquire("ab")
    driver.now += 1.0

    driver.report(driver.copy(Purpose.STAGE), faults=[(1, BlockFault.MISSING)])
    driver.tick()

    (hop,) = [h for h in driver.machine.statistics().hops if h.source == "store"]
    assert hop.tokens_per_s is None


# -------------------------------------------------------------------- the audit


def test_the_audit_finds_a_copy_between_ranks_that_waits_for_a_lost_one() -> None:
    driver = make_driver(host=8, disk=stored(), ranks=2)
    driver.compute("ab")
    driver.books.lost_ranks.add(1)

    with pytest.raises(InvariantViolation, match="waits for a rank that is lost"):
        driver.machine.audit()


def test_the_audit_finds_more_saves_under_way_than_are_allowed() -> None:
    driver = make_driver(host=8, disk=stored())
    driver.compute("ab")
    driver.complete(driver.copy(Purpose.SAVE))
    driver.books.settings = replace(driver.books.settings, stored_saves_max=1)

    with pytest.raises(InvariantViolation, match="2 blocks are on their way into store"):
        driver.machine.audit()
