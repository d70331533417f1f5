"""What one step computes: the tokens of several requests, laid end to end.

Chunks of prompts come first, one after the other; then one token of each request that decodes.
Every rank gets the same batch, so it is made of plain numbers until `on_device`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The next tokens of one request."""

    request: int
    start: int
    """The position of the first of them: so many tokens have their KV."""
    tokens: list[int]
    table: list[int]
    """Device blocks in token order, up to the last of these tokens."""
    wants_output: bool = True
    """Whether the last token's logits are needed."""

    @property
    def stop(self) -> int:
        """The position after the last of them."""
        return self.start + len(self.tokens)


class PrefillRows(NamedTuple):
    """A chunk of a prompt within the batch."""

    first: int
    """Row of its first token."""
    length: int
    context: int
    """Tokens it attends to, itself included."""
    table: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The single tokens at the end of the batch."""

    first: int
    tables: torch.Tensor
    """Blocks of each request, filled up with block 0: [requests, blocks]."""
    lengths: torch.Tensor
    """Tokens each attends to, itself included."""
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's input on the device."""

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    """Where each token's K and V go: block × tokens of a block + offset."""
    prefills: tuple[PrefillRows, ...]
    decodes: DecodeRows | None
    outputs: torch.Tensor
    """Rows whose logits are wanted, in the order of the spans that want them."""


def on_device(spans: Sequence[Span], *, block_tokens: int, device: torch.device) -> Batch:
    """Lays the spans out; those of one token after the others, which is where they must be.

    Raises:
        ValueError: a span has no tokens, a table that ends too early, or stands out of order.
    """
    _check(spans, block_tokens)
    tokens: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    outputs: list[int] = []
    prefills: list[PrefillRows] = []
    decodes: list[Span] = []
    for span in spans:
        first = len(tokens)
        tokens += span.tokens
        positions += range(span.start, span.stop)
        places += [
            span.table[at // block_tokens] * block_tokens + at % block_tokens
            for at in range(span.start, span.stop)
        ]
        if span.wants_output:
            outputs.append(len(tokens) - 1)
        if is_decode(span):
            decodes.append(span)
        else:
            table = _integers(span.table[: -(-span.stop // block_tokens)], device)
            prefills.append(PrefillRows(first, len(span.tokens), span.stop, table))
    return Batch(
        tokens=_integers(tokens, device),
        positions=_integers(positions, device),
        places=_integers(places, device),
        prefills=tuple(prefills),
        decodes=_decode_rows(decodes, len(tokens), block_tokens, device) if decodes else None,
        outputs=_integers(outputs, device),
    )


def is_decode(span: Span) -> bool:
    """Whether a span goes through the decode path: one token with something before it."""
    return len(span.tokens) == 1 and span.start > 0


def _check(spans: Sequence[Span], block_tokens: int) -> None:
    seen_decode = False
    for span in spans:
        if not span.tokens:
            raise ValueError(f"request {span.request} has no tokens in the step")
        if len(span.table) * block_tokens < span.stop:
            raise ValueError(
                f"request {span.request} has {len(span.table)} blocks of {block_tokens} tokens, "
                f"must have room for {span.stop} tokens"
            )
        if seen_decode and not is_decode(span):
            raise ValueError(f"request {span.request} has a chunk of a prompt after a decode")
        seen_decode = seen_decode or is_decode(span)


def _decode_rows(
    spans: Sequence[Span], row_count: int, block_tokens: int, device: torch.device
) -> DecodeRows:
    widest = max(-(-span.stop // block_tokens) for span in spans)
    tables = torch.zeros((len(spans), widest), dtype=torch.int64)
    for row, span in enumerate(spans):
        used = -(-span.stop // block_tokens)
        tables[row, :used] = torch.tensor(span.table[:used])
    return DecodeRows(
        first=row_count - len(spans),
        tables=tables.to(device),
        lengths=_integers([span.stop for span in spans], device),
        longest=max(span.stop for span in spans),
    )


def _integers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
