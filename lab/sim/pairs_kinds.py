"""What is to be seen in the worlds of the scenario `pairs`."""

from __future__ import annotations

from lab.sim.coverage import Kinds
from lab.sim.handoff_kinds import EVENT_KINDS, HANDOFF_KINDS
from lab.sim.handoff_kinds import FAULT_KINDS as PAIR_FAULT_KINDS

_NOT_HERE = frozenset(
    {"claimed anyway", "preemption", "rank dies", "request lost", "scheduler dies", "withdrawal"}
)
"""Requests are tried again by the router, no prompt is computed anew, and processes die with their
instance."""
_SELDOM = frozenset({"late write into memory given back"})
"""Memory of a pair that stays open is kept: in about one world of a hundred it is written to."""

FAULT_KINDS = (
    *(kind for kind in PAIR_FAULT_KINDS if kind not in _NOT_HERE | _SELDOM),
    "another instance",
    "computed by decode",
    "earlier pair is still open",
    "idle pair looked at",
    "instance dies",
    "instance drains",
    "instance joins",
    "instance leaves",
    "no pair for a request",
    "pair closed to make room",
    "pair closed when idle",
    "pair opened",
    "pair refused",
    "request for a closed pair",
    "role changes",
    "tried again",
)

PAIRS_KINDS = Kinds(
    # A scheduler does not start again without its ranks, nor a prompt, so no write is given up.
    events=tuple(kind for kind in EVENT_KINDS if kind not in {"Withdraw", "GiveUp", "Restart"}),
    faults=FAULT_KINDS,
    copy_word="handoff",
    copies=tuple(kind for kind in HANDOFF_KINDS.copies if kind != "decode withdrawn"),
    has_tables=False,
    events_mean_min=100.0,
)
