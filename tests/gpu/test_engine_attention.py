"""Attention of the engine on a GPU against float64, over blocks in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock_serve.engine.batch import BatchShape, TokenSpan, lay_out
from penstock_serve.engine.cuda.attention import (
    CHUNK,
    PART_TOKENS_MAX,
    PART_TOKENS_MIN,
    PARTS_MAX,
    SMALL,
    TAIL,
    CudaAttention,
    Tiling,
    even_part_count,
    part_count,
    tiling_within,
)
from penstock_serve.engine.model import Heads, Turn

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the error's norm, by that of the reference: what the dtype's rounding comes to."""
SHAPES = [(32, 8, 128), (9, 3, 64), (6, 3, 16), (4, 4, 80)]
"""Heads, KV heads, channels."""
KINDS = [
    *((shape, torch.bfloat16) for shape in SHAPES),
    *((shape, torch.float32) for shape in SHAPES[1:3]),
    (SHAPES[0], torch.float16),
]
POSITIONS = 5000


class Bench:
    """One layer's blocks full of somebody's KV, and requests over some of them."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, *, block: int, blocks: int
    ) -> None:
        self.heads, self.kv_heads, self.channels = shape
        self.block = block
        self._draw = torch.Generator(device=DEVICE).manual_seed(sum(shape) + block)
        self.kv = self.random(2, blocks, block, self.kv_heads, self.channels).to(dtype)
        angles = self.random(POSITIONS, self.channels // 2).repeat(1, 2)
        self.turn = Turn(angles.cos().to(dtype), angles.sin().to(dtype))
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(block))
        self._free = order.tolist()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._draw, device=DEVICE)

    def span(self, start: int, count: int) -> TokenSpan:
        used = -(-(start + count) // self.block)
        table, self._free = self._free[:used], self._free[used:]
        return TokenSpan(used, start, [1] * count, table)

    def run(
        self, spans: list[TokenSpan], shape: BatchShape | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the kernels found, and what is right."""
        sheet = lay_out(spans, block_tokens=self.block)
        batch = sheet.sent(DEVICE, shape)
        rows = len(batch.tokens)
        projected = self.random(rows, self.heads + 2 * self.kv_heads, self.channels)
        parts = (self.heads, self.kv_heads, self.kv_heads)
        heads = Heads(*projected.to(self.kv.dtype).split(parts, dim=1))
        before = self.kv.clone()
        attention = CudaAttention()
        found = attention.attend(heads, attention.turn(self.turn, batch), self.kv, batch)
        right = torch.zeros(found.shape, dtype=torch.float64, device=DEVICE)
        first = at = 0
        for span in spans:
            if shape is not None and len(span.tokens) == 1:
                at = max(at, shape.tail_rows)
            part = slice(at, at + len(span.tokens))
            rows = Heads(*(each[part] for each in heads))
            right[first : first + len(span.tokens)] = self._right(rows, span, before)
            first, at = first + len(span.tokens), part.stop
        return found.double(), right

    def _right(self, heads: Heads, span: TokenSpan, before: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(span.start, span.stop, device=DEVICE)
        table = torch.tensor(span.table, device=DEVICE)
        held = before[:, table].flatten(1, 2)[:, : span.stop].double()
        held[0, positions] = self._turned(heads.key, positions)
        held[1, positions] = heads.value.double()
        query = self._turned(heads.query, positions)
        group = self.heads // self.kv_heads
        key, value = (each.repeat_interleave(group, dim=1) for each in held)
        scores = torch.einsum("qhc,khc->hqk", query, key) / self.channels**0.5
        seen = torch.arange(span.stop, device=DEVICE)[None, :] <= positions[:, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khc->qhc", weights, value)

    def _turned(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """In the precision in which it is kept."""
        cos, sin = (each[positions, None].double() for each in self.turn)
        first, second = heads.double().chunk(2, dim=-1)
        turned = heads.double() * cos + torch.cat((-second, first), dim=-1) * sin
        return turned.to(heads.dtype).double()


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


def test_decodes_over_blocks_of_64_are_right() -> None:
    bench = Bench(SHAPES[0], torch.bfloat16, block=64, blocks=100)

    found, right = bench.run([bench.span(at, 1) for at in (1, 15, 64, 129, 700, 4500)])

    assert error(found, right) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize(("shape", "dtype"), KINDS)
def test_chunks_and_what_follows_a_prefix_and_decodes_are_right(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    bench = Bench(shape, dtype, block=16, blocks=1200)
    spans = [(0, 70), (0, 1), (0, 700), (33, 100), (2000, 17), (4000, 64), (1500, 65)]
    spans += [(at, 1) for at in (1, 15, 64, 129, 777, 4500)]

    found, right = bench.run([bench.span(*each) for each in spans])

    assert error(found, right) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("start", "count"), [(4000, 32), (4033, 9), (1, 64), (64, 33), (127, 2), (2048, 64)]
)
def test_what_follows_a_prefix_in_blocks_of_64_is_right(start: int, count: int) -> None:
    bench = Bench(SHAPES[0], torch.bfloat16, block=64, blocks=100)

    found, right = bench.run([bench.span(start, count)])

    assert error(found, right) < BOUNDS[torch.bfloat16]


def test_rows_that_fill_up_change_nothing() -> None:
    bench = Bench((32, 8, 128), torch.bfloat16, block=16, blocks=300)
    spans = [bench.span(at, 1) for at in (40, 900)]
    before = bench.kv.clone()

    found, right = bench.run(spans, shape=BatchShape(8, 64))

    assert error(found[:2], right[:2]) < BOUNDS[torch.bfloat16]
    assert not found[2:].any()
    written = (bench.kv != before).any(dim=-1).any(dim=-1)[0].nonzero().tolist()
    assert sorted(written) == sorted([span.table[-1], span.start % 16] for span in spans)


def test_a_tail_that_is_filled_up_is_right() -> None:
    bench = Bench((32, 8, 128), torch.bfloat16, block=16, blocks=300)
    spans = [bench.span(1500, 21), *(bench.span(at, 1) for at in (40, 900))]

    found, right = bench.run(spans, shape=BatchShape(4, 64, 64, 128))

    picked = torch.cat((found[:21], found[64:66]))
    assert error(picked, right[:23]) < BOUNDS[torch.bfloat16]
    assert not found[21:64].any()
    assert not found[66:].any()


def test_one_block_of_another_request_is_noticed() -> None:
    bench = Bench((32, 8, 128), torch.bfloat16, block=16, blocks=300)
    span = bench.span(1000, 1)
    _, right = bench.run([span])
    seed = bench._draw.get_state()

    def found(table: list[int]) -> torch.Tensor:
        bench._draw.set_state(seed)
        return bench.run([TokenSpan(1, 1000, [1], table)])[0]

    same, mixed = found(span.table), found([*span.table[:30], 299, *span.table[31:]])

    assert right.shape == same.shape
    assert error(mixed, same) > 10 * BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("programs", [1, 8, 64, 512, 4096])
@pytest.mark.parametrize("longest", [1, 100, 1024, 5000, 40_000, 400_000])
def test_long_contexts_are_cut_into_parts_and_short_ones_are_not(
    programs: int, longest: int
) -> None:
    count: Any = part_count(programs, longest)

    assert count.bit_count() == 1
    assert 1 <= count <= PARTS_MAX
    assert longest > 200 or count == 1
    assert count == PARTS_MAX or longest / count <= PART_TOKENS_MAX


@pytest.mark.parametrize(
    ("shared_kib", "tail", "chunk"),
    [
        pytest.param(227, TAIL, CHUNK, id="H100 and H200"),
        pytest.param(163, TAIL, TAIL, id="A100"),
        pytest.param(99, SMALL, SMALL, id="smaller ones"),
    ],
)
def test_tiles_fit_into_the_shared_memory_that_there_is(
    shared_kib: int, tail: Tiling, chunk: Tiling
) -> None:
    head_bytes = 128 * 2

    found = [tiling_within(shared_kib * 1024, rows, head_bytes) for rows in (128, 129)]

    assert found == [tail, chunk]


@pytest.mark.parametrize("programs", [1, 8, 64, 512])
@pytest.mark.parametrize("longest", [65, 1024, 5000, 40_000])
def test_equal_parts_are_no_more_than_run_at_a_time_and_no_shorter_than_worth_it(
    programs: int, longest: int
) -> None:
    count = even_part_count(programs, longest, 132)

    assert 1 <= count <= PARTS_MAX
    assert count == 1 or count * programs <= 132
    assert count == 1 or longest / count >= PART_TOKENS_MIN
