"""The whole state as nested tuples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lab.fixtures.frozen import freeze
from penstock.cache.operations import Purpose
from penstock.machine import events as ev
from penstock.machine.machine import CacheMachine
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.machine.conftest import Driver


def a_busy_cache() -> Driver:
    """Leases ready and waiting, copies of all kinds under way, a pin, hints, a foreign block."""
    driver: Driver = make_driver(device=16, host=8, disk=8, ranks=2)
    driver.store("abc")
    driver.discover(2, "xyz", foreign=True)
    driver.handle(
        ev.Discovered(
            tier=2, keys=driver.keys("p"), parents=[None], slots=np.array([7], dtype=np.int32)
        )
    )
    driver.acquire("p")
    driver.compute("uv", priority=2, ttl_s=9.0)
    granted = driver.acquire("abq")
    driver.commit(granted.lease, "ab", more_tokens=1)
    driver.grow(driver.fork(granted.lease).lease, 6)
    driver.pin("a")
    driver.report(driver.copy(Purpose.DUPLICATE), rank=1)
    return driver


def test_equal_histories_freeze_to_equal_tuples() -> None:
    first, second = a_busy_cache(), a_busy_cache()

    assert freeze(first.machine) == freeze(second.machine)


def test_a_replay_of_all_events_freezes_to_the_same() -> None:
    driver = a_busy_cache()
    replay = CacheMachine(driver.books.settings, incarnation=7)

    for event, now in driver.past:
        replay.handle(event, now)

    assert freeze(replay) == freeze(driver.machine)


def test_a_frozen_state_can_be_hashed_and_holds_no_live_parts() -> None:
    driver = a_busy_cache()
    frozen = freeze(driver.machine)
    number = hash(frozen)

    driver.finish()
    driver.reset()

    assert hash(frozen) == number
    assert frozen != freeze(driver.machine)


def test_freezing_changes_nothing() -> None:
    driver = a_busy_cache()

    assert freeze(driver.machine) == freeze(driver.machine)


def test_every_change_that_decides_something_shows() -> None:
    changes: dict[str, Callable[[Driver], object]] = {
        "acquire": lambda driver: driver.acquire("n"),
        "commit": lambda driver: driver.commit(driver.acquire("n").lease, "n"),
        "release": lambda driver: driver.release(next(iter(driver.books.leases))),
        "pin": lambda driver: driver.pin("c"),
        "report": lambda driver: driver.report(driver.copy(Purpose.DUPLICATE), rank=0),
        "rank lost": lambda driver: driver.handle(ev.RankLost(rank=0)),
        "tier off": lambda driver: driver.handle(ev.TierOff(tier=2, fenced=False)),
        "foreign": lambda driver: driver.discover(1, "lm", foreign=True),
        "reset": lambda driver: driver.reset(),
        "expiry": lambda driver: driver.tick(after_s=10.0),
        "hint": lambda driver: driver.acquire("uv", priority=7),
    }
    unchanged = freeze(a_busy_cache().machine)

    frozen = {unchanged}
    for change in changes.values():
        driver = a_busy_cache()
        change(driver)
        frozen.add(freeze(driver.machine))

    assert len(frozen) == 1 + len(changes)


def test_what_only_explains_does_not_show() -> None:
    driver = a_busy_cache()
    before = freeze(driver.machine)

    driver.machine.take_kv_events()
    driver.machine.story("request 1")
    driver.machine.statistics()
    driver.handle(ev.Lookup(keys=driver.keys("abc")))

    assert freeze(driver.machine) == before
