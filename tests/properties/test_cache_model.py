"""The whole cache against a trivially correct model: bytes in slots, and the set of known keys.

An engine sends every event there is, and answers copies in any order, late, twice, or with faults.
Each rank has bytes in each slot of each tier, a copy moves them at some moment between its start
and its report, and free slots hold garbage. After every step the machine is audited, and whatever
it calls ready must hold the right bytes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import stateful as hs
from hypothesis import strategies as st

from lab.fixtures.frozen import freeze
from penstock.cache.operations import BlockFault
from penstock.cache.settings import CacheSettings, TierSettings, WriteKind, WritePolicy
from penstock.cache.states import FREE, LeaseState
from penstock.errors import CapacityError, UnavailableError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.audit import audit
from penstock.machine.kv_events import BlocksRemoved, BlocksStored
from penstock.machine.machine import CacheMachine

if TYPE_CHECKING:
    from penstock.vocabulary.keys import Key, LeaseId, OperationId, PinId

BLOCK_TOKENS = 2
PROMPT_TOKENS_MAX = 14
GARBAGE = b"garbage"

Tokens = tuple[int, ...]


def prompt_of(number: int) -> Tokens:
    """One of many prompts of one to ten tokens that branch at every other one."""
    return tuple((number >> (place // 2)) % 2 for place in range(1 + number % 10))


def kv_of(tenant: str, tokens: Tokens) -> bytes:
    """The bytes of the block that ends with these tokens; of a full block, also its key."""
    return f"{tenant}:{''.join(map(str, tokens))}".encode()


def keys_of(tenant: str, tokens: Tokens) -> list[Key]:
    ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    return [kv_of(tenant, tokens[:end]) for end in ends]


picks = st.integers(0, 999)
level = st.sampled_from([0, 0, 0, 1])
ttls = st.sampled_from([None, None, None, 2.0])
mostly = st.sampled_from([True] * 7 + [False])
faults = st.sampled_from(["", "", "", "corrupt", "unreadable", "everything"])
troubles = st.sampled_from([*["discover", "return"] * 3, "reset", "lose", "off", "on", "cancel"])
patient = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
whims = st.sampled_from(["fork", "fork", "pin", "unpin", "prefetch"])


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
    epoch: int | None
    """The one it may publish in."""
    state: LeaseState
    table: list[int]


@dataclass
class Flight:
    """A copy that some ranks have not reported on, though their bytes may have moved."""

    copy: ef.Copy
    unreported: set[int]
    moved: set[int] = field(default_factory=set)


class CacheLife(hs.RuleBasedStateMachine):
    """Any life of a managed cache with one or two lower tiers and one or two ranks."""

    @hs.initialize(
        slots=st.tuples(st.integers(6, 10), st.integers(4, 12), st.integers(3, 14)),
        ranks=st.integers(1, 2),
        writes=st.tuples(*[st.sampled_from(list(WriteKind)[1:])] * 2),
        blocks_max=st.sampled_from([1, 2, 64]),
        eviction=st.sampled_from(["lru", "adaptive"]),
        quotas=st.sampled_from([{}, {"ann": 0.5}, {"*": 0.4}]),
    )
    def begin(self, slots: Any, writes: Any, ranks: int, blocks_max: int, **kinds: Any) -> None:
        names = ("device", "host", "disk")[: 3 if slots[2] > 3 else 2]
        policies = [WritePolicy(kind=kind, hits=1) for kind in (WriteKind.NONE, *writes)]
        kinds |= {"low_watermark": 0.25, "high_watermark": 0.4}
        tiers = [
            TierSettings(name=name, slot_count=count, write=write, **kinds)
            for name, count, write in zip(names, slots, policies, strict=False)
        ]
        self.start(tiers, rank_count=ranks, operation_blocks_max=blocks_max)

    def start(self, tiers: list[TierSettings], **more: Any) -> None:
        more |= {"block_tokens": BLOCK_TOKENS, "operation_timeout_s": 5.0}
        chosen = CacheSettings(device=tiers[0], tiers=tuple(tiers[1:]), **more)
        self.machine, self.now = CacheMachine(chosen, incarnation=1), 0.0
        self.books = self.machine._books
        self.ranks = range(chosen.rank_count)
        self.memory = {
            (index, rank): [GARBAGE] * tier.slot_count
            for index, tier in enumerate(tiers)
            for rank in self.ranks
        }
        self.requests: dict[LeaseId, Request] = {}
        self.flights: dict[OperationId, Flight] = {}
        self.landed: list[OperationId] = []
        self.ended: set[OperationId] = set()
        self.quiet: set[OperationId] = set()
        self.known: set[Key] = set()
        """The model: what was published or discovered since the last reset."""
        self.past: list[tuple[str, Tokens]] = []
        self.pins: list[PinId] = []
        self.seen: set[tuple[str, Key]] = set()
        """What a reader of KV events believes."""

    def send(self, event: ev.Event) -> list[ef.Effect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            match effect:
                case ef.Copy():
                    self.flights[effect.operation] = Flight(effect, set(self.ranks))
                case ef.Ended():
                    assert effect.operation not in self.ended, "an operation ended twice"
                    self.ended.add(effect.operation)
                    self.quiet |= {effect.operation} if effect.settled else set()
                case ef.Settled():
                    assert effect.operation in self.ended - self.quiet, "settled early or twice"
                    self.quiet.add(effect.operation)
                case ef.LeaseChanged():
                    request = self.requests[effect.lease]
                    request.state, request.table = effect.state, effect.table.tolist()
                    request.done = effect.cached_tokens
                    request.published = min(request.published, request.done // BLOCK_TOKENS)
        return effects

    # ---------------------------------------------------------------- the engine

    def pick(self, number: int, *states: LeaseState) -> Request | None:
        found = [one for one in self.requests.values() if one.state in states]
        return found[number % len(found)] if found else None

    def acquire(self, tenant: str, tokens: Tokens, **wishes: Any) -> Request | None:
        keys = keys_of(tenant, tokens)
        event = ev.Acquire(request="r", keys=keys, token_count=len(tokens), tenant=tenant, **wishes)
        before = freeze(self.machine)
        try:
            granted = ef.answer(self.send(event), ef.Granted)
        except (CapacityError, UnavailableError):
            assert freeze(self.machine) == before
            self.end(self.books.tick, ev.Preempt)
            return None
        self.past.append((tenant, tokens))
        self.judge_match(granted, keys[: (len(tokens) - 1) // BLOCK_TOKENS], event)
        request = self.requests[granted.lease] = Request(
            lease=granted.lease,
            tenant=tenant,
            tokens=tokens,
            done=granted.cached_tokens,
            published=granted.cached_tokens // BLOCK_TOKENS,
            state=granted.state,
            table=granted.table.tolist(),
            epoch=self.books.ledger.epoch if event.store else None,
        )
        return request

    def longest_known(self, keys: list[Key]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.known), len(keys))

    def judge_match(self, granted: ef.Granted, useful: list[Key], event: ev.Acquire) -> None:
        """The model's word on a match: never more than was published."""
        assert granted.cached_tokens <= self.longest_known(useful) * BLOCK_TOKENS
        assert event.reuse or granted.cached_tokens == 0
        assert sum(granted.cached_by_tier) == granted.cached_tokens

    def prompt(self, number: int) -> tuple[str, Tokens]:
        """A new prompt, or one of the last few again, or its next turn."""
        tokens = prompt_of(number)
        if number % 3 and self.past:
            tenant, before = self.past[-1 - number % min(5, len(self.past))]
            return tenant, (before + (tokens if number % 3 == 1 else (0,)))[:PROMPT_TOKENS_MAX]
        return ("ann" if number % 5 == 0 else ""), tokens

    @hs.rule(number=picks, reuse=mostly, load=mostly, store=mostly, priority=level, ttl_s=ttls)
    def ask(self, number: int, **wishes: Any) -> None:
        """A request of any kind begins."""
        self.acquire(*self.prompt(number), **wishes)

    @hs.rule(number=picks, count=st.integers(1, 5))
    def serve(self, number: int, count: int) -> None:
        """Some requests, each computed, and most of them released, if they need not wait long."""
        for one in range(number, number + count):
            tenant, tokens = self.prompt(one)
            request = self.acquire(tenant, tokens)
            self.report_in_order(4 * (one % 3))
            if request is not None and request.state is LeaseState.READY:
                self.compute_up_to(request, len(tokens))
                if one % 4:
                    self.release(request, ev.ReleaseLease)

    @hs.rule(number=picks, count=st.sampled_from([1, 2, 3, PROMPT_TOKENS_MAX]))
    def compute(self, number: int, count: int) -> None:
        """Some tokens of a prompt are computed, or one that follows it."""
        request = self.pick(number, LeaseState.READY)
        if request is not None:
            request.tokens += (number % 2,) * (request.done + 1 - len(request.tokens))
            self.compute_up_to(request, min(request.done + count, len(request.tokens)))

    def compute_up_to(self, request: Request, target: int) -> None:
        event, before = ev.Grow(lease=request.lease, token_count=target), freeze(self.machine)
        try:
            grown = ef.answer(self.send(event), ef.Grown)
        except CapacityError:
            assert freeze(self.machine) == before
            return
        request.table, request.state = grown.table.tolist(), grown.state
        if request.state is LeaseState.READY:
            self.write(request, target)

    def write(self, request: Request, target: int) -> None:
        """The engine writes the KV of tokens up to `target` on every rank, and commits it."""
        for block in range(request.done // BLOCK_TOKENS, -(-target // BLOCK_TOKENS)):
            kv = kv_of(request.tenant, request.tokens[: min((block + 1) * BLOCK_TOKENS, target)])
            for rank in self.ranks:
                self.memory[0, rank][request.table[block]] = kv
        request.done = target
        keys = keys_of(request.tenant, request.tokens[:target])[request.published :]
        self.send(ev.Commit(lease=request.lease, token_count=target, keys=keys))
        self.past.append((request.tenant, request.tokens))
        if request.epoch == self.books.ledger.epoch:
            request.published += len(keys)
            self.known.update(keys)

    @hs.rule(number=picks, kind=st.sampled_from([ev.ReleaseLease, ev.Preempt]))
    def end(self, number: int, kind: type[ev.ReleaseLease | ev.Preempt]) -> None:
        request = self.pick(number, *LeaseState)
        if request is not None:
            self.release(request, kind)

    def release(self, request: Request, kind: type[ev.ReleaseLease | ev.Preempt]) -> None:
        del self.requests[request.lease]
        self.send(kind(lease=request.lease))

    @hs.rule(number=picks, kind=whims)
    @hs.precondition(lambda self: self.past)
    def whim(self, number: int, kind: str) -> None:
        request = self.pick(number, LeaseState.READY)
        keys = keys_of(*self.past[number % len(self.past)])
        match kind:
            case "fork" if request is not None and len(self.requests) < 6:
                self.fork(request)
            case "pin" if len(self.pins) < 3:
                with suppress(CapacityError):
                    event = ev.PinBlocks(keys=keys[:2])
                    self.pins.append(ef.answer(self.send(event), ef.Pinned).pin)
            case "unpin" if self.pins:
                self.send(ev.UnpinBlocks(pin=self.pins.pop(number % len(self.pins))))
            case "prefetch":
                self.send(ev.Prefetch(keys=keys, cause="whim"))

    def fork(self, request: Request) -> None:
        granted = ef.answer(self.send(ev.Fork(lease=request.lease, request="fork")), ef.Granted)
        lease, table = granted.lease, granted.table.tolist()
        tokens = request.tokens[: request.done]
        self.requests[lease] = replace(request, lease=lease, tokens=tokens, table=table)

    # ---------------------------------------------------------------- the ranks

    def flight(self, number: int) -> tuple[Flight, int]:
        waiting = [(f, rank) for f in self.flights.values() for rank in sorted(f.unreported)]
        return waiting[number % len(waiting)]

    def move(self, flight: Flight, rank: int) -> None:
        if rank not in flight.moved:
            flight.moved.add(rank)
            copy = flight.copy
            source, target = self.memory[copy.source, rank], self.memory[copy.target, rank]
            for there, here in zip(copy.source_slots, copy.target_slots, strict=True):
                target[here] = source[there]

    def answer(self, flight: Flight, rank: int, **outcome: Any) -> None:
        self.ground(flight, {rank})
        operation = flight.copy.operation
        self.send(ev.CopyReport(operation=operation, rank=rank, **outcome))
        assert (operation in self.quiet) == (not flight.unreported)

    def ground(self, flight: Flight, ranks: set[int]) -> None:
        """These ranks are through with a copy, whether they say so or not."""
        flight.unreported -= ranks
        if not flight.unreported:
            del self.flights[flight.copy.operation]
            self.landed.append(flight.copy.operation)

    @hs.rule(number=picks)
    @hs.precondition(lambda self: self.flights)
    def move_without_a_word(self, number: int) -> None:
        self.move(*self.flight(number))

    @hs.rule(count=st.integers(1, 6))
    def report_in_order(self, count: int) -> None:
        for _ in range(count):
            if self.flights:
                self.move(*self.flight(0))
                self.answer(*self.flight(0))

    @hs.rule(number=picks, fault=faults)
    @hs.precondition(lambda self: self.flights)
    def report(self, number: int, fault: str) -> None:
        """Any rank reports on any copy; what it says went wrong holds garbage."""
        flight, rank = self.flight(number)
        self.move(flight, rank)
        position, everything = number % len(flight.copy.keys), fault == "everything"
        spoilt = slice(None) if everything else slice(position, position + bool(fault))
        for slot in flight.copy.target_slots[spoilt]:
            self.memory[flight.copy.target, rank][slot] = GARBAGE
        found = [(position, BlockFault(fault))] if fault and not everything else []
        self.answer(flight, rank, faults=found, failure=fault if everything else "")

    @hs.rule(number=picks)
    @hs.precondition(lambda self: self.landed)
    def report_again(self, number: int) -> None:
        operation, before = self.landed[number % len(self.landed)], freeze(self.machine)
        late = ev.CopyReport(operation=operation, rank=number % 2, failure="late")
        assert self.send(late) == []
        assert freeze(self.machine) == before

    # ---------------------------------------------------------------- the world

    @hs.rule(passed_s=st.sampled_from([0.1, 0.1, 1.0, 3.0]))
    def tick(self, passed_s: float) -> None:
        self.now += passed_s
        self.send(ev.Tick())

    def discover(self, number: int) -> None:
        """Another engine, or an earlier life, left blocks in free slots of a lower tier."""
        tier = self.books.lower_tiers()[number % len(self.books.lower_tiers())]
        self.past.append(("", (*prompt_of(number), 0)))
        keys = keys_of(*self.past[-1])
        parents = dict(zip(keys, [None, *keys[:-1]], strict=True))
        nodes = {key: self.books.nodes.get(key) for key in keys[number % 2 :]}
        absent = [key for key, node in nodes.items() if node < 0 or tier.slot_of[node] < 0]
        slots = tier.pool.free_slots()[: len(absent)]
        found = absent[: len(slots)][:: 1 if number % 3 else -1]
        before = [parents[key] for key in found]
        self.known.update(found)
        for rank in self.ranks:
            for key, slot in zip(found, slots.tolist(), strict=True):
                self.memory[tier.index, rank][slot] = key
        self.send(ev.Discovered(tier=tier.index, keys=found, parents=before, slots=slots))

    @hs.rule(number=picks, kind=troubles)
    def trouble(self, number: int, kind: str) -> None:
        tier, rank = 1 + number % len(self.books.lower_tiers()), number % len(self.ranks)
        match kind:
            case "discover":
                self.discover(number)
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
                self.send(ev.Cancel(operation=self.flight(number)[0].copy.operation))

    def lose(self, rank: int) -> None:
        """A dead rank copies no more, and its device memory is gone."""
        self.memory[0, rank] = [GARBAGE] * len(self.memory[0, rank])
        for flight in list(self.flights.values()):
            self.ground(flight, {rank})
        self.send(ev.RankLost(rank=rank))

    def switch_off(self, tier: int, *, fenced: bool) -> None:
        """A fence is the end of every copy from or to the tier."""
        for flight in list(self.flights.values()):
            if fenced and tier in (flight.copy.source, flight.copy.target):
                self.ground(flight, set(self.ranks))
        self.send(ev.TierOff(tier=tier, fenced=fenced))

    def switch_on(self, tier: int, *, kept: bool) -> None:
        for rank in () if kept else self.ranks:
            self.memory[tier, rank][:] = [GARBAGE] * len(self.memory[tier, rank])
        self.send(ev.TierOn(tier=tier, kept=kept))

    # ---------------------------------------------------------------- what must hold

    @hs.invariant()
    def the_books_add_up(self) -> None:
        audit(self.books)

    @hs.invariant()
    def what_is_ready_holds_the_right_bytes_on_every_rank(self) -> None:
        for tier in self.books.owned_tiers():
            states = tier.pool.state.tolist()
            for rank in self.ranks:
                bytes_there = self.memory[tier.index, rank]
                rows = zip(bytes_there, states, strict=True)
                bytes_there[:] = [GARBAGE if state == FREE else kv for kv, state in rows]
                for node in tier.ready_nodes().tolist():
                    kv = bytes_there[tier.slot_of[node]]
                    assert kv == self.books.nodes.key_of(node), (tier.name, rank, node)

    @hs.invariant()
    def what_a_request_may_read_is_its_own_prompt(self) -> None:
        ready = [one for one in self.requests.values() if one.state is LeaseState.READY]
        for request in ready:
            for block in range(-(-request.done // BLOCK_TOKENS)):
                end = (block + 1) * BLOCK_TOKENS
                right = kv_of(request.tenant, request.tokens[: min(end, request.done)])
                for rank in self.ranks:
                    kv = self.memory[0, rank][request.table[block]]
                    # A copied tail may hold tokens of a fork behind the ones they share.
                    assert kv.startswith(right), (request, block, kv)
                    assert len(kv) <= len(f"{request.tenant}:") + end

    @hs.invariant()
    def readers_of_kv_events_know_what_can_be_matched(self) -> None:
        for event in self.machine.take_kv_events():
            match event:
                case BlocksStored():
                    self.seen |= {(event.tier, key) for key in event.keys}
                case BlocksRemoved():
                    self.seen -= {(event.tier, key) for key in event.keys}
                case _:
                    self.seen.clear()
        cached = self.machine.kv_snapshot().blocks.items()
        assert self.seen == {(tier, key) for tier, rows in cached for key, _ in rows}

    def teardown(self) -> None:
        """When everything has ended, nothing is held and nothing is on its way."""
        self.finish()
        for request in list(self.requests.values()):
            self.release(request, ev.ReleaseLease)
        self.finish()
        for tier in self.machine.statistics().tiers:
            assert (tier.held, tier.filling, tier.leaving, tier.doomed) == (0, 0, 0, 0)
        assert len(self.ended) == len(self.quiet) == self.books.ledger.started

    def finish(self) -> None:
        while self.flights:
            self.report_in_order(1)
            self.what_is_ready_holds_the_right_bytes_on_every_rank()


class CalmLife(CacheLife):
    """Nothing fails, and the tier below has room for all: whatever was published is found."""

    trouble = report = report_again = move_without_a_word = None

    @hs.initialize(ranks=st.integers(1, 2), eviction=st.sampled_from(["lru", "adaptive"]))
    def begin(self, ranks: int, eviction: str) -> None:
        device = TierSettings(name="device", slot_count=14, eviction=eviction)
        host = TierSettings(name="host", slot_count=1024, eviction=eviction)
        self.start([device, host], rank_count=ranks)

    def judge_match(self, granted: ef.Granted, useful: list[Key], event: ev.Acquire) -> None:
        super().judge_match(granted, useful, event)
        if event.reuse and event.load:
            assert granted.cached_tokens == self.longest_known(useful) * BLOCK_TOKENS

    @hs.invariant()
    def copies_end_at_once(self) -> None:
        self.finish()


@pytest.mark.parametrize(
    ("life", "lives"),
    [
        (CacheLife, 60),
        (CalmLife, 15),
        pytest.param(CacheLife, 2000, marks=pytest.mark.long),
        pytest.param(CalmLife, 400, marks=pytest.mark.long),
    ],
)
def test_the_cache_agrees_with_the_model(life: type[CacheLife], lives: int) -> None:
    chosen = settings(patient, derandomize=True, max_examples=lives)
    hs.run_state_machine_as_test(life, settings=chosen)
