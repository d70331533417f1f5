"""Messages between the owner of a cache and its ranks, as bytes.

| letter | message                                     | from, to                |
|--------|---------------------------------------------|-------------------------|
| `F`    | facts: what a rank has (`RankFacts`)        | rank to owner, at first |
| `P`    | plan: copies, abandoned and asked operations | owner to every rank     |
| `R`    | report: what has ended                      | each rank to the owner  |

A message is a letter, the version of the format, and a MessagePack value. Slots travel as
little-endian 32-bit integers and keys as one string of bytes, so encoding a plan costs about as
much as copying it. Deadlines stay with the owner, whose clock means nothing elsewhere: it abandons
what takes too long.

The one rule: bytes are read as exactly what the other side sent, or raise `PeerError` and nothing
has changed. Every rank reports every copy of a plan once, by the name of its operation; where that
report was lost, the owner asks, and a rank that does not have the operation any more says so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.cache.operations import BlockFault, Purpose  # noqa: TC001 - msgspec reads them
from penstock.errors import PeerError
from penstock.machine.effects import Copy
from penstock.movers.base import Moved
from penstock.transport.base import FRAME_BYTES_MAX
from penstock.vocabulary.frames import FrameCodec
from penstock.vocabulary.ids import OperationId
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.vocabulary.ids import Key


VERSION = 2
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX
"""A longer message is refused: it would not fit into a frame of a channel."""
TEXT_MAX = 1000
"""Causes and failures are for people to read, and are cut to this many characters."""

ValueT = TypeVar("ValueT")

ROW_BYTES_MAX = 128 + 4 * TEXT_MAX
"""What a copy costs on the wire beside its keys and slots, at most."""
NAME_BYTES_MAX = 19
"""What the name of an operation costs on the wire, at most."""

_SLOT = np.dtype("<i4")

Count = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]


def frames_of(
    letter: bytes, name: str, decoder: msgspec.msgpack.Decoder[ValueT]
) -> FrameCodec[ValueT]:
    """The codec of one kind of message; `name` is what its errors call the message."""
    return FrameCodec(decoder, version=VERSION, bytes_max=MESSAGE_BYTES_MAX, mark=letter, name=name)


class Plan(NamedTuple):
    """What every rank is to do next."""

    incarnation: int
    """Which life of the owner it is from."""
    sequence: int
    """Plans of one owner are numbered from 1 on, without gaps."""
    copies: Sequence[Copy]
    abandoned: Sequence[OperationId]
    lives: Sequence[int] = ()
    """The life of each rank that it is for, in the order of ranks. Another life makes none of the
    copies, and reports that they failed: the owner has given up on them there."""
    asked: Sequence[OperationId] = ()
    """Operations that the owner has waited for too long. A rank that does not have one in hand
    reports that it failed there: its report did not arrive."""


class RankReport(NamedTuple):
    """What has ended on one rank."""

    rank: int
    life: int
    """64 random bits that the rank drew when it started."""
    incarnation: int
    """Which life of the owner had asked for it."""
    sequence: int
    """Reports of one life are numbered from 1 on, without gaps."""
    moved: Sequence[Moved]


class _Row(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """What is written is written in full, and what is read is read in full."""


class _CopyRow(_Row, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    epoch: Count
    sequence: Count
    purpose: Purpose
    source: Count
    target: Count
    keys: bytes
    source_groups: Count
    """Rows of slots, one a KV group; 0 where a block has one slot for all of them."""
    source_slots: bytes
    target_groups: Count
    target_slots: bytes
    cause: Text


class _PlanRow(_Row, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    incarnation: Count
    sequence: Annotated[int, msgspec.Meta(ge=1)]
    copies: list[_CopyRow]
    abandoned: list[tuple[Count, Count]]
    lives: list[Count]
    asked: list[tuple[Count, Count]]


class _MovedRow(_Row, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    epoch: Count
    sequence: Count
    faults: list[tuple[Count, BlockFault]]
    failure: Text


class _ReportRow(_Row, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    rank: Count
    life: Count
    incarnation: Count
    sequence: Annotated[int, msgspec.Meta(ge=1)]
    moved: list[_MovedRow]


_encoder = msgspec.msgpack.Encoder()
_plans = frames_of(b"P", "a plan", msgspec.msgpack.Decoder(_PlanRow))
_reports = frames_of(b"R", "a report", msgspec.msgpack.Decoder(_ReportRow))


def encode_plan(plan: Plan) -> bytes:
    """A plan as bytes.

    Raises `ValueError`: it is longer than `MESSAGE_BYTES_MAX`.
    """
    row = _PlanRow(
        plan.incarnation,
        plan.sequence,
        [_copy_row(copy) for copy in plan.copies],
        [(operation.epoch, operation.sequence) for operation in plan.abandoned],
        list(plan.lives),
        [(operation.epoch, operation.sequence) for operation in plan.asked],
    )
    return _plans.encode(row)


def decode_plan(message: bytes) -> Plan:
    """The plan that a message says.

    Raises `PeerError`: the message is not a plan.
    """
    row = _plans.decode(message)
    return Plan(
        row.incarnation,
        row.sequence,
        [_copy(row.incarnation, each) for each in row.copies],
        [OperationId(row.incarnation, epoch, number) for epoch, number in row.abandoned],
        row.lives,
        [OperationId(row.incarnation, epoch, number) for epoch, number in row.asked],
    )


def copy_bytes(copy: Copy) -> int:
    """About how many bytes a copy takes in a plan, and never fewer than it does."""
    return (
        ROW_BYTES_MAX
        + len(copy.keys) * KEY_BYTES
        + (copy.source_slots.size + copy.target_slots.size) * _SLOT.itemsize
    )


def encode_report(report: RankReport) -> bytes:
    """A report as bytes.

    Raises `ValueError`: it is longer than `MESSAGE_BYTES_MAX`.
    """
    moved = [
        _MovedRow(
            each.operation.epoch,
            each.operation.sequence,
            list(each.faults),
            short(each.failure),
        )
        for each in report.moved
    ]
    row = _ReportRow(report.rank, report.life, report.incarnation, report.sequence, moved)
    return _reports.encode(row)


def decode_report(message: bytes) -> RankReport:
    """The report that a message says.

    Raises `PeerError`: the message is not a report.
    """
    row = _reports.decode(message)
    moved = [
        Moved(
            OperationId(row.incarnation, each.epoch, each.sequence),
            tuple(each.faults),
            each.failure,
        )
        for each in row.moved
    ]
    return RankReport(row.rank, row.life, row.incarnation, row.sequence, moved)


def _copy_row(copy: Copy) -> _CopyRow:
    operation = copy.operation
    return _CopyRow(
        operation.epoch,
        operation.sequence,
        copy.purpose,
        copy.source,
        copy.target,
        b"".join(copy.keys),
        _groups(copy.source_slots),
        copy.source_slots.astype(_SLOT, copy=False).tobytes(),
        _groups(copy.target_slots),
        copy.target_slots.astype(_SLOT, copy=False).tobytes(),
        short(copy.cause),
    )


def _groups(slots: NDArray[np.int32]) -> int:
    return slots.shape[0] if slots.ndim > 1 else 0


def _copy(incarnation: int, row: _CopyRow) -> Copy:
    operation = OperationId(incarnation, row.epoch, row.sequence)
    count, rest = divmod(len(row.keys), KEY_BYTES)
    if rest or not count:
        raise PeerError(
            f"operation {operation} has {len(row.keys)} bytes of keys, must have {KEY_BYTES} for "
            "each of its blocks"
        )
    return Copy(
        operation=operation,
        purpose=row.purpose,
        source=row.source,
        target=row.target,
        keys=_keys(row.keys),
        source_slots=_slots(operation, row.source_slots, row.source_groups, count),
        target_slots=_slots(operation, row.target_slots, row.target_groups, count),
        deadline=math.inf,
        cause=row.cause,
    )


def _keys(joined: bytes) -> list[Key]:
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def _slots(operation: OperationId, raw: bytes, groups: int, count: int) -> NDArray[np.int32]:
    if len(raw) != count * max(1, groups) * _SLOT.itemsize:
        raise PeerError(
            f"operation {operation} has {len(raw)} bytes of slots, must have {_SLOT.itemsize} for "
            f"each of {count} blocks in {max(1, groups)} rows"
        )
    slots = np.frombuffer(raw, dtype=_SLOT).astype(np.int32, copy=False)
    return slots.reshape(groups, count) if groups else slots


def short(text: str) -> str:
    """A text as it may travel: cut to `TEXT_MAX`, without what cannot be encoded."""
    return text[:TEXT_MAX].encode("utf-8", "replace").decode("utf-8")
