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


class Choice:
    """Tokens that were chosen, where the logits are; to be read when the device is there.

    `tokens` is what the next step may compute on without anybody having read it.

    Raises:
        ValueError: there is not one wish for each row.
    """

    def __init__(self, logits: torch.Tensor, wishes: Sequence[Wish]) -> None:
        if logits.shape[0] != len(wishes):
            raise ValueError(f"{len(wishes)} wishes for {logits.shape[0]} rows, must be one each")
        scores = logits.float().log_softmax(dim=-1)
        self.tokens = scores.argmax(dim=-1)
        for row, wish in enumerate(wishes):
            if wish.temperature > 0:
                self.tokens[row] = _drawn(logits[row].float(), wish)
        taken = scores.gather(1, self.tokens[:, None])
        most = max((wish.logprobs for wish in wishes), default=0)
        likeliest = scores.topk(most)
        self._counts = [wish.logprobs for wish in wishes]
        # In doubles, which hold a token exactly: one copy for all there is to tell.
        parts = (self.tokens[:, None], taken, likeliest.indices, likeliest.values)
        self._numbers = _on_the_way_to_the_cpu(torch.cat([part.double() for part in parts], dim=1))

    def tell(self) -> list[Sampled]:
        """What was chosen, once the device has got there."""
        told = []
        for count, numbers in zip(self._counts, self._numbers.tolist(), strict=True):
            tokens, scores = numbers[2:], numbers[2 + (len(numbers) - 2) // 2 :]
            named = [
                (int(token), score)
                for token, score in zip(tokens[:count], scores[:count], strict=True)
            ]
            told.append(Sampled(int(numbers[0]), numbers[1], named))
        return told


def _on_the_way_to_the_cpu(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers in pinned memory; on a GPU they are there when its work so far is done."""
    if numbers.device.type == "cpu":
        return numbers
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return pinned.copy_(numbers, non_blocking=True)


def _drawn(logits: torch.Tensor, wish: Wish) -> torch.Tensor:
    probabilities = (logits / wish.temperature).softmax(dim=-1)
    if wish.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # A token stays if those before it have not reached the share yet: the first always does.
        ordered[ordered.cumsum(dim=-1) - ordered >= wish.top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    generator = torch.Generator(device=logits.device).manual_seed(wish.seed)
    return torch.multinomial(probabilities, 1, generator=generator)[0]
