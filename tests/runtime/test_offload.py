"""What lies below an engine's own blocks: save, look up, load, with real bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Outcome, Purpose
from penstock.machine import effects as ef
from penstock.testing.tier_suite import LAYOUTS, read_slots, write_slots
from tests.runtime.conftest import World

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def keys(count: int, name: str = "k") -> list[bytes]:
    return [f"{name}{number}".encode().ljust(16, b".") for number in range(count)]


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("layout", [kind for kind in LAYOUTS if "groups" not in kind])
def test_saved_blocks_come_back_into_any_slots(layout: str) -> None:
    world = World(layout=layout)
    world.saved(keys(4), [0, 1, 2, 3])
    world.wipe_device()

    ended = world.loaded(keys(4), [5, 0, 3, 1])

    assert (ended.outcome, ended.settled, ended.faults) == (Outcome.DONE, True, ())
    np.testing.assert_array_equal(world.device_bytes([5, 0, 3, 1]), world.content[:4])
    assert not world.device_bytes([2, 4]).any()


def test_a_save_reads_the_slots_and_leaves_them_as_they_are() -> None:
    world = World()

    started = world.saved(keys(3), [4, 2, 0])

    assert started.accepted == (0, 1, 2)
    assert started.miss.reason is MissReason.NONE
    np.testing.assert_array_equal(world.device_bytes(range(6)), world.content)


def test_every_operation_is_reported_once() -> None:
    world = World()

    saved = world.offload.save(keys(3), [0, 1, 2], cause="a request")
    told = world.settle()

    (ended,) = told
    assert isinstance(ended, ef.Ended)
    assert (ended.operation,) == saved.operations
    assert (ended.purpose, ended.cause) == (Purpose.SAVE, "a request")
    assert world.offload.poll() == []


def test_work_is_cut_into_operations_of_bounded_size() -> None:
    world = World(settings="operation_blocks_max = 2")

    started = world.offload.save(keys(5), [0, 1, 2, 3, 4], cause="save")
    told = world.settle()

    assert len(started.operations) == 3
    assert [each.operation for each in told] == list(started.operations)


def test_nothing_to_save_is_nothing_to_do() -> None:
    world = World()
    world.saved(keys(3), [0, 1, 2])

    again = world.offload.save(keys(4), [0, 1, 2, 3], cause="again")
    empty = world.offload.save([], [], cause="empty")

    assert again.accepted == (3,)
    assert (empty.operations, empty.accepted) == ((), ())


def test_the_engine_may_reuse_its_array_of_slots_at_once() -> None:
    world = World()
    slots = np.array([0, 1, 2], dtype=np.int32)

    world.offload.save(keys(3), slots, cause="save")
    slots[:] = 5
    world.settle()
    world.loaded(keys(3), [3, 4, 5])

    np.testing.assert_array_equal(world.device_bytes([3, 4, 5]), world.content[:3])


# ---------------------------------------------------------------- looking


def test_a_lookup_tells_ready_from_coming_from_missing() -> None:
    world = World()
    world.saved(keys(2), [0, 1])
    world.offload.save(keys(4), [0, 1, 2, 3], cause="save")

    before = world.offload.lookup(keys(6))
    world.settle()
    after = world.offload.lookup(keys(6))

    assert (before.ready, before.pending, before.below) == (2, 2, 0)
    assert (after.ready, after.pending) == (4, 0)
    assert after.miss.reason is MissReason.NEVER_SEEN
    assert after.miss.block == 4


def test_a_lookup_goes_on_where_the_last_one_ended() -> None:
    world = World()
    world.saved(keys(2), [0, 1])
    last = world.offload.lookup(keys(4))
    world.saved(keys(4), [0, 1, 2, 3])

    found = world.offload.lookup(keys(4), last=last)

    assert last.ready == 2
    assert found == world.offload.lookup(keys(4))
    assert found.ready == 4


def test_a_lookup_starts_anew_when_blocks_were_lost() -> None:
    world = World(tiers={"host": 4})
    world.saved(keys(4), [0, 1, 2, 3])
    last = world.offload.lookup(keys(4))
    world.saved(keys(3, "other"), [0, 1, 2])

    found = world.offload.lookup(keys(4), last=last)

    assert last.ready == 4
    assert found == world.offload.lookup(keys(4))
    assert found.ready == 1
    assert found.miss.reason is MissReason.EVICTED


def test_a_hit_that_is_not_worth_loading_is_counted_once_however_often_it_is_looked_up() -> None:
    world = World()
    world.saved(keys(4), [0, 1, 2, 3])
    world.offload.load(keys(4), [0, 1, 2, 3], cause="measured")
    world.now += 1.0
    world.settle()
    world.offload.step()
    world.offload.computed(1_000_000, 0.001)

    found = world.offload.lookup(keys(4))
    for _ in range(5):
        found = world.offload.lookup(keys(4), last=found)

    assert found.worth == 0
    statistics = world.offload.statistics()
    assert statistics.misses["recompute is quicker"] == 1
    assert statistics.tokens_computed_instead == 16


def test_only_leading_blocks_that_are_ready_are_loaded() -> None:
    world = World()
    world.saved([keys(4)[0], *keys(4)[2:]], [0, 2, 3])
    world.wipe_device()

    started = world.offload.load(keys(4), [0, 1, 2, 3], cause="load")
    world.settle()

    assert started.accepted == (0,)
    assert (started.miss.block, started.miss.reason) == (1, MissReason.NEVER_SEEN)
    np.testing.assert_array_equal(world.device_bytes([0]), world.content[:1])
    assert not world.device_bytes([1, 2, 3]).any()


# ---------------------------------------------------------------- no room


def test_as_many_leading_blocks_are_saved_as_there_is_room_for() -> None:
    world = World(tiers={"host": 4})

    started = world.saved(keys(6), range(6))

    assert started.accepted == (0, 1, 2, 3)
    assert started.miss.reason is MissReason.NO_ROOM
    assert world.offload.statistics().saves_refused == 2
    assert world.offload.lookup(keys(6)).ready == 4


def test_blocks_of_lower_priority_make_room_first() -> None:
    world = World(tiers={"host": 4})
    world.saved(keys(2, "dear"), [0, 1], priority=5)
    world.saved(keys(2, "cheap"), [2, 3])

    world.saved(keys(2, "new"), [4, 5])

    assert world.offload.lookup(keys(2, "dear")).ready == 2
    assert world.offload.lookup(keys(2, "cheap")).ready == 0


def test_blocks_whose_time_has_passed_make_room_first() -> None:
    world = World(tiers={"host": 4})
    world.saved(keys(2, "lasting"), [0, 1])
    world.saved(keys(2, "passing"), [2, 3], ttl_s=10.0)
    world.now = 11.0
    world.settle()

    world.saved(keys(2, "new"), [4, 5])

    assert world.offload.lookup(keys(2, "lasting")).ready == 2
    assert world.offload.lookup(keys(2, "passing")).ready == 0


def test_a_chain_saved_in_parts_still_leaves_from_its_end() -> None:
    world = World(tiers={"host": 4})
    world.saved(keys(4)[:2], [0, 1])
    world.saved(keys(4)[2:], [2, 3], parent=keys(4)[1])

    world.saved(keys(1, "other"), [0])

    assert world.offload.lookup(keys(4)).ready == 3


def test_a_tenant_over_its_quota_gets_no_more_room() -> None:
    world = World(tiers={"host": 32}, tier_settings="quotas = { red = 0.125 }")

    started = world.saved(keys(6), range(6), tenant="red")
    found = world.offload.lookup(keys(6))

    assert started.accepted == (0, 1, 2, 3)
    assert found.ready == 4
    assert found.miss.reason is MissReason.OVER_QUOTA
    assert world.saved(keys(6, "blue"), range(6), tenant="blue").accepted == tuple(range(6))


def test_a_selective_tier_takes_what_was_shown_often_enough() -> None:
    world = World(tier_settings='write = "selective"\nhits = 2')

    first = world.saved(keys(2), [0, 1])
    second = world.saved(keys(2), [0, 1])

    assert first.accepted == ()
    assert second.accepted == (0, 1)


# ---------------------------------------------------------------- further tiers


def test_blocks_below_the_first_tier_are_prefetched_and_then_loaded() -> None:
    world = World(tiers={"host": 4, "far": 32})
    world.saved(keys(3), [0, 1, 2])
    world.saved(keys(4, "other"), [3, 4, 5, 0])
    world.wipe_device()
    before = world.offload.lookup(keys(3))

    started = world.offload.prefetch(keys(3), cause="ahead")
    world.settle()
    ended = world.loaded(keys(3), [3, 4, 5])

    assert (before.ready, before.pending, before.below) == (0, 3, 3)
    assert started.accepted == (0, 1, 2)
    assert ended.outcome is Outcome.DONE
    np.testing.assert_array_equal(world.device_bytes([3, 4, 5]), world.content[:3])


def test_a_prefetch_of_what_is_up_already_does_nothing() -> None:
    world = World(tiers={"host": 8, "far": 32})
    world.saved(keys(3), [0, 1, 2])

    started = world.offload.prefetch(keys(4), cause="ahead")

    assert started.operations == ()
    assert started.miss.reason is MissReason.NEVER_SEEN


# ---------------------------------------------------------------- ends of all kinds


def test_a_cancelled_load_is_reported_and_settles_when_its_slots_are_quiet() -> None:
    world = World()
    world.saved(keys(3), [0, 1, 2])
    (operation,) = world.offload.load(keys(3), [3, 4, 5], cause="load").operations

    world.offload.cancel(operation)
    at_once = world.offload.poll()
    later = world.settle()

    (ended,) = at_once
    assert isinstance(ended, ef.Ended)
    assert (ended.outcome, ended.settled) == (Outcome.CANCELLED, False)
    assert later == [ef.Settled(operation=operation)]
    np.testing.assert_array_equal(world.device_bytes([3, 4, 5]), world.content[3:])


def test_a_cancelled_save_leaves_nothing_to_be_found() -> None:
    world = World()
    (operation,) = world.offload.save(keys(3), [0, 1, 2], cause="save").operations

    world.offload.cancel(operation)
    world.settle()

    assert world.offload.lookup(keys(3)).ready == 0
    assert world.offload.statistics().tiers[0].free == 32


def test_to_cancel_what_has_ended_changes_nothing() -> None:
    world = World()
    (operation,) = world.saved(keys(3), [0, 1, 2]).operations

    world.offload.cancel(operation)

    assert world.offload.poll() == []
    assert world.offload.lookup(keys(3)).ready == 3


def test_an_operation_expires_at_its_deadline() -> None:
    world = World()
    world.saved(keys(3), [0, 1, 2])
    world.offload.load(keys(3), [3, 4, 5], cause="load", deadline=5.0)

    world.now = 5.0
    told = world.settle()

    ended, settled = told
    assert isinstance(ended, ef.Ended)
    assert (ended.outcome, ended.failure) == (Outcome.EXPIRED, "deadline 5.000 passed")
    assert settled == ef.Settled(operation=ended.operation)


def test_a_reset_cancels_and_voids_everything() -> None:
    world = World()
    world.saved(keys(3), [0, 1, 2])
    world.offload.load(keys(3), [3, 4, 5], cause="load")

    world.offload.reset("new weights")
    told = world.settle()
    found = world.offload.lookup(keys(3))

    assert [type(each) for each in told] == [ef.Ended, ef.Settled]
    assert (found.ready, found.miss.reason) == (0, MissReason.RESET)
    assert world.offload.statistics().tiers[0].free == 32


def test_damaged_blocks_are_faults_and_the_others_arrive() -> None:
    world = World()
    world.saved(keys(3), [0, 1, 2])
    host = read_slots(world.lower[0], range(32))
    (slot,) = np.flatnonzero((host == world.content[1]).all(axis=1)).tolist()
    host[slot, 7] ^= 0x40
    write_slots(world.lower[0], [slot], host[slot : slot + 1])

    ended = world.loaded(keys(3), [3, 4, 5])

    assert ended.outcome is Outcome.FAILED
    assert ended.faults == ((1, BlockFault.CORRUPT),)
    np.testing.assert_array_equal(world.device_bytes([3, 5]), world.content[[0, 2]])
    np.testing.assert_array_equal(world.device_bytes([4]), world.content[4:5])
    found = world.offload.lookup(keys(3))
    assert (found.ready, found.miss.reason) == (1, MissReason.CORRUPT)
    assert world.offload.statistics().blocks_corrupt == 1


# ---------------------------------------------------------------- several KV groups


def halves(world: World) -> tuple[slice, slice]:
    """Where the bytes of the two groups lie in a packed block."""
    first = world.device.layout.groups[0].block_bytes
    return slice(0, first), slice(first, None)


def test_groups_are_saved_from_and_loaded_into_slots_of_their_own() -> None:
    world = World(layout="groups of different kinds")
    first, second = halves(world)
    world.saved(keys(2), [[0, 1], [5, 3]])
    world.wipe_device()

    world.loaded(keys(2), [[4, 2], [1, 0]])

    held = world.device_bytes(range(6))
    np.testing.assert_array_equal(held[[4, 2]][:, first], world.content[[0, 1]][:, first])
    np.testing.assert_array_equal(held[[1, 0]][:, second], world.content[[5, 3]][:, second])
    assert not held[[0, 1, 3, 5]][:, first].any()
    assert not held[[2, 3, 4, 5]][:, second].any()


def test_a_group_that_does_not_need_a_block_is_left_alone() -> None:
    world = World(layout="two groups")
    first, second = halves(world)
    world.saved(keys(2), [[0, 1], [0, 1]])
    world.wipe_device()

    world.loaded(keys(2), [[4, 5], [-1, 5]])

    held = world.device_bytes(range(6))
    np.testing.assert_array_equal(held[[4, 5]][:, first], world.content[[0, 1]][:, first])
    np.testing.assert_array_equal(held[5, second], world.content[1, second])
    assert not held[4, second].any()
    assert not held[:4].any()


def test_a_block_is_saved_in_every_group_or_not_at_all() -> None:
    world = World(layout="two groups")

    with pytest.raises(ValueError, match="a block is saved in every KV group, -1 is not a slot"):
        world.offload.save(keys(2), [[0, 1], [-1, 1]], cause="save")

    assert world.offload.statistics().blocks_known == 0


@pytest.mark.parametrize(
    ("layout", "slots", "problem"),
    [
        ("latent", [0, 1, 2], r"slots has shape \(1, 3\), must be \(1, 2\)"),
        ("latent", [0, 6], "slots of KV group 0 name slot 6, must be from 0 to 5"),
        ("latent", [-2, 1], "slots of KV group 0 name slot -2, must be from 0 to 5, or -1"),
        ("latent", [3, 3], "slots of KV group 0 name slot 3 twice, must name each once"),
        ("latent", [0.0, 1.0], "slots are float64, must be integers"),
        ("latent", 3, "slots has 0 dimensions, must have one row for each of 1 KV groups"),
        ("two groups", [0, 1], "slots has 1 dimensions, must have one row for each of 2 KV groups"),
        ("two groups", [[0, 1]], r"slots has shape \(1, 2\), must be \(2, 2\)"),
        ("two groups", [[0, 1], [0, 9]], "slots of KV group 1 name slot 9, must be from 0 to 5"),
    ],
)
def test_slots_that_do_not_fit_are_refused(layout: str, slots: ArrayLike, problem: str) -> None:
    world = World(layout=layout)

    for refused in (world.offload.save, world.offload.load):
        with pytest.raises(ValueError, match=problem):
            refused(keys(2), slots, cause="wrong")

    assert not world.offload.busy
    world.offload.audit()


def test_a_key_that_occurs_twice_is_refused() -> None:
    world = World()
    world.saved(keys(2), [0, 1])
    twice = [*keys(2), *keys(1)]

    for refused in (
        lambda: world.offload.save(twice, [0, 1, 2], cause="twice"),
        lambda: world.offload.load(twice, [0, 1, 2], cause="twice"),
        lambda: world.offload.prefetch(twice, cause="twice"),
        lambda: world.offload.lookup(twice),
    ):
        with pytest.raises(ValueError, match="keys: a key occurs twice"):
            refused()


@pytest.mark.parametrize("wrong", ["k0..............", b"too short", 7])
def test_what_is_no_key_is_not_saved(wrong: object) -> None:
    world = World()

    with pytest.raises(ValueError, match=re.escape(f"keys[1] is {wrong!r}, must be 16 bytes")):
        world.offload.save([keys(1)[0], wrong], [0, 1], cause="wrong")  # type: ignore[list-item]

    assert world.offload.statistics().blocks_known == 0


# ---------------------------------------------------------------- telling


def test_events_stories_and_snapshot_tell_what_is_there() -> None:
    world = World()
    world.saved(keys(2), [0, 1])

    (event,) = world.offload.take_kv_events()
    snapshot = world.offload.kv_snapshot()
    story = world.offload.story(keys(2)[0])

    assert event.sequence == snapshot.sequence
    assert {key for key, _ in snapshot.blocks["host"]} == set(keys(2))
    assert any("filled host" in line for line in story)
