"""The engine on a GPU: what it answers does not depend on the way its blocks went.

The reference is the same model with the same weights on the CPU, in plain torch and float32.
What is told of a token are its twenty likeliest candidates and their log-probabilities.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from lab.bench.engine_model import EIGHT_B, Model
from penstock_serve.engine.batch import TokenSpan, lay_out
from penstock_serve.engine.cuda.lane import CudaLane
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import LOGPROBS_MAX, Sampling
from penstock_serve.engine.scheduler import SchedulerSettings
from penstock_serve.engine.steps import Step, StepResult
from penstock_serve.engine.worker import allocate_kv

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock_serve.engine.engine import Engine

pytestmark = pytest.mark.gpu

# Matrices of the reference are computed by one thread sooner than by several.
torch.set_num_threads(1)

SMALL = replace(
    EIGHT_B,
    layers=4,
    hidden=128,
    heads=8,
    kv_heads=2,
    head_dim=32,
    intermediate=192,
    vocabulary=311,
    positions=4096,
)
BLOCK = 16
BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 0.1}
"""Of a log-probability: sums in another order, and the rounding of the dtype in four layers."""
TELLING = Sampling(logprobs=LOGPROBS_MAX)
DEADLINE_S = 60.0
LONG_CYCLES = 100_000_000
"""Some 50 ms of an H200."""
SHORT_CYCLES = LONG_CYCLES // 50


@pytest.fixture(scope="module")
def models() -> dict[Any, Model]:
    made: dict[Any, Model] = {
        dtype: Model(SMALL, device="cuda", dtype=dtype, drawn_on="cpu") for dtype in BOUNDS
    }
    made["cpu"] = Model(SMALL, device="cpu", dtype=torch.float32, drawn_on="cpu")
    return made


@pytest.fixture
def engines(models: dict[Any, Model]) -> Iterator[Any]:
    """Makes engines, and closes them at the end."""
    with ExitStack() as stack:

        def make(kind: Any = torch.float32, **wishes: Any) -> Engine:
            flying = 1 if kind == "cpu" else wishes.pop("flying", 2)
            settings = SchedulerSettings(step_tokens=256, step_requests=16, steps_in_flight=flying)
            sizes = {"blocks": 400, "host_blocks": 0, "graphs": False, "load_gate": "off"} | wishes
            engine = models[kind].engine(block_tokens=BLOCK, settings=settings, **sizes)
            return stack.enter_context(engine)

        yield make


def run(engine: Engine, *requests: Request) -> dict[str, list[Output]]:
    for request in requests:
        engine.add(request)
    told: dict[str, list[Output]] = {}
    deadline = time.monotonic() + DEADLINE_S
    while engine.unfinished or engine.cache.busy:
        assert time.monotonic() < deadline
        for output in engine.step():
            told.setdefault(output.request, []).append(output)
        if engine.idle and engine.cache.busy:
            engine.cache.wait(deadline)
    engine.cache.audit()
    return told


def asked(name: str, tokens: list[int], count: int = 6, **wishes: Any) -> Request:
    given: dict[str, Any] = {"sampling": TELLING, "max_tokens": count} | wishes
    return Request(id=name, prompt=tuple(tokens), **given)


def prompt(count: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, SMALL.vocabulary, (count,), generator=draw).tolist()


def candidates(outputs: list[Output]) -> list[list[tuple[int, float]]]:
    return [output.sampled.alternatives for output in outputs if output.sampled is not None]


def difference(found: list[Output], right: list[Output]) -> float:
    """The largest between log-probabilities of the same candidate, in answers of equal tokens."""
    worst = 0.0
    for mine, other in zip(candidates(found), candidates(right), strict=True):
        known = dict(other)
        shared = [(score, known[token]) for token, score in mine if token in known]
        assert len(shared) > LOGPROBS_MAX // 2
        worst = max([worst, *(abs(one - two) for one, two in shared)])
    return worst


def tokens_of(outputs: list[Output]) -> list[int]:
    return [output.sampled.token for output in outputs if output.sampled is not None]


@pytest.mark.parametrize("graphs", [False, True])
def test_many_requests_answer_as_the_cpu_does(engines: Any, graphs: bool) -> None:  # noqa: FBT001
    requests = [asked(f"r{n}", prompt(5 + 61 * n, n), 12) for n in range(9)]

    found = run(engines(graphs=graphs), *requests)
    right = run(engines("cpu"), *requests)

    for name, outputs in right.items():
        assert tokens_of(found[name]) == tokens_of(outputs)
        assert difference(found[name], outputs) < BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_prefix_from_anywhere_gives_the_logits_of_a_fresh_one(
    engines: Any, dtype: torch.dtype
) -> None:
    engine = engines(dtype, blocks=60, host_blocks=400)
    first = prompt(640, 1)
    run(engine, asked("first", first, 1))
    longer = [*first, *prompt(9, 2)]

    near = run(engine, asked("near", longer, 1))["near"]
    run(engine, *(asked(f"other{n}", prompt(800, 10 + n), 2) for n in range(3)))
    far = run(engine, asked("far", longer, 1))["far"]
    run(engine, *(asked(f"another{n}", prompt(800, 20 + n), 2) for n in range(3)))
    again = run(engine, asked("again", longer, 1))["again"]
    fresh = run(engine, asked("fresh", longer, 1, reuse=False))["fresh"]

    assert near[0].cached_by_tier == (640, 0)
    assert far[0].cached_by_tier[1] == again[0].cached_by_tier[1] == 640
    # The same kernels on the same shapes: bit for bit.
    assert candidates(near) == candidates(far) == candidates(again)
    assert difference(far, fresh) < BOUNDS[dtype]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_joins_blocks_that_arrive_layer_by_layer(engines: Any, graphs: bool) -> None:  # noqa: FBT001
    engine = engines(torch.bfloat16, blocks=60, host_blocks=400, layer_wise="auto", graphs=graphs)
    first = prompt(640, 1)
    run(engine, asked("first", first, 1))
    longer = [*first, *prompt(9, 2)]
    near = run(engine, asked("near", longer, 6))["near"]
    found = []

    for number in range(3):
        others = range(10 * number, 10 * number + 3)
        run(engine, *(asked(f"other{n}", prompt(800, 10 + n), 2) for n in others))
        # Loads begin when this has ended, since it may use any block.
        lane = engine.workers.worker._lane
        with lane.computing():
            torch.cuda._sleep(LONG_CYCLES)
        engine.cache.steps.submitted(lane.stream)
        name = f"far{number}"
        found.append(run(engine, asked(name, longer, 6))[name])

    # The rate of the first load was not known.
    assert engine.scheduler.joins == 2
    for outputs in found:
        assert outputs[0].cached_by_tier[1] == 640
        assert tokens_of(outputs) == tokens_of(near)
        assert difference(outputs, near) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_one_block_of_another_request_is_far_outside_the_bound(
    models: dict[Any, Model], dtype: torch.dtype
) -> None:
    model = models[dtype]
    kv = allocate_kv(
        SMALL,
        model.share,
        block_count=60,
        block_tokens=BLOCK,
        dtype=dtype,
        device=model.device,
    )

    def scores(*spans: TokenSpan) -> torch.Tensor:
        batch = lay_out(spans, block_tokens=BLOCK).sent(model.device)
        logits = model.decoder.forward(batch, kv)
        assert logits is not None
        return logits[-1].float().log_softmax(dim=-1)

    tokens, table = prompt(128, 1), list(range(8))
    scores(TokenSpan(1, 0, tokens[:-1], table))
    scores(TokenSpan(2, 0, prompt(64, 2), [50, 51, 52, 53]))

    right = scores(TokenSpan(1, 127, tokens[-1:], table))
    mixed = scores(TokenSpan(1, 127, tokens[-1:], [*table[:4], 51, *table[5:]]))

    likeliest = right.topk(LOGPROBS_MAX).indices
    assert (mixed - right)[likeliest].abs().max() > 5 * BOUNDS[dtype]


def test_a_pool_that_is_far_too_small_changes_no_answer(engines: Any) -> None:
    requests = [asked(f"r{n}", prompt(300, n), 40) for n in range(12)]
    small = engines(blocks=64, host_blocks=600)

    found = run(small, *requests)
    right = run(engines("cpu"), *requests)

    assert small.scheduler.preemptions > 0
    for name, outputs in right.items():
        assert tokens_of(found[name]) == tokens_of(outputs)
        assert difference(found[name], outputs) < BOUNDS[torch.float32]


def test_a_graph_gives_the_logits_of_a_step_that_is_launched(engines: Any) -> None:
    requests = [asked(f"r{n}", prompt(200 + n, n), 20) for n in range(8)]

    launched = run(engines(torch.bfloat16), *requests)
    replayed = run(engines(torch.bfloat16, graphs=True), *requests)

    for name, outputs in launched.items():
        count = 1 + sum(1 for _ in zip(tokens_of(outputs), tokens_of(replayed[name]), strict=True))
        assert count == 21
        # Up to the first token on which two candidates that are as good differ.
        same = 0
        while same < 20 and tokens_of(outputs)[same] == tokens_of(replayed[name])[same]:
            same += 1
        assert same > 0
        found = difference(replayed[name][:same], outputs[:same])
        assert found < BOUNDS[torch.bfloat16]


def test_two_steps_in_flight_answer_as_one_at_a_time(engines: Any) -> None:
    requests = [
        asked("greedy", prompt(100, 1), 30),
        asked("seeded", prompt(90, 2), 30, sampling=Sampling(temperature=1.0, seed=5)),
        asked("stopped", prompt(80, 3), 30),
    ]

    one = run(engines(flying=1), *requests)
    stop = tokens_of(one["stopped"])[7]
    requests[2] = msgspec.structs.replace(requests[2], stop_tokens=frozenset({stop}))
    two = run(engines(flying=2, graphs=True), *requests)

    assert tokens_of(one["greedy"]) == tokens_of(two["greedy"])
    assert tokens_of(one["seeded"]) == tokens_of(two["seeded"])
    ended = tokens_of(one["stopped"]).index(stop) + 1
    assert tokens_of(two["stopped"]) == tokens_of(one["stopped"])[:ended]
    assert two["stopped"][-1].reason is Reason.STOP


def test_several_answers_share_their_prompt(engines: Any) -> None:
    request = asked("n", prompt(70, 3), 12, answers=4)

    told = run(engines(host_blocks=100), request)["n"]
    right = run(engines("cpu"), asked("one", prompt(70, 3), 12))["one"]

    for number in range(4):
        mine = [output for output in told if output.answer == number]
        assert tokens_of(mine) == tokens_of(right)


def test_an_aborted_request_gives_everything_back(engines: Any) -> None:
    engine = engines(host_blocks=200)
    engine.add(asked("gone", prompt(500, 5), 50))
    engine.add(asked("stays", prompt(300, 6), 5))
    for _ in range(3):
        engine.step()

    engine.abort("gone")
    told = run(engine)

    assert len(tokens_of(told["stays"])) == 5
    assert engine.cache.statistics().leases == 0


def test_a_step_that_the_device_does_not_end_is_given_up_and_can_end_later(engines: Any) -> None:
    engine = engines()
    run(engine, asked("warm", prompt(40, 1)))
    worker = engine.workers.worker
    step = Step(1, [TokenSpan(0, 0, prompt(8, 2), [0])], [])
    # What a first step of its shape takes (kernels, pinned memory) might wait for the device.
    worker.execute(step)
    with worker._lane.computing():
        torch.cuda._sleep(LONG_CYCLES)

    pending = worker.submit(step)
    early = pending.result(time.monotonic() + 0.001)
    late = pending.result(time.monotonic() + DEADLINE_S)
    told = run(engine, asked("after", prompt(40, 3)))

    assert early is None
    assert late == StepResult(1, [])
    assert len(tokens_of(told["after"])) == 6


def test_a_step_is_heard_of_while_the_next_one_is_computed() -> None:
    lane = CudaLane(torch.device("cuda", torch.cuda.current_device()))
    heard_in_time = 0
    with lane.computing():
        for _ in range(10):
            torch.cuda._sleep(SHORT_CYCLES)
            first = lane.mark()
            torch.cuda._sleep(LONG_CYCLES)
            second = lane.mark()
            assert first.wait(DEADLINE_S)
            heard_in_time += not torch.cuda.current_stream().query()
            assert second.wait(DEADLINE_S)

    # Not all ten: the machine may pause for longer than a step takes.
    assert heard_in_time >= 6
