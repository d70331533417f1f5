"""Bugs are planted in shipped code for the length of one test, and looked for in some worlds."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from lab.explore.result import DEFECTS
from lab.sim.campaign import Failure, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pytest

    from lab.sim.scenarios import SimulatedWorld

Plant: TypeAlias = "Callable[[pytest.MonkeyPatch], None]"


def first_failure(
    make: Callable[[int], SimulatedWorld | None], seeds: Iterable[int]
) -> Failure | None:
    """What is found first; worlds that `make` does not make are left out."""
    for seed in seeds:
        world = make(seed)
        if world is None:
            continue
        try:
            world.run()
        except DEFECTS as error:
            return failure_of(seed, error)
    return None
