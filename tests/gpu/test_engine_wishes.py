"""How tokens are chosen on a GPU: penalties, biases, bans, and prompts that are scored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock_serve.engine.sampling_options import Sampling
from tests.gpu.test_engine import BOUNDS, asked, engines, models, prompt, run

pytestmark = pytest.mark.gpu

__all__ = ["engines", "models"]

STOP = 7


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("flying", [1, 2])
def test_tokens_are_chosen_as_on_the_cpu(engines: Any, *, graphs: bool, flying: int) -> None:
    wishes = [
        Sampling(repetition_penalty=1.6, frequency_penalty=0.8, presence_penalty=0.3),
        Sampling(logit_bias=((STOP, 90.0), (11, 85.0)), frequency_penalty=1.5),
        Sampling(),
    ]
    requests = [
        asked(
            f"r{number}",
            prompt(40 + 30 * number, number),
            20,
            sampling=sampling,
            stop_tokens=frozenset({STOP}),
            min_tokens=9,
        )
        for number, sampling in enumerate(wishes)
    ]

    found = run(engines(graphs=graphs, flying=flying), *requests)
    right = run(engines("cpu"), *requests)

    for request in requests:
        tokens, known = (
            [output.sampled.token for output in told[request.id] if output.sampled is not None]
            for told in (found, right)
        )
        assert tokens == known
        assert len(tokens) >= 9
        assert STOP not in tokens[:9]


@pytest.mark.parametrize("graphs", [False, True])
def test_draws_stay_within_what_is_left_of_the_candidates(engines: Any, *, graphs: bool) -> None:
    strange = [
        Sampling(temperature=2.0, top_k=1),
        Sampling(temperature=2.0, min_p=1.0),
        Sampling(temperature=2.0, top_p=1e-300),
        Sampling(temperature=1e-300),
    ]
    requests = [
        asked(f"r{number}", prompt(50, 3), 12, sampling=sampling)
        for number, sampling in enumerate([Sampling(), *strange])
    ]

    told = run(engines(graphs=graphs), *requests)

    tokens = [
        [output.sampled.token for output in told[request.id] if output.sampled is not None]
        for request in requests
    ]
    assert tokens == [tokens[0]] * len(requests)


@pytest.mark.parametrize("graphs", [False, True])
def test_prompts_are_scored_as_on_the_cpu(engines: Any, *, graphs: bool) -> None:
    engine = engines(graphs=graphs)
    run(engine, asked("before", prompt(300, 5)))
    scored = asked("scored", prompt(300, 5), 4, scores_prompt=True)
    beside = asked("beside", prompt(30, 6), 40)

    found = run(engine, scored, beside)
    right = run(engines("cpu"), scored)

    def told(outputs: Any) -> dict[int, float]:
        return {o.position + at: each.logprob for o in outputs for at, each in enumerate(o.scored)}

    mine, known = told(found["scored"]), told(right["scored"])
    assert list(mine) == list(known) == list(range(1, 300))
    assert max(abs(mine[at] - known[at]) for at in known) < BOUNDS[torch.float32]
