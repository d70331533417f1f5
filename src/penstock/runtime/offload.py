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

import reprlib
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.cache.explain import MissReason
from penstock.cache.nodes import NOWHERE
from penstock.errors import CapacityError, counted
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.books import PRIORITY_MAX
from penstock.runtime.base import BaseCache
from penstock.vocabulary.arguments import (
    as_array,
    as_int,
    as_key,
    as_keys,
    as_seconds,
    as_text,
)
from penstock.vocabulary.keys import OperationId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.machine.statistics import HubCounts
    from penstock.runtime.base import Driven
    from penstock.vocabulary.keys import Key


EventT = TypeVar("EventT", bound=ev.Event)

POLL_MAX = 4096
"""How many results a call of `poll` returns, so that a step has a bound: far more than one ends."""
RESULTS_MAX = 65_536
"""How many results may wait to be polled; with more, nothing is begun. An engine that never polls
would never learn which of its slots are quiet."""


class Offload(BaseCache):
    """The tiers below an engine's own device blocks."""

    def __init__(self, driven: Driven) -> None:
        self._results: list[ef.Ended | ef.Settled] = []
        """What has ended since the last `poll`."""
        super().__init__(driven, partial(_keep_results, self._results))
        self._slot_counts = driven.agreement.device_slots
        """How many device slots each KV group has."""

    def lookup(
        self, keys: Sequence[Key], *, last: ef.Found | None = None, held: int = 0
    ) -> ef.Found:
        """How much of a chain can be loaded now, how much soon, and why no more.

        Args:
            keys: The blocks, in token order.
            last: The answer to an earlier call for the same keys: only what has changed since
                is looked at. Blocks that were ready are still so as long as none was lost.
            held: How many leading blocks lie on the engine's device already: they are not
                counted when loading is compared with computing.

        Raises:
            ValueError: more are held than there are, or something is not a key.
        """
        start, again = self._known(last)
        keys = as_keys(keys, start=start)
        if start > len(keys):
            raise ValueError(
                f"last says that {start} blocks are ready, of {len(keys)} keys: it must be the "
                "answer for the same keys"
            )
        held = as_int("held", held, 0, len(keys))
        return self._ask(ev.Lookup(keys=keys, start=start, held=held, again=again), ef.Found)

    def _known(self, last: ef.Found | None) -> tuple[int, bool]:
        """How many leading blocks are ready by an earlier answer; whether it was to recompute."""
        if last is None:
            return 0, False
        if type(last) is not ef.Found:
            raise ValueError(f"last is {reprlib.repr(last)}, must be the Found of an earlier call")
        again = last.miss.reason is MissReason.RECOMPUTE
        return (last.ready if last.losses == self._driver.machine.losses else 0), again

    def load(
        self,
        keys: Sequence[Key],
        slots: ArrayLike,
        *,
        cause: str,
        priority: int = 0,
        ttl_s: float | None = None,
        deadline: float | None = None,
    ) -> ef.Started:
        """Brings the leading blocks that are ready into device slots.

        Args:
            keys: The blocks, in token order.
            slots: A device slot each; with several KV groups one row a group, -1 where a
                group does not need the block.
            cause: The request, for logs and stories.
            priority: Blocks of lower priority leave first.
            ttl_s: After this many seconds the blocks are the first to leave.
            deadline: On the monotonic clock; after it the load has expired.

        Raises:
            ValueError: the slots do not fit the keys.
            UnavailableError: a rank is lost.
            CapacityError: tens of thousands of results were not polled.
        """
        event = ev.Load(
            keys=as_keys(keys),
            slots=self._slots(slots),
            cause=as_text("cause", cause),
            priority=as_int("priority", priority, -PRIORITY_MAX, PRIORITY_MAX),
            ttl_s=None if ttl_s is None else as_seconds("ttl_s", ttl_s),
            deadline=self._deadline(deadline),
        )
        return self._ask(event, ef.Started)

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
            ttl_s: After this many seconds the blocks are the first to leave.
            deadline: On the monotonic clock; after it the save has expired.

        Raises:
            ValueError: the slots do not fit the keys, or something is not a key.
            UnavailableError: a rank is lost.
            CapacityError: tens of thousands of results were not polled.
        """
        event = ev.Save(
            keys=as_keys(keys),
            slots=self._slots(slots),
            cause=as_text("cause", cause),
            parent=None if parent is None else as_key("parent", parent),
            tenant=as_text("tenant", tenant),
            priority=as_int("priority", priority, -PRIORITY_MAX, PRIORITY_MAX),
            ttl_s=None if ttl_s is None else as_seconds("ttl_s", ttl_s),
            deadline=self._deadline(deadline),
        )
        return self._ask(event, ef.Started)

    def let_go(self, keys: Sequence[Key], *, keep: int = 0) -> None:
        """A request has ended, and its blocks are not expected to be used again.

        They are the first to leave, except those that other known blocks follow as well.

        Args:
            keys: All blocks of the request, in token order.
            keep: How many leading ones are expected to be used again.

        Raises:
            ValueError: something is not a key, or `keep` no number of blocks.
        """
        event = ev.LetGo(keys=as_keys(keys), keep=as_int("keep", keep))
        with self._access:
            self._deliver(self._driver.handle(event))

    def prefetch(
        self, keys: Sequence[Key], *, cause: str, deadline: float | None = None
    ) -> ef.Started:
        """Brings blocks that lie further down up to where they can be loaded from.

        Raises:
            CapacityError: tens of thousands of results were not polled.
        """
        event = ev.Prefetch(
            keys=as_keys(keys), cause=as_text("cause", cause), deadline=self._deadline(deadline)
        )
        return self._ask(event, ef.Started, handle=self._driver.prefetch)

    def hub_counts(self) -> HubCounts:
        """The first tier below the device as it is now; `statistics` has more, and costs more."""
        self._access.require()
        return self._driver.machine.hub_counts()

    def sinking(self, keys: Sequence[Key]) -> int:
        """How many of these blocks are on their way into a tier that outlives this process."""
        self._access.require()
        return self._driver.machine.sinking(as_keys(keys))

    def cancel(self, operation: OperationId) -> None:
        """Ends the interest in an operation; it is still reported, and settles.

        Raises:
            ValueError: it is not a name of an operation.
        """
        if type(operation) is not OperationId:
            raise ValueError(
                f"operation is {reprlib.repr(operation)}, must be one of Started.operations"
            )
        with self._access:
            self._deliver(self._driver.handle(ev.Cancel(operation=operation)))

    def poll(self, *, most: int = POLL_MAX) -> list[ef.Ended | ef.Settled]:
        """What has ended since the last call, oldest first: each operation once.

        Args:
            most: How many at a time; the rest comes with the next call.

        Raises:
            ValueError: it is not a number of results.
        """
        most = as_int("most", most)
        with self._access:
            results = self._results[:most]
            del self._results[:most]
        return results

    def reset(self, why: str) -> None:
        """Voids everything below the device."""
        why = as_text("why", why)
        with self._access:
            self._deliver(self._driver.reset(why))

    def __repr__(self) -> str:
        copies = counted(len(self._driver.machine.operations), "copy", "copies")
        counts = f"{copies} under way"
        return f"<penstock.Offload: {counts}, {self._describe_tiers()}>"

    def _deadline(self, deadline: float | None) -> float | None:
        return None if deadline is None else self._driver.as_time("deadline", deadline)

    def _slots(self, slots: ArrayLike) -> NDArray[np.int32]:
        given = as_array("slots", slots)
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

    def _ask(
        self,
        event: EventT,
        kind: type[ef.EffectT],
        handle: Callable[[EventT], list[ef.Effect]] | None = None,
    ) -> ef.EffectT:
        with self._access:
            if len(self._results) > RESULTS_MAX and kind is ef.Started:
                raise CapacityError(tier="results to poll", wanted=1, available=0)
            effects = (handle or self._driver.handle)(event)
            self._deliver(effects)
            return ef.answer(effects, kind)


def _keep_results(results: list[ef.Ended | ef.Settled], effects: list[ef.Effect]) -> None:
    results += [effect for effect in effects if isinstance(effect, ef.Ended | ef.Settled)]
