"""Parts: what is packed out of one engine's slots lies right in another's, whatever their forms."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.route_copying import RouteCopier
from lab.fixtures.shards import Shard
from penstock.handoff.driver import parts as array_parts
from penstock.handoff.driver.parts import PartGather, PartScatter, RouteParts
from penstock.handoff.protocol.grid import cut, missing_blocks
from penstock.tiers.arrays import ArrayTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.planes import Axis, DType
from penstock.vocabulary.reshard import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS = (
    (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL),
    (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL),
)


def split_ranks(
    count: int, *, tokens: int, order: Sequence[Axis] = ORDERS[0], stages: int = 1
) -> list[Layout]:
    """Ranks of a model with 6 KV heads and 4 layers."""
    return [
        Layout.split(
            layers=Shard(stage_count=stages, stage=stage).layers(4),
            heads=Shard(tensor_size=count, tensor_rank=rank).heads(6),
            channels=8,
            dtype=DType.FP16,
            block_tokens=tokens,
            block_count=16,
            order=order,
        )
        for stage in range(stages)
        for rank in range(count)
    ]


def mla_ranks(count: int, *, tokens: int) -> list[Layout]:
    return [
        Layout.mla(
            layers=range(4), channels=12, dtype=DType.BF16, block_tokens=tokens, block_count=16
        )
        for _ in range(count)
    ]


def filled(layout: Layout, seed: int) -> ArrayTier:
    chance = np.random.default_rng(seed)
    sizes = layout.buffer_bytes
    return ArrayTier(
        layout, [chance.integers(0, 256, sizes[at], dtype=np.uint8) for at in sorted(sizes)]
    )


def bytes_of(tier: ArrayTier) -> list[bytes]:
    return [bytes(buffer) for buffer in tier.blocks(()).buffers.values()]


WORLDS = {
    "2 to 3": (split_ranks(2, tokens=4), split_ranks(3, tokens=4)),
    "3 to 2, other strides": (
        split_ranks(3, tokens=4, order=ORDERS[1]),
        split_ranks(2, tokens=4),
    ),
    "stages to one": (split_ranks(2, tokens=4, stages=2), split_ranks(1, tokens=4)),
    "coarse to fine": (split_ranks(2, tokens=8), split_ranks(3, tokens=4)),
    "fine to coarse": (split_ranks(1, tokens=4), split_ranks(3, tokens=8, order=ORDERS[1])),
    "latent": (mla_ranks(2, tokens=4), mla_ranks(3, tokens=4)),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("tokens", [48, 41])
@pytest.mark.parametrize("piece_bytes", [array_parts.PIECE_BYTES, 1])
def test_every_part_of_every_route_arrives_as_the_definition_says(
    world: str, tokens: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_parts, "PIECE_BYTES", piece_bytes)
    sources, targets = WORLDS[world]
    forms = [Form(layout=each) for each in sources], [Form(layout=each) for each in targets]
    plan = plan_reshard(*forms)
    chance = random.Random(f"{world} {tokens}")
    held = [filled(layout, 100 + n) for n, layout in enumerate(sources)]
    found = [filled(layout, 200 + n) for n, layout in enumerate(targets)]
    wanted = [filled(layout, 200 + n) for n, layout in enumerate(targets)]
    source_count, target_count = -(-tokens // plan.source_tokens), -(-tokens // plan.target_tokens)
    source_slots = chance.sample(range(16), source_count)
    target_slots = chance.sample(range(16), target_count)
    keys = [b"key %d" % n for n in range(source_count)]
    missing = missing_blocks(plan, cached_tokens=8, token_count=tokens)
    skipped = 8 // plan.source_tokens, 8 // plan.target_tokens

    for route in plan.routes:
        source, target = held[route.source], found[route.target]
        parts = RouteParts(plan, route, forms[0][route.source], forms[1][route.target])
        grid = cut(
            layers=parts.layers,
            blocks=missing,
            cell_bytes=parts.layer_bytes_max,
            block_tokens=plan.unit_tokens,
            berth_bytes=3 * parts.layer_bytes_max,
            part_bytes_min=0,
        )
        for part in chance.sample(range(grid.part_count), grid.part_count):
            place = parts.place(grid, part, tokens)
            part_keys = [keys[n] for n in place.source_blocks]
            berth = np.zeros(grid.part_bytes, dtype=np.uint8)[: place.size]
            sums = PartGather(place.form, source, Algorithm.XXH3).gather(
                [source_slots[n] for n in place.source_blocks], part_keys, berth
            )
            taken = PartScatter(parts, place.form, target, Algorithm.XXH3).scatter(
                berth, part_keys, sums, [target_slots[n] for n in place.target_blocks]
            )
            assert taken
        RouteCopier(
            route,
            source.layout,
            source.blocks(()).buffers,
            wanted[route.target].layout,
            wanted[route.target].blocks(()).buffers,
        ).copy(source_slots[skipped[0] :], target_slots[skipped[1] :])

    assert [bytes_of(tier) for tier in found] == [bytes_of(tier) for tier in wanted]


def test_a_part_that_is_not_intact_is_not_put_away() -> None:
    (source,), (target,) = split_ranks(1, tokens=4), split_ranks(1, tokens=4)
    forms = Form(layout=source), Form(layout=target)
    plan = plan_reshard([forms[0]], [forms[1]])
    parts = RouteParts(plan, plan.routes[0], *forms)
    form = parts.form_of(0, 1)
    there, here = filled(source, 1), filled(target, 2)
    before = bytes_of(here)
    berth = np.zeros(2 * form.block_bytes, dtype=np.uint8)
    sums = PartGather(form, there, Algorithm.XXH3).gather([3, 4], [b"a", b"b"], berth)
    scatter = PartScatter(parts, form, here, Algorithm.XXH3)

    exchanged = scatter.scatter(berth, [b"b", b"a"], sums, [5, 6])
    short = scatter.scatter(berth, [b"a", b"b"], sums[:-8], [5, 6])
    berth[0] ^= 1
    flipped = scatter.scatter(berth, [b"a", b"b"], sums, [5, 6])

    assert (exchanged, short, flipped) == (False, False, False)
    assert bytes_of(here) == before


def test_a_grid_that_is_not_of_the_route_is_told_why() -> None:
    (source,), (target,) = split_ranks(1, tokens=4), split_ranks(1, tokens=4)
    forms = Form(layout=source), Form(layout=target)
    plan = plan_reshard([forms[0]], [forms[1]])
    parts = RouteParts(plan, plan.routes[0], *forms)
    grid = cut(
        layers=range(4),
        blocks=range(4),
        cell_bytes=parts.layer_bytes_max,
        block_tokens=4,
        berth_bytes=1 << 20,
    )

    problems = [
        parts.problem_of(each, berth_bytes=1 << 20)
        for each in (
            grid,
            grid._replace(block_tokens=8),
            grid._replace(layer_count=5),
            grid._replace(part_layers=0),
            grid._replace(part_bytes=1),
            grid._replace(part_blocks=1 << 20, part_bytes=1 << 40),
        )
    ]

    assert problems[0] == ""
    assert all(problems[1:])
    assert "64" in parts.problem_of(grid, berth_bytes=64)
