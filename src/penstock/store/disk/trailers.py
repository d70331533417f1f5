"""Trailers: after each block on the disk, whose block it is and what its sums are.

    begin_trailers   names the blocks of a run, with the sums that they have in the arena
    end_trailers     seals what was begun; in between, blocks are encrypted
    check_trailers   finds those that are whole and of the blocks that were asked for
    check_blocks     compares the blocks, now in the arena, with the sums in their trailers

Compiled code does it (`movers/stored_blocks.c`), all blocks of a run in a call; without it,
NumPy does, a block after the other.

The one rule: a block in which neither check finds a fault has the bytes that were saved under its
key.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.cache.operations import BlockFault
from penstock.movers.packing import load_parts_library
from penstock.store.base import key_fields
from penstock.store.disk.format import TRAILER_HEAD, TRAILER_HEAD_BYTES, read_trailer
from penstock.vocabulary.checksums import SUM_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.movers.packing import PackedSums
    from penstock.store.disk.io import Run

SALT_AT, SUM_AT = 64, TRAILER_HEAD_BYTES - SUM_BYTES
assert TRAILER_HEAD.fields is not None
assert tuple(TRAILER_HEAD.fields[name][1] for name in ("salt", "sum")) == (SALT_AT, SUM_AT)
_NAMED = struct.Struct("<Q32s16sQQII")
"""The fields of a trailer that say whose block it is; the fifth is the salt of the sums."""
_RIGHT, _ANOTHER, _CORRUPT = range(3)
"""What compiled code says. Another: it is whole, but two keys have one digest, and the index has
the other's."""
_FAULTS = {_ANOTHER: BlockFault.MISSING, _CORRUPT: BlockFault.CORRUPT}


def begin_trailers(run: Run, trailers: NDArray[np.uint8]) -> None:
    """Fills in all but how a block is encrypted, and the trailer's own sum; `trailers` is zeros."""
    count, cells = len(run.keys), run.geometry.cell_count
    sums = run.arena.host.sums(run.slots).astype("<u8", copy=False)
    keys = key_fields(run.keys)
    library = load_parts_library()
    if library is not None:
        library.begin_trailers(
            *(trailers.ctypes.data, trailers.strides[0], count, cells),
            *(_names(run), keys.ctypes.data, sums.ctypes.data),
        )
        return
    for number, trailer in enumerate(trailers):
        named = np.frombuffer(_names(run, number), dtype=np.uint8)
        trailer[: _NAMED.size] = named
        table = sums[number].view(np.uint8)
        trailer[TRAILER_HEAD_BYTES : TRAILER_HEAD_BYTES + len(table)] = table


def _names(run: Run, number: int = 0) -> bytes:
    """How the trailer of one of the blocks begins."""
    key, (space, generation) = run.keys[number], run.space
    slot, cells = run.first + number, run.geometry.cell_count
    return _NAMED.pack(run.life, key, space, generation, run.salt, slot, cells)


def end_trailers(trailers: NDArray[np.uint8], cell_count: int) -> NDArray[np.uint64]:
    """Writes the sum of each trailer into it; returns them, for the rows."""
    sums = np.empty(len(trailers), dtype=np.uint64)
    library = load_parts_library()
    if library is not None:
        scratch = np.empty(SUM_AT + cell_count * SUM_BYTES, dtype=np.uint8)
        library.end_trailers(
            *(trailers.ctypes.data, trailers.strides[0], len(trailers), cell_count),
            *(scratch.ctypes.data, sums.ctypes.data),
        )
        return sums
    end = TRAILER_HEAD_BYTES + cell_count * SUM_BYTES
    for number, trailer in enumerate(trailers):
        joined = trailer[:SUM_AT].tobytes() + trailer[TRAILER_HEAD_BYTES:end].tobytes()
        sums[number] = xxh3_64_intdigest(joined)
        sealed = sums[number : number + 1].astype("<u8").view(np.uint8)
        trailer[SUM_AT:TRAILER_HEAD_BYTES] = sealed
    return sums


def check_trailers(run: Run, trailers: NDArray[np.uint8]) -> dict[int, BlockFault]:
    """What is wrong with the trailers of a run, by position in it."""
    count, cells = len(run.keys), run.geometry.cell_count
    library = load_parts_library()
    if library is None:
        return _faults([_look_at(run, number, each) for number, each in enumerate(trailers)])
    keys, wrong = key_fields(run.keys), np.empty(count, dtype=np.uint8)
    scratch = np.empty(SUM_AT + cells * SUM_BYTES, dtype=np.uint8)
    library.check_trailers(
        *(trailers.ctypes.data, trailers.strides[0], count, cells),
        *(_names(run), keys.ctypes.data, scratch.ctypes.data, wrong.ctypes.data),
    )
    return _faults(wrong.tolist())


def _look_at(run: Run, number: int, trailer: NDArray[np.uint8]) -> int:
    found = read_trailer(trailer.tobytes())
    if found is None:
        return _CORRUPT
    said = _NAMED.unpack(trailer[: _NAMED.size].tobytes())
    wanted = _NAMED.unpack(_names(run, number))
    names, places = (1, 2), (0, 3, 5, 6)
    if any(said[field] != wanted[field] for field in places):
        return _CORRUPT
    return _ANOTHER if any(said[field] != wanted[field] for field in names) else _RIGHT


def _faults(wrong: list[int]) -> dict[int, BlockFault]:
    if not any(wrong):
        return {}
    return {position: _FAULTS[what] for position, what in enumerate(wrong) if what}


def check_blocks(
    run: Run, sums: PackedSums, trailers: NDArray[np.uint8], bad: dict[int, BlockFault]
) -> None:
    """Adds those to `bad` whose bytes are other ones; of the rest, the arena gets the sums.

    In the arena they are made with `run.salt`, on the disk with that of the life that saved them.
    """
    host, keys, slots = run.arena.host, run.keys, run.slots
    positions = [position for position in range(len(keys)) if position not in bad]
    if len(positions) < len(keys):
        keys = [keys[position] for position in positions]
        slots, trailers = slots[positions], trailers[positions]
    end = TRAILER_HEAD_BYTES + run.geometry.cell_count * SUM_BYTES
    salts = np.ascontiguousarray(trailers[:, SALT_AT : SALT_AT + SUM_BYTES]).view("<u8")[:, 0]
    found = sums.sum_pairs(
        host.arena.bytes,
        host.blocks_offset + slots.astype(np.int64) * host.slot_bytes,
        keys,
        (salts, run.salt),
    )
    stored = np.ascontiguousarray(trailers[:, TRAILER_HEAD_BYTES:end]).view("<u8")
    right = (found[0] == stored).all(axis=1)
    host.keep_sums(slots[right], found[1][right])
    for position, is_right in zip(positions, right.tolist(), strict=True):
        if not is_right:
            bad[position] = BlockFault.CORRUPT
