"""What a cache lends out of its hub: all that is there, then what comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.settings import TierSettings, WriteKind, WritePolicy
from penstock.machine import events as ev
from penstock.vocabulary.checksums import life_salt
from tests.machine.conftest import INCARNATION, make_driver

if TYPE_CHECKING:
    from tests.machine.conftest import Driver

STORE = 2
PEERS = TierSettings(
    name="peers", slot_count=16, stored=True, write=WritePolicy(kind=WriteKind.NONE)
)


def lent(driver: Driver, limit: int = 100) -> tuple[set[str], set[str]]:
    """The blocks that the log says are there, each in its slot, and those that are gone."""
    changes, salt = driver.machine.take_hub_changes(STORE, limit)
    assert salt == life_salt(INCARNATION, driver.books.ledger.epoch)
    hub = driver.books.tier(1)
    for key, slot in zip(changes.keys, changes.slots.tolist(), strict=True):
        assert driver.books.nodes.key_of(int(hub.pool.node[slot])) == key
    return set(driver.words(changes.keys)), set(driver.words(changes.gone))


def driver_with_peers(host: int = 8) -> Driver:
    driver = make_driver(host=host, disk=PEERS)
    driver.handle(ev.TierOn(tier=STORE, kept=True))
    return driver


def test_who_begins_to_follow_is_told_all_and_then_what_changes() -> None:
    driver = driver_with_peers()
    driver.store("abc")
    assert not driver.machine.has_hub_changes

    driver.machine.follow_hub(follow=True)

    assert lent(driver) == ({"a", "ab", "abc"}, set())
    driver.store("abcd")
    assert lent(driver) == ({"abcd"}, set())
    assert not driver.machine.has_hub_changes


def test_what_leaves_the_hub_is_gone() -> None:
    driver = driver_with_peers(host=3)
    driver.store("abc")
    driver.machine.follow_hub(follow=True)
    lent(driver)

    driver.store("xyz")

    came, gone = lent(driver)
    assert came == {"x", "xy", "xyz"}
    assert gone == {"a", "ab", "abc"}


def test_no_more_is_taken_at_once_than_was_asked_for() -> None:
    driver = driver_with_peers()
    driver.store("abc")
    driver.machine.follow_hub(follow=True)

    came, _ = lent(driver, limit=2)

    assert len(came) == 2
    assert driver.machine.has_hub_changes


def test_blocks_of_before_a_reset_of_another_engine_are_not_lent() -> None:
    driver = driver_with_peers()
    driver.store("abc")

    driver.handle(ev.TierVoided(tier=STORE, own=False))
    driver.machine.follow_hub(follow=True)

    assert lent(driver) == (set(), {"a", "ab", "abc"})
    driver.store("xy")
    assert lent(driver) == ({"x", "xy"}, set())


def test_nothing_is_noted_while_nobody_follows() -> None:
    driver = driver_with_peers()
    driver.machine.follow_hub(follow=True)
    driver.machine.follow_hub(follow=False)

    driver.store("abc")

    assert not driver.machine.has_hub_changes
