"""Triton kernels that pack blocks, sum their cells and scatter them again.

    gather:   scattered blocks → packed blocks in staging, their cell sums on the way
    publish:  those sums → the rows of their slots in pinned host memory
    sum:      packed blocks in staging → their cell sums
    judge:    cell sums against those that were kept: one verdict a block
    scatter:  packed blocks in staging → scattered blocks, the good ones alone
    fetch:    some layers of packed blocks in pinned host memory → scattered blocks, and their sums

A program works on one *chunk*: some words of one segment (one plane and head) of one block.
Where the segments lie is a table in device memory, one row a chunk; which blocks, and under
which keys, is the batch's manifest, there too.

The one rule: the sums are those of `penstock.vocabulary.checksums`, bit for bit.
"""

# Triton reads the annotations itself and knows no other than `constexpr`; capitals set what it
# compiles in apart from what a launch passes. A kernel has no objects to hold arguments together.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913, PLR0917
from __future__ import annotations

import triton
import triton.language as tl

# The columns of a chunk's row in the table; see `penstock.movers.cuda.tables`.
ADDRESS = tl.constexpr(0)
BLOCK_STRIDE = tl.constexpr(1)
START = tl.constexpr(2)
CHUNK = tl.constexpr(3)
PLACE = tl.constexpr(4)
CELL = tl.constexpr(5)
GROUP = tl.constexpr(6)
COLUMNS = tl.constexpr(8)


@triton.jit
def _seed(key_seed, place):
    """The seed of a segment, from that of its key and from its place."""
    x = key_seed + place * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _low_term(word, position, seed):
    x = word ^ (position * 0x9E3779B1 + seed)
    x = (x ^ (x >> 11)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 15)


@triton.jit
def _high_term(low_term, position, seed):
    y = (low_term ^ (position * 0x85EBCA77 + seed)) * 0xC2B2AE3D
    return y ^ (y >> 16)


@triton.jit
def _add_terms(
    word,
    position,
    chunk,
    seed,
    sums,
    SEGMENT_BYTES: tl.constexpr,
):
    """Adds the terms of a chunk's words, and once a segment that of its length."""
    seed_low = seed.to(tl.uint32)
    seed_high = (seed >> 32).to(tl.uint32)
    words: tl.constexpr = (SEGMENT_BYTES + 3) // 4
    inside = position < words
    place = position.to(tl.uint32)
    low = _low_term(word, place, seed_low)
    high = _high_term(low, place, seed_high)
    low_sum = tl.sum(tl.where(inside, low, 0).to(tl.uint32), axis=0)
    high_sum = tl.sum(tl.where(inside, high, 0).to(tl.uint32), axis=0)
    first = chunk == 0
    end = tl.full((), words, tl.uint32)
    low_end = _low_term(tl.full((), SEGMENT_BYTES, tl.uint32), end, seed_low)
    high_end = _high_term(low_end, end, seed_high)
    low_sum += tl.where(first, low_end, 0).to(tl.uint32)
    high_sum += tl.where(first, high_end, 0).to(tl.uint32)
    tl.atomic_add(sums, low_sum, sem="relaxed")
    tl.atomic_add(sums + 1, high_sum, sem="relaxed")


@triton.jit
def _offsets(
    position,
    RUN: tl.constexpr,
    COUNT: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
):
    """Where the positions of a segment lie, for runs of `RUN` along up to three axes."""
    offset = position
    if RUN < COUNT:
        run = position // RUN
        offset = position % RUN + (run % N2) * S2
        if N1 > 1:
            offset += (run // N2 % N1) * S1
        if N1 * N2 * RUN < COUNT:
            offset += (run // (N2 * N1)) * S0
    return offset


@triton.jit
def _words(address, ALIGNED: tl.constexpr):
    words = address.to(tl.pointer_type(tl.uint32))
    if ALIGNED:
        words = tl.multiple_of(words, 16)
    return words


@triton.jit
def _bytes(address):
    return address.to(tl.pointer_type(tl.uint8))


@triton.jit
def _positions(chunk, WORDS: tl.constexpr, WIDE: tl.constexpr):
    first = chunk * WORDS
    positions = first.to(tl.int32) + tl.arange(0, WORDS)
    if WIDE:
        positions = positions.to(tl.int64)
    return positions


@triton.jit(
    do_not_specialize=["table", "slots", "slot_rows", "seeds", "staging", "pitch", "sums", "cells"]
)
def gather(
    table,
    slots,
    slot_rows,
    seeds,
    staging,
    pitch,
    sums,
    cells,
    SEGMENT_BYTES: tl.constexpr,
    RUN: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    WORDS: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """Packs one chunk of one block into staging and adds its terms to the block's sums.

    `RUN` and the strides count units: words where all is aligned to words, else bytes.
    """
    block = tl.program_id(1).to(tl.int64)
    row = table.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * COLUMNS
    group = tl.load(row + GROUP)
    slot = tl.load(slots.to(tl.pointer_type(tl.int32)) + group * slot_rows + block).to(tl.int64)
    source = tl.load(row + ADDRESS) + slot * tl.load(row + BLOCK_STRIDE)
    target = staging + block * pitch + tl.load(row + START)
    chunk = tl.load(row + CHUNK)
    position = _positions(chunk, WORDS, WIDE)
    if UNIT == 4:
        count: tl.constexpr = SEGMENT_BYTES // 4
        inside = position < count
        offset = _offsets(position, RUN, count, N1, N2, S0, S1, S2)
        word = tl.load(_words(source, ALIGNED) + offset, mask=inside, other=0)
        tl.store(_words(target, ALIGNED) + position, word, mask=inside)
    else:
        word = tl.zeros((WORDS,), tl.uint32)
        for part in tl.static_range(4):
            at = position * 4 + part
            inside = at < SEGMENT_BYTES
            offset = _offsets(at, RUN, SEGMENT_BYTES, N1, N2, S0, S1, S2)
            byte = tl.load(_bytes(source) + offset, mask=inside, other=0)
            tl.store(_bytes(target) + at, byte, mask=inside)
            word = word | (byte.to(tl.uint32) << (8 * part))
    if SUMMED:
        key_seed = tl.load(seeds.to(tl.pointer_type(tl.uint64)) + block)
        seed = _seed(key_seed, tl.load(row + PLACE).to(tl.uint64, bitcast=True))
        into = sums.to(tl.pointer_type(tl.uint32)) + 2 * (block * cells + tl.load(row + CELL))
        _add_terms(word, position, chunk, seed, into, SEGMENT_BYTES)


@triton.jit(do_not_specialize=["table", "seeds", "staging", "pitch", "sums", "cells"])
def sum_staged(
    table,
    seeds,
    staging,
    pitch,
    sums,
    cells,
    SEGMENT_BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Adds the terms of one chunk of a packed block to the block's sums."""
    block = tl.program_id(1).to(tl.int64)
    row = table.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * COLUMNS
    source = staging + block * pitch + tl.load(row + START)
    chunk = tl.load(row + CHUNK)
    position = _positions(chunk, WORDS, False)  # noqa: FBT003 - kernels take no keywords here
    if UNIT == 4:
        inside = position < SEGMENT_BYTES // 4
        word = tl.load(_words(source, ALIGNED) + position, mask=inside, other=0)
    else:
        word = tl.zeros((WORDS,), tl.uint32)
        for part in tl.static_range(4):
            at = position * 4 + part
            byte = tl.load(_bytes(source) + at, mask=at < SEGMENT_BYTES, other=0)
            word = word | (byte.to(tl.uint32) << (8 * part))
    key_seed = tl.load(seeds.to(tl.pointer_type(tl.uint64)) + block)
    seed = _seed(key_seed, tl.load(row + PLACE).to(tl.uint64, bitcast=True))
    into = sums.to(tl.pointer_type(tl.uint32)) + 2 * (block * cells + tl.load(row + CELL))
    _add_terms(word, position, chunk, seed, into, SEGMENT_BYTES)


@triton.jit(do_not_specialize=["sums", "slots", "kept", "cells"])
def publish(sums, slots, kept, cells, WIDTH: tl.constexpr):
    """Writes the sums of one block to its row in host memory, and clears them."""
    block = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots.to(tl.pointer_type(tl.int32)) + block).to(tl.int64)
    found = sums.to(tl.pointer_type(tl.uint64)) + block * cells
    target = kept.to(tl.pointer_type(tl.uint64)) + slot * cells
    for first in range(0, cells, WIDTH):
        cell = first + tl.arange(0, WIDTH)
        inside = cell < cells
        tl.store(target + cell, tl.load(found + cell, mask=inside), mask=inside)
        tl.store(found + cell, tl.zeros((WIDTH,), tl.uint64), mask=inside)


@triton.jit(do_not_specialize=["sums", "slots", "kept", "cells", "verdicts", "bad_cells"])
def judge(
    sums,
    slots,
    kept,
    cells,
    verdicts,
    bad_cells,
    WIDTH: tl.constexpr,
):
    """Counts the cells of one block whose sums differ from its row in host memory.

    The count is for `scatter` and for the host; the sums are cleared for the next batch.
    """
    block = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots.to(tl.pointer_type(tl.int32)) + block).to(tl.int64)
    found = sums.to(tl.pointer_type(tl.uint64)) + block * cells
    wanted = kept.to(tl.pointer_type(tl.uint64)) + slot * cells
    wrong = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, cells, WIDTH):
        cell = first + tl.arange(0, WIDTH)
        inside = cell < cells
        one = tl.load(found + cell, mask=inside, other=0)
        other = tl.load(wanted + cell, mask=inside, other=0)
        wrong += (one != other).to(tl.int32)
        tl.store(found + cell, tl.zeros((WIDTH,), tl.uint64), mask=inside)
    count = tl.sum(wrong, axis=0)
    tl.store(verdicts.to(tl.pointer_type(tl.int32)) + block, count)
    tl.store(bad_cells.to(tl.pointer_type(tl.int32)) + block, count)


@triton.jit(do_not_specialize=["table", "slots", "slot_rows", "verdicts", "staging", "pitch"])
def scatter(
    table,
    slots,
    slot_rows,
    verdicts,
    staging,
    pitch,
    SEGMENT_BYTES: tl.constexpr,
    RUN: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Writes one chunk of a packed block to its slot, if the whole block was found good."""
    block = tl.program_id(1).to(tl.int64)
    row = table.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * COLUMNS
    group = tl.load(row + GROUP)
    slot = tl.load(slots.to(tl.pointer_type(tl.int32)) + group * slot_rows + block).to(tl.int64)
    wrong = tl.load(verdicts.to(tl.pointer_type(tl.int32)) + block)
    if (slot >= 0) & (wrong == 0):
        target = tl.load(row + ADDRESS) + slot * tl.load(row + BLOCK_STRIDE)
        source = staging + block * pitch + tl.load(row + START)
        position = _positions(tl.load(row + CHUNK), WORDS, WIDE)
        if UNIT == 4:
            count: tl.constexpr = SEGMENT_BYTES // 4
            inside = position < count
            offset = _offsets(position, RUN, count, N1, N2, S0, S1, S2)
            word = tl.load(_words(source, ALIGNED) + position, mask=inside)
            tl.store(_words(target, ALIGNED) + offset, word, mask=inside)
        else:
            for part in tl.static_range(4):
                at = position * 4 + part
                inside = at < SEGMENT_BYTES
                offset = _offsets(at, RUN, SEGMENT_BYTES, N1, N2, S0, S1, S2)
                byte = tl.load(_bytes(source) + at, mask=inside)
                tl.store(_bytes(target) + offset, byte, mask=inside)


@triton.jit(
    do_not_specialize=[
        *("table", "rows", "items", "slots", "targets", "slot_rows", "seeds"),
        *("host", "stride", "sums", "cells"),
    ]
)
def fetch(
    table,
    rows,
    items,
    slots,
    targets,
    slot_rows,
    seeds,
    host,
    stride,
    sums,
    cells,
    SEGMENT_BYTES: tl.constexpr,
    RUN: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copies chunks of packed blocks in host memory to their slots, and adds up their terms.

    Few programs, each of which takes one chunk after the other: the link is the bound, and the
    engine's kernels want the rest of the device. An item is one of `rows` chunks of a block.
    """
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        block = (item // rows).to(tl.int64)
        row = table.to(tl.pointer_type(tl.int64)) + (item % rows).to(tl.int64) * COLUMNS
        group = tl.load(row + GROUP)
        slot = tl.load(slots.to(tl.pointer_type(tl.int32)) + block).to(tl.int64)
        place = targets.to(tl.pointer_type(tl.int32)) + group * slot_rows + block
        target_slot = tl.load(place).to(tl.int64)
        source = host + slot * stride + tl.load(row + START)
        target = tl.load(row + ADDRESS) + target_slot * tl.load(row + BLOCK_STRIDE)
        chunk = tl.load(row + CHUNK)
        wanted = target_slot >= 0
        position = _positions(chunk, WORDS, WIDE)
        if UNIT == 4:
            count: tl.constexpr = SEGMENT_BYTES // 4
            inside = position < count
            offset = _offsets(position, RUN, count, N1, N2, S0, S1, S2)
            word = tl.load(_words(source, ALIGNED) + position, mask=inside, other=0)
            tl.store(_words(target, ALIGNED) + offset, word, mask=inside & wanted)
        else:
            word = tl.zeros((WORDS,), tl.uint32)
            for part in tl.static_range(4):
                at = position * 4 + part
                inside = at < SEGMENT_BYTES
                offset = _offsets(at, RUN, SEGMENT_BYTES, N1, N2, S0, S1, S2)
                byte = tl.load(_bytes(source) + at, mask=inside, other=0)
                tl.store(_bytes(target) + offset, byte, mask=inside & wanted)
                word = word | (byte.to(tl.uint32) << (8 * part))
        key_seed = tl.load(seeds.to(tl.pointer_type(tl.uint64)) + block)
        seed = _seed(key_seed, tl.load(row + PLACE).to(tl.uint64, bitcast=True))
        into = sums.to(tl.pointer_type(tl.uint32)) + 2 * (block * cells + tl.load(row + CELL))
        _add_terms(word, position, chunk, seed, into, SEGMENT_BYTES)
