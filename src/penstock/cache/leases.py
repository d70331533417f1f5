"""Leases: the right of a request to keep its blocks on the device.

A lease is one ordered list of device slots, in token order, wherever the blocks came from.
Some of them are *published* (they have a key and others may match them), the rest is the
request's own until it commits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.departed import Miss, MissReason
from penstock.cache.states import LEASE_TABLE, LeaseMove, LeaseState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.vocabulary.ids import Key, LeaseId, OperationId


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """What one request holds."""

    id: LeaseId
    request: str
    tenant: int
    epoch: int
    """Blocks computed before a reset are not published after it."""
    table: NDArray[np.int32]
    """Device slots in token order."""
    matched_blocks: int
    """So many leading blocks were found rather than computed."""
    token_count: int
    """So many leading tokens have their KV, or will have it when the loads arrive."""
    published_blocks: int
    """So many leading blocks have been offered to the index."""
    tail_key: Key | None
    """The key of the last published block."""
    frontier: Key | None
    """The key this request will publish next, where it is known."""
    store: bool = True
    priority: int = 0
    ttl_s: float | None = None
    namespace: bytes = b""
    content: int = 0
    miss: Miss = field(default_factory=lambda: Miss(reason=MissReason.NONE))
    """Why no more was found."""
    state: LeaseState = LeaseState.READY
    waiting: set[OperationId] = field(default_factory=set)
    """The copies it waits for."""
    twins: list[int] = field(default_factory=list)
    """Slots of blocks that another request published first; held, so that the blocks this
    request publishes after them stay reachable."""

    def move(self, move: LeaseMove) -> None:
        """Changes the state by the table."""
        self.state = LEASE_TABLE.after(self.state, move, subject=f"lease of {self.request!r}")

    def append(self, slots: NDArray[np.int32]) -> None:
        """Adds slots at the end of the table."""
        self.table = np.concatenate((self.table, slots))
