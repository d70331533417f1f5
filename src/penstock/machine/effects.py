"""Everything the cache asks for or answers.

| effects                              | for                                          |
|--------------------------------------|----------------------------------------------|
| `Granted Grown Pinned Found Started` | the sender of the event: its answer          |
| `Copy Abandon DropBlocks`            | the drivers: work to carry out on every rank |
| `Ended Settled LeaseChanged`         | the engine: what became of what it waits for |

Every `Copy` is answered by exactly one `CopyReport` a rank, whatever happens to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.cache.explain import Miss
from penstock.cache.operations import BlockFault, Outcome, Purpose
from penstock.cache.states import LeaseState
from penstock.errors import InvariantViolation
from penstock.vocabulary.keys import Key, LeaseId, OperationId, PinId


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do, or to know."""


class Granted(Effect, frozen=True, kw_only=True):
    """A lease was given."""

    lease: LeaseId
    table: NDArray[np.intp]
    state: LeaseState
    cached_tokens: int
    cached_by_tier: tuple[int, ...]
    """Tokens found in each tier, device first."""
    miss: Miss
    searching: bool = False
    """Whether it waits for a store to say which further blocks it has."""


class Grown(Effect, frozen=True, kw_only=True):
    """A lease has room for what it asked for."""

    lease: LeaseId
    table: NDArray[np.intp]
    state: LeaseState


class Pinned(Effect, frozen=True, kw_only=True):
    """A prefix is pinned."""

    pin: PinId
    present: int
    """How many of its blocks are cached now."""


class Found(Effect, frozen=True, kw_only=True):
    """What of a chain lies below the device."""

    ready: int
    """How many leading blocks can be loaded now."""
    pending: int
    """How many after them are on their way, or wait for a `Prefetch`."""
    below: int
    """How many of the pending ones wait below the hub for a `Prefetch`."""
    rising: int
    """How many of the pending ones are being copied from below into the hub."""
    worth: int
    """How many leading blocks, ready or pending, are quicker to load than to compute."""
    miss: Miss
    """Why there are no more, or no more that are worth loading."""
    losses: int
    """As long as this number stays the same, ready blocks stay ready."""


class Started(Effect, frozen=True, kw_only=True):
    """What became of a wish to load, save or prefetch."""

    operations: tuple[OperationId, ...]
    accepted: tuple[int, ...]
    """Positions of the keys that these operations move, in order."""
    miss: Miss
    """Why the rest is not moved."""


class Copy(Effect, frozen=True, kw_only=True):
    """Every rank copies these blocks and reports.

    From or into a stored tier it is the store process that copies, for every rank's arena, and
    reports for each of them.
    """

    operation: OperationId
    purpose: Purpose
    source: int
    target: int
    keys: Sequence[Key]
    source_slots: NDArray[np.int32]
    target_slots: NDArray[np.int32]
    deadline: float
    cause: str
    parents: Sequence[Key | None] = ()
    """Into a stored tier: the key of the block before each, `None` for the first of a chain."""


class Abandon(Effect, frozen=True, kw_only=True):
    """A copy is no longer wanted: ranks stop early if they can, and report all the same."""

    operation: OperationId


class DropBlocks(Effect, frozen=True, kw_only=True):
    """A tier forgot these blocks: tiers that keep headers write tombstones.

    Not sent for a stored tier: the store keeps the block, only the directory lost its entry.
    """

    tier: int
    keys: Sequence[Key]
    slots: NDArray[np.int32]


class Ended(Effect, frozen=True, kw_only=True):
    """The outcome of an operation; sent once."""

    operation: OperationId
    purpose: Purpose
    outcome: Outcome
    faults: tuple[tuple[int, BlockFault], ...]
    failure: str
    settled: bool
    """Whether its slots are quiet; if not, `Settled` follows when they are."""
    cause: str
    block_count: int
    """How many blocks it was to copy."""


class Settled(Effect, frozen=True, kw_only=True):
    """No rank touches this operation's slots any more."""

    operation: OperationId


class LeaseChanged(Effect, frozen=True, kw_only=True):
    """A waiting request may run, or has lost its blocks; or a store has more of them."""

    lease: LeaseId
    request: str
    state: LeaseState
    table: NDArray[np.intp]
    cached_tokens: int
    cached_by_tier: tuple[int, ...]
    """Tokens found in each tier, device first."""
    miss: Miss
    """Why no more was found; another one than at first if blocks did not arrive."""


EffectT = TypeVar("EffectT", bound=Effect)


def answer(effects: Sequence[Effect], kind: type[EffectT]) -> EffectT:
    """The one effect of a kind among the effects of an event."""
    for effect in effects:
        if isinstance(effect, kind):
            return effect
    raise InvariantViolation(f"no {kind.__name__} among the effects")
