"""Everything that can happen to the cache of one engine.

| events                                        | from                            |
|-----------------------------------------------|---------------------------------|
| `Acquire Grow Commit Fork Preempt`            | an engine that lets us manage   |
| `Searched`                                    | the runtime, for a lease        |
| `ReleaseLease PinBlocks UnpinBlocks`          | an engine that lets us manage   |
| `Lookup Load Save LetGo Prefetch Cancel`      | an engine that offloads         |
| `CopyReport`                                  | a rank, about an operation      |
| `Computed`                                    | the engine, about its speed     |
| `RankLost RankBack TierOff TierOn`            | the runtime                     |
| `Discovered Vanished TierVoided`              | the runtime, for a store        |
| `Tick Reset ChangeWeights EmptyDevice`        | the engine's step, the operator |

An event is a value. The same events in the same order give the same effects, always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.operations import BlockFault
    from penstock.vocabulary.keys import Key, LeaseId, OperationId, PinId


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""


class Acquire(Event, frozen=True, kw_only=True):
    """A request wants its prompt's blocks. Answer: `Granted`."""

    request: str
    keys: Sequence[Key]
    """Of every full block of the prompt."""
    token_count: int
    tenant: str = ""
    namespace: bytes = b""
    """Digest of the namespace, to explain misses."""
    content: int = 0
    """Hash of the first block's tokens without the namespace, to explain misses."""
    reuse: bool = True
    """Whether blocks may be matched at all."""
    load: bool = True
    """Whether blocks may be brought up from lower tiers."""
    store: bool = True
    """Whether what it computes may be published."""
    priority: int = 0
    ttl_s: float | None = None
    keep_blocks: int | None = None
    """Leading blocks that are expected to be used again; the others are let go at its end. `None`:
    nothing is known."""
    deadline: float | None = None
    search_until: float | None = None
    """A store is asked for blocks that are not known here: the lease waits for `Searched`, at most
    until then. `None`: nobody is asked."""


class Searched(Event, frozen=True, kw_only=True):
    """A store has said which blocks of a lease's prompt it has; they were `Discovered` before."""

    lease: LeaseId


class Grow(Event, frozen=True, kw_only=True):
    """A lease needs room for `token_count` tokens in all. Answer: `Grown`."""

    lease: LeaseId
    token_count: int


class Commit(Event, frozen=True, kw_only=True):
    """The KV of `token_count` tokens in all is computed on every rank and in every group."""

    lease: LeaseId
    token_count: int
    keys: Sequence[Key]
    """Of the blocks that are full now and were not before."""
    frontier: Key | None = None
    """The key that will come next, where the prompt says so."""


class Fork(Event, frozen=True, kw_only=True):
    """A second request goes on from the same blocks. Answer: `Granted`."""

    lease: LeaseId
    request: str


class ReleaseLease(Event, frozen=True, kw_only=True):
    """A request has ended or was aborted."""

    lease: LeaseId


class Preempt(Event, frozen=True, kw_only=True):
    """A request gives its blocks back for now and means to return."""

    lease: LeaseId


class PinBlocks(Event, frozen=True, kw_only=True):
    """Blocks with these keys stay wherever they lie. Answer: `Pinned`."""

    keys: Sequence[Key]


class UnpinBlocks(Event, frozen=True, kw_only=True):
    """The end of a pin."""

    pin: PinId


class Lookup(Event, frozen=True, kw_only=True):
    """What of this chain lies below the device? Answer: `Found`."""

    keys: Sequence[Key]
    start: int = 0
    """How many leading keys are known to be ready."""
    held: int = 0
    """How many leading blocks lie on the engine's device already."""
    again: bool = False
    """Whether it was said already that some are quicker to compute: it is not counted twice."""


class Load(Event, frozen=True, kw_only=True):
    """Bring blocks into the engine's own device slots. Answer: `Started`."""

    keys: Sequence[Key]
    slots: NDArray[np.int32]
    """One row a KV group; `-1` where a group does not need the block."""
    cause: str
    priority: int = 0
    ttl_s: float | None = None
    deadline: float | None = None


class Save(Event, frozen=True, kw_only=True):
    """Write blocks down from the engine's own device slots. Answer: `Started`."""

    keys: Sequence[Key]
    slots: NDArray[np.int32]
    """One row a KV group."""
    cause: str
    parent: Key | None = None
    """The block before the first one."""
    tenant: str = ""
    priority: int = 0
    ttl_s: float | None = None
    deadline: float | None = None


class LetGo(Event, frozen=True, kw_only=True):
    """A request has ended; what follows the first `keep` blocks of its chain leaves first."""

    keys: Sequence[Key]
    keep: int = 0


class Prefetch(Event, frozen=True, kw_only=True):
    """Bring blocks up to the hub ahead of need. Answer: `Started`."""

    keys: Sequence[Key]
    cause: str
    deadline: float | None = None


class Cancel(Event, frozen=True, kw_only=True):
    """Nobody wants an operation's result any more."""

    operation: OperationId


class CopyReport(Event, frozen=True, kw_only=True):
    """A rank is through with its part of an operation and will not touch its slots again."""

    operation: OperationId
    rank: int
    faults: Sequence[tuple[int, BlockFault]] = ()
    """Positions in the operation, and what went wrong there."""
    failure: str = ""
    """Why all of it failed, if it did."""


class Computed(Event, frozen=True, kw_only=True):
    """The engine has computed the KV of `token_count` tokens in `seconds`."""

    token_count: int
    seconds: float


class RankLost(Event, frozen=True, kw_only=True):
    """A rank's process is seen dead: it writes no more, and its device memory is gone.

    The store process may still read and write the rank's arena: copies from and into stored tiers
    keep what they hold until the store has reported, or is seen dead itself.
    """

    rank: int


class RankBack(Event, frozen=True, kw_only=True):
    """A rank is there again, with empty device memory."""

    rank: int


class TierOff(Event, frozen=True, kw_only=True):
    """A tier below the device cannot be used now."""

    tier: int
    fenced: bool
    """Whether it is certain that nothing reads or writes its slots any more; of a stored tier,
    that the store process is dead. Of the hub, it says nothing about the store process."""
    why: str = ""


class TierOn(Event, frozen=True, kw_only=True):
    """A tier can be used again."""

    tier: int
    kept: bool
    """Whether its bytes are still there."""


class TierVoided(Event, frozen=True, kw_only=True):
    """A reset has voided what lay in a stored tier, whether the tier is on or off.

    What this engine has computed before it was told of the reset of another one is not written
    there any more: that one would find it, and take it for computed since.
    """

    tier: int
    own: bool
    """Whether this engine was reset itself: then all that it has is from after that."""


class Discovered(Event, frozen=True, kw_only=True):
    """Blocks were found in a tier: after a restart, or written by another engine.

    Of a stored tier, the newest come first: as many are noted as there are free entries, and none
    makes room for others unless they are `wanted`. What cannot be true (blocks before themselves)
    is left out.
    """

    tier: int
    keys: Sequence[Key]
    parents: Sequence[Key | None]
    slots: NDArray[np.int32] | None = None
    """Where they lie; `None` for a stored tier, whose store alone knows."""
    foreign: bool = False
    """In a form this engine cannot read: known, but of no use."""
    wanted: bool = False
    """A request is about to use them: a directory that is full forgets other blocks for them."""


class Vanished(Event, frozen=True, kw_only=True):
    """A store gave blocks up by itself: they are forgotten there.

    Copies that read them go on: the store answers them. Blocks that are being written stay too:
    the end of the copy says whether they are there.
    """

    tier: int
    keys: Sequence[Key]


class Tick(Event, frozen=True, kw_only=True):
    """A step of the engine: time for background work and deadlines."""


class EmptyDevice(Event, frozen=True, kw_only=True):
    """The device's memory loses its bytes: its blocks are forgotten, those below stay."""

    why: str


class Reset(Event, frozen=True, kw_only=True):
    """Everything cached is void from now on."""

    why: str


class ChangeWeights(Event, frozen=True, kw_only=True):
    """The model has other weights: keys are others from now on.

    What lies in memory below the device stays, and is found again when its weights come back. That
    needs names: if the weights of before have none, or the same one, everything is void.
    """

    before: str
    after: str
