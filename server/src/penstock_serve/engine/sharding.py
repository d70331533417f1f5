"""Which part of a model a tensor-parallel rank holds.

KV heads are distributed with all their query heads, also if the numbers do not divide: of three KV
heads, two ranks hold two and one. With more ranks than KV heads, several ranks hold the same KV
head and divide its query heads.

The one rule: the ranks together hold every query head, every row of the MLP and every row of the
vocabulary exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock_serve.engine.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of the model, as ranges."""

    rank: int
    ranks: int
    heads: range
    """Query heads."""
    kv_heads: range
    intermediate: range
    vocabulary: range

    @property
    def is_first(self) -> bool:
        """Whether this rank samples."""
        return self.rank == 0


def share_of(architecture: Architecture, *, rank: int, ranks: int) -> Share:
    """The share of one rank.

    Raises `ConfigError`: there are more ranks than query heads, or heads that cannot be
    distributed.
    """
    if not 0 <= rank < ranks:
        raise ConfigError("rank", f"is {rank}, must be from 0 to {ranks - 1}")
    if ranks > architecture.heads:
        raise ConfigError(
            "tp", f"is {ranks}, must be at most {architecture.heads}, the attention heads"
        )
    heads, kv_heads = _heads(architecture, rank, ranks)
    return Share(
        rank=rank,
        ranks=ranks,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=dealt(architecture.intermediate, rank, ranks),
        vocabulary=dealt(architecture.vocabulary, rank, ranks),
    )


def _heads(architecture: Architecture, rank: int, ranks: int) -> tuple[range, range]:
    kv_heads, group = architecture.kv_heads, architecture.group
    if ranks <= kv_heads:
        held = dealt(kv_heads, rank, ranks)
        return range(held.start * group, held.stop * group), held
    # Several ranks on one KV head: the ranks are distributed over the heads, then the query
    # heads of each over its ranks.
    for head in range(kv_heads):
        sharers = dealt(ranks, head, kv_heads)
        if rank in sharers:
            if len(sharers) > group:
                break
            part = dealt(group, rank - sharers.start, len(sharers))
            start = head * group
            return range(start + part.start, start + part.stop), range(head, head + 1)
    raise ConfigError(
        "tp",
        f"is {ranks}, must be at most {kv_heads * group} for {kv_heads} KV heads of {group} "
        "query heads each",
    )


def dealt(total: int, number: int, shares: int) -> range:
    """Share `number` of `total` things, distributed in order over `shares`."""
    size, rest = divmod(total, shares)
    first = number * size + min(number, rest)
    return range(first, first + size + (number < rest))
