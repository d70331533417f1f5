"""Which mover connects two media."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.movers.memcpy import MemcpyMover
from penstock.movers.table import MOVERS, mover_between
from penstock.testing.tier_suite import LAYOUTS
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.host import HostTier, MemoryTier
from penstock.vocabulary.checksums import Algorithm

LAYOUT = LAYOUTS["opaque"]


def test_all_media_of_this_process_are_connected() -> None:
    arrays = [np.zeros(size, dtype=np.uint8) for size in LAYOUT.buffer_bytes.values()]
    stores = [ArrayTier(LAYOUT, arrays), MemoryTier(LAYOUT, 3), HostTier.create(LAYOUT, 3)]

    for source, target in product(stores, repeat=2):
        mover = mover_between(source, target, Algorithm.XXH3)
        assert isinstance(mover, MemcpyMover)

    here = {(source.medium, target.medium) for source, target in product(stores, repeat=2)}
    on_a_gpu = {("cuda", "host"), ("host", "cuda"), ("cuda", "cuda")}
    assert here | on_a_gpu == set(MOVERS)


def test_media_that_nothing_connects_are_refused_by_name() -> None:
    class Punched(MemoryTier):
        medium = "punched cards"

    with pytest.raises(ConfigError, match="nothing moves blocks from 'memory' to 'punched cards'"):
        mover_between(MemoryTier(LAYOUT, 3), Punched(LAYOUT, 3), Algorithm.XXH3)
