"""How the ranks of one model put their shares together: sums and one gather a step.

These are the model's own collectives, inside one step and in the same order on every rank; the
cache and the handoff have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import distributed

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from penstock.engine.sharding import Share


class Ranks(Protocol):
    """What the model needs of the other ranks."""

    share: Share

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' parts, on every rank."""
        ...

    def gathered(self, logits: torch.Tensor) -> torch.Tensor | None:
        """All logits, on the first rank."""
        ...


class Alone:
    """The only rank."""

    def __init__(self, share: Share) -> None:
        if share.ranks != 1:
            raise ValueError(f"share is one of {share.ranks}, must be the only one")
        self.share = share

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The part itself."""
        return part

    def gathered(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The logits themselves."""
        return logits


class Together:
    """One of several ranks of an initialised `torch.distributed` group."""

    def __init__(self, share: Share, vocabulary_sizes: list[int]) -> None:
        self.share = share
        self._sizes = vocabulary_sizes

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' parts, on every rank."""
        try:
            distributed.all_reduce(part)
        except RuntimeError as error:
            raise _lost(error) from error
        return part

    def gathered(self, logits: torch.Tensor) -> torch.Tensor | None:
        """All logits, on the first rank."""
        # Shares differ in size by at most one row: equal shapes are what gather wants.
        widest = max(self._sizes)
        if logits.shape[1] < widest:
            logits = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
        parts = [torch.empty_like(logits) for _ in self._sizes] if self.share.is_first else None
        try:
            distributed.gather(logits.contiguous(), parts)
        except RuntimeError as error:
            raise _lost(error) from error
        if parts is None:
            return None
        return torch.cat(
            [part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], dim=1
        )


def _lost(error: RuntimeError) -> UnavailableError:
    """What gloo and nccl raise when a peer is gone is a plain `RuntimeError`."""
    return UnavailableError(f"another rank is lost: {error}")
