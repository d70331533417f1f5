"""Bugs that were planted are found, and by the checker that should find them.

Each is planted in the shipped code, for the length of one test. The audit of the books would
find most of them by itself, so each is also looked for with the audit switched off: then it is
the bytes, the promises of copies, or the end of the world that tell.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.sim.world import World
from lab.tests.sim.planting import Plant, first_failure
from penstock.cache.states import OperationMove, OperationState
from penstock.cache.tier import Tier
from penstock.machine import acquire, copies, leases, machine, offload
from penstock.machine.events import CopyReport
from penstock.machine.matching import Finding, find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.operations import Operation
    from penstock.machine.books import Books
    from penstock.vocabulary.keys import Key

SEEDS_MAX = 300
"""`test_scenarios` shows that none of these seeds finds anything without a planted bug."""


def plant_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that ends forgets to let go of its last slot."""
    drop_slots = leases.drop_slots

    def drop_all_but_one(books: Books, device: Tier, slots: NDArray[np.int32]) -> None:
        drop_slots(books, device, slots[:-1])

    monkeypatch.setattr(leases, "drop_slots", drop_all_but_one)


def plant_early_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is given up lets go of its target slots, though ranks may still write there."""
    decide = copies.decide

    def decide_and_let_go(
        books: Books, operation: Operation, move: OperationMove, now: float, *, failure: str
    ) -> None:
        decide(books, operation, move, now, failure=failure)
        tier = books.tiers[operation.target]
        if tier is not None:
            copies._let_go(books, tier, operation.target_slots)
            operation.target_slots = operation.target_slots[:0]

    monkeypatch.setattr(copies, "decide", decide_and_let_go)


def plant_head_first_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may leave a tier although blocks that follow it lie there."""
    standing = Tier.standing

    def standing_without_followers(tier: Tier, node: int) -> int | None:
        followers = int(tier.children[node])
        tier.children[node] = 0
        try:
            return standing(tier, node)
        finally:
            tier.children[node] = followers

    monkeypatch.setattr(Tier, "standing", standing_without_followers)


def plant_lost_result_on_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report from before a reset is dropped, and what its copy holds with it."""

    def report_of_this_epoch(books: Books, event: CopyReport, now: float) -> None:
        if (
            event.operation.epoch != books.ledger.epoch
            and event.operation in books.ledger.operations
        ):
            books.counters.reports_late += 1
        else:
            copies.report(books, event, now)

    monkeypatch.setitem(machine._HANDLERS, CopyReport, report_of_this_epoch)


def plant_matchable_before_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank that reports makes the blocks of a copy ready."""

    def report_and_fill(books: Books, event: CopyReport, now: float) -> None:
        operation = books.ledger.operations.get(event.operation)
        fine = not event.faults and not event.failure
        if operation is not None and operation.state is OperationState.RUNNING and fine:
            copies._fill_targets(books, operation, np.arange(len(operation.keys)), now)
        copies.report(books, event, now)

    monkeypatch.setitem(machine._HANDLERS, CopyReport, report_and_fill)


def plant_blindness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests find nothing: safe, live and worthless."""

    def find_nothing(books: Books, keys: Sequence[Key], *, deepest: int) -> Finding:
        return find(books, keys[:0], deepest=deepest)

    monkeypatch.setattr(acquire, "find", find_nothing)
    monkeypatch.setattr(offload, "find", find_nothing)


def plant_gate_without_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies below the device is always computed, whatever is quicker."""

    def nothing_from_below(_books: Books, source: NDArray[np.int8], _now: float) -> int:
        below = np.flatnonzero(source)
        return int(below[0]) if len(below) else len(source)

    monkeypatch.setattr(acquire, "worth_loading", nothing_from_below)
    monkeypatch.setattr(offload, "worth_loading", nothing_from_below)


def plant_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines pass, and nobody is told."""
    monkeypatch.setattr(copies, "expire", lambda _books, _now: None)


PLANTED = [
    pytest.param(plant_leak, "drain", id="leak"),
    pytest.param(plant_early_reuse, "reuse", id="early reuse"),
    pytest.param(plant_head_first_eviction, "leaf first", id="head-first eviction"),
    pytest.param(plant_lost_result_on_reset, "operations", id="lost result on reset"),
    pytest.param(plant_matchable_before_filled, "bytes", id="matchable before filled"),
    pytest.param(plant_blindness, "usefulness", id="finds nothing"),
    pytest.param(plant_gate_without_measurements, "usefulness", id="never loads"),
    pytest.param(plant_patience, "liveness", id="keeps no deadline"),
]


@pytest.mark.parametrize(("plant", "checker"), PLANTED)
def test_a_planted_bug_is_found(
    plant: Plant, checker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    found = first_failure(World, range(SEEDS_MAX))

    assert found is not None
    assert found.checker in {checker, "InvariantViolation"}


@pytest.mark.parametrize(("plant", "checker"), PLANTED)
def test_a_planted_bug_is_found_from_outside_by_the_right_checker(
    plant: Plant, checker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    found = first_failure(partial(World, audited=False), range(SEEDS_MAX))

    assert found is not None
    assert found.checker == checker
