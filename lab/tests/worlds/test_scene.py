"""Who owes whom what, for any numbers of ranks on both sides."""

from __future__ import annotations

from itertools import product

import pytest

from lab.worlds.scene import layer_shares, shares
from penstock.handoff.protocol.grid import Grid

GRID = Grid(layer_first=0, layer_count=4, block_first=1, block_count=2)


@pytest.mark.parametrize(("tensor", "decode"), [*product((1, 2, 3, 4, 8), repeat=2)])
def test_every_target_has_sources_that_hold_all_of_its_heads(tensor: int, decode: int) -> None:
    wanted = shares(tensor, decode, GRID)

    for target in range(decode):
        needed = (target * tensor / decode, (target + 1) * tensor / decode)
        sources = sorted(int(name.removeprefix("P")) for name, _ in wanted[f"D{target}"])
        assert sources == [*range(sources[0], sources[-1] + 1)]
        assert sources[0] <= needed[0] < sources[0] + 1
        assert sources[-1] < needed[1] <= sources[-1] + 1


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_layer_comes_from_one_stage(stages: int) -> None:
    wanted = shares(2, 2, GRID, stages=stages)

    for sources in wanted.values():
        layers = [
            layer
            for _, grid in sources
            for layer in range(grid.layer_first, grid.layer_first + grid.layer_count)
        ]
        assert sorted(layers) == [0, 1, 2, 3]


def test_layers_are_shared_out_without_gaps() -> None:
    assert layer_shares(5, 2) == [range(2), range(2, 5)]
