"""Every public call with arguments that make no sense: it is refused, and nothing has changed.

The calls are found by looking at the classes: a new one without a case here fails the first test.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from lab.fixtures.frozen import freeze
from penstock.errors import PenstockError
from penstock.runtime.base import BaseCache
from penstock.runtime.copy_executor import EngineSteps
from tests.runtime.conftest import Engine, Fleet, World, configure

if TYPE_CHECKING:
    from collections.abc import Callable


class IndexFails(Exception):  # noqa: N818 - what an argument of the caller's own does
    """Raised by an argument itself."""


class RaisingIndex:
    """An int that cannot be read."""

    def __index__(self) -> int:
        raise IndexFails


class RaisingRepr:
    """Nothing that could be an argument, and it cannot even be shown."""

    def __repr__(self) -> str:
        raise IndexFails


def foreign_lease() -> penstock.Lease:
    lease = Engine(configure()).cache.acquire(range(9))
    lease.release()
    return lease


NUMBERS: list[Any] = [
    *(-1, -(2**70), 2**70, True, False, 0.5, 5.0, 10 / 2, -1.0, 1e308, math.nan, math.inf),
    *(-math.inf, np.float32(2.5), np.float64("nan"), np.True_, np.int64(-3), Fraction(1, 3), 1j),
]
OTHERS: list[Any] = [
    *(None, "", "7", "\ud800", "x" * 5000, b"", b"short", bytearray(3), [], [1.5], ["x"], [None]),
    *([[1, 2], [3]], [-1], [2**32], [2**33], [[1]], (), {}, {"a": 1}, set(), object(), object),
    *(RaisingIndex(), RaisingRepr(), [RaisingIndex()], [RaisingRepr()], Exception("x"), len),
    *(np.array([1.5, 2.0]), np.array([[1, 2]]), np.array([-1]), np.array([2**40]), np.array("x")),
    *(np.array([None]), np.empty(0), torch.tensor([1.5]), torch.zeros(2, 2, dtype=torch.int64)),
    *(torch.tensor(2.5), torch.tensor([-5]), torch.zeros(3, device="meta", dtype=torch.int64)),
    *(range(10**12), range(2**70), memoryview(b"abc"), np.datetime64("now"), foreign_lease()),
    *(
        [torch.zeros(1, device="meta", dtype=torch.int64)[0]],
        torch.tensor([True])[0],
        np.float16("inf"),
    ),
    *([b"x" * 16] * 3, (b"x" * 16, 5), "a\x00b", b"x" * 16, np.array([1, 2], dtype=np.uint16)),
    *(np.ma.array([1, 2]), slice(1), iter([1]), ..., type, 10**400, -(10**400), 1e-320),
]
HOSTILE = [*NUMBERS, *OTHERS]


class Case(NamedTuple):
    """A call, with arguments that it takes."""

    of: Callable[[Scene], Any]
    arguments: dict[str, Callable[[Scene], Any]]
    """What it takes, and something right for each."""
    positional: tuple[str, ...] = ()


class Scene:
    """A cache with something in it, an offload, an owner with ranks, and what they have given."""

    def __init__(self) -> None:
        self.engine = Engine(configure())
        self.engine.turn(list(range(14)))
        self.cache = self.engine.cache
        self.lease = self.cache.acquire(list(range(10)), request="running")
        self.released = self.cache.acquire([1], request="ended")
        self.released.release()
        self.pin = self.cache.pin(list(range(8)))
        self.world = World()
        self.offload = self.world.offload
        self.fleet = Fleet()
        self.owner = self.fleet.owner
        self.rank = self.fleet.ranks[0]
        self.keys = self.fleet.keys(2)
        self.world.saved(self.keys, [0, 1])
        self.started = self.offload.load(self.keys, [2, 3], cause="load")
        self.found = self.offload.lookup(self.keys)
        self.steps = self.cache.steps
        self.readable = os.eventfd(1)

    def __del__(self) -> None:
        os.close(self.readable)

    def freeze(self) -> list[object]:
        frozen: list[object] = []
        for each in (self.cache, self.offload, self.owner):
            frozen += [freeze(each._driver.machine), each.statistics(), each.health()]
            each.audit()
        lease = self.lease
        told = (lease.state, lease.token_count, lease.cached_tokens, lease.block_table.tolist())
        rank = self.rank
        return [
            *frozen,
            told,
            len(self.offload._results),
            rank.busy,
            rank._last_plan,
            rank._finishing,
        ]


def case(
    of: Callable[[Scene], Any], /, *positional: str, **arguments: Callable[[Scene], Any]
) -> Case:
    return Case(of, arguments, positional)


def text(_: Scene) -> str:
    return "why"


CASES: dict[str, Case] = {
    "Cache.acquire": case(
        lambda s: s.cache.acquire,
        "tokens",
        tokens=lambda _: [5, 6, 7],
        request=text,
        tenant=text,
        adapter=text,
        items=lambda _: (),
        reuse=lambda _: True,
        load=lambda _: True,
        store=lambda _: True,
        priority=lambda _: 1,
        ttl_s=lambda _: 5.0,
        keep_tokens=lambda _: 4,
        load_timeout_s=lambda _: 5.0,
        search_s=lambda _: 5.0,
    ),
    "Cache.prefetch": case(
        lambda s: s.cache.prefetch,
        "tokens",
        tokens=lambda _: [5, 6, 7],
        request=text,
        tenant=text,
        adapter=text,
        items=lambda _: (),
        load_timeout_s=lambda _: 5.0,
    ),
    "Cache.pin": case(
        lambda s: s.cache.pin, "tokens", tokens=lambda _: [1], tenant=text, adapter=text
    ),
    "Cache.reset": case(lambda s: s.cache.reset, why=text),
    "Cache.change_weights": case(lambda s: s.cache.change_weights, version=text),
    "Lease.grow": case(lambda s: s.lease.grow, token_count=lambda _: 11),
    "Lease.commit": case(lambda s: s.lease.commit, tokens=lambda s: [s.lease.token_count]),
    "Lease.commit_prompt": case(lambda s: s.lease.commit_prompt, token_count=lambda _: 9),
    "Lease.fork": case(lambda s: s.lease.fork, request=text),
    "Lease.join": case(lambda s: s.released.join),
    "Lease.take_verdict": case(lambda s: s.lease.take_verdict),
    "Lease.preempt": case(lambda s: s.released.preempt),
    "Lease.release": case(lambda s: s.released.release),
    "Pin.unpin": case(lambda s: s.pin.unpin),
    "BaseCache.statistics": case(lambda s: s.cache.statistics),
    "BaseCache.story": case(lambda s: s.cache.story, of=text),
    "BaseCache.copies": case(lambda s: s.cache.copies),
    "BaseCache.take_kv_events": case(lambda s: s.cache.take_kv_events),
    "BaseCache.kv_snapshot": case(lambda s: s.cache.kv_snapshot),
    "BaseCache.audit": case(lambda s: s.cache.audit),
    "BaseCache.health": case(lambda s: s.cache.health),
    "BaseCache.adopt_thread": case(lambda s: s.cache.adopt_thread),
    "BaseCache.step": case(lambda s: s.cache.step, budget_bytes=lambda _: 1, again=lambda _: False),
    "BaseCache.computed": case(
        lambda s: s.cache.computed, token_count=lambda _: 5, seconds=lambda _: 1.0
    ),
    # A copy is under way, and a descriptor is readable: whatever the deadline, it does not wait.
    "BaseCache.wait": case(
        lambda s: s.offload.wait, deadline=lambda s: s.world.now, descriptors=lambda _: ()
    ),
    "RankRegistry.take_plan": case(lambda s: s.owner.ranks.take_plan),
    "RankRegistry.receive": case(lambda s: s.owner.ranks.receive, report=lambda _: b"no report"),
    "RankRegistry.lose": case(lambda s: s.owner.ranks.lose, rank=lambda _: 7, why=text),
    "RankRegistry.rejoin": case(lambda s: s.owner.ranks.rejoin, facts=lambda s: s.rank.facts),
    "BaseCache.drain": case(lambda s: s.owner.drain),
    "BaseCache.store_status": case(lambda s: s.cache.store_status, cause=text),
    # A lease is open: it does not sleep.
    "BaseCache.sleep": case(lambda s: s.cache.sleep, host=lambda _: True),
    "BaseCache.wake": case(lambda s: s.cache.wake),
    "BaseCache.wait_for_tiers": case(lambda s: s.cache.wait_for_tiers, timeout_s=lambda _: 0.0),
    "BaseCache.close": case(lambda s: s.cache.close, timeout_s=lambda _: 0.0),
    "Offload.lookup": case(
        lambda s: s.offload.lookup,
        "keys",
        keys=lambda s: s.keys,
        last=lambda s: s.found,
        held=lambda _: 0,
    ),
    "Offload.load": case(
        lambda s: s.offload.load,
        "keys",
        "slots",
        keys=lambda s: s.keys,
        slots=lambda _: [2, 3],
        cause=text,
        priority=lambda _: 1,
        ttl_s=lambda _: 5.0,
        deadline=lambda s: s.world.now + 5,
    ),
    "Offload.save": case(
        lambda s: s.offload.save,
        "keys",
        "slots",
        keys=lambda s: s.keys,
        slots=lambda _: [4, 5],
        cause=text,
        parent=lambda _: None,
        tenant=text,
        priority=lambda _: 0,
        ttl_s=lambda _: None,
        deadline=lambda _: None,
    ),
    "Offload.let_go": case(
        lambda s: s.offload.let_go, "keys", keys=lambda s: s.keys, keep=lambda _: 1
    ),
    "Offload.prefetch": case(
        lambda s: s.offload.prefetch, "keys", keys=lambda s: s.keys, cause=text, deadline=text
    ),
    "Offload.sinking": case(lambda s: s.offload.sinking, "keys", keys=lambda s: s.keys),
    "Offload.cancel": case(lambda s: s.offload.cancel, operation=lambda s: s.started.operations[0]),
    "Offload.hub_counts": case(lambda s: s.offload.hub_counts),
    "Offload.poll": case(lambda s: s.offload.poll, most=lambda _: 5),
    "Offload.reset": case(lambda s: s.offload.reset, why=text),
    "Rank.take": case(lambda s: s.rank.take, plan=lambda _: b"no plan"),
    "Rank.step": case(lambda s: s.rank.step, budget_bytes=lambda _: 1),
    "Rank.wait": case(
        lambda s: s.rank.wait,
        deadline=lambda _: time.monotonic(),
        channels=lambda _: (),
        descriptors=lambda s: [s.readable],
    ),
    "Rank.give_back": case(lambda s: s.rank.give_back, tier=lambda s: s.rank.facts.tiers[0].name),
    "Rank.take_again": case(lambda s: s.rank.take_again),
    "Rank.finish": case(lambda s: s.rank.finish, timeout_s=lambda _: -1.0),
    "Rank.close": case(lambda s: s.rank.close, timeout_s=lambda _: -1.0),
    "Rank.adopt_thread": case(lambda s: s.rank.adopt_thread),
    "EngineSteps.submitted": case(
        lambda s: s.steps.submitted, stream=lambda _: 0, slots=lambda _: [0]
    ),
    "EngineSteps.guard": case(lambda s: s.steps.guard, stream=lambda _: 0, slots=lambda _: [0]),
    "EngineSteps.joinable": case(
        lambda s: s.steps.joinable, "loads", loads=lambda _: (), step_s=lambda _: 1.0
    ),
    "EngineSteps.join": case(lambda s: s.steps.join, loads=lambda _: ()),
    "EngineSteps.wait_layer": case(
        lambda s: s.steps.wait_layer, layer=lambda _: 0, stream=lambda _: 0
    ),
}
NOT_FOR_ENGINES = {"Lease.change", "EngineSteps.close"}
"""Public to the cache that made the lease and to a rank that ends, and to nobody else."""


class Stage:
    """A scene that nothing has changed, for the next example: to set one costs most of the time."""

    scene: Scene | None = None
    frozen: list[object] | None = None
    """What it is like, where that is known."""


def public_calls() -> dict[str, inspect.Signature]:
    found: dict[str, inspect.Signature] = {}
    owners: list[type] = [penstock.Cache, penstock.Offload, penstock.Lease, penstock.Pin]
    for owner in (BaseCache, *owners, penstock.RankRegistry, penstock.Rank, EngineSteps):
        for name, member in vars(owner).items():
            if inspect.isfunction(member) and not name.startswith("_"):
                found[f"{owner.__name__}.{name}"] = inspect.signature(member)
    return {name: each for name, each in found.items() if name not in NOT_FOR_ENGINES}


def test_every_public_call_has_a_case_for_every_argument() -> None:
    arguments = {
        name: set(signature.parameters) - {"self"} for name, signature in public_calls().items()
    }

    assert {name: set(each.arguments) for name, each in CASES.items()} == arguments


def try_call(name: str, wrong: dict[str, Any]) -> None:
    """Makes a call with wrong arguments; if it is refused, everything is as it was."""
    scene, tried = Stage.scene or Scene(), CASES[name]
    before = Stage.frozen or scene.freeze()
    Stage.scene = Stage.frozen = None
    arguments = {each: make(scene) for each, make in tried.arguments.items()} | wrong
    try:
        positional = [arguments.pop(each) for each in tried.positional]
        tried.of(scene)(*positional, **arguments)
    except (penstock.InvariantViolation, penstock.AccessError):
        raise
    except (ValueError, PenstockError):
        pass
    except IndexFails:
        if not any(isinstance(value, RaisingIndex | list) for value in wrong.values()):
            raise
    else:
        # It was no nonsense to this call; and then what it did must be sound.
        for each in (scene.cache, scene.offload, scene.owner):
            if not each._access.closed:
                each.audit()
        return
    assert scene.freeze() == before
    Stage.scene, Stage.frozen = scene, before


def go_on() -> None:
    """Whatever was refused, a cache and an owner go on as if nothing had been asked for."""
    if (scene := Stage.scene) is not None:
        scene.cache.acquire([9, 9, 9]).release()
        scene.cache.step()
        scene.owner.step()
        Stage.frozen = None


with_arguments = [name for name, each in CASES.items() if each.arguments]
closing = pytest.mark.filterwarnings("ignore:the cache was closed with open:ResourceWarning")


@closing
@pytest.mark.parametrize("name", with_arguments)
def test_what_is_refused_changes_nothing(name: str) -> None:
    for argument in CASES[name].arguments:
        for value in HOSTILE:
            try_call(name, {argument: value})
        go_on()


number = st.integers() | st.floats() | st.fractions() | st.booleans()
anything = number | st.none() | st.text() | st.binary() | st.lists(number | st.binary(), max_size=5)


@closing
@settings(
    deadline=None,
    database=None,
    max_examples=150,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(drawn=st.data())
def test_whatever_is_drawn_is_done_or_refused(drawn: st.DataObject) -> None:
    name = drawn.draw(st.sampled_from(with_arguments))
    arguments = sorted(CASES[name].arguments)
    chosen = drawn.draw(st.lists(st.sampled_from(arguments), min_size=1, max_size=2, unique=True))

    try_call(name, {argument: drawn.draw(anything) for argument in chosen})
    go_on()


@pytest.mark.parametrize("value", [-1, 10 / 2, 0.5, math.nan, True, None, "5", [5], 1j])
def test_a_lease_grows_by_whole_numbers_alone(value: Any) -> None:
    scene = Scene()
    before = scene.freeze()

    with pytest.raises(ValueError, match=r"token_count is .*, must be an int of at least 0"):
        scene.lease.grow(value)

    assert scene.freeze() == before


@pytest.mark.parametrize("value", [12, np.int32(12), np.uint64(12), torch.tensor(12)])
def test_whatever_is_an_index_is_an_int(value: Any) -> None:
    scene = Scene()

    scene.lease.grow(value)

    assert len(scene.lease.block_table) == 3


@pytest.mark.parametrize(
    "tokens",
    [
        torch.arange(14),
        torch.arange(14, dtype=torch.int32),
        torch.arange(28)[::2] // 2,
        np.arange(14),
        memoryview(np.arange(14, dtype=np.uint32)),
    ],
    ids=["torch", "torch int32", "torch strided", "numpy", "memoryview"],
)
def test_tokens_may_be_tensors_and_arrays(tokens: Any) -> None:
    scene = Scene()

    with scene.cache.acquire(tokens) as lease:
        assert lease.cached_tokens == 12
        lease.commit(tokens[12:])


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (torch.arange(3.0), "float32"),
        (torch.zeros(2, 2, dtype=torch.int64), "2 dimensions"),
        (torch.tensor([-1]), r"tokens\[0\] is -1"),
        (torch.tensor([1, 2**32]), r"tokens\[1\] is 4294967296"),
        (torch.zeros(3, device="meta", dtype=torch.int64), "must lie in host memory"),
        (np.array([1.0]), "float64"),
        (np.array([[1]]), "2 dimensions"),
        ([3, 2**32], r"tokens\[1\] is 4294967296"),
        ("", "must be a sequence of ints; got str"),
        (range(10**12), "tokens are more than 268435456"),
    ],
)
def test_tokens_that_are_none_are_refused_in_words(tokens: Any, problem: str) -> None:
    scene = Scene()

    for call in (scene.cache.acquire, scene.cache.pin, scene.lease.commit):
        with pytest.raises(ValueError, match=problem):
            call(tokens)


@pytest.mark.parametrize("deadline", [-3600.0, -math.inf])
def test_a_time_of_long_ago_is_no_deadline(deadline: float) -> None:
    scene = Scene()

    for call in (scene.cache.wait, scene.offload.wait):
        with pytest.raises(ValueError, match=r"in the past.* not a number of seconds"):
            call(deadline)
    with pytest.raises(ValueError, match=r"in the past.* not a number of seconds"):
        scene.offload.prefetch(scene.keys, cause="x", deadline=deadline)


def test_a_deadline_that_has_just_passed_is_one() -> None:
    scene = Scene()
    scene.engine.settle()

    assert not scene.cache.wait(scene.engine.now - 1.0)
