"""KV events: numbered without gaps; replaying them gives what a snapshot shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import TierSettings
from penstock.machine import events as ev
from penstock.machine.kv_events import (
    KEYS_PER_EVENT,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EventLog,
    KvEvent,
    Snapshot,
)
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.machine.conftest import Driver

View = dict[str, dict[bytes, bytes | None]]
"""Tier to key to the key before it: what a router believes."""


def replay(view: View, events: Iterable[KvEvent]) -> None:
    for event in events:
        match event:
            case BlocksStored():
                parents = [event.parent, *event.keys[:-1]]
                view.setdefault(event.tier, {}).update(zip(event.keys, parents, strict=True))
            case BlocksRemoved():
                for key in event.keys:
                    view[event.tier].pop(key, None)
            case _:
                assert isinstance(event, AllCleared)
                view.clear()


def view_of(snapshot: Snapshot) -> View:
    return {tier: dict(rows) for tier, rows in snapshot.blocks.items() if rows}


def without_empty(view: View) -> View:
    return {tier: keys for tier, keys in view.items() if keys}


def eventful_life(driver: Driver) -> Iterable[None]:
    """Publishing, eviction, loads, faults, demotion, a tier lost, a rank lost, a reset."""
    driver.store("abc", "abx", "q")
    yield
    driver.store("vwxyz", "abc")
    yield
    driver.acquire("abxy")
    driver.finish()
    yield
    driver.tick()
    driver.finish()
    yield
    driver.handle(ev.TierOn(tier=2, kept=False))
    yield
    driver.handle(ev.RankLost(rank=0))
    driver.handle(ev.RankBack(rank=0))
    yield
    for lease in list(driver.books.leases):
        driver.release(lease)
    granted = driver.acquire("abc")
    for copy in [c for c in driver.copies.values() if c.purpose is Purpose.LOAD]:
        driver.report(copy, faults=[(0, BlockFault.CORRUPT)])
    driver.finish()
    driver.commit(granted.lease, "abc")
    driver.release(granted.lease)
    driver.finish()
    yield
    driver.reset()
    yield
    driver.store("abq")
    yield


@pytest.fixture
def driver() -> Driver:
    device = TierSettings(name="device", slot_count=8, low_watermark=0.25, high_watermark=0.5)
    driver: Driver = make_driver(device=device, host=10, disk=12)
    return driver


def test_events_are_numbered_without_gaps(driver: Driver) -> None:
    numbers = []
    for _ in eventful_life(driver):
        numbers += [event.sequence for event in driver.machine.take_kv_events()]

    assert numbers == list(range(1, len(numbers) + 1))


def test_replaying_events_gives_what_a_snapshot_shows(driver: Driver) -> None:
    view: View = {}

    for _ in eventful_life(driver):
        replay(view, driver.machine.take_kv_events())
        assert without_empty(view) == view_of(driver.machine.kv_snapshot())


def test_a_reader_that_starts_from_a_snapshot_ends_with_the_same_view(driver: Driver) -> None:
    life = iter(eventful_life(driver))
    for _ in range(3):
        next(life)
    snapshot = driver.machine.kv_snapshot()
    view = view_of(snapshot)

    for _ in life:
        events = driver.machine.take_kv_events()
        replay(view, [event for event in events if event.sequence > snapshot.sequence])

    assert without_empty(view) == view_of(driver.machine.kv_snapshot())


def test_events_are_handed_out_once(driver: Driver) -> None:
    driver.store("ab")

    first, second = driver.machine.take_kv_events(), driver.machine.take_kv_events()

    assert first
    assert second == []


def test_looking_at_a_snapshot_takes_no_events(driver: Driver) -> None:
    driver.store("ab")

    driver.machine.kv_snapshot()

    assert driver.machine.take_kv_events()


def test_blocks_published_together_are_one_event(driver: Driver) -> None:
    driver.compute("abc")

    (event,) = driver.machine.take_kv_events()

    assert event == BlocksStored(
        sequence=1, epoch=0, tier="device", keys=driver.keys("abc"), parent=None
    )


def test_blocks_published_later_name_the_block_they_follow(driver: Driver) -> None:
    driver.compute("ab")
    driver.machine.take_kv_events()

    driver.compute("abcd")

    (event,) = driver.machine.take_kv_events()
    assert isinstance(event, BlocksStored)
    assert (driver.words(event.keys), event.parent) == (["abc", "abcd"], driver.key("ab"))


def test_a_block_is_announced_when_it_is_ready_and_not_before() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.compute("a")
    copy = driver.copy(Purpose.SAVE)
    driver.machine.take_kv_events()

    driver.report(copy, rank=0)
    early = driver.machine.take_kv_events()
    driver.report(copy, rank=1)

    assert early == []
    (event,) = driver.machine.take_kv_events()
    assert isinstance(event, BlocksStored)
    assert event.tier == "host"


def test_a_reset_is_told_with_the_new_epoch(driver: Driver) -> None:
    driver.store("ab")

    driver.reset()

    last = driver.machine.take_kv_events()[-1]
    assert isinstance(last, AllCleared)
    assert last.epoch == driver.machine.kv_snapshot().epoch == 1


def test_after_an_overflow_the_gap_is_seen_and_a_snapshot_helps() -> None:
    driver = make_driver(device=12, event_count=2)
    driver.store("a", "b", "c", "d")

    events = driver.machine.take_kv_events()
    snapshot = driver.machine.kv_snapshot()
    driver.store("e")
    view = view_of(snapshot)
    replay(view, driver.machine.take_kv_events())

    assert [event.sequence for event in events] == [3, 4]
    assert snapshot.sequence == 4
    assert view == view_of(driver.machine.kv_snapshot())


def test_waiting_events_are_bounded_by_their_keys_too() -> None:
    log = EventLog(limit=4)
    for number in range(4):
        log.stored("device", [b"%d-%d" % (number, key) for key in range(2 * KEYS_PER_EVENT)], None)

    assert [event.sequence for event in log.take()] == [3, 4]


def test_taking_events_makes_room_for_new_ones() -> None:
    log = EventLog(limit=2)
    for _ in range(3):
        log.stored("device", [bytes([key]) for key in range(2 * KEYS_PER_EVENT)], None)
        log.take()

    log.removed("device", [b"a"])
    log.cleared(1)

    assert [event.sequence for event in log.take()] == [4, 5]


def test_events_can_be_sent_and_read_back() -> None:
    log = EventLog(limit=4)
    log.stored("device", [b"a", b"b"], b"parent")
    log.removed("host", [b"c"])
    log.cleared(3)
    events = log.take()

    sent = msgspec.msgpack.encode(events)
    read = msgspec.msgpack.decode(sent, type=list[BlocksStored | BlocksRemoved | AllCleared])

    assert read == events
    assert [row["event"] for row in msgspec.msgpack.decode(sent)] == [
        "stored",
        "removed",
        "cleared",
    ]
