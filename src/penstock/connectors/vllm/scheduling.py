"""The scheduler's half: what to claim, load and save. It decides nothing vLLM decides.

    matched    ─→ lookup              how many tokens lie below the device
    allocated  ─→ load                vLLM gave the request blocks to load them into
    plan       ─→ save, take_plan     the step is put together
    hear       ─→ poll                what the workers told about it
    finished, reset

A lookup never blocks, never defers a request, and looks again only at what has changed since
the request was last asked about. Requests that share a prefix load it each for itself: none
waits for another's load.

The one rule: a block is saved in the step that computes it or a later one, while its request
or a pin keeps vLLM from giving it to somebody else. In KV groups whose blocks a running request
keeps, it is the request; what is still being read when it ends is pinned then. In groups whose
blocks vLLM takes from running requests (sliding windows), a save is pinned from its beginning: in
the next step its blocks may have left the window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache.ledger import Outcome, Purpose
from penstock.cache.nodes import NOWHERE
from penstock.connectors.vllm.counting import Counting
from penstock.connectors.vllm.keys import Chains, RequestKeys, tenant_of, wishes_of
from penstock.connectors.vllm.messages import Loading, StepPlan
from penstock.machine.effects import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.config import Config
    from penstock.connectors.vllm.events import Announcer
    from penstock.connectors.vllm.keys import Request
    from penstock.connectors.vllm.layerwise import Joins
    from penstock.connectors.vllm.pins import Pins
    from penstock.connectors.vllm.speed import PrefillSpeed
    from penstock.connectors.vllm.statistics import Taken
    from penstock.machine.effects import Found, Settled, Started
    from penstock.runtime.offload import Offload
    from penstock.vocabulary.ids import Key, OperationId

    Tables = Sequence[Sequence[int]]

LOAD_ATTEMPTS = 3
"""A request whose loads failed so often is computed: what fails again and again must not keep
it from its answer."""


@dataclass(slots=True, eq=False)
class Tracked:
    """What is known about one of vLLM's requests."""

    request: Request
    keys: RequestKeys
    load: bool
    save: bool
    tenant: str = ""
    asked: Sequence[Key] = ()
    """What was last looked up: a waiting request is asked about in every step."""
    found: Found | None = None
    """The answer."""
    held: int = 0
    """So many leading blocks were in vLLM's own cache when it was last looked up."""
    saved: int = 0
    """So many leading blocks lie below, are on their way, or were given up."""
    loads: set[OperationId] = field(default_factory=set)
    saves: dict[OperationId, Sequence[int]] = field(default_factory=dict)
    """Saves that the request itself keeps the blocks for, and which."""
    arriving: tuple[int, int] = (0, 0)
    """Which tokens, from and to, are being loaded: what vLLM keeps of them is not counted yet."""
    load_began: float = 0.0
    joins: bool = False
    """Whether it computes on its loads in the step that begins them."""
    failures: int = 0
    voided: bool = False
    """Whether it runs on blocks from before a reset: what it computes from them is not kept."""


class _Load(NamedTuple):
    """One operation that loads blocks of a request."""

    tracked: Tracked
    first: int
    """The block of the request that it begins with."""
    blocks: int


class Scheduling:
    """The half of the connector that lives in vLLM's scheduler."""

    def __init__(
        self,
        config: Config,
        offload: Offload,
        pins: Pins,
        *,
        null_block: int,
        leaving: Sequence[int],
        step_blocks: int = 0,
        announcer: Announcer | None = None,
        joins: Joins | None = None,
        speed: PrefillSpeed | None = None,
        counting: Counting | None = None,
    ) -> None:
        """The half for one engine.

        Args:
            config: As the engine decided it.
            offload: The tiers below the device.
            pins: What is kept from being reused.
            null_block: What stands in a block table for a block that is not needed.
            leaving: The KV groups whose blocks vLLM takes from requests that run.
            step_blocks: So many blocks are copied for sure before vLLM hands out blocks again.
            announcer: Who tells routers about blocks, if anybody does.
            joins: Who computes on loads while they arrive, if anybody may.
            speed: Who clocks prefill, where steps can be told apart.
            counting: What it counts with.
        """
        self._offload = offload
        self._config = config
        self._chains = Chains(config)
        self._pins = pins
        self._null = null_block
        self._leaving = list(leaving)
        self._step_blocks = step_blocks
        groups = range(config.cache.group_count)
        self._staying = [group for group in groups if group not in self._leaving]
        self._announcer = announcer
        self._joins = joins
        self._speed = speed
        self._counting = counting or Counting()
        self.tally = self._counting.tally
        self._quotas = {name: 1.0 for tier in config.cache.tiers for name in tier.quotas}
        self._tokens = config.cache.block_tokens
        self._requests: dict[str, Tracked] = {}
        self._starting: list[Loading] = []
        self._loading: dict[OperationId, _Load] = {}
        self._saving: dict[OperationId, tuple[Tracked, Sequence[Key]]] = {}
        self._saving_blocks = 0
        """So many blocks are being saved."""
        self._stirred = False
        """Whether anything has happened below since the tiers were last given the time: most
        steps only decode, and should not pay for tiers that have nothing to do."""
        self._changed = True
        """Whether tiers may have changed since their sizes were last told."""
        self._owes_step = False
        """Whether something changed outside of a step: vLLM asks for sizes in steps only."""

    @property
    def pending(self) -> bool:
        """Whether vLLM must go on stepping for copies to end."""
        return self._offload.busy or self._owes_step

    # ---------------------------------------------------------------- requests come

    def matched(self, request: Request, computed: int) -> int:
        """How many tokens after the first `computed` can be loaded now. Changes no tier."""
        tracked = self._tracked(request)
        self._give_up_saves(tracked)
        # vLLM asks when a request begins, for the first time or anew: all it has is recent.
        tracked.voided = False
        tracked.arriving = (0, 0)
        tracked.held = computed // self._tokens
        tracked.saved = 0
        # The last token is always computed: the engine needs its logits.
        blocks = (request.num_tokens - 1) // self._tokens
        if tracked.keys.stale or not blocks or not (tracked.load or tracked.save):
            return 0
        if len(tracked.asked) != blocks:
            tracked.asked = tracked.keys.upto(blocks)[:blocks]
        keys = tracked.asked
        self.tally.add("lookups", 1 if tracked.found is None else 0)
        found = self._offload.lookup(keys, last=tracked.found, held=min(tracked.held, blocks))
        tracked.found = found
        tracked.saved = found.ready
        if not tracked.load:
            return 0
        return max(0, min(found.ready, found.worth) - tracked.held) * self._tokens

    def joins(self, request: Request, matched: int) -> bool:
        """Whether a request computes on these tokens in the step that begins to load them."""
        tracked = self._requests[request.request_id]
        blocks = matched // self._tokens
        # Behind loads that no step waits for it would wait for them, too.
        tracked.joins = (
            self._joins is not None
            and self._joins.has_room(blocks, -(-blocks // self._most))
            and all(load.tracked.joins for load in self._loading.values())
        )
        return tracked.joins

    def allocated(self, request: Request, tables: Tables, external: int) -> None:
        """Starts a load: vLLM gave the request blocks for `external` tokens."""
        count = external // self._tokens
        if not count:
            return
        tracked = self._tracked(request)
        first = tracked.held
        keys = tracked.keys.upto(first + count)[first : first + count]
        slots = self._rows(tables, first, first + count)
        self._stirred = True
        started = self._offload.load(keys, slots, cause=request.request_id)
        # Nothing leaves the tiers between lookup and load, so nothing is ever missing here;
        # if it were, vLLM would have to know.
        missing = slots[0, len(started.accepted) :]
        loading = Loading(
            request=request.request_id,
            operations=started.operations,
            missing=tuple(int(slot) for slot in missing),
        )
        if tracked.joins and self._joins is not None:
            self._joins.add(loading, tables[0], first=first, blocks=count)
        else:
            self._starting.append(loading)
        tracked.loads = set(started.operations)
        tracked.arriving = (first * self._tokens, first * self._tokens + external)
        tracked.load_began = self._counting.clock()
        sizes = _shares(len(started.accepted), len(started.operations), self._most)
        for operation, size in zip(started.operations, sizes, strict=True):
            self._loading[operation] = _Load(tracked, first, size)
            first += size
        self.tally.add("tokens_found", external)

    def finished(self, name: str) -> None:
        """Forgets a request that vLLM is done with, whatever came of it.

        A load under way is of no more use, but goes on until the worker has told of it: only
        then does vLLM give the blocks to others. One that its step computed on ended with it.
        """
        tracked = self._requests.pop(name, None)
        if tracked is None:
            return
        for operation in () if tracked.joins else sorted(tracked.loads):
            self._stirred = True
            self._offload.cancel(operation)
        self._pin_saves(tracked)
        if tracked.save and not tracked.voided:
            full = min(tracked.request.num_computed_tokens, tracked.request.num_tokens)
            self.tally.add("blocks_dropped_pinned", max(0, full // self._tokens - tracked.saved))

    def reset(self, why: str) -> None:
        """Voids everything below the device; what is running is kept from refilling it."""
        self._stirred = True
        self._offload.reset(why)
        for tracked in self._requests.values():
            tracked.voided = True
            tracked.found = None
        self._changed = self._owes_step = True
        self.tally.add("resets")

    # ---------------------------------------------------------------- steps go by

    def plan(
        self,
        scheduled: Mapping[str, int],
        tables: Callable[[str], Tables],
        preempted: Iterable[str] = (),
    ) -> StepPlan | None:
        """What every worker is to do in this step; nothing, in most of them.

        Args:
            scheduled: How many tokens of which requests the step computes; vLLM has not
                counted them as computed yet.
            tables: The block table of a request, one row a KV group.
            preempted: Requests whose blocks vLLM has taken since the last step.
        """
        for name in preempted:
            if (tracked := self._requests.get(name)) is not None:
                self._give_up_saves(tracked)
        joined = self._joins.take() if self._joins is not None else ()
        early = tuple(iter(self._offload.take_plan, None)) if joined else ()
        for name, token_count in scheduled.items():
            tracked = self._requests.get(name)
            if tracked is not None and tracked.arriving[1] and not tracked.joins:
                self._count_kept(tracked)
            # What is computed on a load is saved when the load was verified, in a later step.
            if tracked is None or not tracked.save or tracked.voided or tracked.loads:
                continue
            request = tracked.request
            # Tokens that are scheduled but not known (asynchronous scheduling, drafts that
            # may be rejected) are left for a later step.
            known = min(request.num_computed_tokens + token_count, request.num_tokens)
            if known // self._tokens > tracked.saved:
                self._save(tracked, known // self._tokens, tables(name))
        self._owes_step = False
        if self._speed is not None:
            self._speed.begin(scheduled)
        if not self._stirred:
            return None
        self._changed = True
        self._offload.step()
        # One step more after the last copy has ended: then the tiers have heard of its end.
        self._stirred = self._offload.busy
        loads, self._starting = tuple(self._starting), []
        plan = self._offload.take_plan()
        if plan is None and not loads and not joined:
            return None
        return StepPlan(plan=plan, loads=loads, early=early, joined=joined)

    def hear(self, reports: Iterable[bytes]) -> None:
        """Takes in what the workers told."""
        if self._speed is not None:
            self._speed.end()
        for report in reports:
            self._stirred = self._changed = True
            self._offload.hear(report)
        told = self._offload.poll()
        if self._announcer is not None:
            self._announcer.note(self._offload.take_kv_events())
        for each in told:
            self._told(each)

    def take_statistics(self) -> Taken:
        """What was counted, and which sizes have changed, since the last call."""
        if self._changed:
            self._changed = False
            self._counting.sizes(self._offload.hub_counts())
        self.tally.gauge("pinned_blocks", self._pins.count)
        return self.tally.take()

    def _told(self, told: Ended | Settled) -> None:
        operation = told.operation
        if not isinstance(told, Ended):
            self._pins.settled(operation)
            return
        if told.settled:
            self._pins.settled(operation)
        if told.purpose is Purpose.LOAD:
            self._loaded(told)
        else:
            keys = self._end_save(operation)
            self._counting.saved(told, keys)
            if self._announcer is not None:
                self._announcer.forget(keys)

    def _end_save(self, operation: OperationId) -> Sequence[Key]:
        if operation not in self._saving:
            return ()  # Between tiers further down: no request has to do with it.
        tracked, keys = self._saving.pop(operation)
        self._saving_blocks -= len(keys)
        tracked.saves.pop(operation, None)
        return keys

    def _pin_saves(self, tracked: Tracked) -> None:
        """The request ends: what a save still reads is pinned, or the save is given up."""
        for operation, block_ids in [*tracked.saves.items()]:
            if len(block_ids) <= self._pins.room:
                self._pins.add(block_ids, [operation])
                del tracked.saves[operation]
        self._give_up_saves(tracked)

    def _give_up_saves(self, tracked: Tracked) -> None:
        """Nothing keeps the blocks of these saves any more: what they read is not to be found."""
        for operation, block_ids in [*tracked.saves.items()]:
            self._stirred = True
            self.tally.add("blocks_dropped_pinned", len(block_ids))
            self._offload.cancel(operation)
        tracked.saves.clear()

    def _loaded(self, told: Ended) -> None:
        tracked, first, blocks = self._loading.pop(told.operation)
        tracked.loads.discard(told.operation)
        self._counting.copied(told, blocks)
        wanted = self._requests.get(tracked.request.request_id) is tracked
        if not tracked.loads and (wanted or tracked.joins):
            self._counting.arrived(tracked.load_began)
            if tracked.joins:
                # vLLM knows by now which blocks of this step are invalid.
                self._count_kept(tracked)
        if not wanted or told.outcome is Outcome.DONE:
            return  # What nobody wants any more was cancelled, or might as well have been.
        self._counting.load_failed(told, tracked.keys.upto(first + blocks)[first : first + blocks])
        # What was not brought is computed, and may be saved again.
        tracked.saved = min(tracked.saved, tracked.held)
        tracked.found = None
        tracked.failures += 1
        tracked.load = tracked.load and tracked.failures < LOAD_ATTEMPTS

    def _count_kept(self, tracked: Tracked) -> None:
        self._counting.kept(tracked.arriving, tracked.request.num_computed_tokens)
        tracked.arriving = (0, 0)

    def _save(self, tracked: Tracked, full: int, tables: Tables) -> None:
        if tracked.keys.stale:
            tracked.save = False
            return
        keys = tracked.keys.upto(full)
        first = self._skip_passed(tracked, full, tables)
        end = min(full, len(keys), *(len(row) for row in tables))
        if self._leaving:
            # The leading blocks first: a hit has no gaps. What finds no room now is tried again in
            # the next step, as far as it is in the windows then.
            end = min(end, first + self._pinnable)
        if end <= first:
            return
        slots = self._rows(tables, first, end)
        self._stirred = True
        started = self._offload.save(
            keys[first:end],
            slots,
            cause=tracked.request.request_id,
            parent=keys[first - 1] if first else None,
            tenant=tracked.tenant,
        )
        tracked.saved = end
        if started.miss.reason.value != "none":
            self.tally.add("blocks_dropped_room", end - first - len(started.accepted))
        if started.operations:
            self._keep(tracked, keys[first:end], slots, started)
        if self._announcer is not None and started.operations:
            written = [(first + place, keys[first + place]) for place in started.accepted]
            self._announcer.expect(tracked.request, written)

    def _keep(
        self, tracked: Tracked, keys: Sequence[Key], slots: NDArray[np.int32], started: Started
    ) -> None:
        """Notes what each save reads, and has it kept for so long."""
        positions = list(started.accepted)
        if self._leaving:
            block_ids = slots[np.ix_(self._leaving, positions)].ravel().tolist()
            self._pins.add(block_ids, started.operations)
        first = 0
        for operation, size in zip(
            started.operations,
            _shares(len(positions), len(started.operations), self._most),
            strict=True,
        ):
            mine = positions[first : first + size]
            self._saving[operation] = tracked, [keys[position] for position in mine]
            self._saving_blocks += size
            if self._staying:
                tracked.saves[operation] = slots[np.ix_(self._staying, mine)].ravel().tolist()
            first += size

    @property
    def _pinnable(self) -> int:
        """How many blocks of tokens can be pinned in all groups with a window.

        A pin that has ended before vLLM hands out blocks again takes nothing from anybody: what
        this step copies may be pinned. Loads are copied before saves: beside them nothing is sure.
        """
        within_step = 0 if self._loading else self._step_blocks - self._saving_blocks
        return max(self._pins.room // len(self._leaving), within_step)

    def _skip_passed(self, tracked: Tracked, full: int, tables: Tables) -> int:
        """The first block to save that every KV group still has."""
        first = tracked.saved
        if not self._leaving:
            return first
        while first < full and any(first < len(row) and row[first] == self._null for row in tables):
            first += 1
        self.tally.add("blocks_dropped_window", first - tracked.saved)
        tracked.saved = first
        return first

    def _rows(self, tables: Tables, first: int, end: int) -> NDArray[np.int32]:
        rows = np.array([row[first:end] for row in tables], dtype=np.int32)
        # vLLM's null block stands for a block that a group does not need.
        rows[rows == self._null] = NOWHERE
        return rows

    @property
    def _most(self) -> int:
        return self._config.cache.operation_blocks_max

    def _tracked(self, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            wishes = wishes_of(request)
            if wishes.wrong:
                self._counting.refused(request.request_id, wishes.wrong)
            tracked = self._requests[request.request_id] = Tracked(
                request=request,
                keys=RequestKeys(self._chains, request),
                load=wishes.load,
                save=wishes.save,
                tenant=tenant_of(request, self._quotas),
            )
        return tracked


def _shares(count: int, parts: int, most: int) -> list[int]:
    """How many blocks each of several operations has: all but the last have the most."""
    return [min(most, count - most * part) for part in range(parts)]
