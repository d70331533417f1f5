"""For engines that manage their own device slots: lookup, load, save, prefetch, cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Outcome, Purpose
from penstock.cache.settings import TierSettings, WriteKind, WritePolicy
from penstock.errors import UnavailableError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.machine.conftest import Driver


def row(*slots: int) -> NDArray[np.int32]:
    return np.array([slots], dtype=np.int32)


def save(driver: Driver, prompt: str, first: int = 0, **wishes: Any) -> ef.Started:
    """Saves the blocks of a prompt from the `first` on, out of device slots 100, 101, ..."""
    keys = driver.keys(prompt)
    slots = 100 + np.arange(first, len(keys), dtype=np.int32)
    parent = keys[first - 1] if first else None
    event = ev.Save(keys=keys[first:], slots=slots[None], cause="save", parent=parent, **wishes)
    return driver.answer(event, ef.Started)


def load(driver: Driver, prompt: str) -> ef.Started:
    keys = driver.keys(prompt)
    slots = 200 + np.arange(len(keys), dtype=np.int32)
    return driver.answer(ev.Load(keys=keys, slots=slots[None], cause="load"), ef.Started)


def look(driver: Driver, prompt: str, start: int = 0) -> ef.Found:
    return driver.answer(ev.Lookup(keys=driver.keys(prompt), start=start), ef.Found)


@pytest.fixture
def driver() -> Driver:
    return make_driver(device=None, host=8)


# -------------------------------------------------------------------- save and lookup


def test_saved_blocks_are_ready_when_every_rank_has_written_them() -> None:
    driver = make_driver(device=None, host=8, ranks=2)
    save(driver, "ab")

    seen = [look(driver, "abc")]
    for rank in (1, 0):
        driver.report(driver.copy(Purpose.SAVE), rank=rank)
        seen.append(look(driver, "abc"))

    assert [(found.ready, found.pending) for found in seen] == [(0, 2), (0, 2), (2, 0)]
    assert [found.below for found in seen] == [0, 0, 0]


def test_a_lookup_says_why_there_is_no_more(driver: Driver) -> None:
    save(driver, "ab")
    driver.finish()

    found = look(driver, "abc")

    assert (found.miss.reason, found.miss.block) == (MissReason.NEVER_SEEN, 2)


def test_a_lookup_changes_nothing(driver: Driver) -> None:
    save(driver, "ab")
    driver.finish()
    before, order = freeze(driver.machine), driver.leaving_order(1)

    look(driver, "ab")

    assert freeze(driver.machine) == before
    assert driver.leaving_order(1) == order


def test_a_retry_need_not_look_at_what_is_known_to_be_ready(driver: Driver) -> None:
    save(driver, "ab")
    driver.finish()
    first = look(driver, "abc")
    save(driver, "abc", first=2)
    driver.finish()

    second = look(driver, "abc", start=first.ready)

    assert second.losses == first.losses
    assert second.ready == 3


def test_a_loss_below_is_told_by_its_number(driver: Driver) -> None:
    save(driver, "ab")
    driver.finish()
    first = look(driver, "ab")

    driver.handle(ev.TierOff(tier=1, fenced=True))

    assert look(driver, "ab").losses > first.losses


def test_a_save_names_the_operations_and_the_blocks_they_move(driver: Driver) -> None:
    save(driver, "ab")
    driver.finish()

    started = save(driver, "abcd")

    copy = driver.copy(Purpose.SAVE)
    assert started.operations == (copy.operation,)
    assert started.accepted == (2, 3)
    assert started.miss.reason is MissReason.NONE
    assert copy.source_slots.tolist() == [[102, 103]]
    assert driver.words(copy.keys) == ["abc", "abcd"]


def test_what_is_there_or_on_its_way_is_not_saved_again(driver: Driver) -> None:
    save(driver, "ab")

    started = save(driver, "ab")

    assert not started.operations
    assert not started.accepted
    assert started.miss.reason is MissReason.NONE


def test_a_save_takes_leading_blocks_when_room_is_short() -> None:
    driver = make_driver(device=None, host=2)

    started = save(driver, "abcd")
    driver.finish()

    assert started.accepted == (0, 1)
    assert (started.miss.reason, started.miss.block) == (MissReason.NO_ROOM, 2)
    assert driver.cached_in("host") == {"a", "ab"}
    assert driver.machine.statistics().blocks_known == 2


def test_a_save_refused_for_its_quota_says_so() -> None:
    host = TierSettings(name="host", slot_count=8, quotas={"ann": 0.25})
    driver = make_driver(device=None, host=host)

    started = save(driver, "abcd", tenant="ann")

    assert started.accepted == (0, 1)
    assert (started.miss.reason, started.miss.block) == (MissReason.OVER_QUOTA, 2)


def test_a_save_into_a_tier_that_is_off_says_so(driver: Driver) -> None:
    driver.handle(ev.TierOff(tier=1, fenced=True))

    started = save(driver, "ab")

    assert started.operations == ()
    assert started.miss.reason is MissReason.TIER_OFF


def test_blocks_are_named_a_run_at_a_time_around_those_that_are_known(driver: Driver) -> None:
    save(driver, "abc")
    driver.finish()
    driver.books.condemn(
        driver.books.tier(1), np.array([1], dtype=np.int32), MissReason.CORRUPT, 0.0, ""
    )

    started = save(driver, "abcdef")
    driver.finish()

    assert started.accepted == (1, 3, 4, 5)
    nodes = driver.books.nodes
    path = nodes.path_to(nodes.get(driver.keys("abcdef")[-1]))
    assert nodes.keys_of(path.tolist()) == driver.keys("abcdef")
    assert look(driver, "abcdef").ready == 6


def test_a_save_that_fails_can_be_repeated(driver: Driver) -> None:
    save(driver, "ab")
    driver.report(driver.copy(Purpose.SAVE), failure="link down")

    started = save(driver, "ab")
    driver.finish()

    assert started.accepted == (0, 1)
    assert driver.cached_in("host") == {"a", "ab"}


def test_each_block_of_several_tenants_is_copied_into_its_own_slot() -> None:
    driver = make_driver(device=None, host=8, disk=8)
    keys = driver.keys("abcde")
    driver.handle(
        ev.Discovered(tier=2, keys=keys[3:4], parents=keys[2:3], slots=np.zeros(1, np.int32))
    )

    started = save(driver, "abcde", tenant="ann")

    copy, hub = driver.copy(Purpose.SAVE), driver.books.tier(1)
    nodes = [driver.books.nodes.get(key) for key in copy.keys]
    assert copy.target_slots.tolist() == hub.slot_of[nodes].tolist()
    assert copy.source_slots[0].tolist() == [100 + keys.index(key) for key in copy.keys]
    assert [keys[position] for position in started.accepted] == list(copy.keys)


def test_a_hollow_block_can_be_saved_though_its_follower_makes_room_for_it() -> None:
    driver = make_driver(device=None, host=2)
    save(driver, "ab")
    driver.finish()
    load(driver, "a")
    driver.report(driver.copy(Purpose.LOAD), faults=[(0, BlockFault.CORRUPT)])
    save(driver, "x")
    driver.finish()
    load(driver, "x")

    save(driver, "a")
    driver.finish()

    assert driver.cached_in("host") == {"a", "x"}


def test_blocks_saved_before_the_one_they_follow_leave_before_it(driver: Driver) -> None:
    save(driver, "ab", first=1)
    save(driver, "a", ttl_s=1.0)
    driver.finish()

    driver.tick(after_s=2.0)

    assert driver.leaving_order(1) == ["ab", "a"]


def test_a_save_may_give_hints(driver: Driver) -> None:
    save(driver, "a", priority=1)
    save(driver, "b")
    save(driver, "c", ttl_s=1.0)
    driver.finish()

    driver.tick(after_s=2.0)

    assert driver.leaving_order(1) == ["c", "b", "a"]


def test_a_load_may_give_hints(driver: Driver) -> None:
    save(driver, "a")
    save(driver, "b")
    driver.finish()
    slots = np.array([[0]], dtype=np.int32)

    driver.handle(ev.Load(keys=driver.keys("a"), slots=slots, cause="r", priority=1))
    driver.finish()
    save(driver, "c")
    driver.finish()

    assert driver.leaving_order(1) == ["b", "c", "a"]


def test_a_chain_is_let_go_from_its_end(driver: Driver) -> None:
    save(driver, "z")
    save(driver, "abc")
    driver.finish()

    driver.handle(ev.LetGo(keys=driver.keys("abcd"), keep=1))

    assert driver.leaving_order(1) == ["abc", "ab", "z", "a"]


@pytest.mark.parametrize("keep", [-1, 1.0, True, None])
def test_letting_go_refuses_what_is_no_number_of_blocks(driver: Driver, keep: Any) -> None:
    save(driver, "ab")

    with pytest.raises(ValueError, match=r"keep is .*, must be a whole number of at least 0"):
        driver.handle(ev.LetGo(keys=driver.keys("ab"), keep=keep))


# -------------------------------------------------------------------- selective


def test_a_block_earns_its_place_by_being_seen_often_enough() -> None:
    write = WritePolicy(kind=WriteKind.SELECTIVE, hits=3)
    host = TierSettings(name="host", slot_count=8, write=write)
    driver = make_driver(device=None, host=host)

    accepted = [save(driver, "ab").accepted for _ in range(3)]

    assert accepted == [(), (), (0, 1)]


def test_sightings_of_a_shared_prefix_add_up() -> None:
    host = TierSettings(name="host", slot_count=8, write=WritePolicy(kind=WriteKind.SELECTIVE))
    driver = make_driver(device=None, host=host)

    save(driver, "ab")
    started = save(driver, "ax")
    driver.finish()

    assert started.accepted == (0,)
    assert driver.cached_in("host") == {"a"}


def test_sightings_are_bounded() -> None:
    host = TierSettings(name="host", slot_count=8, write=WritePolicy(kind=WriteKind.SELECTIVE))
    driver = make_driver(device=None, host=host, departed_count=2)
    save(driver, "a")
    for word in ("x", "y", "z"):
        save(driver, word)

    assert save(driver, "z").accepted == (0,)
    assert save(driver, "a").accepted == ()


# -------------------------------------------------------------------- load


def test_ready_blocks_are_loaded_into_the_engines_slots(driver: Driver) -> None:
    save(driver, "ab")
    driver.finish()

    started = load(driver, "abc")
    copy = driver.copy(Purpose.LOAD)
    driver.complete(copy)

    assert started.accepted == (0, 1)
    assert started.miss.reason is MissReason.NEVER_SEEN
    assert copy.target_slots.tolist() == [[200, 201]]
    (end,) = driver.told(ef.Ended)
    assert (end.operation, end.outcome) == (copy.operation, Outcome.DONE)


def test_nothing_is_loaded_that_is_not_ready(driver: Driver) -> None:
    save(driver, "ab")

    started = load(driver, "ab")

    assert not started.operations
    assert not started.accepted
    assert started.miss.reason is MissReason.FILLING


def test_a_block_being_loaded_is_not_evicted() -> None:
    driver = make_driver(device=None, host=2)
    save(driver, "ab")
    driver.finish()
    load(driver, "ab")

    started = save(driver, "xy")

    assert started.accepted == ()
    assert driver.cached_in("host") == {"a", "ab"}


def test_a_load_is_a_use(driver: Driver) -> None:
    save(driver, "a")
    save(driver, "b")
    driver.finish()

    load(driver, "a")
    driver.finish()

    assert driver.leaving_order(1) == ["b", "a"]


def test_a_corrupt_block_is_dropped_and_the_load_says_which(driver: Driver) -> None:
    save(driver, "ab")
    driver.finish()
    load(driver, "ab")

    driver.report(driver.copy(Purpose.LOAD), faults=[(1, BlockFault.CORRUPT)])

    (end,) = driver.told(ef.Ended)
    assert end.faults == ((1, BlockFault.CORRUPT),)
    assert driver.cached_in("host") == {"a"}
    assert look(driver, "ab").miss.reason is MissReason.CORRUPT


def test_a_cancelled_load_is_settled_when_no_rank_writes_any_more() -> None:
    driver = make_driver(device=None, host=8, ranks=2)
    save(driver, "ab")
    driver.finish()
    (operation,) = load(driver, "ab").operations
    copy = driver.copy(Purpose.LOAD)

    driver.handle(ev.Cancel(operation=operation))
    (end,) = driver.told(ef.Ended)
    settled = []
    for rank in (0, 1):
        driver.report(copy, rank=rank)
        settled.append(len(driver.told(ef.Settled)))

    assert (end.outcome, end.settled) == (Outcome.CANCELLED, False)
    assert settled == [0, 1]


def test_blocks_move_in_operations_of_bounded_size() -> None:
    driver = make_driver(device=None, host=8, operation_blocks_max=2)

    started = save(driver, "abcde")

    assert [copy.source_slots.tolist() for copy in driver.copies.values()] == [
        [[100, 101]],
        [[102, 103]],
        [[104]],
    ]
    assert len(started.operations) == 3


def test_a_deadline_may_be_given(driver: Driver) -> None:
    save(driver, "a", deadline=4.0)

    assert driver.copy(Purpose.SAVE).deadline == 4.0


# -------------------------------------------------------------------- KV groups


def test_a_load_with_a_deadline_that_is_no_number_changes_nothing(driver: Driver) -> None:
    save(driver, "a")
    driver.finish()
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match="deadline"):
        driver.handle(
            ev.Load(keys=driver.keys("a"), slots=row(7), cause="load", deadline=float("nan"))
        )

    assert freeze(driver.machine) == before


def test_a_block_is_saved_and_loaded_in_every_group() -> None:
    driver = make_driver(device=None, host=8, group_count=2)
    keys = driver.keys("ab")
    slots = np.array([[10, 11], [20, 21]], dtype=np.int32)

    driver.handle(ev.Save(keys=keys, slots=slots, cause="r"))
    saved = driver.copy(Purpose.SAVE)
    driver.finish()
    driver.handle(ev.Load(keys=keys, slots=slots + 50, cause="r"))
    loaded = driver.copy(Purpose.LOAD)

    assert saved.source_slots.tolist() == [[10, 11], [20, 21]]
    assert loaded.target_slots.tolist() == [[60, 61], [70, 71]]
    assert saved.target_slots.tolist() == loaded.source_slots.tolist()


def test_a_group_may_not_need_a_block_it_loads() -> None:
    driver = make_driver(device=None, host=8, group_count=2)
    keys = driver.keys("ab")
    driver.handle(ev.Save(keys=keys, slots=np.zeros((2, 2), np.int32), cause="r"))
    driver.finish()
    slots = np.array([[1, 2], [-1, 3]], dtype=np.int32)

    driver.handle(ev.Load(keys=keys, slots=slots, cause="r"))

    assert driver.copy(Purpose.LOAD).target_slots.tolist() == slots.tolist()


def test_a_block_is_not_saved_without_one_of_its_groups() -> None:
    driver = make_driver(device=None, host=8, group_count=2)
    slots = np.array([[1, 2], [-1, 3]], dtype=np.int32)

    with pytest.raises(ValueError, match="a block is saved in every KV group, -1 is not a slot"):
        driver.handle(ev.Save(keys=driver.keys("ab"), slots=slots, cause="r"))

    assert driver.machine.statistics().blocks_known == 0


@pytest.mark.parametrize("kind", [ev.Load, ev.Save])
def test_slots_of_a_wrong_shape_are_refused(driver: Driver, kind: type[ev.Event]) -> None:
    for slots in (row(1), np.zeros((2, 2), np.int32), np.zeros(2, np.int32)):
        with pytest.raises(ValueError, match=r"slots has shape .*, must be \(1, 2\)"):
            driver.handle(kind(keys=driver.keys("ab"), slots=slots, cause="r"))


@pytest.mark.parametrize("kind", [ev.Load, ev.Save])
def test_a_key_twice_is_refused(driver: Driver, kind: type[ev.Event]) -> None:
    with pytest.raises(ValueError, match="a key occurs twice"):
        driver.handle(kind(keys=[driver.key("a")] * 2, slots=row(1, 2), cause="r"))


@pytest.mark.parametrize("kind", [ev.Load, ev.Save])
def test_nothing_moves_while_a_rank_is_lost(driver: Driver, kind: type[ev.Event]) -> None:
    driver.handle(ev.RankLost(rank=0))

    with pytest.raises(UnavailableError, match="rank 0 is lost"):
        driver.handle(kind(keys=driver.keys("a"), slots=row(1), cause="r"))


@pytest.mark.parametrize("kind", [ev.Load, ev.Save])
def test_an_engine_whose_slots_are_managed_cannot_offload(kind: type[ev.Event]) -> None:
    driver = make_driver(device=8, host=8)

    with pytest.raises(ValueError, match="device slots are managed: use acquire and commit"):
        driver.handle(kind(keys=driver.keys("a"), slots=row(1), cause="r"))


def test_nothing_is_ready_or_pending_while_a_rank_is_lost(driver: Driver) -> None:
    save(driver, "a")
    driver.finish()

    driver.handle(ev.RankLost(rank=0))

    found = look(driver, "a")
    assert (found.ready, found.pending) == (0, 0)
