"""Pins in vLLM's block pool: at most a twentieth of it."""

from __future__ import annotations

import pytest

from penstock.connectors.base.requests import Pins
from penstock.vocabulary.keys import OperationId
from tests.connectors.conftest import FakeEngine, FakePool, FakeRequest


@pytest.mark.parametrize(("blocks", "limit"), [(1, 0), (19, 0), (20, 1), (39, 1), (40, 2)])
def test_no_pool_has_more_than_a_twentieth_pinned(blocks: int, limit: int) -> None:
    assert Pins(FakePool(blocks)).room == limit


def test_where_nothing_can_be_pinned_what_a_request_leaves_behind_is_given_up() -> None:
    """Its saves begin while it runs; those that have not ended with it are cancelled."""
    engine = FakeEngine(pool=16, window_groups=())
    request = FakeRequest("first", list(range(100, 126)))
    engine.scheduler.find_tokens(request, 0)
    engine.allocate(request, 7)
    engine.compute(request)

    reported = engine.scheduler.plan_step({"first": 26}, engine.tables.__getitem__)
    request.num_computed_tokens = 26
    engine.scheduler.finish_request("first")

    assert engine.pool.pinned == 0
    assert engine.scheduler.counters.take()["blocks_dropped_pinned"] == 6
    engine.worker.after_forward(reported)
    engine.step()
    assert engine.scheduler.find_tokens(FakeRequest("same", list(range(100, 126))), 0) == 0


def test_blocks_stay_pinned_until_the_last_of_their_copies_has_settled() -> None:
    pool = FakePool(40)
    pins = Pins(pool)
    first, last = (OperationId(incarnation=1, epoch=0, sequence=number) for number in (1, 2))

    pins.add([3, 4], [first, last])
    pins.settled(first)

    assert (pins.count, pool.pinned) == (2, 2)
    pins.settled(last)
    assert (pins.count, pool.pinned) == (0, 0)
