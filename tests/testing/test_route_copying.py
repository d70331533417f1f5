"""Resharding against an oracle that knows the whole model and no ranks."""

from __future__ import annotations

import numpy as np
import pytest

from lab.fixtures.reshard_oracle import draw_case
from penstock.testing.route_copying import RouteCopier, RouteExtents
from penstock.testing.seeds import failing_seed
from penstock.vocabulary.checksums import Algorithm, CellSpan, CellSums
from penstock.vocabulary.layout import cell_positions, narrow


@pytest.mark.parametrize("seeds", [25, pytest.param(200, marks=pytest.mark.long)])
def test_every_target_has_what_the_whole_model_has_and_nothing_else_is_touched(seeds: int) -> None:
    for seed in range(seeds):
        with failing_seed(seed):
            case = draw_case(seed)

            case.reshard()

            case.expect_equal()


@pytest.mark.parametrize("seeds", [15, pytest.param(80, marks=pytest.mark.long)])
def test_sums_of_the_sources_verify_at_the_targets(seeds: int) -> None:
    """Where blocks have one size: the same key, the same cells, the same sums."""
    for seed in range(seeds):
        with failing_seed(seed):
            case = draw_case(seed, same_blocks=True)
            keys = [b"key %d" % at for at in range(len(case.source_blocks))]

            case.reshard()

            assert case.plan.same_sums
            for route in case.plan.routes:
                source, target = case.sources[route.source], case.targets[route.target]
                there = cell_positions(source.layout, route.source_cuts)
                here = cell_positions(target.layout, route.target_cuts)
                for sent, found in zip(
                    source.sums(case.source_blocks, keys),
                    target.sums(case.target_blocks, keys),
                    strict=True,
                ):
                    np.testing.assert_array_equal(
                        sent.values[list(there)], found.values[list(here)]
                    )


@pytest.mark.parametrize("seeds", [15, pytest.param(80, marks=pytest.mark.long)])
def test_what_travels_is_verified_by_sums_of_the_source(seeds: int) -> None:
    """Whatever the size of the target's blocks: a part is packed as blocks of its source."""
    for seed in range(seeds):
        with failing_seed(seed):
            case = draw_case(seed)
            keys = [b"key %d" % at for at in range(len(case.source_blocks))]
            for route in case.plan.routes:
                source = case.sources[route.source]
                seen = narrow(source.layout, route.source_cuts)
                positions = list(cell_positions(source.layout, route.source_cuts))
                part = source.packed(case.source_blocks, seen)
                sums = [
                    CellSums.of(table.values[positions])
                    for table in source.sums(case.source_blocks, keys)
                ]

                assert CellSpan.of(seen).verify(part, keys, sums, Algorithm.XXH3) == []

                part[-1, -1] ^= 1
                faults = CellSpan.of(seen).verify(part, keys, sums, Algorithm.XXH3)
                assert faults == [(len(keys) - 1, len(seen.cells) - 1)]


@pytest.mark.parametrize("seeds", [15, pytest.param(80, marks=pytest.mark.long)])
def test_extents_say_the_same_as_copies(seeds: int) -> None:
    for seed in range(seeds):
        with failing_seed(seed):
            case = draw_case(seed)
            ratio = case.plan.unit_tokens // min(case.plan.source_tokens, case.plan.target_tokens)
            coarse_source = case.plan.source_tokens > case.plan.target_tokens
            fine_count = max(len(case.source_blocks), len(case.target_blocks))

            for route in case.plan.routes:
                source, target = case.sources[route.source], case.targets[route.target]
                extents = RouteExtents(route, source.layout, target.layout)
                for fine in range(fine_count):
                    source_block = case.source_blocks[fine // ratio if coarse_source else fine]
                    target_block = case.target_blocks[fine if coarse_source else fine // ratio]
                    for read, write in extents.between(
                        source_block, target_block, fine=fine % ratio
                    ):
                        assert read.length == write.length
                        content = source.buffers[read.place][read.offset : read.end]
                        target.buffers[write.place][write.offset : write.end] = content

            case.expect_equal()


def test_a_request_needs_as_many_blocks_on_both_sides() -> None:
    case = draw_case(0)
    route = case.plan.routes[0]
    source, target = case.sources[route.source], case.targets[route.target]
    copier = RouteCopier(route, source.layout, source.buffers, target.layout, target.buffers)

    with pytest.raises(ValueError, match="there are"):
        copier.copy([0, 1, 2, 3], [0] * 20)
