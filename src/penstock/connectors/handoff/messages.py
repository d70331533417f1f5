"""What engines say to each other before they hand over, and schedulers to their ranks.

| from                | to                  | messages                                        |
|---------------------|---------------------|-------------------------------------------------|
| decode's scheduler  | prefill's scheduler | `Introduce`, `WantPrompt`, `SparePrompt`        |
| prefill's scheduler | decode's scheduler  | `Introduced` or `IntroductionRefused`,          |
|                     |                     | `WithholdPrompt`                                |
| a scheduler         | its own ranks       | `OpenSide`, `CloseSide`, `AdmitOffer`,          |
|                     |                     | `ForgetPrompt`                                  |
| a rank              | its scheduler       | `SideAnswer`                                    |

Frames are a mark, a version byte and msgpack; unknown fields are refused.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import msgspec

# msgspec reads the annotations when a message arrives, so this import must be real.
from penstock.errors import CapacityError, UnavailableError
from penstock.handoff import HandoffEngine, HandoffOffer, HandoffPair
from penstock.handoff.protocol.messages import INDEX_MAX
from penstock.transport.base import (
    FRAME_BYTES_MAX,
    ChannelClosed,
    ChannelFailed,
    ReceivedFrame,
)
from penstock.transport.zmq_link import ChannelSettings
from penstock.vocabulary.form import Form
from penstock.vocabulary.frames import FrameCodec

if TYPE_CHECKING:
    from penstock.transport.zmq_channel import ZmqChannel

log = logging.getLogger(__name__)

VERSION = 4
WITHIN_ENGINE = ChannelSettings(silence_s=3600.0)
"""Between a scheduler and its own ranks: a process that stood still, such as one that was stopped,
goes on with the same ranks. Of one that has ended, the kernel tells at once."""


PairNames = tuple[str, str]
"""The prefill engine and the decode engine."""


class EngineCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine as others must know it."""

    name: str
    address: str
    """Where its scheduler listens for the parties of its pairs."""
    rank_addresses: list[str]
    """Of each KV group of each rank: those of a rank are the same."""
    forms: list[bytes]
    """How the KV of each KV group of each rank lies: `Form.to_bytes`."""
    layers: list[list[int]]
    """Which layers of the model each KV group has."""
    model: str
    weights: str
    version: str
    """Of the engine's software: another one may keep other numbers in the same bytes."""
    transport: str
    """How KV travels, as its configuration says: see `HandoffPair.transport`."""
    step_tokens: Annotated[int, msgspec.Meta(ge=1, le=INDEX_MAX)]
    """How many tokens it computes in a step at most: longer prompts are sent step by step."""

    def difference(self, other: EngineCard) -> str:
        """Why prompts cannot be handed over between the two; empty if they can."""
        for field in ("model", "weights", "version", "transport", "layers"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                name = "layers of KV groups" if field == "layers" else field
                return f"{name} is {ours!r} here and {theirs!r} there, must be equal"
        return ""


class PairCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two engines that hand over."""

    prefill: EngineCard
    decode: EngineCard

    @property
    def names(self) -> PairNames:
        """The names of both."""
        return self.prefill.name, self.decode.name

    def to_pair(self) -> HandoffPair:
        """The same for the handoff.

        Raises `ValueError`: a form cannot be read, names and addresses are wrong, or the two sum
        bytes in different ways.
        """
        prefill, decode = self.prefill, self.decode
        ours, theirs = _checksum(prefill), _checksum(decode)
        if ours != theirs:
            raise ValueError(
                f"checksum is {ours!r} at the prefill engine and {theirs!r} at the decode engine, "
                "must be equal: the KV of both must lie on GPUs, or of neither"
            )
        return HandoffPair(
            checksum=ours,
            prefill=_engine(prefill, f"{prefill.name}>{decode.name}"),
            decode=_engine(decode, f"{decode.name}<{prefill.name}"),
            model=prefill.model,
            weights=f"{prefill.weights} {prefill.version}",
            transport=prefill.transport,
        )


def _checksum(card: EngineCard) -> str:
    """How an engine sums bytes: all of its ranks do it alike."""
    return Form.from_bytes(card.forms[0]).checksum.value


def _engine(card: EngineCard, name: str) -> HandoffEngine:
    return HandoffEngine(
        name=name,
        address=card.address,
        rank_addresses=tuple(card.rank_addresses),
        layouts=tuple(Form.from_bytes(form).layout for form in card.forms),
        listener=card.name,
    )


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A message of this protocol."""


class Introduce(_Message, frozen=True, kw_only=True):
    """This engine wants to answer prompts that the other one computes."""

    card: EngineCard


class Introduced(_Message, frozen=True, kw_only=True):
    """The prefill engine has opened its side of the pair."""

    card: EngineCard


class IntroductionRefused(_Message, frozen=True, kw_only=True):
    """The prefill engine opens no pair with this one."""

    why: str


class WantPrompt(_Message, frozen=True, kw_only=True):
    """The sender claims this prompt: it is to be offered when its blocks are known."""

    handoff: str


class SparePrompt(_Message, frozen=True, kw_only=True):
    """The sender does not need this prompt: its blocks may go."""

    handoff: str


class WithholdPrompt(_Message, frozen=True, kw_only=True):
    """A prompt that was wanted will not be offered."""

    handoff: str
    why: str


class OpenSide(_Message, frozen=True, kw_only=True):
    """The rank opens its part of a pair."""

    pair: PairCard


class CloseSide(_Message, frozen=True, kw_only=True):
    """The rank closes its part of a pair, if it is open."""

    names: PairNames


class SideAnswer(_Message, frozen=True, kw_only=True):
    """The rank has opened its part of a pair, or could not."""

    names: PairNames
    why: str = ""
    """Why it could not; empty if it is open."""


class AdmitOffer(_Message, frozen=True, kw_only=True):
    """A prompt was offered to a decode engine."""

    decode: str
    offers: list[HandoffOffer]
    """For each KV group of the rank, without slots: the rank's own steps say where blocks lie."""


class ForgetPrompt(_Message, frozen=True, kw_only=True):
    """Nobody needs to know any more how far a prompt is computed."""

    handoff: str


AnyMessage = (
    Introduce
    | Introduced
    | IntroductionRefused
    | WantPrompt
    | SparePrompt
    | WithholdPrompt
    | OpenSide
    | CloseSide
    | SideAnswer
    | AdmitOffer
    | ForgetPrompt
)

_frames = FrameCodec(
    msgspec.msgpack.Decoder(AnyMessage),
    version=VERSION,
    bytes_max=FRAME_BYTES_MAX,
    mark=b"PV",
    name="a message between connectors",
)


def send(channel: ZmqChannel, message: AnyMessage) -> None:
    """Sends a message, if the other end can take it.

    What the other end then does not know ends with the channel, or by its deadline.
    """
    try:
        channel.send(_frames.encode(message))
    except (UnavailableError, CapacityError) as error:
        log.warning(
            "a message was not sent: message=%s to=%s cause=%s",
            type(message).__name__,
            channel.name,
            error,
        )


def receive(channel: ZmqChannel) -> tuple[list[AnyMessage], str]:
    """The messages that have arrived, and why the channel has ended; empty if it has not.

    Raises `PeerError`: the other end has sent something else.
    """
    messages: list[AnyMessage] = []
    while True:
        match channel.receive():
            case ReceivedFrame(frame=frame):
                messages.append(_frames.decode(frame))
            case ChannelFailed(cause=cause):
                return messages, cause
            case ChannelClosed():
                return messages, "it has closed its channel"
            case _:
                return messages, ""
