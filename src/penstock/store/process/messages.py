"""Messages between engines and the store process, and the configuration of that process.

    packet = a frame (see `penstock.vocabulary.frames`): a list of messages; a descriptor with
             `ArenaOffered` alone

A session is one connection. Its first message says what it is for:

| first message  | from                | then                                              |
|----------------|---------------------|---------------------------------------------------|
| `ArenaOffered` | a rank's process    | nothing: the arena is mapped until the session ends |
| `OwnerHello`   | an engine's process | requests, in batches; answers, in batches         |

An owner may send requests of jobs from `OwnerWelcome` on, and again after an `OwnerWaiting` was
followed by the next `OwnerWelcome`. A job is answered by one `JobReport` for each rank. Tiers are
numbered as in `OwnerHello.tiers`, and ranks as in `OwnerHello.arenas`. Slots travel as
little-endian 32-bit integers, keys as one string of bytes.

The one rule: bytes are read as exactly what the other side sent, or raise `PeerError` and nothing
has changed.
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from penstock.cache.operations import BlockFault  # noqa: TC001 - msgspec reads it
from penstock.errors import ConfigError, PeerError
from penstock.store.base import DIGEST_BYTES, NO_KEY, TierState
from penstock.vocabulary.frames import Count, FrameCodec, Text
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.vocabulary.keys import Key

VERSION = 5
FRAME_BYTES_MAX = 192 << 10
"""What fits into the send buffer that Linux gives a socket by default (208 KiB)."""
BATCH_BYTES = 128 << 10
"""A batch ends when its messages have about this size."""
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX - BATCH_BYTES
"""One message is refused when it is longer: it would not fit behind a batch that is nearly full."""
MESSAGE_HEAD_BYTES = 64
"""What a message costs beside its keys, slots and texts, at most."""
ARENAS_MAX = 256
TIERS_MAX = 16
PAGE_KEYS_MAX = 1536
"""Keys of one page: with their parents they fit into a message."""
IN_ANOTHER_FORM = 2
"""In a `FindAnswer`: written in a form that the engine cannot read."""
BLOCK_BYTES = 2 * KEY_BYTES + 4
"""What a block of a save costs: its key, its parent and its slot."""
BLOCKS_MAX = (MESSAGE_BYTES_MAX - MESSAGE_HEAD_BYTES) // BLOCK_BYTES
"""Blocks of one job: 1,818. An operation has 256 by default."""

CHANGES_MAX = 1024
"""Blocks of one `HubChanged`, and of one step of an engine."""

SLOT = np.dtype("<i4")

U64 = Count
"""MessagePack has no larger numbers."""
Name = Annotated[str, msgspec.Meta(max_length=128)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
TierNumber = Annotated[int, msgspec.Meta(ge=0, lt=TIERS_MAX)]


class StoreMessage(
    msgspec.Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True, gc=False
):
    """The base of all messages: written in full, and read in full."""


# Requests.


class ArenaOffered(StoreMessage, array_like=True, frozen=True, gc=False):
    """The hub of a rank; its descriptor comes with this. Answer: `ArenaMapped`."""

    name: Name
    """As `arena_name` spells it."""
    slot_count: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    form: bytes
    """`Form.to_bytes`."""
    part: Digest
    """`base.part_name`."""


class OwnerHello(StoreMessage, array_like=True, frozen=True, gc=False):
    """Who the owner is. It may be sent again, with other arenas."""

    life: U64
    space: Digest
    """The name of its space."""
    arenas: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=ARENAS_MAX)]
    """Of its ranks, in order. Ranks that share one arena name it each."""
    tiers: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=TIERS_MAX)]
    """The names of the tiers that it uses."""
    generations: Annotated[list[Count | None], msgspec.Meta(max_length=TIERS_MAX)] = []
    """The last generation of its space that it knows of, by number of the tier: none of before it
    may count again, whatever a store says."""
    terms: Annotated[list[Name], msgspec.Meta(max_length=TIERS_MAX)] = []
    """`StoreTierConfig.terms` of the tiers, as its own configuration has them."""


class SaveRequest(StoreMessage, array_like=True, frozen=True, gc=False):
    """Write blocks from these slots, on every rank."""

    ticket: U64
    """Never used twice by one owner."""
    tier: TierNumber
    keys: bytes
    parents: bytes
    slots: bytes
    salt: U64
    remaining_s: float
    """Until its deadline; clocks of two processes need not agree."""


class LoadRequest(StoreMessage, array_like=True, frozen=True, gc=False):
    """Read blocks into these slots, on every rank."""

    ticket: U64
    tier: TierNumber
    keys: bytes
    slots: bytes
    salt: U64
    remaining_s: float


class AbandonRequest(StoreMessage, array_like=True, frozen=True, gc=False):
    """A job is no longer wanted; it is reported all the same."""

    ticket: U64


class FindRequest(StoreMessage, array_like=True, frozen=True, gc=False):
    """Which of these blocks are there? Answer: `FindAnswer`."""

    number: U64
    tier: TierNumber
    keys: bytes
    first: Count
    """How many blocks of their chain come before these."""


class PageRequest(StoreMessage, array_like=True, frozen=True, gc=False):
    """Some of the blocks that are there. Answer: `PageAnswer`."""

    tier: TierNumber
    cursor: Count | None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_KEYS_MAX)]


class VoidRequest(StoreMessage, array_like=True, frozen=True, gc=False):
    """Begin a new generation of a space. Answer: `VoidNotice`, once it outlives the process.

    Where it counts before that, a `VoidNotice` that says so comes first.
    """

    tier: TierNumber
    space: Digest
    """That of the owner, or the one that it had before."""


class HubChanged(StoreMessage, array_like=True, frozen=True, gc=False):
    """What lies in the hub now, on every rank, and what does no longer: for a tier of peers."""

    tier: TierNumber
    keys: bytes
    slots: bytes
    salt: U64
    """Of the sums in these slots."""
    gone: bytes


class VoidSeen(StoreMessage, array_like=True, frozen=True, gc=False):
    """The owner knows of a generation: what it asks for from now on is meant for that one."""

    tier: TierNumber
    generation: Count


class StorePing(StoreMessage, array_like=True, frozen=True, gc=False):
    """Are you there? Answer: `StorePong`."""


# Answers.


class ArenaMapped(StoreMessage, array_like=True, frozen=True, gc=False):
    """The arena can be used."""


class OwnerWelcome(StoreMessage, array_like=True, frozen=True, gc=False):
    """All arenas of the owner are mapped, and no job of an earlier session is under way."""


class OwnerWaiting(StoreMessage, array_like=True, frozen=True, gc=False):
    """No jobs now: an arena is missing, or jobs of an earlier session are under way."""

    why: Text


class SessionRefused(StoreMessage, array_like=True, frozen=True, gc=False):
    """The last message of a session that cannot go on."""

    why: Text


class JobReport(StoreMessage, array_like=True, frozen=True, gc=False):
    """The store does not touch the slots of this job on this rank any more."""

    ticket: U64
    rank: Count
    faults: list[tuple[Count, BlockFault]]
    failure: Text


class FindAnswer(StoreMessage, array_like=True, frozen=True, gc=False):
    """One byte a key: 1 if the block is there on every rank, else 0 or `IN_ANOTHER_FORM`."""

    number: U64
    present: bytes


class PageAnswer(StoreMessage, array_like=True, frozen=True, gc=False):
    """Blocks that are there on every rank; their number may be 0 before the last page."""

    tier: TierNumber
    keys: bytes
    parents: bytes
    cursor: Count | None


class GoneNotice(StoreMessage, array_like=True, frozen=True, gc=False):
    """A tier gave these blocks up."""

    tier: TierNumber
    keys: bytes


class GenerationNotice(StoreMessage, array_like=True, frozen=True, gc=False):
    """The generation of the owner's space that counts in a tier, when it becomes known."""

    tier: TierNumber
    generation: Count


class VoidNotice(StoreMessage, array_like=True, frozen=True, gc=False):
    """A space has a new generation in a tier; nothing of an earlier one is found again."""

    tier: TierNumber
    space: Digest
    generation: Count
    asked: Count
    """How many requests of this owner it answers; 0: others have asked, or it may still be lost."""
    unkept: Text
    """Why it may still be lost; if so, another notice follows."""


class StoreState(StoreMessage, array_like=True, frozen=True, gc=False):
    """How a tier is now."""

    tier: TierNumber
    """Where `StoreLink` passes it on: the tier's index."""
    state: TierState


class StorePong(StoreMessage, array_like=True, frozen=True, gc=False):
    """The answer to `StorePing`."""


JobRequest = SaveRequest | LoadRequest
AnyStoreRequest = (
    ArenaOffered
    | OwnerHello
    | SaveRequest
    | LoadRequest
    | AbandonRequest
    | FindRequest
    | PageRequest
    | VoidRequest
    | VoidSeen
    | HubChanged
    | StorePing
)
AnyStoreAnswer = (
    ArenaMapped
    | OwnerWelcome
    | OwnerWaiting
    | SessionRefused
    | JobReport
    | FindAnswer
    | PageAnswer
    | GoneNotice
    | GenerationNotice
    | VoidNotice
    | StoreState
    | StorePong
)

requests: FrameCodec[list[AnyStoreRequest]] = FrameCodec(
    msgspec.msgpack.Decoder(list[AnyStoreRequest]),
    version=VERSION,
    bytes_max=FRAME_BYTES_MAX,
    mark=b"PQ",
    name="a batch of requests",
)
answers: FrameCodec[list[AnyStoreAnswer]] = FrameCodec(
    msgspec.msgpack.Decoder(list[AnyStoreAnswer]),
    version=VERSION,
    bytes_max=FRAME_BYTES_MAX,
    mark=b"PA",
    name="a batch of answers",
)


# Keys and slots.


def join_parents(parents: Sequence[Key | None], count: int) -> bytes:
    """Parents as they travel; `count` times none if there are none."""
    if not parents:
        return NO_KEY * count
    return b"".join([each or NO_KEY for each in parents])


def join_slots(slots: NDArray[np.int32]) -> bytes:
    return slots.astype(SLOT, copy=False).tobytes()


def split_keys(joined: bytes) -> list[Key]:
    """The keys of a message.

    Raises `PeerError`: the bytes are not those of whole keys.
    """
    if len(joined) % KEY_BYTES:
        raise PeerError(f"keys have {len(joined)} bytes, must have {KEY_BYTES} each")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def split_parents(joined: bytes, count: int) -> list[Key | None]:
    """The parents of `count` keys.

    Raises `PeerError`: they are fewer or more.
    """
    if len(joined) != count * KEY_BYTES:
        raise PeerError(f"parents have {len(joined)} bytes, must have {count * KEY_BYTES}")
    return [None if each == NO_KEY else each for each in split_keys(joined)]


def split_slots(raw: bytes, count: int) -> list[int]:
    """The slots of `count` keys.

    Raises `PeerError`: they are fewer or more, or one is negative.
    """
    if len(raw) != count * SLOT.itemsize:
        raise PeerError(f"slots have {len(raw)} bytes, must have {count * SLOT.itemsize}")
    slots: list[int] = np.frombuffer(raw, dtype=SLOT).tolist()
    if min(slots, default=0) < 0:
        raise PeerError(f"slot is {min(slots)}, must be at least 0")
    return slots


def answer_bytes(answer: AnyStoreAnswer) -> int:
    """About how many bytes an answer takes in a batch, and never fewer than it does."""
    match answer:
        case JobReport():
            return MESSAGE_HEAD_BYTES + 24 * len(answer.faults) + 4 * len(answer.failure)
        case FindAnswer():
            return MESSAGE_HEAD_BYTES + len(answer.present)
        case PageAnswer():
            return MESSAGE_HEAD_BYTES + len(answer.keys) + len(answer.parents)
        case GoneNotice():
            return MESSAGE_HEAD_BYTES + len(answer.keys)
        case OwnerWaiting(text) | SessionRefused(text) | VoidNotice(unkept=text):
            return MESSAGE_HEAD_BYTES + 4 * len(text)
        case StoreState():
            return 2 * MESSAGE_HEAD_BYTES + 4 * len(answer.state.why)
        case _:
            return MESSAGE_HEAD_BYTES


def answer_frames(batch: Sequence[AnyStoreAnswer]) -> Iterator[bytes]:
    """Answers as frames of bounded size, in order."""
    part: list[AnyStoreAnswer] = []
    size = 0
    for answer in batch:
        size += answer_bytes(answer)
        if part and size > BATCH_BYTES:
            yield answers.encode(part)
            part, size = [], answer_bytes(answer)
        part.append(answer)
    if part:
        yield answers.encode(part)


def arena_name(fd: int) -> str:
    """The name of the memory behind a descriptor, which lasts as long as its bytes do."""
    status = os.fstat(fd)
    return f"memfd {status.st_dev}:{status.st_ino}"


# The configuration of the process.

BUSY = 3
"""The exit status of a process that found another one serving its socket."""
FOLDER_FAILED = 64
"""Its exit status where the socket's folder is of no use, plus the number of the system's error."""


FILES = ("path", "key_file", "keys_file")
TERMS = ("url", "endpoint", "master", "store", "listen", "peers")
"""Options that are part of the terms. Others, such as sizes and times, are those of the process."""


class StoreTierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier of the store process."""

    name: str
    kind: str
    size_bytes: int = 0
    """Of a disk tier."""
    options: dict[str, str | int | float | bool] = {}
    """As the configuration spells them: where it is, and who may read it."""

    @property
    def folder(self) -> str:
        """Of a disk tier."""
        return str(self.options.get("path", ""))

    @property
    def terms(self) -> str:
        """A digest of what its users must agree on: where blocks lie, and who can read them."""
        files = [str(self.options.get(name, "")) for name in FILES]
        said = [self.kind, *(file and os.path.realpath(file) for file in files)]
        said += [str(self.options.get(name, "")) for name in TERMS]
        return sha256("\0".join(said).encode()).hexdigest()[:32]


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a store process serves, and where."""

    socket: str
    """The path of its Unix socket."""
    tiers: tuple[StoreTierConfig, ...]
    log_level: str = "info"
    log_json: bool = False

    def __post_init__(self) -> None:
        if not self.socket.startswith("/"):
            raise ConfigError("socket", f"is {self.socket!r}, must be an absolute path")
        if not 1 <= len(self.tiers) <= TIERS_MAX:
            raise ConfigError("tiers", f"are {len(self.tiers)}, must be 1 to {TIERS_MAX}")
        names = [tier.name for tier in self.tiers]
        if len({*names}) < len(names):
            raise ConfigError("tiers", f"have the names {names}, must have different ones")

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> StoreConfig:
        """The configuration that `to_json` wrote.

        Raises `ConfigError`: it is something else.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError("store", f"cannot be read: {error}") from error
