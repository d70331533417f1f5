"""Triton kernels of the engine's attention, over blocks that lie anywhere.

    turn_and_write:  rotary embedding of Q and K; K and V to their places in the blocks
    attend_parts:    some queries over one part of their context, read where it lies
    put_together:    the parts of each query's result

`attend_parts` computes for a *tile*: some tokens of one request (one, for a decode) and all query
heads that share a KV head, so that K and V are read once for all of them. A long context is cut
into parts, so that few requests keep the whole device busy.

The one rule: a token attends to positions up to its own. A row whose position is negative fills
up the batch: it writes nothing, and its result is zero.
"""

# Triton reads the annotations itself and knows no other than `constexpr`; capitals set what it
# compiles in apart from what a launch passes. A kernel has no objects to hold arguments together.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913, PLR0917
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turn(source, target, cos, sin, inside, HALF: tl.constexpr):
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (first * cos - second * sin).to(target.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(target.dtype.element_ty), mask=inside)


# Triton would compile anew for integers that are 1 or multiples of 16, and for addresses that are:
# what changes from step to step must not make a step wait for a compiler.
@triton.jit(do_not_specialize_on_alignment=["positions", "places"])
def turn_and_write(
    query,
    key,
    value,
    query_stride,
    key_stride,
    value_stride,
    cos,
    sin,
    positions,
    places,
    turned,
    keys,
    values,
    heads,
    kv_heads,
    CHANNELS: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """One token and some heads: queries of the first programs, K and V of the others."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles = tl.cdiv(heads, HEAD_TILE)
    half: tl.constexpr = CHANNELS // 2
    channel = tl.arange(0, HALF_TILE)
    known = channel < half
    position = tl.maximum(tl.load(positions + row), 0)
    cosine = tl.load(cos + position * CHANNELS + channel, mask=known, other=0.0).to(tl.float32)
    sine = tl.load(sin + position * CHANNELS + channel, mask=known, other=0.0).to(tl.float32)
    if tile < query_tiles:
        head = tile * HEAD_TILE + tl.arange(0, HEAD_TILE)
        inside = (head < heads)[:, None] & known[None, :]
        offset = head[:, None] * CHANNELS + channel[None, :]
        source = query + row * query_stride + offset
        target = turned + row * heads * CHANNELS + offset
        _turn(source, target, cosine[None, :], sine[None, :], inside, half)
    else:
        place = tl.load(places + row)
        head = (tile - query_tiles) * HEAD_TILE + tl.arange(0, HEAD_TILE)
        if place >= 0:
            inside = (head < kv_heads)[:, None] & known[None, :]
            offset = head[:, None] * CHANNELS + channel[None, :]
            there = place * kv_heads * CHANNELS + offset
            source = key + row * key_stride + offset
            _turn(source, keys + there, cosine[None, :], sine[None, :], inside, half)
            source = value + row * value_stride + offset
            tl.store(values + there, tl.load(source, mask=inside), mask=inside)
            tl.store(values + there + half, tl.load(source + half, mask=inside), mask=inside)


@triton.jit
def _take_in(wanted, key, value, seen, scale, peak, total, found):
    """What a tile has found so far, and what it finds in a few more keys."""
    # In powers of two, which the device has an instruction for.
    score = tl.dot(wanted, tl.trans(key), input_precision="ieee") * scale
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, axis=1))
    # A row that has seen nothing yet has no peak to be measured from.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    fading = tl.exp2(peak - base)
    total = total * fading + tl.sum(weight, axis=1)
    more = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return higher, total, found * fading[:, None] + more


@triton.jit
def _read_seen(
    keys,
    values,
    table,
    position,
    first,
    last,
    kv_head,
    kv_heads,
    wanted,
    scale,
    peak,
    total,
    found,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Takes in the keys of some positions, of which each row sees those up to its own."""
    channel = tl.arange(0, CHANNEL_TILE)
    known = (channel < CHANNELS)[None, :]
    for start in tl.range(first, last, KEY_TILE, num_stages=STAGES):
        token = start + tl.arange(0, KEY_TILE)
        there = token < last
        block = tl.load(table + token // BLOCK, mask=there, other=0)
        offset = ((block * BLOCK + token % BLOCK) * kv_heads + kv_head)[:, None] * CHANNELS
        offset += channel[None, :]
        key = tl.load(keys + offset, mask=there[:, None] & known, other=0.0)
        value = tl.load(values + offset, mask=there[:, None] & known, other=0.0)
        seen = there[None, :] & (token[None, :] <= position[:, None])
        peak, total, found = _take_in(wanted, key, value, seen, scale, peak, total, found)
    return peak, total, found


@triton.jit
def _take_all_in(wanted, key, value, scale, peak, total, found):
    """The same as `_take_in`, where every row sees every key."""
    score = tl.dot(wanted, tl.trans(key), input_precision="ieee")
    higher = tl.maximum(peak, tl.max(score, axis=1) * scale)
    weight = tl.exp2(score * scale - higher[:, None])
    fading = tl.exp2(peak - higher)
    total = total * fading + tl.sum(weight, axis=1)
    found = found * fading[:, None]
    found = tl.dot(weight.to(value.dtype), value, found, input_precision="ieee")
    return higher, total, found


@triton.jit
def _read_all(
    keys,
    values,
    table,
    first,
    last,
    kv_head,
    kv_heads,
    wanted,
    scale,
    peak,
    total,
    found,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """Takes in the keys of some positions, whole tiles of them, all of which every row sees."""
    channel = tl.arange(0, CHANNEL_TILE)
    known = (channel < CHANNELS)[None, :]
    # Where the next keys lie is looked up while these are taken in. One block may have all of
    # them: then it is looked up once.
    coming = first + tl.arange(0, 1 if BLOCK % KEY_TILE == 0 else KEY_TILE)
    block = tl.load(table + coming // BLOCK, mask=coming < last, other=0)
    for start in range(first, last, KEY_TILE):
        place = block * BLOCK + (start + tl.arange(0, KEY_TILE)) % BLOCK
        coming += KEY_TILE
        block = tl.load(table + coming // BLOCK, mask=coming < last, other=0)
        offset = (place * kv_heads + kv_head)[:, None] * CHANNELS + channel[None, :]
        if CHANNELS == CHANNEL_TILE:
            key = tl.load(keys + offset)
            value = tl.load(values + offset)
        else:
            key = tl.load(keys + offset, mask=known, other=0.0)
            value = tl.load(values + offset, mask=known, other=0.0)
        peak, total, found = _take_all_in(wanted, key, value, scale, peak, total, found)
    return peak, total, found


@triton.jit
def _read(
    keys,
    values,
    table,
    position,
    first,
    last,
    kv_head,
    kv_heads,
    wanted,
    scale,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """What a tile finds in a part: first, if `EVEN`, in what all of its rows see."""
    peak = tl.full((ROW_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((ROW_TILE,), tl.float32)
    found = tl.zeros((ROW_TILE, CHANNEL_TILE), tl.float32)
    if EVEN:
        lowest = tl.min(tl.where(position < 0, last, position), axis=0)
        whole = tl.maximum(tl.minimum(last, lowest + 1) - first, 0) // KEY_TILE * KEY_TILE
        peak, total, found = _read_all(
            *(keys, values, table, first, first + whole, kv_head, kv_heads),
            *(wanted, scale, peak, total, found, CHANNELS, CHANNEL_TILE, BLOCK, KEY_TILE),
        )
        first += whole
        # Rows that fill up have taken in what they should not have.
        peak = tl.where(position < 0, float("-inf"), peak)
        total = tl.where(position < 0, 0.0, total)
        found = tl.where((position < 0)[:, None], 0.0, found)
    # What is left then are the last few keys: nothing is to be had ahead of them.
    peak, total, found = _read_seen(
        *(keys, values, table, position, first, last, kv_head, kv_heads),
        *(wanted, scale, peak, total, found, CHANNELS, CHANNEL_TILE, BLOCK, KEY_TILE),
        1 if EVEN else None,
    )
    return peak, total, found


@triton.jit(
    do_not_specialize=["rows", "table_stride", "span"],
    do_not_specialize_on_alignment=["tables", "positions"],
)
def attend_parts(
    query,
    keys,
    values,
    tables,
    positions,
    result,
    parts,
    marks,
    rows,
    table_stride,
    span,
    kv_heads,
    scale,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One tile, one KV head, one part of the context: `span` tokens of it.

    `EVEN` is for several tokens of one request: then the parts are equal shares of its context,
    however much the shape has room for, and what all of the tokens see is read without a mask.
    """
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, channel = tl.arange(0, ROW_TILE), tl.arange(0, CHANNEL_TILE)
    row = tile * TOKENS + lane // GROUP
    mine = (lane < TOKENS * GROUP) & (row < rows)
    position = tl.load(positions + row, mask=mine, other=-1)
    if EVEN:
        position = position.to(tl.int32)  # Its registers are what a program has least of.
        share = tl.cdiv(tl.max(position, axis=0) + 1, tl.num_programs(2))
        span = tl.cdiv(share, KEY_TILE) * KEY_TILE
    first = part * span
    last = tl.minimum(first + span, tl.max(position, axis=0) + 1)
    known = (channel < CHANNELS)[None, :]
    place = row.to(tl.int64) * kv_heads * GROUP + kv_head * GROUP + lane % GROUP
    at = place[:, None] * CHANNELS + channel[None, :]
    wanted = tl.load(query + at, mask=mine[:, None] & known, other=0.0)
    table = tables + tile.to(tl.int64) * table_stride
    peak, total, found = _read(
        *(keys, values, table, position, first, last, kv_head, kv_heads, wanted, scale),
        *(CHANNELS, CHANNEL_TILE, BLOCK, KEY_TILE, ROW_TILE, EVEN),
    )
    if SPLIT:
        before = part.to(tl.int64) * rows * kv_heads * GROUP
        tl.store(marks + before + place, peak, mask=mine)
        all_parts = tl.num_programs(2).to(tl.int64) * rows * kv_heads * GROUP
        tl.store(marks + all_parts + before + place, total, mask=mine)
        # What nobody has seen is not looked at: see `put_together`.
        has = (mine & (peak > float("-inf")))[:, None] & known
        tl.store(parts + before * CHANNELS + at, found, mask=has)
    else:
        found = (found / tl.where(total == 0.0, 1.0, total)[:, None]).to(result.dtype.element_ty)
        tl.store(result + at, found, mask=mine[:, None] & known)


@triton.jit(do_not_specialize=["rows", "count"])
def put_together(
    parts,
    marks,
    result,
    rows,
    heads,
    count,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    PART_TILE: tl.constexpr,
):
    """One row and one head: the parts of its context, each weighed by its peak."""
    place = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    part = tl.arange(0, PART_TILE)
    channel = tl.arange(0, CHANNEL_TILE)
    there = part.to(tl.int64) * rows * heads + place
    peak = tl.load(marks + there, mask=part < count, other=float("-inf"))
    has = peak > float("-inf")
    top = tl.max(peak, axis=0)
    weight = tl.where(has, tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    kept = tl.load(marks + rows * heads * count + there, mask=has, other=0.0)
    total = tl.sum(weight * kept, axis=0)
    read = has[:, None] & (channel < CHANNELS)[None, :]
    found = tl.load(parts + there[:, None] * CHANNELS + channel[None, :], mask=read, other=0.0)
    whole = tl.sum(found * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    whole = whole.to(result.dtype.element_ty)
    tl.store(result + place * CHANNELS + channel, whole, mask=channel < CHANNELS)
