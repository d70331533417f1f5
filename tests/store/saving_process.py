"""A process that saves blocks to a disk tier until it is killed, and says which it was told of.

    main([FOLDER, FIRST, SIZE_BYTES])

Each line it writes is the seed of a group of blocks that was reported as saved.
"""

from __future__ import annotations

import os
from pathlib import Path

from lab.fixtures.store_tier_suite import LAYOUTS, SLOT_COUNT, StoreRig, wait_for_news
from penstock.store.disk.tier import DiskTier

GROUP = 4
LAYOUT = LAYOUTS["whole pages"]


def save_until_killed(folder: Path, first: int, size_bytes: int) -> None:
    tier = DiskTier(folder, size_bytes)
    rig = StoreRig(tier, LAYOUT)
    free = list(range(0, SLOT_COUNT, GROUP))
    under_way: dict[int, tuple[int, int]] = {}
    seed = first
    while True:
        while free:
            slot = free.pop()
            group = rig.fill(GROUP, seed=seed, first=slot)
            under_way[rig.save(group)] = (seed, slot)
            seed += 1
        wait_for_news(tier, 10.0)
        for ended in tier.collect():
            done, slot = under_way.pop(ended.ticket)
            free.append(slot)
            if not ended.faults:
                os.write(1, b"%d\n" % done)


def main(arguments: list[str]) -> None:
    folder, first, size_bytes = arguments
    save_until_killed(Path(folder), int(first), int(size_bytes))
