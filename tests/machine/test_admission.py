"""A full tier below the device may refuse blocks that are worth less than what lies there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache.eviction import POLICIES, LruPolicy
from penstock.cache.explain import MissReason
from penstock.cache.operations import Purpose
from penstock.cache.settings import DEVICE, HUB, TierSettings, WriteKind, WritePolicy
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine import writes
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.eviction import Judge
    from penstock.vocabulary.keys import Key
    from tests.machine.conftest import Driver


class ChoosyPolicy(LruPolicy):
    """Blocks whose letter is a capital are worth nothing here, unless they have a priority."""

    name = "choosy"
    may_refuse = False
    asked = 0

    def admit(self, keys: Sequence[Key], *, priority: int) -> Judge | None:
        ChoosyPolicy.asked += 1
        capitals = [at for at, key in enumerate(keys) if key[-1:].isupper()]
        admitted = capitals[0] if capitals and not priority else len(keys)
        return lambda _: admitted


@pytest.fixture(autouse=True)
def choosy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "choosy", ChoosyPolicy)


def tier(name: str, slot_count: int, write: str = "write_through", **settings: Any) -> TierSettings:
    policy = WritePolicy(kind=WriteKind(write))
    return TierSettings(
        name=name, slot_count=slot_count, write=policy, eviction="choosy", **settings
    )


def refused(driver: Driver) -> dict[str, int]:
    statistics = driver.machine.statistics()
    assert statistics.blocks_refused == sum(t.blocks_refused for t in statistics.tiers)
    return {t.name: t.blocks_refused for t in statistics.tiers if t.blocks_refused}


def save(driver: Driver, prompt: str, first: int = 0, **wishes: Any) -> ef.Started:
    keys = driver.keys(prompt)
    slots = 100 + np.arange(first, len(keys), dtype=np.int32)
    parent = keys[first - 1] if first else None
    event = ev.Save(keys=keys[first:], slots=slots[None], cause="save", parent=parent, **wishes)
    started = driver.answer(event, ef.Started)
    driver.finish()
    return started


# -------------------------------------------------------------------- what is refused


def test_a_full_tier_keeps_what_is_worth_more_than_a_newcomer() -> None:
    driver = make_driver(device=12, host=tier("host", 2))
    driver.store("a", "b")

    driver.store("X")

    assert driver.cached_in("host") == {"a", "b"}
    assert refused(driver) == {"host": 1}
    assert driver.machine.statistics().saves_refused == 0


def test_a_newcomer_that_is_worth_more_takes_the_place_of_another() -> None:
    driver = make_driver(device=12, host=tier("host", 2))
    driver.store("X", "b")

    driver.store("c")

    assert driver.cached_in("host") == {"b", "c"}
    assert refused(driver) == {}


def test_a_tier_with_room_takes_everything_and_asks_nobody() -> None:
    driver = make_driver(device=12, host=tier("host", 3))
    before = ChoosyPolicy.asked

    driver.store("XYZ")

    assert driver.cached_in("host") == {"X", "XY", "XYZ"}
    assert ChoosyPolicy.asked == before


def test_free_slots_go_to_leading_blocks_whatever_they_are_worth() -> None:
    driver = make_driver(device=12, host=tier("host", 2))
    driver.store("a")

    driver.store("XYZ")

    assert driver.cached_in("host") == {"a", "X"}
    assert refused(driver) == {"host": 2}


def test_what_follows_a_refused_block_is_refused_with_it() -> None:
    driver = make_driver(device=12, host=tier("host", 3))
    driver.store("p", "q", "r")

    driver.store("aXb")

    assert driver.cached_in("host") == {"q", "r", "a"}
    assert refused(driver) == {"host": 2}


def test_branches_of_a_refused_block_are_refused_in_the_same_write() -> None:
    driver = make_driver(device=12, host=tier("host", 1, "selective"))
    driver.store("p", "p", "p", "Xa", "Xb")
    books = driver.books
    words = [driver.key(word) for word in ("X", "Xa", "Xb")]
    nodes = np.array(books.nodes.get_all(words), dtype=np.int32)

    taken = writes.save(books, DEVICE, books.tier(HUB), nodes, 0.0, "test")

    assert not len(taken)
    assert driver.cached_in("host") == {"p"}
    assert refused(driver) == {"host": 3}


def test_what_follows_later_is_refused_as_well_while_the_tier_is_full() -> None:
    driver = make_driver(device=None, host=tier("host", 2))
    save(driver, "pq")
    save(driver, "X")

    started = save(driver, "Xb", first=1)

    assert started.accepted == ()
    assert driver.cached_in("host") == {"p", "pq"}


def test_blocks_refused_on_their_way_out_make_room_above_all_the_same() -> None:
    device = TierSettings(name="device", slot_count=4, low_watermark=0.5, high_watermark=0.75)
    driver = make_driver(device=device, host=tier("host", 1, "write_back"))
    for prompt in ("p", "q", "r", "X", "Y", "Z"):
        driver.store(prompt)
        driver.tick()
        driver.finish()

    assert driver.free_in("device") >= 2
    assert len(driver.cached_in("host")) == 1
    assert driver.cached_in("host") <= {"p", "q", "r"}
    assert driver.acquire("X").miss.reason is MissReason.REFUSED


def test_a_priority_lets_a_block_in() -> None:
    driver = make_driver(device=None, host=tier("host", 2))
    save(driver, "pq")

    assert save(driver, "X").accepted == ()
    assert save(driver, "X", priority=3).accepted == (0,)


def test_the_device_never_refuses_a_block() -> None:
    driver = make_driver(device=tier("device", 3))
    before = ChoosyPolicy.asked

    driver.store("ab", "XY")

    assert "X" in driver.cached_in("device")
    assert ChoosyPolicy.asked == before


def test_what_a_preempted_request_comes_back_for_is_never_refused() -> None:
    driver = make_driver(device=8, host=tier("host", 2, "selective"))
    for prompt in ("pq", "XY"):
        granted = driver.acquire(prompt)
        driver.commit(granted.lease, prompt)
        driver.preempt(granted.lease)
        driver.finish()

    assert driver.cached_in("host") == {"X", "XY"}


def test_what_a_request_loads_goes_through_a_hub_that_would_refuse_it() -> None:
    host = tier("host", 2)
    driver = make_driver(device=3, host=host, disk=TierSettings(name="disk", slot_count=16))
    driver.store("X")
    driver.store("pq")
    assert driver.tiers_with("X") == {"disk"}

    granted = driver.acquire("X")
    driver.finish()

    assert granted.cached_by_tier == (0, 0, 2)
    assert driver.tiers_with("X") >= {"device", "host"}


def test_a_tenant_over_its_quota_is_told_the_reason_that_holds() -> None:
    driver = make_driver(device=None, host=tier("host", 8, quotas={"ann": 0.25}))
    save(driver, "pq", tenant="ann")

    assert save(driver, "X", tenant="ann").miss.reason is MissReason.REFUSED
    assert save(driver, "rst", tenant="ann").miss.reason is MissReason.OVER_QUOTA
    assert driver.cached_in("host") == {"r", "rs"}


def test_a_store_that_gives_blocks_up_for_new_ones_is_full_whatever_its_directory_says() -> None:
    disk = tier("disk", 8, stored=True)
    driver = make_driver(device=8, host=16, disk=disk)
    driver.store("pq", "X")
    assert driver.cached_in("disk") == {"p", "pq", "X"}

    driver.handle(ev.Vanished(tier=2, keys=driver.keys("X")))
    driver.store("Y", "r")

    assert driver.cached_in("disk") == {"p", "pq", "r"}
    assert refused(driver) == {"disk": 1}


# -------------------------------------------------------------------- what is said of it


def test_a_miss_says_which_tier_refused_the_block() -> None:
    driver = make_driver(device=3, host=tier("host", 2))
    driver.store("a", "b", "X")

    driver.store("pq")

    miss = driver.acquire("X").miss
    assert miss.reason is MissReason.REFUSED
    assert miss.departure is not None
    assert (miss.departure.tier, miss.departure.policy) == ("host", "choosy")
    assert any("refused" in line for line in driver.machine.story(driver.key("X")))


def test_a_refused_block_that_lies_above_is_found_there() -> None:
    driver = make_driver(device=12, host=tier("host", 2))
    driver.store("a", "b", "X")

    granted = driver.acquire("X")

    assert granted.cached_tokens == 2
    assert granted.miss.reason is MissReason.NONE


def test_a_block_that_was_taken_after_all_and_left_was_evicted() -> None:
    driver = make_driver(device=None, host=tier("host", 2))
    save(driver, "pq")
    save(driver, "X")
    save(driver, "X", priority=3)

    save(driver, "cd", priority=4)

    found = driver.answer(ev.Lookup(keys=driver.keys("X")), ef.Found)
    assert found.miss.reason is MissReason.EVICTED


def test_an_engine_that_offloads_is_told_what_was_refused() -> None:
    driver = make_driver(device=None, host=tier("host", 3))
    save(driver, "pqr")

    started = save(driver, "aXb")

    assert started.accepted == (0,)
    assert (started.miss.reason, started.miss.block) == (MissReason.REFUSED, 1)
    assert driver.machine.statistics().blocks_known == 3
    found = driver.answer(ev.Lookup(keys=driver.keys("aXb")), ef.Found)
    assert (found.ready, found.miss.reason) == (1, MissReason.REFUSED)


# -------------------------------------------------------------------- a second chance


def test_a_refused_block_is_offered_again_when_it_is_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver(device=12, host=tier("host", 2))
    driver.store("a", "b", "X")
    monkeypatch.setattr(ChoosyPolicy, "admit", lambda *_, **__: None)

    driver.store("X")

    assert driver.cached_in("host") == {"b", "X"}


def test_a_block_that_left_by_eviction_is_not_written_again_for_a_hit() -> None:
    driver = make_driver(device=12, host=tier("host", 2))
    driver.store("a", "b", "c")

    driver.acquire("a")

    assert not [copy for copy in driver.copies.values() if copy.purpose is Purpose.SAVE]
