"""The scheduler's half, over a real owner and a real rank; only vLLM is not there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.connectors.base.requests import STEPS_MAX
from penstock.connectors.base.worker import WorkerConnector
from penstock.machine import events as ev
from tests.connectors.conftest import FakeEngine, FakeRequest

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 4
PROMPT = list(range(100, 126))  # six blocks and two tokens


def test_a_prompt_that_was_computed_is_found_and_loaded(engine: Any) -> None:
    engine.run(FakeRequest("first", PROMPT))
    again = FakeRequest("again", PROMPT)

    matched = engine.scheduler.find_tokens(again, 0)
    (row,) = engine.allocate(again, 7)
    engine.scheduler.start_load(again, [row], matched)
    engine.step()
    received = engine.worker.take_received()

    assert matched == 24
    assert received.requests == {"again"}
    assert not received.invalid_blocks
    expected = np.array(PROMPT[:24]).reshape(6, TOKENS)
    assert (engine.kv[0, row[:6], :, 0] == expected).all()


def test_blocks_are_saved_in_the_step_that_computes_them(engine: Any) -> None:
    request = FakeRequest("first", PROMPT)
    engine.scheduler.find_tokens(request, 0)
    engine.allocate(request, 7)

    reported = engine.scheduler.plan_step({"first": len(PROMPT)}, engine.tables.__getitem__)

    assert reported.plan is not None
    assert engine.pool.pinned == 6


def test_a_prompt_of_whole_blocks_is_found_whole() -> None:
    """The engine computes its last token in any case, for the logits."""
    engine = FakeEngine(window_groups=())
    engine.run(FakeRequest("first", PROMPT[:24]))

    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT[:24]), 0) == 24
    assert engine.scheduler.find_tokens(FakeRequest("half", PROMPT[:24]), 12) == 12


def test_not_where_windows_are_kept_for_the_token_behind_it() -> None:
    engine = FakeEngine(groups=2, window_groups=(1,))
    engine.run(FakeRequest("first", PROMPT[:24]))

    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT[:24]), 0) == 20


def test_nothing_is_loaded_for_the_last_token_alone() -> None:
    engine = FakeEngine(window_groups=())
    engine.run(FakeRequest("first", PROMPT[:24]))

    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT[:24]), 20) == 0
    assert engine.scheduler.find_tokens(FakeRequest("longer", PROMPT[:25]), 20) == 4


def test_a_conversation_that_is_over_is_neither_saved_nor_kept(engine: Any) -> None:
    engine.run(FakeRequest("first", PROMPT[:16]))
    over = {"kv_transfer_params": {"penstock": {"over": True}}}

    engine.run(FakeRequest("last", PROMPT, **over))
    engine.scheduler.finish_request("last")

    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT), 0) == 16
    assert engine.offload.statistics().blocks_let_go == 4


def test_what_vllm_has_itself_is_not_claimed(engine: Any) -> None:
    engine.run(FakeRequest("first", PROMPT))

    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT), 16) == 8


def test_tokens_that_are_not_known_yet_are_not_hashed(engine: Any) -> None:
    """Asynchronous scheduling counts tokens as computed before they are sampled."""
    request = FakeRequest("first", PROMPT[:7])
    engine.scheduler.find_tokens(request, 0)
    engine.allocate(request, 2)
    engine.compute(request)

    engine.step({"first": 8})
    request.num_computed_tokens = 8

    assert engine.scheduler.find_tokens(FakeRequest("same", [*PROMPT[:7], 999, 5]), 0) == 4
    request.all_token_ids.append(PROMPT[7])
    engine.compute(request)
    engine.step({"first": 1})
    assert engine.scheduler.find_tokens(FakeRequest("other", [*PROMPT[:8], 5]), 0) == 8


def test_a_deferred_request_is_not_scanned_again(engine: Any) -> None:
    """Deferred requests: only what has changed since the last answer is looked at."""
    engine.run(FakeRequest("first", PROMPT))
    waiting = FakeRequest("waiting", PROMPT)
    seen: list[ev.Lookup] = []
    handle = engine.offload._driver.handle

    def watched(event: Any) -> Any:
        if isinstance(event, ev.Lookup):
            seen.append(event)
        return handle(event)

    engine.offload._driver.handle = watched
    answers = {engine.scheduler.find_tokens(waiting, 0) for _ in range(50)}

    assert answers == {24}
    assert [lookup.start for lookup in seen] == [0] + [6] * 49


def test_pins_stay_within_a_twentieth_of_the_pool() -> None:
    engine = FakeEngine(pool=40)
    request = FakeRequest("first", PROMPT)
    engine.scheduler.find_tokens(request, 0)
    engine.allocate(request, 7)
    engine.compute(request)

    most = 0
    for scheduled in ({"first": 26}, {"first": 1}, {"first": 1}):
        reported = engine.scheduler.plan_step(scheduled, engine.tables.__getitem__)
        most = max(most, engine.pool.pinned)
        engine.worker.after_forward(reported)
        engine.scheduler.apply_reports(engine.worker.take_reports())
        request.num_computed_tokens = 26

    # While the request runs it keeps its blocks itself, so that nothing is lost.
    assert most == 2
    assert engine.pool.pinned == 0
    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT), 0) == 24


def test_what_cannot_be_pinned_before_the_end_is_dropped_and_counted() -> None:
    engine = FakeEngine(pool=40)
    request = FakeRequest("first", PROMPT)
    engine.run(request)

    engine.scheduler.finish_request("first")

    assert engine.scheduler.counters.take()["blocks_dropped_pinned"] == 4
    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT), 0) == 8


def test_an_aborted_load_is_reported_as_received_all_the_same(engine: Any) -> None:
    """Stale blocks after an abort: vLLM keeps them until the load has settled."""
    engine.run(FakeRequest("first", PROMPT))
    again = FakeRequest("again", PROMPT)
    matched = engine.scheduler.find_tokens(again, 0)
    (row,) = engine.allocate(again, 7)
    engine.scheduler.start_load(again, [row], matched)

    engine.scheduler.finish_request("again")
    engine.step()

    assert engine.worker.take_received().requests == {"again"}
    assert not engine.scheduler.pending
    # Nobody wanted it any more: that is no load that failed.
    assert "loads_failed" not in engine.scheduler.counters.take()
    engine.offload.audit()


def test_a_load_that_fails_names_its_blocks_and_is_computed(engine: Any) -> None:
    engine.run(FakeRequest("first", PROMPT))
    host = engine.rank.executor.stores[1]
    again = FakeRequest("again", PROMPT)
    matched = engine.scheduler.find_tokens(again, 0)
    (row,) = engine.allocate(again, 7)
    engine.scheduler.start_load(again, [row], matched)
    reported = engine.scheduler.plan_step({}, engine.tables.__getitem__)
    (buffer,) = host.blocks([0]).buffers.values()
    buffer[:] ^= 1

    engine.worker.after_forward(reported)
    received = engine.worker.take_received()
    engine.scheduler.apply_reports(engine.worker.take_reports())

    assert received.requests == {"again"}
    assert received.invalid_blocks == set(row[:6])
    assert engine.scheduler.find_tokens(FakeRequest("third", PROMPT), 0) == 0


def fail_load(engine: Any, request: Any, matched: int) -> None:
    """The engine starts a load of which every block is damaged."""
    (row,) = engine.allocate(request, 7)
    engine.scheduler.start_load(request, [row], matched)
    planned = engine.scheduler.plan_step({}, engine.tables.__getitem__)
    (buffer,) = engine.rank.executor.stores[1].blocks([0]).buffers.values()
    buffer[:] ^= 1
    engine.worker.after_forward(planned)
    engine.scheduler.apply_reports(engine.worker.take_reports())


def test_49176_a_request_whose_load_failed_is_offered_no_other_until_it_was_preempted(
    engine: Any,
) -> None:
    """vLLM keeps room reserved for it until then: in a small pool a second load never fits."""
    again = FakeRequest("again", PROMPT)
    claims = []
    for attempt in range(3):
        engine.run(FakeRequest(f"other-{attempt}", PROMPT))
        engine.scheduler.finish_request(f"other-{attempt}")
        claims.append(engine.scheduler.find_tokens(again, 0))
        if not attempt:
            fail_load(engine, again, claims[0])
        if attempt == 1:
            engine.scheduler.plan_step({}, engine.tables.__getitem__, preempted=["again"])

    assert claims == [24, 0, 24]


def saved_prompt(engine: Any) -> None:
    engine.run(FakeRequest("first", PROMPT))
    engine.scheduler.finish_request("first")
    engine.scheduler.take_statistics()


def test_a_load_that_never_starts_while_nothing_runs_is_given_up_and_counted_once(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saved_prompt(engine)
    waiting, other = FakeRequest("waiting", PROMPT), FakeRequest("other", PROMPT)

    claims = []
    for _ in range(STEPS_MAX + 2):
        claims.append(engine.scheduler.find_tokens(waiting, 0))
        engine.step()

    assert claims == [24] * STEPS_MAX + [0, 0]
    assert engine.scheduler.take_statistics()["loads_not_started"] == 1
    assert caplog.text.count("the engine has no room to load it: request=waiting") == 1
    assert engine.scheduler.find_tokens(other, 0) == 24, "what it waited for is still there"


@pytest.mark.parametrize("busy", ["computes", "receives", "does not ask"])
def test_a_load_that_waits_for_others_is_not_given_up(engine: Any, busy: str) -> None:
    saved_prompt(engine)
    waiting, running = FakeRequest("waiting", PROMPT), FakeRequest("running", [1, 2])
    engine.scheduler.find_tokens(running, 0)
    engine.allocate(running, 1)

    for number in range(3 * STEPS_MAX):
        # Every second step is one in which nothing happens.
        turn = number % 2
        if busy != "does not ask" or turn:
            assert engine.scheduler.find_tokens(waiting, 0) == 24
        scheduled = {"running": 1} if busy == "computes" and turn else {}
        engine.scheduler.plan_step(
            scheduled, engine.tables.__getitem__, receiving=busy == "receives" and bool(turn)
        )

    assert engine.scheduler.find_tokens(waiting, 0) == 24
    assert "loads_not_started" not in engine.scheduler.take_statistics()


def test_a_weight_update_voids_what_was_saved_and_what_is_running(engine: Any) -> None:
    running = FakeRequest("running", PROMPT[:10])
    engine.run(running)

    engine.scheduler.reset("new weights")
    # It goes on, with KV of the old weights below its new tokens.
    running.all_token_ids += PROMPT[10:26]
    engine.allocate(running, 4)
    engine.compute(running)
    engine.step({"running": 16})

    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT), 0) == 0
    # Preempted and begun anew, it counts again.
    running.num_computed_tokens = 0
    engine.scheduler.find_tokens(running, 0)
    engine.step({"running": 26})
    assert engine.scheduler.find_tokens(FakeRequest("third", PROMPT), 0) == 24


def test_a_preempted_request_is_saved_where_it_was_left(engine: Any) -> None:
    request = FakeRequest("first", PROMPT)
    engine.run(request)
    request.num_computed_tokens = 0
    request.all_token_ids += [7, 8, 9]
    engine.tables.clear()

    found = engine.scheduler.find_tokens(request, 0)
    engine.allocate(request, 8)
    engine.compute(request)
    reported = engine.scheduler.plan_step({"first": 29}, engine.tables.__getitem__)

    assert found == 24
    assert reported.plan is not None
    assert engine.pool.pinned == 1


@pytest.mark.parametrize("groups", [1, 2])
def test_a_block_that_a_window_has_passed_is_not_saved(groups: int) -> None:
    engine = FakeEngine(groups=groups)
    request = FakeRequest("first", PROMPT)
    engine.scheduler.find_tokens(request, 0)
    rows = engine.allocate(request, 7, groups=groups)
    rows[-1][:2] = [0, 0]  # vLLM's null block
    engine.step({"first": 26})

    assert engine.scheduler.counters.take()["blocks_dropped_window"] == 2
    assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT), 0) == 0


def test_with_several_groups_each_gets_what_it_needs() -> None:
    engine = FakeEngine(groups=2)
    engine.run(FakeRequest("first", PROMPT))
    again = FakeRequest("again", PROMPT)
    matched = engine.scheduler.find_tokens(again, 0)
    rows = engine.allocate(again, 7, groups=2)
    rows[1][:4] = [0] * 4  # the window needs the last two alone

    engine.scheduler.start_load(again, rows, matched)
    engine.step()

    assert matched == 24
    assert engine.worker.take_received().requests == {"again"}
    expected = np.array(PROMPT[:24]).reshape(6, TOKENS)
    assert (engine.kv[0, rows[0][:6], :, 0] == expected).all()
    assert (engine.kv[1, rows[1][4:6], :, 0] == expected[4:]).all()
    assert not engine.kv[1, 0].any()


def test_with_several_groups_a_failed_load_fails_its_request() -> None:
    engine = FakeEngine(groups=2)
    engine.run(FakeRequest("first", PROMPT))
    again = FakeRequest("again", PROMPT)
    matched = engine.scheduler.find_tokens(again, 0)
    engine.scheduler.start_load(again, engine.allocate(again, 7, groups=2), matched)
    reported = engine.scheduler.plan_step({}, engine.tables.__getitem__)
    (buffer,) = engine.rank.executor.stores[1].blocks([0]).buffers.values()
    buffer[:40] ^= 1

    engine.worker.after_forward(reported)
    received = engine.worker.take_received()

    assert (received.requests, received.failed) == ({"again"}, {"again"})
    assert not received.invalid_blocks


def test_behind_a_window_a_failed_load_fails_its_request(engine: Any) -> None:
    """What stands before the window was not kept: vLLM could not compute from that block on."""
    working = WorkerConnector(engine.rank, group_count=1, stream=lambda: 0, blocks_stay=False)
    engine.run(FakeRequest("first", PROMPT))
    again = FakeRequest("again", PROMPT)
    matched = engine.scheduler.find_tokens(again, 0)
    engine.scheduler.start_load(again, engine.allocate(again, 7), matched)
    reported = engine.scheduler.plan_step({}, engine.tables.__getitem__)
    (buffer,) = engine.rank.executor.stores[1].blocks([0]).buffers.values()
    buffer[:40] ^= 1

    working.after_forward(reported)
    received = working.take_received()

    assert (received.requests, received.failed) == ({"again"}, {"again"})
    assert not received.invalid_blocks


def test_statistics_say_what_was_added(engine: Any) -> None:
    engine.run(FakeRequest("first", PROMPT))

    taken = engine.scheduler.take_statistics()

    assert (taken["lookups"], taken["blocks_saved"]) == (1, 6)
    assert (taken["host_slots"], taken["host_slots_ready"]) == (64, 6)
    assert "blocks_saved" not in engine.scheduler.take_statistics()


def test_requests_are_recorded_once_and_in_the_order_they_came(tmp_path: Path) -> None:
    trace = tmp_path / "day.jsonl"
    engine = FakeEngine(record=trace)
    first, hidden = FakeRequest("first", PROMPT), FakeRequest("hidden", PROMPT)
    hidden.kv_transfer_params = {"penstock": False}

    engine.run(first)
    engine.scheduler.find_tokens(hidden, 0)
    again = FakeRequest("again", PROMPT[:9])
    engine.scheduler.find_tokens(again, 0)
    engine.scheduler.find_tokens(again, 0)
    again.all_token_ids.append(7)
    for name in ("again", "hidden", "first"):
        engine.scheduler.finish_request(name)
    engine.scheduler.close()

    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [(each["input_length"], each["output_length"]) for each in lines] == [(26, 0), (9, 1)]
    assert [len(each["blocks"]) // 16 for each in lines] == [6, 2]
    assert lines[0]["blocks"].startswith(lines[1]["blocks"])


def test_a_request_whose_prompt_another_engine_computed_is_saved_when_it_runs() -> None:
    engine = FakeEngine()
    request = FakeRequest("taken", range(10))
    engine.scheduler.follow_request(request, 0)
    engine.allocate(request, 3)
    engine.compute(request)
    request.num_computed_tokens = 9

    engine.step({"taken": 1})
    while engine.scheduler.pending:
        engine.step()

    assert engine.scheduler.counters.take()["blocks_saved"] == 2
    assert engine.scheduler.find_tokens(FakeRequest("again", range(10)), 0) == 8


def test_what_is_saved_of_a_prompt_that_another_engine_computed_is_not_saved_again() -> None:
    engine = FakeEngine()
    engine.run(FakeRequest("first", range(9)))
    engine.scheduler.counters.take()
    request = FakeRequest("taken", range(14))
    engine.scheduler.follow_request(request, 0)
    engine.allocate(request, 4)
    engine.compute(request)
    request.num_computed_tokens = 13

    engine.step({"taken": 1})
    while engine.scheduler.pending:
        engine.step()

    assert engine.scheduler.counters.take()["blocks_saved"] == 1
