"""Steps that compute on loads while they arrive: what joins, who waits, and what gets out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import penstock
from penstock.connectors.base.layerwise import (
    LOADS_MAX,
    LayerwiseScheduler,
    joined_blocks,
)
from penstock.connectors.base.requests import Pins
from penstock.connectors.base.scheduler import SchedulerConnector
from penstock.connectors.base.worker import WorkerConnector
from penstock.errors import InvariantViolation
from penstock.runtime.messages import decode_plan
from tests.connectors.conftest import FakePool, FakeRequest

TOKENS, LAYERS, POOL = 4, 3, 64
NAMES = {f"model.layers.{number}.attn": number for number in range(LAYERS)}
PROMPT = list(range(100, 126))  # six blocks and two tokens
FULL = len(PROMPT) // TOKENS


class Step:
    """One of vLLM's steps on one worker, cut where vLLM calls the connector."""

    def __init__(self, reported: Any, working: WorkerConnector) -> None:
        self.reported, self.worker = reported, working

    def begin(self, *, by_layer: bool = True) -> bool:
        return self.worker.before_forward(self.reported, by_layer=by_layer)

    def layers(self) -> None:
        for name in NAMES:
            self.worker.wait_layer(name)

    def end(self) -> Any:
        self.worker.after_forward(self.reported)
        return self.worker.take_received()

    def run(self) -> Any:
        """The whole step."""
        self.begin()
        self.layers()
        return self.end()


class Joined(NamedTuple):
    """A request that has joined a step."""

    request: Any
    row: list[int]
    matched: int
    step: Step


class Asynchronous:
    """An engine that plans steps ahead, and what it was told of its requests."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def hold(self, request: Any) -> None:
        self.told.append(("hold", request.request_id))

    def resume(self, request: Any) -> None:
        self.told.append(("resume", request.request_id))

    def discard(self, request: Any) -> None:
        self.told.append(("discard", request.request_id))


class Layered:
    """Scheduler and worker in one process, as vLLM calls them with `layerwise`."""

    def __init__(
        self, *, blocks_max: int = 32, wait_s: float = 30.0, ahead: Asynchronous | None = None
    ) -> None:
        self.config = penstock.parse_config(
            f"""
            version = 1
            model.name = "toy"
            cache.block_tokens = {TOKENS}
            tiers = [{{ name = "host", kind = "host", blocks = 64 }}]
            """
        )
        self.kv = [np.zeros((POOL, TOKENS, 8), dtype=np.float32) for _ in range(LAYERS)]
        self.rank = penstock.open_rank(self.config, rank=0, kv=self.kv)
        self.offload = penstock.open_offload(self.config, ranks=[self.rank.facts])
        self.withheld: list[tuple[str, list[int], int]] = []
        self.tables: dict[str, list[list[int]]] = {}
        self.scheduled: dict[str, Any] = {}
        self.pins = Pins(FakePool(400))
        self.scheduler = SchedulerConnector(
            self.config,
            self.offload,
            self.pins,
            null_block=0,
            window_groups=(),
            joins=LayerwiseScheduler(
                lambda name, ids, first: self.withheld.append((name, [*ids], first)),
                blocks_max=blocks_max,
                overlapping=(ahead, self.pins) if ahead is not None else None,
            ),
        )
        self.worker = WorkerConnector(
            self.rank, group_count=1, stream=lambda: 0, layers=NAMES, wait_s=wait_s
        )

    def ask(self, request: Any, held: int = 0) -> tuple[int, bool]:
        """As vLLM asks: so many tokens, and whether it computes on them at once."""
        matched = self.scheduler.find_tokens(request, held)
        return matched, matched > 0 and self.scheduler.can_join(request, matched)

    def place(self, request: Any, first_block: int, external: int) -> list[int]:
        """vLLM gives the request blocks, for tokens that were claimed among others."""
        row = [*range(first_block, first_block + -(-request.num_tokens // TOKENS))]
        self.tables[request.request_id] = [row]
        self.scheduled[request.request_id] = request
        if external:
            self.scheduler.start_load(request, [row], external)
        return row

    def join(self, request: Any, first_block: int = 20) -> Joined:
        """The request's next step computes on blocks that are loaded for it."""
        matched, _ = self.ask(request)
        row = self.place(request, first_block, matched)
        return Joined(request, row, matched, self.step({request.request_id: 2}))

    def compute(self, request: Any, first: int = 0) -> None:
        """What stands for KV, from a block on: the tokens, in each layer."""
        for number, block in enumerate(self.tables[request.request_id][0]):
            tokens = request.all_token_ids[number * TOKENS : (number + 1) * TOKENS]
            if number >= first:
                for layer, kv in enumerate(self.kv, start=1):
                    kv[block, : len(tokens)] = np.array(tokens)[:, None] * layer

    def step(self, scheduled: dict[str, int], preempted: tuple[str, ...] = ()) -> Step:
        reported = self.scheduler.plan_step(scheduled, self.tables.__getitem__, preempted)
        for name in scheduled:
            # As vLLM does it, when a step is put together.
            self.scheduled[name].num_computed_tokens = self.scheduled[name].num_tokens
        return Step(reported, self.worker)

    def receive(self) -> dict[str, int]:
        self.scheduler.apply_reports(
            self.worker.take_reports(), joined_step=self.worker.take_joined_step()
        )
        return self.scheduler.counters.take()

    def keep(self, request: Any) -> None:
        """Has a prompt computed and saved."""
        self.ask(request)
        self.place(request, 1, 0)
        self.compute(request)
        self.step({request.request_id: request.num_tokens}).end()
        self.receive()

    def lies_at(self, request: Any, row: list[int]) -> list[bool]:
        """Whether each of the blocks holds what the request's tokens make of it, in all layers."""
        return [
            all(
                (
                    kv[block, :, 0]
                    == np.array(request.all_token_ids[at * TOKENS : (at + 1) * TOKENS]) * layer
                ).all()
                for layer, kv in enumerate(self.kv, start=1)
            )
            for at, block in enumerate(row)
        ]

    def damage(self, step: Step, block: int) -> None:
        """Flips a bit, in host memory, of a block that the step is about to load."""
        (copy, *_) = decode_plan(step.reported.early[0]).copies
        slot = int(copy.source_slots[block])
        host: Any = self.rank.executor.stores[1]
        rows_of(host, slot)[5] ^= 1


def rows_of(host: Any, slot: int) -> Any:
    """The bytes of a slot of the host tier, where a block is one run."""
    blocks = host.blocks([slot])
    (buffer,) = blocks.buffers.values()
    plane = blocks.layout.groups[0].layers[0].planes[0]
    start = plane.offset + slot * plane.block_stride
    return buffer[start : start + blocks.layout.block_bytes]


@pytest.fixture
def engine() -> Layered:
    layered = Layered()
    layered.keep(FakeRequest("first", PROMPT))
    return layered


def test_a_request_joins_the_step_that_begins_its_loads(engine: Layered) -> None:
    again = FakeRequest("again", PROMPT)

    assert engine.ask(again) == (FULL * TOKENS, True)
    engine.place(again, 20, FULL * TOKENS)
    reported = engine.step({"again": 2}).reported

    assert [loading.request for loading in reported.joined] == ["again"]
    assert reported.early
    assert not reported.loads


def test_a_step_on_loads_has_a_last_block_to_compute(engine: Layered) -> None:
    whole = FakeRequest("whole", PROMPT[: FULL * TOKENS])

    assert engine.ask(whole) == ((FULL - 1) * TOKENS, True)


def test_the_first_layer_that_needs_blocks_has_them(engine: Layered) -> None:
    again, row, _, step = engine.join(FakeRequest("again", PROMPT))

    waits = step.begin()
    before = engine.lies_at(again, row[:FULL])
    engine.worker.wait_layer("model.layers.0.attn")
    after = engine.lies_at(again, row[:FULL])

    assert waits
    assert not any(before)
    assert all(after)


def test_without_layers_to_wait_at_all_is_there_before_the_step(engine: Layered) -> None:
    again, row, _, step = engine.join(FakeRequest("again", PROMPT))

    waits = step.begin(by_layer=False)
    there = engine.lies_at(again, row[:FULL])
    received = step.end()

    assert not waits
    assert all(there)
    assert not received.invalid_blocks


def test_vllm_gets_no_report_of_a_request_it_does_not_wait_for(engine: Layered) -> None:
    _, _, matched, step = engine.join(FakeRequest("again", PROMPT))

    received = step.run()
    counted = engine.receive()

    assert (received.requests, received.failed, received.invalid_blocks) == (set(), set(), set())
    assert counted["tokens_loaded"] == matched
    assert not engine.scheduler.pending
    engine.offload.audit()


def test_vllm_forgets_blocks_it_entered_before_they_were_loaded(engine: Layered) -> None:
    again = FakeRequest("again", PROMPT)
    matched, _ = engine.ask(again, held=2 * TOKENS)

    row = engine.place(again, 20, matched)

    assert engine.withheld == [("again", row[2:], 2)]


def test_a_damaged_block_is_reported_in_the_step_that_computed_on_it(engine: Layered) -> None:
    again, row, _, step = engine.join(FakeRequest("again", PROMPT))
    engine.damage(step, 3)

    received = step.run()
    counted = engine.receive()

    assert received.invalid_blocks == {row[3]}
    assert not received.requests
    assert counted["loads_failed"] == 1
    assert engine.lies_at(again, row[:FULL]) == [at != 3 for at in range(FULL)]


def test_a_request_whose_step_was_taken_back_is_known_when_it_is_planned_again(
    engine: Layered,
) -> None:
    """Workers that count a request's tokens by themselves must be told."""
    sound, damaged = FakeRequest("sound", PROMPT), FakeRequest("damaged", PROMPT)
    for at, request in enumerate((sound, damaged)):
        matched, _ = engine.ask(request)
        engine.place(request, 20 + 10 * at, matched)
        request.num_computed_tokens = matched

    engine.step({"sound": 2, "damaged": 2})
    joined = [*engine.scheduler.taken_back]
    # vLLM has dropped the token, and counts up to the damaged block.
    damaged.num_computed_tokens = TOKENS
    engine.step({"sound": 1})
    other = [*engine.scheduler.taken_back]
    engine.step({"sound": 1, "damaged": len(PROMPT) - TOKENS})
    again = [*engine.scheduler.taken_back]
    engine.step({"sound": 1, "damaged": 1})

    assert (joined, other, again) == ([], [], [damaged])
    assert engine.scheduler.taken_back == []


def test_what_was_computed_on_a_load_is_saved_when_the_load_was_verified() -> None:
    engine = Layered()
    engine.keep(FakeRequest("first", PROMPT[:13]))
    longer = FakeRequest("longer", PROMPT)
    matched, _ = engine.ask(longer)
    engine.place(longer, 20, matched)

    step = engine.step({"longer": 14})
    step.begin()
    step.layers()
    engine.compute(longer, first=3)
    step.end()
    engine.receive()
    longer.num_computed_tokens = 26
    meanwhile = engine.ask(FakeRequest("meanwhile", PROMPT))
    engine.step({"longer": 1}).end()
    engine.receive()

    assert matched == meanwhile[0] == 3 * TOKENS
    assert step.reported.plan is None
    assert engine.ask(FakeRequest("again", PROMPT))[0] == FULL * TOKENS


def test_what_was_computed_on_a_damaged_load_is_saved_by_nobody() -> None:
    engine = Layered()
    engine.keep(FakeRequest("first", PROMPT[:13]))
    longer = FakeRequest("longer", PROMPT)
    matched, _ = engine.ask(longer)
    row = engine.place(longer, 20, matched)

    step = engine.step({"longer": 14})
    engine.damage(step, 1)
    step.begin()
    step.layers()
    for kv in engine.kv:
        kv[row[3:]] = 7.0  # computed on what was there
    received = step.end()
    engine.scheduler.finish_request("longer")
    engine.receive()
    engine.step({}).end()
    engine.receive()

    assert received.invalid_blocks == {row[1]}
    assert engine.ask(FakeRequest("again", PROMPT))[0] == TOKENS
    engine.offload.audit()


def test_a_step_whose_layers_did_not_wait_counts_for_nothing(engine: Layered) -> None:
    _, row, _, step = engine.join(FakeRequest("again", PROMPT))

    step.begin()
    for name in [*NAMES][:-1]:
        engine.worker.wait_layer(name)
    received = step.end()

    assert received.invalid_blocks == set(row[:FULL])


def test_a_step_that_nobody_announced_counts_for_nothing(engine: Layered) -> None:
    _, row, _, step = engine.join(FakeRequest("again", PROMPT))

    received = step.end()

    assert received.invalid_blocks == set(row[:FULL])


def test_a_load_whose_time_is_up_has_failed_and_touches_nothing_more() -> None:
    engine = Layered(wait_s=0.0)
    engine.keep(FakeRequest("first", PROMPT))
    again, row, _, step = engine.join(FakeRequest("again", PROMPT))

    received = step.run()
    counted = engine.receive()
    engine.step({}).end()

    assert received.invalid_blocks == set(row[:FULL])
    assert counted["loads_failed"] == 1
    assert not any(engine.lies_at(again, row[:FULL]))
    assert not engine.rank.busy
    assert not engine.scheduler.pending
    engine.offload.audit()


def test_a_request_that_ends_with_its_first_step_was_loaded_all_the_same(engine: Layered) -> None:
    _, _, matched, step = engine.join(FakeRequest("again", PROMPT))

    step.run()
    engine.scheduler.finish_request("again")
    counted = engine.receive()

    assert counted["tokens_loaded"] == matched
    assert "loads_failed" not in counted


def test_two_requests_on_one_prefix_load_it_each_for_itself(engine: Layered) -> None:
    requests = [FakeRequest(name, PROMPT) for name in ("one", "two")]
    rows = []
    for number, request in enumerate(requests):
        matched, joins = engine.ask(request)
        assert joins
        rows.append(engine.place(request, 20 + 10 * number, matched))
    step = engine.step({"one": 2, "two": 2})
    engine.damage(step, 2)

    received = step.run()

    assert received.invalid_blocks == {rows[0][2], rows[1][2]}
    assert [name for name, _, _ in engine.withheld] == ["one", "two"]


def test_a_hit_that_would_stall_a_step_is_loaded_apart() -> None:
    engine = Layered(blocks_max=FULL + 1)
    engine.keep(FakeRequest("first", PROMPT))
    one, two = FakeRequest("one", PROMPT), FakeRequest("two", PROMPT)

    first = engine.ask(one)
    engine.place(one, 20, first[0])
    second = engine.ask(two)
    engine.place(two, 30, second[0])
    reported = engine.step({"one": 2}).reported

    assert (first[1], second[1]) == (True, False)
    assert [loading.request for loading in reported.joined] == ["one"]
    assert [loading.request for loading in reported.loads] == ["two"]


def test_nothing_joins_behind_a_load_that_no_step_waits_for() -> None:
    engine = Layered(blocks_max=2)
    engine.keep(FakeRequest("first", PROMPT))
    long, short = FakeRequest("long", PROMPT), FakeRequest("short", PROMPT[:9])
    engine.place(long, 20, engine.ask(long)[0])

    during = engine.ask(short)
    step = engine.step({})
    step.begin()
    received = step.end()
    engine.receive()
    after = engine.ask(short)

    assert received.requests == {"long"}
    assert (during, after) == ((8, False), (8, True))


def test_a_step_joins_no_more_loads_than_a_device_has_in_flight() -> None:
    engine = Layered(blocks_max=1000)
    engine.keep(FakeRequest("first", PROMPT))

    joined = []
    for number in range(LOADS_MAX + 1):
        request = FakeRequest(f"request-{number}", PROMPT[:9])
        matched, joins = engine.ask(request)
        engine.place(request, 10 + 4 * number, matched)
        joined.append(joins)

    assert joined == [True] * LOADS_MAX + [False]


def test_a_step_waits_for_no_more_than_steps_copy_anyway(engine: Layered) -> None:
    assert joined_blocks([engine.rank.facts]) == (64 << 20) // engine.rank.facts.block_bytes


def test_a_step_after_that_is_a_step_like_any_other(engine: Layered) -> None:
    _, _, _, step = engine.join(FakeRequest("again", PROMPT))
    step.run()
    engine.receive()

    step = engine.step({"again": 1})

    assert not step.begin()
    step.layers()
    assert not step.end().invalid_blocks


@pytest.fixture
def ahead() -> Asynchronous:
    return Asynchronous()


@pytest.fixture
def planned(ahead: Asynchronous) -> tuple[Layered, Step]:
    """An engine that plans ahead, and a step that a request has joined; its results are not there.

    The step before it, of another request, has not ended either.
    """
    engine = Layered(ahead=ahead)
    engine.keep(FakeRequest("first", PROMPT))
    before = engine.step({"first": 1})
    again = FakeRequest("again", PROMPT)
    matched, joins = engine.ask(again)
    assert joins
    engine.place(again, 20, matched)
    step = engine.step({"again": 2})
    before.begin()
    before.end()
    engine.receive()
    return engine, step


def test_no_step_is_planned_on_loads_that_were_not_verified(
    planned: tuple[Layered, Step], ahead: Asynchronous
) -> None:
    engine, step = planned
    engine.step({"first": 1})
    meanwhile = [*ahead.told]

    step.run()
    engine.receive()

    assert meanwhile == [("hold", "again")]
    assert ahead.told == [("hold", "again"), ("resume", "again")]


def test_an_engine_that_plans_a_step_of_a_held_request_is_noticed(
    planned: tuple[Layered, Step],
) -> None:
    engine, _ = planned

    with pytest.raises(InvariantViolation, match="request again is in a step that was planned"):
        engine.step({"again": 1})


def test_a_request_goes_on_when_its_step_has_ended_not_when_its_load_was_given_up(
    planned: tuple[Layered, Step], ahead: Asynchronous
) -> None:
    """The results of the step before may come when the load has timed out in the books."""
    engine, step = planned
    (operation, *_) = step.reported.joined[0].operations
    engine.offload.cancel(operation)

    engine.receive()
    meanwhile = [*ahead.told]
    step.run()
    engine.receive()

    assert meanwhile == [("hold", "again")]
    assert ahead.told[-1] == ("resume", "again")


def test_what_a_step_gives_for_a_request_that_lost_its_blocks_meanwhile_is_not_used(
    planned: tuple[Layered, Step], ahead: Asynchronous
) -> None:
    engine, step = planned
    engine.step({"first": 1}, preempted=("again",))

    step.run()
    engine.receive()

    assert ahead.told == [("hold", "again"), ("discard", "again")]


def test_a_request_that_starts_over_at_once_waits_for_its_new_step(
    planned: tuple[Layered, Step], ahead: Asynchronous
) -> None:
    """As after a reset of vLLM's prefix cache, which drops what was under way itself."""
    engine, step = planned
    again = FakeRequest("again", PROMPT)
    engine.scheduler.finish_request("again")
    engine.place(again, 30, engine.ask(again)[0])
    next_step = engine.step({"again": 2}, preempted=("again",))

    step.run()
    engine.receive()
    meanwhile = [*ahead.told]
    next_step.run()
    engine.receive()

    assert meanwhile == [("hold", "again"), ("hold", "again")]
    assert ahead.told[-1] == ("resume", "again")


def test_blocks_of_an_aborted_request_are_nobody_elses_before_its_step_has_ended(
    planned: tuple[Layered, Step], ahead: Asynchronous
) -> None:
    engine, step = planned
    engine.scheduler.finish_request("again")
    meanwhile = engine.pins.count
    engine.damage(step, 3)

    invalid = step.run().invalid_blocks
    engine.receive()

    assert meanwhile == FULL + 1
    assert invalid == {23}
    assert engine.pins.count == 0
    assert ahead.told == [("hold", "again")]
    engine.offload.audit()
