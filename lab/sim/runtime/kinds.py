"""What is to be seen in the worlds around the runtime."""

from __future__ import annotations

from lab.sim.coverage import COPY_KINDS, EVENT_KINDS, EVENTS_MEAN_MIN, Kinds

RUNTIME_FAULTS: tuple[str, ...] = (
    "abort while computing",
    "abort while loading",
    "block corrupt",
    "bytes rot",
    "channel cut",
    "channel is full",
    "copies unsettled at the end",
    "copy cancelled",
    "copy goes on after it was given up",
    "deadline passed",
    "event refused",
    "foreign blocks found",
    "gap in KV events",
    "lease lost",
    "message lost",
    "message twice",
    "no room",
    "nonsense arrives",
    "plan lost",
    "rank comes back",
    "rank comes back with a tier off",
    "rank comes back without a tier",
    "rank dies",
    "rank is asked about what it should have told",
    "rank is back before it was missed",
    "rank is lost",
    "rank is slow",
    "rank misses a plan",
    "recompute is quicker",
    "report from an earlier life",
    "report from before a reset",
    "report lost",
    "reset",
    "shutdown",
)

RUNTIME_KINDS = Kinds(
    events=tuple(kind for kind in EVENT_KINDS if kind != "Vanished"),
    faults=RUNTIME_FAULTS,
    copy_word="copy",
    copies=COPY_KINDS,
    has_tables=True,
    events_mean_min=EVENTS_MEAN_MIN,
)
