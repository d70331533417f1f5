"""Bugs of stores, of those who talk to them, and of the cache about them: each is found.

The store of a simulated world is a model of the real one: it takes the same steps in the same
order. A bug is planted by changing the order, or by leaving a check out.
"""

from __future__ import annotations

import pytest

from lab.sim import store
from lab.sim.store import Disk, Row, Store
from lab.sim.world import World
from lab.tests.sim.planting import Plant, first_failure
from penstock.machine import copies, faults, stored

SEEDS_MAX = 1500
"""Of which about one in eight has a store; none of them finds anything without a planted bug."""


def with_a_store(seed: int) -> World | None:
    world = World(seed, audited=False)
    return None if world.conditions.store is None else world


def plant_row_before_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row says that a block is there before its bytes are."""
    monkeypatch.setattr(store, "SAVE_STEPS", ("tombstone", "row", "payload", "answer"))


def plant_early_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is called saved before it is written."""
    monkeypatch.setattr(store, "SAVE_STEPS", ("tombstone", "answer", "payload", "row"))


def plant_unchecked_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart, rows of every generation count."""

    def recovers(_store: Store, _row: Row) -> bool:
        return True

    monkeypatch.setattr(Store, "recovers", recovers)


def plant_belief_in_late_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver takes every answer for one of this life of the store."""

    def is_current(_store: Store, _life: int, _generation: int) -> bool:
        return True

    monkeypatch.setattr(Store, "is_current", is_current)


def plant_reuse_of_places_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment is given up while a block of it is being read."""

    def may_reclaim(_store: Store, disk: Disk, segment: int) -> bool:
        return disk.writing.isdisjoint(disk.places_of(segment))

    monkeypatch.setattr(Store, "may_reclaim", may_reclaim)


def plant_reuse_of_arena_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead rank, or a hub that is off, settles what the store still reads and writes."""
    monkeypatch.setattr(stored, "is_stored", lambda _books, _operation: False)


def plant_missing_blocks_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store does not have stays in the directory, and is asked for again and again."""
    monkeypatch.setattr(faults.stored, "vanished", lambda *_: None)
    drop = copies._drop_bad_sources

    def drop_corrupt_only(books: copies.Books, operation: copies.Operation, now: float) -> None:
        missing = {p for p, f in operation.faults.items() if f is copies.BlockFault.MISSING}
        kept = {p: operation.faults.pop(p) for p in missing}
        drop(books, operation, now)
        operation.faults.update(kept)

    monkeypatch.setattr(copies, "_drop_bad_sources", drop_corrupt_only)


PLANTED = [
    pytest.param(plant_row_before_payload, {"store"}, 1003, id="row before payload"),
    pytest.param(plant_early_acknowledgement, {"store"}, 13, id="acknowledged before written"),
    pytest.param(plant_unchecked_generation, {"store", "bytes"}, 6, id="generation not checked"),
    pytest.param(
        plant_belief_in_late_answers, {"store", "reuse", "operations"}, 6, id="late answer believed"
    ),
    pytest.param(plant_reuse_of_places_being_read, {"store", "bytes"}, 225, id="place reused"),
    pytest.param(plant_reuse_of_arena_slots, {"reuse"}, 198, id="arena slot reused"),
    pytest.param(plant_missing_blocks_that_stay, {"bytes"}, 61, id="missing blocks stay"),
]
"""What is planted, who finds it, and a seed in which it was found: looked at first."""


@pytest.mark.parametrize(("plant", "checkers", "seed"), PLANTED)
def test_a_planted_bug_of_a_store_is_found_from_outside(
    plant: Plant, checkers: set[str], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    found = first_failure(with_a_store, (seed, *range(SEEDS_MAX)))

    assert found is not None
    assert found.checker in checkers
