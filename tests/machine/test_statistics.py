"""Counts and sizes, as frozen values."""

from __future__ import annotations

import msgspec
import pytest

from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import TierSettings
from penstock.machine import events as ev
from tests.machine.conftest import make_driver


def test_statistics_do_not_change_afterwards() -> None:
    driver = make_driver()
    before = driver.machine.statistics()

    driver.store("ab")

    assert before.requests == 0
    with pytest.raises(AttributeError):
        before.requests = 1  # type: ignore[misc]


def test_statistics_can_be_written_as_json() -> None:
    driver = make_driver(host=8)
    driver.store("ab")

    read = msgspec.json.decode(msgspec.json.encode(driver.machine.statistics()))

    assert read["tiers"][1]["name"] == "host"
    assert read["misses"]["never seen"] == 1


def test_requests_tokens_and_hits_are_counted() -> None:
    driver = make_driver(device=8, host=8)
    driver.discover(1, "ab")
    driver.store("x")

    driver.store("ab", "xy")

    statistics = driver.machine.statistics()
    assert statistics.requests == 3
    assert statistics.tokens_asked == 3 + 5 + 5
    assert [tier.tokens_cached for tier in statistics.tiers] == [2, 4]
    assert statistics.tokens_cached == 6


def test_every_request_is_counted_with_the_reason_why_it_found_no_more() -> None:
    driver = make_driver()
    driver.store("ab", "ab", "abc")
    driver.acquire("q", reuse=False)

    misses = driver.machine.statistics().misses

    assert misses[MissReason.NEVER_SEEN.value] == 2
    assert misses[MissReason.NONE.value] == 1
    assert misses[MissReason.OPTED_OUT.value] == 1
    assert sum(misses.values()) == 4


def test_tokens_that_were_found_but_did_not_arrive_are_counted() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "abc")
    driver.acquire("abc")

    driver.report(driver.copy(Purpose.LOAD), faults=[(1, BlockFault.UNREADABLE)])

    assert driver.machine.statistics().tokens_not_delivered == 4


def test_slots_are_counted_by_state() -> None:
    device = TierSettings(name="device", slot_count=8, low_watermark=0.5, high_watermark=0.75)
    driver = make_driver(device=device, host=8, write="write_back", ranks=2)
    lease = driver.acquire("abcd").lease
    driver.commit(lease, "abc")
    driver.compute("x")
    driver.compute("y")
    driver.tick()

    tier = driver.machine.statistics().tiers[0]

    assert (tier.slots, tier.free) == (8, 1)
    assert (tier.filling, tier.ready, tier.leaving, tier.doomed) == (2, 3, 2, 0)
    assert tier.filling + tier.ready + tier.leaving + tier.doomed + tier.free == tier.slots
    assert tier.held == 7


def test_slots_that_something_may_still_write_to_show_as_doomed() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "ab")
    driver.release(driver.acquire("ab").lease)

    assert driver.machine.statistics().tiers[0].doomed == 2


def test_operations_are_counted_from_start_to_end() -> None:
    driver = make_driver(host=8)
    for word in ("a", "b", "c"):
        driver.compute(word)
    first, second, _ = driver.copies.values()

    driver.complete(first)
    driver.handle(ev.Cancel(operation=second.operation))

    statistics = driver.machine.statistics()
    assert statistics.operations_started == 3
    assert statistics.operations_running == 1
    assert statistics.operations_ending == 1
    assert statistics.operations_ended == {"done": 1, "failed": 0, "cancelled": 0, "expired": 0}


def test_blocks_are_counted_as_they_come_and_go() -> None:
    driver = make_driver(device=4, host=3)
    driver.store("abc", "xyz")

    statistics = driver.machine.statistics()
    assert statistics.blocks_published == 6
    assert [tier.blocks_evicted for tier in statistics.tiers] == [3, 3]
    assert statistics.blocks_evicted == 6
    assert statistics.blocks_known == 3


def test_the_health_of_ranks_and_tiers_shows() -> None:
    driver = make_driver(host=8, ranks=2)

    driver.handle(ev.RankLost(rank=1))
    driver.handle(ev.TierOff(tier=1, fenced=True))

    statistics = driver.machine.statistics()
    assert not statistics.healthy
    assert statistics.lost_ranks == (1,)
    assert [tier.on for tier in statistics.tiers] == [True, False]


def test_leases_pins_and_hollow_blocks_are_counted() -> None:
    driver = make_driver(device=8, host=8)
    driver.discover(1, "abc")
    driver.acquire("abc")
    driver.report(driver.copy(Purpose.LOAD), faults=[(0, BlockFault.CORRUPT)])
    driver.pin("q")

    statistics = driver.machine.statistics()
    assert (statistics.leases, statistics.pins) == (1, 1)
    assert statistics.blocks_hollow == 1
    assert statistics.blocks_corrupt == 1


def test_tiers_of_an_engine_that_offloads_are_those_below_the_device() -> None:
    driver = make_driver(device=None, host=4, disk=4)

    assert [tier.name for tier in driver.machine.statistics().tiers] == ["host", "disk"]


def test_statistics_are_counted_as_things_change_not_by_looking_at_every_slot() -> None:
    # Whoever looks at a server asks for them every second, on the engine's thread.
    driver = make_driver(device=8, host=8)
    driver.store("ab", "abc")
    wanted = driver.machine.statistics()
    pools = [tier.pool for tier in driver.books.owned_tiers()]
    for pool in pools:
        for name in ("state", "holders", "node", "state_view", "holders_view"):
            setattr(pool, name, None)
    for name in ("copy_count", "keys"):
        assert hasattr(driver.books.nodes, name)
        setattr(driver.books.nodes, name, None)

    assert driver.machine.statistics() == wanted
