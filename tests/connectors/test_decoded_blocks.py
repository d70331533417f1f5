"""What many requests decode: saved some blocks at a time, and nothing of it lost at their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.runtime.messages import decode_plan
from tests.connectors.conftest import FakeEngine, FakeRequest

if TYPE_CHECKING:
    import pytest

TOKENS = 4
PROMPT = 2 * TOKENS
MANY = 64
BLOCKS = 16
"""Decoded by each request."""


def decode(
    count: int, pool: int = 8192, host: int = 4096
) -> tuple[Any, list[Any], list[list[Any]]]:
    """So many requests at once, to the end of their answers: the saves of each step."""
    engine = FakeEngine(pool=pool, host=host, window_groups=())
    requests = [
        FakeRequest(f"{number}", [*range(1000 * number, 1000 * number + PROMPT)])
        for number in range(count)
    ]
    for request in requests:
        engine.scheduler.find_tokens(request, 0)
        engine.allocate(request, PROMPT // TOKENS + BLOCKS)
    saves: list[list[Any]] = []

    def step(tokens: int) -> None:
        plan = engine.step({request.request_id: tokens for request in requests})
        copies = decode_plan(plan.plan).copies if plan is not None and plan.plan else []
        saves.append(copies)
        for request in requests:
            request.num_computed_tokens += tokens
            request.all_token_ids.append(7)
            engine.compute(request)

    step(PROMPT)
    for _ in range(BLOCKS * TOKENS):
        step(1)
    return engine, requests, saves


def finish(engine: Any, requests: list[Any]) -> None:
    for request in requests:
        engine.scheduler.finish_request(request.request_id, engine.tables[request.request_id])
    while engine.scheduler.pending:
        engine.step()


def found(engine: Any, request: Any) -> int:
    again = FakeRequest(f"again {request.request_id}", request.all_token_ids)
    return int(engine.scheduler.find_tokens(again, 0))


def test_many_decoding_requests_take_a_save_every_other_step() -> None:
    _, _, (prompts, *decoded) = decode(MANY)

    assert len(prompts) == MANY
    # One by one it would be as many as blocks: 64 in every fourth step.
    assert sum(map(len, decoded)) == MANY * BLOCKS / 8
    assert max(map(len, decoded)) == MANY // 8


def test_few_decoding_requests_are_saved_block_by_block() -> None:
    _, _, (_, *decoded) = decode(4)

    assert sum(map(len, decoded)) == 4 * BLOCKS


def test_what_was_not_saved_yet_is_saved_when_its_request_ends() -> None:
    engine, requests, _ = decode(MANY)
    before = [found(engine, request) for request in requests]

    finish(engine, requests)

    assert min(before) < PROMPT + BLOCKS * TOKENS
    whole = [PROMPT + BLOCKS * TOKENS] * MANY
    assert [found(engine, request) for request in requests] == whole
    assert engine.pool.pinned == 0


def test_nothing_is_saved_of_a_request_that_ends_before_it_ran() -> None:
    """Its tokens may count as computed all the same: another engine was to hand them over."""
    engine = FakeEngine(window_groups=())
    request = FakeRequest("waiting", [*range(PROMPT)])
    engine.scheduler.follow_request(request, 0)
    engine.allocate(request, 2)
    request.num_computed_tokens = PROMPT

    finish(engine, [request])

    assert found(engine, request) == 0


def test_what_finds_no_room_for_pins_at_the_end_is_dropped_and_counted() -> None:
    engine, requests, _ = decode(MANY, pool=1300)
    engine.scheduler.counters.take()

    finish(engine, requests)

    assert engine.scheduler.counters.take()["blocks_dropped_pinned"] > 0
    # A twentieth of the pool is pinned at a time, and as much was saved.
    assert engine.pool.pinned == 0


def test_what_finds_no_room_for_pins_costs_nobody_else_his_room() -> None:
    kept = MANY * (PROMPT // TOKENS + BLOCKS)
    engine, requests, _ = decode(MANY, pool=1300, host=kept // 2)
    before = sum(found(engine, request) for request in requests)
    engine.scheduler._pins.count = engine.scheduler._pins.limit  # Others have them all.

    finish(engine, requests)

    assert sum(found(engine, request) for request in requests) == before


def test_a_step_that_completes_no_block_of_a_request_does_not_look_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds of requests decode at once, and the engine's thread pays for each look."""
    request = FakeRequest("first", range(PROMPT))
    engine = FakeEngine(window_groups=())
    engine.scheduler.find_tokens(request, 0)
    engine.allocate(request, PROMPT // TOKENS + BLOCKS)
    looks: set[int] = set()

    def looked(self: Any) -> int:
        looks.add(step)
        return len(self.all_token_ids)

    monkeypatch.setattr(type(request), "num_tokens", property(looked))

    for step in range(BLOCKS * TOKENS):
        tokens = 1 if step else PROMPT
        engine.scheduler.plan_step({"first": tokens}, engine.tables.__getitem__)
        request.num_computed_tokens += tokens
        request.all_token_ids.append(7)

    assert len(looks) <= BLOCKS + 2
