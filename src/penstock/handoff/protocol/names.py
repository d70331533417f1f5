"""Names in a handoff: of a party's life, of a handoff, of a write.

What must not break: a name is never given twice. A party that starts again draws a new
incarnation, a decode engine that claims a handoff again raises the epoch, and a part that is
written again gets the next attempt; so whatever arrives late says which of them it belongs to.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

NAME_CHARS_MAX = 128
"""A party's or a handoff's name is refused when it is longer: room for a UUID with a host."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
HandoffId = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
"""One prefill of one prompt. A router gives it to both engines; it is never used again."""
Incarnation = Annotated[int, msgspec.Meta(ge=0)]
"""64 random bits, drawn when a party starts."""
Epoch = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
"""Which claim of a handoff: the decode engine counts from 1."""


class Life(NamedTuple):
    """One life of one party (a scheduler or a rank); incarnation 0 stands for "not known yet"."""

    name: Name
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation:016x}"


class WriteId(NamedTuple):
    """One remote write, never given twice in the life of the writing rank.

    The target's incarnation and the area's generation belong to it: the same part may have to
    be written again, into another area.
    """

    target: Life
    generation: int
    berth: int
    handoff: str
    epoch: int
    part: int
    attempt: int
