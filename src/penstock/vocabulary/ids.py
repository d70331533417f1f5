"""Names of things, so small that they can be compared, hashed and sent.

An operation is named by three numbers, because two would not do: the *sequence* tells two
operations of one epoch apart, the *epoch* tells an answer from before a reset, and the
*incarnation*, 64 random bits drawn when the engine starts, tells an answer that belongs to
an earlier life of the same engine.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

LeaseId = NewType("LeaseId", int)
"""A lease within one incarnation; never given twice."""
PinId = NewType("PinId", int)
"""A pinned prefix within one incarnation; never given twice."""
Key = bytes
"""The name of a block's content: 16 bytes, see `penstock.vocabulary.keys`."""


class OperationId(NamedTuple):
    """The name of one operation, never given twice, not even by another life of the engine."""

    incarnation: int
    epoch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.incarnation:016x}.{self.epoch}.{self.sequence}"
