"""Steps that compute nothing, on the CPU: they end with the first load that is complete."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.connectors.base.worker import WorkerConnector
from tests.connectors.conftest import FakeRequest

TOKENS = 4
PROMPTS = [list(range(start, start + 26)) for start in (100, 200, 300)]


@pytest.fixture
def loading(engine: Any) -> Any:
    """Three requests whose loads begin in one step."""
    for number, prompt in enumerate(PROMPTS):
        engine.run(FakeRequest(f"first-{number}", prompt))
    for number, prompt in enumerate(PROMPTS):
        request = FakeRequest(f"again-{number}", prompt)
        matched = engine.scheduler.find_tokens(request, 0)
        engine.scheduler.start_load(request, engine.allocate(request, 7), matched)
    return engine


def step(engine: Any, *, computes: bool) -> set[str]:
    """Whose loads have ended in a step."""
    reported = engine.scheduler.plan_step({}, engine.tables.__getitem__)
    engine.worker.after_forward(reported, computes=computes)
    engine.scheduler.apply_reports(engine.worker.take_reports())
    received: set[str] = engine.worker.take_received().requests
    return received


def test_a_step_that_computes_nothing_brings_one_request_its_blocks(loading: Any) -> None:
    first = step(loading, computes=False)
    # That one is computed now, and the copies for the others follow its forward pass.
    others = step(loading, computes=True)

    assert (first, others) == ({"again-0"}, {"again-1", "again-2"})
    row = loading.tables["again-0"][0]
    assert (loading.kv[0, row[:6], :, 0] == np.array(PROMPTS[0][:24]).reshape(6, TOKENS)).all()


def test_where_nothing_is_computed_then_either_the_others_follow_one_by_one(loading: Any) -> None:
    assert [step(loading, computes=False) for _ in PROMPTS] == [
        {"again-0"},
        {"again-1"},
        {"again-2"},
    ]
    assert not loading.scheduler.pending


def test_a_load_that_was_aborted_does_not_keep_the_next_one_waiting(loading: Any) -> None:
    loading.scheduler.finish_request("again-0")

    received = [step(loading, computes=False) for _ in PROMPTS]

    # Its own end is reported as well: vLLM keeps its blocks until then.
    assert set().union(*received) == {"again-0", "again-1", "again-2"}
    assert "again-1" in received[0] | received[1]


def test_a_step_that_computes_brings_all_of_them(loading: Any) -> None:
    assert step(loading, computes=True) == {"again-0", "again-1", "again-2"}


def test_where_a_device_copies_by_itself_nothing_is_held_back(loading: Any) -> None:
    loading.worker = WorkerConnector(
        loading.rank, group_count=1, stream=lambda: 0, copies_itself=False
    )

    assert step(loading, computes=False) == {"again-0", "again-1", "again-2"}
