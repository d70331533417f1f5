"""What the scheduler's side of a connector keeps of the engine's requests and their blocks.

A pin is a reference in the engine's own block pool: the block stays in place and can still be
matched there, and the engine never waits for a copy. However slow the copies are, at most half of
the blocks that are free when a pin is added, or a twentieth of the pool where that is more, are
pinned. So of a full pool a twentieth can be pinned, and of one with fewer than twenty blocks
nothing; a pool with room allows enough pins for the blocks that leave the windows of a long
prefill. Blocks that are copied before the engine allocates again, as on the CPU, may be pinned
beyond that.

    a request is queued           ─→ bring_up     its blocks travel from disk to host memory
    the engine wants to start it  ─→ begin_turn, bring_up
                                  ─→ defers       not yet: they are on their way

A long queue must not fill host memory with blocks that push each other out before they are used:
what is brought up for requests whose turn has not come is bounded (`AHEAD_SHARE`). The others are
brought up when it is their turn.

A request waits for blocks that are on their way, and for nothing else:

| the blocks                                         | the request                                 |
|----------------------------------------------------|---------------------------------------------|
| are being copied into host memory                  | waits                                       |
| may be in a store that has not read all its tables | waits for the store's answer                |
| may be in a store that was just started            | waits until it is known which tiers are on  |
| are quicker to compute, by the measured rates      | does not wait                               |
| lie below a host memory that has no room for them  | does not wait                               |
| lie in a store that was lost                       | does not wait                               |

An engine may keep a load from starting until other requests have given up room. vLLM starts an
asynchronous load only if it fits beside the room that it reserves for requests under way, and
asks about the request again in each step. If nothing is under way that could give up room, the
same question gets the same answer for ever, and everything behind that request waits with it.

    find_tokens  ─→ offered     the engine was told that so many tokens can be loaded
    start_load   ─→ started
    plan_step    ─→ end_step    returns the requests whose loads are given up

The rules:

- No request waits longer than `WAIT_S`, counted from the moment that the engine wants to start it.
  Then it takes what has arrived, and computes the rest.
- A request gets one load until the engine preempts it, see `had_load`.
- Only steps count in which the engine asked for the load, computed nothing, and had nothing under
  way that ends by itself. A request that waits for others is never given up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.vocabulary.hints import NO_HINTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.connectors.base.keys import EngineRequest, RequestKeys
    from penstock.connectors.base.statistics import TransferCounts
    from penstock.machine.effects import Found, Started
    from penstock.runtime.offload import Offload
    from penstock.runtime.stored_tiers import StoreStatus
    from penstock.vocabulary.hints import RetentionHints
    from penstock.vocabulary.keys import Key, OperationId


PIN_SHARE = 0.05
"""The part of a full pool that may be pinned: small, so that an engine under pressure keeps
working."""
FREE_SHARE = 0.5
"""The part of the free blocks that may be pinned: as much again is left for the next step."""


class BlockPool(Protocol):
    """What is used of the engine's block pool; the names are vLLM's."""

    @property
    def blocks(self) -> Sequence[object]:
        """Every block, by its number."""
        ...

    def touch(self, blocks: Sequence[object]) -> None:
        """Adds a reference to each."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[object]) -> None:
        """Takes a reference from each."""
        ...

    def get_num_free_blocks(self) -> int:
        """How many blocks have no reference."""
        ...


class _Pin:
    __slots__ = ("block_ids", "operations")

    def __init__(self, block_ids: Sequence[int], operations: int) -> None:
        self.block_ids = block_ids
        self.operations = operations


class Pins:
    """The pins of one scheduler."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._least = int(len(pool.blocks) * PIN_SHARE)
        self.count = 0
        self._of: dict[OperationId, list[_Pin]] = {}

    @property
    def limit(self) -> int:
        """How many blocks may be pinned now."""
        return max(self._least, int(self._pool.get_num_free_blocks() * FREE_SHARE))

    @property
    def room(self) -> int:
        """How many more blocks may be pinned now."""
        return max(0, self.limit - self.count)

    def add(self, block_ids: Sequence[int], operations: Sequence[OperationId]) -> None:
        """Pins blocks until the last of these operations has settled."""
        pin = _Pin(block_ids, len(operations))
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        self.count += len(block_ids)
        for operation in operations:
            self._of.setdefault(operation, []).append(pin)

    def settled(self, operation: OperationId) -> None:
        """Removes the pins of an operation that no longer touches its blocks, if it has any."""
        for pin in self._of.pop(operation, ()):
            pin.operations -= 1
            if not pin.operations:
                self.count -= len(pin.block_ids)
                self._pool.free_blocks([self._pool.blocks[block] for block in pin.block_ids])


WAIT_S = 2.0
"""How long a request waits at most: a disk reads 2 GB meanwhile. It must not look like a hang."""
START_S = 10.0
"""How long an engine with nothing to do keeps stepping for a store that starts, or starts again:
it takes about a second, or several on a machine that is busy starting engines."""

AHEAD_SHARE = 0.5
"""The part of host memory that blocks of queued requests may take."""


@dataclass(slots=True)
class StoreWait:
    """What a request has asked of the store, and how long it waits for it."""

    asked: int = 0
    """How many leading blocks were asked for, since it is the request's turn or before."""
    ahead: int = 0
    """Blocks that were brought up before it was the request's turn."""
    began: float | None = None
    until: float = 0.0
    is_waiting: bool = False
    over: bool = False
    """Whether it was started, or has waited long enough: it waits no more."""


class StorePrefetch:
    """The prefetches of one engine."""

    def __init__(self, offload: Offload, counts: TransferCounts, *, wait_s: float = WAIT_S) -> None:
        """Waits for a store that was just started."""
        self._offload = offload
        self._counts = counts
        self._wait_s = wait_s
        self._settled = False
        self._first_time = True
        """Whether the store has not been there yet."""
        self._comes_until = counts.clock() + START_S
        self._ahead = 0
        """Blocks that were brought up for requests whose turn has not come."""
        # Starts the process: the engine has yet to warm up.
        offload.step()

    @property
    def pending(self) -> bool:
        """Whether an engine with nothing else to do should step for the store to come."""
        return not self._settled and self._counts.clock() < self._comes_until

    @property
    def due(self) -> bool:
        """Whether the tiers must be stepped for the store."""
        return self._status("").due

    def watch(self) -> None:
        """Looks at the store after the tiers were stepped."""
        status = self._status("")
        if status.settled:
            self._first_time = False
        elif self._settled:
            # It was lost just now, and is started again.
            self._comes_until = self._counts.clock() + START_S
        self._settled = status.settled
        self._counts.store(status)

    def begin_turn(self, wait: StoreWait) -> None:
        """The engine wants to start a request, or has no more to do with it."""
        if wait.began is None:
            self._ahead -= wait.ahead
            # It may ask once more: what was brought up ahead may have made room for others.
            wait.ahead = wait.asked = 0
            now = self._counts.clock()
            wait.began, wait.until = now, now + self._wait_s

    def bring_up(
        self, wait: StoreWait, keys: Sequence[Key], found: Found, *, held: int, cause: str
    ) -> Started | None:
        """Asks for blocks of a request that are worth it, once; returns what was started.

        Before the turn of the request that is done only as far as the bound allows.
        """
        known = found.ready + found.pending
        wanted = len(keys) if found.worth >= known else found.worth
        if wanted <= max(found.ready, held, wait.asked):
            return None
        if not self._status(cause).on:
            return None
        if wait.began is None:
            if self._ahead + found.below > AHEAD_SHARE * self._offload.hub_counts().slots:
                return None
            wait.ahead = found.below
            self._ahead += found.below
        wait.asked = wanted
        return self._offload.prefetch(keys[:wanted], cause=cause)

    def defers(
        self, wait: StoreWait, keys: Sequence[Key], found: Found, *, held: int, cause: str
    ) -> bool:
        """Whether a request is not started yet; the arguments are those of `bring_up`.

        It is the request's turn: `begin_turn` was called.
        """
        if wait.over or wait.began is None:
            return False
        now = self._counts.clock()
        if now < wait.until and self._expects(keys, found, held, cause):
            wait.is_waiting = True
            return True
        if wait.is_waiting:
            self._counts.counters.time("disk_wait_seconds", now - wait.began)
        wait.is_waiting, wait.over = False, True
        return False

    def _expects(self, keys: Sequence[Key], found: Found, held: int, cause: str) -> bool:
        known = found.ready + found.pending
        if found.rising and min(found.worth, known) > max(found.ready, held):
            return True
        if known >= len(keys) or found.worth < known:
            return False
        status = self._status(cause)
        return status.searching or (self._first_time and self.pending and not status.settled)

    def _status(self, cause: str) -> StoreStatus:
        status = self._offload.store_status(cause)
        assert status is not None, "only an engine with a store has prefetches"
        return status


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """The state of one of the engine's requests."""

    request: EngineRequest
    keys: RequestKeys
    load: bool
    save: bool
    hints: RetentionHints = NO_HINTS
    tenant: str = ""
    turn: int = 0
    """Its number among the requests: what they decode is saved in different steps."""
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
    until_block: int = 0
    """So many more tokens it decodes before another block of it can be complete: most steps of
    most requests have nothing to save, and need not look."""
    ran: bool = False
    """Whether it was in a step since the engine started it: only then are its tokens computed."""
    recorded: bool = False
    voided: bool = False
    """Whether it runs on blocks from before a reset: what it computes from them is not saved."""

    @property
    def may_save(self) -> bool:
        """Whether what it computes is saved now; on a load, when the load was verified."""
        return self.save and not self.voided and not self.loads

    @property
    def may_load(self) -> bool:
        """Whether it may be promised anything."""
        return self.load and not self.had_load


STEPS_MAX = 64
"""Such steps in a row. Results of earlier steps that may free room arrive within a few; 64 steps
without work take an engine some hundredths of a second."""


class UnstartedLoads:
    """The offers of one scheduler that have not been taken."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        """Requests whose offer was not taken, and in how many such steps."""
        self._offered: set[str] = set()
        """Requests that were offered a load since the last step."""

    def offered(self, request: str) -> None:
        """The engine was told what can be loaded for a request."""
        self._offered.add(request)

    def started(self, request: str) -> None:
        """The engine has made room for the load, or the request has ended."""
        self._offered.discard(request)
        self._steps.pop(request, None)

    def end_step(self, *, idle: bool) -> list[str]:
        """A step was put together.

        Returns:
            Requests that are to be computed: their loads would never start.
        """
        if not self._offered and not self._steps:
            return []
        before = self._steps if idle else {}
        self._steps = {name: before.get(name, 0) + 1 for name in self._offered} if idle else {}
        self._offered.clear()
        over = [name for name, steps in self._steps.items() if steps >= STEPS_MAX]
        for name in over:
            del self._steps[name]
        return over
