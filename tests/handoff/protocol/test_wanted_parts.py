"""From forms to claims: grids cover what the reshard planner says, and nothing twice."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from lab.fixtures.shards import Shard
from penstock.handoff.driver.directory import Directory, EnginePlace, RankPlace
from penstock.handoff.protocol.grid import missing_blocks
from penstock.handoff.protocol.identity import form_facts
from penstock.handoff.protocol.settings import HandoffBounds
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.planes import DType
from penstock.vocabulary.reshard import plan_reshard
from tests.handoff.protocol.conftest import World

if TYPE_CHECKING:
    from collections.abc import Sequence


def engine(
    *,
    ranks: int,
    stages: int = 1,
    block_tokens: int = 16,
    layers: int = 4,
    dtype: DType = DType.BF16,
) -> list[Form]:
    shards = [
        Shard(tensor_size=ranks, tensor_rank=rank, stage_count=stages, stage=stage)
        for stage in range(stages)
        for rank in range(ranks)
    ]
    return [
        Form(
            layout=Layout.split(
                layers=shard.layers(layers),
                heads=shard.heads(8),
                channels=32,
                dtype=dtype,
                block_tokens=block_tokens,
                block_count=1,
            )
        )
        for shard in shards
    ]


def directory(
    sources: list[Form],
    targets: list[Form],
    source_names: Sequence[str],
    target_names: Sequence[str],
) -> Directory:
    prefill, decode = (
        EnginePlace(
            scheduler=scheduler,
            ranks=tuple(RankPlace(name=n, form=f) for n, f in zip(names, forms, strict=True)),
        )
        for scheduler, names, forms in (
            ("P", source_names, sources),
            ("D", target_names, targets),
        )
    )
    return Directory(prefill=prefill, decode=decode, model="m", weights="w")


CASES = [
    (engine(ranks=2), engine(ranks=2)),
    (engine(ranks=4), engine(ranks=2)),
    (engine(ranks=1, stages=2), engine(ranks=4)),
    (engine(ranks=16), engine(ranks=2)),
    (engine(ranks=2, block_tokens=64), engine(ranks=4, block_tokens=16)),
    (engine(ranks=2, block_tokens=16), engine(ranks=1, block_tokens=64)),
]


@pytest.mark.parametrize(("sources", "targets"), CASES)
def test_every_target_gets_all_its_bytes_once(sources: list[Form], targets: list[Form]) -> None:
    plan = plan_reshard(sources, targets)
    blocks = missing_blocks(plan, cached_tokens=64, token_count=200)
    parties = directory(
        sources,
        targets,
        [f"p{n}" for n in range(len(sources))],
        [f"d{n}" for n in range(len(targets))],
    )

    wanted = parties.wanted(
        cached_tokens=64, token_count=200, berth_bytes=1 << 20, part_bytes_min=0
    )

    ratio = plan.unit_tokens // plan.target_tokens
    for number, form in enumerate(targets):
        sizes: Counter[int] = Counter()
        for _, grid in wanted[f"d{number}"]:
            assert grid.block_first * grid.block_tokens == 64
            assert (grid.block_first + grid.block_count) * grid.block_tokens >= 200
            for part in range(grid.part_count):
                cells = len(grid.blocks_of(part))
                share = grid.part_bytes // (grid.part_layers * grid.part_blocks)
                for layer in grid.layers_of(part):
                    sizes[layer] += cells * share
        each = form.layout.block_bytes * ratio * len(blocks) // len(sizes)
        assert sizes == dict.fromkeys(sizes, each)


def test_a_planned_handoff_is_delivered() -> None:
    sources, targets = engine(ranks=4, stages=2), engine(ranks=2)
    bounds = HandoffBounds(berth_bytes=8192, berth_count=2)
    world = World(8, 2, layers=4, tokens=50, bounds=bounds)
    world.submit_prefill(admit=False)
    for number, name in enumerate(world.prefill_names):
        layers = range(2) if number < 4 else range(2, 4)
        world.do(name, lambda p, r=layers: p.admit("h", token_count=50, layers=r, now=0.0))

    parties = directory(sources, targets, world.prefill_names, world.decode_names)
    wanted = parties.wanted(cached_tokens=16, token_count=50, berth_bytes=bounds.berth_bytes)
    world.submit_decode(wanted=wanted)
    world.compute()
    world.run()

    assert {name: len(sources) for name, sources in wanted.items()} == {"d0": 4, "d1": 4}
    assert world.outcome("D") == ["delivered"]
    world.check_over()


def test_what_is_cached_must_be_whole_units() -> None:
    plan = plan_reshard(engine(ranks=1, block_tokens=64), engine(ranks=1, block_tokens=16))

    with pytest.raises(ValueError, match="cached_tokens is 16, must be a multiple of 64"):
        missing_blocks(plan, cached_tokens=16, token_count=200)
    with pytest.raises(ValueError, match="cached_tokens is 200, must be from 0 to 199"):
        missing_blocks(plan, cached_tokens=200, token_count=200)


def test_facts_do_not_depend_on_how_a_model_is_dealt_out() -> None:
    facts = form_facts(engine(ranks=2))

    assert facts == (("layers", "4"), ("kinds", "attention, 8 heads, bf16"))
    assert form_facts(engine(ranks=16, stages=2, block_tokens=64)) == facts
    assert form_facts(engine(ranks=2, layers=5)) != facts
    assert form_facts(engine(ranks=2, dtype=DType.FP16)) != facts
