"""Whatever comes and goes, in whatever order: every request ends once, with the right answer.

The cache is real. The model is not, but its KV can be checked: what it stores for a token depends
on all tokens before it, and what it answers on every value it has stored, so a block too many, too
few, or of somebody else changes the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import CapacityError
from penstock.runtime.copy_executor import EngineSteps, _MoverState
from penstock.runtime.rank_links import LocalLink
from penstock_serve.engine.batch import PREVIOUS
from penstock_serve.engine.engine import Engine
from penstock_serve.engine.requests import Answer, Output, Phase, Reason, Request
from penstock_serve.engine.sampling_options import Sampled, Sampling
from penstock_serve.engine.scheduler import Scheduler, SchedulerSettings
from penstock_serve.engine.steps import HandedCounts, Step, StepResult, StepTimes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.movers.base import Moved
    from penstock.transport.base import Channel
    from penstock.vocabulary.keys import OperationId
    from penstock_serve.engine.sampling_options import TokenSampling

BLOCK = 4
VOCABULARY = 13
STOP = 12


def stored(before: int, token: int) -> int:
    """What the model keeps for a token: a chain over all tokens up to it."""
    return (before * 31 + token + 1) % 1_000_003


def chosen(values: Sequence[int], wish: TokenSampling) -> int:
    """The next token: it depends on every value, and on its place."""
    total = sum(place * value for place, value in enumerate(values, start=1))
    found = (total + (wish.seed if wish.temperature else 0)) % VOCABULARY
    if wish.change is None:
        return found
    # Tokens before it count, each as often as it is there.
    found += sum(token * count for token, count in wish.change.counts) + sum(wish.change.seen)
    found %= VOCABULARY
    return found if found not in wish.change.banned else (found + 1) % VOCABULARY


class FakeWorkers:
    """Ranks whose KV is one array; their results wait until they are collected."""

    def __init__(self, kv: np.ndarray[Any, Any]) -> None:
        self._kv = kv
        self._done: list[StepResult] = []
        self._last: dict[int, int] = {}

    def submit(self, step: Step) -> None:
        read: list[list[int]] = []
        for span in step.spans:
            places = [divmod(at, BLOCK) for at in range(span.stop)]
            flat = [(span.table[block], offset) for block, offset in places]
            before = int(self._kv[flat[span.start - 1]][0]) if span.start else 0
            for at, token in enumerate(span.tokens, start=span.start):
                known = self._last[span.request] if token == PREVIOUS else token
                before = stored(before, known)
                self._kv[flat[at]] = before
            read.append([int(self._kv[place][0]) for place in flat])
        sampled = [Sampled(chosen(read[draw.span], draw.sampling), 0.0) for draw in step.draws]
        for draw, each in zip(step.draws, sampled, strict=True):
            self._last[draw.answer] = each.token
        scored = [
            [
                Sampled(target, float(read[score.span][at]))
                for at, target in enumerate(score.targets, start=step.spans[score.span].start)
            ]
            for score in step.scores
        ]
        self._done.append(StepResult(step.number, sampled, scored=scored))

    def collect(self, *, deadline: float) -> StepResult | None:  # noqa: ARG002 - it is there
        return self._done.pop(0)

    @property
    def channels(self) -> Sequence[Channel]:
        return ()

    def take_reports(self) -> list[bytes]:
        return []

    @property
    def handed(self) -> HandedCounts:
        return HandedCounts()

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def expected(request: Request, number: int) -> list[int]:
    answer = Answer(request, number, 0)
    values: list[int] = []
    for token in request.prompt:
        values.append(stored(values[-1] if values else 0, token))
    said: list[int] = []
    while len(said) < request.max_tokens and STOP not in said:
        said.append(chosen(values, answer.token_sampling()))
        answer.tokens.append(said[-1])
        values.append(stored(values[-1], said[-1]))
    return said


class LateLoads:
    """Loads onto the device whose ends are noticed some polls after their blocks have come.

    Until then a step can join them, as it can where layers arrive one after the other.
    """

    def __init__(self, mover: Any, polls: int) -> None:
        self._mover = mover
        self._polls = polls
        self._noticed: list[tuple[int, Moved]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    @property
    def busy(self) -> bool:
        return self._mover.busy or bool(self._noticed)

    def poll(self, *, budget_bytes: int) -> tuple[list[Moved], int]:
        moved, spent = self._mover.poll(budget_bytes=budget_bytes)
        waiting = [(left - 1, each) for left, each in self._noticed]
        waiting += [(self._polls, each) for each in moved]
        self._noticed = [each for each in waiting if each[0] > 0]
        return [each for left, each in waiting if left <= 0], spent

    def joinable(self, operation: OperationId, *, step_s: float) -> bool:
        assert step_s > 0
        return operation in [each.operation for _, each in self._noticed]

    def join(self, operations: Collection[OperationId]) -> None:  # noqa: ARG002
        raise AssertionError("the fake workers read blocks that are there")

    def wait_layer(self, layer: int, stream: int) -> None:  # noqa: ARG002
        raise AssertionError("the fake workers have no layers")


def notice_loads_late(engine: Engine, polls: int) -> None:
    links = engine.cache._driver.links
    assert isinstance(links, LocalLink)
    executor = links.executor
    movers = dict(executor.movers)
    movers[1, 0] = LateLoads(movers[1, 0], polls)  # type: ignore[assignment]
    executor.movers = movers
    executor._states = [_MoverState(mover) for mover in movers.values()]
    executor.steps = EngineSteps(movers)


def make_engine(*, blocks: int, host_blocks: int, flying: int) -> Engine:
    config = penstock.parse_config(f"""
        version = 1
        model.name = "fake"
        cache = {{ block_tokens = {BLOCK}, blocks = {blocks}, load_gate = "off" }}
        tiers = [{{ name = "host", kind = "memory", blocks = {host_blocks} }}]
    """)
    kv = np.zeros((blocks, BLOCK, 1), dtype=np.int64)
    scheduler = Scheduler(
        penstock.open(config, kv=kv),
        SchedulerSettings(step_tokens=12, step_requests=4, waiting_max=6, steps_in_flight=flying),
        block_tokens=BLOCK,
        block_count=blocks,
    )
    return Engine(scheduler, FakeWorkers(kv))


@dataclass(frozen=True)
class Add:
    family: int
    length: int
    max_tokens: int
    answers: int
    priority: int
    tenant: str
    store: bool
    penalty: float = 0.0
    min_tokens: int = 0
    scores: bool = False

    def request(self, number: int) -> Request:
        return Request(
            id=f"r{number}",
            prompt=tuple((self.family * 5 + at * at) % VOCABULARY for at in range(self.length)),
            max_tokens=self.max_tokens,
            min_tokens=min(self.min_tokens, self.max_tokens),
            answers=self.answers,
            sampling=Sampling(
                temperature=1.0 if self.answers > 1 else 0.0,
                seed=self.family,
                frequency_penalty=self.penalty,
                repetition_penalty=1.0 + self.penalty,
            ),
            scores_prompt=self.scores,
            stop_tokens=frozenset({STOP}),
            priority=self.priority,
            tenant=self.tenant,
            store=self.store,
        )


ADDS = st.builds(
    Add,
    family=st.integers(0, 2),
    length=st.integers(1, 30),
    max_tokens=st.integers(1, 14),
    answers=st.sampled_from([1, 1, 1, 2, 3]),
    priority=st.integers(-1, 1),
    tenant=st.sampled_from(["", "t"]),
    store=st.sampled_from([True, True, False]),
    penalty=st.sampled_from([0.0, 0.0, 0.5]),
    min_tokens=st.sampled_from([0, 0, 9]),
    scores=st.sampled_from([False, False, True]),
)
ABORTS = st.integers(0, 9)
STEPS = st.sampled_from(["step", "step", "step", "reset"])


def require_right_scores(request: Request, number: int, outputs: list[Output]) -> None:
    """Every token of a prompt but the first is scored, from all before it, before any answer."""
    found: dict[int, Sampled] = {}
    for at, output in enumerate(outputs):
        found |= dict(enumerate(output.scored, start=output.position))
        assert not output.scored or all(each.sampled is None for each in outputs[: at + 1])
    value, right = 0, {}
    for position, token in enumerate(request.prompt):
        right[position] = Sampled(token, float(value))
        value = stored(value, token)
    del right[0]
    assert found == (right if request.scores_prompt and number == 0 else {})


class World:
    """An engine, and the outputs of its requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.reported: dict[tuple[str, int], list[Output]] = {}

    def act(self, action: Add | int | str) -> None:
        if isinstance(action, Add):
            request = action.request(len(self.requests))
            try:
                self.engine.add(request)
            except CapacityError:
                return
            self.requests[request.id] = request
        elif isinstance(action, int):
            self.engine.abort(f"r{action}")
            self.aborted |= {f"r{action}"} & set(self.requests)
        elif action == "reset":
            self.engine.cache.reset("for the sake of it")
        else:
            self.step()

    def step(self) -> None:
        for output in self.engine.step():
            self.reported.setdefault((output.request, output.answer), []).append(output)
        self.engine.cache.audit()
        # An idle engine sleeps: while a request waits, a copy must be what it waits for.
        assert not self.engine.idle or not self.engine.unfinished or self.engine.cache.busy

    def finish(self) -> None:
        for _ in range(3000):
            unfinished = self.engine.unfinished
            # Once more after the last: aborts are reported by the next step.
            self.step()
            if not unfinished:
                return
        raise AssertionError(f"{self.engine.unfinished} requests never ended")

    def require_right_answers(self) -> None:
        for name, request in self.requests.items():
            for number in range(request.answers):
                outputs = self.reported[name, number]
                tokens = [each.sampled.token for each in outputs if each.sampled is not None]
                right = expected(request, number)
                assert sum(each.reason is not None for each in outputs) == 1
                assert tokens == right[: len(tokens)]
                if name not in self.aborted:
                    assert tokens == right
                    assert outputs[-1].reason is not Reason.ABORTED
                    require_right_scores(request, number, outputs)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    actions=st.lists(ADDS | ABORTS | STEPS | st.just("step"), max_size=40),
    blocks=st.sampled_from([12, 16, 40]),
    host_blocks=st.sampled_from([1, 30]),
    flying=st.sampled_from([1, 2]),
    late=st.sampled_from([0, 1, 3]),
)
def test_every_request_ends_once_with_the_right_answer_and_leaves_nothing(
    actions: list[Add | int | str], blocks: int, host_blocks: int, flying: int, late: int
) -> None:
    world = World(make_engine(blocks=blocks, host_blocks=host_blocks, flying=flying))
    if late:
        notice_loads_late(world.engine, late)

    for action in actions:
        world.act(action)
    world.finish()

    world.require_right_answers()
    assert world.engine.cache.statistics().leases == 0


def test_requests_that_give_way_come_back_and_finish() -> None:
    world = World(make_engine(blocks=12, host_blocks=30, flying=1))

    for family in range(3):
        world.act(Add(family, 20, 14, 1, 0, "", store=True))
    world.finish()

    world.require_right_answers()
    assert world.engine.scheduler.preemptions > 0


def test_blocks_are_loaded_while_full_steps_compute_other_requests() -> None:
    world = World(make_engine(blocks=12, host_blocks=30, flying=1))
    world.act(Add(0, 20, 1, 1, 0, "", store=True))
    world.finish()
    world.act(Add(1, 40, 1, 1, 0, "", store=True))  # Evicts the first from the device.
    world.finish()

    world.act(Add(2, 24, 1, 1, 0, "", store=False))
    world.act(Add(0, 20, 1, 1, 0, "", store=True))
    world.act("step")

    assert world.engine.scheduler.count(Phase.LOADING) == 1
    world.finish()
    world.require_right_answers()


def below_the_device_alone(*, late: int) -> World:
    """A world with a prompt of five blocks in host memory, of which none is on the device."""
    world = World(make_engine(blocks=12, host_blocks=30, flying=1))
    world.act(Add(0, 20, 1, 1, 0, "", store=True))
    world.finish()
    world.act(Add(1, 47, 1, 1, 0, "", store=True))
    world.finish()
    notice_loads_late(world.engine, late)
    return world


def test_a_request_joins_a_step_and_its_token_is_held_back_until_its_blocks_are_verified() -> None:
    world = below_the_device_alone(late=5)

    world.act(Add(0, 22, 3, 1, 0, "", store=True))
    world.act("step")
    world.act("step")

    scheduler = world.engine.scheduler
    assert (scheduler.joins, scheduler.flying, scheduler.count(Phase.LOADING)) == (1, 0, 1)
    assert "r2" not in {name for name, _ in world.reported}
    world.finish()
    world.require_right_answers()
    assert world.reported["r2", 0][0].cached_by_tier == (0, 20)


def test_what_was_computed_on_a_damaged_block_is_computed_again() -> None:
    world = below_the_device_alone(late=5)
    links = world.engine.cache._driver.links
    assert isinstance(links, LocalLink)
    host: Any = links.executor.stores[1]
    host.blocks([0]).buffers[0][...] ^= 1

    world.act(Add(0, 22, 3, 1, 0, "", store=True))
    world.finish()

    assert world.engine.scheduler.joins == 1
    world.require_right_answers()
    assert world.engine.cache.statistics().blocks_corrupt == 5


def test_a_step_that_others_need_waits_for_no_load_before_its_length_is_known() -> None:
    world = below_the_device_alone(late=5)
    scheduler = world.engine.scheduler
    scheduler.step_times = StepTimes()
    world.act(Add(0, 22, 3, 1, 0, "", store=True))
    world.act("step")
    world.act(Add(2, 9, 3, 1, 0, "", store=True))

    world.act("step")
    beside = scheduler.joins
    scheduler.step_times.add(9, 0, 1.0)
    world.act("step")

    assert (beside, scheduler.joins) == (0, 1)
    world.finish()
    world.require_right_answers()


def test_a_prompt_that_is_being_computed_is_waited_for_by_one_that_begins_with_it() -> None:
    world = World(make_engine(blocks=40, host_blocks=30, flying=1))
    world.act(Add(0, 30, 1, 1, 0, "", store=True))
    world.act(Add(0, 30, 1, 1, 0, "", store=True))

    world.finish()

    world.require_right_answers()
    cached = [outputs[0].cached_by_tier[0] for outputs in world.reported.values()]
    assert cached == [0, 24]


def test_a_request_that_waits_for_room_is_looked_at_when_there_is_some() -> None:
    world = World(make_engine(blocks=12, host_blocks=30, flying=1))
    world.act(Add(0, 40, 1, 1, 0, "", store=False))
    world.act(Add(1, 40, 1, 1, 0, "", store=False))

    world.finish()

    world.require_right_answers()
    assert world.engine.idle
