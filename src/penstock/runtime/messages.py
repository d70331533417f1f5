"""Messages between the owner of a cache and its ranks, and what each rank says it has.

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

    facts = rank.facts                       # in the process of the rank
    message = facts.to_bytes()               # by whatever way the engine has
    RankFacts.from_bytes(message)            # where the owner is

Facts describe one life of a rank: a rank that restarts has another `life`, and new facts.

| must agree                                   | the least counts             |
|----------------------------------------------|------------------------------|
| tokens a block, KV groups, how cells are     | device slots of each group,  |
| summed, the tiers and their order; the form, | slots of each tier           |
| where ranks share memory                     |                              |

A refusal names both ranks and both values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.cache.operations import BlockFault, Purpose  # noqa: TC001 - msgspec reads them
from penstock.errors import ConfigError, PeerError
from penstock.machine.effects import Copy
from penstock.movers.base import Moved
from penstock.store.process.messages import SLOT, join_slots, split_keys
from penstock.transport.base import FRAME_BYTES_MAX
from penstock.vocabulary.frames import TEXT_MAX, Count, FrameCodec, Text, short
from penstock.vocabulary.keys import KEY_BYTES, OperationId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.settings import CacheSettings
    from penstock.config import Config


VERSION = 2
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX
"""A longer message is refused: it would not fit into a frame of a channel."""

ValueT = TypeVar("ValueT")

ROW_BYTES_MAX = 128 + 4 * TEXT_MAX
"""What a copy costs on the wire beside its keys and slots, at most."""
NAME_BYTES_MAX = 19
"""What the name of an operation costs on the wire, at most."""


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
        + (copy.source_slots.size + copy.target_slots.size) * SLOT.itemsize
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
        join_slots(copy.source_slots),
        _groups(copy.target_slots),
        join_slots(copy.target_slots),
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
        keys=split_keys(row.keys),
        source_slots=_slots(operation, row.source_slots, row.source_groups, count),
        target_slots=_slots(operation, row.target_slots, row.target_groups, count),
        deadline=math.inf,
        cause=row.cause,
    )


def _slots(operation: OperationId, raw: bytes, groups: int, count: int) -> NDArray[np.int32]:
    if len(raw) != count * max(1, groups) * SLOT.itemsize:
        raise PeerError(
            f"operation {operation} has {len(raw)} bytes of slots, must have {SLOT.itemsize} for "
            f"each of {count} blocks in {max(1, groups)} rows"
        )
    slots = np.frombuffer(raw, dtype=SLOT).astype(np.int32, copy=False)
    return slots.reshape(groups, count) if groups else slots


Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class TierFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier below the device, on one rank."""

    name: str
    slot_count: Positive
    memory: str = ""
    """Names the memory that the slots lie in: equal for as long as the bytes are kept, even if
    the rank starts anew, and for all ranks that share them."""
    off: str = ""
    """Why it cannot be used here; empty if it can."""
    ready_s: Seconds = 0.0
    """From its beginning until blocks could be copied to it: made or mapped, and registered."""


class RankFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank has, as far as the owner must know it."""

    rank: Count
    life: Count
    """64 random bits, drawn when the rank was opened."""
    block_tokens: Positive
    block_bytes: Positive
    """Bytes of a block on this rank."""
    cell_count: Positive
    """Sums that a block on this rank carries."""
    device_slots: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]
    """Device blocks of each KV group."""
    tiers: tuple[TierFacts, ...]
    """The tiers below the device, nearest first."""
    algorithm: str
    """How cells are summed."""
    form: bytes
    """The fingerprint of the form in which copies lie: equal where ranks hold equal bytes."""
    shares: bool = False
    """Whether it shares its host memory with the other ranks, which hold equal bytes."""

    def to_bytes(self) -> bytes:
        """Encodes the facts as a message."""
        return _frames.encode(self)

    @classmethod
    def from_bytes(cls, message: bytes) -> RankFacts:
        """Reads the facts from a message.

        Raises:
            PeerError: the message is something else, of another version, or damaged.
        """
        return _frames.decode(message)


def slowest_ready_s(ranks: Iterable[RankFacts]) -> dict[str, float]:
    """How long each tier took until it could be used, on the rank that took longest."""
    found: dict[str, float] = {}
    for facts in ranks:
        for tier in facts.tiers:
            found[tier.name] = max(tier.ready_s, found.get(tier.name, 0.0))
    return found


_frames = frames_of(b"F", "a message with facts", msgspec.msgpack.Decoder(RankFacts))

LIFE_BYTES = 9
"""What the life of a rank takes in a plan, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What holds for every rank of an engine."""

    settings: CacheSettings
    """With the slots that every rank has."""
    device_slots: tuple[int, ...]
    """Device blocks of each KV group."""
    off: tuple[tuple[int, str], ...]
    """Tiers that some rank does not have, by index, and why."""


def agree(config: Config, ranks: Sequence[RankFacts]) -> Agreement:
    """What the cache over these ranks can count on.

    Raises:
        ConfigError: facts are missing, do not fit the configuration, or contradict each other.
    """
    _require_all(config, ranks)
    for facts in ranks:
        require_fit(config, facts, ranks[0])
    _require_plans_fit(config)
    device_slots = tuple(map(min, zip(*(facts.device_slots for facts in ranks), strict=True)))
    tiers = tuple(
        replace(tier, slot_count=min(facts.tiers[index].slot_count for facts in ranks))
        for index, tier in enumerate(config.cache.tiers)
    )
    off = [
        (index + 1, f"rank {facts.rank}: {facts.tiers[index].off}")
        for index in range(len(tiers))
        for facts in ranks
        if facts.tiers[index].off
    ]
    block_bytes = max(facts.block_bytes for facts in ranks)
    settings = replace(config.cache, tiers=tiers, block_bytes=block_bytes)
    return Agreement(settings=settings, device_slots=device_slots, off=tuple(off))


def require_fit(config: Config, facts: RankFacts, first: RankFacts) -> None:
    """Checks a rank against the configuration and against another rank.

    Raises:
        ConfigError: something that must agree does not.
    """
    cache = config.cache
    here = f"on rank {facts.rank}"
    _require("cache.block_tokens", cache.block_tokens, facts.block_tokens, here)
    _require("cache.groups", cache.group_count, len(facts.device_slots), here)
    names = tuple(tier.name for tier in cache.tiers)
    _require("tiers", names, tuple(tier.name for tier in facts.tiers), here)
    _require("cache.equal_ranks", config.equal_ranks, facts.shares, here)
    if cache.device is not None and min(facts.device_slots) < cache.device.slot_count:
        raise ConfigError(
            "cache.blocks",
            f"is {cache.device.slot_count}, must be at most {min(facts.device_slots)}, the device "
            f"blocks of rank {facts.rank}",
        )
    if facts.algorithm != first.algorithm:
        raise ConfigError(
            "ranks",
            f"sum their cells by {first.algorithm} (rank {first.rank}) and {facts.algorithm} "
            f"(rank {facts.rank}), must do it in one way",
        )
    if config.equal_ranks and facts.form != first.form:
        raise ConfigError(
            "cache.equal_ranks",
            f"is true, but the forms of rank {first.rank} ({first.form.hex()}) and rank "
            f"{facts.rank} ({facts.form.hex()}) differ: they do not hold equal bytes",
        )
    if config.equal_ranks and _lie_apart(facts, first):
        raise ConfigError(
            "cache.equal_ranks",
            f"is true, but tier {facts.tiers[0].name!r} lies in {first.tiers[0].memory!r} on rank "
            f"{first.rank} and in {facts.tiers[0].memory!r} on rank {facts.rank}: they do not "
            "share it; open one with the arenas of the other",
        )


def _lie_apart(facts: RankFacts, first: RankFacts) -> bool:
    """Whether two ranks that have a hub have two of them."""
    here, there = facts.tiers[0], first.tiers[0]
    return not (here.off or there.off) and here.memory != there.memory


def _require(field: str, configured: object, found: object, where: str) -> None:
    if configured != found:
        raise ConfigError(field, f"is {configured!r}, but {found!r} {where}")


def _require_all(config: Config, ranks: Sequence[RankFacts]) -> None:
    numbers = sorted(facts.rank for facts in ranks)
    if numbers != list(range(config.cache.rank_count)):
        raise ConfigError(
            "cache.ranks",
            f"is {config.cache.rank_count}, but there are facts of ranks "
            f"{', '.join(map(str, numbers)) or 'none'}; each of 0 to "
            f"{config.cache.rank_count - 1} must be there once",
        )


def _require_plans_fit(config: Config) -> None:
    """Refuses operations that no plan could carry."""
    cache = config.cache
    block_bytes = KEY_BYTES + 4 * (1 + cache.group_count)
    rest = 2 * ROW_BYTES_MAX + LIFE_BYTES * cache.rank_count
    most = (MESSAGE_BYTES_MAX - rest) // block_bytes
    if cache.operation_blocks_max > most:
        raise ConfigError(
            "cache.operation_blocks_max",
            f"is {cache.operation_blocks_max}, must be at most {most} with {cache.group_count} KV "
            f"groups: a plan has at most {MESSAGE_BYTES_MAX} bytes",
        )
