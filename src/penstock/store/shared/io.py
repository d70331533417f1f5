"""Reads and writes of values of a shared store: straight from mapped arenas, or whole.

Values are read by ranges, straight to where they belong. Compressed ones cannot be: they are read
whole, into memory of the thread. Whether they are, the last run tells; a run for which that was
wrong takes a second call.

Tiers on slow links make blocks smaller without loss (`compression = "zstd"`). The exponents of
neighbouring numbers are alike, their fractions are noise. So a block is split into byte planes: the
highest byte of every number, which holds sign and exponent, is compressed by zstd, the others are
kept as they are.

    bytes of a number (u8), length of the frame (u32), zstd frame, other planes, bytes left over

A block is one frame, not one for each layer or head: those of a head are so short (2 KiB of
exponents) that zstd finds less in them. This needs the `compression` extra.

The rules:

- Whatever encoded bytes come, decoding writes the target and no byte beside it, and takes no more
  memory than the block has.
- What is in `faults` is not looked at, and all the rest is still to be verified.
- A block that `read_values` does not name as bad has the bytes that were saved under its key,
  whatever the store returned, and its sums stand in the arena.
"""

from __future__ import annotations

import logging
import mmap
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache.operations import BlockFault
from penstock.errors import install_hint
from penstock.store.clients.blobs import BlobOutcome, BlobRange, BlobRead, BlobWrite
from penstock.store.shared.values import (
    CODEC_PLAIN,
    CODEC_PLANES,
    Fronts,
    fill_fronts,
    piece_of,
    read_fronts,
    value_name,
)
from penstock.vocabulary.arguments import as_int

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

    from penstock.store.base import MappedArena, Space
    from penstock.store.clients.blobs import BlobStore
    from penstock.store.shared.values import Gathering, SourcePart, ValuePiece
    from penstock.store.stored_tier import SumsOfArenas
    from penstock.vocabulary.keys import Key


logger = logging.getLogger(__name__)
_lock = threading.Lock()
_warned: set[int] = set()
"""Codecs that a line of the log has named; `_lock` guards it."""


class WholeValues(NamedTuple):
    """The values of one part of the blocks, as they were read."""

    part: SourcePart
    fronts: Fronts
    blocks: NDArray[np.uint8]
    """Plain, of shape [keys, bytes of a block]."""
    faults: dict[int, BlockFault]
    """What is wrong with which of them."""
    compressed: bool
    """Whether one of them was compressed."""


def read_whole(
    space: Space,
    keys: Sequence[Key],
    parts: Sequence[SourcePart],
    blobs: BlobStore,
    memory: FrontMemory,
    *,
    may_end: bool,
    timeout_s: float,
) -> list[WholeValues]:
    """Reads values into `memory`, and decodes those that are compressed.

    Raises `BlobStoreError`: the store does not answer.
    """
    room = memory.room(len(keys) * sum(part.piece.value_bytes for part in parts))
    # What a store leaves out must not be what was read before.
    room[:] = 0
    rows: list[NDArray[np.uint8]] = []
    for part in parts:
        size = len(keys) * part.piece.value_bytes
        rows.append(room[:size].reshape(len(keys), -1))
        room = room[size:]
    reads = [
        BlobRead(value_name(space, part.piece, key), [BlobRange(0, row.data)], whole=may_end)
        for part, its_rows in zip(parts, rows, strict=True)
        for key, row in zip(keys, its_rows, strict=True)
    ]
    outcomes = blobs.read(reads, timeout_s=timeout_s)
    again = [number for number, each in enumerate(outcomes) if each is BlobOutcome.SHORT]
    if again:
        shorter = [reads[number]._replace(whole=True) for number in again]
        for number, outcome in zip(again, blobs.read(shorter, timeout_s=timeout_s), strict=True):
            outcomes[number] = outcome
    step = len(keys)
    return [
        _decoded(space, keys, part, its_rows, outcomes[at * step : (at + 1) * step])
        for at, (part, its_rows) in enumerate(zip(parts, rows, strict=True))
    ]


def _decoded(
    space: Space,
    keys: Sequence[Key],
    part: SourcePart,
    rows: NDArray[np.uint8],
    outcomes: Sequence[BlobOutcome],
) -> WholeValues:
    size = part.piece.front_bytes
    blocks = rows[:, size:]
    fronts = read_fronts(rows[:, :size], space, part.piece, keys)
    faults: dict[int, BlockFault] = {}
    compressed = False
    for number, outcome in enumerate(outcomes):
        if outcome is BlobOutcome.MISSING:
            faults[number] = BlockFault.MISSING
        elif outcome is BlobOutcome.SHORT or not fronts.sound[number]:
            faults[number] = BlockFault.CORRUPT
        elif fronts.codecs[number] != CODEC_PLAIN:
            compressed = True
            fault = _decode(fronts.codecs[number], blocks[number], fronts.stored_bytes[number])
            if fault is not None:
                faults[number] = fault
    return WholeValues(part, fronts, blocks, faults, compressed)


def _decode(codec: int, block: NDArray[np.uint8], stored_bytes: int) -> BlockFault | None:
    """Decodes a block where it lies; what is wrong with it, if anything."""
    if codec == CODEC_PLANES:
        try:
            decode_block(block[:stored_bytes].tobytes(), block.data)
        except ValueError:
            return BlockFault.CORRUPT
        except ImportError:
            pass  # The extra is not installed.
        else:
            return None
    # It may be whole, and somebody else can read it: it is no reason to remove it.
    _warn(codec)
    return BlockFault.UNREADABLE


def _warn(codec: int) -> None:
    """Says once for each codec that its values are missed, whichever thread meets one first."""
    with _lock:
        if codec in _warned:
            return
        _warned.add(codec)
    help_text = f": {install_hint('compression')}" if codec == CODEC_PLANES else ""
    logger.warning(
        "shared tier: values that another engine compressed (codec %d) cannot be read here and are "
        "missed%s",
        codec,
        help_text,
    )


WHOLE_BYTES_MAX = 32 << 20
"""Of values that are read whole at once, by one thread; a single block may have more."""


class ValueRun(NamedTuple):
    """Blocks of one rank that are read or written by one call of the client."""

    arena: MappedArena
    space: Space
    keys: Sequence[Key]
    slots: NDArray[np.int32]
    """Of the arena."""
    salt: int


class ReadResult(NamedTuple):
    """What came of reading a run."""

    faults: dict[int, BlockFault]
    """By position in the run."""
    wrong: list[str]
    """Names of values that are not what they should be."""
    compressed: bool
    """Whether there were compressed values."""


class WriteResult(NamedTuple):
    """What came of writing a run, by position."""

    problems: list[str]
    """Why a block could not be written, or an empty text."""
    stored_bytes: list[int]
    """Of each block as it was stored."""


class FrontMemory:
    """Memory of one thread for heads and sums, or whole values, known to the client."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._memory = np.empty(0, dtype=np.uint8)

    def room(self, size: int) -> NDArray[np.uint8]:
        if len(self._memory) < size:
            self.close()
            self._memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
            self._blobs.register(self._memory.data)
        return self._memory[:size]

    def close(self) -> None:
        if len(self._memory):
            self._blobs.unregister(self._memory.data)
            self._memory = np.empty(0, dtype=np.uint8)


def write_values(
    run: ValueRun,
    parents: Sequence[Key | None],
    blobs: BlobStore,
    memory: FrontMemory,
    *,
    compress: bool,
    timeout_s: float,
) -> WriteResult:
    """Writes blocks, compressed if it is wanted and makes them smaller.

    Raises `BlobStoreError`: the store does not answer.
    """
    piece, count = piece_of(run.arena), len(run.keys)
    fronts = memory.room(count * piece.front_bytes).reshape(count, -1)
    sums = run.arena.host.sums(run.slots)
    blocks = blocks_of(run)
    if compress:
        blocks = _compressed(blocks)
    sizes = [block.nbytes for block in blocks]
    fill_fronts(fronts, run.space, piece, run.keys, parents, run.salt, sums, sizes)
    writes = [
        BlobWrite(value_name(run.space, piece, key), (front.data, block))
        for key, front, block in zip(run.keys, fronts, blocks, strict=True)
    ]
    return WriteResult(blobs.write(writes, timeout_s=timeout_s), sizes)


def _compressed(blocks: Sequence[memoryview]) -> list[memoryview]:
    """Blocks in fewer bytes; those that would not have fewer as they are."""
    item_bytes = choose_item_bytes(blocks[0])
    encoded = [encode_block(block, item_bytes=item_bytes) for block in blocks]
    return [
        block if each is None else memoryview(each)
        for block, each in zip(blocks, encoded, strict=True)
    ]


def read_values(
    run: ValueRun,
    gathering: Gathering,
    blobs: BlobStore,
    memory: FrontMemory,
    sums: SumsOfArenas,
    *,
    whole: bool,
    timeout_s: float,
) -> ReadResult:
    """Reads blocks into their arena slots, verifies them and writes their sums there.

    Raises `BlobStoreError`: the store does not answer.
    """
    left = _take_near(run, gathering, blobs, sums)
    if len(left) == len(run.keys):
        return _read_far(run, gathering, blobs, memory, sums, whole=whole, timeout_s=timeout_s)
    if not left:
        return ReadResult({}, [], compressed=whole)
    rest = run._replace(keys=[run.keys[each] for each in left], slots=run.slots[left])
    found = _read_far(rest, gathering, blobs, memory, sums, whole=whole, timeout_s=timeout_s)
    return found._replace(faults={left[at]: fault for at, fault in found.faults.items()})


def _take_near(
    run: ValueRun, gathering: Gathering, blobs: BlobStore, sums: SumsOfArenas
) -> list[int]:
    """Copies blocks out of memory that is mapped here; those that are still to be read.

    What is not right there was filled anew meanwhile: whose it is says so when asked.
    """
    left = list(range(len(run.keys)))
    own, host = run.arena.form.checksum, run.arena.host
    taker = sums.of(run.arena, own)
    [part, *others] = gathering.parts
    if others or part.ranges != ((0, 0, host.layout.block_bytes),):
        return left
    for each in blobs.near(run.space, part.piece.name, run.keys):
        there = each.arena
        if there.form.checksum is not own or piece_of(there)[1:] != piece_of(run.arena)[1:]:
            continue
        places = np.hstack(
            (
                there.places(np.array(each.slots, dtype=np.int32)),
                run.arena.places(run.slots[each.positions]),
            )
        )
        keys = [run.keys[position] for position in each.positions]
        memory = (there.host.arena.bytes, host.arena.bytes)
        right = taker.take(*memory, places, keys, (each.salt, run.salt))
        if each.counts():
            chosen = zip(each.positions, right.tolist(), strict=True)
            taken = {position for position, is_right in chosen if is_right}
            left = [position for position in left if position not in taken]
    return left


def _read_far(
    run: ValueRun,
    gathering: Gathering,
    blobs: BlobStore,
    memory: FrontMemory,
    sums: SumsOfArenas,
    *,
    whole: bool,
    timeout_s: float,
) -> ReadResult:
    faults: dict[int, BlockFault] = {}
    again = list(range(len(run.keys)))
    if not whole:
        again = _read_ranges(run, gathering, blobs, memory, sums, faults, timeout_s=timeout_s)
    compressed = False
    size = sum(part.piece.value_bytes for part in gathering.parts)
    at_once = max(1, WHOLE_BYTES_MAX // size)
    for first in range(0, len(again), at_once):
        chosen = again[first : first + at_once]
        keys = [run.keys[position] for position in chosen]
        some = run._replace(keys=keys, slots=run.slots[chosen])
        values = read_whole(
            run.space, keys, gathering.parts, blobs, memory, may_end=True, timeout_s=timeout_s
        )
        compressed |= any(each.compressed for each in values)
        found = _place_whole(some, values)
        _verify(some, gathering, [each.fronts for each in values], sums, found)
        faults |= {chosen[position]: fault for position, fault in found.items()}
    wrong = [
        value_name(run.space, part.piece, run.keys[position])
        for position, fault in faults.items()
        if fault is BlockFault.CORRUPT
        for part in gathering.parts
    ]
    return ReadResult(faults, wrong, compressed)


def _read_ranges(
    run: ValueRun,
    gathering: Gathering,
    blobs: BlobStore,
    memory: FrontMemory,
    sums: SumsOfArenas,
    faults: dict[int, BlockFault],
    *,
    timeout_s: float,
) -> list[int]:
    """Reads blocks straight into the arena; those that are to be read whole, by position."""
    count = len(run.keys)
    room = memory.room(count * sum(part.piece.front_bytes for part in gathering.parts))
    blocks = blocks_of(run)
    reads: list[BlobRead] = []
    fronts: list[NDArray[np.uint8]] = []
    for part in gathering.parts:
        size = part.piece.front_bytes
        front, room = room[: count * size].reshape(count, size), room[count * size :]
        front[:] = 0
        fronts.append(front)
        reads += _reads_of(run, part, front, blocks)
    outcomes = blobs.read(reads, timeout_s=timeout_s)
    checked = [
        read_fronts(front, run.space, part.piece, run.keys)
        for part, front in zip(gathering.parts, fronts, strict=True)
    ]
    again: set[int] = set()
    for number, outcome in enumerate(outcomes):
        part_number, position = divmod(number, count)
        front_of = checked[part_number]
        if outcome is BlobOutcome.MISSING:
            faults[position] = BlockFault.MISSING
        elif outcome is BlobOutcome.SHORT:
            # It was cut, or is compressed: its head says which.
            again.add(position)
        elif not front_of.sound[position]:
            faults.setdefault(position, BlockFault.CORRUPT)
        elif front_of.codecs[position] != CODEC_PLAIN:
            again.add(position)
    unread = again - faults.keys()
    _verify(run, gathering, checked, sums, faults, skipped=unread)
    return sorted(unread)


def _place_whole(run: ValueRun, values: Sequence[WholeValues]) -> dict[int, BlockFault]:
    """Copies what is wanted of whole values into the arena; what is wrong with which blocks."""
    faults: dict[int, BlockFault] = {}
    for each in values:
        for position, fault in each.faults.items():
            if fault is BlockFault.MISSING:
                faults[position] = fault
            else:
                faults.setdefault(position, fault)
    for position, memory in enumerate(blocks_of(run)):
        if position not in faults:
            block = np.frombuffer(memory, dtype=np.uint8)
            for each in values:
                for start, to, length in each.part.ranges:
                    block[to : to + length] = each.blocks[position, start : start + length]
    return faults


def blocks_of(run: ValueRun) -> list[memoryview]:
    blocks = run.arena.blocks(run.slots, run.arena.host.layout.block_bytes)
    return [each.data for each in blocks]


def _reads_of(
    run: ValueRun, part: SourcePart, fronts: NDArray[np.uint8], blocks: Sequence[memoryview]
) -> list[BlobRead]:
    piece: ValuePiece = part.piece
    ranges = sorted(part.ranges)
    return [
        BlobRead(
            value_name(run.space, piece, key),
            [
                BlobRange(0, front.data),
                *(
                    BlobRange(piece.front_bytes + start, block[to : to + length])
                    for start, to, length in ranges
                ),
            ],
        )
        for key, front, block in zip(run.keys, fronts, blocks, strict=True)
    ]


def _verify(
    run: ValueRun,
    gathering: Gathering,
    fronts: Sequence[Fronts],
    sums: SumsOfArenas,
    faults: dict[int, BlockFault],
    *,
    skipped: Collection[int] = (),
) -> None:
    """Checks what arrived against the sums of the values, and keeps sums under `run.salt`."""
    host, own = run.arena.host, run.arena.form.checksum
    of_values = sums.of(run.arena, gathering.checksum)
    # Values of one life have one salt; most runs are of one life.
    by_salts: dict[tuple[int, ...], list[int]] = {}
    for position in range(len(run.keys)):
        if position not in faults and position not in skipped:
            salts = tuple(front.salts[position] for front in fronts)
            by_salts.setdefault(salts, []).append(position)
    for salts, positions in by_salts.items():
        slots = run.slots[positions]
        places = host.blocks_offset + slots.astype(np.int64) * host.slot_bytes
        keys = [run.keys[position] for position in positions]
        right = np.ones(len(positions), dtype=np.bool_)
        kept: NDArray[np.uint64] | None = None
        for salt in dict.fromkeys(salts):
            found = of_values.sum_pairs(host.arena.bytes, places, keys, (salt, run.salt))
            kept = found[1]
            for part, front, its_salt in zip(gathering.parts, fronts, salts, strict=True):
                if its_salt == salt:
                    stored = front.sums[positions][:, part.source_cells]
                    right &= (found[0][:, part.target_cells] == stored).all(axis=1)
        if gathering.checksum is not own:
            pair = (run.salt, run.salt)
            kept = sums.of(run.arena, own).sum_pairs(host.arena.bytes, places, keys, pair)[0]
        assert kept is not None
        host.keep_sums(slots[right], kept[right])
        for position, is_right in zip(positions, right.tolist(), strict=True):
            if not is_right:
                faults[position] = BlockFault.CORRUPT


LEVEL = 1
"""Of zstd. Lower ones find nothing in KV, higher ones nothing more."""
ITEM_BYTES_MAX = 8
ITEM_BYTES_TRIED = (2, 1, 4)
"""Sizes of numbers that `choose_item_bytes` tries; of equals the first."""
SAMPLE_BYTES = 64 << 10
_HEAD = struct.Struct("<BI")


def choose_item_bytes(block: bytes | memoryview) -> int:
    """The size of a block's numbers, as far as it matters here: the one that makes it smallest.

    It is tried, not asked of the layout: an engine's opaque blocks say nothing of their numbers.
    """
    sample = memoryview(block)[:SAMPLE_BYTES]
    sizes = {
        item_bytes: len(encode_block(sample, item_bytes=item_bytes) or sample)
        for item_bytes in ITEM_BYTES_TRIED
    }
    return min(sizes, key=sizes.__getitem__)


_importing = threading.Lock()


def _zstandard() -> ModuleType:
    """An extra. Raises `ImportError`: it is not there, or cannot be used."""
    # Where an import fails in one thread, another one that waits for it gets half of the module.
    with _importing:
        import zstandard  # noqa: PLC0415  (an extra)
    return zstandard


def encode_block(block: bytes | memoryview, *, item_bytes: int) -> bytes | None:
    """The block in fewer bytes; `None` if that cannot be."""
    zstandard = _zstandard()
    as_int("item_bytes", item_bytes, 1, ITEM_BYTES_MAX)
    raw = np.frombuffer(block, dtype=np.uint8)
    count = len(raw) // item_bytes
    items = raw[: count * item_bytes].reshape(count, item_bytes)
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(items[:, -1].tobytes())
    parts = (
        _HEAD.pack(item_bytes, len(frame)),
        frame,
        items[:, :-1].T.tobytes(),
        raw[count * item_bytes :].tobytes(),
    )
    return b"".join(parts) if sum(map(len, parts)) < len(raw) else None


def decode_block(encoded: bytes | memoryview, target: memoryview) -> None:
    """Writes the block that `encode_block` was given into `target`, which has its length.

    Raises `ValueError`: it is no block of that length; `target` may have been written.
    """
    zstandard = _zstandard()
    stored = memoryview(encoded)
    out = np.frombuffer(target, dtype=np.uint8)
    if len(stored) < _HEAD.size:
        raise ValueError(f"{len(stored)} bytes are no encoded block of {len(out)}")
    item_bytes, frame_bytes = _HEAD.unpack_from(stored)
    if not 1 <= item_bytes <= ITEM_BYTES_MAX:
        raise ValueError(f"numbers have {item_bytes} bytes, must have 1 to {ITEM_BYTES_MAX}")
    count = len(out) // item_bytes
    frame, rest = stored[_HEAD.size :][:frame_bytes], stored[_HEAD.size + frame_bytes :]
    others = count * (item_bytes - 1)
    if len(frame) != frame_bytes or len(rest) != len(out) - count:
        raise ValueError(f"{len(stored)} bytes are not the planes of a block of {len(out)}")
    items = out[: count * item_bytes].reshape(count, item_bytes)
    try:
        # What a frame says of its length is checked first: as much memory would be taken.
        if zstandard.get_frame_parameters(frame).content_size != count:
            raise ValueError(f"a frame is not that of {count} bytes")
        plane = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from None
    if len(plane) != count:
        raise ValueError(f"a frame has {len(plane)} bytes, must have {count}")
    items[:, -1] = np.frombuffer(plane, dtype=np.uint8)
    items[:, :-1] = np.frombuffer(rest[:others], dtype=np.uint8).reshape(item_bytes - 1, count).T
    out[count * item_bytes :] = np.frombuffer(rest[others:], dtype=np.uint8)
