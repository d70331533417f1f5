"""Why a request missed: a test for every reason, and that looking changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.eviction import AdaptivePolicy
from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import TierSettings, WriteKind, WritePolicy
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.matching import explain, fetchable, find
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.machine.conftest import Driver


def nothing_missing() -> ef.Granted:
    driver = make_driver()
    driver.store("ab")
    return driver.acquire("ab")


def never_seen() -> ef.Granted:
    return make_driver().acquire("ab")


def evicted() -> ef.Granted:
    driver = make_driver(device=3)
    driver.store("ab")
    driver.now = 2.5
    driver.store("xy")
    return driver.acquire("ab")


def still_computed() -> ef.Granted:
    driver = make_driver()
    driver.acquire("ab")
    return driver.acquire("ab")


def still_computed_further_on() -> ef.Granted:
    driver = make_driver(device=12)
    lease = driver.acquire("abc").lease
    keys = driver.keys("abc")
    driver.handle(ev.Commit(lease=lease, token_count=2, keys=keys[:1], frontier=keys[1]))
    return driver.acquire("abc")


def still_saved() -> ef.Granted:
    driver = make_driver(host=8, ranks=2)
    driver.compute("ab")
    driver.report(driver.copy(Purpose.SAVE), rank=0)
    driver.handle(ev.RankLost(rank=0))
    driver.handle(ev.RankBack(rank=0))
    return driver.acquire("ab")


def in_another_form() -> ef.Granted:
    driver = make_driver(host=8)
    driver.discover(1, "ab", foreign=True)
    return driver.acquire("ab")


def in_another_namespace() -> ef.Granted:
    driver = make_driver()
    driver.store("ab", namespace=b"adapter 1", content=11)
    return driver.acquire("xy", namespace=b"adapter 2", content=11)


def cached_for_other_weights() -> ef.Granted:
    driver = make_driver()
    driver.store("ab", content=11)
    driver.handle(ev.ChangeWeights(before="v1", after="v2"))
    return driver.acquire("xy", content=11)


def in_a_tier_that_is_off() -> ef.Granted:
    driver = make_driver(device=3, host=8)
    driver.store("ab", "xy")
    driver.handle(ev.TierOff(tier=1, fenced=True))
    return driver.acquire("ab")


def below_a_hub_that_is_off() -> ef.Granted:
    driver = make_driver(host=8, disk=8)
    driver.discover(2, "ab")
    driver.handle(ev.TierOff(tier=1, fenced=True))
    return driver.acquire("ab")


def evicted_over_quota() -> ef.Granted:
    driver = make_driver(device=TierSettings(name="device", slot_count=8, quotas={"ann": 0.25}))
    driver.store("a", "b", tenant="ann")
    driver.store("c", tenant="ann")
    return driver.acquire("a", tenant="ann")


def refused_below() -> ef.Granted:
    host = TierSettings(name="host", slot_count=1, eviction="adaptive")
    driver = make_driver(device=3, host=host)
    with patch.object(AdaptivePolicy, "admit", lambda *_, **__: lambda _: 0):
        driver.store("a", "b", "cd")
    return driver.acquire("b")


def corrupt() -> ef.Granted:
    driver = make_driver(device=4, host=8)
    driver.store("ab", "vwx")
    lease = driver.acquire("ab").lease
    driver.report(driver.copy(Purpose.LOAD), faults=[(0, BlockFault.CORRUPT)])
    driver.release(lease)
    return driver.acquire("ab")


def corrupt_below_the_hub() -> ef.Granted:
    driver = make_driver(device=8, host=8, disk=8)
    driver.discover(2, "ab")
    lease = driver.acquire("ab").lease
    driver.report(driver.copy(Purpose.STAGE), faults=[(0, BlockFault.CORRUPT)])
    driver.finish()
    driver.release(lease)
    return driver.acquire("ab")


def reset() -> ef.Granted:
    driver = make_driver()
    driver.store("ab")
    driver.reset()
    return driver.acquire("ab")


def lost_with_a_rank() -> ef.Granted:
    driver = make_driver()
    driver.store("ab")
    driver.handle(ev.RankLost(rank=0))
    driver.handle(ev.RankBack(rank=0))
    return driver.acquire("ab")


def lost_with_a_tier() -> ef.Granted:
    driver = make_driver(device=3, host=8)
    driver.store("ab", "xy")
    driver.handle(ev.TierOff(tier=1, fenced=True))
    driver.handle(ev.TierOn(tier=1, kept=False))
    return driver.acquire("ab")


def no_room_in_the_hub() -> ef.Granted:
    driver = make_driver(device=12, host=1, disk=8)
    driver.discover(2, "ab")
    return driver.acquire("ab")


def not_loaded() -> ef.LeaseChanged:
    driver = make_driver(host=8)
    driver.discover(1, "abc")
    driver.acquire("abc")
    driver.report(driver.copy(Purpose.LOAD), faults=[(1, BlockFault.UNREADABLE)])
    return ef.answer(driver.effects, ef.LeaseChanged)


def corrupt_when_loaded() -> ef.LeaseChanged:
    driver = make_driver(host=8)
    driver.discover(1, "abc")
    driver.acquire("abc")
    driver.report(driver.copy(Purpose.LOAD), faults=[(1, BlockFault.CORRUPT)])
    return ef.answer(driver.effects, ef.LeaseChanged)


def quicker_to_compute() -> ef.Granted:
    driver = make_driver(host=8, load_tokens_min=100)
    driver.discover(1, "ab")
    return driver.acquire("ab")


def opted_out_of_reuse() -> ef.Granted:
    return make_driver().acquire("ab", reuse=False)


def opted_out_of_loading() -> ef.Granted:
    driver = make_driver(host=8)
    driver.discover(1, "ab")
    return driver.acquire("ab", load=False)


CASES: list[tuple[Callable[[], ef.Granted | ef.LeaseChanged], MissReason, int]] = [
    (nothing_missing, MissReason.NONE, 2),
    (never_seen, MissReason.NEVER_SEEN, 0),
    (evicted, MissReason.EVICTED, 0),
    (still_computed, MissReason.FILLING, 0),
    (still_computed_further_on, MissReason.FILLING, 1),
    (still_saved, MissReason.FILLING, 0),
    (in_another_form, MissReason.FORM, 0),
    (in_another_namespace, MissReason.NAMESPACE, 0),
    (cached_for_other_weights, MissReason.WEIGHTS, 0),
    (in_a_tier_that_is_off, MissReason.TIER_OFF, 0),
    (below_a_hub_that_is_off, MissReason.TIER_OFF, 0),
    (evicted_over_quota, MissReason.OVER_QUOTA, 0),
    (refused_below, MissReason.REFUSED, 0),
    (corrupt, MissReason.CORRUPT, 0),
    (corrupt_below_the_hub, MissReason.CORRUPT, 0),
    (corrupt_when_loaded, MissReason.CORRUPT, 1),
    (not_loaded, MissReason.FAILED, 1),
    (reset, MissReason.RESET, 0),
    (lost_with_a_rank, MissReason.LOST, 0),
    (lost_with_a_tier, MissReason.LOST, 0),
    (no_room_in_the_hub, MissReason.NO_ROOM, 1),
    (quicker_to_compute, MissReason.RECOMPUTE, 0),
    (opted_out_of_reuse, MissReason.OPTED_OUT, 0),
    (opted_out_of_loading, MissReason.OPTED_OUT, 0),
]


@pytest.mark.parametrize(
    ("request_that_misses", "reason", "block"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_a_request_is_told_why_it_found_no_more(
    request_that_misses: Callable[[], ef.Granted | ef.LeaseChanged],
    reason: MissReason,
    block: int,
) -> None:
    told = request_that_misses()

    assert told.miss.reason is reason
    assert told.miss.block == block
    assert told.cached_tokens == 2 * block


def test_every_reason_has_a_case() -> None:
    assert {reason for _, reason, _ in CASES} == set(MissReason)


def test_an_evicted_block_is_told_with_time_tier_and_policy() -> None:
    granted = evicted()

    assert granted.miss.departure is not None
    assert granted.miss.departure.at == 2.5
    assert granted.miss.departure.tier == "device"
    assert granted.miss.departure.policy == "lru"


def test_a_block_counts_as_evicted_when_its_last_copy_left() -> None:
    driver = make_driver(device=3, host=2)
    driver.store("ab", "xy")

    granted = driver.acquire("ab")

    assert granted.miss.reason is MissReason.EVICTED
    assert granted.miss.departure is not None
    assert granted.miss.departure.tier == "host"


def test_a_block_over_quota_below_is_told_so_once_the_device_has_lost_it() -> None:
    host = TierSettings(name="host", slot_count=8, quotas={"ann": 0.0})
    driver = make_driver(device=None, host=host)

    driver.handle(
        ev.Save(keys=driver.keys("a"), slots=np.zeros((1, 1), np.int32), cause="r", tenant="ann")
    )

    found = driver.answer(ev.Lookup(keys=driver.keys("a")), ef.Found)
    assert found.miss.reason is MissReason.OVER_QUOTA


def test_a_block_that_came_back_is_not_told_as_departed_later() -> None:
    driver = make_driver(device=4)
    driver.store("a")
    driver.reset()
    driver.store("a", "xyz")

    granted = driver.acquire("a")

    assert granted.miss.reason is MissReason.EVICTED


def test_departures_are_forgotten_beyond_their_bound() -> None:
    driver = make_driver(departed_count=1)
    driver.store("a", "b")
    driver.reset()

    reasons = [driver.acquire(word).miss.reason for word in ("a", "b")]

    assert reasons == [MissReason.NEVER_SEEN, MissReason.RESET]


def test_the_reason_is_forgotten_neither_when_a_later_block_comes_back() -> None:
    driver = make_driver(device=None, host=1)
    first, second = driver.keys("ab")
    slots = np.zeros((1, 1), np.int32)
    for keys, parent in (([first], None), (driver.keys("x"), None), ([second], first)):
        driver.handle(ev.Save(keys=keys, slots=slots, cause="r", parent=parent))
        driver.finish()

    found = driver.answer(ev.Lookup(keys=[first, second]), ef.Found)

    assert found.miss.reason is MissReason.EVICTED


def test_other_tokens_in_another_namespace_are_simply_never_seen() -> None:
    driver = make_driver()
    driver.store("ab", namespace=b"adapter 1", content=11)

    granted = driver.acquire("xy", namespace=b"adapter 2", content=12)

    assert granted.miss.reason is MissReason.NEVER_SEEN


def test_the_same_namespace_is_no_reason() -> None:
    driver = make_driver()
    driver.store("ab", namespace=b"adapter 1", content=11)

    granted = driver.acquire("xy", namespace=b"adapter 1", content=11)

    assert granted.miss.reason is MissReason.NEVER_SEEN


def test_a_block_is_no_longer_filling_when_its_request_gave_up() -> None:
    driver = make_driver()
    driver.release(driver.acquire("ab").lease)

    granted = driver.acquire("ab")

    assert granted.miss.reason is MissReason.NEVER_SEEN


def test_a_block_is_no_longer_filling_after_a_reset() -> None:
    """The request that computes it goes on, but does not publish it."""
    driver = make_driver()
    driver.acquire("ab")

    driver.reset()

    assert driver.acquire("ab").miss.reason is MissReason.NEVER_SEEN


def test_a_save_that_failed_does_not_count_as_filling() -> None:
    driver = make_driver(device=None, host=4)
    keys = driver.keys("a")
    driver.handle(ev.Save(keys=keys, slots=np.zeros((1, 1), np.int32), cause="r"))
    driver.report(driver.copy(Purpose.SAVE), failure="link down")

    found = driver.answer(ev.Lookup(keys=keys), ef.Found)

    assert found.miss.reason is MissReason.NEVER_SEEN


# -------------------------------------------------------------------- looking


def with_blocks_in_three_tiers() -> Driver:
    """`a` lies on the device, `ab` in the hub, `abc` on disk."""
    host = TierSettings(name="host", slot_count=8, write=WritePolicy(kind=WriteKind.SELECTIVE))
    driver = make_driver(host=host, disk=8)
    driver.store("a")
    keys = driver.keys("abc")
    for tier, position in ((1, 1), (2, 2)):
        driver.handle(
            ev.Discovered(
                tier=tier,
                keys=[keys[position]],
                parents=[keys[position - 1]],
                slots=np.zeros(1, np.int32),
            )
        )
    return driver


def test_blocks_are_found_down_to_the_tier_one_may_look_in() -> None:
    driver = with_blocks_in_three_tiers()
    keys = driver.keys("abc")

    sources = [find(driver.books, keys, deepest=deepest).source.tolist() for deepest in range(4)]

    assert sources == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_looking_changes_nothing() -> None:
    driver = with_blocks_in_three_tiers()
    before = freeze(driver.machine)

    find(driver.books, driver.keys("abc"), deepest=3)
    explain(driver.books, driver.keys("abcd"), 3)
    fetchable(driver.books, driver.keys("abc"))

    assert freeze(driver.machine) == before


def test_a_gap_ends_what_is_found_whatever_lies_behind_it() -> None:
    driver = with_blocks_in_three_tiers()
    driver.handle(ev.TierOff(tier=1, fenced=True))

    found = find(driver.books, driver.keys("abc"), deepest=3)

    assert found.source.tolist() == [0]


def test_blocks_in_another_form_are_remembered_up_to_a_bound() -> None:
    driver = make_driver(host=8, departed_count=2)

    for prompt in "abcd":
        driver.discover(1, prompt, foreign=True)

    reasons = [driver.acquire(prompt).miss.reason for prompt in "abcd"]
    assert reasons == [MissReason.NEVER_SEEN] * 2 + [MissReason.FORM] * 2
