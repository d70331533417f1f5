"""What a stored tier missed while it was off is written from the hub when it is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import TierSettings, WriteKind, WritePolicy
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine import writes
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from typing import Any

    from penstock.machine.statistics import TierStatistics
    from tests.machine.conftest import Driver

STORE = 2


def stored(slot_count: int = 32, **settings: Any) -> TierSettings:
    return TierSettings(name="store", slot_count=slot_count, stored=True, **settings)


def switch_off(driver: Driver) -> None:
    driver.handle(ev.TierOff(tier=STORE, fenced=False, why="it starts"))


def switch_on(driver: Driver, *, kept: bool = True) -> None:
    driver.handle(ev.TierOn(tier=STORE, kept=kept))
    assert not driver.told(ef.Copy)
    driver.tick()


def store_statistics(driver: Driver) -> TierStatistics:
    return driver.machine.statistics().tiers[-1]


def test_what_was_computed_while_a_store_was_off_is_written_when_it_is_on() -> None:
    driver = make_driver(host=8, disk=stored())
    switch_off(driver)
    driver.store("abc", "xy")
    assert store_statistics(driver).saves_waiting == 5

    switch_on(driver)
    driver.finish()

    assert driver.cached_in("store") == {"a", "ab", "abc", "x", "xy"}
    assert store_statistics(driver).saves_waiting == 0
    assert store_statistics(driver).saves_dropped == 0


def test_blocks_that_left_the_hub_before_are_counted_as_dropped() -> None:
    driver = make_driver(host=4, disk=stored())
    switch_off(driver)
    driver.store("abc", "xyz")

    switch_on(driver)
    driver.finish()

    found = store_statistics(driver)
    assert found.ready == len(driver.cached_in("host")) == 4
    assert found.saves_dropped == 2
    assert driver.machine.saves_dropped == 2


def test_a_save_that_failed_because_the_store_went_away_is_made_again() -> None:
    driver = make_driver(host=8, disk=stored())
    driver.compute("abc")
    driver.complete(driver.copy(Purpose.SAVE))
    copy = driver.copy(Purpose.SAVE)
    switch_off(driver)
    driver.report(copy, failure="the store process has ended")

    switch_on(driver)
    driver.finish()

    assert driver.cached_in("store") == {"a", "ab", "abc"}


def test_a_block_that_a_store_could_not_write_waits_until_it_comes_on_again() -> None:
    driver = make_driver(host=8, disk=stored())
    driver.compute("ab")
    driver.complete(driver.copy(Purpose.SAVE))
    driver.report(driver.copy(Purpose.SAVE), faults=[(1, BlockFault.UNREADABLE)])
    assert not driver.copies  # It is not tried again and again.
    assert store_statistics(driver).saves_waiting == 1

    switch_off(driver)
    switch_on(driver)
    driver.finish()

    assert driver.cached_in("store") == {"a", "ab"}


def test_blocks_that_the_store_turns_out_to_have_are_not_written_again() -> None:
    driver = make_driver(host=8, disk=stored(), stored_saves_max=2)
    switch_off(driver)
    driver.store("abcd")
    switch_on(driver)
    keys = driver.keys("abcd")
    driver.handle(ev.Discovered(tier=STORE, keys=keys[1:], parents=keys[:-1]))

    driver.finish()
    driver.tick()

    assert not driver.copies
    assert driver.cached_in("store") == {"a", "ab", "abc", "abcd"}


def test_what_is_computed_now_finds_places_beside_what_is_written_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writes, "BLOCKS_AT_ONCE", 3)
    driver = make_driver(host=16, disk=stored(), stored_saves_max=4)
    switch_off(driver)
    driver.store("abcdef")
    switch_on(driver)
    (behind,) = driver.copies.values()
    assert len(behind.keys) == 2  # Half of the places.

    driver.compute("x")
    driver.complete(driver.copies[next(op for op in driver.copies if op != behind.operation)])
    now = [copy for copy in driver.copies.values() if copy.operation != behind.operation]

    assert [driver.words(copy.keys) for copy in now] == [["x"]]
    driver.finish()
    assert driver.cached_in("store") == {"a", "ab", "abc", "abcd", "abcde", "abcdef", "x"}


@pytest.mark.parametrize("write", ["selective", "write_back"])
def test_other_policies_write_what_they_would_have_written(write: str) -> None:
    policy = WritePolicy(kind=WriteKind(write), hits=2)
    host = TierSettings(
        name="host", slot_count=8, low_watermark=0.25, high_watermark=0.5, write=WritePolicy()
    )
    driver = make_driver(host=host, disk=stored(write=policy))
    switch_off(driver)
    driver.store("ab", "xy")
    driver.store("ab", "ab")  # Hit twice.

    switch_on(driver)
    driver.finish()

    assert driver.cached_in("store") == ({"a", "ab"} if write == "selective" else set())
    assert store_statistics(driver).saves_waiting == 0


def test_nothing_of_before_a_reset_is_written_behind() -> None:
    driver = make_driver(host=8, disk=stored())
    switch_off(driver)
    driver.store("abc")
    driver.reset()
    driver.store("x")

    switch_on(driver)
    driver.finish()

    assert driver.cached_in("store") == {"x"}
    assert store_statistics(driver).saves_dropped == 0


def test_nothing_is_written_behind_into_a_store_that_another_engine_has_voided() -> None:
    driver = make_driver(host=8, disk=stored())
    switch_off(driver)
    driver.store("abc")

    driver.handle(ev.TierVoided(tier=STORE, own=False))
    switch_on(driver)
    driver.finish()

    assert driver.cached_in("store") == set()
    assert store_statistics(driver).saves_waiting == 0


@pytest.mark.parametrize("write", ["write_through", "selective", "write_back", "exclusive"])
def test_what_was_computed_before_another_engines_reset_is_never_written_again(write: str) -> None:
    policy = WritePolicy(kind=WriteKind(write))
    driver = make_driver(
        host=TierSettings(name="host", slot_count=4, low_watermark=0.5, high_watermark=0.5),
        disk=stored(write=policy),
    )
    driver.store("ab")
    driver.handle(ev.TierVoided(tier=STORE, own=False))

    for _ in range(3):
        driver.store("abc")  # Found above the store, hit often, and followed by a new block.
    for prompt in ("wxyz", "stuv"):
        driver.store(prompt)
        driver.tick()
        driver.finish()

    assert driver.cached_in("store").isdisjoint({"a", "ab"})
    assert driver.cached_in("store")


def test_what_a_request_had_begun_before_another_engines_reset_is_not_written() -> None:
    driver = make_driver(host=8, disk=stored())
    begun = driver.acquire("abc").lease
    driver.handle(ev.TierVoided(tier=STORE, own=False))
    driver.commit(begun, "abc")
    driver.release(begun)

    driver.finish()

    assert driver.cached_in("host") == {"a", "ab", "abc"}
    assert driver.cached_in("store") == set()


def test_a_block_that_is_computed_again_after_another_engines_reset_is_written() -> None:
    driver = make_driver(device=2, host=2, disk=stored())
    driver.store("a")
    driver.handle(ev.TierVoided(tier=STORE, own=False))
    driver.store("x", "y", "z")  # No tier has the first one any more.

    driver.store("a")

    assert driver.cached_in("store") == {"a", "x", "y", "z"}


def test_after_its_own_reset_an_engine_writes_what_it_computes_before_the_store_has_answered() -> (
    None
):
    driver = make_driver(host=8, disk=stored())
    driver.reset()
    switch_off(driver)
    driver.store("ab")
    driver.handle(ev.TierVoided(tier=STORE, own=True))

    switch_on(driver)
    driver.finish()

    assert driver.cached_in("store") == {"a", "ab"}


def test_an_idle_engine_is_woken_for_what_no_copy_reminds_it_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writes, "LOOKED_AT_ONCE", 1)
    driver = make_driver(host=8, disk=stored())
    switch_off(driver)
    driver.store("abc")
    keys = driver.keys("abc")
    driver.handle(ev.Discovered(tier=STORE, keys=keys[:2], parents=[None, keys[0]]))
    switch_on(driver)
    assert not driver.told(ef.Copy)
    assert driver.machine.next_deadline() == driver.now

    steps = 0
    while driver.machine.next_deadline() is not None and not driver.copies:
        driver.tick()
        steps += 1
    driver.finish()

    assert steps <= 3
    assert driver.cached_in("store") == {"a", "ab", "abc"}
