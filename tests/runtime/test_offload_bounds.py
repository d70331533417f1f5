"""Results of an engine's own loads and saves: how many wait, and how many are told at once."""

from __future__ import annotations

import pytest

from penstock.errors import CapacityError
from penstock.runtime import offload as offload_module
from tests.runtime.conftest import World


def keys(name: int) -> list[bytes]:
    return [f"key {name}".encode().ljust(16, b".")]


def test_results_are_told_so_many_at_a_time() -> None:
    world = World()
    for number in range(5):
        world.offload.save(keys(number), [number], cause=f"save {number}")
        world.offload.step()

    told = [len(world.offload.poll(most=2)) for _ in range(4)]

    assert told == [2, 2, 1, 0]


def test_an_engine_that_never_polls_is_stopped_before_results_fill_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload_module, "RESULTS_MAX", 2)
    world = World()
    for number in range(3):
        world.offload.save(keys(number), [number], cause=f"save {number}")
        world.offload.step()

    with pytest.raises(CapacityError, match="results to poll"):
        world.offload.save(keys(4), [4], cause="one too many")

    world.offload.poll()
    world.offload.save(keys(4), [4], cause="now there is room")
    world.settle()
