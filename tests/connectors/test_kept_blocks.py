"""Who keeps a block until a save has read it: its request while it runs, a pin afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.connectors.conftest import FakeEngine, FakeRequest

PROMPT = list(range(100, 126))
BLOCKS = len(PROMPT) // 4
POOL = 40
"""Of which two may be pinned."""


@pytest.fixture
def engine() -> Any:
    return FakeEngine(pool=POOL, window_groups=())


def begin(engine: Any, request: Any, *, tokens: int) -> Any:
    """Plans a step that computes the next tokens of a request; no worker has seen it yet."""
    if request.request_id not in engine.tables:
        engine.scheduler.find_tokens(request, 0)
        engine.allocate(request, -(-request.num_tokens // 4))
        engine.compute(request)
    reported = engine.scheduler.plan_step({request.request_id: tokens}, engine.tables.__getitem__)
    request.num_computed_tokens += tokens
    return reported


def work(engine: Any, *plans: Any) -> None:
    for reported in plans:
        engine.worker.after_forward(reported)
    engine.scheduler.apply_reports(engine.worker.take_reports())


def test_a_running_request_has_all_its_blocks_saved_at_once_without_a_pin(engine: Any) -> None:
    reported = begin(engine, FakeRequest("first", PROMPT), tokens=26)
    pinned = engine.pool.pinned
    work(engine, reported)

    assert pinned == 0
    assert engine.scheduler.counters.take()["blocks_saved"] == BLOCKS
    assert not engine.scheduler.pending


def test_where_blocks_do_not_stay_every_save_is_pinned() -> None:
    engine = FakeEngine(pool=POOL)

    begin(engine, FakeRequest("first", PROMPT), tokens=26)

    assert engine.pool.pinned == 2


def test_what_is_still_read_when_a_request_ends_is_pinned_as_far_as_pins_go(engine: Any) -> None:
    request = FakeRequest("first", PROMPT)
    plans = [begin(engine, request, tokens=4), begin(engine, request, tokens=22)]

    engine.scheduler.finish_request("first")
    pinned = engine.pool.pinned
    # vLLM gives the other blocks to somebody else.
    engine.kv[0, engine.tables["first"][0][1:]] = 7.0
    work(engine, *plans, engine.scheduler.plan_step({}, engine.tables.__getitem__))

    assert pinned == 1
    counted = engine.scheduler.counters.take()
    assert counted["blocks_dropped_pinned"] == BLOCKS - 1
    assert "saves_failed" not in counted
    assert engine.pool.pinned == 0
    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT), 0) == 4
    engine.offload.audit()


def test_a_preempted_request_leaves_nothing_that_was_read_too_late(engine: Any) -> None:
    reported = begin(engine, FakeRequest("first", PROMPT), tokens=26)

    after = engine.scheduler.plan_step({}, engine.tables.__getitem__, {"first"})
    engine.kv[:] = 7.0
    work(engine, reported, after)

    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT), 0) == 0
    engine.offload.audit()


def test_a_request_that_begins_anew_leaves_nothing_that_was_read_too_late(engine: Any) -> None:
    request = FakeRequest("first", PROMPT)
    reported = begin(engine, request, tokens=26)

    engine.scheduler.find_tokens(request, 0)
    engine.kv[:] = 7.0
    work(engine, reported, engine.scheduler.plan_step({}, engine.tables.__getitem__))

    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT), 0) == 0


def test_a_step_in_which_nothing_happens_has_no_plan(engine: Any) -> None:
    request = FakeRequest("first", PROMPT)
    work(engine, begin(engine, request, tokens=26))
    begin(engine, request, tokens=0)

    assert begin(engine, request, tokens=0) is None
