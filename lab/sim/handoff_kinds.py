"""What is to be seen in the worlds of the scenario `handoff`."""

from __future__ import annotations

from typing import get_args

from lab.sim.coverage import Kinds
from lab.worlds import actions as do
from penstock.handoff.protocol.messages import AnyMessage, Ping, Pong, Refused
from penstock.handoff.protocol.states import HandoffOutcome

FAULT_KINDS = (
    "cancel by decode",
    "cancel by prefill",
    "claimed anyway",
    "false suspicion",
    "fence does not hold yet",
    "ghost lands",
    "late write into a berth that is read",
    "late write into memory given back",
    "long cut",
    "message cut off",
    "message from an earlier life",
    "message lost",
    "message overtaken",
    "message to the dead",
    "message twice",
    "part corrupt",
    "partition",
    "preemption",
    "rank dies",
    "request lost",
    "scheduler dies",
    "slow link",
    "slow rank",
    "withdrawal",
    "write fails",
    "write refused",
    "write to the dead",
)

_NOT_SENT = (Refused, Ping, Pong)
"""All parties of a world fit each other, and suspicion is drawn, not found by pinging."""

_EXPLORED_ONLY = ("Greet", "RelayDeath")
"""Actions of the explorer's worlds alone."""

EVENT_KINDS = tuple(
    sorted(
        {"Timer"}
        | {f"hears {kind.__name__}" for kind in get_args(AnyMessage) if kind not in _NOT_SENT}
        | {kind.__name__ for kind in get_args(do.Action)}
        - {"Receive", "Expire", "Many", *_EXPLORED_ONLY}
    )
)

HANDOFF_KINDS = Kinds(
    events=EVENT_KINDS,
    faults=FAULT_KINDS,
    copy_word="handoff",
    copies=tuple(
        f"{side} {outcome.value}"
        for side in ("decode", "prefill")
        for outcome in HandoffOutcome
        if f"{side} {outcome.value}" != "prefill withdrawn"
    ),
    has_tables=False,
    events_mean_min=100.0,
)
