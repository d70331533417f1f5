"""What one step computes: the tokens of several requests, laid end to end.

Chunks of prompts come first, one after the other; then one token of each request that decodes.
Every rank gets the same spans. `lay_out` turns them into a `Sheet` of plain numbers, which
travels to the device in one copy and is a `StepBatch` there.

    spans ── lay_out ──→ Sheet ── sent ──→ StepBatch

The one rule: a token that the step before chooses is never known here. Its row is filled on the
device, from that step's own result.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

PREVIOUS = -1
"""In place of a token: the one that the step before chose for the same answer."""
NOWHERE = -1
"""In place of a position and of a place: the row is there to fill up a batch."""


class TokenSpan(msgspec.Struct, frozen=True, array_like=True):
    """The next tokens of one request."""

    request: int
    start: int
    """The position of the first of them: the number of tokens before it, whose KV is there."""
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
class StepBatch:
    """A step's input on the device."""

    packed: torch.Tensor
    """All of its numbers, one after the other; the others are views of it."""
    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    """Where each token's K and V go: block × tokens of a block + offset."""
    prefills: tuple[PrefillRows, ...]
    decodes: DecodeRows | None
    outputs: torch.Tensor
    """Rows whose logits are wanted, in the order of the spans that want them."""
    drawn: torch.Tensor
    """For each draw, which of those logits it is made from."""
    unknown: torch.Tensor
    """Rows whose token the step before chooses, and in `sources`, which of its draws."""
    sources: torch.Tensor
    shape: BatchShape | None = None
    """What it was filled up to, by rows of no request."""

    def fill(self, chosen: torch.Tensor | None) -> None:
        """Puts the tokens that the step before chose where they belong."""
        if len(self.unknown):
            assert chosen is not None
            self.tokens.index_copy_(0, self.unknown, chosen[self.sources])


def on_device(spans: Sequence[TokenSpan], *, block_tokens: int, device: torch.device) -> StepBatch:
    """Lays the spans out and sends them; see `lay_out`."""
    return lay_out(spans, block_tokens=block_tokens).sent(device)


def lay_out(
    spans: Sequence[TokenSpan],
    *,
    block_tokens: int,
    draws: Sequence[int] = (),
    last: Mapping[int, int] | None = None,
    scored: Collection[int] = (),
) -> Sheet:
    """Lays the spans out; those of one token after the others, which is where they must be.

    Raises `ValueError`: a span has no tokens, a table that ends too early, or stands out of order;
    a draw has no logits; or a token is to come from a step that did not choose it.
    """
    _check(spans, block_tokens)
    sheet = Sheet(block_tokens)
    output_of: dict[int, int] = {}
    for number, span in enumerate(spans):
        if number in scored:
            sheet.scored[number] = len(sheet.outputs)
        sheet.add(span, last or {}, scored=number in scored)
        if span.wants_output:
            output_of[number] = len(sheet.outputs) - 1
    missing = [span for span in draws if span not in output_of]
    if missing:
        raise ValueError(f"a token is drawn from span {missing[0]}, which wants no output")
    sheet.draws = list(draws)
    sheet.drawn = [output_of[span] for span in draws]
    return sheet


class BatchShape(NamedTuple):
    """What a step is filled up to, so that many steps look alike."""

    rows: int
    """Requests that decode."""
    blocks: int
    """Of each of them."""
    tail_rows: int = 0
    """Tokens of the one chunk of a prompt that stands before them, if there is any."""
    tail_blocks: int = 0


class Sheet:
    """A step's input as plain numbers."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.places: list[int] = []
        self.outputs: list[int] = []
        self.draws: list[int] = []
        """For each draw, the span."""
        self.drawn: list[int] = []
        """For each draw, which of the outputs."""
        self.scored: dict[int, int] = {}
        """The spans that want the logits of every token, and which output is their first."""
        self.unknown: list[int] = []
        self.sources: list[int] = []
        self.prefills: list[TokenSpan] = []
        self.decodes: list[TokenSpan] = []

    @property
    def longest(self) -> int:
        """The tokens that the longest of the decoding requests attends to."""
        return max((span.stop for span in self.decodes), default=0)

    def add(self, span: TokenSpan, last: Mapping[int, int], *, scored: bool = False) -> None:
        """Adds the tokens of a request."""
        tokens, block_tokens, table = span.tokens, self.block_tokens, span.table
        if PREVIOUS in tokens:
            if span.request not in last or tokens.index(PREVIOUS) < len(tokens) - 1:
                raise ValueError(
                    f"request {span.request} takes a token from the step before, which chose "
                    "none for it, or not the last one"
                )
            tokens = [*tokens[:-1], 0]
            self.unknown.append(len(self.tokens) + len(tokens) - 1)
            self.sources.append(last[span.request])
        self.tokens += tokens
        at = range(span.start, span.stop)
        self.positions += at
        self.places += [table[p // block_tokens] * block_tokens + p % block_tokens for p in at]
        if scored:
            self.outputs += range(len(self.tokens) - len(tokens), len(self.tokens))
        elif span.wants_output:
            self.outputs.append(len(self.tokens) - 1)
        (self.decodes if is_decode(span) else self.prefills).append(span)

    def sent(self, device: torch.device, shape: BatchShape | None = None) -> StepBatch:
        """Copies everything to the device, in one piece; filled up, if a shape is wanted."""
        tables = self._tables(shape)
        head: list[Sequence[int] | NDArray[np.int64]] = [
            *(self._filled(each, shape, with_=pad) for each, pad in self._rows()),
            [span.stop for span in self.decodes] + [0] * (len(tables) - len(self.decodes)),
            tables.reshape(-1),
            self.outputs if shape is None else self._all_outputs(shape),
        ]
        chunks = self._prefill_tables(shape)
        drawn = self.drawn if shape is None else self.draws
        tail = [drawn, [self._moved(row, shape) for row in self.unknown], self.sources]
        packed, views = _sent([*head, *chunks, *tail], device)
        tokens, positions, places, lengths, flat, outputs = views[:6]
        drawn_there, unknown, sources = views[-3:]
        longest = self.longest if shape is None else shape.blocks * self.block_tokens
        decodes = DecodeRows(
            first=len(tokens) - len(tables),
            tables=flat.view(tables.shape),
            lengths=lengths,
            longest=longest,
        )
        return StepBatch(
            packed=packed,
            tokens=tokens,
            positions=positions,
            places=places,
            prefills=tuple(self._prefill_rows(views[6:-3], shape)),
            decodes=decodes if len(tables) else None,
            outputs=outputs,
            drawn=drawn_there,
            unknown=unknown,
            sources=sources,
            shape=shape,
        )

    def slots(self) -> NDArray[np.int64]:
        """The device blocks that the step reads or writes."""
        tables = [self._used(span) for span in (*self.prefills, *self.decodes)]
        return np.array([slot for table in tables for slot in table], dtype=np.int64)

    def _rows(self) -> list[tuple[list[int], int]]:
        """What there is of each token, and what stands for it in rows that fill up."""
        return [(self.tokens, 0), (self.positions, NOWHERE), (self.places, NOWHERE)]

    def _filled(self, rows: list[int], shape: BatchShape | None, *, with_: int) -> list[int]:
        if shape is None:
            return rows
        tail = len(rows) - len(self.decodes)
        return [
            *rows[:tail],
            *[with_] * (shape.tail_rows - tail),
            *rows[tail:],
            *[with_] * (shape.rows - len(self.decodes)),
        ]

    def _moved(self, row: int, shape: BatchShape | None) -> int:
        """Where a row is, once others fill up before it."""
        tail = len(self.tokens) - len(self.decodes)
        return row if shape is None or row < tail else row - tail + shape.tail_rows

    def _all_outputs(self, shape: BatchShape) -> list[int]:
        """Of every span, in order, whether it wants one or not."""
        tail = len(self.tokens) - len(self.decodes)
        last = [max(0, tail - 1)] if shape.tail_rows else []
        return [*last, *range(shape.tail_rows, shape.tail_rows + shape.rows)]

    def _used(self, span: TokenSpan) -> list[int]:
        return span.table[: -(-span.stop // self.block_tokens)]

    def _tables(self, shape: BatchShape | None) -> NDArray[np.int64]:
        used = [self._used(span) for span in self.decodes]
        widest = max(map(len, used), default=0) if shape is None else shape.blocks
        tables = np.zeros((len(used) if shape is None else shape.rows, widest), dtype=np.int64)
        for row, table in enumerate(used):
            tables[row, : len(table)] = table
        return tables

    def _prefill_tables(self, shape: BatchShape | None) -> list[list[int]]:
        used = [self._used(span) for span in self.prefills]
        if shape is None or not shape.tail_rows:
            return used
        table = used[0] if used else []
        return [[*table, *[0] * (shape.tail_blocks - len(table))]]

    def _prefill_rows(
        self, tables: Sequence[torch.Tensor], shape: BatchShape | None
    ) -> list[PrefillRows]:
        if shape is not None:
            context = shape.tail_blocks * self.block_tokens
            return [PrefillRows(0, shape.tail_rows, context, table) for table in tables]
        first, found = 0, []
        for span, table in zip(self.prefills, tables, strict=True):
            found.append(PrefillRows(first, len(span.tokens), span.stop, table))
            first += len(span.tokens)
        return found


def is_decode(span: TokenSpan) -> bool:
    """Whether a span goes through the decode path: one token with something before it."""
    return len(span.tokens) == 1 and span.start > 0


def _check(spans: Sequence[TokenSpan], block_tokens: int) -> None:
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


def _sent(
    parts: Sequence[Sequence[int] | NDArray[np.int64]], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Integers on the device: all of them, and each part."""
    import torch  # noqa: PLC0415  (takes seconds, and a scheduler with ranks computes nothing)

    ends = np.cumsum([0, *map(len, parts)]).tolist()
    # On the way to a GPU the copy is read from pinned memory, which torch keeps until it ended.
    pinned = torch.empty(ends[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    numbers = pinned.numpy()
    for part, (first, end) in zip(parts, pairwise(ends), strict=True):
        numbers[first:end] = part
    packed = pinned.to(device, non_blocking=True)
    return packed, [packed[first:end] for first, end in pairwise(ends)]
