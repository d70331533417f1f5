"""Which leading blocks of a chain a shared store has, in the pieces of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.store.shared_value import value_name

if TYPE_CHECKING:
    from penstock.store.base import FindJob
    from penstock.store.blobs import BlobStore
    from penstock.store.shared_geometry import EngineGeometry, Gathering
    from penstock.vocabulary.ids import Key


def find_leading(
    job: FindJob, start: int, plan: dict[bytes, Gathering], blobs: BlobStore, timeout_s: float
) -> list[Key]:
    """The blocks from `start` on that are there without a gap, each with all pieces of a plan.

    Raises `BlobStoreError`: the store does not answer.
    """
    parts = (part for each in plan.values() for part in each.parts)
    pieces = list({part.piece.name: part.piece for part in parts}.values())
    keys = job.keys[start:]
    names = [value_name(job.space, piece, key) for key in keys for piece in pieces]
    there = iter(blobs.exists(names, timeout_s=timeout_s) if names else ())
    for count in range(len(keys)):
        present = [next(there) for _ in pieces]
        if not all(present):
            return list(keys[:count])
    return list(keys)


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
