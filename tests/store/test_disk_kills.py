"""After `kill -9` at any moment, every block that was reported as saved is there."""

from __future__ import annotations

import os
import select
import subprocess
import time
from random import Random
from typing import TYPE_CHECKING

import pytest

from lab.fixtures.store_tier_suite import (
    WAIT_S,
    Saved,
    StoreRig,
    draw_key,
    wait_until_recovered,
)
from penstock.store.disk.tier import DiskTier
from penstock.testing import failing_seed
from penstock.testing.tier_suite import draw_blocks
from tests.forked import Forked
from tests.store.saving_process import GROUP, LAYOUT

if TYPE_CHECKING:
    from pathlib import Path

SIZE_BYTES = 4 << 30
"""More than is ever saved here, so that no block has to go; files take what is written."""


def kill_while_saving(folder: Path, first: int, random: Random) -> list[int]:
    """Kills a process at a random moment after its first save; returns what it was told of."""
    read_end, write_end = os.pipe()
    process = Forked(
        "tests.store.saving_process", [str(folder), str(first), str(SIZE_BYTES)], stdout=write_end
    )
    os.close(write_end)
    try:
        assert select.select([read_end], [], [], 60)[0], "nothing was saved within a minute"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(random.uniform(0.0, 0.15))
    finally:
        process.kill()
        process.wait(WAIT_S)
    with os.fdopen(read_end, "rb") as output:
        said = output.read()
    whole, _, _ = said.rpartition(b"\n")
    return [int(line) for line in whole.split()]


def require_all(folder: Path, seeds: list[int]) -> None:
    tier = DiskTier(folder, SIZE_BYTES)
    try:
        wait_until_recovered(tier)
        rig = StoreRig(tier, LAYOUT)
        for seed in seeds:
            keys = [draw_key(seed, number) for number in range(GROUP)]
            slots = list(range(GROUP))
            assert rig.find(keys) == [True] * GROUP, seed
            assert rig.load_and_wait(keys, slots).faults == (), seed
            rig.require(Saved(keys, draw_blocks(LAYOUT, GROUP, seed), slots), slots)
    finally:
        tier.close(deadline=time.monotonic() + WAIT_S)


def kill_many_times(folder: Path, kills: int) -> None:
    told: list[int] = []
    for number in range(kills):
        with failing_seed(number):
            now = kill_while_saving(folder, 1 + number * 100_000, Random(number))
            told = told[-40:] + now
            require_all(folder, told)


def test_saved_blocks_are_there_after_a_few_kills(tmp_path: Path) -> None:
    kill_many_times(tmp_path / "tier", 16)


@pytest.mark.long
def test_saved_blocks_are_there_after_many_kills(tmp_path: Path) -> None:
    kill_many_times(tmp_path / "tier", 400)
