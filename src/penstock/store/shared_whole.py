"""Values of a shared store that are read whole into memory of the thread, and decoded there.

So are compressed values, which cannot be read by ranges. A compressed block is one frame, not one
for each layer or head: those of a head are so short (2 KiB of exponents) that zstd finds less in
them.

The one rule: what is in `faults` is not looked at, and all the rest is still to be verified.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.operations import BlockFault
from penstock.errors import install_hint
from penstock.store.blobs import BlobOutcome, BlobRange, BlobRead
from penstock.store.shared_value import CODEC_PLAIN, CODEC_PLANES, read_fronts, value_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.store.base import Space
    from penstock.store.blobs import BlobStore
    from penstock.store.shared_geometry import SourcePart
    from penstock.store.shared_io import FrontMemory
    from penstock.store.shared_value import Fronts
    from penstock.vocabulary.ids import Key

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
    decode = _decoder() if codec == CODEC_PLANES else None
    if decode is None:
        # It may be whole, and somebody else can read it: it is no reason to remove it.
        _warn(codec)
        return BlockFault.UNREADABLE
    try:
        decode(block[:stored_bytes].tobytes(), block.data)
    except ValueError:
        return BlockFault.CORRUPT
    return None


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


def _decoder() -> Callable[[bytes, memoryview], None] | None:
    try:
        from penstock.store.block_codec import decode_block  # noqa: PLC0415  (an extra)
    except ImportError:
        return None
    return decode_block
