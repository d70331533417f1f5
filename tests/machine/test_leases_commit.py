"""Commit: full blocks become matchable, each content once."""

from __future__ import annotations

import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import TierSettings
from penstock.cache.states import LeaseState
from penstock.errors import CapacityError
from penstock.machine import events as ev
from tests.machine.conftest import make_driver


def test_computed_blocks_can_be_matched_while_their_request_runs() -> None:
    driver = make_driver(device=12)
    granted = driver.acquire("abc")

    driver.commit(granted.lease, "abc")

    assert driver.acquire("abc").cached_tokens == 6


def test_blocks_are_published_chunk_by_chunk() -> None:
    driver = make_driver(device=12)
    lease = driver.acquire("abcd").lease

    seen = []
    for length in (1, 1, 3, 4):
        driver.commit(lease, "abcd"[:length])
        seen.append(sorted(driver.cached_in("device")))

    assert seen == [["a"], ["a"], ["a", "ab", "abc"], ["a", "ab", "abc", "abcd"]]


def test_an_unfinished_block_is_not_published() -> None:
    driver = make_driver()
    lease = driver.acquire("ab").lease

    driver.commit(lease, "a", more_tokens=1)

    assert driver.cached_in("device") == {"a"}


def test_output_tokens_are_published_too() -> None:
    driver = make_driver()
    lease = driver.acquire("a", more_tokens=1).lease
    driver.commit(lease, "a", more_tokens=1)

    driver.grow(lease, 5)
    driver.commit(lease, "ab")
    driver.commit(lease, "ab", more_tokens=1)
    driver.release(lease)

    assert driver.acquire("abc").cached_tokens == 4


def test_the_next_turn_goes_on_from_the_output_of_the_last() -> None:
    driver = make_driver(device=12)
    driver.store("ab", "abcd", "abcdef")

    granted = driver.acquire("abcdefg")

    assert granted.cached_tokens == 12


def test_a_published_block_stays_when_its_request_ends() -> None:
    driver = make_driver()

    driver.compute("ab")

    assert driver.cached_in("device") == {"a", "ab"}
    assert driver.free_in("device") == 6


# -------------------------------------------------------------------- computed twice


def test_two_requests_that_computed_the_same_block_end_with_one_copy() -> None:
    driver = make_driver()
    leases = [driver.acquire("ab").lease for _ in range(2)]

    for lease in leases:
        driver.commit(lease, "ab")
    for lease in leases:
        driver.release(lease)

    assert driver.cached_in("device") == {"a", "ab"}
    assert driver.free_in("device") == 6
    assert driver.machine.statistics().blocks_twinned == 2


def test_the_copy_that_was_published_first_stays_while_another_request_needs_it() -> None:
    driver = make_driver(device=6)
    first, second = (driver.acquire("ab").lease for _ in range(2))
    driver.commit(first, "ab")
    driver.commit(second, "ab")
    driver.release(first)
    driver.acquire("", more_tokens=1)

    # Blocks of the second request follow it: nothing could match them without it.
    with pytest.raises(CapacityError):
        driver.acquire("", more_tokens=1)

    driver.grow(second, 6)
    driver.commit(second, "abc")
    assert driver.cached_in("device") == {"a", "ab", "abc"}
    driver.release(second)
    assert driver.acquire("abc").cached_tokens == 6


def test_a_table_never_changes_under_a_step_that_is_in_flight() -> None:
    driver = make_driver()
    first, second = (driver.acquire("ab") for _ in range(2))
    tables = [granted.table.tolist() for granted in (first, second)]

    driver.commit(first.lease, "ab")
    driver.commit(second.lease, "ab")

    leases = driver.books.leases
    assert [leases[g.lease].table.tolist() for g in (first, second)] == tables


def test_blocks_published_behind_anothers_block_stay_reachable() -> None:
    driver = make_driver(device=8)
    first, second = (driver.acquire("ab").lease for _ in range(2))
    driver.commit(first, "a")
    driver.commit(second, "ab")

    driver.release(first)
    driver.acquire("xy")

    assert driver.acquire("a", load=False).cached_tokens == 2
    assert driver.cached_in("device") == {"a", "ab"}


def test_the_other_copy_of_a_block_is_freed_with_its_request() -> None:
    driver = make_driver()
    first, second = (driver.acquire("ab").lease for _ in range(2))
    driver.commit(first, "ab")
    driver.commit(second, "ab")

    driver.release(second)
    after_second = driver.free_in("device")
    driver.release(first)

    assert after_second == 5
    assert driver.free_in("device") == 6


def test_a_request_publishes_what_is_new_behind_what_another_published() -> None:
    driver = make_driver()
    lease = driver.acquire("abcd").lease
    driver.compute("a")

    driver.commit(lease, "abcd")
    driver.release(lease)

    assert driver.cached_in("device") == {"a", "ab", "abc", "abcd"}
    assert driver.free_in("device") == 4


def test_a_block_on_its_way_out_stays_for_a_request_that_computed_it_too() -> None:
    device = TierSettings(name="device", slot_count=8, low_watermark=0.75, high_watermark=0.9)
    driver = make_driver(device=device, host=8, write="write_back")
    lease = driver.acquire("ab").lease
    driver.compute("a")
    driver.tick()
    assert driver.words(driver.copy(Purpose.DEMOTE).keys) == ["a"]

    driver.commit(lease, "ab")
    driver.finish()

    assert driver.tiers_with("a") == {"device", "host"}


def test_a_block_known_from_below_is_published_by_who_computes_it() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "ab")
    lease = driver.acquire("ab", load=False).lease

    driver.commit(lease, "ab")

    assert driver.tiers_with("ab") == {"device", "host"}
    assert not driver.copies


def test_a_hole_in_a_chain_is_closed_by_who_computes_it() -> None:
    driver = make_driver(device=4, host=8)
    driver.store("abc", "xyz")
    lease = driver.acquire("abc").lease
    driver.report(driver.copy(Purpose.LOAD), faults=[(1, BlockFault.CORRUPT)])
    assert driver.cached_in("host") >= {"a", "abc"}
    assert driver.machine.statistics().blocks_hollow == 1

    driver.commit(lease, "abc")
    driver.finish()

    assert driver.machine.statistics().blocks_hollow == 0
    assert driver.cached_in("host") >= {"a", "ab", "abc"}


def test_a_block_whose_first_copy_is_being_loaded_is_kept_apart() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "a")
    computing = driver.acquire("a", load=False).lease
    loading = driver.acquire("a").lease

    driver.commit(computing, "a")
    driver.finish()

    assert driver.books.leases[loading].state is LeaseState.READY
    driver.release(computing)
    driver.release(loading)
    assert driver.free_in("device") == 7


def test_blocks_published_behind_a_load_that_failed_leave_in_the_right_order() -> None:
    driver = make_driver(device=6, host=8)
    driver.store("a", "vwxyz")
    own, other = driver.acquire("ab", load=False).lease, driver.acquire("a").lease
    driver.commit(own, "a")
    driver.report(driver.copy(Purpose.LOAD), faults=[(0, BlockFault.CORRUPT)])
    driver.commit(own, "ab")
    driver.release(other)
    driver.release(own)
    driver.finish()

    driver.store("a", ttl_s=1.0)
    driver.tick(after_s=2.0)

    order = driver.leaving_order()
    assert order.index("ab") < order.index("a")


# -------------------------------------------------------------------- storing is optional


def test_a_request_may_opt_out_of_storing() -> None:
    driver = make_driver(host=8)

    driver.compute("ab", store=False)

    assert driver.cached_in("device") == set()
    assert driver.free_in("device") == 8
    assert not driver.copies


def test_a_request_that_stores_nothing_still_finds() -> None:
    driver = make_driver()
    driver.store("ab")

    granted = driver.acquire("abc", store=False)
    driver.commit(granted.lease, "abc")

    assert granted.cached_tokens == 4
    assert driver.cached_in("device") == {"a", "ab"}


def test_a_block_nobody_will_publish_does_not_count_as_filling() -> None:
    driver = make_driver()
    driver.acquire("ab", store=False)

    granted = driver.acquire("ab")

    assert granted.miss.reason is MissReason.NEVER_SEEN


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("token_count", "key_count", "says"),
    [
        (7, 3, "token_count is 7: lease 1 has 2 tokens and room for 6"),
        (1, 0, "token_count is 1"),
        (4, 0, "0 keys for 1 block full now"),
        (4, 2, "2 keys for 1 block"),
        (5, 3, "3 keys for 1 block"),
    ],
)
def test_a_commit_that_makes_no_sense_changes_nothing(
    token_count: int, key_count: int, says: str
) -> None:
    driver = make_driver()
    lease = driver.acquire("ab").lease
    driver.commit(lease, "a")
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match=says):
        driver.handle(
            ev.Commit(
                lease=lease, token_count=token_count, keys=driver.keys("abcd")[1 : 1 + key_count]
            )
        )

    assert freeze(driver.machine) == before


def test_a_commit_with_a_key_twice_changes_nothing() -> None:
    driver = make_driver()
    lease = driver.acquire("ab").lease
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match="a key occurs twice"):
        driver.handle(ev.Commit(lease=lease, token_count=4, keys=[driver.key("a")] * 2))

    assert freeze(driver.machine) == before


def test_a_published_block_is_paid_for_by_its_tenant() -> None:
    driver = make_driver(device=TierSettings(name="device", slot_count=8, quotas={"ann": 0.25}))

    driver.compute("ab", tenant="ann")
    driver.compute("c", tenant="ann", more_tokens=0)

    assert driver.cached_in("device") == {"a", "c"}
