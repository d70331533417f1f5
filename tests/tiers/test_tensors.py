"""Layouts read from real tensors: whatever their strides, the bytes are found."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock.cache.operations import Purpose  # noqa: E402 - torch may be absent
from penstock.movers.memcpy import MemcpyMover  # noqa: E402
from penstock.testing.mover_suite import LIFE, keys_of, make_copy, poll_until_idle  # noqa: E402
from penstock.testing.tier_suite import read_slots  # noqa: E402
from penstock.tiers.host import (  # noqa: E402
    HostTier,
    MemoryTier,
)
from penstock.tiers.tensors import (  # noqa: E402
    PART_FIRST,
    Held,
    TensorGroup,
    TensorLayer,
    TensorTier,
)
from penstock.vocabulary.checksums import (  # noqa: E402
    Algorithm,
    CellSpan,
    life_salt,
)
from penstock.vocabulary.layout import GroupKind, HeadRange  # noqa: E402
from penstock.vocabulary.planes import (  # noqa: E402
    Axis,
    DType,
    PlaneRole,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike
    from torch import Tensor

BLOCKS, TOKENS, HEADS, CHANNELS = 7, 4, 2, 8
B, T, H, C, P = Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL, Axis.PART
SIZES = {B: BLOCKS, T: TOKENS, H: HEADS, C: CHANNELS, P: 2}


@dataclass(frozen=True)
class Case:
    """A tier, and for each segment of a block in canonical order the numbers it holds."""

    tier: TensorTier
    segments: list[Tensor]
    """Of shape [blocks, ...]."""

    def packed(self, block: int) -> bytes:
        return b"".join(
            each[block].contiguous().view(torch.uint8).cpu().numpy().tobytes()
            for each in self.segments
        )


def draw(shape: list[int], dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(1, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, device=device)
    return raw.view(dtype)


def attention(layers: list[TensorLayer]) -> TensorGroup:
    return TensorGroup(kind=GroupKind.ATTENTION, layers=layers, heads=HeadRange.all_of(HEADS))


def by_head(*planes: tuple[Tensor, tuple[Axis, ...]]) -> list[Tensor]:
    """The segments of one layer: head after head, in it plane after plane."""
    found = []
    for head in range(HEADS):
        for tensor, axes in planes:
            order = [axes.index(axis) for axis in (B, H, T, C) if axis in axes]
            found.append(tensor.permute(order)[:, head])
    return found


def apart(device: str, dtype: torch.dtype, axes: tuple[Axis, ...] = (B, T, H, C)) -> Case:
    layers, segments = [], []
    for number in range(2):
        k, v = (draw([SIZES[axis] for axis in axes], dtype, device) for _ in range(2))
        planes = [Held.of(PlaneRole.K, k, axes), Held.of(PlaneRole.V, v, axes)]
        layers.append(TensorLayer(number=number, planes=planes))
        segments += by_head((k, axes), (v, axes))
    return Case(TensorTier.of([attention(layers)], block_tokens=TOKENS), segments)


def packed_kv(device: str, axes: tuple[Axis, ...]) -> Case:
    layers, segments = [], []
    rest = tuple(axis for axis in axes if axis is not P)
    for number in range(2):
        kv = draw([SIZES[axis] for axis in axes], device=device)
        layers.append(TensorLayer(number=number, planes=[Held.pair(kv, axes)]))
        k, v = kv.unbind(axes.index(P))
        segments += by_head((k, rest), (v, rest))
    return Case(TensorTier.of([attention(layers)], block_tokens=TOKENS), segments)


def one_for_all(device: str) -> Case:
    """Blocks outermost, then layers: what an engine does to keep a block together."""
    whole = draw([BLOCKS, 3, 2, TOKENS, HEADS, CHANNELS], device=device)
    axes = (B, P, T, H, C)
    layers, segments = [], []
    for number, kv in enumerate(whole.unbind(1)):
        layers.append(TensorLayer(number=number, planes=[Held.pair(kv, axes)]))
        k, v = kv.unbind(1)
        segments += by_head((k, (B, T, H, C)), (v, (B, T, H, C)))
    return Case(TensorTier.of([attention(layers)], block_tokens=TOKENS), segments)


def strided(device: str) -> Case:
    """A view of a larger tensor: heads of another model beside ours, and every second token."""
    whole = draw([BLOCKS, 2 * TOKENS, HEADS + 3, CHANNELS], device=device)
    axes = (B, T, H, C)
    k = whole[:, ::2, :HEADS]
    v = whole[:, 1::2, 2 : 2 + HEADS]
    planes = [Held.of(PlaneRole.K, k, axes), Held.of(PlaneRole.V, v, axes)]
    layers = [TensorLayer(number=5, planes=planes)]
    tier = TensorTier.of([attention(layers)], block_tokens=TOKENS)
    return Case(tier, by_head((k, axes), (v, axes)))


def split_channels(device: str) -> Case:
    """K with its channels in two parts around the tokens, as some kernels want it."""
    k = draw([BLOCKS, HEADS, CHANNELS // 4, TOKENS, 4], device=device)
    v = draw([BLOCKS, HEADS, CHANNELS, TOKENS], device=device)
    planes = [Held.of(PlaneRole.K, k, (B, H, C, T, C)), Held.of(PlaneRole.V, v, (B, H, C, T))]
    tier = TensorTier.of([attention([TensorLayer(number=0, planes=planes)])], block_tokens=TOKENS)
    segments = []
    for head in range(HEADS):
        segments += [k[:, head].permute(0, 2, 1, 3), v[:, head].permute(0, 2, 1)]
    return Case(tier, segments)


def scaled(device: str, dtype: torch.dtype) -> Case:
    axes, scale_axes = (B, T, H, C), (B, T, H)
    k, v = (draw([SIZES[axis] for axis in axes], dtype, device) for _ in range(2))
    scales = [draw([BLOCKS, TOKENS, HEADS], torch.float32, device) for _ in range(2)]
    planes = [
        Held.of(PlaneRole.K, k, axes),
        Held.of(PlaneRole.V, v, axes),
        Held.of(PlaneRole.K_SCALE, scales[0], scale_axes),
        Held.of(PlaneRole.V_SCALE, scales[1], scale_axes),
    ]
    tier = TensorTier.of([attention([TensorLayer(number=0, planes=planes)])], block_tokens=TOKENS)
    parts = [(k, axes), (v, axes), *((scale, scale_axes) for scale in scales)]
    return Case(tier, by_head(*parts))


def latent(device: str) -> Case:
    tensors = [draw([BLOCKS, TOKENS, 9], torch.float16, device) for _ in range(2)]
    layers = [
        TensorLayer(number=number, planes=[Held.of(PlaneRole.LATENT, kv, (B, T, C))])
        for number, kv in enumerate(tensors)
    ]
    group = TensorGroup(kind=GroupKind.LATENT, layers=layers)
    return Case(TensorTier.of([group], block_tokens=TOKENS), tensors)


def scaled_latent(device: str) -> Case:
    """Latent KV in fp8 with its scales, and the rotary part beside it in bf16."""
    kv = draw([BLOCKS, TOKENS, 8], torch.float8_e4m3fn, device)
    rope = draw([BLOCKS, TOKENS, 4], torch.bfloat16, device)
    scales = draw([BLOCKS, TOKENS, 2], torch.float32, device)
    planes = [
        Held.of(PlaneRole.LATENT, kv, (B, T, C)),
        Held.of(PlaneRole.ROPE, rope, (B, T, C)),
        Held.of(PlaneRole.LATENT_SCALE, scales, (B, T, C)),
    ]
    group = TensorGroup(kind=GroupKind.LATENT, layers=[TensorLayer(number=0, planes=planes)])
    return Case(TensorTier.of([group], block_tokens=TOKENS), [kv, rope, scales])


def several_groups(device: str) -> Case:
    """Full attention, a sliding window with a draft layer, and latent KV."""
    axes = (P, B, T, H, C)
    tensors = [draw([SIZES[axis] for axis in axes], device=device) for _ in range(3)]
    wide = draw([BLOCKS, TOKENS, 3], device=device)
    full = attention([TensorLayer(number=0, planes=[Held.pair(tensors[0])])])
    sliding = TensorGroup(
        kind=GroupKind.SLIDING,
        heads=HeadRange.all_of(HEADS),
        layers=[
            TensorLayer(number=1, planes=[Held.pair(tensors[1])]),
            TensorLayer(number=9, planes=[Held.pair(tensors[2])], draft=True),
        ],
    )
    rest = TensorGroup(
        kind=GroupKind.LATENT,
        layers=[TensorLayer(number=2, planes=[Held.of(PlaneRole.LATENT, wide, (B, T, C))])],
    )
    segments = []
    for kv in tensors:
        segments += by_head((kv[0], axes[1:]), (kv[1], axes[1:]))
    return Case(TensorTier.of([full, sliding, rest], block_tokens=TOKENS), [*segments, wide])


def opaque(device: str) -> Case:
    whole = draw([BLOCKS, 2, 37], torch.uint8, device)
    layers = [
        TensorLayer(number=number, planes=[Held.opaque(part, "bytes of an engine")])
        for number, part in enumerate(whole.unbind(1))
    ]
    group = TensorGroup(kind=GroupKind.OPAQUE, layers=layers)
    return Case(TensorTier.of([group], block_tokens=TOKENS), list(whole.unbind(1)))


CASES: dict[str, Callable[[str], Case]] = {
    "fp16, K and V apart": lambda device: apart(device, torch.float16),
    "bf16, K and V apart": lambda device: apart(device, torch.bfloat16),
    "fp8, K and V apart": lambda device: apart(device, torch.float8_e4m3fn),
    "int8, K and V apart": lambda device: apart(device, torch.int8),
    "heads before tokens": lambda device: apart(device, torch.bfloat16, (B, H, T, C)),
    "heads outermost": lambda device: apart(device, torch.bfloat16, (H, B, T, C)),
    "tokens innermost": lambda device: apart(device, torch.bfloat16, (B, H, C, T)),
    "K and V in one tensor": lambda device: packed_kv(device, PART_FIRST),
    "K and V of a block together": lambda device: packed_kv(device, (B, P, H, T, C)),
    "K and V side by side": lambda device: packed_kv(device, (B, T, H, P, C)),
    "one tensor for all layers": one_for_all,
    "a view with gaps": strided,
    "channels in two parts": split_channels,
    "fp8 with scales": lambda device: scaled(device, torch.float8_e4m3fn),
    "int8 with scales": lambda device: scaled(device, torch.int8),
    "latent": latent,
    "latent in fp8 with scales": scaled_latent,
    "several groups and a draft layer": several_groups,
    "opaque": opaque,
}


def order(axes: tuple[Axis, ...]) -> str:
    return " ".join(axis.value for axis in axes)


@pytest.mark.parametrize("name", CASES)
def test_a_block_is_found_whatever_the_strides(name: str) -> None:
    case = CASES[name]("cpu")

    blocks = read_slots(case.tier, range(BLOCKS))

    assert [block.tobytes() for block in blocks] == [case.packed(n) for n in range(BLOCKS)]


@pytest.mark.parametrize("name", CASES)
def test_blocks_go_down_and_come_back_into_other_slots(name: str) -> None:
    case = CASES[name]("cpu")
    before = [case.packed(block) for block in range(BLOCKS)]
    memory = MemoryTier(case.tier.layout, slot_count=3)
    save = MemcpyMover(case.tier, memory, Algorithm.MIX64)
    load = MemcpyMover(memory, case.tier, Algorithm.MIX64)

    save.submit(make_copy(1, [4, 0, 6], [2, 0, 1], purpose=Purpose.SAVE, keys=keys_of(3)))
    poll_until_idle(save)
    load.submit(make_copy(2, [2, 0, 1], [1, 2, 5], purpose=Purpose.LOAD, keys=keys_of(3)))
    (moved,) = poll_until_idle(load)

    assert moved.faults == ()
    expected = [before[at] for at in (0, 4, 0, 3, 4, 6, 6)]
    assert [case.packed(block) for block in range(BLOCKS)] == expected


@pytest.mark.parametrize("axes", [*permutations((B, T, H, C))], ids=order)
def test_axes_may_come_in_any_order(axes: tuple[Axis, ...]) -> None:
    case = apart("cpu", torch.bfloat16, axes)
    other = apart("cpu", torch.bfloat16, axes[::-1])

    copy_through_an_arena(case.tier, other.tier, range(BLOCKS), range(BLOCKS)[::-1])

    arrived = [other.packed(block) for block in range(BLOCKS)[::-1]]
    assert arrived == [case.packed(block) for block in range(BLOCKS)]


@pytest.mark.parametrize("axes", [*permutations((P, B, T, H, C))], ids=order)
def test_axes_of_a_packed_tensor_may_come_in_any_order(axes: tuple[Axis, ...]) -> None:
    case = packed_kv("cpu", axes)
    other = packed_kv("cpu", axes[::-1])

    copy_through_an_arena(case.tier, other.tier, [3, 1], [0, 6])

    assert [other.packed(block) for block in (0, 6)] == [case.packed(block) for block in (3, 1)]


def test_a_tensor_may_have_a_single_block() -> None:
    axes = (B, T, H, C)
    case, other = (
        TensorTier.of(
            [
                attention(
                    [
                        TensorLayer(
                            number=number,
                            planes=[
                                Held.of(role, draw([1, TOKENS, HEADS, CHANNELS]), axes)
                                for role in (PlaneRole.K, PlaneRole.V)
                            ],
                        )
                        for number in range(3)
                    ]
                )
            ],
            block_tokens=TOKENS,
        )
        for _ in range(2)
    )

    copy_through_an_arena(case, other, [0], [0])

    np.testing.assert_array_equal(read_slots(other, [0]), read_slots(case, [0]))


def test_the_groups_of_a_block_may_lie_in_different_slots() -> None:
    case = CASES["several groups and a draft layer"]("cpu")
    other = CASES["several groups and a draft layer"]("cpu")
    untouched = [segment.clone() for segment in other.segments]
    sources = [[4, 0], [1, 6], [2, 3]]
    targets = [[5, 1], [0, -1], [6, 2]]  # The sliding window needs the first block alone.

    copy_through_an_arena(case.tier, other.tier, sources, targets)

    full, sliding, latent_kv = slice(0, 4), slice(4, 12), slice(12, 13)
    for part, read, write in zip((full, sliding, latent_kv), sources, targets, strict=True):
        for theirs, mine, before in zip(
            case.segments[part], other.segments[part], untouched[part], strict=True
        ):
            arrived = {to: theirs[at] for at, to in zip(read, write, strict=True) if to >= 0}
            for block in range(BLOCKS):
                wanted = arrived.get(block, before[block])
                assert torch.equal(mine[block].view(torch.int16), wanted.view(torch.int16))


def copy_through_an_arena(
    source: TensorTier, target: TensorTier, sources: ArrayLike, targets: ArrayLike
) -> None:
    """Blocks go from one engine's tensors into a host arena, and from there into another's."""
    count = np.shape(sources)[-1]
    with HostTier.create(source.layout, count, huge_pages=False) as host:
        down = MemcpyMover(source, host, Algorithm.XXH3)
        up = MemcpyMover(host, target, Algorithm.XXH3)
        slots, keys = range(count), keys_of(count)
        down.submit(make_copy(1, sources, slots, purpose=Purpose.SAVE, keys=keys))
        up.submit(make_copy(2, slots, targets, purpose=Purpose.LOAD, keys=keys))
        moved = [*poll_until_idle(down), *poll_until_idle(up)]
        del down, up
    assert [each.faults for each in moved] == [(), ()]


def test_the_bytes_stay_in_the_tensors_of_the_engine() -> None:
    case = CASES["latent"]("cpu")

    case.segments[1][3] = 1.5

    assert read_slots(case.tier, [3])[0].tobytes() == case.packed(3)


def test_views_of_one_tensor_share_a_buffer() -> None:
    case = CASES["one tensor for all layers"]("cpu")

    assert list(case.tier.addresses) == [0]
    assert case.tier.layout.buffer_bytes[0] == BLOCKS * case.tier.layout.block_bytes


def test_addresses_are_where_the_tensors_start() -> None:
    kv = draw([BLOCKS, TOKENS, 9])
    held = Held.of(PlaneRole.LATENT, kv[2:], (B, T, C))
    layers = [TensorLayer(number=0, planes=[held])]

    tier = TensorTier.of([TensorGroup(kind=GroupKind.LATENT, layers=layers)], block_tokens=TOKENS)

    plane = tier.layout.groups[0].layers[0].planes[0]
    assert tier.addresses[0] + plane.offset == kv[2:].data_ptr()
    assert tier.slot_count == BLOCKS - 2


def test_plain_bytes_may_be_named_as_what_they_are() -> None:
    raw = draw([BLOCKS, TOKENS, 9], torch.uint8)

    held = Held.of(PlaneRole.LATENT, raw, (B, T, C), dtype=DType.FP8_E4M3)

    assert held.planes(0)[0].dtype is DType.FP8_E4M3


def test_a_number_format_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype is bf16 of 2 bytes, the tensor has numbers of 1"):
        Held.of(PlaneRole.LATENT, draw([2, 2, 2], torch.uint8), (B, T, C), dtype=DType.BF16)


def test_an_opaque_block_in_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="must lie in one run of bytes"):
        Held.opaque(draw([BLOCKS, 4, 8]).transpose(1, 2), "bytes of an engine")


def test_an_opaque_tensor_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no blocks"):
        Held.opaque(torch.empty(0, 4), "bytes of an engine")


def test_a_broadcast_tensor_is_refused() -> None:
    kv = draw([1, TOKENS, 9]).expand(BLOCKS, TOKENS, 9)

    with pytest.raises(ValueError, match="stride of the block axis is 0"):
        Held.of(PlaneRole.LATENT, kv, (B, T, C)).planes(0)


def test_as_many_storages_as_the_layout_has_buffers_are_needed() -> None:
    case = CASES["latent"]("cpu")
    storage = case.segments[0].untyped_storage()

    with pytest.raises(ValueError, match="kv has 1 storages, the layout needs one for each"):
        TensorTier(case.tier.layout, [storage])


def test_a_storage_that_is_too_small_is_refused() -> None:
    case = CASES["latent"]("cpu")
    small = torch.zeros(5, dtype=torch.uint8).untyped_storage()

    with pytest.raises(ValueError, match=r"kv\[1\] has 5 bytes"):
        TensorTier(case.tier.layout, [case.segments[0].untyped_storage(), small])


def test_the_medium_says_where_the_tensors_lie() -> None:
    case = CASES["latent"]("cpu")

    assert case.tier.medium == "arrays"
    assert np.shares_memory(
        case.tier.blocks([0]).buffers[0], case.segments[0].view(torch.uint8).numpy()
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layerwise", [False, True])
def test_on_a_gpu_blocks_go_down_and_come_back_into_other_slots(
    name: str, *, layerwise: bool
) -> None:
    from lab.fixtures.pinned_tier import PinnedTier  # noqa: PLC0415
    from penstock.movers.cuda.layers import LayerLoadMover  # noqa: PLC0415 - needs CUDA
    from penstock.movers.cuda.mover import LoadMover, SaveMover  # noqa: PLC0415

    case = CASES[name]("cuda")
    before = [case.packed(block) for block in range(BLOCKS)]
    host = PinnedTier(case.tier.layout, slot_count=3)
    save = SaveMover(case.tier, host, Algorithm.MIX64)
    make_load = LayerLoadMover if layerwise else LoadMover
    load = make_load(host, case.tier, Algorithm.MIX64)

    save.submit(make_copy(1, [4, 0, 6], [2, 0, 1], purpose=Purpose.SAVE, keys=keys_of(3)))
    save.poll(budget_bytes=1 << 30)
    save.wait()
    saved = save.collect()
    load.submit(make_copy(2, [2, 0, 1], [1, 2, 5], purpose=Purpose.LOAD, keys=keys_of(3)))
    load.poll(budget_bytes=1 << 30)
    load.wait()
    (loaded,) = load.collect()

    span = CellSpan.of(case.tier.layout)
    salt = life_salt(*LIFE)
    sums = span.sum_blocks(host.packed[[2, 0, 1]], keys_of(3), Algorithm.MIX64, salt=salt)
    assert [moved.faults for moved in (*saved, loaded)] == [(), ()]
    assert [host.packed[slot].tobytes() for slot in (2, 0, 1)] == [before[n] for n in (4, 0, 6)]
    np.testing.assert_array_equal(host.sums(np.array([2, 0, 1], dtype=np.int32)), sums)
    expected = [before[at] for at in (0, 4, 0, 3, 4, 6, 6)]
    assert [case.packed(block) for block in range(BLOCKS)] == expected
    assert case.tier.medium == "cuda"
    for each in (save, load, host):
        each.close()
