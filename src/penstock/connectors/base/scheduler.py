"""The scheduler's side of a connector: which blocks to look up, load and save, and which to pin.

    expect_request ─→ prefetch            it is queued: its blocks come up from the disk meanwhile
    find_tokens    ─→ lookup              how many tokens can be loaded from below the device
    start_load     ─→ load                the engine allocated blocks to load them into
    plan_step      ─→ save, take_plan     the engine puts a step together
    apply_reports  ─→ poll                the workers reported what they have copied
    finish_request, reset

A lookup never blocks; it looks again only at what has changed since the last lookup for the
request. A request is deferred only while blocks of it come up from a disk (`requests`).
Requests that share a prefix load it separately: none waits for the load of another. A request
gets one load: if it fails, or the engine cannot start it (`requests`), it is computed.

What many requests decode at once is saved some blocks at a time, or when a request ends: every save
is an operation of its own, for which the engine's thread pays, and the next turn comes later.

The one rule: a block is saved in the step that computes it or a later one, while its request or a
pin keeps the engine from reusing it. In KV groups whose blocks stay with a running request, the
request keeps them; what a save still reads when the request ends is pinned then. In groups whose
blocks the engine takes from running requests (sliding windows), a save is pinned from its start:
in the next step its blocks may have left the window.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Outcome, Purpose
from penstock.connectors.base.keys import KeyChains, RequestKeys, read_options, tenant_of
from penstock.connectors.base.layerwise import LayerwiseScheduler
from penstock.connectors.base.requests import StorePrefetch, TrackedRequest, UnstartedLoads
from penstock.connectors.base.statistics import TransferCounts
from penstock.machine.effects import Ended
from penstock.replay.trace import recorder_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.config import Config
    from penstock.connectors.base.keys import Drafts, EngineRequest, EventAnnouncer
    from penstock.connectors.base.requests import Pins
    from penstock.connectors.base.statistics import PrefillTimer, Taken
    from penstock.machine.effects import Found, Settled, Started
    from penstock.runtime.offload import Offload
    from penstock.vocabulary.keys import Key, OperationId

    Tables = Sequence[Sequence[int]]


REQUESTS_A_BLOCK, DECODED_MAX = 8, 8
"""One more block of each request is saved at a time for so many in a step; and how many at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """The loads of one request."""

    request: str
    operations: tuple[OperationId, ...]
    """The copies; empty if nothing is copied."""
    missing: tuple[int, ...] = ()
    """Device blocks, in the first KV group, that were promised and cannot be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """From the scheduler's side to every worker, once a step; pickled by the engine."""

    plan: bytes | None = None
    loads: tuple[RequestLoad, ...] = field(default=())
    early: tuple[bytes, ...] = ()
    """Plans to execute before the forward pass, and before `plan`."""
    joined: tuple[RequestLoad, ...] = ()
    """What the forward pass computes on: these loads are in `early`."""
    step: int = 0
    """The number of the last step with such loads: it comes back with the results of this one."""


class _Load(NamedTuple):
    """One operation that loads blocks of a request."""

    tracked: TrackedRequest
    first: int
    """Its first block within the request."""
    blocks: int


class SchedulerConnector:
    """The scheduler's side of a connector, for one engine."""

    def __init__(  # noqa: PLR0913 - as many as there are things that engines differ in
        self,
        config: Config,
        offload: Offload,
        pins: Pins,
        *,
        null_block: int,
        window_groups: Sequence[int],
        drafts: Drafts | None = None,
        step_blocks: int = 0,
        announcer: EventAnnouncer | None = None,
        joins: LayerwiseScheduler | None = None,
        speed: PrefillTimer | None = None,
        counts: TransferCounts | None = None,
    ) -> None:
        """Opens the scheduler's side."""
        self._offload = offload
        self._config = config
        self._drafts = drafts
        self._chains = KeyChains(config, drafts=drafts)
        self._pins = pins
        self._null = null_block
        self._window_groups = list(window_groups)
        self._step_blocks = step_blocks
        groups = range(config.cache.group_count)
        self._whole_groups = [group for group in groups if group not in self._window_groups]
        self._announcer = announcer
        self._joins = joins or LayerwiseScheduler(lambda *_: None, blocks_max=0)
        self._speed = speed
        self._counts = counts or TransferCounts()
        self._recorder = recorder_of(config)
        self.counters = self._counts.counters
        self._store = StorePrefetch(offload, self._counts) if offload.persists else None
        self._quotas = {name: 1.0 for tier in config.cache.tiers for name in tier.quotas}
        self._tokens = config.cache.block_tokens
        self._requests: dict[str, TrackedRequest] = {}
        self._turns = itertools.count()
        self._starting: list[RequestLoad] = []
        self._loading: dict[OperationId, _Load] = {}
        self._saving: dict[OperationId, tuple[TrackedRequest, Sequence[Key]]] = {}
        self._saving_blocks = 0
        self._unstarted = UnstartedLoads()
        self._has_work = False
        """Whether anything has happened since the tiers were last stepped: most steps only decode,
        and should not pay for tiers that have nothing to do."""
        self._changed = True
        """Whether tiers may have changed since their sizes were last reported."""
        self._owes_step = False
        """Whether something changed outside of a step: the engine asks for sizes in steps only."""

    @property
    def pending(self) -> bool:
        """Whether the engine must step again for copies to end, or for a disk to come."""
        comes = self._store is not None and self._store.pending
        return self._offload.busy or self._owes_step or comes

    # ---------------------------------------------------------------- requests come

    def expect_request(self, request: EngineRequest, computed: Callable[[], int]) -> None:
        """A request is queued: blocks of it that lie on a disk come up meanwhile."""
        if self._store is None:
            return
        tracked = self._tracked(request)
        if tracked.load and request.num_tokens > self._tokens:
            tracked.held = computed() // self._tokens
            self._look_up(tracked, self._findable(tracked))

    def find_tokens(self, request: EngineRequest, computed: int) -> int | None:
        """How many tokens after the first `computed` can be loaded now: all, if no step joins them.

        `None`: ask again in the next step, blocks of it are on their way from a disk.
        """
        tracked, blocks = self._restart(request, computed)
        if tracked.keys.stale or not blocks or not (tracked.load or tracked.save):
            return 0
        if self._store is not None:
            if tracked.wait.is_waiting and self._store.due:
                # What has arrived since the last step need not wait for the end of this one.
                self._has_work = True
                self._step_tiers()
            self._store.begin_turn(tracked.wait)
        found = self._look_up(tracked, blocks)
        self._record(tracked)
        tracked.saved = found.ready
        if not tracked.may_load:
            return 0
        if self._store is not None and self._store.defers(
            tracked.wait, tracked.asked, found, held=tracked.held, cause=request.request_id
        ):
            return None
        matched = max(0, min(found.ready, found.worth) - tracked.held)
        if matched > 1 and (tracked.held + matched) * self._tokens == request.num_tokens:
            # A step must have something to compute.
            matched -= self._joins_step(tracked, matched - 1)
        if matched:
            self._unstarted.offered(request.request_id)
        return matched * self._tokens

    def follow_request(self, request: EngineRequest, computed: int) -> None:
        """Another engine computes what follows the first `computed` tokens: nothing is loaded.

        What is not below the device yet is saved when the request runs, as if it was computed here.
        """
        self._unstarted.offered(request.request_id)
        tracked, blocks = self._restart(request, computed)
        if blocks and tracked.save and not tracked.keys.stale:
            tracked.asked = tracked.keys.upto(blocks)[:blocks]
            tracked.saved = self._look_again(tracked).ready

    def _restart(self, request: EngineRequest, computed: int) -> tuple[TrackedRequest, int]:
        """The engine starts a request, or starts it again; returns how many blocks may be found."""
        tracked = self._tracked(request)
        self._give_up_saves(tracked)
        # All its blocks are recent.
        tracked.voided = tracked.ran = False
        tracked.until_block = 0
        tracked.arriving = (0, 0)
        tracked.held = computed // self._tokens
        tracked.saved = 0
        return tracked, self._findable(tracked)

    def _findable(self, tracked: TrackedRequest) -> int:
        """How many leading blocks may be found of a request, of which the engine holds some.

        It computes the last token in any case, for its logits: for that alone nothing is loaded.
        And windows are kept for the token behind what is found, not for one within it.
        """
        blocks = tracked.keys.token_count // self._tokens
        whole = blocks * self._tokens == tracked.request.num_tokens
        last = whole and (self._window_groups or tracked.held + 1 >= blocks)
        return blocks - 1 if last else blocks

    def _record(self, tracked: TrackedRequest) -> None:
        """Records a request once, unless it keeps out of the cache."""
        recorder, request = self._recorder, tracked.request
        if recorder is None or tracked.recorded or not (tracked.load and tracked.save):
            return
        tracked.recorded = True
        count = request.num_prompt_tokens
        recorder.begin(
            request.request_id,
            tracked.keys.upto(count // self._tokens),
            token_count=count,
            block_tokens=self._tokens,
            hints=tracked.hints,
        )

    def _look_up(self, tracked: TrackedRequest, blocks: int) -> Found:
        """Looks a request's blocks up, and has those on a disk brought up."""
        if len(tracked.asked) != blocks:
            tracked.asked = tracked.keys.upto(blocks)[:blocks]
        self.counters.add("lookups", 1 if tracked.found is None else 0)
        found = self._look_again(tracked)
        if self._store is None or not tracked.may_load:
            return found
        started = self._store.bring_up(
            tracked.wait,
            tracked.asked,
            found,
            held=tracked.held,
            cause=tracked.request.request_id,
        )
        if started is None:
            return found
        self._has_work = True
        if self._announcer is not None and started.operations:
            rising = [(at, tracked.asked[at]) for at in started.accepted]
            self._announcer.describe(tracked.request, rising)
        return self._look_again(tracked)

    def _look_again(self, tracked: TrackedRequest) -> Found:
        keys = tracked.asked
        held = min(tracked.held, len(keys))
        tracked.found = self._offload.lookup(keys, last=tracked.found, held=held)
        return tracked.found

    def can_join(self, request: EngineRequest, matched: int) -> bool:
        """Whether a request computes on these tokens in the step that starts to load them."""
        tracked = self._requests[request.request_id]
        tracked.joins = self._joins_step(tracked, matched // self._tokens)
        return tracked.joins

    def _joins_step(self, tracked: TrackedRequest, blocks: int) -> bool:
        # Queued behind loads that no step waits for, the step would wait for those as well.
        last = (tracked.held + blocks) * self._tokens == tracked.request.num_tokens
        return (
            not last
            and self._joins.has_room(blocks, -(-blocks // self._most))
            and all(load.tracked.joins for load in self._loading.values())
        )

    def note_started(self, request: EngineRequest) -> None:
        """The engine has made room for what was promised for a request, from wherever it comes."""
        self._tracked(request).had_load = True
        self._unstarted.started(request.request_id)

    def must_compute(self, request: EngineRequest) -> bool:
        """Whether a request has had its load: nothing more is promised for it."""
        return self._tracked(request).had_load

    def start_load(self, request: EngineRequest, tables: Tables, external: int) -> None:
        """Starts a load: the engine allocated blocks for `external` tokens of the request."""
        count = external // self._tokens
        if not count:
            return
        tracked = self._tracked(request)
        self.note_started(request)
        first = tracked.held
        keys = tracked.keys.upto(first + count)[first : first + count]
        slots = self._rows(tables, first, first + count)
        self._has_work = True
        started = self._offload.load(
            keys,
            slots,
            cause=request.request_id,
            priority=tracked.hints.priority or 0,
            ttl_s=tracked.hints.ttl_s,
        )
        # Nothing leaves the tiers between lookup and load, so nothing is ever missing here;
        # if it were, the engine would have to compute it.
        missing = slots[0, len(started.accepted) :]
        loading = RequestLoad(
            request=request.request_id,
            operations=started.operations,
            missing=tuple(int(slot) for slot in missing),
        )
        if tracked.joins:
            self._joins.add(loading, request, tables[0], first=first, blocks=count)
        else:
            self._starting.append(loading)
        tracked.loads = set(started.operations)
        tracked.arriving = (first * self._tokens, first * self._tokens + external)
        tracked.load_began = self._counts.clock()
        sizes = _shares(len(started.accepted), len(started.operations), self._most)
        for operation, size in zip(started.operations, sizes, strict=True):
            self._loading[operation] = _Load(tracked, first, size)
            first += size
        self.counters.add("tokens_found", external)

    def finish_request(self, name: str, tables: Tables = ()) -> None:
        """Forgets a request that the engine has finished or aborted, after saving the rest of it.

        A running load is cancelled, but its blocks stay reserved until the worker has reported
        its end. A load that its step computed on has ended with that step.
        """
        tracked = self._requests.pop(name, None)
        if tracked is None:
            return
        if self._recorder is not None:
            request = tracked.request
            self._recorder.end(name, request.num_tokens - request.num_prompt_tokens)
        if self._store is not None:
            self._store.begin_turn(tracked.wait)
        self._joins.forget(name)
        self._unstarted.started(name)
        if tables and tracked.ran and tracked.may_save and not self._window_groups:
            # The last token was given, not computed. What cannot be pinned need not make room.
            given = min(tracked.request.num_tokens - 1, tracked.keys.token_count)
            known = min(tracked.request.num_computed_tokens, given)
            room = self._pins.room - sum(map(len, tracked.saves.values()))
            rest = max(0, room // len(self._whole_groups))
            full = min(known // self._tokens, tracked.saved + rest)
            if full > tracked.saved:
                self._save(tracked, full, tables)
        for operation in () if tracked.joins else sorted(tracked.loads):
            self._has_work = True
            self._offload.cancel(operation)
        self._pin_saves(tracked)
        self._let_go(tracked)
        if tracked.save and not tracked.voided:
            full = min(tracked.request.num_computed_tokens, tracked.keys.token_count)
            self.counters.add("blocks_dropped_pinned", max(0, full // self._tokens - tracked.saved))

    def _let_go(self, tracked: TrackedRequest) -> None:
        """Blocks that the client does not expect to be used again leave first."""
        keep = tracked.hints.keep_blocks(self._tokens)
        if keep is not None and not tracked.voided and not tracked.keys.stale:
            full = tracked.request.num_tokens // self._tokens
            self._offload.let_go(tracked.keys.upto(full)[:full], keep=keep)

    def reset(self, why: str) -> None:
        """Drops everything below the device; requests that run now save nothing of theirs."""
        self._has_work = True
        self._offload.reset(why)
        if self._store is not None:
            # The weights may have changed: a later engine must not take blocks from now on for
            # those of `model.weights_version`.
            since = secrets.token_hex(16)
            self._chains = KeyChains(self._config, drafts=self._drafts, since=since)
        for tracked in self._requests.values():
            tracked.voided = True
            tracked.found = None
            tracked.keys = RequestKeys(self._chains, tracked.request)
            tracked.asked = []
        self._changed = self._owes_step = True
        self.counters.add("resets")

    def close(self) -> None:
        """Ends the tiers, and the store process if this engine has started it."""
        # An engine in its user's process may be ended by a thread that did not run it.
        self._offload.adopt_thread()
        self._offload.close()
        if self._recorder is not None:
            self._recorder.close()

    # ---------------------------------------------------------------- steps go by

    def plan_step(
        self,
        scheduled: Mapping[str, int],
        tables: Callable[[str], Tables],
        preempted: Collection[str] = (),
        *,
        receiving: bool = False,
    ) -> StepPlan | None:
        """What every worker has to do in this step; `None` in most steps."""
        for name in preempted:
            if (tracked := self._requests.get(name)) is not None:
                self._give_up_saves(tracked)
                tracked.had_load = False  # The engine has given up the room for it.
                tracked.until_block = 0
        self._give_up_loads(idle=not (scheduled or self._loading or receiving or self._pins.count))
        joined = self._joins.take(scheduled, preempted)
        early = tuple(iter(self._offload.ranks.take_plan, None)) if joined else ()
        self._save_computed(scheduled, tables)
        self._owes_step = False
        if self._speed is not None:
            self._speed.begin(scheduled)
        if not self._has_work and (self._store is None or not self._store.due):
            return None
        self._changed = True
        self._step_tiers()
        if self._store is not None:
            # Workers have nothing to report of copies between host memory and a disk.
            self._apply_ended()
        # One more step after the last copy has ended: then the tiers have seen its end.
        self._has_work = self._offload.busy
        loads, self._starting = tuple(self._starting), []
        plan = self._offload.ranks.take_plan()
        if plan is None and not loads and not joined:
            return None
        return StepPlan(plan=plan, loads=loads, early=early, joined=joined, step=self._joins.step)

    @property
    def taken_back(self) -> Sequence[EngineRequest]:
        """Requests in the step that was planned last whose step before was taken back."""
        return self._joins.taken_back

    def _give_up_loads(self, *, idle: bool) -> None:
        """Has requests computed whose loads the engine will never start."""
        for name in self._unstarted.end_step(idle=idle):
            self._requests[name].had_load = True
            self._counts.load_not_started(name)

    def _save_computed(self, scheduled: Mapping[str, int], tables: Callable[[str], Tables]) -> None:
        """Starts to save the blocks that the step completes, or some more a while later."""
        some = max(1, min(len(scheduled) // REQUESTS_A_BLOCK, DECODED_MAX))
        if self._window_groups:
            some = 1  # A block may leave its window.
        for name, token_count in scheduled.items():
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            if tracked.until_block > token_count:
                tracked.until_block -= token_count
                continue
            if tracked.arriving[1] and not tracked.joins:
                self._count_kept(tracked)
            tracked.ran = True
            if not tracked.may_save:
                continue
            request = tracked.request
            # Tokens that are scheduled but not known (asynchronous scheduling, drafts that
            # may be rejected) are left for a later step.
            known = min(request.num_computed_tokens + token_count, tracked.keys.token_count)
            full = known // self._tokens
            decodes = request.num_computed_tokens >= request.num_prompt_tokens
            if full > tracked.saved and not (decodes and (full + tracked.turn) % some):
                self._save(tracked, full, tables(name))
            if decodes and not self._window_groups:
                tracked.until_block = (full + 1) * self._tokens - known

    def _step_tiers(self) -> None:
        self._offload.step()
        if self._store is not None:
            self._store.watch()

    @property
    def timed_step(self) -> int:
        """The number of the step that was planned last; 0 if it is not timed."""
        return 0 if self._speed is None else self._speed.begun

    def apply_reports(
        self, reports: Iterable[bytes], timed_step: int = 0, joined_step: int = 0
    ) -> None:
        """Applies the reports of the workers about a step, with its numbers where it has some."""
        if self._speed is not None:
            self._speed.end(timed_step)
        for report in reports:
            self._has_work = self._changed = True
            self._offload.ranks.receive(report)
        self._apply_ended()
        self._joins.end_step(joined_step)

    def _apply_ended(self) -> None:
        ended = self._offload.poll()
        if self._announcer is not None:
            self._announcer.note(self._offload.take_kv_events(), self._offload.kv_snapshot)
        for each in ended:
            self._apply(each)

    def take_statistics(self) -> Taken:
        """What was counted, and which sizes have changed, since the last call."""
        if self._changed:
            self._changed = False
            self._counts.sizes(self._offload.hub_counts())
        self.counters.gauge("pinned_blocks", self._pins.count)
        return self.counters.take()

    def _apply(self, ended: Ended | Settled) -> None:
        operation = ended.operation
        if not isinstance(ended, Ended):
            self._pins.settled(operation)
            return
        if ended.settled:
            self._pins.settled(operation)
        if ended.purpose is Purpose.LOAD:
            self._loaded(ended)
        elif ended.purpose is Purpose.STAGE:
            self._counts.stored("disk_blocks_loaded", ended)
        elif operation not in self._saving:
            self._counts.stored("disk_blocks_saved", ended)
        else:
            keys = self._end_save(operation)
            self._counts.saved(ended, keys)
            if self._announcer is not None:
                self._announcer.forget(keys)

    def _end_save(self, operation: OperationId) -> Sequence[Key]:
        tracked, keys = self._saving.pop(operation)
        self._saving_blocks -= len(keys)
        tracked.saves.pop(operation, None)
        return keys

    def _pin_saves(self, tracked: TrackedRequest) -> None:
        """The request ends: pins what a save still reads, or cancels the save."""
        for operation, block_ids in [*tracked.saves.items()]:
            if len(block_ids) <= self._pins.room:
                self._pins.add(block_ids, [operation])
                del tracked.saves[operation]
        self._give_up_saves(tracked)

    def _give_up_saves(self, tracked: TrackedRequest) -> None:
        """Cancels saves whose blocks nothing keeps any more: they may read other data."""
        for operation, block_ids in [*tracked.saves.items()]:
            self._has_work = True
            self.counters.add("blocks_dropped_pinned", len(block_ids))
            self._offload.cancel(operation)
        tracked.saves.clear()

    def _loaded(self, ended: Ended) -> None:
        tracked, first, blocks = self._loading.pop(ended.operation)
        tracked.loads.discard(ended.operation)
        self._counts.copied(ended, blocks)
        if self._announcer is not None:
            keys = tracked.keys.upto(first + blocks)[first : first + blocks]
            self._announcer.describe(tracked.request, enumerate(keys, start=first))
        wanted = self._requests.get(tracked.request.request_id) is tracked
        if not tracked.loads and (wanted or tracked.joins):
            self.counters.time("load_seconds", self._counts.clock() - tracked.load_began)
            if tracked.joins:
                # By now the engine knows which blocks of this step are invalid.
                self._count_kept(tracked)
        if not wanted or ended.outcome is Outcome.DONE:
            return  # Without a waiting request a failed load needs no report.
        self._counts.load_failed(ended, tracked.keys.upto(first + blocks)[first : first + blocks])
        # What was not loaded is computed, and may be saved again.
        tracked.saved = min(tracked.saved, tracked.held)
        tracked.found = None

    def _count_kept(self, tracked: TrackedRequest) -> None:
        """The engine continues the request: counts the loaded tokens that it kept."""
        first, end = tracked.arriving
        kept = min(tracked.request.num_computed_tokens, end) - first
        self.counters.add("tokens_loaded", max(0, kept))
        tracked.arriving = (0, 0)

    def _save(self, tracked: TrackedRequest, full: int, tables: Tables) -> None:
        if tracked.keys.stale:
            tracked.save = False
            return
        keep = tracked.hints.keep_blocks(self._tokens)
        if keep is not None:
            # What its client does not expect to be used again is not worth a copy.
            if tracked.saved >= keep:
                tracked.saved = full
                return
            full = min(full, keep)
        keys = tracked.keys.upto(full)
        first = self._skip_passed(tracked, full, tables)
        end = min(full, len(keys), *(len(row) for row in tables))
        if self._window_groups:
            # The leading blocks first: a hit has no gaps. The rest is tried again in the next step,
            # as far as it is in the windows then.
            end = min(end, first + self._pinnable)
        if end <= first:
            return
        slots = self._rows(tables, first, end)
        self._has_work = True
        started = self._offload.save(
            keys[first:end],
            slots,
            cause=tracked.request.request_id,
            parent=keys[first - 1] if first else None,
            tenant=tracked.tenant,
            priority=tracked.hints.priority or 0,
            ttl_s=tracked.hints.ttl_s,
        )
        tracked.saved = end
        if started.miss.reason.value != "none":
            self.counters.add("blocks_dropped_room", end - first - len(started.accepted))
        if started.operations:
            self._keep(tracked, keys[first:end], slots, started)
        if self._announcer is not None and started.operations:
            written = [(first + place, keys[first + place]) for place in started.accepted]
            self._announcer.expect(tracked.request, written)

    def _keep(
        self,
        tracked: TrackedRequest,
        keys: Sequence[Key],
        slots: NDArray[np.int32],
        started: Started,
    ) -> None:
        """Notes what each save reads, and pins what its request does not keep."""
        positions = list(started.accepted)
        if self._window_groups:
            block_ids = slots[np.ix_(self._window_groups, positions)].ravel().tolist()
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
            if self._whole_groups:
                tracked.saves[operation] = slots[np.ix_(self._whole_groups, mine)].ravel().tolist()
            first += size

    @property
    def _pinnable(self) -> int:
        """How many blocks of tokens can be pinned in all groups with a window.

        A pin that ends before the engine allocates again costs nothing: what this step copies may
        be pinned. Loads are copied before saves, so with loads running nothing is certain.
        """
        within_step = 0 if self._loading else self._step_blocks - self._saving_blocks
        return max(self._pins.room // len(self._window_groups), within_step)

    def _skip_passed(self, tracked: TrackedRequest, full: int, tables: Tables) -> int:
        """The first block to save that every KV group still has."""
        first = tracked.saved
        if not self._window_groups:
            return first
        while first < full and any(first < len(row) and row[first] == self._null for row in tables):
            first += 1
        self.counters.add("blocks_dropped_window", first - tracked.saved)
        tracked.saved = first
        return first

    def _rows(self, tables: Tables, first: int, end: int) -> NDArray[np.int32]:
        rows = np.array([row[first:end] for row in tables], dtype=np.int32)
        # The null block stands for a block that a group does not need.
        rows[rows == self._null] = NOWHERE
        return rows

    @property
    def _most(self) -> int:
        return self._config.cache.operation_blocks_max

    def _tracked(self, request: EngineRequest) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            options = read_options(request)
            if options.error:
                self._counts.refused(request.request_id, options.error)
            tracked = self._requests[request.request_id] = TrackedRequest(
                request=request,
                keys=RequestKeys(self._chains, request),
                load=options.load,
                save=options.save,
                hints=options.hints,
                tenant=tenant_of(request, self._quotas),
                turn=next(self._turns),
            )
        return tracked


def _shares(count: int, parts: int, most: int) -> list[int]:
    """How many blocks each of several operations has: all but the last have the most."""
    return [min(most, count - most * part) for part in range(parts)]
