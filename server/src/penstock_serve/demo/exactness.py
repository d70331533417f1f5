"""Checks every answer against a fresh computation in this process, without cache and handoff.

Each prompt is computed together with its answer in one step, and with the later turns of its
conversation where they begin with it. The log-probabilities of every token and of its likeliest
alternatives are compared with those of the server. Comparing greedy tokens
alone would not be enough: a model often chooses the same token although a block of its context is
wrong.

The one rule: nothing of the server's state is used. Prompts are encoded again from their text, and
KV is computed from the tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock_serve.engine.architecture import share_of
from penstock_serve.engine.batch import TokenSpan, on_device
from penstock_serve.engine.checkpoints import RankWeights, find_model
from penstock_serve.engine.model import Alone, Decoder
from penstock_serve.engine.text import Text
from penstock_serve.engine.worker import allocate_kv

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock_serve.demo.clients import AnsweredToken, ChatTurn

BOUND = 2e-3
"""Natural units of log-probability. The same sums in another order, in float32, over thirty layers
differ by less than a tenth of it; with one wrong block they differ by hundreds of it or more."""
BLOCK_TOKENS = 16
_CPU = torch.device("cpu")


class Fresh:
    """A model without a cache."""

    def __init__(self, model: str | None) -> None:
        found = find_model(model)
        self.text = Text.of(found.path)
        self._architecture, checkpoint = found.open()
        self._share = share_of(self._architecture, rank=0, ranks=1)
        weights = RankWeights(
            checkpoint,
            self._share,
            head_dim=self._architecture.head_dim,
            dtype=torch.float32,
            device=_CPU,
        )
        self._decoder = Decoder(self._architecture, weights, Alone(self._share))
        checkpoint.close()

    def logprobs(self, tokens: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """The log-probabilities of what comes after the tokens at `rows`: [rows, vocabulary]."""
        blocks = -(-len(tokens) // BLOCK_TOKENS)
        kv = allocate_kv(
            self._architecture,
            self._share,
            block_count=blocks,
            block_tokens=BLOCK_TOKENS,
            dtype=torch.float32,
            device=_CPU,
        )
        span = TokenSpan(0, 0, list(tokens), list(range(blocks)))
        batch = on_device([span], block_tokens=BLOCK_TOKENS, device=_CPU)
        logits = self._decoder.forward(replace(batch, outputs=torch.tensor(rows)), kv)
        assert logits is not None
        return logits.log_softmax(-1)


class AnswerDifference(NamedTuple):
    """The difference of one answer from a fresh computation."""

    largest: float
    values: int
    """Log-probabilities that were compared."""
    near_ties: int
    """Greedy tokens that differ where the two likeliest tokens are nearly equal."""
    findings: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessVerdict:
    """The differences of all answers."""

    answers: int
    tokens: int
    values: int
    largest: float
    bound: float
    near_ties: int
    findings: tuple[str, ...]


def difference(
    tokens: Sequence[AnsweredToken], expected: torch.Tensor, *, name: str, bound: float = BOUND
) -> AnswerDifference:
    """Compares one answer; `expected` has a row of log-probabilities for each of its tokens."""
    largest, values, near_ties = 0.0, 0, 0
    findings: list[str] = []
    for position, (token, row) in enumerate(zip(tokens, expected, strict=True)):
        off_by = [abs(row[at].item() - value) for at, value in token.logprobs.items()]
        largest = max(largest, *off_by)
        values += len(off_by)
        # In this form, NaN is a finding too.
        if not all(each <= bound for each in off_by):
            findings.append(
                f"{name}: log-probabilities of token {position} are off by {max(off_by):.2g}, "
                f"must be at most {bound:g}"
            )
        best = int(row.argmax())
        if best == token.token:
            continue
        gap = (row[best] - row[token.token]).item()
        if gap < bound:
            near_ties += 1
        else:
            findings.append(
                f"{name}: token {position} is {token.token}, must be {best}, which is better by "
                f"{gap:.2g}"
            )
    return AnswerDifference(largest, values, near_ties, findings)


class _Answered(NamedTuple):
    """The tokens of a prompt, and of its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def computed(self) -> tuple[int, ...]:
        """Nothing is computed from the last token."""
        return (*self.prompt, *self.answer[:-1])

    @property
    def rows(self) -> range:
        """The tokens after which the answer's tokens come."""
        return range(len(self.prompt) - 1, len(self.prompt) - 1 + len(self.answer))


def _expected(answers: Iterable[_Answered], fresh: Fresh) -> dict[_Answered, torch.Tensor]:
    """The log-probabilities at each token of each answer: [tokens, vocabulary].

    A token depends on those before it alone. So a turn that a later one begins with is computed
    together with it, once: that halves the time of the check.
    """
    groups: dict[tuple[int, ...], list[_Answered]] = {}
    for each in sorted(set(answers), key=lambda each: len(each.computed), reverse=True):
        size = len(each.computed)
        longer = next((tokens for tokens in groups if tokens[:size] == each.computed), None)
        groups.setdefault(each.computed if longer is None else longer, []).append(each)
    found: dict[_Answered, torch.Tensor] = {}
    for tokens, group in groups.items():
        rows = sorted({row for each in group for row in each.rows})
        at = {row: number for number, row in enumerate(rows)}
        logprobs = fresh.logprobs(tokens, rows)
        found |= {each: logprobs[[at[row] for row in each.rows]] for each in group}
    return found


def check(
    turns: Sequence[ChatTurn],
    fresh: Fresh,
    *,
    bound: float = BOUND,
) -> ExactnessVerdict:
    """Compares all answers; equal prompts with equal answers are computed once."""
    found: list[AnswerDifference] = []
    usable: list[tuple[str, ChatTurn, _Answered]] = []
    for turn in turns:
        prompt = tuple(fresh.text.encode_chat(turn.messages))
        answer = tuple(each.token for each in turn.tokens)
        name = f"{turn.chat}, turn {turn.number + 1}"
        if len(prompt) != turn.prompt_tokens or not answer:
            problem = f"{name}: {turn.prompt_tokens} and {len(answer)} tokens of prompt and answer"
            found.append(
                AnswerDifference(0.0, 0, 0, [f"{problem}, must be {len(prompt)} and some"])
            )
            continue
        usable.append((name, turn, _Answered(prompt, answer)))
    expected = _expected((each for _, _, each in usable), fresh)
    found += [
        difference(turn.tokens, expected[each], name=name, bound=bound)
        for name, turn, each in usable
    ]
    return ExactnessVerdict(
        answers=len(turns),
        tokens=sum(len(turn.tokens) for turn in turns),
        values=sum(each.values for each in found),
        largest=max((each.largest for each in found), default=0.0),
        bound=bound,
        near_ties=sum(each.near_ties for each in found),
        findings=tuple(finding for each in found for finding in each.findings),
    )
