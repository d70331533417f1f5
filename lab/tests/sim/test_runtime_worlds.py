"""Worlds around the production runtime: bugs planted in it are found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.sim.runtime import RuntimeWorld
from lab.sim.runtime.conditions import Way
from lab.tests.sim.planting import Plant, first_failure
from penstock.runtime import rank as rank_module
from penstock.runtime.copy_executor import CopyExecutor
from penstock.runtime.driver import Driver
from penstock.runtime.messages import decode_plan
from penstock.runtime.rank import Rank
from penstock.runtime.rank_links import MissingReports
from penstock.vocabulary.checksums import CellSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lab.sim.conditions import Conditions
    from penstock.runtime.messages import Plan
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.keys import Key

SEARCHED = range(300)
"""A planted bug is found in one of these."""


# S3-FIFO let a block leave that was just saved, before older ones with hits, as it should; the
# check took that for a loss.
@pytest.mark.parametrize("seed", [700002325])
def test_what_once_failed_does_not_fail_again(seed: int) -> None:
    RuntimeWorld(seed).run()


def test_plans_travel_in_every_way() -> None:
    ways = {RuntimeWorld(seed).ways.way for seed in range(40)}

    assert ways == set(Way)


def test_a_world_with_plenty_has_no_faults() -> None:
    worlds = [world for world in map(RuntimeWorld, range(100)) if world.conditions.healthy]

    rates = ("cut", "lose", "repeat", "garble", "shutdown")
    assert worlds
    assert not [w for w in worlds if any(getattr(w.ways, rate) for rate in rates)]


# ---------------------------------------------------------------- planted bugs


def plant_unnoticed_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that its engine calls lost is counted on all the same."""
    monkeypatch.setattr(Driver, "lose_rank", lambda *_: [])


def plant_orders_of_an_earlier_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was opened anew does what its earlier life was told."""

    def decode_without_lives(message: bytes) -> Plan:
        return decode_plan(message)._replace(lives=())

    monkeypatch.setattr(rank_module, "decode_plan", decode_without_lives)


def plant_plans_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that arrives twice is carried out twice."""
    take = Rank.take

    def take_again(self: Rank, plan: bytes) -> None:
        sequence = decode_plan(plan).sequence
        if sequence <= self._last_plan:
            self._last_plan = sequence - 1
        take(self, plan)

    monkeypatch.setattr(Rank, "take", take_again)


def plant_lost_plans_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that comes up in a plan is forgotten by one rank in the middle of it."""
    submit = CopyExecutor.submit

    def submit_some(self: CopyExecutor, copy: object) -> None:
        if getattr(copy, "operation").sequence % 7:  # noqa: B009 - of whatever kind
            submit(self, copy)  # type: ignore[arg-type]

    monkeypatch.setattr(CopyExecutor, "submit", submit_some)


def plant_blind_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes have the same sum."""

    def sum_nothing(
        self: CellSpan,
        blocks: NDArray[np.uint8],
        keys: Sequence[Key],
        algorithm: Algorithm,
        *,
        salt: int,
    ) -> NDArray[np.uint64]:
        return np.zeros_like(sum_blocks(self, blocks, keys, algorithm, salt=salt))

    sum_blocks = CellSpan.sum_blocks
    monkeypatch.setattr(CellSpan, "sum_blocks", sum_nothing)


def plant_careless_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shutdown leaves copies running without telling anybody how they ended."""
    monkeypatch.setattr(Driver, "_cancel", lambda *_: [])


def plant_owner_that_never_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that is lost is not missed by anybody."""
    monkeypatch.setattr(MissingReports, "due", lambda *_: ())


PLANTED = [
    pytest.param(plant_unnoticed_loss, 6, id="unnoticed loss"),
    pytest.param(plant_plans_taken_twice, 0, id="plans taken twice"),
    pytest.param(plant_lost_plans_unnoticed, 11, id="copies forgotten"),
    pytest.param(plant_owner_that_never_asks, 16, id="lost reports are not missed"),
    pytest.param(plant_blind_checksums, 16, id="blind checksums"),
    pytest.param(plant_careless_close, 56, id="careless close"),
]
"""What is planted, and a seed that has found it: looked at first."""


class SteadyWorld(RuntimeWorld):
    """A world whose tiers keep their size, so that ranks have more to do."""

    def _draw_conditions(self) -> Conditions:
        return replace(super()._draw_conditions(), sleep=0.0)


class DeadlyWorld(SteadyWorld):
    """A world with faults whose ranks die often; what was sent to one arrives at its next life."""

    def _draw_conditions(self) -> Conditions:
        conditions = super()._draw_conditions()
        if conditions.healthy or self.ways.way is Way.HERE:
            return conditions
        self.ways = replace(self.ways, way=Way.MESSAGES)
        return replace(conditions, death=0.1)


@pytest.mark.parametrize(("plant", "seed"), PLANTED)
def test_a_planted_bug_is_found(plant: Plant, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    found = first_failure(SteadyWorld, (seed, *SEARCHED))

    assert found is not None


def test_worlds_whose_ranks_die_often_break_no_promise() -> None:
    for seed in range(20):
        DeadlyWorld(seed).run()


def test_orders_of_an_earlier_life_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_orders_of_an_earlier_life(monkeypatch)

    found = first_failure(DeadlyWorld, SEARCHED)

    assert found is not None
    assert "from before its time" in found.problem
