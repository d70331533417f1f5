"""Blocks of one size out of values with blocks of another: cut from larger ones, or joined.

Values are read whole into memory of the thread and verified there, under their own keys. Then the
tokens that are wanted go into the arena, and sums are made under the keys of the blocks here.

The one rule: nothing reaches the arena before all that it is made of was verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.operations import BlockFault
from penstock.store.shared_io import ReadResult, blocks_of
from penstock.store.shared_value import value_name
from penstock.store.shared_whole import read_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.store.blobs import BlobStore
    from penstock.store.shared_board import Where
    from penstock.store.shared_geometry import Gathering, SourcePart
    from penstock.store.shared_io import FrontMemory, SumsOfArenas, ValueRun
    from penstock.store.shared_whole import WholeValues
    from penstock.vocabulary.form import Form
    from penstock.vocabulary.ids import Key
    from penstock.vocabulary.layout import Layout


def read_resized(
    run: ValueRun,
    wheres: Sequence[Where],
    gathering: Gathering,
    blobs: BlobStore,
    memory: FrontMemory,
    sums: SumsOfArenas,
    *,
    may_end: bool,
    timeout_s: float,
) -> ReadResult:
    """Reads blocks into their arena slots, verifies them and writes their sums there.

    Raises `BlobStoreError`: the store does not answer.
    """
    keys = list(dict.fromkeys(key for where in wheres for key in where.keys))
    found = read_whole(
        run.space, keys, gathering.parts, blobs, memory, may_end=may_end, timeout_s=timeout_s
    )
    sources = list(zip(found, gathering.forms, strict=True))
    bad: dict[Key, BlockFault] = {}
    wrong: list[str] = []
    for values, form in sources:
        for number, fault in _check(keys, values, form, sums).items():
            key = keys[number]
            bad.setdefault(key, fault)
            if fault is BlockFault.CORRUPT:
                wrong.append(value_name(run.space, values.part.piece, key))
    faults: dict[int, BlockFault] = {}
    good = []
    numbers = {key: number for number, key in enumerate(keys)}
    blocks = blocks_of(run, run.arena.host.layout.block_bytes)
    for position, where in enumerate(wheres):
        wrong_with = [bad[key] for key in where.keys if key in bad]
        if wrong_with:
            faults[position] = wrong_with[0]
            continue
        good.append(position)
        block = np.frombuffer(blocks[position], dtype=np.uint8)
        for values, form in sources:
            rows = [values.blocks[numbers[key]] for key in where.keys]
            _copy(rows, where.window, values.part, form, run.arena.host.layout, block)
    _keep_sums(run, good, sums)
    return ReadResult(faults, wrong, compressed=any(each.compressed for each in found))


def _check(
    keys: Sequence[Key], values: WholeValues, form: Form, sums: SumsOfArenas
) -> dict[int, BlockFault]:
    """What is wrong with which values."""
    bad = dict(values.faults)
    of_form, fronts = sums.of_form(form), values.fronts
    place = np.zeros(1, dtype=np.int64)
    for number, key in enumerate(keys):
        if number not in bad:
            salt = fronts.salts[number]
            found = of_form.sum_pairs(values.blocks[number], place, [key], (salt, salt))[0, 0]
            if not np.array_equal(found, fronts.sums[number]):
                bad[number] = BlockFault.CORRUPT
    return bad


def _copy(
    rows: Sequence[NDArray[np.uint8]],
    window: int,
    part: SourcePart,
    form: Form,
    layout: Layout,
    block: NDArray[np.uint8],
) -> None:
    """Copies the tokens that are wanted out of values into a block of the arena.

    A segment is token after token, so the tokens of a smaller block are a run of a larger one's.
    """
    there = form.layout
    for source, target in zip(part.source_cells, part.target_cells, strict=True):
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
