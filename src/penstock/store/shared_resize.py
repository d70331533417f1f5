"""Blocks of one size out of values with blocks of another: cut from larger ones, or joined.

Values are read whole into memory of the thread and verified there, under their own keys. Then the
tokens that are wanted go into the arena, and sums are made under the keys of the blocks here.

The one rule: nothing reaches the arena before all that it is made of was verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache.operations import BlockFault
from penstock.store.blobs import BlobOutcome, BlobRange, BlobRead
from penstock.store.shared_io import ReadResult, blocks_of
from penstock.store.shared_value import read_fronts, value_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.store.blobs import BlobStore
    from penstock.store.shared_board import Where
    from penstock.store.shared_geometry import Gathering, SourcePart
    from penstock.store.shared_io import FrontMemory, SumsOfArenas, ValueRun
    from penstock.vocabulary.form import Form
    from penstock.vocabulary.ids import Key
    from penstock.vocabulary.layout import Layout


class _Values(NamedTuple):
    """The values of one part of the blocks, as they were read."""

    part: SourcePart
    form: Form
    room: NDArray[np.uint8]
    """Of shape [keys, bytes of a value]."""


def read_resized(
    run: ValueRun,
    wheres: Sequence[Where],
    gathering: Gathering,
    blobs: BlobStore,
    memory: FrontMemory,
    sums: SumsOfArenas,
    *,
    timeout_s: float,
) -> ReadResult:
    """Reads blocks into their arena slots, verifies them and writes their sums there.

    Raises:
        BlobStoreError: the store does not answer.
    """
    keys = list(dict.fromkeys(key for where in wheres for key in where.keys))
    sources = _read(run, keys, gathering, blobs, memory, timeout_s=timeout_s)
    bad: dict[Key, BlockFault] = {}
    wrong: list[str] = []
    for values, outcomes in sources:
        for key, fault in _check(run, keys, values, outcomes, sums).items():
            bad.setdefault(key, fault)
            if fault is BlockFault.CORRUPT:
                wrong.append(value_name(run.space, values.part.piece, key))
    faults: dict[int, BlockFault] = {}
    good = []
    numbers = {key: number for number, key in enumerate(keys)}
    blocks = blocks_of(run, run.arena.host.layout.block_bytes)
    for position, where in enumerate(wheres):
        found = [bad[key] for key in where.keys if key in bad]
        if found:
            faults[position] = found[0]
            continue
        good.append(position)
        block = np.frombuffer(blocks[position], dtype=np.uint8)
        for values, _ in sources:
            rows = [
                values.room[numbers[key], values.part.piece.front_bytes :] for key in where.keys
            ]
            _copy(rows, where.window, values, run.arena.host.layout, block)
    _keep_sums(run, good, sums)
    return ReadResult(faults, wrong)


def _read(
    run: ValueRun,
    keys: Sequence[Key],
    gathering: Gathering,
    blobs: BlobStore,
    memory: FrontMemory,
    *,
    timeout_s: float,
) -> list[tuple[_Values, list[BlobOutcome]]]:
    room = memory.room(len(keys) * sum(part.piece.value_bytes for part in gathering.parts))
    reads: list[BlobRead] = []
    values: list[_Values] = []
    for part, form in zip(gathering.parts, gathering.forms, strict=True):
        size = len(keys) * part.piece.value_bytes
        mine, room = room[:size].reshape(len(keys), -1), room[size:]
        mine[:, : part.piece.front_bytes] = 0
        values.append(_Values(part, form, mine))
        reads += [
            BlobRead(value_name(run.space, part.piece, key), [BlobRange(0, row.data)])
            for key, row in zip(keys, mine, strict=True)
        ]
    outcomes = blobs.read(reads, timeout_s=timeout_s)
    step = len(keys)
    return [(each, outcomes[at * step : (at + 1) * step]) for at, each in enumerate(values)]


def _check(
    run: ValueRun,
    keys: Sequence[Key],
    values: _Values,
    outcomes: Sequence[BlobOutcome],
    sums: SumsOfArenas,
) -> dict[Key, BlockFault]:
    """What is wrong with which values."""
    piece, room = values.part.piece, values.room
    fronts = read_fronts(room[:, : piece.front_bytes], run.space, piece, keys)
    bad: dict[Key, BlockFault] = {}
    of_form = sums.of_form(values.form)
    for number, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
        if outcome is BlobOutcome.MISSING:
            bad[key] = BlockFault.MISSING
        elif outcome is BlobOutcome.SHORT or not fronts.sound[number]:
            bad[key] = BlockFault.CORRUPT
        else:
            place = np.array([piece.front_bytes], dtype=np.int64)
            salt = fronts.salts[number]
            found = of_form.sum_pairs(room[number], place, [key], (salt, salt))[0, 0]
            if not np.array_equal(found, fronts.sums[number]):
                bad[key] = BlockFault.CORRUPT
    return bad


def _copy(
    rows: Sequence[NDArray[np.uint8]],
    window: int,
    values: _Values,
    layout: Layout,
    block: NDArray[np.uint8],
) -> None:
    """Copies the tokens that are wanted out of values into a block of the arena.

    A segment is token after token, so the tokens of a smaller block are a run of a larger one's.
    """
    there = values.form.layout
    for source, target in zip(values.part.source_cells, values.part.target_cells, strict=True):
        pairs = zip(there.cells[source].segments, layout.cells[target].segments, strict=True)
        for given, wanted in pairs:
            size = min(given.length, wanted.length)
            skipped = window * size
            for number, row in enumerate(rows):
                to = wanted.start + number * size
                start = given.start + skipped
                block[to : to + size] = row[start : start + size]


def _keep_sums(run: ValueRun, positions: Sequence[int], sums: SumsOfArenas) -> None:
    host = run.arena.host
    slots = run.slots[list(positions)]
    places = host.blocks_offset + slots.astype(np.int64) * host.slot_bytes
    keys = [run.keys[position] for position in positions]
    of_arena = sums.of(run.arena, run.arena.form.checksum)
    found = of_arena.sum_pairs(host.arena.bytes, places, keys, (run.salt, run.salt))
    host.keep_sums(slots, found[0])
