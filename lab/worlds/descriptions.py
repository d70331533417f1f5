"""Moves of a small world in words."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from lab.worlds import actions as do
from lab.worlds.faults import Fault
from lab.worlds.moves import NO_FAULT, MoveKind
from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.identity import Life, WriteId

if TYPE_CHECKING:
    from lab.worlds.carrying import State
    from lab.worlds.moves import Move
    from lab.worlds.world import HandoffWorld

_CHANNEL_WORDS = {
    MoveKind.DELIVER: "hears",
    MoveKind.LOSE: "never hears",
    MoveKind.REPEAT: "will hear twice",
    MoveKind.OVERTAKE: "will hear later",
}
_WORDS = {
    do.Expire: "timer expires",
    do.Introduce: "hears of a new life",
    do.Suspect: "thinks it is gone",
    do.Greet: "greets over a new connection",
    do.RelayDeath: "loses its relay",
    do.Many: "in one step",
    do.Prefill: "begins to compute",
    do.Progress: "has computed",
    do.Restart: "has lost the blocks of",
    do.FirstToken: "has the first token",
    do.Submit: "posts",
    do.Leave: "write lands",
    do.Observe: "sees done",
    do.GiveUp: "gives up",
    do.Fail: "sees failed",
    do.Fade: "ghost is over",
    do.Claim: "engine claims",
    do.Finish: "finishes taking",
    do.Fenced: "fence holds",
    do.Cancel: "engine cancels",
    do.Withdraw: "engine withdraws",
}
_SHOWN = (
    "handoff",
    "epoch",
    "part",
    "attempt",
    "report",
    "generation",
    "berth",
    "poisoned",
    "have",
)


def describe(world: HandoffWorld, state: State, move: Move) -> str:
    """A move as one line."""
    parties = world.parties
    fault = "" if move.fault == NO_FAULT else f"FAULT {Fault(move.fault).name.lower()}: "
    if move.kind in _CHANNEL_WORDS:
        channel = move.place - len(parties.names)
        sender, target = parties.routes[channel]
        message = parties.messages[parties.queues[state[move.place]][0]]
        return f"{fault}{target} {_CHANNEL_WORDS[move.kind]} {sender}: {in_short(message)}"
    if move.kind is MoveKind.RECONNECT:
        one, other = world.link_of(move.place)
        return f"{fault}{one} and {other} lose their connection, and open another"
    name = parties.names[move.place]
    if move.kind is MoveKind.CRASH:
        return f"{fault}{name} dies, and begins again"
    action = parties.actions[move.action]
    spoiled = " with wrong bytes" if move.kind is MoveKind.SPOIL else ""
    haunting = "ghost lands" if move.kind is MoveKind.HAUNT else _WORDS[type(action)]
    return f"{fault}{name} {haunting}{spoiled} {in_short(action)}".rstrip()


def in_short(value: msgspec.Struct) -> str:
    """A message or action, with what matters in it."""
    parts = []
    for name in value.__struct_fields__:
        content = getattr(value, name)
        if isinstance(value, do.Action):  # type: ignore[arg-type, misc, unused-ignore]
            parts.append(_content(content))
        elif name in _SHOWN and content not in (b"", ""):
            parts.append(f"{name}={_content(content)}")
    said = "" if isinstance(value, do.Action) else type(value).__name__  # type: ignore[arg-type, misc, unused-ignore]
    return " ".join(filter(None, (said, *parts)))


def _content(content: object) -> str:
    if isinstance(content, WriteId):
        return (
            f"{content.handoff}.{content.epoch} part {content.part} attempt {content.attempt} "
            f"to {content.target.name} area {content.generation} berth {content.berth}"
        )
    if isinstance(content, Life):
        return f"{content.name}#{content.incarnation}"
    if isinstance(content, Grid):
        return ""
    if isinstance(content, Enum):
        return content.value if isinstance(content.value, str) else content.name
    if isinstance(content, bytes):
        return f"{int.from_bytes(content, 'little'):b}"
    if isinstance(content, msgspec.Struct):
        return in_short(content)
    if isinstance(content, tuple):
        return "/".join(filter(None, (_content(item) for item in content)))
    return str(content)
