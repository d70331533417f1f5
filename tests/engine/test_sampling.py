"""Choosing tokens: greedy, by lot, and the same again with the same seed."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.sampling import Choice, Sampled, Sampling, Wish

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 4.9]])
GREEDY = Wish(0.0, 1.0, 0, 0)


def sample(logits: torch.Tensor, wishes: list[Wish]) -> list[Sampled]:
    return Choice(logits, wishes).tell()


def test_without_temperature_the_likeliest_token_is_taken() -> None:
    found = sample(LOGITS, [GREEDY, GREEDY])

    assert [each.token for each in found] == [1, 0]
    assert found[0].logprob == pytest.approx(LOGITS[0].log_softmax(0)[1].item())


def test_a_seed_draws_the_same_token_whatever_stands_beside_it() -> None:
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(1))
    wish = Wish(1.0, 1.0, 77, 0)

    alone = sample(logits[1:2], [wish])[0]
    among = sample(logits, [Wish(1.0, 1.0, 5, 0), wish, GREEDY])[1]

    assert alone.token == among.token


def test_seeds_draw_different_tokens_as_often_as_the_model_says() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1]]))

    drawn = [sample(logits, [Wish(1.0, 1.0, seed, 0)])[0].token for seed in range(2000)]

    shares = [drawn.count(token) / 2000 for token in range(3)]
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.04)


def test_top_p_leaves_the_likeliest_tokens_that_reach_the_share() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.25, 0.15]]))

    def drawn(top_p: float) -> set[int]:
        return {sample(logits, [Wish(1.0, top_p, seed, 0)])[0].token for seed in range(300)}

    assert drawn(0.4) == {1}
    assert drawn(0.6) == {1, 2}
    assert drawn(0.8) == {1, 2, 3}
    assert drawn(1.0) == {0, 1, 2, 3}


def test_a_low_temperature_comes_near_the_likeliest_token() -> None:
    drawn = {sample(LOGITS[:1], [Wish(0.05, 1.0, seed, 0)])[0].token for seed in range(100)}

    assert drawn == {1}


def test_alternatives_are_the_likeliest_in_order() -> None:
    found = sample(LOGITS, [Wish(0.0, 1.0, 0, 2), GREEDY])

    assert [token for token, _ in found[0].alternatives] == [1, 3]
    assert found[0].alternatives[0][1] == pytest.approx(found[0].logprob)
    assert found[1].alternatives == []


def test_each_row_needs_a_wish() -> None:
    with pytest.raises(ValueError, match="1 wishes for 2 rows"):
        sample(LOGITS, [GREEDY])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"temperature": 2.1}, "temperature is 2.1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"logprobs": 21}, "logprobs is 21"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(wrong: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Sampling(**wrong)  # type: ignore[arg-type]
