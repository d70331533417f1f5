"""A tier that the machine does not give: the cache runs without it, and says so once."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

import penstock
from penstock.cache.explain import MissReason
from penstock.errors import ConfigError, UnavailableError
from penstock.machine import effects as ef
from penstock.movers.table import mover_between
from penstock.runtime import copy_executor
from penstock.runtime.messages import TierFacts
from penstock.tiers.arrays import ArrayTier, opaque_layout
from penstock.tiers.host import HostTier
from penstock.vocabulary.checksums import Algorithm
from tests.descriptors import open_descriptors
from tests.runtime.conftest import Fleet

if TYPE_CHECKING:
    from penstock.movers.base import Mover
    from penstock.tiers.base import SlotStore

KV = np.zeros((8, 4, 3))


def config(*, required: bool = False, device: bool = True) -> penstock.Config:
    cache = "block_tokens = 4" + (", blocks = 8" if device else "")
    wish = str(required).lower()
    return penstock.parse_config(
        f'version = 1\nmodel.name = "none"\ncache = {{ {cache} }}\n'
        f'tiers = [{{ name = "host", kind = "host", blocks = 16, required = {wish} }}]\n'
    )


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that makes no shared memory."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)


@pytest.mark.usefixtures("no_memory")
def test_a_cache_runs_without_a_tier_that_cannot_be_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="penstock"):
        cache = penstock.open(config(), kv=KV)
        for _ in range(3):
            with cache.acquire(range(12)) as lease:
                lease.commit(range(lease.token_count, 12))
            cache.step()

    assert cache.acquire(range(12)).cached_tokens == 8
    health = cache.health()
    assert not health.ok
    (reason,) = health.reasons
    assert reason.startswith("tier host is off: ")
    assert "Operation not permitted" in reason
    assert len([record for record in caplog.records if "host" in record.message]) == 1
    assert [tier.on for tier in cache.statistics().tiers] == [True, False]
    cache.audit()


@pytest.mark.usefixtures("no_memory")
def test_an_engine_that_offloads_finds_nothing_and_keeps_nothing() -> None:
    settings = config(device=False)
    offload = penstock.open_offload(settings, kv=KV)
    keys = settings.key_chain().extend(range(8))

    started = offload.save(keys, [0, 1], cause="save")

    assert started.operations == ()
    assert offload.lookup(keys).ready == 0
    assert not offload.health().ok
    offload.close()


@pytest.mark.usefixtures("no_memory")
def test_a_required_tier_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(UnavailableError, match=r"no arena of .* can be made"):
        penstock.open(config(required=True), kv=KV)


def test_a_wrong_size_stays_a_wrong_configuration() -> None:
    huge = penstock.parse_config(
        'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4, blocks = 8 }\n'
        'tiers = [{ name = "host", kind = "host", gib = 60000 }]\n'
    )

    with pytest.raises(ConfigError, match=r"tiers\[0\].gib: is 60000"):
        penstock.open(huge, kv=np.zeros((8, 1 << 20)))


def test_a_cache_without_tiers_keeps_what_the_device_holds() -> None:
    alone = penstock.parse_config(
        'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4, blocks = 8 }\n'
    )
    with penstock.open(alone, kv=KV) as cache:
        with cache.acquire(range(12)) as lease:
            lease.commit(range(12))

        with cache.acquire(range(12)) as again:
            assert again.cached_tokens == 8
        assert cache.health().ok


def without(rank: penstock.Rank, why: str) -> penstock.RankFacts:
    """Facts of a rank whose machine gave it no host tier."""
    tier = rank.facts.tiers[0]
    off = TierFacts(name=tier.name, slot_count=tier.slot_count, off=why)
    return msgspec.structs.replace(rank.facts, tiers=(off,))


def test_a_tier_that_one_rank_lacks_is_off_for_all() -> None:
    fleet = Fleet(ranks=2)
    ranks = [fleet.ranks[0].facts, without(fleet.ranks[1], "cannot pin")]

    owner = penstock.open_offload(fleet.config, ranks=ranks)

    assert owner.health().reasons == ("tier host is off: rank 1: cannot pin",)
    assert owner.save(fleet.keys(2), [0, 1], cause="save").operations == ()


def test_a_tier_is_on_again_when_the_rank_comes_back_with_it() -> None:
    fleet = Fleet(ranks=2)
    ranks = [fleet.ranks[0].facts, without(fleet.ranks[1], "cannot pin")]
    fleet.owner = penstock.open_offload(fleet.config, ranks=ranks)

    fleet.owner.ranks.lose(1, "restarted by the operator")
    fleet.ranks[1] = fleet.open_rank(1)
    fleet.owner.ranks.rejoin(fleet.ranks[1].facts)
    fleet.owner.save(fleet.keys(2), [0, 1], cause="save")
    fleet.settle()

    assert fleet.owner.health().ok
    assert fleet.owner.lookup(fleet.keys(2)).ready == 2


def test_a_rank_that_comes_back_without_a_tier_switches_it_off() -> None:
    fleet = Fleet(ranks=2)
    keys = fleet.keys(2)
    fleet.owner.save(keys, [0, 1], cause="save")
    fleet.settle()

    fleet.owner.ranks.lose(1, "killed")
    fleet.owner.ranks.rejoin(without(fleet.open_rank(1), "cannot pin"))

    assert fleet.owner.health().reasons == ("tier host is off: rank 1: cannot pin",)
    assert fleet.owner.lookup(keys).miss.reason is MissReason.TIER_OFF


def test_a_tier_that_went_with_one_rank_does_not_settle_what_another_still_copies() -> None:
    fleet = Fleet(ranks=2)
    keys = fleet.keys(2)
    fleet.owner.save(keys, [0, 1], cause="save")
    fleet.settle()
    fleet.owner.load(keys, [5, 6], cause="load")
    fleet.plan()

    fleet.owner.ranks.lose(1, "killed")
    fleet.owner.ranks.rejoin(without(fleet.open_rank(1), "cannot pin"))

    # Rank 0 has the load in hand, and may write into slots 5 and 6 at any moment.
    (ended,) = fleet.owner.poll()
    assert isinstance(ended, ef.Ended)
    assert not ended.settled
    report = fleet.ranks[0].step()
    assert report is not None
    fleet.owner.ranks.receive(report)
    assert fleet.owner.poll() == [ef.Settled(operation=ended.operation)]
    fleet.owner.audit()


@pytest.fixture
def no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that makes shared memory, and lets no mover reach it."""

    def refuse(source: SlotStore, target: SlotStore, algorithm: Algorithm) -> Mover:
        if (source.medium, target.medium) == ("arrays", "host"):
            raise UnavailableError("cannot register: out of memory")
        return mover_between(source, target, algorithm)

    monkeypatch.setattr(copy_executor, "mover_between", refuse)


def arenas() -> set[str]:
    """The arenas that this process has mapped, by the numbers that their files have."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return {line.split()[4] for line in maps if "memfd:penstock-host" in line}


@pytest.mark.usefixtures("no_way")
def test_a_tier_that_cannot_be_reached_keeps_no_memory() -> None:
    two = penstock.parse_config(
        'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4, blocks = 8 }\n'
        'tiers = [{ name = "host", kind = "host", blocks = 16 },'
        ' { name = "more", kind = "memory", blocks = 16 }]\n'
    )
    before = open_descriptors(), arenas()

    rank = penstock.open_rank(two, rank=0, kv=KV)

    assert rank.facts.tiers[0].off == "cannot register: out of memory"
    assert rank.arenas == {}
    assert open_descriptors() <= before[0]
    assert arenas() <= before[1]


@pytest.mark.usefixtures("no_way")
def test_a_required_tier_that_cannot_be_reached_is_an_error_and_keeps_no_memory() -> None:
    before = open_descriptors(), arenas()

    with pytest.raises(UnavailableError, match="tier 'host': cannot register") as refused:
        penstock.open(config(required=True), kv=KV)

    # Even while somebody still looks at the error, and with it at all that there was.
    assert refused.tb is not None
    assert open_descriptors() <= before[0]
    assert arenas() <= before[1]


class RegisteringTier(ArrayTier):
    """Memory of an engine that has host memory registered, as that of a GPU has."""

    forgotten: tuple[int, ...] = ()

    def forget(self, host: object) -> None:
        assert isinstance(host, HostTier)
        # An arena that is closed has no address any more.
        self.forgotten += (host.arena.address,)


@pytest.mark.usefixtures("no_way")
def test_memory_is_registered_no_more_before_it_is_given_back() -> None:
    layout = opaque_layout([KV], block_tokens=4)
    device = RegisteringTier(layout, [KV])
    before = arenas()
    host = HostTier.create(layout, 16, huge_pages=False)
    address = host.arena.address
    made = arenas() - before

    hands = copy_executor.CopyExecutor([device, host], Algorithm.XXH3)

    assert device.forgotten == (address,)
    assert hands.stores == (device, None)
    assert len(made) == 1
    assert arenas() <= before


@pytest.mark.usefixtures("no_memory")
def test_a_tier_that_could_not_be_made_stays_off_after_a_sleep() -> None:
    with penstock.open(config(), kv=np.zeros((8, 4, 3))) as cache:
        before = cache.health().reasons

        cache.sleep(host=True)
        cache.wake()

        assert cache.health().reasons == before
        with cache.acquire(range(12)) as lease:
            lease.commit(range(12))
        cache.step()
        assert not cache.busy
        cache.audit()


def test_a_tier_that_one_rank_lacks_stays_off_after_a_sleep() -> None:
    fleet = Fleet(ranks=2)
    ranks = [fleet.ranks[0].facts, without(fleet.ranks[1], "cannot pin")]
    owner = penstock.open_offload(fleet.config, ranks=ranks)

    owner.sleep(host=True)
    assert owner.health().reasons == ("tier host is off: the cache is asleep",)
    owner.wake()

    assert owner.health().reasons == ("tier host is off: rank 1: cannot pin",)
    assert owner.save(fleet.keys(2), [0, 1], cause="save").operations == ()


def test_a_tier_that_sleeps_is_not_woken_by_a_rank_that_comes_back() -> None:
    fleet = Fleet(ranks=2)
    fleet.owner.save(fleet.keys(2), [0, 1], cause="save")
    fleet.settle()
    fleet.owner.sleep(host=True)

    fleet.owner.ranks.lose(1, "killed")
    kept = fleet.ranks[1].facts.tiers
    fleet.ranks[1] = fleet.open_rank(1)
    fleet.owner.ranks.rejoin(msgspec.structs.replace(fleet.ranks[1].facts, tiers=kept))

    assert fleet.owner.health().reasons == ("tier host is off: the cache is asleep",)
    assert fleet.owner.lookup(fleet.keys(2)).ready == 0
    fleet.owner.wake()
    assert fleet.owner.health().ok
    assert fleet.owner.lookup(fleet.keys(2)).ready == 0, "what slept was given back"


def test_a_tier_that_was_mended_while_it_slept_is_empty_and_on() -> None:
    fleet = Fleet(ranks=2)
    fleet.owner.save(fleet.keys(2), [0, 1], cause="save")
    fleet.settle()
    whole = fleet.ranks[1].facts.tiers
    fleet.owner.ranks.lose(1, "killed")
    fleet.owner.ranks.rejoin(without(fleet.open_rank(1), "cannot pin"))

    fleet.owner.sleep(host=True)
    fleet.owner.wake()
    fleet.owner.ranks.lose(1, "restarted by the operator")
    fleet.ranks[1] = fleet.open_rank(1)
    fleet.owner.ranks.rejoin(msgspec.structs.replace(fleet.ranks[1].facts, tiers=whole))

    assert fleet.owner.health().ok
    assert fleet.owner.lookup(fleet.keys(2)).ready == 0
    fleet.owner.audit()
