"""Load or compute: what measured rates decide, and what a request is told about it.

In all of these a block has two tokens, and hits lie in the host tier or on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.rates import STEPS_TO_TELL
from penstock.cache.settings import Gate
from penstock.cache.states import LeaseState
from penstock.errors import CapacityError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.gate import LOAD_WAIT_S
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from penstock.machine.statistics import HopStatistics
    from tests.machine.conftest import Driver

SLOW, QUICK = 1.0, 1000.0
"""Blocks a second over a hop, tokens a second of prefill: each far from the other."""


def compute_at(driver: Driver, tokens_per_s: float) -> None:
    """The engine tells how fast it computes."""
    driver.handle(ev.Computed(token_count=100, seconds=100 / tokens_per_s))


def measure(driver: Driver, purpose: Purpose, blocks_per_s: float) -> None:
    """The open copy of a purpose takes as long as it does at such a rate."""
    copy = driver.copy(purpose)
    driver.now += len(copy.keys) / blocks_per_s
    for _ in range(STEPS_TO_TELL):
        driver.tick()
    driver.complete(copy)
    driver.tick()


def measure_loads(driver: Driver, blocks_per_s: float, prompt: str = "mno") -> None:
    """A request for blocks of the host tier, while the gate lets everything pass."""
    assert driver.machine.statistics().prefill_tokens_per_s is None
    lease = driver.acquire(prompt).lease
    measure(driver, Purpose.LOAD, blocks_per_s)
    driver.release(lease)


def hop(driver: Driver, source: str, target: str) -> HopStatistics:
    hops = driver.machine.statistics().hops
    (found,) = [hop for hop in hops if (hop.source, hop.target) == (source, target)]
    return found


def lookup(driver: Driver, prompt: str, *, held: int = 0) -> ef.Found:
    return driver.answer(ev.Lookup(keys=driver.keys(prompt), held=held), ef.Found)


@pytest.fixture
def driver() -> Driver:
    """A cache that found three prompts in its host tier when it began."""
    driver = make_driver(device=16, host=32, block_bytes=1000)
    prompts = ("abcd", "mno", "wxy")
    keys = [key for prompt in prompts for key in driver.keys(prompt)]
    parents = [parent for p in prompts for parent in (None, *driver.keys(p[:-1]))]
    slots = np.arange(len(keys), dtype=np.int32)
    driver.handle(ev.Discovered(tier=1, keys=keys, parents=parents, slots=slots))
    return driver


def test_without_any_rate_blocks_are_loaded(driver: Driver) -> None:
    granted = driver.acquire("abcd")

    assert granted.cached_tokens == 8
    assert granted.miss.reason is MissReason.NONE


def test_without_a_rate_of_the_hop_blocks_are_loaded(driver: Driver) -> None:
    compute_at(driver, QUICK)

    assert driver.acquire("abcd").cached_tokens == 8


def test_without_a_rate_of_prefill_blocks_are_loaded(driver: Driver) -> None:
    measure_loads(driver, SLOW)

    assert driver.acquire("abcd").cached_tokens == 8


def test_a_load_that_is_slower_than_prefill_is_not_made(driver: Driver) -> None:
    measure_loads(driver, SLOW)
    compute_at(driver, QUICK)

    granted = driver.acquire("abcd")

    assert granted.state is LeaseState.READY
    assert granted.cached_tokens == 0
    assert granted.cached_by_tier == (0, 0)
    assert (granted.miss.reason, granted.miss.block) == (MissReason.RECOMPUTE, 0)
    assert not driver.copies


def test_a_load_that_is_quicker_than_prefill_is_made(driver: Driver) -> None:
    measure_loads(driver, QUICK)
    compute_at(driver, SLOW)

    assert driver.acquire("abcd").cached_tokens == 8


@pytest.mark.parametrize(("tokens_per_s", "cached_tokens"), [(19.0, 8), (21.0, 0)])
def test_the_two_are_compared_in_tokens(
    driver: Driver, tokens_per_s: float, cached_tokens: int
) -> None:
    measure_loads(driver, 10.0)  # Of two tokens each.
    compute_at(driver, tokens_per_s)

    assert driver.acquire("abcd").cached_tokens == cached_tokens


def test_what_was_computed_instead_is_counted(driver: Driver) -> None:
    measure_loads(driver, SLOW)
    compute_at(driver, QUICK)
    driver.acquire("abcd")

    statistics = driver.machine.statistics()

    assert statistics.misses["recompute is quicker"] == 1
    assert statistics.tokens_computed_instead == 8


def test_a_request_that_is_refused_computes_nothing_instead(driver: Driver) -> None:
    measure_loads(driver, SLOW)
    compute_at(driver, QUICK)

    with pytest.raises(CapacityError):
        driver.acquire("abcd" + "x" * 20)

    assert driver.machine.statistics().tokens_computed_instead == 0


def test_blocks_of_the_device_are_used_whatever_the_rates(driver: Driver) -> None:
    measure_loads(driver, SLOW)
    compute_at(driver, QUICK)
    driver.store("ab")

    granted = driver.acquire("abcd")

    assert granted.cached_by_tier == (4, 0)
    assert (granted.miss.reason, granted.miss.block) == (MissReason.RECOMPUTE, 2)


def test_blocks_that_were_computed_instead_can_be_matched_on_the_device(driver: Driver) -> None:
    measure_loads(driver, SLOW)
    compute_at(driver, QUICK)

    driver.store("abcd")

    assert driver.tiers_with("abcd") == {"device", "host"}


def test_a_short_load_may_unlock_many_blocks_of_the_device(driver: Driver) -> None:
    measure_loads(driver, 4.0)
    compute_at(driver, 8.0)
    driver.store("ab")  # Four tokens: half a second to compute, half a second to load.
    first = driver.books.nodes.get(driver.key("a"))
    slots = driver.books.device.slot_of[[first]]
    driver.books.condemn(driver.books.device, slots, MissReason.LOST, driver.now, "test")

    granted = driver.acquire("ab")

    assert granted.cached_by_tier == (2, 2)


@pytest.mark.parametrize(("tokens_per_s", "loaded"), [(85.0, 6), (170.0, 6), (172.0, 0)])
def test_beside_other_loads_a_request_waits_twice_as_long_as_it_would_compute(
    driver: Driver, tokens_per_s: float, loaded: int
) -> None:
    measure_loads(driver, 100.0)
    compute_at(driver, tokens_per_s)
    driver.acquire("abcd")

    # Three blocks behind four take 70 ms; to compute six tokens takes 70 ms and 35 ms.
    assert driver.acquire("wxy").cached_tokens == loaded


def test_what_is_queued_on_the_hop_is_waited_for(driver: Driver) -> None:
    measure_loads(driver, 100.0)
    compute_at(driver, 180.0)  # Loading is a tenth faster, where nothing is queued.

    first, second = driver.acquire("abcd"), driver.acquire("wxy")

    assert first.cached_tokens == 8
    assert second.miss.reason is MissReason.RECOMPUTE
    assert hop(driver, "host", "device").blocks_queued == 4
    driver.finish()
    assert hop(driver, "host", "device").blocks_queued == 0
    driver.release(second.lease)
    assert driver.acquire("wxy").cached_tokens == 6


def test_the_quicker_of_two_tiers_is_loaded_and_the_rest_computed() -> None:
    driver = make_driver(device=16, host=16, disk=16)
    driver.discover(2, "abcdefgh")
    driver.handle(ev.Prefetch(keys=driver.keys("abcd"), cause="test"))
    measure(driver, Purpose.STAGE, SLOW)
    lease = driver.acquire("abcd").lease
    measure(driver, Purpose.LOAD, QUICK)
    driver.release(lease)
    driver.handle(ev.RankLost(rank=0))
    driver.handle(ev.RankBack(rank=0))  # The device is empty.
    compute_at(driver, 100.0)

    granted = driver.acquire("abcdefgh")

    assert granted.cached_by_tier == (0, 8, 0)
    assert (granted.miss.reason, granted.miss.block) == (MissReason.RECOMPUTE, 4)


@pytest.mark.parametrize(("tokens_min", "loaded"), [(8, 8), (9, 0)])
def test_a_hit_below_the_floor_is_not_loaded(tokens_min: int, loaded: int) -> None:
    driver = make_driver(host=8, load_tokens_min=tokens_min)
    driver.discover(1, "abcd")

    granted = driver.acquire("abcd")

    assert granted.cached_tokens == loaded
    assert (granted.miss.reason is MissReason.RECOMPUTE) == (not loaded)


@pytest.mark.parametrize(("share", "loaded"), [(1.0, 8), (1.001, 0)])
def test_by_default_a_load_saves_at_least_what_is_prefilled_in_a_moment(
    share: float, loaded: int
) -> None:
    driver = make_driver(host=8)
    driver.discover(1, "abcd")
    compute_at(driver, share * 8 / LOAD_WAIT_S)

    assert driver.acquire("abcd").cached_tokens == loaded


def test_a_gate_that_is_off_has_no_floor_of_its_own() -> None:
    driver = make_driver(host=8, load_gate=Gate.OFF)
    driver.discover(1, "abcd")
    compute_at(driver, QUICK)

    assert driver.acquire("abcd").cached_tokens == 8


def test_a_gate_that_is_off_loads_whatever_is_slower() -> None:
    driver = make_driver(device=16, host=32, load_gate=Gate.OFF)
    driver.discover(1, "mno")
    measure_loads(driver, SLOW)
    driver.handle(ev.RankLost(rank=0))
    driver.handle(ev.RankBack(rank=0))
    compute_at(driver, QUICK)

    assert driver.acquire("mno").cached_tokens == 6


def test_a_hop_that_was_slow_is_tried_again_after_a_while(driver: Driver) -> None:
    measure_loads(driver, SLOW)
    driver.now += 60.0
    compute_at(driver, QUICK)
    assert driver.acquire("abcd").cached_tokens == 0

    driver.now += 1.0

    assert driver.acquire("abcd").cached_tokens == 8


@pytest.mark.parametrize(
    "end", ["corrupt", "failed", "expired"], ids=["corrupt", "failed", "expired"]
)
def test_only_copies_that_came_to_their_end_are_measured(driver: Driver, end: str) -> None:
    driver.acquire("abcd")
    copy = driver.copy(Purpose.LOAD)
    driver.now += 1.0
    if end == "corrupt":
        driver.report(copy, faults=[(0, BlockFault.CORRUPT)])
    elif end == "failed":
        driver.report(copy, failure="cannot copy")
    else:
        driver.tick(after_s=30.0)
        driver.report(copy)
    driver.tick()

    measured = hop(driver, "host", "device").tokens_per_s

    assert measured == (8.0 if end == "corrupt" else None)


def test_rates_are_visible(driver: Driver) -> None:
    assert driver.machine.statistics().prefill_tokens_per_s is None
    assert hop(driver, "host", "device").tokens_per_s is None

    measure_loads(driver, 50.0)
    compute_at(driver, 700.0)

    seen = hop(driver, "host", "device")
    assert seen.tokens_per_s == pytest.approx(100.0)
    assert seen.bytes_per_s == pytest.approx(50_000.0)
    assert driver.machine.statistics().prefill_tokens_per_s == pytest.approx(700.0)


def test_every_hop_is_measured() -> None:
    driver = make_driver(host=8, disk=8)

    hops = [(hop.source, hop.target) for hop in driver.machine.statistics().hops]

    assert hops == [("device", "host"), ("host", "device"), ("disk", "host"), ("host", "disk")]


def test_a_cache_without_lower_tiers_has_no_hops() -> None:
    assert make_driver().machine.statistics().hops == ()


def test_the_slowest_rank_decides_how_fast_a_hop_is() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.discover(1, "ab")
    driver.acquire("ab")
    copy = driver.copy(Purpose.LOAD)
    driver.report(copy, rank=0)
    driver.now += 4.0
    driver.report(copy, rank=1)
    driver.tick()

    assert hop(driver, "host", "device").tokens_per_s == 1.0


@pytest.mark.parametrize(
    ("token_count", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))]
)
def test_a_speed_that_makes_no_sense_is_refused(
    driver: Driver, token_count: int, seconds: float
) -> None:
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match="must be"):
        driver.handle(ev.Computed(token_count=token_count, seconds=seconds))

    assert freeze(driver.machine) == before


# ---------------------------------------------------------------- engines that offload


@pytest.fixture
def offload() -> Driver:
    """An engine that owns its device slots, over a host tier that holds one prompt."""
    driver = make_driver(device=None, host=8, disk=8)
    driver.discover(1, "abcd")
    return driver


def load(driver: Driver, prompt: str) -> None:
    slots = np.arange(len(prompt), dtype=np.int32)[np.newaxis]
    driver.handle(ev.Load(keys=driver.keys(prompt), slots=slots, cause="test"))


def test_a_lookup_tells_that_all_is_worth_loading(offload: Driver) -> None:
    found = lookup(offload, "abcd")

    assert (found.ready, found.worth, found.miss.reason) == (4, 4, MissReason.NONE)


def test_a_lookup_tells_that_nothing_is_worth_loading(offload: Driver) -> None:
    load(offload, "abcd")
    measure(offload, Purpose.LOAD, SLOW)
    compute_at(offload, QUICK)

    found = lookup(offload, "abcd")

    assert (found.ready, found.worth) == (4, 0)
    assert (found.miss.reason, found.miss.block) == (MissReason.RECOMPUTE, 0)
    statistics = offload.machine.statistics()
    assert statistics.misses["recompute is quicker"] == 1
    assert statistics.tokens_computed_instead == 8


def test_blocks_that_the_engine_holds_need_not_be_loaded(offload: Driver) -> None:
    load(offload, "abcd")
    measure(offload, Purpose.LOAD, SLOW)
    compute_at(offload, QUICK)

    found = lookup(offload, "abcd", held=3)

    assert (found.ready, found.worth, found.miss.block) == (4, 3, 3)


@pytest.mark.parametrize("held", [4, 6])
def test_where_the_engine_holds_all_that_was_found_nothing_is_weighed(
    offload: Driver, held: int
) -> None:
    load(offload, "abcd")
    measure(offload, Purpose.LOAD, SLOW)
    compute_at(offload, QUICK)

    found = lookup(offload, "abcdef", held=held)

    assert (found.ready, found.worth) == (4, 4)
    assert (found.miss.reason, found.miss.block) == (MissReason.NEVER_SEEN, 4)


def test_blocks_that_wait_below_the_hub_are_weighed_with_both_hops() -> None:
    driver = make_driver(device=None, host=8, disk=16)
    driver.discover(2, "abcdef")
    driver.handle(ev.Prefetch(keys=driver.keys("ab"), cause="test"))
    measure(driver, Purpose.STAGE, SLOW)
    load(driver, "ab")
    measure(driver, Purpose.LOAD, QUICK)
    compute_at(driver, 100.0)

    found = lookup(driver, "abcdef")

    assert (found.ready, found.pending, found.below) == (2, 4, 4)
    assert (found.worth, found.miss.reason) == (2, MissReason.RECOMPUTE)


def test_a_lookup_decides_nothing_for_the_next_one(offload: Driver) -> None:
    before = freeze(offload.machine)

    lookup(offload, "abcd")

    assert freeze(offload.machine) == before
