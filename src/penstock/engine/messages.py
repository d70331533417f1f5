"""The messages between a server and an engine instance.

| from the server                | from the instance                                            |
|--------------------------------|--------------------------------------------------------------|
|                                | `LoadProgress` while it loads, `InstanceReady` afterwards    |
| `Submit` `Abort` `StopAnswer`  | `Scored`, `TokenProgress`, `SubmitRefused`                   |
| `ComputeLocally`               |                                                              |
|                                | `CacheChanged`                                               |
| `ResetCache`                   |                                                              |
| `Ask`                          | `AskAnswer`                                                  |
|                                | `Leaving` after a stop signal                                |

Frames are a version byte and msgpack; unknown fields are refused.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# msgspec reads the annotations when a message arrives, so these imports must be real.
from penstock.config import Config  # noqa: TC001
from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored  # noqa: TC001
from penstock.transport.base import FRAME_BYTES_MAX
from penstock.vocabulary.frames import FrameCodec

VERSION = 1
What = Literal["statistics", "story", "timeline", "audit"]
"""The questions that an instance answers."""


class InstanceMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True
):
    """A message between a server and an instance."""


class Submit(InstanceMessage, frozen=True, kw_only=True):
    """A request for one or several answers."""

    id: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    ignores_stop_tokens: bool = False
    """Whether the model's own stop tokens are ignored."""
    stop_tokens: list[int] = []
    """More tokens that end an answer."""
    answers: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = []
    seed: int | None = None
    logprobs: int = 0
    scores_prompt: bool = False
    """Whether log-probabilities of the prompt's tokens are returned, in `Scored`."""
    priority: int = 0
    tenant: str = ""
    reuse: bool = True
    store: bool = True
    returns_logprobs: bool = True
    """Whether the client gets log-probabilities; if not, a handoff may bring the first token."""
    handoff: str = ""
    """The prompt is computed by one instance and answered by another, under this name."""


class Abort(InstanceMessage, frozen=True, kw_only=True):
    """Ends a request: its client is gone."""

    id: str


class ComputeLocally(InstanceMessage, frozen=True, kw_only=True):
    """The instance computes the prompt of this request itself; no handoff will bring it."""

    id: str


class StopAnswer(InstanceMessage, frozen=True, kw_only=True):
    """A stop string was found in one answer."""

    id: str
    answer: int


class ResetCache(InstanceMessage, frozen=True, kw_only=True):
    """Clears the cache."""

    why: str
    weights_version: str = ""
    """The new version of the weights, if they have changed."""


class Ask(InstanceMessage, frozen=True, kw_only=True):
    """A question about the instance."""

    id: int
    what: What
    of: str = ""
    """The request whose story is wanted."""


class LoadProgress(InstanceMessage, frozen=True, kw_only=True):
    """A rank has loaded `layers` of its `of` layers."""

    rank: int
    layers: int
    of: int


class InstanceReady(InstanceMessage, frozen=True, kw_only=True):
    """The instance accepts requests from now on."""

    model: str
    positions: int
    """The longest context, bounded by the model and by the device's blocks."""
    stop_tokens: list[int]
    config: Config
    """Of the cache; the router computes keys with it."""
    tiers: list[str]
    """Names of the tiers, device first."""
    ready_s: list[float] = []
    """How long it took to prepare the memory of each tier; 0 for the device."""
    role: Literal["both", "prefill", "decode"] = "both"
    partner: str = ""
    """The instance of its pair that has the other role."""


class TokenProgress(InstanceMessage, frozen=True, kw_only=True):
    """A token of an answer, or its end, or both."""

    id: str
    answer: int
    token: int | None = None
    logprob: float = 0.0
    alternatives: list[tuple[int, float]] = []
    reason: str = ""
    cached: list[int] = []
    """With the first token: prompt tokens that came from each tier."""
    handed: bool = False
    """With the first token: whether the prompt's KV came from another instance."""


class Scored(InstanceMessage, frozen=True, kw_only=True):
    """Tokens of a prompt with their log-probabilities; all come before the first token."""

    id: str
    position: int
    """The position of the first of them in the prompt."""
    logprobs: list[float]
    alternatives: list[list[tuple[int, float]]]


class SubmitRefused(InstanceMessage, frozen=True, kw_only=True):
    """A request was refused."""

    id: str
    kind: str
    """`invalid`: the request is wrong. `busy`: too many wait; try again later."""
    problem: str


class Leaving(InstanceMessage, frozen=True, kw_only=True):
    """The instance stops: it finishes its requests and accepts no more."""


class CacheChanged(InstanceMessage, frozen=True, kw_only=True):
    """KV events, without gaps from the instance's start."""

    events: list[BlocksStored | BlocksRemoved | AllCleared]


class AskAnswer(InstanceMessage, frozen=True, kw_only=True):
    """The answer to `Ask`, as JSON."""

    id: int
    json: bytes


ToInstance = Submit | Abort | ComputeLocally | StopAnswer | ResetCache | Ask
FromInstance = (
    LoadProgress
    | InstanceReady
    | TokenProgress
    | Scored
    | SubmitRefused
    | Leaving
    | CacheChanged
    | AskAnswer
)

_to_instance: FrameCodec[ToInstance] = FrameCodec(
    msgspec.msgpack.Decoder(ToInstance), version=VERSION, bytes_max=FRAME_BYTES_MAX
)
_from_instance: FrameCodec[FromInstance] = FrameCodec(
    msgspec.msgpack.Decoder(FromInstance), version=VERSION, bytes_max=FRAME_BYTES_MAX
)


def encode(message: InstanceMessage) -> bytes:
    return _to_instance.encode(message)


def read_by_instance(frame: bytes) -> ToInstance:
    """Decodes a frame from a server.

    Raises:
        PeerError: it is not a message of a server.
    """
    return _to_instance.decode(frame)


def read_by_server(frame: bytes) -> FromInstance:
    """Decodes a frame from an instance.

    Raises:
        PeerError: it is not a message of an instance.
    """
    return _from_instance.decode(frame)
