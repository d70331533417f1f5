"""The messages between a server and an engine instance.

| from the server                | from the instance                                            |
|--------------------------------|--------------------------------------------------------------|
|                                | `LoadProgress` while it loads, `InstanceReady` afterwards    |
| `Request` `Abort` `StopAnswer` | `Output`, `SubmitRefused`                                    |
| `ComputeLocally` `ChangePrefill` |                                                            |
| `OpenPair` `ClosePair`         | `PairFailed`                                                 |
| `SetRole`                      |                                                              |
|                                | `CacheChanged`                                               |
| `ResetCache`                   | `ResetKept`, when the reset outlives the instance            |
| `Ask`                          | `AskAnswer`                                                  |
| `Pause`                        | `AskAnswer` with an `OrderResult`, when it is done           |
| `CheckWeights` `LoadWeights`   | the same                                                     |
| `Sleep` `Wake`                 | the same                                                     |
| `Resume`                       |                                                              |
|                                | `Leaving` after a stop signal                                |

Frames are a version byte and msgpack; unknown fields are refused.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock import AllCleared, BlocksRemoved, BlocksStored  # noqa: TC001

# msgspec reads the annotations when a message arrives, so these imports must be real.
from penstock.config import Config  # noqa: TC001
from penstock.toolkit import FRAME_BYTES_MAX, FrameCodec
from penstock_serve.engine.requests import Output, Request
from penstock_serve.engine.spec import EngineSpec, PairSpec  # noqa: TC001

VERSION = 2
What = Literal["statistics", "story", "timeline", "audit"]
"""The questions that an instance answers."""
RoleName = Literal["both", "prefill", "decode"]


class InstanceMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True
):
    """A message between a server and an instance."""


class Abort(InstanceMessage, frozen=True, kw_only=True):
    """Ends a request: its client is gone."""

    id: str


class ComputeLocally(InstanceMessage, frozen=True, kw_only=True):
    """The instance computes the prompt of this request itself; no handoff will bring it."""

    id: str
    lost: bool = False
    """Whether the instance that was to compute it is gone: then the handoff counts as lost."""


class ChangePrefill(InstanceMessage, frozen=True, kw_only=True):
    """Another instance computes the prompt of this request: it is claimed from there instead.

    A prompt that is being computed here already is left alone.
    """

    id: str
    handoff: str
    prefill: str
    lost: bool = False
    """Whether the instance before it is gone: then the handoff from there counts as lost."""


class SetRole(InstanceMessage, frozen=True, kw_only=True):
    """The instance has another role from now on; requests under way end as they began."""

    role: RoleName


class OpenPair(InstanceMessage, frozen=True, kw_only=True):
    """Introduces two instances to each other; sent to both, before a request names them."""

    pair: PairSpec


class ClosePair(InstanceMessage, frozen=True, kw_only=True):
    """The pair is not needed any more: its connections and memory are given back."""

    prefill: str
    decode: str
    lost: bool = False
    """Whether one of the two is gone: then handoffs under way count as lost."""


class StopAnswer(InstanceMessage, frozen=True, kw_only=True):
    """A stop string was found in one answer."""

    id: str
    answer: int


class ResetCache(InstanceMessage, frozen=True, kw_only=True):
    """Clears the cache."""

    number: int
    """Counted by this life of the server."""
    why: str
    weights_version: str = ""
    """The new version of the weights, if they have changed."""


class Ask(InstanceMessage, frozen=True, kw_only=True):
    """A question about the instance."""

    id: int
    what: What
    of: str = ""
    """The request whose story is wanted."""


class Pause(InstanceMessage, frozen=True, kw_only=True):
    """Refuses requests from now on; answered when none is left."""

    id: int


class Resume(InstanceMessage, frozen=True, kw_only=True):
    """Accepts requests again."""


class CheckWeights(InstanceMessage, frozen=True, kw_only=True):
    """Checks whether a checkpoint can replace the weights; the result has its digest."""

    id: int
    path: str


class LoadWeights(InstanceMessage, frozen=True, kw_only=True):
    """Replaces the weights by those of a checkpoint that was checked."""

    id: int
    path: str
    digest: str
    version: str
    """What they are called in keys."""


class Sleep(InstanceMessage, frozen=True, kw_only=True):
    """Gives memory back to the system; requests must have ended."""

    id: int
    host: bool = False
    """Host memory, too."""
    weights: bool = False
    """The weights, too."""
    timeout_s: float = 60.0
    """How long blocks may take to be written down before."""


class Wake(InstanceMessage, frozen=True, kw_only=True):
    """Takes the memory again."""

    id: int


class OrderResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an order, as JSON in `AskAnswer`."""

    problem: str = ""
    """Why it was not carried out; empty if it was."""
    digest: str = ""
    """Of the files of a checkpoint."""


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
    tiers_off: list[str] = []
    """Why each tier cannot be used; empty for one that can."""
    role: RoleName = "both"
    engine: EngineSpec | None = None
    """How other instances reach it for handoffs; `None`: it takes part in none."""


class SubmitRefused(InstanceMessage, frozen=True, kw_only=True):
    """A request was refused."""

    id: str
    kind: str
    """`invalid`: the request is wrong. `busy`, `paused`: try again later."""
    problem: str


class Leaving(InstanceMessage, frozen=True, kw_only=True):
    """The instance stops: it finishes its requests and accepts no more."""


class PairFailed(InstanceMessage, frozen=True, kw_only=True):
    """A pair could not be opened: handoffs in it are refused."""

    prefill: str
    decode: str
    problem: str


class CacheChanged(InstanceMessage, frozen=True, kw_only=True):
    """KV events, without gaps from the instance's start."""

    events: list[BlocksStored | BlocksRemoved | AllCleared]


class ResetKept(InstanceMessage, frozen=True, kw_only=True):
    """This reset, and those before it, outlive the instance: it need not be sent to another one."""

    number: int


class HealthChanged(InstanceMessage, frozen=True, kw_only=True):
    """What is lost or off in the instance's cache now, and why; empty if nothing is."""

    reasons: list[str]


class AskAnswer(InstanceMessage, frozen=True, kw_only=True):
    """The answer to `Ask` or to an order, as JSON."""

    id: int
    json: bytes


Order = Pause | CheckWeights | LoadWeights | Sleep | Wake
"""What an instance carries out and answers."""
ToInstance = (
    Request
    | Abort
    | ComputeLocally
    | ChangePrefill
    | SetRole
    | OpenPair
    | ClosePair
    | StopAnswer
    | ResetCache
    | Ask
    | Order
    | Resume
)
FromInstance = (
    LoadProgress
    | InstanceReady
    | Output
    | SubmitRefused
    | Leaving
    | PairFailed
    | CacheChanged
    | ResetKept
    | HealthChanged
    | AskAnswer
)

_to_instance: FrameCodec[ToInstance] = FrameCodec(
    msgspec.msgpack.Decoder(ToInstance), version=VERSION, bytes_max=FRAME_BYTES_MAX
)
_from_instance: FrameCodec[FromInstance] = FrameCodec(
    msgspec.msgpack.Decoder(FromInstance), version=VERSION, bytes_max=FRAME_BYTES_MAX
)


def encode(message: InstanceMessage | Request | Output) -> bytes:
    return _to_instance.encode(message)


read_by_instance = _to_instance.decode
"""Decodes a frame from a server; raises `PeerError`: it is not a message of a server."""
read_by_server = _from_instance.decode
"""Decodes a frame from an instance; raises `PeerError`: it is not a message of an instance."""
