"""An engine that lets Penstock manage its device slots: requests from acquire to release.

Requests wait for their loads, compute in chunks, generate, fork, are preempted and come
back, and are aborted at any point of their life.

The contract kept here: a request computes only while it is ready, only into slots of its
own table, and asks for room first; after a fork it asks even where its table has room,
because its unfinished block may be shared.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from lab.explore.world import Violation
from lab.sim.conditions import Plenty
from lab.sim.engine import Engine
from penstock.cache.explain import MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Purpose
from penstock.cache.settings import DEVICE, WriteKind
from penstock.cache.states import LeaseState, OperationState
from penstock.errors import CapacityError, UnavailableError
from penstock.machine import events as ev
from penstock.machine.effects import Granted, Grown, LeaseChanged

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lab.sim.workload import Text
    from lab.sim.world import World
    from penstock.machine.effects import Effect
    from penstock.vocabulary.keys import Key, LeaseId


class Request:
    """A request with a lease."""

    __slots__ = (
        "bound",
        "cached",
        "computed",
        "era",
        "forked",
        "keeps",
        "lease",
        "name",
        "published",
        "separating",
        "state",
        "store",
        "table",
        "text",
    )

    def __init__(self, name: str, lease: LeaseId, text: Text) -> None:
        self.name = name
        self.lease = lease
        self.text = text
        self.table: list[int] = []
        self.state = LeaseState.READY
        self.cached = 0
        """Tokens that need not be computed, as was told first."""
        self.computed = 0
        """Tokens whose KV is there, or will be when the loads arrive."""
        self.published = 0
        """Blocks that were offered to the index."""
        self.store = True
        self.keeps: int | None = None
        """Leading blocks that it says are used again; the others are not written down."""
        self.era = 0
        self.forked = False
        """Whether its unfinished block may be shared."""
        self.separating = False
        """Whether it waits for a copy of its unfinished block."""
        self.bound = 0.0
        """Until then it may have to wait."""


class ManagedEngine(Engine):
    """A client of `Acquire`, `Grow`, `Commit`, `Fork`, `Preempt` and `ReleaseLease`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.requests: dict[LeaseId, Request] = {}
        self._returning: list[Text] = []
        """Texts of preempted requests that mean to come back."""
        self._searches = Random(f"searches of {world.seed}")
        """Draws of its own: worlds of old seeds stay what they were without them."""
        self._full = False
        """Whether the last request was refused, and nothing was given back since."""
        tiers = self.conditions.settings.tiers
        self._writes_through = bool(tiers) and tiers[0].write.kind is WriteKind.WRITE_THROUGH
        self._saves_first = bool(tiers) and tiers[0].write.kind is WriteKind.EXCLUSIVE
        """Whether requests wait until what they evict is saved."""
        self.reactions[LeaseChanged] = self._lease_changed

    def waiting(self) -> Iterable[Request]:
        """All open requests."""
        return self.requests.values()

    def advance(self) -> None:
        """Lets a request arrive, or go a step further."""
        rng = self.rng
        if self.world.ranks.lost and rng.random() < 0.7:
            return  # There is little to do without all ranks.
        welcome = len(self.requests) < self.conditions.requests_max
        if not self.requests or (welcome and rng.random() < (0.1 if self._full else 0.35)):
            self._arrive()
            return
        request = rng.choice(list(self.requests.values()))
        if request.state is LeaseState.READY:
            self._go_on(request)
        elif request.state is LeaseState.LOST:
            self._comes_back(request.text)
            self._leave(request)
        elif rng.random() < self.conditions.abort:
            self.world.note("abort while loading")
            self._leave(request)

    # ---------------------------------------------------------------- a request's life

    def _arrive(self) -> None:
        returning = bool(self._returning) and self.rng.random() < 0.5
        library = self.library
        text = library.with_weights_now(self._returning.pop()) if returning else library.next_text()
        if self.conditions.settings.tiers and self.rng.random() < self.conditions.prefetch:
            # It waits in a queue first, and its blocks come nearer in the meantime.
            self.prefetch(library.all_keys(text), self.next_name())
            if self.rng.random() < 0.3:
                self._comes_back(text)
                return
        self.world.watch()
        try:
            self.acquire(text)
        except CapacityError:
            self.world.check_unchanged()
            self.world.note("no room")
            self._full = True
            if self.requests and self.rng.random() < 0.5:
                self._preempt(self.rng.choice(list(self.requests.values())))
        except UnavailableError:
            self.world.check_unchanged()
            self.world.note("rank is lost")

    def acquire(self, text: Text) -> Request:
        """Sends a request for a text and checks the answer."""
        rng, conditions, world = self.rng, self.conditions, self.world
        name = self.next_name()
        keys = self.last_keys = self.library.all_keys(text)
        hinted = rng.random() < conditions.hint
        now = world.now
        event = ev.Acquire(
            request=name,
            keys=keys,
            token_count=len(text),
            tenant=text.namespace.tenant,
            namespace=text.namespace.digest,
            content=text.beginning(self.block_tokens),
            reuse=rng.random() >= conditions.opt_out / 2,
            load=rng.random() >= conditions.opt_out,
            store=rng.random() >= conditions.opt_out,
            priority=rng.randint(0, 2) if hinted else 0,
            ttl_s=rng.choice((None, 0.2, 2.0)) if hinted else None,
            deadline=now + rng.uniform(0.05, 0.5) if rng.random() < conditions.haste else None,
        )
        if event.ttl_s == 0.2 and conditions.plenty is Plenty.NOWHERE:
            # No draw of its own: seeds go on meaning what they meant.
            event = msgspec.structs.replace(event, keep_blocks=event.priority)
        event = self._with_search(event)
        latest = [job.deadline for job in world.ranks.open.values()]
        fetched = [job for job in world.ranks.open.values() if job.purpose is Purpose.STAGE]
        effects = world.send(event)
        granted = self._only_grant(effects)
        if world.ranks.lost:
            raise Violation("refusal", f"{name} got a lease though a rank is lost")
        request = Request(name, granted.lease, text)
        request.store = event.store
        request.keeps = event.keep_blocks
        request.era = world.era
        timeout_s = conditions.settings.operation_timeout_s
        own = event.deadline or now + timeout_s
        if granted.searching:
            assert event.search_until is not None
            own = max(own, event.search_until + timeout_s)
        request.bound = max([own, *latest])
        self._check_usefulness(event, granted, sum(len(job.keys) for job in fetched))
        self.check_skipped(name, granted.miss, keys)
        self._open(request, granted)
        if granted.searching:
            world.note("lease waits for a store")
            answer_s = self._searches.uniform(0.0, 0.6) * timeout_s
            world.after(answer_s, self._answer, granted.lease)
        return request

    def _with_search(self, event: ev.Acquire) -> ev.Acquire:
        """Some requests wait for a store to say which of their blocks it has."""
        if self.conditions.healthy or self._searches.random() < 0.6:
            return event
        search_s = self._searches.uniform(0.0, 0.5) * self.conditions.settings.operation_timeout_s
        return msgspec.structs.replace(event, search_until=self.world.now + search_s)

    def _open(self, request: Request, granted: Granted) -> None:
        self.requests[granted.lease] = request
        request.table = granted.table.tolist()
        request.state = granted.state
        request.cached = request.computed = granted.cached_tokens
        request.published = granted.cached_tokens // self.block_tokens
        filled = -(-granted.cached_tokens // self.block_tokens)
        waits = granted.state is LeaseState.LOADING
        for slot in request.table[filled:]:
            self.world.ranks.claims.check_quiet(DEVICE, slot, request.name, waits=waits)
        self._check_bytes(request)

    def _answer(self, lease: LeaseId) -> None:
        """A store has said what it has, perhaps too late, and perhaps for nobody."""
        if self.world.closed:
            return
        searches = lease in self.world.books.searches
        self.world.send(ev.Searched(lease=lease))
        if searches and lease in self.requests:
            # The time for the answer may have been over without a tick: what it loads begins now.
            timeout_s = self.conditions.settings.operation_timeout_s
            request = self.requests[lease]
            request.bound = max(request.bound, self.world.now + timeout_s)

    def _go_on(self, request: Request) -> None:
        rng, conditions = self.rng, self.conditions
        if rng.random() < conditions.abort:
            self.world.note("abort while computing")
            self._leave(request)
        elif rng.random() < conditions.preempt:
            self._preempt(request)
        elif rng.random() < conditions.fork and len(self.requests) < conditions.requests_max:
            self._fork(request)
        elif request.computed < len(request.text):
            self._compute(request)
        elif rng.random() < 0.5 and self.library.room_in(request.text) > 0:
            self._generate(request)
        else:
            self._leave(request)

    def _compute(self, request: Request) -> None:
        """Computes some of the tokens that the table has room for."""
        ranks = self.world.ranks
        if ranks.dead:
            return  # A step needs every rank.
        end = self.rng.randint(request.computed + 1, len(request.text))
        if (
            request.forked
            and request.computed % self.block_tokens
            and (not self._grow(request, end) or request.state is not LeaseState.READY)
        ):
            return
        self.commit(request, end)

    def commit(self, request: Request, end: int) -> None:
        """Computes up to a token and says so."""
        text, library = request.text, self.library
        self.world.ranks.compute(request.table, text, request.computed, end)
        full = end // self.block_tokens
        keys = library.keys(text, request.published, full)
        following = library.keys(text, full, full + 1)
        event = ev.Commit(
            lease=request.lease,
            token_count=end,
            keys=keys,
            frontier=following[0] if following else None,
        )
        request.computed = end
        request.published = full
        self.world.send(event)
        if request.store and request.era == self.world.era:
            self.world.model.known.update(keys)
            if self._writes_through:
                published = [key for key in keys if ("device", key) in self.world.kv.stored_now]
                self._check_written_down(request, published)
        elif self.world.kv.stored_now:
            raise Violation("refusal", f"{request.name} published what it must not")

    def _generate(self, request: Request) -> None:
        count = self.rng.randint(1, min(self.library.room_in(request.text), self.block_tokens + 1))
        longer = request.text.cut(len(request.text))
        self.library.extend(longer, count)
        if self._grow(request, len(longer)):
            request.text = longer

    def _grow(self, request: Request, token_count: int) -> bool:
        """Asks for room; a request that gets none gives its blocks back for now."""
        world = self.world
        world.watch()
        try:
            effects = world.send(ev.Grow(lease=request.lease, token_count=token_count))
        except CapacityError:
            world.check_unchanged()
            world.note("no room")
            self._preempt(request)
            return False
        for effect in effects:
            if isinstance(effect, Grown):
                table = effect.table.tolist()
                for slot in table[len(request.table) :]:
                    world.ranks.claims.check_quiet(DEVICE, slot, request.name)
                request.table = table
                request.state = effect.state
                request.separating = effect.state is LeaseState.LOADING
                request.bound = world.now + self.conditions.settings.operation_timeout_s
        return True

    def _fork(self, request: Request) -> None:
        name = self.next_name()
        effects = self.world.send(ev.Fork(lease=request.lease, request=name))
        granted = self._only_grant(effects)
        other = Request(name, granted.lease, request.text.cut(request.computed))
        other.keeps = request.keeps
        other.store, other.era = request.store, request.era
        request.forked = other.forked = True
        if granted.cached_tokens != request.computed:
            raise Violation("bytes", f"{name} is a fork with {granted.cached_tokens} tokens")
        self._open(other, granted)

    def _preempt(self, request: Request) -> None:
        self._close(request)
        self._comes_back(request.text)
        self.world.send(ev.Preempt(lease=request.lease))
        self._check_written_down(request, self.library.keys(request.text, 0, request.published))
        self._check_no_load_is_for_nobody()

    def _comes_back(self, text: Text) -> None:
        # A request that was forked before its first token has nothing to come back for.
        if len(text):
            self._returning.append(text)

    def _leave(self, request: Request) -> None:
        self._close(request)
        self.library.remember(request.text)
        self.world.send(ev.ReleaseLease(lease=request.lease))
        self._check_no_load_is_for_nobody()

    def _close(self, request: Request) -> None:
        self._full = False
        del self.requests[request.lease]
        self._check_bytes(request)

    # ---------------------------------------------------------------- what it is told

    def rank_died(self) -> None:
        """What filled the device is gone with it."""
        self._full = False

    def _lease_changed(self, effect: LeaseChanged) -> None:
        """A waiting request may run, or has lost its blocks."""
        request = self.requests.get(effect.lease)
        if request is None or effect.request != request.name:
            raise Violation("operations", f"lease {effect.lease} changed after its end")
        if effect.state is LeaseState.LOST:
            self.world.note("lease lost")
            self._check_loss(request)
            request.state = effect.state
            return
        request.state = effect.state
        request.separating = False
        if self.conditions.healthy and effect.cached_tokens != request.computed:
            raise Violation("usefulness", f"{request.name} has to compute more than told")
        request.table = effect.table.tolist()
        request.computed = effect.cached_tokens
        request.published = effect.cached_tokens // self.block_tokens
        filled = -(-effect.cached_tokens // self.block_tokens)
        for slot in request.table[filled:]:
            self.world.ranks.claims.check_quiet(DEVICE, slot, request.name)
        self._check_bytes(request)

    def _only_grant(self, effects: list[Effect]) -> Granted:
        grants = [effect for effect in effects if isinstance(effect, Granted)]
        if len(grants) != 1:
            raise Violation("operations", f"{len(grants)} leases for one request")
        return grants[0]

    def _check_bytes(self, request: Request) -> None:
        if request.state is LeaseState.READY:
            self.world.ranks.check_table(
                request.name, request.table, request.text, request.computed
            )

    def _check_loss(self, request: Request) -> None:
        """Blocks that do not arrive are computed instead, where there is room for them."""
        event = self.world.event
        reset = isinstance(event, ev.Reset | ev.ChangeWeights)
        if reset and request.state is LeaseState.READY:
            raise Violation("usefulness", f"a reset took the blocks of {request.name}")
        excused = request.separating or reset or isinstance(event, ev.RankLost)
        # A save that was given up may still read where the request was to compute.
        excused = excused or any(
            operation.purpose is Purpose.SAVE
            and operation.state is OperationState.ENDING
            and np.isin(operation.source_slots, request.table).any()
            for operation in self.world.books.ledger.operations.values()
        )
        free = self.world.books.device.pool.free_count
        if self.conditions.healthy or (not excused and free >= len(request.table)):
            raise Violation("usefulness", f"{request.name} lost its blocks with {free} free")

    def _check_written_down(self, request: Request, keys: Iterable[Key]) -> None:
        """Blocks of a request are in the hub, or on their way, as far as they fit."""
        world, books = self.world, self.world.books
        hub = books.hub
        if hub is None or hub.settings.quotas or hub.index in world.ranks.off or world.ranks.lost:
            return
        current = request.store and request.era == world.era and request.keeps is None
        if not current or request.state is not LeaseState.READY or not hub.pool.free_count:
            return
        for key in keys:
            node = books.nodes.get(key)
            if node == NOWHERE or books.device.slot_of[node] == NOWHERE:
                # It computed what was being loaded for another, and that load failed since.
                return
            if hub.slot_of[node] == NOWHERE:
                raise Violation(
                    "usefulness", f"the hub has room, but not the blocks of {request.name}"
                )

    def _check_no_load_is_for_nobody(self) -> None:
        """A load that nobody waits for any more was given up."""
        waiting = [r.table for r in self.requests.values() if r.state is LeaseState.LOADING]
        awaited = {slot for table in waiting for slot in table}
        for job in self.world.ranks.open.values():
            if job.target == DEVICE and not job.ended and awaited.isdisjoint(job.targets[0]):
                raise Violation("operations", f"{job} goes on, but nobody waits for it")

    def _check_usefulness(self, event: ev.Acquire, granted: Granted, fetched: int) -> None:
        """A request gets what is known, or as much less as others have on the way into the hub.

        Nobody else can have the slots of these `fetched` blocks: ranks may write there any moment.
        """
        useful = (event.token_count - 1) // self.block_tokens if event.reuse else 0
        most = useful * self.block_tokens
        if granted.cached_tokens > most or sum(granted.cached_by_tier) != granted.cached_tokens:
            raise Violation(
                "bytes",
                f"{event.request}: {granted.cached_tokens} tokens of {most} are cached, "
                f"by tier {granted.cached_by_tier}",
            )
        if not event.load and any(granted.cached_by_tier[1:]):
            raise Violation("refusal", f"{event.request} opted out of loads and got some")
        plenty = self.conditions.plenty
        if plenty is Plenty.NOWHERE or (plenty is not Plenty.DEVICE and not event.load):
            return
        known = self.world.model.known_prefix(list(event.keys[:useful])) * self.block_tokens
        lacks = known - granted.cached_tokens
        crowded = granted.miss.reason is MissReason.NO_ROOM and 0 < lacks <= (
            fetched * self.block_tokens
        )
        if lacks and not crowded:
            raise Violation(
                "usefulness",
                f"{event.request} hits {granted.cached_tokens} tokens, the model knows {known}: "
                f"{granted.miss}",
            )

    # ---------------------------------------------------------------- the end of a world

    def stop(self) -> None:
        """Half of the requests end at once."""
        for request in list(self.requests.values()):
            if self.rng.random() < 0.5:
                self._leave(request)

    def finish(self) -> None:
        """The other half ends, too."""
        for request in list(self.requests.values()):
            self._leave(request)
        super().finish()

    def check_no_one_waits(self) -> None:
        """Every copy has ended, so every request may run or has lost its blocks."""
        for request in self.requests.values():
            if request.state is LeaseState.LOADING:
                raise Violation("liveness", f"{request.name} waits for nothing")

    def recover(self) -> None:
        """A new text is computed, released, asked for again, and found."""
        text = self.library.fresh_text("recovery", 2 * self.block_tokens + 1)
        for expected in (0, 2 * self.block_tokens):
            event = ev.Acquire(
                request=self.next_name(),
                keys=self.library.all_keys(text),
                token_count=len(text),
                tenant="recovery",
            )
            try:
                granted = self._only_grant(self.world.send(event))
            except CapacityError as error:
                raise Violation("usefulness", f"an idle cache has no room: {error}") from None
            ready = granted.state is LeaseState.READY
            if granted.miss.reason is MissReason.RECOMPUTE:
                # A tick let a block leave the device meanwhile, and to load it would take longer.
                self.check_skipped(event.request, granted.miss, event.keys)
                expected = granted.cached_tokens  # noqa: PLW2901 - that much is due after all
            loads = any(granted.cached_by_tier[1:])
            waits = self._saves_first and not ready
            if granted.cached_tokens != expected or (ready is loads and not waits):
                raise Violation(
                    "usefulness", f"a quiet cache hits {granted.cached_tokens} of {expected} tokens"
                )
            request = Request(event.request, granted.lease, text)
            request.era = self.world.era
            request.bound = self.world.now + self.conditions.settings.operation_timeout_s
            self._open(request, granted)
            self.world.run_until_quiet()
            if request.state is not LeaseState.READY or request.computed != expected:
                raise Violation("usefulness", "a quiet cache does not load what it found")
            self.commit(request, len(text))
            self._leave(request)
            self.world.run_until_quiet()
