"""What the connector's metrics say is so: after loads with damage, when idle, and after a reset."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lab.reference_pages import completed
from penstock.connectors.base.statistics import (
    COUNTERS,
    EVERY_S,
    GAUGES,
    TIMES,
    BlockBytes,
    RateLimitedLog,
    TransferCounts,
    combined,
    log,
    reduced,
)
from penstock.machine import events as ev
from tests.connectors.conftest import Clock, FakeEngine, FakeRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
TOKENS = 4
PROMPT = list(range(100, 126))  # six blocks and two tokens
BYTES = BlockBytes(loaded=7, saved=5)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is said in vLLM's log."""
    kept = Lines()
    log.addHandler(kept)
    yield kept.lines
    log.removeHandler(kept)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> Any:
    return FakeEngine(window_groups=(), counts=TransferCounts(BYTES, clock=clock))


def begin_load(engine: Any, request: Any) -> list[int]:
    """Has vLLM give a request blocks for what was found; returns these."""
    matched = engine.scheduler.find_tokens(request, 0)
    (row,) = engine.allocate(request, 7)
    engine.scheduler.start_load(request, [row], matched)
    # vLLM counts what was promised as computed, until a report says otherwise.
    request.num_computed_tokens = matched
    return list(row)


def damage(engine: Any, block: int) -> None:
    """Changes one block in host memory."""
    blocks = engine.rank.executor.stores[1].blocks([block])
    (buffer,) = blocks.buffers.values()
    buffer[block * blocks.layout.block_bytes] ^= 1


def go_on(engine: Any, request: Any, row: list[int]) -> None:
    """As vLLM goes on with a request: from the first invalid block, if there is one."""
    invalid = engine.worker.take_received().invalid_blocks
    if invalid:
        request.num_computed_tokens = min(map(row.index, invalid)) * TOKENS
    left = request.num_tokens - request.num_computed_tokens
    engine.step({request.request_id: left})
    request.num_computed_tokens = request.num_tokens


def test_of_a_sound_load_all_tokens_count(engine: Any, clock: Clock) -> None:
    engine.run(FakeRequest("first", PROMPT))
    engine.scheduler.take_statistics()
    again = FakeRequest("again", PROMPT)

    row = begin_load(engine, again)
    clock.now += 0.25
    engine.step()
    go_on(engine, again, row)
    taken = engine.scheduler.take_statistics()

    assert (taken["tokens_found"], taken["tokens_loaded"]) == (24, 24)
    assert taken["bytes_loaded"] == 6 * BYTES.loaded
    assert taken["load_seconds"] == [0.25]
    assert not {"loads_failed", "checksum_failures", "timeouts"} & set(taken)


def test_of_a_load_with_a_damaged_block_the_tokens_before_it_count(
    engine: Any, lines: list[str]
) -> None:
    engine.run(FakeRequest("first", PROMPT))
    saved = engine.scheduler.take_statistics()
    again = FakeRequest("again", PROMPT)
    row = begin_load(engine, again)
    key = engine.scheduler._requests["again"].keys.upto(6)[4].hex()
    damage(engine, 4)

    engine.step()
    go_on(engine, again, row)
    taken = engine.scheduler.take_statistics()

    assert (saved["blocks_saved"], saved["bytes_saved"]) == (6, 6 * BYTES.saved)
    assert (taken["tokens_found"], taken["tokens_loaded"]) == (24, 16)
    assert (taken["loads_failed"], taken["checksum_failures"]) == (1, 1)
    assert taken["bytes_loaded"] == 5 * BYTES.loaded
    (line,) = lines
    assert f"a load failed: request=again block={key}, the first of 1 in 6, reason=" in line
    assert "its checksum does not match" in line


def test_of_a_load_whose_request_was_aborted_nothing_counts_as_loaded(engine: Any) -> None:
    engine.run(FakeRequest("first", PROMPT))
    engine.scheduler.take_statistics()
    again = FakeRequest("again", PROMPT)
    begin_load(engine, again)

    engine.step()
    engine.scheduler.finish_request("again")
    taken = engine.scheduler.take_statistics()

    assert "tokens_loaded" not in taken
    assert taken["tokens_found"] == 24


def test_a_load_that_takes_too_long_is_a_timeout(engine: Any, lines: list[str]) -> None:
    engine.run(FakeRequest("first", PROMPT))
    engine.scheduler.take_statistics()
    begin_load(engine, FakeRequest("again", PROMPT))
    driver = engine.offload._driver
    late = driver._clock() + engine.config.cache.operation_timeout_s + 1

    engine.scheduler.plan_step({}, engine.tables.__getitem__)
    engine.offload._deliver(driver.machine.handle(ev.Tick(), late))
    engine.scheduler.apply_reports(())
    taken = engine.scheduler.take_statistics()

    assert (taken["timeouts"], taken["loads_failed"]) == (1, 1)
    assert "checksum_failures" not in taken
    (line,) = lines
    assert "a load failed: request=again" in line
    assert "deadline" in line


def test_sizes_are_reported_in_the_step_in_which_they_change(engine: Any) -> None:
    first = engine.scheduler.take_statistics()
    engine.run(FakeRequest("first", PROMPT))
    second = engine.scheduler.take_statistics()
    engine.run(FakeRequest("other", [7, *PROMPT]))
    third = engine.scheduler.take_statistics()
    engine.step()

    assert first == {"host_slots": 64, "host_slots_ready": 0, "pinned_blocks": 0}
    assert second["host_slots_ready"] == 6
    assert third["host_slots_ready"] == 12
    assert "host_slots" not in second
    # Nothing has changed: nothing is reported or looked up.
    assert engine.scheduler.take_statistics() == {}


def test_after_a_reset_an_idle_engine_takes_one_step_and_reports_it(engine: Any) -> None:
    """vLLM asks connectors for numbers at the end of a step, and idle engines take none."""
    engine.run(FakeRequest("first", PROMPT))
    engine.scheduler.finish_request("first")
    engine.scheduler.take_statistics()
    assert not engine.scheduler.pending

    engine.scheduler.reset("somebody asked for it")
    wants_a_step = engine.scheduler.pending
    engine.step()
    taken = engine.scheduler.take_statistics()

    assert wants_a_step
    assert (taken["host_slots_ready"], taken["resets"]) == (0, 1)
    assert not engine.scheduler.pending


def test_a_tier_that_is_off_has_room_for_nothing_and_counters_never_fall() -> None:
    engine = FakeEngine(window_groups=(), host=8)
    engine.run(FakeRequest("first", PROMPT))
    engine.scheduler.finish_request("first")
    engine.run(FakeRequest("other", [7, *PROMPT]))
    before = engine.scheduler.take_statistics()

    engine.offload._driver.handle(ev.TierOff(tier=1, fenced=True, why="its memory is gone"))
    engine.scheduler.reset("somebody asked for it")
    taken = engine.scheduler.take_statistics()

    assert (before["host_slots"], before["blocks_evicted"]) == (8, 4)
    assert (taken["host_slots"], taken["host_slots_ready"]) == (0, 0)
    assert "blocks_evicted" not in taken


def test_blocks_that_make_room_are_counted() -> None:
    engine = FakeEngine(window_groups=(), host=8)
    engine.run(FakeRequest("first", PROMPT))
    engine.scheduler.finish_request("first")
    engine.run(FakeRequest("other", [7, *PROMPT]))
    taken = engine.scheduler.take_statistics()

    assert taken["blocks_evicted"] == 4
    assert taken["host_slots_ready"] == taken["host_slots"] == 8


def test_a_request_with_wrong_parameters_is_kept_out_counted_and_reported(
    engine: Any, lines: list[str]
) -> None:
    for number in range(3):
        wrong = FakeRequest(
            f"wrong-{number}", PROMPT, kv_transfer_params={"penstock": {"save": "false"}}
        )
        engine.run(wrong)
        engine.scheduler.finish_request(wrong.request_id)
    taken = engine.scheduler.take_statistics()

    assert taken["requests_refused"] == 3
    assert "blocks_saved" not in taken
    assert engine.scheduler.find_tokens(FakeRequest("after", PROMPT), 0) == 0
    (line,) = lines
    assert "request=wrong-0 reason=kv_transfer_params.penstock.save is 'false'" in line


def test_the_first_problem_of_a_kind_is_logged_at_once_and_then_at_intervals(
    clock: Clock, lines: list[str]
) -> None:
    trouble = RateLimitedLog(clock=clock)

    for each in range(4):
        trouble.warn("one", "%d of one kind", each)
    trouble.warn("other", "of another kind")
    clock.now += EVERY_S
    trouble.warn("one", "%d of one kind", 4)
    trouble.warn("one", "%d of one kind", 5)

    assert lines == [
        "0 of one kind",
        "of another kind",
        "4 of one kind (3 more of this kind since the last such line)",
    ]


@pytest.mark.parametrize("name", [*COUNTERS, *GAUGES, *TIMES])
def test_every_metric_is_described_on_the_page(name: str) -> None:
    assert f"`{name}`" in completed(PAGE.read_text(encoding="utf-8"))


def test_takings_add_up_by_their_kind() -> None:
    one = {"lookups": 2, "host_slots_ready": 5, "load_seconds": [0.5]}
    other = {"lookups": 1, "host_slots_ready": 0, "load_seconds": [0.1], "resets": 1}

    both = combined(one, other)

    assert both == {
        "lookups": 3,
        "host_slots_ready": 0,
        "load_seconds": [0.5, 0.1],
        "resets": 1,
    }
    assert one["load_seconds"] == [0.5]
    assert reduced(both) == {
        "lookups": 3,
        "host_slots_ready": 0,
        "load_seconds_count": 2,
        "load_seconds_mean": 0.3,
        "load_seconds_max": 0.5,
        "resets": 1,
    }
    assert not set(COUNTERS) & set(GAUGES)
    assert not set(COUNTERS) & set(TIMES)
