"""From logits to the next token, for all requests of a step at once.

Greedy requests take the largest logit. The others draw from their own generator, so that a
request with a seed answers the same whatever runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request wants its tokens chosen.

    | wish        | meaning                                                             |
    |-------------|---------------------------------------------------------------------|
    | temperature | 0 takes the most likely token; above it, the larger the more random  |
    | top_p       | only the likeliest tokens that together have this probability        |
    | seed        | the same seed gives the same answer                                  |
    | logprobs    | so many alternatives are told with each token                        |
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature is {self.temperature}, must be from 0 to 2")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, must be above 0 and at most 1")
        if not 0 <= self.logprobs <= LOGPROBS_MAX:
            raise ValueError(f"logprobs is {self.logprobs}, must be from 0 to {LOGPROBS_MAX}")


LOGPROBS_MAX = 20


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """A token that was chosen."""

    token: int
    logprob: float
    alternatives: list[tuple[int, float]] = []
    """The likeliest tokens and their log-probabilities, as many as were asked for."""


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """How the next token of one request is to be chosen; travels with the step."""

    temperature: float
    top_p: float
    seed: int
    """Of this one token: drawn anew for each position, so that replays agree."""
    logprobs: int


def sample(logits: torch.Tensor, wishes: Sequence[Wish]) -> list[Sampled]:
    """Chooses a token for every row.

    Raises:
        ValueError: there is not one wish for each row.
    """
    if logits.shape[0] != len(wishes):
        raise ValueError(f"{len(wishes)} wishes for {logits.shape[0]} rows, must be one each")
    scores = logits.float().log_softmax(dim=-1)
    chosen = scores.argmax(dim=-1)
    for row, wish in enumerate(wishes):
        if wish.temperature > 0:
            chosen[row] = _drawn(logits[row].float(), wish)
    taken = scores.gather(1, chosen[:, None])[:, 0].tolist()
    tokens = chosen.tolist()
    return [
        Sampled(tokens[row], taken[row], _likeliest(scores[row], wish.logprobs))
        for row, wish in enumerate(wishes)
    ]


def _drawn(logits: torch.Tensor, wish: Wish) -> torch.Tensor:
    probabilities = (logits / wish.temperature).softmax(dim=-1)
    if wish.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # A token stays if those before it have not reached the share yet: the first always does.
        ordered[ordered.cumsum(dim=-1) - ordered >= wish.top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    generator = torch.Generator(device=logits.device).manual_seed(wish.seed)
    return torch.multinomial(probabilities, 1, generator=generator)[0]


def _likeliest(scores: torch.Tensor, count: int) -> list[tuple[int, float]]:
    if not count:
        return []
    found = scores.topk(count)
    return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))
