"""What lies below the device blocks of an engine that manages those itself.

    offload = penstock.open_offload(config, kv=arrays)
    found = offload.lookup(keys)                  # never blocks, never changes anything
    started = offload.load(keys[:found.ready], slots, cause="request-7")
    offload.step()                                # once per engine iteration
    for ended in offload.poll(): ...

The engine may reuse device slots it named in `load` or `save` when the operation is reported
`settled`, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache.departed import MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.states import SlotState
from penstock.errors import CapacityError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.runtime.watched import Watched
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.runtime.driver import Driver
    from penstock.runtime.returning import Muster
    from penstock.vocabulary.ids import Key, OperationId


POLL_MAX = 4096
"""A call of `poll` tells at most so much, so that a step has a bound: far more than one ends."""
TOLD_MAX = 65_536
"""So much may wait to be polled; then nothing more is begun. An engine that never polls would
never learn which of its slots are quiet."""


class HubCounts(NamedTuple):
    """The first tier below the device in numbers: what is cheap enough to ask in every step."""

    slots: int = 0
    """Blocks that fit; 0 where the tier is off."""
    ready: int = 0
    """Blocks that can be loaded."""
    evicted: int = 0
    """Blocks that made room for others, since the beginning."""
    corrupt: int = 0
    """Blocks that failed their checksum, in whatever tier, since the beginning."""


class Offload(Watched):
    """The tiers below an engine's own device blocks."""

    def __init__(
        self, driver: Driver, slot_counts: Sequence[int], muster: Muster | None = None
    ) -> None:
        super().__init__(driver, muster)
        self._slot_counts = slot_counts
        """How many device slots each KV group has."""
        self._told: list[ef.Ended | ef.Settled] = []

    def lookup(
        self, keys: Sequence[Key], *, last: ef.Found | None = None, held: int = 0
    ) -> ef.Found:
        """How much of a chain can be loaded now, how much soon, and why no more.

        Args:
            keys: The blocks, in token order.
            last: The answer to an earlier call for the same keys: only what has changed since
                is looked at. Blocks that were ready are still so as long as none was lost.
            held: So many leading blocks lie on the engine's device already: they are not
                counted when loading is compared with computing.

        Raises:
            ValueError: more are held than there are, or fewer than none.
        """
        if not 0 <= held <= len(keys):
            raise ValueError(f"held is {held}, must be from 0 to {len(keys)}, the number of keys")
        losses = self._driver.machine.books.losses
        start = last.ready if last is not None and last.losses == losses else 0
        again = last is not None and last.miss.reason is MissReason.RECOMPUTE
        return self._ask(ev.Lookup(keys=keys, start=start, held=held, again=again), ef.Found)

    def load(
        self, keys: Sequence[Key], slots: ArrayLike, *, cause: str, deadline: float | None = None
    ) -> ef.Started:
        """Brings the leading blocks that are ready into device slots.

        Args:
            keys: The blocks, in token order.
            slots: A device slot each; with several KV groups one row a group, -1 where a
                group does not need the block.
            cause: The request, for logs and stories.
            deadline: On the monotonic clock; after it the load has expired.

        Raises:
            ValueError: the slots do not fit the keys.
            UnavailableError: a rank is lost.
            CapacityError: tens of thousands of results were not polled.
        """
        placed = self._slots(slots)
        return self._ask(
            ev.Load(keys=keys, slots=placed, cause=cause, deadline=deadline), ef.Started
        )

    def save(
        self,
        keys: Sequence[Key],
        slots: ArrayLike,
        *,
        cause: str,
        parent: Key | None = None,
        tenant: str = "",
        priority: int = 0,
        ttl_s: float | None = None,
        deadline: float | None = None,
    ) -> ef.Started:
        """Writes blocks down that are not there yet, as many as there is room for.

        Args:
            keys: The blocks, in token order.
            slots: A device slot each; with several KV groups one row a group.
            cause: The request, for logs and stories.
            parent: The key of the block before the first one, if there is one.
            tenant: Who pays.
            priority: Blocks of lower priority leave first.
            ttl_s: Blocks are the first to leave once so many seconds have passed.
            deadline: On the monotonic clock; after it the save has expired.

        Raises:
            ValueError: the slots do not fit the keys, or something is no key.
            UnavailableError: a rank is lost.
            CapacityError: tens of thousands of results were not polled.
        """
        _require_keys(keys)
        event = ev.Save(
            keys=keys,
            slots=self._slots(slots),
            cause=cause,
            parent=parent,
            tenant=tenant,
            priority=priority,
            ttl_s=ttl_s,
            deadline=deadline,
        )
        return self._ask(event, ef.Started)

    def prefetch(
        self, keys: Sequence[Key], *, cause: str, deadline: float | None = None
    ) -> ef.Started:
        """Brings blocks that lie further down up to where they can be loaded from.

        Raises:
            CapacityError: tens of thousands of results were not polled.
        """
        return self._ask(ev.Prefetch(keys=keys, cause=cause, deadline=deadline), ef.Started)

    def hub_counts(self) -> HubCounts:
        """The first tier below the device as it is now; `statistics` tells all, and costs more."""
        books = self._driver.machine.books
        hub, counters = books.hub, books.counters
        if hub is None:
            return HubCounts(corrupt=counters.blocks_corrupt)
        return HubCounts(
            slots=hub.pool.slot_count if hub.on else 0,
            ready=hub.pool.count(SlotState.READY) if hub.on else 0,
            evicted=counters.blocks_evicted_by_tier[hub.index],
            corrupt=counters.blocks_corrupt,
        )

    def cancel(self, operation: OperationId) -> None:
        """Ends the interest in an operation; it is still reported, and settles."""
        self._hear(self._driver.handle(ev.Cancel(operation=operation)))

    def poll(self, *, most: int = POLL_MAX) -> list[ef.Ended | ef.Settled]:
        """What has ended since the last call, oldest first: each operation once.

        Args:
            most: So many at a time; the rest comes with the next call.
        """
        told, self._told = self._told[:most], self._told[most:]
        return told

    def reset(self, why: str) -> None:
        """Voids everything below the device."""
        self._hear(self._driver.handle(ev.Reset(why=why)))

    def _slots(self, slots: ArrayLike) -> NDArray[np.int32]:
        given = np.asarray(slots)
        if given.size and given.dtype.kind not in "iu":
            raise ValueError(f"slots are {given.dtype}, must be integers")
        if given.ndim == 1 and len(self._slot_counts) == 1:
            given = given[np.newaxis]
        if given.ndim != 2:
            raise ValueError(
                f"slots has {given.ndim} dimensions, must have one row for each of "
                f"{len(self._slot_counts)} KV groups"
            )
        for group, (row, slot_count) in enumerate(zip(given, self._slot_counts, strict=False)):
            # Numbers of Python's own: a few dozen are looked at sooner than an array is.
            named = row.tolist()
            if named and not NOWHERE <= min(named) <= max(named) < slot_count:
                wrong = next(slot for slot in named if not NOWHERE <= slot < slot_count)
                raise ValueError(
                    f"slots of KV group {group} name slot {wrong}, must be from 0 to "
                    f"{slot_count - 1}, or {NOWHERE} where a load is not needed"
                )
            if NOWHERE in named:
                named = [slot for slot in named if slot != NOWHERE]
            if len(set(named)) != len(named):
                twice = next(slot for slot in named if named.count(slot) > 1)
                raise ValueError(
                    f"slots of KV group {group} name slot {twice} twice, must name each once"
                )
        # Always a copy: the engine may use its own array for something else at once.
        return given.astype(np.int32, copy=True)

    def _ask(self, event: ev.Event, kind: type[ef.EffectT]) -> ef.EffectT:
        if len(self._told) > TOLD_MAX and kind is ef.Started:
            raise CapacityError(tier="results to poll", wanted=1, available=0)
        told = self._driver.handle(event)
        self._hear(told)
        return ef.answer(told, kind)

    def _hear(self, told: list[ef.Effect]) -> None:
        self._told += [effect for effect in told if isinstance(effect, ef.Ended | ef.Settled)]


def _require_keys(keys: Sequence[Key]) -> None:
    """Only `save` makes keys known: what is no key is never found by the others."""
    for position, key in enumerate(keys):
        if type(key) is not bytes or len(key) != KEY_BYTES:
            raise ValueError(f"keys[{position}] is {key!r}, must be {KEY_BYTES} bytes")
