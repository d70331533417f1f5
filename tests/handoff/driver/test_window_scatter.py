"""Packed blocks into tensors: the same bytes as arrays get, whatever size the blocks have."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.handoff.driver.parts import PartGather, PartScatter, RouteParts
from penstock.handoff.protocol.grid import cut
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import HeadRange, Layout
from penstock.vocabulary.planes import DType
from penstock.vocabulary.reshard import plan_reshard

torch = pytest.importorskip("torch")

from penstock.handoff.driver.window_scatter import WindowScatter  # noqa: E402
from penstock.tiers.tensors import TensorTier  # noqa: E402


def split(first: int, count: int, *, tokens: int, scaled: bool) -> Layout:
    return Layout.split(
        layers=range(3),
        heads=HeadRange(first=first, count=count, total=4),
        channels=5,
        dtype=DType.FP8_E4M3 if scaled else DType.BF16,
        scale_dtype=DType.FP32 if scaled else None,
        block_tokens=tokens,
        block_count=12,
    )


def tier_of(layout: Layout, seed: int) -> TensorTier:
    torch.manual_seed(seed)
    sizes = layout.buffer_bytes
    kept = [torch.randint(0, 256, (sizes[at],), dtype=torch.uint8) for at in sorted(sizes)]
    return TensorTier(layout, [each.untyped_storage() for each in kept])


def bytes_of(tier: TensorTier) -> list[bytes]:
    return [bytes(buffer) for buffer in tier.blocks(()).buffers.values()]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("source_tokens", "target_tokens"), [(4, 4), (8, 4), (4, 8), (8, 2)])
@pytest.mark.parametrize("tokens", [22, 17])
def test_windows_of_tensors_get_the_same_bytes_as_arrays_do(
    scaled: bool,  # noqa: FBT001 - a case
    source_tokens: int,
    target_tokens: int,
    tokens: int,
) -> None:
    source = split(0, 4, tokens=source_tokens, scaled=scaled)
    target = split(1, 2, tokens=target_tokens, scaled=scaled)
    forms = Form(layout=source), Form(layout=target)
    plan = plan_reshard([forms[0]], [forms[1]])
    parts = RouteParts(plan, plan.routes[0], *forms)
    there, here, wanted = tier_of(source, 1), tier_of(target, 2), tier_of(target, 2)
    grid = cut(
        layers=parts.layers,
        blocks=range(-(-tokens // plan.unit_tokens)),
        cell_bytes=parts.layer_bytes_max,
        block_tokens=plan.unit_tokens,
        berth_bytes=3 * parts.layer_bytes_max,
        part_bytes_min=0,
    )
    slots = [7, 2, 9, 0, 11, 5, 10, 1, 8, 3, 6, 4]

    for part in range(grid.part_count):
        place = parts.place(grid, part, tokens)
        keys = [b"key %d" % n for n in place.source_blocks]
        from_slots = [slots[n] for n in place.source_blocks]
        to_slots = [slots[-n - 1] for n in place.target_blocks]
        packed = np.zeros(place.size, dtype=np.uint8)
        sums = PartGather(place.form, there, Algorithm.XXH3).gather(from_slots, keys, packed)
        scatter = WindowScatter(parts, place.form, here)
        scatter.scatter(torch.from_numpy(packed), len(keys), to_slots)
        PartScatter(parts, place.form, wanted, Algorithm.XXH3).scatter(packed, keys, sums, to_slots)

    assert bytes_of(here) == bytes_of(wanted)
