"""Attention on a GPU: the same as `PlainAttention`, without copies of K and V.

One kernel, `attend_parts`, reads them where they lie, for the single tokens of running requests
(decodes) and for chunks of prompts alike: `Tiling` says how each is cut. Chunks are read beside
decodes, in a stream of their own: together they take less time than one after the other.

The one rule: nothing here waits for the device, and the grid of a decode depends on its shapes
alone, so that it can be captured in a graph.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock_serve.engine.cuda import kernels

if TYPE_CHECKING:
    from penstock_serve.engine.batch import StepBatch
    from penstock_serve.engine.model import Heads, Turn

HEAD_TILE = 8
PART_TOKENS_MAX = 2048
"""A part is no longer, or one long request would keep all others of its step waiting."""
PART_TOKENS_MIN = 128
PARTS_MAX = 64
PROGRAMS = 528
"""Four for each multiprocessor of an H100 or H200: enough to keep its memory busy."""


class Tiling(NamedTuple):
    """How `attend_parts` cuts its work."""

    rows: int
    """Queries of a tile: tokens × query heads of a KV head."""
    keys: int
    """Taken in at a time."""
    warps: int
    stages: int
    """With three, the keys of two tiles are on their way while one is taken in."""
    even: bool = False
    """Whether parts are equal shares of a context, as the device finds it."""
    programs: int = PROGRAMS
    """The number that run at a time, and of equal parts."""


DECODE = Tiling(rows=1, keys=64, warps=2, stages=2)
"""One token of each request, and whatever query heads share a KV head."""
TAIL = Tiling(rows=64, keys=64, warps=4, stages=3, even=True, programs=256)
"""The few tokens that follow a prefix: two programs fit on a multiprocessor of an H100 or H200."""
CHUNK = Tiling(rows=128, keys=128, warps=8, stages=3, even=True, programs=132)
"""More tokens: one program fills a multiprocessor, and reads as many keys for as many rows."""
SMALL = Tiling(rows=64, keys=32, warps=4, stages=2, even=True)
"""For numbers of four bytes, heads of many channels, and GPUs that have less room."""
WIDE_CHANNELS = 128
"""Heads of more channels are wide."""
TAIL_ROWS_MAX = 128
FIRST = -5
"""The highest priority that there is: chunks begin, and decodes fill what they leave."""


class CudaAttention:
    """Attention by kernels over blocks that lie anywhere."""

    def __init__(self) -> None:
        self._beside: torch.cuda.Stream | None = None

    def turn(self, angles: Turn, batch: StepBatch) -> Turn:  # noqa: ARG002 - the kernel has positions
        """The angles of all positions: the kernel looks up those it needs."""
        return angles

    def attend(self, heads: Heads, turn: Turn, kv: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """What every token reads from the tokens up to it: [tokens, heads, channels]."""
        query = _turned_and_written(heads, turn, kv, batch)
        result = torch.empty_like(query)
        if batch.prefills and batch.decodes is not None and kv.is_cuda:
            here = torch.cuda.current_stream()
            beside = self._beside = self._beside or torch.cuda.Stream(priority=FIRST)
            beside.wait_stream(here)
            with torch.cuda.stream(beside):
                _read_chunks(query, kv, batch, result)
            _read_decodes(query, kv, batch, result)
            here.wait_stream(beside)
        else:
            _read_chunks(query, kv, batch, result)
            _read_decodes(query, kv, batch, result)
        return result


def _read_chunks(
    query: torch.Tensor, kv: torch.Tensor, batch: StepBatch, result: torch.Tensor
) -> None:
    for rows in batch.prefills:
        part = slice(rows.first, rows.first + rows.length)
        read_in_place(
            query[part],
            kv,
            rows.table,
            batch.positions[part],
            result[part],
            longest=rows.context,
            table_stride=0,
            tiling=chunk_tiling(rows.length, query.shape[1] // kv.shape[3], kv),
        )


def _read_decodes(
    query: torch.Tensor, kv: torch.Tensor, batch: StepBatch, result: torch.Tensor
) -> None:
    if batch.decodes is None:
        return
    part = slice(batch.decodes.first, query.shape[0])
    tables = batch.decodes.tables
    read_in_place(
        query[part],
        kv,
        tables,
        batch.positions[part],
        result[part],
        longest=batch.decodes.longest,
        table_stride=tables.stride(0),
        tiling=DECODE,
    )


def _turned_and_written(
    heads: Heads, turn: Turn, kv: torch.Tensor, batch: StepBatch
) -> torch.Tensor:
    rows, count, channels = heads.query.shape
    kv_heads = heads.key.shape[1]
    turned = torch.empty((rows, count, channels), dtype=kv.dtype, device=kv.device)
    grid = (rows, -(-count // HEAD_TILE) + -(-kv_heads // HEAD_TILE))
    kernels.turn_and_write[grid](
        *heads,
        *(each.stride(0) for each in heads),
        *turn,
        batch.positions,
        batch.places,
        turned,
        kv[0],
        kv[1],
        count,
        kv_heads,
        CHANNELS=channels,
        HALF_TILE=_power(channels // 2),
        HEAD_TILE=HEAD_TILE,
        num_warps=2,
    )
    return turned


def read_in_place(
    query: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    result: torch.Tensor,
    *,
    longest: int,
    table_stride: int,
    tiling: Tiling,
) -> None:
    """Attention of some tokens over K and V where they lie."""
    rows, heads, channels = query.shape
    group = heads // (kv_heads := kv.shape[3])
    tokens = max(1, tiling.rows // group)
    tiles = -(-rows // tokens)
    if tiling.even:
        count = even_part_count(tiles * kv_heads, longest, tiling.programs)
    else:
        count = part_count(tiles * kv_heads, longest)
    span = -(-longest // (count * tiling.keys)) * tiling.keys
    parts = marks = result
    if split := count > 1:
        parts = query.new_empty((count, rows, heads, channels), dtype=torch.float32)
        marks = query.new_empty((2, count, rows, heads), dtype=torch.float32)
    kernels.attend_parts[tiles, kv_heads, count](
        *(query, kv[0], kv[1], tables, positions, result, parts, marks),
        *(rows, table_stride, span, kv_heads, math.log2(math.e) / math.sqrt(channels)),
        TOKENS=tokens,
        GROUP=group,
        CHANNELS=channels,
        CHANNEL_TILE=_channel_tile(channels),
        BLOCK=kv.shape[2],
        KEY_TILE=tiling.keys,
        ROW_TILE=max(16, _power(tokens * group)),
        SPLIT=split,
        EVEN=tiling.even,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if split:
        kernels.put_together[rows, heads](
            *(parts, marks, result, rows, heads, count),
            CHANNELS=channels,
            CHANNEL_TILE=_channel_tile(channels),
            PART_TILE=_power(count),
            num_warps=4,
        )


def chunk_tiling(tokens: int, group: int, kv: torch.Tensor) -> Tiling:
    """How the tokens of a prompt are cut, by the query heads of a KV head."""
    channels, size = _channel_tile(kv.shape[4]), kv.dtype.itemsize
    if size > 2 or channels > WIDE_CHANNELS or group > TAIL.rows:
        return SMALL
    return tiling_within(_shared_bytes(kv.device), tokens * group, channels * size)


def tiling_within(shared_bytes: float, rows: int, head_bytes: int) -> Tiling:
    """The first choice for these rows that fits into a multiprocessor's shared memory."""
    choices = (TAIL,) if rows <= TAIL_ROWS_MAX else (CHUNK, TAIL)
    held = ((each, each.rows + 2 * each.stages * each.keys) for each in choices)
    return next((each for each, count in held if count * head_bytes <= shared_bytes), SMALL)


@cache
def _shared_bytes(device: torch.device) -> float:
    """What a program may have of a multiprocessor's own memory."""
    if device.type != "cuda":
        return math.inf
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def part_count(programs: int, longest: int) -> int:
    """Into how many parts contexts are cut: a power of two, from shapes alone."""
    wanted = max(-(-PROGRAMS // programs), -(-longest // PART_TOKENS_MAX))
    most = max(1, longest // PART_TOKENS_MIN)
    return min(_power(wanted), _power(most + 1) // 2, PARTS_MAX)


def even_part_count(programs: int, longest: int, at_once: int) -> int:
    """The same for parts that are equal, whatever there is: as many as run at a time, no more."""
    return max(1, min(at_once // programs, longest // PART_TOKENS_MIN, PARTS_MAX))


def _channel_tile(channels: int) -> int:
    """What a kernel takes for the channels of a head: a matrix product wants 16 at least."""
    return max(16, _power(channels))


def _power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()
