"""The engine on a real model and a real cache: what it answers does not depend on the way."""

from __future__ import annotations

import time
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from penstock_serve.engine.architecture import read_architecture, share_of
from penstock_serve.engine.checkpoints import RankWeights, SafetensorsCheckpoint
from penstock_serve.engine.engine import Engine, LocalWorkers
from penstock_serve.engine.model import Alone, Decoder
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import LOGPROBS_MAX, Sampling
from penstock_serve.engine.scheduler import Scheduler, SchedulerSettings
from penstock_serve.engine.worker import Worker, allocate_kv, kv_tier

BLOCK = 8
CPU = torch.device("cpu")
# float32 on other kernels: sums in another order.
BOUND = 2e-4
TELLING = Sampling(logprobs=LOGPROBS_MAX)
SOON_S = 300.0
"""Longer than anything takes that works: a busy machine is no failure."""


def make_engine(folder: Any, *, blocks: int = 64, host_blocks: int = 64, **settings: int) -> Engine:
    architecture = read_architecture(folder)
    share = share_of(architecture, rank=0, ranks=1)
    weights = RankWeights(
        SafetensorsCheckpoint(folder),
        share,
        head_dim=architecture.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    kv = allocate_kv(
        architecture,
        share,
        block_count=blocks,
        block_tokens=BLOCK,
        dtype=torch.float32,
        device=CPU,
    )
    config = penstock.parse_config(
        f"""
        version = 1
        model.name = "small"
        cache = {{ block_tokens = {BLOCK}, blocks = {blocks}, load_gate = "off" }}
        tiers = [{{ name = "host", kind = "memory", blocks = {host_blocks} }}]
        """
    )
    cache = penstock.open(config, kv=kv_tier(architecture, share, kv, block_tokens=BLOCK))
    worker = Worker(Decoder(architecture, weights, Alone(share)), kv, block_tokens=BLOCK)
    bounds: dict[str, int] = {"step_tokens": 64, "step_requests": 16, **settings}
    scheduler = Scheduler(
        cache, SchedulerSettings(**bounds), block_tokens=BLOCK, block_count=blocks
    )
    return Engine(scheduler, LocalWorkers(worker))


def run(engine: Engine, *requests: Request) -> dict[tuple[str, int], list[Output]]:
    for request in requests:
        engine.add(request)
    reported: dict[tuple[str, int], list[Output]] = {}
    deadline = time.monotonic() + SOON_S
    while engine.unfinished:
        assert time.monotonic() < deadline
        for output in engine.step():
            reported.setdefault((output.request, output.answer), []).append(output)
    engine.cache.audit()
    return reported


def require_right_logits(outputs: list[Output], model: Any, prompt: tuple[int, ...]) -> None:
    """Compares what was told of each token's logits with those of the reference, given the same."""
    tokens = tokens_of(outputs)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    expected = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    for output, row in zip(outputs, expected, strict=True):
        assert output.sampled is not None
        named = [token for token, _ in output.sampled.alternatives]
        reported = torch.tensor([score for _, score in output.sampled.alternatives])
        assert len(named) == LOGPROBS_MAX
        torch.testing.assert_close(reported, row[named], atol=BOUND, rtol=0)


def tokens_of(outputs: list[Output]) -> list[int]:
    return [output.sampled.token for output in outputs if output.sampled is not None]


def prompt(count: int, seed: int) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 211, (count,), generator=draw).tolist())


def reference(model: Any, tokens: tuple[int, ...], count: int) -> list[int]:
    found = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(tokens) :]


def require_greedy(outputs: list[Output], model: Any, prompt: tuple[int, ...]) -> None:
    """Each token is the one that the reference likes best after those before it.

    Which is to say that `reference` would answer the same, in one pass instead of one a token.
    """
    tokens = tokens_of(outputs)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    assert tokens == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def test_many_requests_answer_as_each_would_alone(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    requests = [
        Request(id=f"r{n}", prompt=prompt(5 + 13 * n, n), max_tokens=6 + n) for n in range(6)
    ]

    reported = run(make_engine(folder), *requests)

    for request in requests:
        answer = reported[request.id, 0]
        require_greedy(answer, model, request.prompt)
        assert len(tokens_of(answer)) == request.max_tokens
        assert [output.reason for output in answer] == [None] * (len(answer) - 1) + [Reason.LENGTH]


def test_a_pool_that_is_far_too_small_changes_no_answer(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    requests = [Request(id=f"r{n}", prompt=prompt(30, n), max_tokens=30) for n in range(8)]
    engine = make_engine(folder, blocks=18)

    reported = run(engine, *requests)

    assert engine.scheduler.preemptions > 0
    for request in requests:
        assert len(tokens_of(reported[request.id, 0])) == 30
        require_greedy(reported[request.id, 0], model, request.prompt)


def test_a_second_turn_finds_the_first_on_the_device_or_in_host_memory(
    checkpoint_of: Any,
) -> None:
    folder, model = checkpoint_of("llama")
    engine = make_engine(folder, blocks=20)
    first = Request(id="first", prompt=prompt(80, 1), max_tokens=8)
    answer = tokens_of(run(engine, first)["first", 0])
    longer = (*first.prompt, *answer, *prompt(10, 2))

    again: dict[str, Any] = {"prompt": longer, "max_tokens": 4, "sampling": TELLING}
    near = run(engine, Request(id="near", **again))["near", 0]
    run(engine, *(Request(id=f"o{n}", prompt=prompt(90, 10 + n), max_tokens=4) for n in range(4)))
    far = run(engine, Request(id="far", **again))["far", 0]

    assert near[0].cached_by_tier[0] == 80
    assert far[0].cached_by_tier[1] >= 80
    assert tokens_of(near) == tokens_of(far) == reference(model, longer, 4)
    require_right_logits(near, model, longer)
    require_right_logits(far, model, longer)


def test_a_prefix_from_anywhere_gives_the_same_logits_bit_by_bit(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    engine = make_engine(folder, blocks=20)
    asked: dict[str, Any] = {"prompt": prompt(90, 1), "max_tokens": 4, "sampling": TELLING}
    run(engine, Request(id="fresh", **asked))

    found = [run(engine, Request(id="device", **asked))["device", 0]]
    for life in ("demoted", "demoted again"):
        others = range(len(found) * 10, len(found) * 10 + 4)
        run(engine, *(Request(id=f"o{n}", prompt=prompt(90, n), max_tokens=4) for n in others))
        found.append(run(engine, Request(id=life, **asked))[life, 0])

    # The same kernels on the same shapes: eleven blocks are found, two tokens are computed.
    assert [answer[0].cached_by_tier for answer in found] == [(88, 0), (0, 88), (0, 88)]
    reported = [[output.sampled for output in answer] for answer in found]
    assert reported[0] == reported[1] == reported[2]
    require_right_logits(found[0], model, asked["prompt"])


def test_the_next_turn_finds_all_full_blocks_of_an_answer(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    engine = make_engine(folder)
    first = Request(id="first", prompt=prompt(12, 1), max_tokens=30)
    answer = tokens_of(run(engine, first)["first", 0])

    longer = (*first.prompt, *answer, *prompt(5, 2))
    again = run(engine, Request(id="again", prompt=longer, max_tokens=1))["again", 0]

    # The KV of the last token was never computed.
    assert again[0].cached_by_tier[0] == (12 + 30 - 1) // BLOCK * BLOCK


def test_two_steps_in_flight_change_no_answer(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    requests = [Request(id=f"r{n}", prompt=prompt(30, n), max_tokens=30) for n in range(8)]
    stop = reference(model, prompt(12, 4), 8)[5]
    requests.append(
        Request(id="stops", prompt=prompt(12, 4), max_tokens=8, stop_tokens=frozenset({stop}))
    )
    engine = make_engine(folder, blocks=18, steps_in_flight=2)

    reported = run(engine, *requests)

    assert engine.scheduler.preemptions > 0
    for request in requests:
        answer = tokens_of(reported[request.id, 0])
        ends = answer.index(stop) + 1 if request.stop_tokens else request.max_tokens
        assert len(answer) == ends
        require_greedy(reported[request.id, 0], model, request.prompt)


def test_requests_are_removed_when_their_end_is_reported_while_others_are_computed(
    checkpoint_of: Any,
) -> None:
    folder, _ = checkpoint_of("llama")
    engine = make_engine(folder, steps_in_flight=2)
    engine.add(Request(id="goes on", prompt=prompt(20, 1), max_tokens=30))
    engine.add(Request(id="ends", prompt=prompt(20, 2), max_tokens=4))
    while not any(output.reason for output in engine.step()):
        pass

    unfinished = engine.unfinished
    reported = run(engine, Request(id="ends", prompt=prompt(20, 2), max_tokens=4))

    assert unfinished == 1
    assert len(tokens_of(reported["ends", 0])) == 4


def test_several_answers_share_their_prompt_and_differ(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    request = Request(
        id="n",
        prompt=prompt(20, 3),
        max_tokens=12,
        answers=4,
        sampling=Sampling(temperature=1.0, seed=5),
    )
    engine = make_engine(folder)

    reported = run(engine, request)
    again = run(engine, request)

    answers = [tokens_of(reported["n", number]) for number in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert answers == [tokens_of(again["n", number]) for number in range(4)]


def test_greedy_forks_agree_with_the_reference(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("qwen3")
    request = Request(id="n", prompt=prompt(21, 3), max_tokens=9, answers=3)

    reported = run(make_engine(folder), request)

    for number in range(3):
        assert tokens_of(reported["n", number]) == reference(model, request.prompt, 9)


def test_a_stop_token_ends_an_answer(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    expected = reference(model, prompt(12, 4), 8)
    stop = next(token for token in expected[2:] if token not in expected[:2])
    request = Request(id="s", prompt=prompt(12, 4), max_tokens=8, stop_tokens=frozenset({stop}))

    answer = run(make_engine(folder), request)["s", 0]

    assert tokens_of(answer) == expected[: expected.index(stop) + 1]
    assert answer[-1].reason is Reason.STOP


def test_an_aborted_request_gives_everything_back(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    engine = make_engine(folder)
    engine.add(Request(id="gone", prompt=prompt(50, 5), max_tokens=50, answers=3))
    engine.add(Request(id="stays", prompt=prompt(50, 6), max_tokens=5))
    for _ in range(4):
        engine.step()

    engine.abort("gone")
    reported = run(engine)

    assert ("stays", 0) in reported
    assert engine.cache.statistics().leases == 0


def test_more_urgent_requests_run_first(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    engine = make_engine(folder, step_tokens=16, step_requests=1)
    engine.add(Request(id="late", prompt=prompt(16, 1), max_tokens=2))
    engine.add(Request(id="urgent", prompt=prompt(16, 2), max_tokens=2, priority=1))

    ended = [
        output.request for _ in range(20) for output in engine.step() if output.reason is not None
    ]

    assert ended == ["urgent", "late"]


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1,), "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": (1,), "answers": 17}, "n is 17"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(wrong: dict[str, Any], reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        Request(id="x", **wrong)


def test_a_request_that_can_never_fit_is_refused_at_once(checkpoint_of: Any) -> None:
    folder, _ = checkpoint_of("llama")
    engine = make_engine(folder, blocks=4)

    with pytest.raises(ValueError, match="at most 32"):
        engine.add(Request(id="x", prompt=prompt(30, 1), max_tokens=3))

    assert engine.unfinished == 0


def test_stop_tokens_wait_for_the_least_number_of_tokens(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    said = reference(model, prompt(20, 3), 12)
    stop = frozenset({said[2]})
    asked: dict[str, Any] = {"prompt": prompt(20, 3), "max_tokens": 12, "stop_tokens": stop}

    reported = run(
        make_engine(folder),
        Request(id="soon", **asked),
        Request(id="later", **asked, min_tokens=6),
    )

    assert tokens_of(reported["soon", 0]) == said[:3]
    later = tokens_of(reported["later", 0])
    assert len(later) >= 6
    assert not stop & set(later[:6])
    assert later[:2] == said[:2]


def test_penalties_are_those_of_the_reference(checkpoint_of: Any) -> None:
    folder, model = checkpoint_of("llama")
    sampling = Sampling(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.9)
    asked = prompt(30, 5)

    requests = [Request(id=f"r{n}", prompt=asked, max_tokens=16, sampling=sampling) for n in (0, 1)]
    one = run(make_engine(folder), *requests)
    two = run(make_engine(folder, steps_in_flight=2), *requests)

    tokens = list(asked)
    for _ in range(16):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        for token in set(tokens):
            logits[token] *= 1 / 1.7 if logits[token] > 0 else 1.7
        for token in tokens[30:]:
            logits[token] -= 0.9
        for token in set(tokens[30:]):
            logits[token] -= 0.4
        tokens.append(int(logits.argmax()))
    assert tokens[30:] != reference(model, asked, 16)
    for reported in (one, two):
        assert tokens_of(reported["r0", 0]) == tokens_of(reported["r1", 0]) == tokens[30:]


@pytest.mark.parametrize(("blocks", "flying"), [(64, 1), (64, 2), (22, 1)])
def test_log_probabilities_of_a_prompt_are_those_of_the_reference(
    checkpoint_of: Any, blocks: int, flying: int
) -> None:
    folder, model = checkpoint_of("llama")
    engine = make_engine(folder, blocks=blocks, steps_in_flight=flying)
    # It is cached, and computed once more all the same.
    run(engine, Request(id="first", prompt=prompt(150, 7), max_tokens=2))

    scored = Request(
        id="scored", prompt=prompt(150, 7), max_tokens=3, sampling=TELLING, scores_prompt=True
    )
    reported = run(engine, scored, Request(id="beside", prompt=prompt(20, 8), max_tokens=20))

    with torch.no_grad():
        right = model(torch.tensor([scored.prompt])).logits[0].log_softmax(dim=-1)
    outputs = [output for output in reported["scored", 0] if output.scored]
    assert [output.position for output in outputs] == sorted(o.position for o in outputs)
    found = {o.position + at: each for o in outputs for at, each in enumerate(o.scored)}
    assert list(found) == list(range(1, 150))
    for position, each in found.items():
        assert each.token == scored.prompt[position]
        assert each.logprob == pytest.approx(right[position - 1, each.token].item(), abs=BOUND)
        best = right[position - 1].max().item()
        assert each.alternatives[0][1] == pytest.approx(best, abs=BOUND)
    answer = [output for output in reported["scored", 0] if not output.scored]
    assert tokens_of(answer) == reference(model, scored.prompt, 3)
    assert answer[0].cached_by_tier == (0, 0)
    assert len(tokens_of(reported["beside", 0])) == 20
    require_greedy(reported["beside", 0], model, prompt(20, 8))


def test_time_in_steps_is_counted_alone_and_by_requests_but_not_while_there_are_none(
    checkpoint_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint_of("llama")
    clock = count()
    now = SimpleNamespace(monotonic=lambda: next(clock) / 100)
    monkeypatch.setattr("penstock_serve.engine.engine.time", now)
    engine = make_engine(folder)

    run(engine, *(Request(id=f"r{n}", prompt=prompt(8, n), max_tokens=6) for n in range(2)))
    two, places = engine.step_s, engine.place_s
    assert 0 < two < places <= 2 * two

    engine.step()
    assert engine.idle
    for _ in range(10_000):
        next(clock)
    run(engine, Request(id="one", prompt=prompt(8, 3), max_tokens=6))
    assert two < engine.step_s < two + 10
    assert engine.place_s - places == pytest.approx(engine.step_s - two)
