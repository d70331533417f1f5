"""The tiers below an engine that hands over pages: their hashes, and where they lie on the device.

    find   ─→ lookup    how many leading pages can be loaded now; what lies on a disk is asked for
    load   ─→ load      copies them, verified, and answers when they are there or one is not
    save   ─→ save      begins to copy pages down; `saves_ended` counts in the order of the calls
    step   ─→ step      once per step of the engine: goes on with what was begun
    reset

An engine of this kind (SGLang) has its scheduler and its rank in one process, so that every rank
has tiers of its own. It asks about a waiting request in every step, and keeps the pages it saves.

The rules:

- `find` counts what is in host memory. Where several ranks must give one answer (`verifies`), it
  counts only what it has just read and verified: an engine that loads on one rank and computes on
  another would wait for ever, and `find` is the last question before they agree.
- `load` has copied and verified every page when it says yes. It says no where nothing was lost yet:
  the engine computes the pages then.
- A key names the rank as well, so that nothing here depends on what other ranks have.
"""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.operations import Outcome, Purpose
from penstock.connectors.base.keys import PageKeys
from penstock.connectors.base.requests import StorePrefetch, StoreWait
from penstock.machine.effects import Ended, Settled
from penstock.runtime.rank import STEP_BUDGET_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config import Config
    from penstock.connectors.base.statistics import TransferCounts
    from penstock.machine.effects import Found, Started
    from penstock.runtime.offload import Offload
    from penstock.vocabulary.keys import Key, OperationId


ASKED_KEPT = 1 << 18
"""Pages of requests of which the last answer is kept, about 13 MB: an engine does not say when a
request has ended."""
PARENTS_KEPT = 1 << 16
"""Pages of which is remembered what comes before them: about 12 MB."""
SCRATCH_PAGE = 0
"""A device page that is written to and never read, as engines keep one for padding."""
DEVICE_S = 1.0
"""How long one wait for a device lasts: it is repeated until the device itself is given up."""


@dataclass(slots=True)
class _Asked:
    """What was last answered about a request."""

    count: int = 0
    last: str = ""
    """The hash of its last page: hashes cover what is before them, so it stands for all of them."""
    keys: list[Key] = field(default_factory=list)
    found: Found | None = None
    verified: int = 0
    """How many leading pages were verified, as long as `losses` stays the same."""
    losses: int = -1
    wait: StoreWait = field(default_factory=StoreWait)


@dataclass(slots=True)
class _Save:
    """Pages that are being saved together."""

    waiting: dict[OperationId, Sequence[Key]]
    """The copies that have not settled, and the pages of each."""
    good: bool


class PageTiers:
    """What one rank of an engine has below its device."""

    def __init__(
        self,
        config: Config,
        offload: Offload,
        counts: TransferCounts,
        *,
        page_bytes: int,
        part: str = "",
        verifies: bool = False,
    ) -> None:
        """Begins with what the tiers have.

        Args:
            config: It names model and weights.
            offload: The tiers, over this rank alone.
            counts: What happens is counted there.
            page_bytes: What a page has on the device, in all layers.
            part: What keys depend on beside the configuration, such as the rank.
            verifies: Whether `find` counts only what was verified.
        """
        self._config = config
        self._offload = offload
        self._counts = counts
        self._page_bytes = page_bytes
        self._part = part
        self._verifies = verifies
        self._keys = PageKeys(config, part=part)
        self._store = StorePrefetch(offload, counts) if offload.persists else None
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._asked_pages = 0
        self._parents: OrderedDict[Key, Key] = OrderedDict()
        self._saves: deque[_Save] = deque()
        self._save_of: dict[OperationId, _Save] = {}
        self._loading: dict[OperationId, Ended | None] = {}
        """Operations that `_finish` waits for, and how they ended."""
        self._unsettled: set[OperationId] = set()
        self._has_work = True

    @property
    def offload(self) -> Offload:
        """The tiers themselves."""
        return self._offload

    def keys_of(self, hashes: Sequence[str]) -> list[Key]:
        """What the tiers call these pages from now on, until a reset."""
        return self._keys.of(hashes)

    # ---------------------------------------------------------------- what can be loaded

    def expect(self, request: str, hashes: Sequence[str]) -> None:
        """A request is queued: pages of it that lie on a disk come up meanwhile."""
        if self._store is not None:
            self._look_up(self._about(request, hashes), request)

    def find(self, request: str, hashes: Sequence[str]) -> int:
        """How many leading pages can be loaded now; asks for those that lie on a disk."""
        asked = self._about(request, hashes)
        if self._store is not None:
            self._store.begin_turn(asked.wait)
        found = self._look_up(asked, request)
        ready = min(found.ready, found.worth)
        return self._verified(asked, ready, request) if self._verifies else ready

    def comes(self, request: str, hashes: Sequence[str]) -> bool:
        """Whether more of a request is on its way from a disk, and worth a short wait."""
        if self._store is None:
            return False
        asked = self._about(request, hashes)
        self._store.begin_turn(asked.wait)
        found = self._look_up(asked, request)
        return self._store.defers(asked.wait, asked.keys, found, held=0, cause=request)

    def _about(self, request: str, hashes: Sequence[str]) -> _Asked:
        asked = self._asked.get(request)
        if asked is None:
            self._counts.counters.add("lookups")
            asked = self._asked[request] = _Asked()
        self._asked.move_to_end(request)
        if asked.count != len(hashes) or asked.last != hashes[-1]:
            self._asked_pages += len(hashes) - asked.count
            while self._asked_pages > ASKED_KEPT and len(self._asked) > 1:
                self._forget(next(iter(self._asked)))
            asked.count, asked.last = len(hashes), hashes[-1]
            asked.keys, asked.found, asked.verified = self._keys.of(hashes), None, 0
            self._learn(asked.keys)
        return asked

    def _look_up(self, asked: _Asked, request: str) -> Found:
        found = asked.found = self._offload.lookup(asked.keys, last=asked.found)
        if self._store is None:
            return found
        started = self._store.bring_up(asked.wait, asked.keys, found, held=0, cause=request)
        if started is None:
            return found
        self._has_work = True
        found = asked.found = self._offload.lookup(asked.keys, last=found)
        return found

    def _verified(self, asked: _Asked, ready: int, request: str) -> int:
        """How many of these leading pages are intact, each of which is read once for a request."""
        assert asked.found is not None
        if asked.losses != asked.found.losses:
            asked.verified, asked.losses = 0, asked.found.losses
        while asked.verified < ready:
            key = asked.keys[asked.verified]
            if self._finish(self._start_load([key], [SCRATCH_PAGE], request), [key]):
                # It is gone now, and those before it are as they were.
                asked.found = self._offload.lookup(asked.keys)
                asked.losses = asked.found.losses
                break
            asked.verified += 1
        return min(asked.verified, ready)

    def _learn(self, keys: Sequence[Key]) -> None:
        """Remembers which page comes before which: an engine does not say it when it saves."""
        for before, key in itertools.pairwise(keys):
            self._parents[key] = before
            self._parents.move_to_end(key)
        while len(self._parents) > PARENTS_KEPT:
            self._parents.popitem(last=False)

    def _forget(self, request: str) -> None:
        asked = self._asked.pop(request, None)
        if asked is None:
            return
        self._asked_pages -= asked.count
        if self._store is not None:
            self._store.begin_turn(asked.wait)

    # ---------------------------------------------------------------- up

    def load(self, request: str, hashes: Sequence[str], pages: Sequence[int]) -> bool:
        """Whether all of these pages are in the device pages now; if not, none can be relied on."""
        keys = self._keys.of(hashes)
        self._forget(request)
        began = self._counts.clock()
        self._counts.counters.add("tokens_found", len(keys) * self._config.cache.block_tokens)
        lost = self._finish(self._start_load(keys, pages, request), keys)
        self._counts.counters.time("load_seconds", self._counts.clock() - began)
        if lost:
            return False
        self._counts.counters.add("tokens_loaded", len(keys) * self._config.cache.block_tokens)
        return True

    def _start_load(self, keys: Sequence[Key], pages: Sequence[int], request: str) -> Started:
        self._has_work = True
        return self._offload.load(keys, np.asarray(pages, dtype=np.int32), cause=request)

    def _finish(self, started: Started, keys: Sequence[Key]) -> int:
        """Waits for a load to end; returns how many of its pages did not arrive."""
        self._loading = dict.fromkeys(started.operations)
        while any(
            ended is None or operation in self._unsettled
            for operation, ended in self._loading.items()
        ):
            # All of it at once: the engine goes on when it is there.
            self._offload.step(budget_bytes=len(keys) * self._page_bytes, again=True)
            self._take_ended()
            if None in self._loading.values():
                # Returns at once where the CPU copies; ends with an error if a device hangs.
                self._offload.wait(self._counts.clock() + DEVICE_S)
        lost = len(keys) - len(started.accepted)
        first = 0
        for ended in self._loading.values():
            assert ended is not None
            self._counts.copied(ended, ended.block_count)
            if ended.outcome is not Outcome.DONE:
                lost += len(ended.faults) or ended.block_count
                self._counts.load_failed(ended, keys[first : first + ended.block_count])
            first += ended.block_count
        self._loading = {}
        return lost

    # ---------------------------------------------------------------- down

    def save(self, hashes: Sequence[str], pages: Sequence[int]) -> None:
        """Begins to save pages that are not there yet; the engine keeps them until that has ended.

        Whether all of them are there then is what `take_saved` returns for it.
        """
        keys = self._keys.of(hashes)
        self._learn(keys)
        self._has_work = True
        started = self._offload.save(
            keys,
            np.asarray(pages, dtype=np.int32),
            cause="save",
            parent=self._parents.get(keys[0]),
        )
        # What its write policy did not take is offered again when the engine uses the pages next.
        whole = started.miss.reason.value == "none" and (
            bool(started.operations) or self._offload.lookup(keys).ready == len(keys)
        )
        if not whole:
            missing = len(keys) - len(started.accepted)
            self._counts.counters.add("blocks_dropped_room", missing)
        accepted = [keys[position] for position in started.accepted]
        most = self._config.cache.operation_blocks_max
        waiting: dict[OperationId, Sequence[Key]] = {
            operation: accepted[most * part : most * (part + 1)]
            for part, operation in enumerate(started.operations)
        }
        save = _Save(waiting, whole)
        self._saves.append(save)
        self._save_of |= dict.fromkeys(waiting, save)

    def saves_ended(self) -> int:
        """How many saves have ended, of which all before them have ended as well."""
        count = 0
        for save in self._saves:
            if save.waiting:
                break
            count += 1
        return count

    def take_saved(self) -> bool:
        """Whether all pages of the oldest save are below the device; it must have ended."""
        return self._saves.popleft().good

    # ---------------------------------------------------------------- steps go by

    def step(self) -> None:
        """Goes on with what was begun: a bounded number of bytes."""
        if not self._has_work and (self._store is None or not self._store.due):
            return
        self._offload.step(budget_bytes=STEP_BUDGET_BYTES)
        if self._store is not None:
            self._store.watch()
        self._take_ended()
        self._has_work = self._offload.busy or bool(self._store and self._store.pending)
        self._counts.sizes(self._offload.hub_counts())

    def _take_ended(self) -> None:
        for each in self._offload.poll():
            if isinstance(each, Settled):
                self._unsettled.discard(each.operation)
                self._end_save(each.operation)
                continue
            if not each.settled:
                self._unsettled.add(each.operation)
            if each.operation in self._loading:
                self._loading[each.operation] = each
            elif each.operation in self._save_of:
                save = self._save_of[each.operation]
                self._counts.saved(each, save.waiting[each.operation])
                save.good &= each.outcome is Outcome.DONE
                if each.settled:
                    self._end_save(each.operation)
            elif each.purpose is Purpose.STAGE:
                self._counts.stored("disk_blocks_loaded", each)
            elif each.purpose is not Purpose.LOAD:
                self._counts.stored("disk_blocks_saved", each)

    def _end_save(self, operation: OperationId) -> None:
        save = self._save_of.pop(operation, None)
        if save is not None:
            del save.waiting[operation]

    def reset(self, why: str) -> None:
        """Drops everything; nothing touches a device page afterwards."""
        for operation in [*self._save_of]:
            self._offload.cancel(operation)
        self._offload.reset(why)
        while self._save_of:
            self._offload.step(again=True)
            self._take_ended()
            if self._save_of:
                self._offload.wait(self._counts.clock() + DEVICE_S)
        self._saves.clear()
        self._asked.clear()
        self._asked_pages = 0
        self._parents.clear()
        if self._store is not None:
            # The weights may have changed: a later engine must not take blocks from now on for
            # those of `model.weights_version`.
            self._keys = PageKeys(self._config, part=self._part, since=secrets.token_hex(16))
        self._has_work = True
        self._counts.counters.add("resets")

    def close(self) -> None:
        """Ends the tiers, and the store process if this engine has started it."""
        # An engine may be ended by a thread that did not run it.
        self._offload.adopt_thread()
        self._offload.close()
