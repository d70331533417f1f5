"""Options of sampling, and a token that was sampled: values without torch.

| value      | is                                                                    |
|------------|-----------------------------------------------------------------------|
| `Sampling` | what a request asks for, the same for all its tokens                   |
| `TokenSampling`     | what that means for one token; travels to the ranks with the step      |
| `LogitChange`   | the part of it that changes logits before a token is chosen            |
| `Sampled`  | a token, its log-probability and the likeliest alternatives            |
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock.config import Number, Whole
from penstock.errors import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOGPROBS_MAX = 20
TOP_K_MAX = 1 << 20
RANGES: Mapping[str, Whole | Number] = {
    "temperature": Number(minimum=0, maximum=2),
    "top_p": Number(minimum=math.ulp(0.0), maximum=1),
    "top_k": Whole(minimum=0, maximum=TOP_K_MAX),
    "min_p": Number(minimum=0, maximum=1),
    "logprobs": Whole(minimum=0, maximum=LOGPROBS_MAX),
    "repetition_penalty": Number(minimum=0.01, maximum=100),
    "presence_penalty": Number(minimum=-2, maximum=2),
    "frequency_penalty": Number(minimum=-2, maximum=2),
}
"""Of the options that a request may set."""
TEMPERATURE_MIN = 1e-5
"""Below it, the most likely token is taken: logits divided by less overflow."""
BIAS_MAX = 100.0
BIASES_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request wants its tokens chosen.

    | field              | meaning                                                          |
    |--------------------|------------------------------------------------------------------|
    | temperature        | 0 takes the most likely token; the larger, the more random        |
    | top_p              | only the likeliest tokens that together have this probability     |
    | top_k              | the number of likeliest tokens to draw from; 0: all               |
    | min_p              | only tokens with this share of the likeliest one's probability    |
    | seed               | the same seed gives the same answer                               |
    | logprobs           | alternatives that are returned with each token                    |
    | repetition_penalty | divides logits of tokens of the prompt and of the answer so far   |
    | presence_penalty   | is subtracted from logits of tokens of the answer so far          |
    | frequency_penalty  | the same, as often as a token is there                            |
    | logit_bias         | is added to the logits of single tokens                           |

    Log-probabilities are those of the model, before any of this.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, kind in RANGES.items():
            value = getattr(self, name)
            if not kind.minimum <= value <= kind.maximum:
                right = f"from {kind.minimum:g} to {kind.maximum:g}"
                right = "above 0 and at most 1" if name == "top_p" else right
                raise ValueError(f"{name} is {value}, must be {right}")
        if len(self.logit_bias) > BIASES_MAX or not all(
            abs(bias) <= BIAS_MAX for _, bias in self.logit_bias
        ):
            raise ValueError(
                f"logit_bias has {counted(len(self.logit_bias), 'token')}, must have at most "
                f"{BIASES_MAX}, "
                f"with numbers from {-BIAS_MAX:g} to {BIAS_MAX:g}"
            )

    @property
    def needs_tokens(self) -> bool:
        """Whether the choice of a token depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def change(
        self, prompt: Sequence[int], answer: Sequence[int], banned: Sequence[int]
    ) -> LogitChange | None:
        """What is done to the logits of the next token; `None` if nothing is."""
        if not (banned or self.logit_bias or self.needs_tokens):
            return None
        repeats = self.repetition_penalty != 1
        counted = self.presence_penalty != 0 or self.frequency_penalty != 0
        return LogitChange(
            banned=list(banned),
            bias=list(self.logit_bias),
            seen=sorted({*prompt, *answer}) if repeats else [],
            repetition=self.repetition_penalty,
            counts=list(Counter(answer).items()) if counted else [],
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
        )


class LogitChange(msgspec.Struct, frozen=True, array_like=True):
    """What is done to the logits of one token before it is chosen."""

    banned: list[int]
    """Tokens that must not be chosen."""
    bias: list[tuple[int, float]]
    """Tokens, and what is added to their logits."""
    seen: list[int]
    """Tokens of the prompt and of the answer, each once, for the repetition penalty."""
    repetition: float
    counts: list[tuple[int, int]]
    """Tokens of the answer, and how often each is there, for the other two."""
    presence: float
    frequency: float


class TokenSampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token of one request is to be chosen; travels with the step."""

    temperature: float
    top_p: float
    seed: int
    """Of this one token: drawn anew for each position, so that replays agree."""
    logprobs: int
    top_k: int = 0
    min_p: float = 0.0
    change: LogitChange | None = None


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """A token that was chosen, or that was there already and is scored."""

    token: int
    logprob: float
    alternatives: list[tuple[int, float]] = []
    """The likeliest tokens and their log-probabilities, as many as were asked for."""
