"""Bugs planted between the driver and the store process: each is found in the runtime's worlds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lab.sim.runtime import RuntimeWorld
from lab.tests.sim.planting import Plant, first_failure
from penstock.store.process.link import StoreLink
from penstock.store.process.messages import JobReport
from penstock.store.process.server import StoreServer

if TYPE_CHECKING:
    from lab.sim.conditions import Conditions

SEEDS = range(150, 350)
"""One in four has a store; none of them finds anything without a planted bug."""


class StormyWorld(RuntimeWorld):
    """A world in which a store has more trouble than most: bugs of that kind are found sooner."""

    def _draw_conditions(self) -> Conditions:
        conditions = super()._draw_conditions()
        if conditions.store is None:
            return conditions
        store = replace(conditions.store, death=0.08, hang=1.0, repeat=0.8, neighbour=0.2)
        # Tiers that become smaller leave a store less to do.
        return replace(conditions, reset=0.06, event_budget=150, store=store, sleep=0.0)


def with_a_store(seed: int) -> RuntimeWorld | None:
    world = StormyWorld(seed)
    return None if world.stores is None else world


def plant_belief_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not answer is taken for dead; what it does later is late."""
    lose = StoreLink._lose

    def lose_copies_too(self: StoreLink, why: str, **more: bool) -> None:
        self._fail_copies_below(self._ticket + 1, why)
        lose(self, why, **more)

    monkeypatch.setattr(StoreLink, "_lose", lose_copies_too)


def plant_forgotten_voids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset that came while the store was away is not repeated: generations are not checked."""
    begin = StoreLink._begin

    def begin_without_voids(self: StoreLink, now: float) -> None:
        self.resets._asked.clear()
        begin(self, now)

    monkeypatch.setattr(StoreLink, "_begin", begin_without_voids)


def plant_early_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is reported when it is cancelled, and not when its tier has ended it."""
    cancel = StoreServer._cancel

    def cancel_and_report(self: StoreServer, number: int, why: str) -> None:
        job = self._jobs.get(number)
        cancel(self, number, why)
        if job is not None:
            for rank in job.ranks:
                job.session.answer(JobReport(job.ticket, rank, [], why))

    monkeypatch.setattr(StoreServer, "_cancel", cancel_and_report)


def plant_unawaited_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is welcome again while jobs of its last session are under way."""
    monkeypatch.setattr(StoreServer, "_has_strays", lambda *_: False)


PLANTED = [
    pytest.param(plant_belief_in_silence, {"reuse"}, 186, id="late answer believed"),
    pytest.param(plant_forgotten_voids, {"store"}, 269, id="generation not checked"),
    pytest.param(plant_early_reports, {"reuse"}, 217, id="reported before it ended"),
    pytest.param(plant_unawaited_jobs, {"reuse"}, 307, id="jobs of a lost session not awaited"),
]
"""What is planted, who finds it, and a seed in which it was found: looked at first."""


@pytest.mark.parametrize(("plant", "checkers", "seed"), PLANTED)
def test_a_bug_planted_around_the_store_process_is_found(
    plant: Plant, checkers: set[str], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    found = first_failure(with_a_store, (seed, *SEEDS))

    assert found is not None
    assert found.checker in checkers, found
