"""The handoff on a CUDA device: progress by events, parts by pack kernels."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest
import torch

import penstock
from lab.bench.handoff_cuda import LAYERS, CudaPair
from lab.bench.handoff_cuda import TOKENS as PROMPT_TOKENS
from penstock.errors import UnavailableError
from penstock.handoff.driver import device_parts
from penstock.handoff.driver.device_parts import DeviceReader, DeviceTaker, Window
from penstock.handoff.driver.parts import PartGather, PartScatter, RouteParts
from penstock.handoff.protocol.effects import Take
from penstock.handoff.protocol.grid import cut
from penstock.handoff.protocol.identity import Life, WriteId
from penstock.movers.cuda.landing import DeviceBytes
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.tensors import TensorTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import HeadRange, Layout
from penstock.vocabulary.planes import DType
from penstock.vocabulary.reshard import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.handoff.protocol.grid import Grid

    Opened = Callable[["T"], "T"]

T = TypeVar("T")
pytestmark = pytest.mark.gpu

TOKENS = 88
SLOTS = [7, 2, 9, 0, 11, 5]
LONG_CYCLES = 100_000_000


def split(first: int, count: int, *, tokens: int, scaled: bool = False) -> Layout:
    return Layout.split(
        layers=range(3),
        heads=HeadRange(first=first, count=count, total=4),
        channels=64,
        dtype=DType.FP8_E4M3 if scaled else DType.BF16,
        scale_dtype=DType.FP32 if scaled else None,
        block_tokens=tokens,
        block_count=12,
    )


def tiers_of(layout: Layout, seed: int) -> tuple[TensorTier, ArrayTier]:
    """The same bytes on the device and on the CPU."""
    sizes = layout.buffer_bytes
    chance = np.random.default_rng(seed)
    arrays = [chance.integers(0, 256, sizes[at], dtype=np.uint8) for at in sorted(sizes)]
    tensors = [torch.from_numpy(array).cuda() for array in arrays]
    tier = TensorTier(layout, [each.untyped_storage() for each in tensors])
    return tier, ArrayTier(layout, arrays)


def pinned(size: int) -> NDArray[np.uint8]:
    """Room for a part, as a landing area has it."""
    memory: NDArray[np.uint8] = torch.zeros(size, dtype=torch.uint8).pin_memory().numpy()
    return memory


def bytes_of(tier: TensorTier) -> list[bytes]:
    numbers = range(len(tier.layout.buffer_bytes))
    return [bytes(tier.numbers(n, torch.uint8).cpu().numpy()) for n in numbers]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Closes what it is given, also after a failure: pinned memory must not outlive its pin."""
    with ExitStack() as stack:

        def keep(one: T) -> T:
            stack.callback(one.close)
            return one

        yield keep


def write_of(part: int) -> WriteId:
    return WriteId(Life("target", 1), 1, 0, "a", 1, part, 0)


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


def taken(taker: DeviceTaker) -> list[tuple[Take, bool]]:
    found: list[tuple[Take, bool]] = []
    while taker.busy:
        torch.cuda.synchronize()
        found += taker.ended()
    return found


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("source_tokens", "target_tokens"), [(16, 16), (32, 16), (16, 32)])
def test_kernels_move_the_same_bytes_and_sums_as_the_cpu_does(
    opened: Opened,
    scaled: bool,  # noqa: FBT001 - a case
    source_tokens: int,
    target_tokens: int,
) -> None:
    source = split(0, 4, tokens=source_tokens, scaled=scaled)
    target = split(1, 2, tokens=target_tokens, scaled=scaled)
    forms = Form(layout=source), Form(layout=target)
    plan = plan_reshard([forms[0]], [forms[1]])
    parts = RouteParts(plan, plan.routes[0], *forms)
    (there, plain_there), (here, wanted) = tiers_of(source, 1), tiers_of(target, 2)
    grid = cut(
        layers=parts.layers,
        blocks=range(-(-TOKENS // plan.unit_tokens)),
        cell_bytes=parts.layer_bytes_max,
        block_tokens=plan.unit_tokens,
        berth_bytes=2 * parts.layer_bytes_max,
        part_bytes_min=0,
    )
    reader = opened(DeviceReader(there, part_bytes=grid.part_bytes))
    taker = opened(DeviceTaker(here, part_bytes=grid.part_bytes))

    for part in range(grid.part_count):
        place = parts.place(grid, part, TOKENS)
        keys = [b"key %d" % n for n in place.source_blocks]
        from_slots = [SLOTS[n] for n in place.source_blocks]
        to_slots = [SLOTS[-n - 1] for n in place.target_blocks]
        plain = np.zeros(place.size, dtype=np.uint8)
        berth = pinned(place.size)
        assert reader.read(write_of(part), place.form, from_slots, keys, berth) is None
        torch.cuda.synchronize()
        ((_, sums),) = reader.ended()
        gather = PartGather(place.form, plain_there, Algorithm.MIX64)
        assert sums == gather.gather(from_slots, keys, plain)
        assert bytes(berth) == bytes(plain)
        take = take_of(grid, part, sums)
        assert taker.take(take, parts, place.form, berth, keys, to_slots) is None
        assert taken(taker) == [(take, True)]
        scatter = PartScatter(parts, place.form, wanted, Algorithm.MIX64)
        assert scatter.scatter(plain, keys, sums, to_slots)

    assert bytes_of(here) == [bytes(each) for each in wanted.blocks(()).buffers.values()]


def test_a_part_that_was_changed_in_its_berth_is_told_so(opened: Opened) -> None:
    layout = split(0, 4, tokens=16)
    form = Form(layout=layout)
    plan = plan_reshard([form], [form])
    parts = RouteParts(plan, plan.routes[0], form, form)
    part = parts.form_of(1, 2)
    there, _ = tiers_of(layout, 1)
    here, _ = tiers_of(layout, 2)
    grid = cut(layers=range(3), blocks=range(4), cell_bytes=1, block_tokens=16, berth_bytes=64)
    berth = pinned(4 * part.block_bytes)
    reader = opened(DeviceReader(there, part_bytes=len(berth)))
    taker = opened(DeviceTaker(here, part_bytes=len(berth)))
    keys = [b"a", b"b", b"c", b"d"]
    torch.cuda.synchronize()
    reader.read(write_of(0), part, [5, 1, 10, 11], keys, berth)
    torch.cuda.synchronize()
    ((_, sums),) = reader.ended()

    berth[3 * part.block_bytes + 77] ^= 4
    torch.cuda.synchronize()
    taker.take(take_of(grid, 0, sums), parts, part, berth, keys, [0, 1, 2, 3])
    changed = [intact for _, intact in taken(taker)]
    berth[3 * part.block_bytes + 77] ^= 4
    torch.cuda.synchronize()
    taker.take(take_of(grid, 1, sums), parts, part, berth, keys, [0, 1, 2, 3])
    again = [intact for _, intact in taken(taker)]
    taker.take(take_of(grid, 2, sums), parts, part, berth, keys[::-1], [0, 1, 2, 3])
    exchanged = [intact for _, intact in taken(taker)]

    assert (changed, again, exchanged) == ([False], [True], [False])
    assert taker.take(take_of(grid, 3, b"short"), parts, part, berth, keys, [0]) is False


def test_a_part_for_which_there_is_no_memory_leaves_no_call_behind(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of another size need a copy; the next part takes its memory and tables anyway."""
    source, target = split(0, 4, tokens=16), split(0, 4, tokens=32)
    forms = Form(layout=source), Form(layout=target)
    plan = plan_reshard([forms[0]], [forms[1]])
    parts = RouteParts(plan, plan.routes[0], *forms)
    part = parts.form_of(0, 1)
    (there, _), (here, _) = tiers_of(source, 1), tiers_of(target, 2)
    berth = pinned(2 * part.block_bytes)
    reader = opened(DeviceReader(there, part_bytes=len(berth)))
    taker = opened(DeviceTaker(here, part_bytes=len(berth)))
    grid = cut(layers=range(3), blocks=range(4), cell_bytes=1, block_tokens=32, berth_bytes=64)
    keys = [b"a", b"b"]
    torch.cuda.synchronize()
    reader.read(write_of(0), part, [5, 1], keys, berth)
    torch.cuda.synchronize()
    ((_, sums),) = reader.ended()

    def full(_taker: DeviceTaker) -> None:
        raise UnavailableError("full")

    with monkeypatch.context() as without:
        without.setattr(DeviceTaker, "_take_scratch", full)
        with pytest.raises(UnavailableError, match="full"):
            taker.take(take_of(grid, 0, sums), parts, part, berth, keys, [3])
    (kernels,) = taker._device._kernels.values()
    free = len(kernels.shape.free)
    taker.take(take_of(grid, 1, sums), parts, part, berth, keys, [3])

    assert free == device_parts.PARTS
    assert not getattr(kernels.calls, "_words", [])
    assert [intact for _, intact in taken(taker)] == [True]


def test_nothing_is_copied_any_more_for_a_write_that_was_given_up(opened: Opened) -> None:
    layout = split(0, 4, tokens=16)
    form = Form(layout=layout)
    plan = plan_reshard([form], [form])
    part = RouteParts(plan, plan.routes[0], form, form).form_of(0, 1)
    tier, _ = tiers_of(layout, 1)
    berth = pinned(part.block_bytes)
    reader = opened(DeviceReader(tier, part_bytes=len(berth)))
    torch.cuda.synchronize()

    reader.read(write_of(0), part, [3], [b"key"], berth)
    reader.forget(write_of(0))
    reached = reader._reading[0].batch.manifest.ended.reached

    assert reached
    assert reader.ended() == []
    assert reader.has_room


def test_a_close_ends_at_its_deadline_and_gives_nothing_back_before_the_device_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = split(0, 4, tokens=16)
    tier, _ = tiers_of(layout, 1)
    reader = DeviceReader(tier, part_bytes=1 << 16)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(reader._device.stream.number)):
        torch.cuda._sleep(LONG_CYCLES)

    with monkeypatch.context() as soon:
        soon.setattr(device_parts, "WAIT_S", 0.001)
        with pytest.raises(UnavailableError, match=r"not ended on the device after 0\.001 s"):
            reader.close()
    reader.close()


def test_kv_leaves_after_its_layer_is_computed_and_not_before(opened: Opened) -> None:
    pair = opened(CudaPair())
    name = pair.begin()
    side = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()

    for _ in range(40):
        side = torch.mm(side, side)
    stream = torch.cuda.current_stream()
    pair.prefill.computed({name: PROMPT_TOKENS}, stream=stream)
    pair.prefill.step()
    early = pair.prefill.statistics().parts
    pair.finish(name)

    assert early == 0
    assert pair.parts == LAYERS


@pytest.mark.parametrize("transport", ["gpu", "shared_memory"])
def test_a_prompt_goes_from_one_pool_to_the_other_while_it_is_computed(
    opened: Opened, transport: str
) -> None:
    pair = opened(CudaPair(transport))

    pair.run(by_layers=True)
    torch.cuda.synchronize()

    assert pair.parts == LAYERS
    assert pair.decode.statistics().refused == {}
    there, here = map(bytes_of, pair.pools)
    assert there == here


def test_most_layers_have_arrived_when_the_last_one_is_computed(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = opened(CudaPair())
    finish, taken = pair.finish, []

    def noting(name: str) -> None:
        taken.append(pair.parts)
        finish(name)

    monkeypatch.setattr(pair, "finish", noting)
    for _ in range(3):
        pair.run(by_layers=True)

    # Not in every run: the first one compiles, and the machine may pause.
    assert pair.parts == 3 * LAYERS
    assert max(parts - LAYERS * run for run, parts in enumerate(taken)) > LAYERS // 2


def flip(memory: Window, at: int) -> None:
    """Changes one byte of a berth."""
    if isinstance(memory, DeviceBytes):
        torch.as_tensor(memory, device="cuda")[at] ^= 1
        torch.cuda.synchronize()
    else:
        memory[at] ^= 1


@pytest.mark.parametrize("transport", ["gpu", "shared_memory"])
def test_a_part_that_is_spoiled_on_its_way_is_asked_for_again(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    take = DeviceTaker.take
    spoiled: list[Take] = []

    def spoil_once(taker, taking, route, form, memory, keys, slots):  # noqa: ANN001, ANN202
        if taking.part == 3 and not spoiled:
            spoiled.append(taking)
            flip(memory, 100)
        return take(taker, taking, route, form, memory, keys, slots)

    monkeypatch.setattr(DeviceTaker, "take", spoil_once)
    pair = opened(CudaPair(transport))
    pair.run(by_layers=True)
    torch.cuda.synchronize()

    assert len(spoiled) == 1
    there, here = map(bytes_of, pair.pools)
    assert there == here


def test_kv_on_a_gpu_needs_sums_that_a_gpu_computes(opened: Opened) -> None:
    pair = opened(CudaPair())
    other = penstock.HandoffPair(
        prefill=pair.pair.prefill, decode=pair.pair.decode, model="bench", weights="v1"
    )

    with pytest.raises(ValueError, match="checksum of the pair is 'xxh3', must be 'mix64'"):
        penstock.open_decode(other, kv=pair.pools[1])
