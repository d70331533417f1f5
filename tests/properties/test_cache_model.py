"""The whole cache against a trivially correct model: bytes in slots, and the set of known keys.

A hypothetical engine sends every event there is, and answers copies in any order, late, twice,
or with faults. Its memory is real: each rank has bytes in each slot of each tier, a copy moves
them at some moment between its start and its report, and free slots hold garbage. After every
step the machine is audited, and whatever it calls ready must hold the right bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.cache.ledger import BlockFault
from penstock.cache.settings import CacheSettings, TierSettings, WriteKind, WritePolicy
from penstock.cache.states import FREE, LEAVING, READY, LeaseState
from penstock.errors import CapacityError, UnavailableError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.audit import audit
from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored
from penstock.machine.machine import CacheMachine

if TYPE_CHECKING:
    from penstock.vocabulary.ids import Key, LeaseId, OperationId, PinId

BLOCK_TOKENS = 2
GARBAGE = b"garbage"

TROUBLES = ("reset", "lose", "return", "off", "on", "cancel", "prefetch")

Tokens = tuple[int, ...]

tokens_drawn = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
picks = st.integers(0, 10_000)
tenants = st.sampled_from(["", "ann"])


def kv_of(tenant: str, tokens: Tokens) -> bytes:
    """The bytes of the block that ends with these tokens; of a full block, also its key."""
    return hashlib.blake2b(repr((tenant, tokens)).encode(), digest_size=16).digest()


def keys_of(tenant: str, tokens: Tokens) -> list[Key]:
    ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    return [kv_of(tenant, tokens[:end]) for end in ends]


@dataclass(kw_only=True)
class Request:
    """What the engine knows of one of its requests."""

    lease: LeaseId
    tenant: str
    tokens: Tokens
    done: int
    """So many leading tokens have their KV, as far as the engine was told."""
    published: int
    """So many leading blocks were found, or their keys committed."""
    state: LeaseState
    table: list[int]
    store: bool
    epoch: int


@dataclass(kw_only=True)
class Flight:
    """A copy that some ranks have not reported on."""

    copy: ef.Copy
    unreported: set[int]
    moved: set[int] = field(default_factory=set)
    """Ranks whose bytes have moved, though they may not have said so."""


class CacheLife(RuleBasedStateMachine):
    """Any life of a managed cache with one or two lower tiers and one or two ranks."""

    calm = False

    @initialize(
        slots=st.tuples(st.integers(6, 12), st.integers(4, 10), st.integers(3, 14)),
        ranks=st.integers(1, 2),
        writes=st.tuples(*[st.sampled_from(list(WriteKind)[1:])] * 2),
        blocks_max=st.sampled_from([1, 2, 64]),
        eviction=st.sampled_from(["lru", "s3fifo"]),
        quotas=st.sampled_from([{}, {"ann": 0.5}, {"*": 0.4}]),
    )
    def begin(
        self,
        slots: tuple[int, int, int],
        ranks: int,
        writes: tuple[WriteKind, WriteKind],
        blocks_max: int,
        **kinds: Any,
    ) -> None:
        names = ("device", "host", "disk")[: 3 if slots[2] > 3 else 2]
        policies = [WritePolicy(kind=kind, hits=1) for kind in (WriteKind.NONE, *writes)]
        device, *lower = (
            TierSettings(
                name=name,
                slot_count=count,
                write=write,
                low_watermark=0.25,
                high_watermark=0.4,
                **kinds,
            )
            for name, count, write in zip(names, slots, policies, strict=False)
        )
        self.start(device, lower, ranks, blocks_max)

    def start(
        self, device: TierSettings, lower: list[TierSettings], ranks: int, blocks_max: int
    ) -> None:
        chosen = CacheSettings(
            device=device,
            tiers=tuple(lower),
            block_tokens=BLOCK_TOKENS,
            rank_count=ranks,
            operation_blocks_max=blocks_max,
            operation_timeout_s=5.0,
        )
        self.machine = CacheMachine(chosen, incarnation=1)
        self.books = self.machine.books
        self.ranks = range(ranks)
        self.now = 0.0
        self.memory = {
            (index, rank): [GARBAGE] * tier.slot_count
            for index, tier in enumerate([device, *lower])
            for rank in self.ranks
        }
        self.requests: dict[LeaseId, Request] = {}
        self.flights: dict[OperationId, Flight] = {}
        self.landed: list[OperationId] = []
        self.ended: set[OperationId] = set()
        self.quiet: set[OperationId] = set()
        self.known: set[Key] = set()
        """The model: what was published or discovered since the last reset."""
        self.prompts: list[tuple[str, Tokens]] = []
        self.pins: list[PinId] = []
        self.seen: dict[str, dict[bytes, bytes | None]] = {}
        """What a reader of KV events believes."""

    # ---------------------------------------------------------------- the door

    def send(self, event: ev.Event) -> list[ef.Effect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            match effect:
                case ef.Copy():
                    flight = Flight(copy=effect, unreported=set(self.ranks))
                    self.flights[effect.operation] = flight
                case ef.Ended():
                    assert effect.operation not in self.ended, "an operation ended twice"
                    self.ended.add(effect.operation)
                    if effect.settled:
                        self.settle(effect.operation)
                case ef.Settled():
                    self.settle(effect.operation)
                case ef.LeaseChanged():
                    request = self.requests[effect.lease]
                    request.state = effect.state
                    request.table = effect.table.tolist()
                    request.done = effect.cached_tokens
                    request.published = min(request.published, request.done // BLOCK_TOKENS)
        return effects

    def settle(self, operation: OperationId) -> None:
        assert operation not in self.quiet, "an operation was settled twice"
        assert operation in self.ended, "an operation was settled before it ended"
        self.quiet.add(operation)

    def pick(self, number: int, *, state: LeaseState | None = None) -> Request | None:
        found = [r for r in self.requests.values() if state is None or r.state is state]
        return found[number % len(found)] if found else None

    # ---------------------------------------------------------------- the engine

    @rule(
        tokens=tokens_drawn,
        tenant=tenants,
        reuse=st.sampled_from([True] * 7 + [False]),
        load=st.sampled_from([True] * 7 + [False]),
        store=st.sampled_from([True] * 7 + [False]),
        priority=st.sampled_from([0, 0, 0, 1]),
        ttl_s=st.sampled_from([None, None, None, 2.0]),
    )
    def acquire(self, tokens: Tokens, tenant: str, **wishes: Any) -> None:
        """A prompt that may or may not have been seen."""
        keys = keys_of(tenant, tokens)
        event = ev.Acquire(request="r", keys=keys, token_count=len(tokens), tenant=tenant, **wishes)
        before = self.machine.freeze()
        try:
            granted = ef.answer(self.send(event), ef.Granted)
        except (CapacityError, UnavailableError):
            assert self.machine.freeze() == before
            return
        self.prompts.append((tenant, tokens))
        self.judge_match(granted, keys[: (len(tokens) - 1) // BLOCK_TOKENS], event)
        store = wishes.get("store", True)
        self.enter(granted, tenant, tokens, store=store, epoch=self.books.ledger.epoch)

    def enter(
        self, granted: ef.Granted, tenant: str, tokens: Tokens, *, store: bool, epoch: int
    ) -> Request:
        request = self.requests[granted.lease] = Request(
            lease=granted.lease,
            tenant=tenant,
            tokens=tokens,
            done=granted.cached_tokens,
            published=granted.cached_tokens // BLOCK_TOKENS,
            state=granted.state,
            table=granted.table.tolist(),
            store=store,
            epoch=epoch,
        )
        return request

    def judge_match(self, granted: ef.Granted, useful: list[Key], event: ev.Acquire) -> None:
        known = next((i for i, key in enumerate(useful) if key not in self.known), len(useful))
        assert granted.cached_tokens <= known * BLOCK_TOKENS
        assert event.reuse or granted.cached_tokens == 0
        assert sum(granted.cached_by_tier) == granted.cached_tokens

    @rule(number=picks, more=tokens_drawn)
    @precondition(lambda self: self.prompts)
    def acquire_the_next_turn(self, number: int, more: Tokens) -> None:
        """A prompt that goes on from one that was seen."""
        tenant, tokens = self.prompts[number % len(self.prompts)]
        self.acquire((tokens + more)[:14], tenant)

    @rule(number=picks, count=st.integers(1, 6))
    def compute(self, number: int, count: int) -> None:
        """Some tokens of a prompt, or new ones, are computed and committed."""
        request = self.pick(number, state=LeaseState.READY)
        if request is None:
            return
        request.tokens += (number % 2,) * (request.done + 1 - len(request.tokens))
        target = min(request.done + count, len(request.tokens))
        before = self.machine.freeze()
        try:
            event = ev.Grow(lease=request.lease, token_count=target)
            grown = ef.answer(self.send(event), ef.Grown)
        except CapacityError:
            assert self.machine.freeze() == before
            return
        request.table, request.state = grown.table.tolist(), grown.state
        if request.state is LeaseState.READY:
            self.write(request, target)
            self.commit(request)

    def write(self, request: Request, target: int) -> None:
        """The model writes the KV of tokens up to `target`, on every rank."""
        for block in range(request.done // BLOCK_TOKENS, -(-target // BLOCK_TOKENS)):
            end = min((block + 1) * BLOCK_TOKENS, target)
            for rank in self.ranks:
                kv = kv_of(request.tenant, request.tokens[:end])
                self.memory[0, rank][request.table[block]] = kv
        request.done = target

    def commit(self, request: Request) -> None:
        keys = keys_of(request.tenant, request.tokens[: request.done])[request.published :]
        self.send(ev.Commit(lease=request.lease, token_count=request.done, keys=keys))
        if request.store and request.epoch == self.books.ledger.epoch:
            request.published += len(keys)
            self.known.update(keys)
        self.prompts.append((request.tenant, request.tokens))

    @rule(number=picks)
    def fork(self, number: int) -> None:
        request = self.pick(number, state=LeaseState.READY)
        if request is None or len(self.requests) > 6:
            return
        event = ev.Fork(lease=request.lease, request="fork")
        granted = ef.answer(self.send(event), ef.Granted)
        assert granted.cached_tokens == request.done
        tokens = request.tokens[: request.done]
        other = self.enter(
            granted, request.tenant, tokens, store=request.store, epoch=request.epoch
        )
        other.published = request.published

    @rule(number=picks, kind=st.sampled_from([ev.Release, ev.Preempt]))
    def end(self, number: int, kind: type[ev.Release | ev.Preempt]) -> None:
        request = self.pick(number)
        if request is not None:
            del self.requests[request.lease]
            self.send(kind(lease=request.lease))

    @rule(tokens=tokens_drawn, tenant=tenants, number=picks)
    def pin_or_unpin(self, tokens: Tokens, tenant: str, number: int) -> None:
        if self.pins and number % 2:
            self.send(ev.Unpin(pin=self.pins.pop(number % len(self.pins))))
            return
        try:
            event = ev.Pin(keys=keys_of(tenant, tokens[:4]))
            self.pins.append(ef.answer(self.send(event), ef.Pinned).pin)
        except CapacityError:
            return

    # ---------------------------------------------------------------- the ranks

    def flight(self, number: int) -> tuple[Flight, int] | None:
        waiting = [(f, rank) for f in self.flights.values() for rank in sorted(f.unreported)]
        return waiting[number % len(waiting)] if waiting else None

    def move(self, flight: Flight, rank: int) -> None:
        if rank not in flight.moved:
            flight.moved.add(rank)
            copy = flight.copy
            source, target = self.memory[copy.source, rank], self.memory[copy.target, rank]
            for there, here in zip(copy.source_slots, copy.target_slots, strict=True):
                target[here] = source[there]

    @rule(number=picks)
    @precondition(lambda self: self.flights)
    def move_bytes(self, number: int) -> None:
        """A rank copies, and says nothing yet."""
        found = self.flight(number)
        if found is not None:
            self.move(*found)

    @rule(number=picks, trouble=st.sampled_from(["", "", "", "", "corrupt", "unreadable", "all"]))
    @precondition(lambda self: self.flights)
    def report(self, number: int, trouble: str) -> None:
        found = self.flight(number)
        if found is not None:
            flight, rank = found
            self.move(flight, rank)
            copy, faults = flight.copy, []
            spoilt = range(len(copy.keys)) if trouble else ()
            if trouble and trouble != "all":
                spoilt = [number % len(copy.keys)]
                faults = [(spoilt[0], BlockFault(trouble))]
            for position in spoilt:
                self.memory[copy.target, rank][copy.target_slots[position]] = GARBAGE
            self.answer(flight, rank, faults=faults, failure="all" if trouble == "all" else "")

    def answer(self, flight: Flight, rank: int, **outcome: Any) -> None:
        operation = flight.copy.operation
        flight.unreported.discard(rank)
        if not flight.unreported:
            del self.flights[operation]
            self.landed.append(operation)
        self.send(ev.Report(operation=operation, rank=rank, **outcome))
        assert (operation in self.quiet) == (not flight.unreported)

    @rule(number=picks, rank=st.integers(0, 1))
    @precondition(lambda self: self.landed)
    def report_again(self, number: int, rank: int) -> None:
        before = self.machine.freeze()

        effects = self.send(
            ev.Report(operation=self.landed[number % len(self.landed)], rank=rank, failure="late")
        )

        assert effects == []
        assert self.machine.freeze() == before

    # ---------------------------------------------------------------- the world

    @rule(passed_s=st.sampled_from([0.1, 0.1, 1.0, 3.0]))
    def tick(self, passed_s: float) -> None:
        self.now += passed_s
        self.send(ev.Tick())

    @rule(number=picks, tokens=tokens_drawn, backwards=st.booleans())
    def discover(self, number: int, tokens: Tokens, *, backwards: bool) -> None:
        """Another engine, or an earlier life, left blocks in free slots of a lower tier."""
        tier = self.books.lower_tiers()[number % len(self.books.lower_tiers())]
        keys = keys_of("", (*tokens, 0))
        parents = dict(zip(keys, [None, *keys[:-1]], strict=True))
        absent = [key for key in keys[number % 2 :] if self.lacks(tier.index, key)]
        slots = tier.pool.free_slots()[: len(absent)]
        found = absent[: len(slots)][:: -1 if backwards else 1]
        for key, slot in zip(found, slots.tolist(), strict=True):
            for rank in self.ranks:
                self.memory[tier.index, rank][slot] = key
        self.known.update(found)
        self.send(
            ev.Discovered(
                tier=tier.index, keys=found, parents=[parents[key] for key in found], slots=slots
            )
        )

    def lacks(self, tier: int, key: Key) -> bool:
        node = self.books.nodes.get(key)
        return node < 0 or bool(self.books.tier(tier).slot_of[node] < 0)

    @rule(number=picks, kind=st.sampled_from(TROUBLES))
    def trouble(self, number: int, kind: str) -> None:
        tier = 1 + number % len(self.books.lower_tiers())
        rank = number % len(self.ranks)
        match kind:
            case "reset":
                self.known.clear()
                self.send(ev.Reset(why="test"))
            case "lose":
                self.lose(rank)
            case "return":
                self.send(ev.RankBack(rank=rank))
            case "off":
                self.switch_off(tier, fenced=number % 3 == 0)
            case "on":
                self.switch_on(tier, kept=number % 3 != 0)
            case "cancel" if self.flights:
                operation = list(self.flights)[number % len(self.flights)]
                self.send(ev.Cancel(operation=operation))
            case "prefetch" if self.prompts:
                keys = keys_of(*self.prompts[number % len(self.prompts)])
                self.send(ev.Prefetch(keys=keys, cause="prefetch"))

    def lose(self, rank: int) -> None:
        """A dead rank copies no more, and its device memory is gone."""
        self.memory[0, rank][:] = [GARBAGE] * len(self.memory[0, rank])
        for operation, flight in list(self.flights.items()):
            flight.unreported.discard(rank)
            if not flight.unreported:
                self.landed.append(operation)
                del self.flights[operation]
        self.send(ev.RankLost(rank=rank))

    def switch_off(self, tier: int, *, fenced: bool) -> None:
        """A fence is the end of every copy from or to the tier, without a word."""
        for operation, flight in list(self.flights.items()):
            if fenced and tier in (flight.copy.source, flight.copy.target):
                self.landed.append(operation)
                del self.flights[operation]
        self.send(ev.TierOff(tier=tier, fenced=fenced))

    def switch_on(self, tier: int, *, kept: bool) -> None:
        for rank in self.ranks if not kept else ():
            self.memory[tier, rank][:] = [GARBAGE] * len(self.memory[tier, rank])
        self.send(ev.TierOn(tier=tier, kept=kept))

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def the_books_add_up(self) -> None:
        audit(self.books)

    @invariant()
    def what_is_ready_holds_the_right_bytes_on_every_rank(self) -> None:
        for tier in self.books.owned_tiers():
            states, nodes = tier.pool.state.tolist(), tier.pool.node.tolist()
            for slot, state in enumerate(states):
                for rank in self.ranks:
                    kv = self.memory[tier.index, rank]
                    if state == FREE:
                        kv[slot] = GARBAGE
                    elif state in (READY, LEAVING):
                        assert kv[slot] == self.books.nodes.key_of(nodes[slot]), (tier.name, slot)

    @invariant()
    def what_a_request_may_read_is_its_own_prompt(self) -> None:
        for request in self.requests.values():
            if request.state is not LeaseState.READY:
                continue
            for block in range(-(-request.done // BLOCK_TOKENS)):
                end = min((block + 1) * BLOCK_TOKENS, request.done)
                right = kv_of(request.tenant, request.tokens[:end])
                for rank in self.ranks:
                    assert self.memory[0, rank][request.table[block]] == right, (request, block)

    @invariant()
    def readers_of_kv_events_know_what_can_be_matched(self) -> None:
        for event in self.machine.take_kv_events():
            match event:
                case BlocksStored():
                    rows = zip(event.keys, [event.parent, *event.keys[:-1]], strict=True)
                    self.seen.setdefault(event.tier, {}).update(rows)
                case BlocksRemoved():
                    for key in event.keys:
                        self.seen[event.tier].pop(key, None)
                case AllCleared():
                    self.seen.clear()
        cached = self.machine.kv_snapshot().blocks
        for tier, rows in cached.items():
            assert self.seen.get(tier, {}).keys() == {key for key, _ in rows}

    def teardown(self) -> None:
        """When everything has ended, nothing is held and nothing is on its way."""
        self.finish()
        for lease in list(self.requests):
            del self.requests[lease]
            self.send(ev.Release(lease=lease))
        self.finish()
        for tier in self.machine.statistics().tiers:
            assert (tier.held, tier.filling, tier.leaving, tier.doomed) == (0, 0, 0, 0)
        assert self.ended == self.quiet
        assert len(self.ended) == self.machine.statistics().operations_started

    def finish(self) -> None:
        while self.flights:
            flight = next(iter(self.flights.values()))
            for rank in sorted(flight.unreported):
                self.move(flight, rank)
                self.answer(flight, rank)
        self.what_is_ready_holds_the_right_bytes_on_every_rank()
        self.what_a_request_may_read_is_its_own_prompt()


class CalmLife(CacheLife):
    """Nothing fails, and the tier below has room for all: whatever was published is found."""

    @initialize(ranks=st.integers(1, 2), eviction=st.sampled_from(["lru", "s3fifo"]))
    def begin(self, ranks: int, eviction: str) -> None:  # type: ignore[override]
        device = TierSettings(name="device", slot_count=12, eviction=eviction)
        host = TierSettings(name="host", slot_count=2048, eviction=eviction)
        self.start(device, [host], ranks, 64)

    def judge_match(self, granted: ef.Granted, useful: list[Key], event: ev.Acquire) -> None:
        super().judge_match(granted, useful, event)
        if event.reuse and event.load:
            known = next((i for i, key in enumerate(useful) if key not in self.known), len(useful))
            assert granted.cached_tokens == known * BLOCK_TOKENS

    @invariant()
    def copies_end_at_once(self) -> None:
        self.finish()


for nuisance in ("trouble", "discover", "report", "report_again", "move_bytes"):
    setattr(CalmLife, nuisance, None)

ordinary = settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    stateful_step_count=50,
    database=None,
    suppress_health_check=list(HealthCheck),
)
tenfold = settings(ordinary, max_examples=600)


class TestCacheLife(CacheLife.TestCase):  # type: ignore[misc,name-defined]
    settings = ordinary


class TestCalmLife(CalmLife.TestCase):  # type: ignore[misc,name-defined]
    settings = ordinary


@pytest.mark.long
class TestLongCacheLife(CacheLife.TestCase):  # type: ignore[misc,name-defined]
    settings = tenfold


@pytest.mark.long
class TestLongCalmLife(CalmLife.TestCase):  # type: ignore[misc,name-defined]
    settings = tenfold
