"""What the scheduler's side of a connector knows of one of the engine's requests.

The one rule: a request gets one load until the engine preempts it, see `had_load`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.connectors.base.store_prefetch import StoreWait
from penstock.vocabulary.hints import NO_HINTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.connectors.base.keys import EngineRequest, RequestKeys
    from penstock.machine.effects import Found
    from penstock.vocabulary.hints import RetentionHints
    from penstock.vocabulary.ids import Key, OperationId


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """The state of one of the engine's requests."""

    request: EngineRequest
    keys: RequestKeys
    load: bool
    save: bool
    hints: RetentionHints = NO_HINTS
    tenant: str = ""
    asked: Sequence[Key] = ()
    """Keys of the last lookup: the engine asks about a waiting request in every step."""
    found: Found | None = None
    """The result of that lookup."""
    wait: StoreWait = field(default_factory=StoreWait)
    held: int = 0
    """Leading blocks that were in the engine's own cache at the last lookup."""
    saved: int = 0
    """Leading blocks that are below the device, being saved, or given up."""
    loads: set[OperationId] = field(default_factory=set)
    saves: dict[OperationId, Sequence[int]] = field(default_factory=dict)
    """Device blocks by save, where the running request keeps them from reuse."""
    arriving: tuple[int, int] = (0, 0)
    """First and end of the tokens being loaded, until the engine kept or dropped them."""
    load_began: float = 0.0
    joins: bool = False
    """Whether it computes on its loads in the step that starts them."""
    had_load: bool = False
    """Whether the engine has started a load for it, or could not. vLLM reserves room for a load
    until its request is computed or preempted, also when the load has failed: the same load again
    must fit beside that room, and in a small pool it never does. So nothing more is offered."""
    recorded: bool = False
    voided: bool = False
    """Whether it runs on blocks from before a reset: what it computes from them is not saved."""

    @property
    def may_load(self) -> bool:
        """Whether it may be promised anything."""
        return self.load and not self.had_load
