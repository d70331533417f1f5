"""Samples the next tokens of all requests of a step at once.

Greedy requests take the largest logit. The others use a generator each, so that a request with a
seed gets the same answer whatever else runs.

The one rule: nothing here waits for the device, and the likeliest token always stays possible,
whatever options a client sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock_serve.engine.sampling_options import (
    TEMPERATURE_MIN,
    LogitChange,
    Sampled,
    TokenSampling,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class Named:
    """Tokens with their log-probabilities, while they are copied to the CPU.

    Args:
        scores: Log-probabilities, a row for each token.
        tokens: The tokens.
        counts: How many alternatives are returned with each.
    """

    def __init__(self, scores: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        self._counts = list(counts)
        likeliest = scores.topk(min(max(self._counts, default=0), scores.shape[1]))
        # As doubles, which hold token ids exactly, so that one copy is enough.
        parts = (
            tokens[:, None],
            scores.gather(1, tokens[:, None]),
            likeliest.indices,
            likeliest.values,
        )
        self._numbers = _copied_to_cpu(torch.cat([part.double() for part in parts], dim=1))

    def read(self) -> list[Sampled]:
        """The tokens; call it only when the copy has ended."""
        found = []
        for count, numbers in zip(self._counts, self._numbers.tolist(), strict=True):
            tokens, scores = numbers[2:], numbers[2 + (len(numbers) - 2) // 2 :]
            named = [
                (int(token), score)
                for token, score in zip(tokens[:count], scores[:count], strict=False)
            ]
            found.append(Sampled(int(numbers[0]), numbers[1], named))
        return found


class SampledBatch:
    """Sampled tokens, on the device of the logits.

    The next step may use `tokens` before the CPU has read them.

    Raises:
        ValueError: there is not one option for each row.
    """

    def __init__(self, logits: torch.Tensor, options: Sequence[TokenSampling]) -> None:
        if logits.shape[0] != len(options):
            raise ValueError(f"{len(options)} options for {logits.shape[0]} rows, must be one each")
        plain = logits.float()
        scores = plain.log_softmax(dim=-1)
        changed = _changed(plain, options)
        self.tokens = (scores if changed is plain else changed).argmax(dim=-1)
        for row, option in enumerate(options):
            if option.temperature >= TEMPERATURE_MIN:
                self.tokens[row] = _drawn(changed[row], option)
        self._named = Named(scores, self.tokens, [option.logprobs for option in options])

    def read(self) -> list[Sampled]:
        """The tokens; call it only when the step has ended."""
        return self._named.read()


def scored(logits: torch.Tensor, targets: Sequence[int], *, logprobs: int) -> Named:
    """The log-probabilities of known tokens, by a row of logits for each."""
    scores = logits.float().log_softmax(dim=-1)
    return Named(scores, _sent(targets, torch.int64, logits.device), [logprobs] * len(targets))


def _copied_to_cpu(numbers: torch.Tensor) -> torch.Tensor:
    """Copies to pinned memory; from a GPU, the copy ends after its work so far."""
    if numbers.device.type == "cpu":
        return numbers
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return pinned.copy_(numbers, non_blocking=True)


def _sent(
    numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Copies numbers to the device without waiting for it."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype)
    # Torch keeps pinned memory until the copy has ended.
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _changed(logits: torch.Tensor, options: Sequence[TokenSampling]) -> torch.Tensor:
    """The logits with all changes; the same tensor if there are none."""
    if all(option.change is None for option in options):
        return logits
    changed = logits.clone()
    for row, option in zip(changed, options, strict=True):
        if option.change is not None:
            _change(row, option.change)
    return changed


def _change(row: torch.Tensor, change: LogitChange) -> None:
    device = row.device
    if change.seen:
        seen = _sent(change.seen, torch.int64, device)
        found = row[seen]
        row[seen] = torch.where(found > 0, found / change.repetition, found * change.repetition)
    if change.counts:
        there = _sent([token for token, _ in change.counts], torch.int64, device)
        amount = [change.presence + change.frequency * count for _, count in change.counts]
        row[there] -= _sent(amount, torch.float32, device)
    if change.bias:
        tokens = _sent([token for token, _ in change.bias], torch.int64, device)
        row[tokens] += _sent([bias for _, bias in change.bias], torch.float32, device)
    if change.banned:
        row[_sent(change.banned, torch.int64, device)] = -torch.inf


def _drawn(logits: torch.Tensor, option: TokenSampling) -> torch.Tensor:
    """Samples one of the tokens that `min_p`, then `top_k`, then `top_p` leave."""
    # The largest is subtracted, so that no temperature makes them overflow.
    logits = (logits - logits.max()) / option.temperature
    if option.min_p > 0:
        probabilities = logits.softmax(dim=-1)
        logits = logits.masked_fill(probabilities < option.min_p * probabilities.max(), -torch.inf)
    if 0 < option.top_k < len(logits):
        least = logits.topk(option.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if option.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # A token stays if those before it do not reach `top_p`. The first always stays, even if
        # `top_p` is too small for a float.
        left_out = ordered.cumsum(dim=-1) - ordered >= option.top_p
        left_out[0] = False
        ordered = ordered.masked_fill(left_out, 0)
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    generator = torch.Generator(device=logits.device).manual_seed(option.seed)
    return torch.multinomial(probabilities, 1, generator=generator)[0]
