"""Models with sliding windows: what a prefill leaves behind in host memory.

Five KV groups have a window, one has not, as in Gemma 3. vLLM takes blocks that have left a window
in the step after the one that computed them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.connectors.conftest import FakeEngine, FakeRequest

TOKENS = 4
GROUPS = 6
WINDOW_GROUPS = range(5)
WINDOW_BLOCKS = 3


def leave_windows(engine: Any, name: str, blocks: int) -> None:
    """What vLLM does before the next step: only the last blocks stay in groups with a window."""
    for group in WINDOW_GROUPS:
        engine.tables[name][group][: blocks - WINDOW_BLOCKS] = [0] * (blocks - WINDOW_BLOCKS)


def begin(engine: Any, request: Any) -> Any:
    """Plans the step that prefills a whole prompt."""
    engine.scheduler.find_tokens(request, 0)
    engine.allocate(request, -(-request.num_tokens // TOKENS), groups=GROUPS)
    engine.compute(request)
    reported = engine.scheduler.plan_step(
        {request.request_id: request.num_tokens}, engine.tables.get
    )
    request.num_computed_tokens = request.num_tokens
    return reported


def work(engine: Any, reported: Any) -> None:
    engine.worker.after_forward(reported)
    engine.scheduler.apply_reports(engine.worker.take_reports())


@pytest.mark.parametrize(
    ("pool", "blocks", "free", "back"),
    [
        (2048, 28, 2048 - 28 * GROUPS, 28),
        (210, 12, 210 - 12 * GROUPS, 12),
        # A pool that is full lends a twentieth: 102 blocks, and 10, for five groups.
        (2048, 28, 0, 20),
        (210, 12, 0, 2),
    ],
)
def test_so_much_of_a_prefill_comes_back(pool: int, blocks: int, free: int, back: int) -> None:
    engine = FakeEngine(pool=pool, groups=GROUPS, window_groups=WINDOW_GROUPS)
    engine.pool.free = free
    prompt = list(range(1000, 1000 + blocks * TOKENS + 1))

    work(engine, begin(engine, FakeRequest("first", prompt)))
    leave_windows(engine, "first", blocks)
    engine.step({"first": 1})

    assert engine.scheduler.find_tokens(FakeRequest("again", prompt), 0) == back * TOKENS
    assert engine.pool.pinned == 0


def test_a_full_pool_lends_what_is_copied_before_vllm_hands_out_blocks_again() -> None:
    """As on the CPU, where a step ends with its copies."""
    engine = FakeEngine(pool=210, groups=GROUPS, window_groups=WINDOW_GROUPS, step_blocks=10)
    prompt = list(range(1000, 1000 + 12 * TOKENS + 1))

    reported = begin(engine, FakeRequest("first", prompt))
    pinned = engine.pool.pinned
    work(engine, reported)

    assert pinned == 10 * len(WINDOW_GROUPS)
    assert engine.pool.pinned == 0
    assert engine.scheduler.find_tokens(FakeRequest("again", prompt), 0) == 10 * TOKENS


def test_beside_a_load_which_is_copied_first_a_full_pool_lends_a_twentieth() -> None:
    engine = FakeEngine(pool=210, groups=GROUPS, window_groups=WINDOW_GROUPS, step_blocks=10)
    saved = list(range(1000, 1000 + 2 * TOKENS + 1))
    work(engine, begin(engine, FakeRequest("first", saved)))
    again = FakeRequest("again", saved)
    matched = engine.scheduler.find_tokens(again, 0)
    engine.scheduler.start_load(again, engine.allocate(again, 3, groups=GROUPS), matched)

    begin(engine, FakeRequest("other", list(range(2000, 2000 + 12 * TOKENS + 1))))

    assert engine.pool.pinned == 2 * len(WINDOW_GROUPS)


def test_saves_that_a_step_has_not_come_to_count_for_the_next() -> None:
    engine = FakeEngine(pool=210, groups=GROUPS, window_groups=WINDOW_GROUPS, step_blocks=10)
    begin(engine, FakeRequest("first", list(range(1000, 1000 + 8 * TOKENS + 1))))

    begin(engine, FakeRequest("other", list(range(2000, 2000 + 8 * TOKENS + 1))))

    assert engine.pool.pinned == 10 * len(WINDOW_GROUPS)


def test_only_groups_with_a_window_are_pinned() -> None:
    engine = FakeEngine(pool=400, groups=GROUPS, window_groups=WINDOW_GROUPS)

    begin(engine, FakeRequest("first", list(range(100, 113))))

    assert engine.pool.pinned == 3 * len(WINDOW_GROUPS)


def test_what_a_request_keeps_itself_is_pinned_when_it_ends() -> None:
    engine = FakeEngine(pool=400, groups=GROUPS, window_groups=WINDOW_GROUPS)
    prompt = list(range(100, 113))
    reported = begin(engine, FakeRequest("first", prompt))

    engine.scheduler.finish_request("first")
    pinned = engine.pool.pinned
    work(engine, reported)

    assert pinned == 3 * GROUPS
    assert engine.pool.pinned == 0
    assert engine.scheduler.find_tokens(FakeRequest("again", prompt), 0) == 12


def test_a_save_whose_request_ends_is_given_up_where_a_group_cannot_be_pinned() -> None:
    engine = FakeEngine(pool=300, groups=GROUPS, window_groups=WINDOW_GROUPS)
    prompt = list(range(100, 113))
    reported = begin(engine, FakeRequest("first", prompt))

    engine.scheduler.finish_request("first")
    after = engine.scheduler.plan_step({}, engine.tables.get)
    # vLLM gives the blocks of the group without a window to somebody else.
    engine.kv[-1] = 7.0
    engine.worker.after_forward(reported)
    work(engine, after)

    assert engine.scheduler.find_tokens(FakeRequest("again", prompt), 0) == 0
    assert engine.pool.pinned == 0
    engine.offload.audit()


def test_a_preempted_request_leaves_nothing_of_a_group_that_was_read_too_late() -> None:
    engine = FakeEngine(pool=400, groups=GROUPS, window_groups=WINDOW_GROUPS)
    prompt = list(range(100, 113))
    reported = begin(engine, FakeRequest("first", prompt))

    after = engine.scheduler.plan_step({}, engine.tables.get, {"first"})
    engine.kv[-1] = 7.0
    engine.worker.after_forward(reported)
    work(engine, after)

    assert engine.scheduler.find_tokens(FakeRequest("again", prompt), 0) == 0
    assert engine.pool.pinned == 0
