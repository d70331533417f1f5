"""Everything that can happen to one party of a handoff, as values.

A action is given to one party and says all that matters about it, so that the explorer can
remember what came of it, and a story can be told from actions alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from penstock.handoff.protocol.effects import Take, Write
    from penstock.handoff.protocol.identity import Identity, Life, WriteId
    from penstock.handoff.protocol.messages import AnyMessage
    from penstock.handoff.protocol.party import TimerKey


class Receive(msgspec.Struct, frozen=True):
    """A message arrives."""

    message: AnyMessage


class Expire(msgspec.Struct, frozen=True):
    """A timer expires."""

    timer: TimerKey


class Introduce(msgspec.Struct, frozen=True):
    """A peer is made known; a new life of it buries the old one."""

    peer: Identity


class Suspect(msgspec.Struct, frozen=True):
    """A peer is silent, or seen dead."""

    name: str


class Greet(msgspec.Struct, frozen=True):
    """A new connection to a peer is open: its driver greets whoever is there now."""

    name: str


class Rebirth(msgspec.Struct, frozen=True):
    """The process dies, and another begins in its place. What it had posted may still land."""

    life: Life
    peers: tuple[Identity, ...]


class RelayDeath(msgspec.Struct, frozen=True):
    """The relay of a rank dies: what it posted may still land, its own areas get nothing more."""


class Many(msgspec.Struct, frozen=True):
    """Several actions in one step of an engine: its requests are served in batches."""

    actions: tuple[Action, ...]


# ------------------------------------------------------------------ prefill


class Prefill(msgspec.Struct, frozen=True):
    """The scheduler, and each rank, begins to compute a prompt."""

    handoff: str
    scheduler: int
    """Which life of the scheduler gives it."""


class Progress(msgspec.Struct, frozen=True):
    """A rank has computed the first tokens of one layer."""

    handoff: str
    layer: int
    tokens: int


class Restart(msgspec.Struct, frozen=True):
    """A rank has lost the blocks of a prompt, which is computed anew."""

    handoff: str


class FirstToken(msgspec.Struct, frozen=True):
    """The prompt is computed."""

    handoff: str


class Submit(msgspec.Struct, frozen=True):
    """The driver posts a write: from now on its source is read, and it may land."""

    write: WriteId


class Leave(msgspec.Struct, frozen=True):
    """A posted write lands: its source is read no more."""

    write: WriteId


class Observe(msgspec.Struct, frozen=True):
    """The driver sees that a write is done."""

    write: WriteId


class GiveUp(msgspec.Struct, frozen=True):
    """The driver says that a write that was abandoned is over, and will not land."""

    write: WriteId


class Fail(msgspec.Struct, frozen=True):
    """A posted write ends with an error. It may land yet."""

    write: WriteId


class Bounce(msgspec.Struct, frozen=True):
    """A write ends with an error and cannot land: its target is gone, or behind a fence."""

    write: WriteId


class Fade(msgspec.Struct, frozen=True):
    """A ghost is over: it has landed, or will not land any more."""

    source: Life
    write: WriteId


class Purge(msgspec.Struct, frozen=True):
    """The engine has the memory of a handoff back: blocks on one side, slots on the other."""

    handoff: str
    epoch: int = 0


# ------------------------------------------------------------------ decode


class Claim(msgspec.Struct, frozen=True):
    """The engine wants the KV of a prompt from the prefill side."""

    handoff: str
    epoch: int


class Land(msgspec.Struct, frozen=True):
    """The bytes of a write are in a berth."""

    write: Write
    source: Life
    intact: bool


class Finish(msgspec.Struct, frozen=True):
    """A part was verified and moved, or found spoiled."""

    take: Take


class Fenced(msgspec.Struct, frozen=True):
    """The transport's fence holds."""

    peer: Life
    generation: int


# ------------------------------------------------------------------ both


class Cancel(msgspec.Struct, frozen=True):
    """The engine does not want it any more."""

    handoff: str


class Withdraw(msgspec.Struct, frozen=True):
    """The decode engine needs the room; it may claim again."""

    handoff: str


Action = (
    Receive
    | Expire
    | Introduce
    | Suspect
    | Greet
    | Rebirth
    | RelayDeath
    | Many
    | Prefill
    | Progress
    | Restart
    | FirstToken
    | Submit
    | Leave
    | Observe
    | GiveUp
    | Fail
    | Bounce
    | Fade
    | Purge
    | Claim
    | Land
    | Finish
    | Fenced
    | Cancel
    | Withdraw
)
