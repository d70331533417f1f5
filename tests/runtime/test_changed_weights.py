"""`change_weights`: nothing of other weights is found, a miss says so, and they may come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 4
STORY, OTHER = list(range(13)), list(range(100, 113))
WHOLE = 12
"""Tokens of these that can be reused: the last one is always computed."""


def opened(version: str = "v1", *, host: int = 64) -> penstock.Cache:
    config = penstock.parse_config(f"""
        version = 1
        model = {{ name = "toy", weights_version = "{version}" }}
        cache = {{ block_tokens = {BLOCK}, blocks = 16 }}
        tiers = [{{ name = "host", kind = "memory", blocks = {host} }}]
    """)
    return penstock.open(config, kv=np.zeros((16, BLOCK, 8), dtype=np.float32))


@pytest.fixture(name="cache")
def open_cache() -> Iterator[penstock.Cache]:
    with opened() as cache:
        yield cache
        cache.audit()


def serve(cache: penstock.Cache, tokens: list[int], tenant: str = "") -> penstock.Lease:
    """A request from beginning to end; what it computes is in host memory afterwards."""
    with cache.acquire(tokens, tenant=tenant) as lease:
        while lease.state is penstock.LeaseState.LOADING:
            cache.step()
        lease.commit(tokens[lease.cached_tokens :])
    while cache.busy:
        cache.step()
    return lease


def test_a_miss_after_a_change_of_weights_says_so(cache: penstock.Cache) -> None:
    serve(cache, STORY)

    cache.change_weights("v2")

    asked, new = serve(cache, STORY), serve(cache, OTHER)
    assert str(asked.miss) == "block 0: weights changed"
    assert str(new.miss) == "block 0: never seen"
    assert cache.statistics().misses["weights changed"] == 1


def test_going_back_to_the_first_weights_finds_their_blocks_in_host_memory(
    cache: penstock.Cache,
) -> None:
    serve(cache, STORY)
    cache.change_weights("v2")
    assert serve(cache, STORY).cached_tokens == 0
    serve(cache, OTHER)

    cache.change_weights("v1")

    again, other = serve(cache, STORY), serve(cache, OTHER)
    assert (again.cached_tokens, again.cached_by_tier) == (WHOLE, (0, WHOLE))
    assert (other.cached_tokens, str(other.miss)) == (0, "block 0: weights changed")
    cache.change_weights("v2")
    assert serve(cache, OTHER).cached_tokens == WHOLE
    assert cache.statistics().misses["weights changed"] == 2
    assert cache.statistics().blocks_corrupt == 0


@pytest.mark.parametrize(("before", "after"), [("", "v2"), ("v1", "v1"), ("", "")])
def test_blocks_of_weights_without_a_name_of_their_own_are_void(before: str, after: str) -> None:
    with opened(before) as cache:
        serve(cache, STORY)

        cache.change_weights(after)

        assert cache.statistics().tiers[1].ready == 0
        lease = serve(cache, STORY)
        assert (lease.cached_tokens, lease.miss.reason) == (0, penstock.MissReason.WEIGHTS)
        cache.change_weights(before)
        assert serve(cache, STORY).cached_tokens == 0
        cache.audit()


def test_a_reset_voids_the_blocks_of_all_weights(cache: penstock.Cache) -> None:
    serve(cache, STORY)
    cache.change_weights("v2")

    cache.reset("an operator wants it")
    cache.change_weights("v1")

    assert serve(cache, STORY).cached_tokens == 0


def test_a_lease_of_the_old_weights_publishes_nothing(cache: penstock.Cache) -> None:
    with cache.acquire(STORY) as old:
        cache.change_weights("v2")
        old.commit(STORY)
    while cache.busy:
        cache.step()

    assert serve(cache, STORY).cached_tokens == 0
    cache.change_weights("v1")
    assert serve(cache, STORY).cached_tokens == 0


def test_blocks_of_other_weights_make_room_for_those_of_now() -> None:
    with opened(host=16) as cache:
        serve(cache, STORY)
        for number in range(1, 80):
            cache.change_weights(f"step {number}")
            serve(cache, STORY)
            assert serve(cache, STORY).cached_tokens == WHOLE
        cache.audit()

        cache.change_weights("step 78")
        assert serve(cache, STORY).cached_tokens == WHOLE
        cache.change_weights("v1")
        assert serve(cache, STORY).cached_tokens == 0


def test_routers_learn_what_is_left_and_what_is_back(cache: penstock.Cache) -> None:
    serve(cache, STORY)
    stored = [each for each in cache.take_kv_events() if isinstance(each, BlocksStored)]
    in_host = {key for event in stored if event.tier == "host" for key in event.keys}

    cache.change_weights("v2")
    left = cache.take_kv_events()
    cache.change_weights("v1")
    back = cache.take_kv_events()

    assert isinstance(left[-1], AllCleared)
    assert all(isinstance(each, BlocksRemoved | AllCleared) for each in left)
    assert isinstance(back[0], AllCleared)
    again = [each for each in back if isinstance(each, BlocksStored)]
    assert {(each.tier, key) for each in again for key in each.keys} == {
        ("host", key) for key in in_host
    }


def test_routers_are_not_told_that_blocks_leave_which_they_do_not_know(
    cache: penstock.Cache,
) -> None:
    serve(cache, STORY)
    cache.change_weights("v2")
    serve(cache, OTHER)
    told = [each for each in cache.take_kv_events() if isinstance(each, BlocksStored)]
    known = {(each.tier, key) for each in told[-2:] for key in each.keys}

    cache.reset("the operator wants it")

    left = [each for each in cache.take_kv_events() if isinstance(each, BlocksRemoved)]
    assert {(each.tier, key) for each in left for key in each.keys} == known
