"""A rank that was opened anew is not told of what its earlier life had to do.

The owner has given up on that: the slots may be somebody else's by now.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

import penstock
from penstock.errors import PeerError
from penstock.runtime.copy_executor import CopyExecutor
from penstock.runtime.messages import Plan, TierFacts, decode_plan, decode_report, encode_plan
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from penstock.machine.events import CopyReport

RANKS = 2
CONFIG = f"""
version = 1
model.name = "none"
cache = {{ block_tokens = 4, blocks = 8, ranks = {RANKS} }}
tiers = [{{ name = "host", kind = "memory", blocks = 16 }}]
"""
WRITE_BACK = """
version = 1
model.name = "none"
tiers = [{ name = "host", kind = "memory", blocks = 16, write = "write_back" }]
[cache]
block_tokens = 4
blocks = 8
operation_blocks_max = 1
low_watermark = 0.5
high_watermark = 0.6
"""
"""A step has at most one block written down."""


class Engine:
    """Two ranks and their owner, in one process; plans travel in its own messages."""

    def __init__(self) -> None:
        self.config = penstock.parse_config(CONFIG)
        self.ranks = [self.open_rank(number) for number in range(RANKS)]
        self.cache = penstock.open(self.config, ranks=[rank.facts for rank in self.ranks])

    def open_rank(self, number: int) -> penstock.Rank:
        kv = np.full((8, 4, 16), number + 1, dtype=np.float32)
        return penstock.open_rank(self.config, rank=number, kv=kv)

    def order_a_copy(self) -> None:
        """A block is computed, and to be written down."""
        with self.cache.acquire(range(5)) as lease:
            lease.commit(range(5))


def test_an_order_from_before_its_time_is_not_carried_out_by_a_new_life() -> None:
    engine = Engine()
    engine.order_a_copy()
    newcomer = engine.open_rank(1)
    engine.cache.ranks.rejoin(newcomer.facts)

    plan = engine.cache.ranks.take_plan()
    assert plan is not None
    engine.ranks[0].take(plan)
    newcomer.take(plan)

    assert len(decode_plan(plan).copies) == 1
    assert engine.ranks[0].executor.busy
    assert not newcomer.executor.busy


def test_what_is_not_carried_out_is_reported_as_failed() -> None:
    engine = Engine()
    engine.order_a_copy()
    newcomer = engine.open_rank(1)
    engine.cache.ranks.rejoin(newcomer.facts)
    plan = engine.cache.ranks.take_plan()
    assert plan is not None
    newcomer.take(plan)

    report = newcomer.step()
    assert report is not None
    engine.cache.ranks.receive(report)

    (moved,) = decode_report(report).moved
    assert moved.failure == "it was for another life of rank 1"
    assert engine.cache.statistics().reports_late == 1
    assert engine.cache.health().ok


def test_orders_from_before_and_after_a_return_travel_in_plans_of_their_own() -> None:
    engine = Engine()
    engine.order_a_copy()
    newcomer = engine.open_rank(1)
    engine.cache.ranks.rejoin(newcomer.facts)
    with engine.cache.acquire(range(100, 105)) as lease:
        lease.commit(range(100, 105))

    plans = [engine.cache.ranks.take_plan() for _ in range(3)]

    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[2] is None
    newcomer.take(plans[0])
    assert not newcomer.executor.busy
    newcomer.take(plans[1])
    assert newcomer.executor.busy


def test_a_plan_says_for_which_life_of_every_rank_it_is() -> None:
    engine = Engine()
    engine.order_a_copy()

    plan = engine.cache.ranks.take_plan()

    assert plan is not None
    assert decode_plan(plan).lives == [rank.facts.life for rank in engine.ranks]


def test_a_plan_for_fewer_ranks_is_refused() -> None:
    rank = Engine().ranks[1]

    with pytest.raises(PeerError, match="is for 1 rank, must be for at least 2"):
        rank.take(encode_plan(Plan(7, 1, [], [], lives=[rank.facts.life])))


def test_nothing_is_begun_any_more_once_a_close_has_cancelled_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = penstock.parse_config(WRITE_BACK)
    cache = penstock.open(config, kv=np.zeros((8, 4, 16), dtype=np.float32))
    with cache.acquire(range(29)) as lease:
        lease.commit(range(29))
    links = cache._driver.links
    collect = links.collect
    monkeypatch.setattr(links, "collect", lambda **_: ())
    for _ in range(2):
        cache.step()  # Each has another block written down, and none ends.
    begun = cache._driver.statistics().operations_started

    # While the close waits, one ends after the other.
    ended: deque[CopyReport] = deque()

    def collect_one(**budget: int) -> list[CopyReport]:
        ended.extend(collect(**budget))
        return [ended.popleft()] if ended else []

    monkeypatch.setattr(links, "collect", collect_one)
    monkeypatch.setattr(links, "wait", lambda *_, **__: True)
    drained = cache.close()

    assert begun == 2
    assert cache._driver.statistics().operations_started == begun
    assert drained == penstock.Drained(finished=0, cancelled=2, unsettled=0)


def test_an_order_from_before_its_time_may_name_what_a_new_life_does_not_have() -> None:
    engine = Engine()
    engine.order_a_copy()
    settings = engine.config.cache
    whole = engine.open_rank(1)
    off = [TierFacts(name=tier.name, slot_count=16, off="no memory") for tier in settings.tiers]
    facts = msgspec.structs.replace(whole.facts, tiers=tuple(off))
    executor = CopyExecutor([whole.executor.stores[0], None], Algorithm.XXH3)
    newcomer = penstock.Rank(executor, facts, arenas={})
    engine.cache.ranks.rejoin(facts)
    plan = engine.cache.ranks.take_plan()
    assert plan is not None

    newcomer.take(plan)

    report = newcomer.step()
    assert report is not None
    (moved,) = decode_report(report).moved
    assert moved.failure == "it was for another life of rank 1"
