"""The decision that changes roles by load: what it must never do, whatever instances report."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_serve.server.balance import (
    GAIN,
    InstanceWork,
    RoleBalance,
    RoleChange,
    best_split,
    load_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACE_S = 8.0
PROMPTS_A_SECOND = 40.0
AMOUNTS = st.floats(0, 100)
COUNTS = st.integers(0, 500)
WORKS = st.builds(
    InstanceWork,
    name=st.sampled_from([f"instance-{number}" for number in range(7)]),
    role=st.sampled_from(["both", "prefill", "decode"]),
    may_change=st.booleans(),
    settled=st.booleans(),
    step_s=AMOUNTS,
    room_s=AMOUNTS,
    computed=COUNTS,
    begun=COUNTS,
    handed=COUNTS,
    waited_s=AMOUNTS,
    waiting=COUNTS,
    in_hand=COUNTS,
)
LOOKS = st.tuples(
    st.floats(0, 3 * PACE_S),
    st.lists(WORKS, max_size=7, unique_by=lambda work: work.name),
    st.booleans(),
)


@settings(max_examples=100)
@given(st.lists(LOOKS, max_size=30))
def test_whatever_is_reported_no_role_loses_its_last_instance(
    looks: list[tuple[float, list[InstanceWork], bool]],
) -> None:
    balance, now, ended = RoleBalance(PACE_S), 0.0, -1.0
    for past_s, works, steady in looks:
        now += past_s
        change = balance.propose(now, works, steady=steady)
        if change is None:
            continue
        [chosen] = [work for work in works if work.name == change.instance]
        assert steady
        assert chosen.may_change
        assert chosen.settled
        assert {chosen.role, change.role} == {"prefill", "decode"}
        assert sum(work.role == chosen.role for work in works) > 1
        assert ended < 0 or now >= ended + PACE_S
        balance.note_end(now, done=True)
        ended = now


class Fleet:
    """Instances under a load whose requests have known costs; the split follows proposals."""

    def __init__(
        self,
        total: int,
        prefills: int,
        prefill_s: float,
        decode_s: float,
        *,
        rate: float = PROMPTS_A_SECOND,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.roles = ["prefill"] * prefills + ["decode"] * (total - prefills)
        self.costs = prefill_s, decode_s
        self.rate = rate
        self.noise = noise
        self.balance = RoleBalance(PACE_S)
        self.now = 0.0

    @property
    def prefills(self) -> int:
        return self.roles.count("prefill")

    @property
    def load(self) -> float:
        return load_of(self.prefills, *self.costs, len(self.roles))

    def looks(self, count: int, *, every_s: float = 1.0) -> Iterator[RoleChange]:
        """Looks so often; yields what was changed."""
        for _ in range(count):
            self.now += every_s
            # As many as the role with the least room lets through, or as come.
            done = min(self.rate, 1 / self.load) * every_s * 1_000
            works = [self._work(number, role, done) for number, role in enumerate(self.roles)]
            change = self.balance.propose(self.now, works)
            if change is not None:
                self.roles[int(change.instance)] = change.role
                self.balance.note_end(self.now, done=True)
                yield change

    def _work(self, number: int, role: str, done: float) -> InstanceWork:
        mine = done / self.roles.count(role)
        cost = self.costs[role == "decode"] * self.noise() / 1_000
        return InstanceWork(
            name=str(number),
            role="prefill" if role == "prefill" else "decode",
            step_s=mine * cost if role == "prefill" else 0.0,
            room_s=mine * cost if role == "decode" else 0.0,
            computed=round(mine) if role == "prefill" else 0,
            begun=round(mine) if role == "decode" else 0,
            handed=round(mine) if role == "decode" else 0,
            waited_s=mine,
            in_hand=number,
        )


COSTS = st.floats(0.02, 2.0)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[int, int]:
    total = draw(st.integers(2, 12))
    return total, draw(st.integers(1, total - 1))


@settings(max_examples=50)
@given(fleets(), COSTS, COSTS)
def test_under_a_constant_load_it_goes_to_the_best_split_and_stays_there(
    sizes: tuple[int, int], prefill_s: float, decode_s: float
) -> None:
    total, prefills = sizes
    fleet = Fleet(total, prefills, prefill_s, decode_s)
    best = best_split(prefill_s, decode_s, total)

    changes = list(fleet.looks(40 * total))

    assert len({change.role for change in changes}) <= 1
    assert len(changes) == abs(fleet.prefills - prefills) <= abs(best - prefills)
    if fleet.rate * fleet.load > 1:
        # Rounding to whole prompts: a hundredth.
        assert load_of(best, prefill_s, decode_s, total) >= (1 - GAIN) * fleet.load * 0.99
    assert list(fleet.looks(20 * total)) == []


@settings(max_examples=50)
@given(fleets(), COSTS, COSTS, st.integers(0, 1 << 32))
def test_noise_in_what_instances_report_takes_no_change_back(
    sizes: tuple[int, int], prefill_s: float, decode_s: float, seed: int
) -> None:
    total, prefills = sizes
    rng = Random(seed)
    fleet = Fleet(total, prefills, prefill_s, decode_s, noise=lambda: rng.uniform(0.8, 1.2))

    changes = list(fleet.looks(60 * total))

    assert len({change.role for change in changes}) <= 1
    assert len(changes) < total


@settings(max_examples=50)
@given(fleets(), COSTS, COSTS)
def test_instances_that_are_hardly_used_keep_their_roles(
    sizes: tuple[int, int], prefill_s: float, decode_s: float
) -> None:
    total, prefills = sizes
    fleet = Fleet(total, prefills, prefill_s, decode_s)
    fleet.rate = 0.4 / fleet.load

    assert list(fleet.looks(100)) == []


LONG_PROMPTS, LONG_ANSWERS = (0.6, 0.15), (0.1, 0.4)


def test_a_load_that_shifts_moves_instances_one_at_a_time_with_a_pause() -> None:
    fleet = Fleet(4, 2, *LONG_PROMPTS)
    times = []
    for costs in (LONG_PROMPTS, LONG_ANSWERS, LONG_PROMPTS):
        fleet.costs = costs
        for change in fleet.looks(120):
            times.append(fleet.now)
            assert change.role == ("prefill" if costs is LONG_PROMPTS else "decode")
        assert fleet.prefills == best_split(*costs, 4)

    assert len(times) == 5
    assert all(later - before >= PACE_S for before, later in pairwise(times))


def test_a_wish_of_a_moment_changes_nothing() -> None:
    fleet = Fleet(4, 2, *LONG_PROMPTS)
    for _ in range(30):
        # It is never steady for half of the pace.
        assert list(fleet.looks(3)) == []
        fleet.now += 0.5
        assert fleet.balance.propose(fleet.now, [], steady=False) is None


def test_after_a_failed_change_it_waits_longer() -> None:
    def until_change(*, done: bool) -> float:
        fleet = Fleet(4, 2, *LONG_PROMPTS)
        assert next(fleet.looks(100)).role == "prefill"
        fleet.roles = ["prefill", "prefill", "decode", "decode"]
        fleet.balance.note_end(fleet.now, done=done)
        before = fleet.now
        next(fleet.looks(100))
        return fleet.now - before

    assert until_change(done=True) == pytest.approx(PACE_S)
    assert until_change(done=False) == pytest.approx(4 * PACE_S)


def test_the_least_busy_instance_changes_of_those_whose_role_no_operator_chose() -> None:
    fleet = Fleet(5, 2, *LONG_PROMPTS)
    work = fleet._work
    fleet._work = lambda number, role, done: (  # type: ignore[method-assign]
        work(number, role, done)
        if number != 2
        else InstanceWork(name="2", role="decode", may_change=False)
    )

    assert next(fleet.looks(100)).instance == "3"


def test_what_is_wanted_is_said_with_its_numbers() -> None:
    why = next(Fleet(4, 2, *LONG_PROMPTS).looks(100)).why

    assert "prefill instances are 100% in use" in why
    assert "for which 3 and 1 of them are best" in why
