"""Where the blocks of a chain lie in a shared store, in the pieces of one engine.

| blocks there | are named by                                            | costs              |
|--------------|---------------------------------------------------------|--------------------|
| as here      | the same keys                                           | one question       |
| larger       | the keys of those blocks here that end with one there   | one question       |
| smaller      | keys that only their values know: each names its parent | a read for a round |

A key names a prefix, whatever the size of the blocks, so engines with other sizes agree on it
wherever a block of both ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.store.blobs import BlobOutcome, BlobRange, BlobRead
from penstock.store.shared_board import Where
from penstock.store.shared_value import read_fronts, value_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.base import FindJob
    from penstock.store.blobs import BlobStore
    from penstock.store.shared_geometry import EngineGeometry, Gathering
    from penstock.store.shared_io import FrontMemory
    from penstock.store.shared_value import ValuePiece
    from penstock.vocabulary.ids import Key


class Wanted(NamedTuple):
    """The rest of a question, for the pieces of one engine."""

    job: FindJob
    start: int
    """How many of its blocks are known to be there."""
    pieces: tuple[bytes, ...]
    plan: dict[bytes, Gathering]

    @property
    def sources(self) -> list[ValuePiece]:
        """The pieces that are needed of every block."""
        parts = (part for each in self.plan.values() for part in each.parts)
        return list({part.piece.name: part.piece for part in parts}.values())


def locate(
    wanted: Wanted, blobs: BlobStore, memory: FrontMemory, timeout_s: float
) -> dict[Key, Where]:
    """Where the leading blocks lie that are there.

    Raises `BlobStoreError`: the store does not answer.
    """
    job, start = wanted.job, wanted.start
    here = job.arenas[0].form.block_tokens
    there = next(iter(wanted.plan.values())).block_tokens
    keys = job.keys[start:]
    if here == there:
        count = _leading(wanted, [(key,) for key in keys], blobs, timeout_s)
        return {key: Where(wanted.pieces, (key,)) for key in keys[:count]}
    if there > here:
        return _in_larger(wanted, there // here, blobs, timeout_s)
    return _in_smaller(wanted, here // there, blobs, memory, timeout_s)


def is_there(
    job: FindJob, start: int, geometry: EngineGeometry, blobs: BlobStore, timeout_s: float
) -> bool:
    """Whether a prefix with the block at `start` in it was written in the pieces of an engine.

    Known only where a block of both ends: a key names a prefix, whatever the size of the blocks.
    Raises `BlobStoreError`: the store does not answer.
    """
    here, there = job.arenas[0].form.block_tokens, geometry.block_tokens
    for number in range(start, len(job.keys)):
        if (job.first + number + 1) * here % there == 0:
            key = job.keys[number]
            names = [value_name(job.space, piece, key) for piece in geometry.pieces]
            return all(blobs.exists(names, timeout_s=timeout_s))
    return False


def _in_larger(wanted: Wanted, ratio: int, blobs: BlobStore, timeout_s: float) -> dict[Key, Where]:
    job, begin = wanted.job, wanted.job.first + wanted.start
    numbers = range(begin, job.first + len(job.keys))
    ends = [number for number in numbers if (number + 1) % ratio == 0]
    if not ends:
        return {}
    large = [job.keys[number - job.first] for number in ends]
    count = _leading(wanted, [(key,) for key in large], blobs, timeout_s)
    found = {}
    for number in numbers:
        at = (number // ratio) - (begin // ratio)
        if at >= count:
            break
        key = job.keys[number - job.first]
        found[key] = Where(wanted.pieces, (large[at],), number % ratio)
    return found


def _in_smaller(
    wanted: Wanted, ratio: int, blobs: BlobStore, memory: FrontMemory, timeout_s: float
) -> dict[Key, Where]:
    keys = wanted.job.keys[wanted.start :]
    count = _leading(wanted, [(key,) for key in keys], blobs, timeout_s)
    chains = [[key] for key in keys[:count]]
    for _ in range(ratio - 1):
        parents = _parents(wanted, [chain[0] for chain in chains], blobs, memory, timeout_s)
        for chain, parent in zip(chains, parents, strict=False):
            chain.insert(0, parent)
        del chains[len(parents) :]
    count = _leading(wanted, [tuple(chain[:-1]) for chain in chains], blobs, timeout_s)
    return {chain[-1]: Where(wanted.pieces, tuple(chain)) for chain in chains[:count]}


def _leading(
    wanted: Wanted, blocks: Sequence[tuple[Key, ...]], blobs: BlobStore, timeout_s: float
) -> int:
    """How many leading blocks are there, with all their keys and pieces."""
    sources = wanted.sources
    names = [
        [value_name(wanted.job.space, piece, key) for key in keys for piece in sources]
        for keys in blocks
    ]
    asked = [name for each in names for name in each]
    there = iter(blobs.exists(asked, timeout_s=timeout_s) if asked else ())
    for count, each in enumerate(names):
        present = [next(there) for _ in each]
        if not all(present):
            return count
    return len(blocks)


def _parents(
    wanted: Wanted,
    keys: Sequence[Key],
    blobs: BlobStore,
    memory: FrontMemory,
    timeout_s: float,
) -> list[Key]:
    """The block before each of these, as far as their values say so."""
    if not keys:
        return []
    piece = wanted.sources[0]
    room = memory.room(len(keys) * piece.front_bytes).reshape(len(keys), -1)
    room[:] = 0
    reads = [
        BlobRead(value_name(wanted.job.space, piece, key), [BlobRange(0, front.data)])
        for key, front in zip(keys, room, strict=True)
    ]
    outcomes = blobs.read(reads, timeout_s=timeout_s)
    fronts = read_fronts(room, wanted.job.space, piece, keys)
    found: list[Key] = []
    for outcome, sound, parent in zip(outcomes, fronts.sound, fronts.parents, strict=True):
        if outcome is not BlobOutcome.READ or not sound or parent is None:
            break
        found.append(parent)
    return found
