"""Choosing tokens: greedy, by lot, and the same again with the same seed."""

from __future__ import annotations

import pytest
import torch

from penstock_serve.engine.sampling import SampledBatch, scored
from penstock_serve.engine.sampling_options import Sampled, Sampling, TokenSampling

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 4.9]])
GREEDY = TokenSampling(0.0, 1.0, 0, 0)


def sample(logits: torch.Tensor, wishes: list[TokenSampling]) -> list[Sampled]:
    return SampledBatch(logits, wishes).read()


def test_without_temperature_the_likeliest_token_is_taken() -> None:
    found = sample(LOGITS, [GREEDY, GREEDY])

    assert [each.token for each in found] == [1, 0]
    assert found[0].logprob == pytest.approx(LOGITS[0].log_softmax(0)[1].item())


def test_a_seed_draws_the_same_token_whatever_stands_beside_it() -> None:
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(1))
    wish = TokenSampling(1.0, 1.0, 77, 0)

    alone = sample(logits[1:2], [wish])[0]
    among = sample(logits, [TokenSampling(1.0, 1.0, 5, 0), wish, GREEDY])[1]

    assert alone.token == among.token


def test_seeds_draw_different_tokens_as_often_as_the_model_says() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1]]))

    drawn = [sample(logits, [TokenSampling(1.0, 1.0, seed, 0)])[0].token for seed in range(2000)]

    shares = [drawn.count(token) / 2000 for token in range(3)]
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.04)


def test_top_p_leaves_the_likeliest_tokens_that_reach_the_share() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.25, 0.15]]))

    def drawn(top_p: float) -> set[int]:
        return {
            sample(logits, [TokenSampling(1.0, top_p, seed, 0)])[0].token for seed in range(300)
        }

    assert drawn(0.4) == {1}
    assert drawn(0.6) == {1, 2}
    assert drawn(0.8) == {1, 2, 3}
    assert drawn(1.0) == {0, 1, 2, 3}


def test_a_low_temperature_comes_near_the_likeliest_token() -> None:
    drawn = {
        sample(LOGITS[:1], [TokenSampling(0.05, 1.0, seed, 0)])[0].token for seed in range(100)
    }

    assert drawn == {1}


def test_alternatives_are_the_likeliest_in_order() -> None:
    found = sample(LOGITS, [TokenSampling(0.0, 1.0, 0, 2), GREEDY])

    assert [token for token, _ in found[0].alternatives] == [1, 3]
    assert found[0].alternatives[0][1] == pytest.approx(found[0].logprob)
    assert found[1].alternatives == []


def test_top_k_leaves_so_many_of_the_likeliest_tokens() -> None:
    def drawn(top_k: int, top_p: float = 1.0) -> set[int]:
        wishes = [TokenSampling(2.0, top_p, seed, 0, top_k=top_k) for seed in range(300)]
        return {sample(LOGITS[:1], [wish])[0].token for wish in wishes}

    assert drawn(1) == {1}
    assert drawn(2) == {1, 3}
    assert drawn(0) == drawn(4) == drawn(99) == {0, 1, 2, 3}
    # `top_p` is a share of what `top_k` leaves: 0.62 of two tokens, 0.46 of all.
    assert drawn(2, top_p=0.6) == {1}


def test_min_p_leaves_tokens_that_are_likely_enough_beside_the_likeliest() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.25, 0.15]]))

    def drawn(min_p: float) -> set[int]:
        wishes = [TokenSampling(1.0, 1.0, seed, 0, min_p=min_p) for seed in range(300)]
        return {sample(logits, [wish])[0].token for wish in wishes}

    assert drawn(1.0) == {1}
    assert drawn(0.4) == {1, 2}
    assert drawn(0.01) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "wish",
    [
        TokenSampling(1e-300, 1.0, 1, 0),
        TokenSampling(1e-5, 1.0, 1, 0),
        TokenSampling(2.0, 1e-300, 1, 0),
        TokenSampling(1.0, 1e-300, 1, 0, top_k=1, min_p=1.0),
    ],
)
def test_numbers_that_are_next_to_nothing_leave_the_likeliest_token(wish: TokenSampling) -> None:
    assert [found.token for found in sample(LOGITS * 1e6, [wish, wish])] == [1, 0]


def changed(sampling: Sampling, answer: list[int], banned: list[int]) -> list[int]:
    """The tokens in the order of their likelihood, after the change."""
    change = sampling.change([2], answer, banned)
    order: list[int] = []
    while len(order) < 4:
        base = LOGITS[:1] + torch.tensor([-1e6 if token in order else 0.0 for token in range(4)])
        order += [sample(base, [TokenSampling(0.0, 1.0, 0, 0, change=change)])[0].token]
    return order


def test_penalties_make_tokens_less_likely_that_are_there_already() -> None:
    def order(answer: list[int], **wishes: float) -> list[int]:
        return changed(Sampling(**wishes), answer, [])  # type: ignore[arg-type]

    assert order([1, 1, 3]) == [1, 3, 2, 0]
    # Logits are 0, 3, 1, 2; the prompt is token 2 and is no part of the answer.
    assert order([1, 1, 3], presence_penalty=1.25) == [1, 2, 3, 0]
    assert order([1, 1, 3], frequency_penalty=1.5) == [2, 3, 0, 1]
    assert order([3], presence_penalty=-2) == [3, 1, 2, 0]
    assert order([1], repetition_penalty=2) == [3, 1, 2, 0]
    assert order([], repetition_penalty=0.1) == [2, 1, 3, 0]


def test_a_bias_moves_tokens_and_a_ban_outweighs_it() -> None:
    bias = Sampling(logit_bias=((0, 100.0), (1, -100.0)))

    assert changed(bias, [], []) == [0, 3, 2, 1]
    assert changed(bias, [], [0])[0] == 3
    assert changed(Sampling(), [], [1, 3])[0] == 2


def test_log_probabilities_are_those_of_the_model_whatever_is_changed() -> None:
    change = Sampling(logit_bias=((0, 100.0),)).change([], [], [])

    [found] = sample(LOGITS[:1], [TokenSampling(0.0, 1.0, 0, 1, change=change)])

    assert found.token == 0
    assert found.logprob == pytest.approx(LOGITS[0].log_softmax(0)[0].item())
    assert [token for token, _ in found.alternatives] == [1]


def test_a_change_of_one_request_leaves_the_others_and_the_logits_alone() -> None:
    before = LOGITS.clone()
    change = Sampling(logit_bias=((2, 100.0),)).change([], [], [])

    found = sample(LOGITS, [GREEDY, TokenSampling(0.0, 1.0, 0, 0, change=change)])

    assert [each.token for each in found] == [1, 2]
    assert torch.equal(LOGITS, before)


def test_tokens_that_are_known_are_scored() -> None:
    found = scored(LOGITS, [3, 0], logprobs=2).read()

    assert [each.token for each in found] == [3, 0]
    assert found[0].logprob == pytest.approx(LOGITS[0].log_softmax(0)[3].item())
    assert [token for token, _ in found[0].alternatives] == [1, 3]


def test_each_row_needs_a_wish() -> None:
    with pytest.raises(ValueError, match="1 options for 2 rows"):
        sample(LOGITS, [GREEDY])


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"temperature": 2.1}, "temperature is 2.1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, must be from 0.01 to 100"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias has 1 token"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(wrong: dict[str, float], reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        Sampling(**wrong)  # type: ignore[arg-type]
