"""The one door: events and the time in, effects out."""

from __future__ import annotations

import pytest

from penstock.cache.operations import Purpose
from penstock.errors import InvariantViolation
from penstock.machine import effects as ef
from penstock.machine import events as ev
from tests.machine.conftest import make_driver


def test_an_answer_comes_with_the_event_that_asked() -> None:
    driver = make_driver(device=8)

    effects = driver.machine.handle(
        ev.Acquire(request="r", keys=driver.keys("ab"), token_count=5), now=0.0
    )

    assert [type(effect) for effect in effects] == [ef.Granted]


def test_effects_of_one_event_are_not_told_with_the_next() -> None:
    driver = make_driver(host=8)
    driver.compute("ab")
    first = driver.machine.handle(ev.Tick(), now=0.0)

    driver.compute("cd")

    assert first == []


def test_time_passes_by_ticks() -> None:
    driver = make_driver(host=8, operation_timeout_s=5.0)
    driver.compute("ab")

    effects = driver.machine.handle_timer(now=5.0)

    assert [type(effect) for effect in effects] == [ef.Abandon, ef.Ended]


def test_without_anything_to_wait_for_there_is_no_deadline() -> None:
    driver = make_driver(host=8)
    driver.store("ab")

    assert driver.machine.next_deadline() is None


def test_the_next_deadline_is_that_of_a_copy_or_of_a_block() -> None:
    driver = make_driver(host=8, operation_timeout_s=5.0)
    driver.store("a", ttl_s=3.0)
    driver.compute("b")

    deadlines = [driver.machine.next_deadline()]
    driver.tick(after_s=3.0)
    deadlines.append(driver.machine.next_deadline())
    driver.finish()
    deadlines.append(driver.machine.next_deadline())

    assert deadlines == [3.0, 5.0, None]


def test_a_defect_is_told_with_the_story_of_the_block() -> None:
    driver = make_driver()
    granted = driver.acquire("a")
    driver.commit(granted.lease, "a")
    driver.books.device.pool.holders[granted.table[0]] = 0

    with pytest.raises(InvariantViolation, match="was released once too often") as found:
        driver.handle(ev.ReleaseLease(lease=granted.lease))

    assert any("published" in line for line in found.value.story)


def test_a_block_tells_its_story() -> None:
    driver = make_driver(device=4, host=8)
    driver.store("ab", "xyz")
    driver.acquire("ab")
    driver.finish()

    story = " / ".join(driver.machine.story(driver.key("ab")))

    for word in ("published", "filled host", "evicted", "acquired", "filled device"):
        assert word in story


def test_a_request_tells_its_story() -> None:
    driver = make_driver()
    granted = driver.acquire("ab", request="the request")
    driver.commit(granted.lease, "ab")
    driver.release(granted.lease)

    story = driver.machine.story("the request")

    assert [line.split()[1] for line in story] == ["acquired", "published", "released"]


def test_stories_are_bounded() -> None:
    driver = make_driver(story_count=3)

    for _ in range(5):
        driver.store("ab", request="the request")

    assert len(driver.machine.story("the request")) == 3


def test_the_same_events_give_the_same_effects() -> None:
    def told() -> list[str]:
        driver = make_driver(device=7, host=8, ranks=2, eviction="adaptive")
        seen = []
        for word in ("abc", "abx", "pqr", "abc", "q"):
            granted = driver.acquire(word)
            seen.append(repr(driver.effects))
            driver.finish()
            driver.commit(granted.lease, word)
            seen.append(repr(driver.effects))
            driver.release(granted.lease)
        return seen

    assert told() == told()


def test_several_operations_that_end_in_one_event_are_all_followed_up() -> None:
    driver = make_driver(device=12, host=8, operation_blocks_max=1)
    driver.discover(1, "ab")
    leases = [driver.acquire(word).lease for word in ("a", "ab")]

    driver.tick(after_s=100.0)

    changed = {effect.lease for effect in driver.told(ef.LeaseChanged)}
    assert changed == set(leases)
    assert [copy.purpose for copy in driver.copies.values()] == [Purpose.LOAD] * 2
