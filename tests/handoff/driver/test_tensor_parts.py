"""Parts of tensors: the way through staging, on tensors of the CPU and with played events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.handoff.driver.array_parts import PartGather, PartScatter
from penstock.handoff.driver.parts import RouteParts
from penstock.handoff.protocol.effects import Take
from penstock.handoff.protocol.grid import cut
from penstock.handoff.protocol.identity import Life, WriteId
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.dtypes import DType
from penstock.vocabulary.form import Form
from penstock.vocabulary.layers import HeadRange
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.reshard import plan_reshard

torch = pytest.importorskip("torch")

from penstock.handoff.driver import tensor_parts  # noqa: E402
from penstock.handoff.driver.tensor_parts import BUFFERS, TensorReader, TensorTaker  # noqa: E402
from penstock.tiers.tensors import TensorTier  # noqa: E402

if TYPE_CHECKING:
    from penstock.handoff.protocol.grid import Grid


class PlayedEvent:
    """Is passed when the test says so."""

    passed = True

    def record(self, stream: object) -> None:
        pass

    @property
    def reached(self) -> bool:
        return PlayedEvent.passed

    def close(self) -> None:
        pass


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


def take_of(grid: Grid, part: int, sums: bytes) -> Take:
    return Take(
        handoff="a",
        epoch=1,
        source=Life("source", 1),
        generation=1,
        berth=0,
        grid=grid,
        part=part,
        attempt=0,
        sums=sums,
    )


def write_of(part: int) -> WriteId:
    return WriteId(Life("target", 1), 1, 0, "a", 1, part, 0)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("source_tokens", "target_tokens"), [(4, 4), (8, 4), (4, 8), (8, 2)])
@pytest.mark.parametrize("tokens", [22, 17])
def test_staging_moves_the_same_bytes_as_arrays_do(
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
    reader = TensorReader(there, Algorithm.XXH3, part_bytes=grid.part_bytes)
    taker = TensorTaker(here, Algorithm.XXH3, part_bytes=grid.part_bytes)
    slots = [7, 2, 9, 0, 11, 5, 10, 1, 8, 3, 6, 4]

    for part in range(grid.part_count):
        place = parts.place(grid, part, tokens)
        keys = [b"key %d" % n for n in place.source_blocks]
        from_slots = [slots[n] for n in place.source_blocks]
        to_slots = [slots[-n - 1] for n in place.target_blocks]
        berth, plain = (np.zeros(place.size, dtype=np.uint8) for _ in range(2))
        assert reader.read(write_of(part), place.form, from_slots, keys, berth) is None
        ((_, sums),) = reader.ended()
        assert sums == PartGather(place.form, there, Algorithm.XXH3).gather(from_slots, keys, plain)
        assert bytes(berth) == bytes(plain)
        take = take_of(grid, part, sums)
        assert taker.take(take, parts, place.form, berth, keys, to_slots) is None
        assert taker.ended() == [(take, True)]
        PartScatter(parts, place.form, wanted, Algorithm.XXH3).scatter(plain, keys, sums, to_slots)

    assert bytes_of(here) == bytes_of(wanted)


def test_nothing_is_moved_for_a_write_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = split(0, 4, tokens=4, scaled=False)
    form = Form(layout=layout)
    plan = plan_reshard([form], [form])
    parts = RouteParts(plan, plan.routes[0], form, form)
    part = parts.form_of(0, 1)
    reader = TensorReader(
        tier_of(layout, 1), Algorithm.XXH3, part_bytes=part.block_bytes, event=PlayedEvent
    )
    windows = [np.zeros(part.block_bytes, dtype=np.uint8) for _ in range(BUFFERS)]
    monkeypatch.setattr(PlayedEvent, "passed", False)
    for at, window in enumerate(windows):
        reader.read(write_of(at), part, [at], [b"key"], window)

    full, early = reader.has_room, reader.ended()
    reader.forget(write_of(1))
    monkeypatch.setattr(PlayedEvent, "passed", True)
    ended = [write for write, _ in reader.ended()]

    assert (full, early) == (False, [])
    assert ended == [write_of(0), write_of(2), write_of(3)]
    assert not windows[1].any()
    assert all(windows[at].any() for at in (0, 2, 3))
    assert reader.has_room
    assert not reader.busy


def test_a_part_that_is_not_intact_does_not_reach_the_device() -> None:
    layout = split(0, 4, tokens=4, scaled=False)
    form = Form(layout=layout)
    plan = plan_reshard([form], [form])
    parts = RouteParts(plan, plan.routes[0], form, form)
    part = parts.form_of(0, 1)
    here = tier_of(layout, 2)
    before = bytes_of(here)
    grid = cut(
        layers=range(3),
        blocks=range(1),
        cell_bytes=parts.layer_bytes_max,
        block_tokens=4,
        berth_bytes=1 << 20,
    )
    taker = TensorTaker(here, Algorithm.XXH3, part_bytes=part.block_bytes)
    berth = np.ones(part.block_bytes, dtype=np.uint8)

    taken = taker.take(take_of(grid, 0, b"wrong"), parts, part, berth, [b"key"], [3])

    assert taken is False
    assert bytes_of(here) == before


def test_what_was_summed_is_what_is_moved_whatever_becomes_of_the_berth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = split(0, 4, tokens=4, scaled=False)
    form = Form(layout=layout)
    plan = plan_reshard([form], [form])
    parts = RouteParts(plan, plan.routes[0], form, form)
    part = parts.form_of(0, 1)
    there, here, wanted = tier_of(layout, 1), tier_of(layout, 2), tier_of(layout, 2)
    grid = cut(
        layers=range(3),
        blocks=range(1),
        cell_bytes=parts.layer_bytes_max,
        block_tokens=4,
        berth_bytes=1 << 20,
    )
    berth, plain = (np.zeros(part.block_bytes, dtype=np.uint8) for _ in range(2))
    sums = PartGather(part, there, Algorithm.XXH3).gather([5], [b"key"], plain)
    PartScatter(parts, part, wanted, Algorithm.XXH3).scatter(plain, [b"key"], sums, [3])
    reader, taker = (
        kind(tier, Algorithm.XXH3, part_bytes=part.block_bytes)
        for kind, tier in ((TensorReader, there), (TensorTaker, here))
    )
    plain_sums = tensor_parts._sums

    def damage_and_sum(*args: Any) -> bytes:
        berth[7] ^= 1
        found = plain_sums(*args)
        berth[8] ^= 1
        return found

    reader.read(write_of(0), part, [5], [b"key"], berth)
    with monkeypatch.context() as patched:
        patched.setattr(tensor_parts, "_sums", damage_and_sum)
        ((_, found),) = reader.ended()
        berth[:] = plain
        taker.take(take_of(grid, 0, sums), parts, part, berth, [b"key"], [3])

    assert found == sums
    assert taker.ended() == [(take_of(grid, 0, sums), True)]
    assert bytes_of(here) == bytes_of(wanted)
