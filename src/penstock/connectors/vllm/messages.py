"""What the two halves of the connector tell each other, once a step.

They travel inside vLLM's own messages, which are pickled: plain values only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.vocabulary.ids import OperationId


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A request that waits for its blocks."""

    request: str
    operations: tuple[OperationId, ...]
    """What brings them; empty if nothing does."""
    missing: tuple[int, ...] = ()
    """Device blocks, in the first KV group, that were promised and cannot be brought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """From the scheduler's half to every worker's."""

    plan: bytes | None = None
    loads: tuple[Loading, ...] = field(default=())
    early: tuple[bytes, ...] = ()
    """Plans that come before the forward pass, and before `plan`."""
    joined: tuple[Loading, ...] = ()
    """What the forward pass computes on: these loads are in `early`."""
