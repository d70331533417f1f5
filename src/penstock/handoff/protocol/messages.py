"""The messages between the parties of a handoff, and their frames. PROTOCOL.md, section 3.

| from → to                            | messages                | answers                        |
|--------------------------------------|-------------------------|--------------------------------|
| decode scheduler → decode rank       | `Expect`, `DropHandoff` | `HandoffReport`                |
| decode rank → prefill rank           | `Claim`, `Stop`         | `Landed Poisoned Stopped`      |
| decode scheduler → prefill scheduler | `Await`, `Close`        | `Finished Gone CloseConfirmed` |
| prefill scheduler → prefill rank     | `ReleaseBlocks`         | `Released`                     |
| every party → its peers              | `Hello`                 | `Welcome`, `Refused`           |
| every party → its peers              | `Ping`                  | `Pong`                         |

P3: a message carries the present state, not a change of it, so that it can be lost, repeated and
overtaken without harm. It names both lives, the handoff and the epoch.

P22: a frame is one version byte and one message in MessagePack. Bytes from outside become a
message that is well formed in every field, or a `PeerError`; never another exception.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.identity import (
    PROTOCOL_VERSION,
    Epoch,
    HandoffId,
    Incarnation,
    Life,
    Name,
)
from penstock.handoff.protocol.states import HandoffOutcome, ReportStatus  # noqa: TC001 - msgspec reads it
from penstock.vocabulary.frames import FrameCodec

FACT_COUNT_MAX = 64
SOURCE_COUNT_MAX = 4096
SLOT_COUNT_MAX = 1 << 20
TOKEN_COUNT_MAX = 1024
"""The first token and its drafts; a speculative decoder drafts tens at most."""
ATTEMPT_COUNT_MAX = 64
BERTH_COUNT_MAX = 1 << 16
LANDED_COUNT_MAX = 16
"""Parts of one notice: as many numbers fit beside the sums in what travels with a write."""
LANDED_SUMS_MAX = 64 << 10
"""Bytes of sums up to which parts share a notice."""
MESSAGE_BYTES_MAX = 8 << 20
"""A claim of 2^20 parts that were spoiled 8 times has 1.2 MiB; a block table of 2^20 slots five."""

Text = Annotated[str, msgspec.Meta(max_length=512)]
INDEX_MAX = 2**31
Index = Annotated[int, msgspec.Meta(ge=0, le=INDEX_MAX)]
PartSet = Annotated[bytes, msgspec.Meta(max_length=1 << 17)]
"""A set of parts, see `penstock.handoff.protocol.grid.to_bytes`."""
Fact = tuple[Text, Text]
Source = tuple[Name, Grid]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A message of one party to another."""

    sender: Life
    target: Life
    """The receiver; another life of the same party refuses it."""


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """Who the sender is, and what its KV is. Asks for `Welcome` or `Refused`."""

    version: Index = PROTOCOL_VERSION
    role: Text
    facts: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=FACT_COUNT_MAX)] = ()
    """What must be equal on both sides, by name: model, weights, form."""
    known: Incarnation = 0
    """Which life of the party that is greeted the sender knows, 0 for none."""


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """The answer to a `Hello` from a peer that fits."""

    version: Index = PROTOCOL_VERSION
    role: Text
    facts: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=FACT_COUNT_MAX)] = ()
    known: Incarnation = 0
    """Copied from the `Hello`: the sender started after the life that is named here."""


class Refused(Message, frozen=True, kw_only=True, tag=True):
    """The answer to a `Hello` from a peer that does not fit: what differs, with both values."""

    fact: Text
    ours: Text
    """On the side that refuses."""
    theirs: Text


class Ping(Message, frozen=True, kw_only=True, tag=True):
    """Asks a silent peer for a sign of life."""


class Pong(Message, frozen=True, kw_only=True, tag=True):
    """The answer to `Ping`."""


class HandoffMessage(Message, frozen=True, kw_only=True, tag=True):
    """A message about one claim of one handoff."""

    handoff: HandoffId
    epoch: Epoch


class Expect(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Decode scheduler → decode rank: get these parts. Asks for `HandoffReport`."""

    sources: Annotated[tuple[Source, ...], msgspec.Meta(max_length=SOURCE_COUNT_MAX)]
    """The source ranks that owe it something, by name, and what."""
    slots: Annotated[tuple[Index, ...], msgspec.Meta(max_length=SLOT_COUNT_MAX)] = ()
    """Where the missing blocks are to lie on this rank; for its mover."""


class DropHandoff(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Decode scheduler → decode rank: it is over; do not touch its slots. Asks for a report."""


class HandoffReport(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Decode rank → decode scheduler: how far this rank is."""

    report: ReportStatus
    why: Text = ""


class Claim(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Decode rank → prefill rank: all parts that it wants, and all that it has of them.

    The first claim, every acknowledgement, the return of credits and the request for what is
    missing are this one message, sent again whenever it changed.
    """

    generation: Index
    """Of the landing area to write to."""
    berth_count: Annotated[int, msgspec.Meta(ge=1, le=BERTH_COUNT_MAX)]
    berth_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    grid: Grid
    have: PartSet = b""
    """Verified and in its slot."""
    spoiled: Annotated[tuple[PartSet, ...], msgspec.Meta(max_length=ATTEMPT_COUNT_MAX)] = ()
    """Parts whose first attempt was not intact; then their second; and so on."""


class Stop(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Decode rank → prefill rank: write nothing more for it. Asks for `Stopped`."""


class LandedPart(NamedTuple):
    """One part, and where it lies."""

    berth: Index
    part: Index
    attempt: Index
    sums: bytes = b""
    """Of the part's cells, to verify it by; the machines do not read them."""


class Landed(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Prefill rank → decode rank: parts lie in their berths. Travels with the write itself."""

    generation: Index
    parts: Annotated[tuple[LandedPart, ...], msgspec.Meta(max_length=LANDED_COUNT_MAX)]


class Stopped(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Prefill rank → decode rank: every write for it was observed to end."""

    generation: Index
    poisoned: bool
    """Whether a write into this generation ended with an error, and may land yet."""


class Poisoned(Message, frozen=True, kw_only=True, tag=True):
    """Prefill rank → decode rank: a write into this area failed, and may land yet."""

    generation: Index


class Await(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Decode scheduler → prefill scheduler: wait for the first token. Asks for `Finished`."""


class Finished(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Prefill scheduler → decode scheduler: the prompt is computed."""

    tokens: Annotated[tuple[Index, ...], msgspec.Meta(max_length=TOKEN_COUNT_MAX)]
    """The first token."""
    drafts: Annotated[tuple[Index, ...], msgspec.Meta(max_length=TOKEN_COUNT_MAX)] = ()


class Gone(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Prefill scheduler → decode scheduler: the handoff ended on the prefill side."""

    why: Text


class Close(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """Decode scheduler → prefill scheduler: nothing more is needed. Asks for `CloseConfirmed`."""

    outcome: HandoffOutcome
    why: Text = ""


class CloseConfirmed(HandoffMessage, frozen=True, kw_only=True, tag=True):
    """The answer to `Close`."""


class ReleaseBlocks(Message, frozen=True, kw_only=True, tag=True):
    """Prefill scheduler → prefill rank: stop reading its blocks. Asks for `Released`."""

    handoff: HandoffId


class Released(Message, frozen=True, kw_only=True, tag=True):
    """Prefill rank → prefill scheduler: nothing of mine reads its blocks any more."""

    handoff: HandoffId


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Ping
    | Pong
    | Expect
    | DropHandoff
    | HandoffReport
    | Claim
    | Stop
    | Landed
    | Stopped
    | Poisoned
    | Await
    | Finished
    | Gone
    | Close
    | CloseConfirmed
    | ReleaseBlocks
    | Released
)

_frames: FrameCodec[AnyMessage] = FrameCodec(
    msgspec.msgpack.Decoder(AnyMessage), version=PROTOCOL_VERSION, bytes_max=MESSAGE_BYTES_MAX
)

encode = _frames.encode
"""The frame of a message. Raises `ValueError`: it would be longer than `MESSAGE_BYTES_MAX`."""
decode = _frames.decode
"""The message of a frame; raises `FrameVersionError` for another version, else `PeerError`."""
