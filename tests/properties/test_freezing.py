"""Frozen states: equal for equal histories, and untouched by events that are refused."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.fixtures.frozen import freeze
from penstock.cache.operations import BlockFault
from penstock.cache.settings import CacheSettings, TierSettings, WriteKind, WritePolicy
from penstock.cache.states import LeaseState
from penstock.errors import InvariantViolation, PenstockError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.machine import CacheMachine
from penstock.vocabulary.keys import LeaseId, OperationId, PinId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.machine.books import LeaseRecord
    from penstock.vocabulary.keys import Key

BLOCK_TOKENS = 2

histories = given(
    seed=st.integers(0, 1_000_000),
    length=st.integers(40, 160),
    eviction=st.sampled_from(["lru", "adaptive"]),
)
thorough = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    suppress_health_check=list(HealthCheck),
)


def keys_of(prompt: str) -> list[Key]:
    return [prompt[: end + 1].encode().rjust(16, b".") for end in range(len(prompt))]


def make_machine(eviction: str) -> CacheMachine:
    def tier(name: str, slot_count: int, write: WriteKind) -> TierSettings:
        return TierSettings(
            name=name,
            slot_count=slot_count,
            write=WritePolicy(kind=write, hits=1),
            eviction=eviction,
            low_watermark=0.2,
            high_watermark=0.4,
        )

    lower = (tier("host", 6, WriteKind.WRITE_THROUGH), tier("disk", 8, WriteKind.WRITE_BACK))
    return CacheMachine(
        CacheSettings(
            device=tier("device", 8, WriteKind.NONE),
            tiers=lower,
            block_tokens=BLOCK_TOKENS,
            rank_count=2,
            operation_timeout_s=30.0,
        ),
        incarnation=1,
    )


class Author:
    """Writes the next event of a history: mostly one that makes sense, sometimes nonsense."""

    def __init__(self, machine: CacheMachine, seed: int) -> None:
        self.books = machine._books
        self.random = Random(seed)
        self.prompts: dict[LeaseId, str] = {}

    def event(self) -> ev.Event:
        if self.random.random() < 0.2:
            return self.random.choice((self.request, self.world, self.nonsense))()
        ask = self.step if len(self.books.leases) > 2 else self.request
        return self.random.choice((ask, ask, self.step, self.report, self.report))()

    def note(self, event: ev.Event, effects: Iterable[ef.Effect]) -> None:
        """Remembers the prompts of leases that were granted."""
        for effect in effects:
            if isinstance(effect, ef.Granted) and isinstance(event, ev.Acquire):
                self.prompts[effect.lease] = b"".join(event.keys[-1:]).decode().lstrip(".")
            elif isinstance(effect, ef.Granted) and isinstance(event, ev.Fork):
                self.prompts[effect.lease] = self.prompts[event.lease]

    def request(self) -> ev.Event:
        random = self.random
        prompt = "".join(random.choices("ab", k=random.randint(0, 5)))
        return ev.Acquire(
            request="r",
            keys=keys_of(prompt),
            token_count=BLOCK_TOKENS * len(prompt) + 1,
            reuse=random.random() < 0.9,
            load=random.random() < 0.9,
            store=random.random() < 0.9,
            priority=random.choice((0, 0, 1)),
            ttl_s=random.choice((None, None, 4.0)),
        )

    def step(self) -> ev.Event:
        """A lease goes on, or ends."""
        if not self.books.leases:
            return ev.Tick()
        lease = self.random.choice(list(self.books.leases.values()))
        ends: list[ev.Event] = [ev.ReleaseLease(lease=lease.id), ev.Preempt(lease=lease.id)]
        if lease.state is not LeaseState.READY:
            return self.random.choice([*ends, ev.Tick(), ev.Tick()])
        commit = self.commit(lease)
        grow = ev.Grow(lease=lease.id, token_count=lease.token_count + self.random.randint(0, 5))
        fork = ev.Fork(lease=lease.id, request="fork")
        return self.random.choice([*ends, *ends, *[commit] * 5, grow, fork])

    def commit(self, lease: LeaseRecord) -> ev.Event:
        room = len(lease.table) * BLOCK_TOKENS
        token_count = self.random.randint(lease.token_count, room)
        prompt = self.prompts.get(lease.id, "") + "b" * 20
        self.prompts[lease.id] = prompt
        keys = keys_of(prompt[: token_count // BLOCK_TOKENS])[lease.published_blocks :]
        return ev.Commit(lease=lease.id, token_count=token_count, keys=keys)

    def report(self) -> ev.Event:
        if not self.books.ledger.operations:
            return ev.Tick()
        operation = self.random.choice(list(self.books.ledger.operations.values()))
        rank = self.random.choice(sorted(operation.waiting_ranks))
        position = self.random.randrange(len(operation.keys))
        faults = [(position, self.random.choice(list(BlockFault)))]
        return ev.CopyReport(
            operation=operation.id,
            rank=rank,
            faults=faults if self.random.random() < 0.2 else [],
            failure="broken" if self.random.random() < 0.1 else "",
        )

    def world(self) -> ev.Event:
        random = self.random
        tier, flag, rank = random.randint(1, 2), random.random() < 0.5, random.randint(0, 1)
        keys = keys_of("".join(random.choices("ab", k=3)))
        free = self.books.tier(tier).pool.free_slots()[:3]
        found = ev.Discovered(
            tier=tier, keys=keys[: len(free)], parents=[None, *keys][: len(free)], slots=free
        )
        return random.choice(
            [
                ev.RankLost(rank=rank),
                *[ev.RankBack(rank=rank)] * 3,
                ev.TierOff(tier=tier, fenced=flag),
                *[ev.TierOn(tier=tier, kept=flag)] * 3,
                ev.Prefetch(keys=keys, cause="whim"),
                ev.PinBlocks(keys=keys[:2]),
                ev.UnpinBlocks(pin=PinId(random.randint(1, 4))),
                ev.Reset(why="test"),
                *[found] * 3,
            ]
        )

    def nonsense(self) -> ev.Event:
        """Events that cannot be right, or only by luck."""
        random = self.random
        lease, keys = LeaseId(random.randint(1, 30)), keys_of("abba"[: random.randint(0, 4)])
        operation = OperationId(random.randint(1, 2), random.randint(0, 1), random.randint(1, 50))
        slots = np.array([[0]], dtype=np.int32)
        some: list[Callable[[], ev.Event]] = [
            lambda: ev.Acquire(request="r", keys=keys, token_count=random.randint(-1, 9)),
            lambda: ev.Acquire(request="r", keys=keys * 2, token_count=4 * len(keys) + 1),
            lambda: ev.Acquire(request="r", keys=keys_of("a" * 12), token_count=24),
            lambda: ev.Commit(lease=lease, token_count=random.randint(-1, 12), keys=keys),
            lambda: ev.Grow(lease=lease, token_count=random.randint(-5, 99)),
            lambda: ev.Fork(lease=lease, request="fork"),
            lambda: ev.ReleaseLease(lease=lease),
            lambda: ev.Preempt(lease=lease),
            lambda: ev.CopyReport(operation=operation, rank=3, faults=[(9, BlockFault.CORRUPT)]),
            self.report_outside,
            lambda: ev.Cancel(operation=operation),
            lambda: ev.PinBlocks(keys=keys_of("abababab")),
            lambda: ev.PinBlocks(keys=keys * 2),
            lambda: ev.RankLost(rank=2),
            lambda: ev.TierOff(tier=random.choice((0, 3)), fenced=True),
            lambda: ev.TierOn(tier=-1, kept=False),
            lambda: ev.Discovered(tier=1, keys=keys, parents=[None], slots=slots[0] + 7),
            lambda: ev.Load(keys=keys[:1], slots=slots, cause="r"),
            lambda: ev.Save(keys=keys[:1], slots=slots, cause="r"),
        ]
        return random.choice(some)()

    def report_outside(self) -> ev.Event:
        for operation in self.books.ledger.operations.values():
            rank = min(operation.waiting_ranks)
            fault = (len(operation.keys), BlockFault.UNREADABLE)
            return ev.CopyReport(operation=operation.id, rank=rank, faults=[fault])
        return ev.Tick()


def told(machine: CacheMachine, event: ev.Event, now: float) -> list[ef.Effect] | None:
    """The effects of an event, or `None` if it was refused; a defect of ours is not excused."""
    try:
        return machine.handle(event, now)
    except InvariantViolation:
        raise
    except (PenstockError, ValueError):
        return None


def lived(seed: int, length: int, eviction: str) -> tuple[CacheMachine, list[ev.Event]]:
    """A machine with a past, and that past."""
    machine = make_machine(eviction)
    author, past = Author(machine, seed), []
    for now in range(length):
        past.append(author.event())
        author.note(past[-1], told(machine, past[-1], float(now)) or ())
    return machine, past


def leaving_order(machine: CacheMachine) -> list[list[int]]:
    """In which order everything would leave; the machine is of no use afterwards."""
    orders: list[list[int]] = []
    for tier in machine._books.owned_tiers():
        orders.append([])
        while (victim := tier.pop_victim()) is not None:
            orders[-1].append(victim)
    return orders


@thorough
@histories
def test_an_event_that_is_refused_changes_nothing(seed: int, length: int, eviction: str) -> None:
    machine = make_machine(eviction)
    author = Author(machine, seed)

    for now in range(length):
        event, before = author.event(), freeze(machine)
        effects = told(machine, event, float(now))
        assert effects is not None or freeze(machine) == before, event
        author.note(event, effects or ())
        machine.audit()


@thorough
@histories
def test_refused_events_might_as_well_not_have_been_sent(
    seed: int, length: int, eviction: str
) -> None:
    full, past = lived(seed, length, eviction)
    tried, sifted = make_machine(eviction), make_machine(eviction)

    for now, event in enumerate(past):
        if told(tried, event, float(now)) is not None:
            sifted.handle(event, float(now))

    assert freeze(sifted) == freeze(full)
    assert leaving_order(sifted) == leaving_order(full)


@thorough
@histories
def test_equal_histories_freeze_to_equal_tuples_with_equal_hashes(
    seed: int, length: int, eviction: str
) -> None:
    first, past = lived(seed, length, eviction)
    second = make_machine(eviction)

    for now, event in enumerate(past):
        with suppress(PenstockError, ValueError):
            second.handle(event, float(now))

    assert freeze(first) == freeze(second)
    assert hash(freeze(first)) == hash(freeze(second))


@thorough
@histories
def test_looking_changes_nothing(seed: int, length: int, eviction: str) -> None:
    looked_at, _ = lived(seed, length, eviction)
    left_alone, _ = lived(seed, length, eviction)

    looked_at.statistics()
    looked_at.kv_snapshot()
    looked_at.take_kv_events()
    looked_at.story("r")
    looked_at.story(keys_of("a")[0])
    looked_at.next_deadline()
    looked_at.handle(ev.Lookup(keys=keys_of("abab")), 999.0)
    looked_at.audit()

    assert freeze(looked_at) == freeze(left_alone)
    assert leaving_order(looked_at) == leaving_order(left_alone)
