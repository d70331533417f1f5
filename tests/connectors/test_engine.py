"""The strides of what vLLM registers, in each physical order it knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.fixtures.extents import plane_extents
from penstock.connectors.base.engine import (
    LayerGroup,
    ServedEngine,
    handed_tiers,
    layer_numbers,
    tier_of,
)
from penstock.errors import UnavailableError
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import GroupKind
from penstock.vocabulary.planes import PlaneRole
from penstock.vocabulary.reshard import plan_reshard
from tests.connectors.orders import LOGICAL, ORDERS

BLOCKS, HEADS, TOKENS, CHANNELS, LAYERS = 6, 2, 4, 8, 3
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * CHANNELS}


def views(order: str, device: str = "meta") -> dict[str, torch.Tensor]:
    """One allocation in a physical order, as views [block, head, token, content] of its layers."""
    whole = torch.empty([SIZES[axis] for axis in order], device=device)
    logical = whole.permute([order.index(axis) for axis in LOGICAL])
    return {f"model.layers.{layer}.attn": logical[layer] for layer in range(LAYERS)}


def engine(
    names: list[str], kind: GroupKind = GroupKind.ATTENTION, channels: int = CHANNELS
) -> ServedEngine:
    group = LayerGroup(kind=kind, layer_names=tuple(names), block_tokens=TOKENS, channels=channels)
    return ServedEngine(name="e", groups=(group,), block_count=BLOCKS, rank_count=1, kv_heads=HEADS)


def encoding(name: str) -> str:
    return f"kernels of {name}"


@pytest.mark.parametrize("order", ORDERS)
def test_k_and_v_lie_where_vllm_says(order: str) -> None:
    """On a device that is no CPU; the bytes are compared with torch's own indexing."""
    whole = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * 2 * CHANNELS).float()
    real = {
        name: whole.view([SIZES[axis] for axis in order]).permute(
            [order.index(axis) for axis in LOGICAL]
        )[layer]
        for layer, name in enumerate(views(order))
    }
    layout = tier_of(engine(list(real)), views(order), encoding).layout

    for layer, name in zip(layout.groups[0].layers, real, strict=True):
        assert [plane.role for plane in layer.planes] == [PlaneRole.K, PlaneRole.V]
        for plane, half in zip(layer.planes, real[name].split(CHANNELS, dim=-1), strict=True):
            for block in range(BLOCKS):
                for head in range(HEADS):
                    found = torch.cat(
                        [
                            whole[extent.offset // 4 : (extent.offset + extent.length) // 4]
                            for extent in plane_extents(plane, block, head)
                        ]
                    )
                    assert (found == half[block, head].flatten()).all()


def test_layers_are_numbered_by_number() -> None:
    names = [f"model.layers.{number}.attn" for number in range(12)]
    whole = torch.empty(12, BLOCKS, HEADS, TOKENS, 2 * CHANNELS, device="meta")

    layout = tier_of(engine(names), dict(zip(names, whole, strict=True)), encoding).layout

    offsets = [layer.planes[0].offset for layer in layout.groups[0].layers]
    assert offsets == sorted(offsets)


def test_latent_kv_is_one_plane_without_heads() -> None:
    caches = {"layers.0.attn": torch.empty(BLOCKS, 1, TOKENS, 576, device="meta")}

    layout = tier_of(engine(list(caches), GroupKind.LATENT, 0), caches, encoding).layout

    (plane,) = layout.groups[0].layers[0].planes
    assert plane.role is PlaneRole.LATENT
    assert plane.block_bytes == TOKENS * 576 * 4


def test_on_the_cpu_blocks_are_opaque_and_the_kernels_are_in_the_form() -> None:
    caches = views("LBHNC", "cpu")

    layout = tier_of(engine(list(caches)), caches, encoding).layout

    (plane,) = layout.groups[0].layers[1].planes
    assert plane.role is PlaneRole.OPAQUE
    assert plane.encoding == "kernels of model.layers.1.attn"
    assert layout.groups[0].kind is GroupKind.OPAQUE


def handed_form(order: str, rank: int, ranks: int, *, by_head: bool = True) -> Form:
    """What other engines know of a rank, whose share of the heads is its own."""
    heads = max(1, HEADS // ranks)
    caches = {name: each[:, :heads].clone() for name, each in views(order, "cpu").items()}
    served = replace(engine(list(caches)), rank=rank, rank_count=ranks)
    tier = tier_of(served, caches, encoding)
    encodings = dict.fromkeys(range(LAYERS), "a head") if by_head else {}
    (handed,) = handed_tiers(served, tier, encodings)
    return Form(layout=handed.layout)


@pytest.mark.parametrize("by_head", [True, False])
def test_opaque_blocks_of_several_ranks_go_to_the_rank_with_their_heads(by_head: bool) -> None:  # noqa: FBT001
    two = [handed_form("LBHNC", rank, 2, by_head=by_head) for rank in range(2)]

    routes = plan_reshard(two, two).routes

    assert sorted((route.source, route.target) for route in routes) == [(0, 0), (1, 1)]


@pytest.mark.parametrize(("sources", "targets"), [(2, 1), (1, 2), (4, 1), (1, 4)])
def test_heads_that_lie_one_after_the_other_go_to_any_number_of_ranks(
    sources: int, targets: int
) -> None:
    """With four ranks, two of them hold the same head."""
    forms = {
        count: [handed_form("LBHNC", rank, count) for rank in range(count)]
        for count in (sources, targets)
    }

    plan = plan_reshard(forms[sources], forms[targets])

    sent = [piece.heads.count for route in plan.routes for piece in route.pieces if piece.heads]
    assert sum(sent) == targets * max(1, HEADS // targets)


def test_opaque_blocks_are_not_cut_into_heads() -> None:
    two = [handed_form("LBHNC", rank, 2, by_head=False) for rank in range(2)]
    one = [handed_form("LBHNC", 0, 1, by_head=False)]

    for sources, targets in [(two, one), (one, two)]:
        with pytest.raises(ValueError, match="plane opaque of layer 0 has no heads to cut"):
            plan_reshard(sources, targets)


def test_blocks_that_do_not_divide_into_their_heads_are_refused() -> None:
    caches = {"layers.0": torch.zeros(BLOCKS, 3, TOKENS, 2, dtype=torch.uint8)}
    odd = replace(engine(["layers.0"]), kv_heads=5)
    tier = tier_of(odd, caches, encoding)

    with pytest.raises(UnavailableError, match="24 bytes and 5 heads"):
        handed_tiers(odd, tier, {0: "a head"})


def test_groups_of_a_hybrid_may_lie_over_each_other() -> None:
    """vLLM gives all groups one pool of pages; block ids keep them apart."""
    pages = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CHANNELS)
    groups = tuple(
        LayerGroup(kind=kind, layer_names=(name,), block_tokens=TOKENS)
        for kind, name in [(GroupKind.SLIDING, "layers.0"), (GroupKind.ATTENTION, "layers.1")]
    )
    hybrid = ServedEngine(name="e", groups=groups, block_count=BLOCKS, rank_count=1)

    tier = tier_of(hybrid, {"layers.0": pages, "layers.1": pages}, encoding)

    assert len(tier.layout.groups) == 2
    assert tier.layout.block_bytes == 2 * pages[0].nbytes


def test_layers_that_share_kv_are_taken_once() -> None:
    caches = views("LBHNC", "cpu")
    caches["model.layers.9.attn"] = caches["model.layers.0.attn"]

    layout = tier_of(engine(list(caches)), caches, encoding).layout

    assert len(layout.groups[0].layers) == LAYERS
    numbers = layer_numbers(engine(list(caches)), caches)
    assert numbers["model.layers.9.attn"] == numbers["model.layers.0.attn"]
    assert {*numbers.values()} == {layer.number for layer in layout.groups[0].layers}


def test_kernel_blocks_smaller_than_vllms_are_joined() -> None:
    caches = {"layers.0": torch.zeros(4 * BLOCKS, HEADS, TOKENS, CHANNELS)}

    layout = tier_of(engine(["layers.0"]), caches, encoding).layout

    assert layout.block_count == BLOCKS
    assert layout.block_bytes == 4 * caches["layers.0"][0].nbytes


def test_what_cannot_be_described_is_refused() -> None:
    scattered = {"layers.0": views("LHBNC", "cpu")["model.layers.0.attn"]}
    with pytest.raises(UnavailableError, match=r"layers\.0"):
        tier_of(engine(["layers.0"]), scattered, encoding)

    odd = {"layers.0": torch.zeros(BLOCKS + 1, HEADS, TOKENS, CHANNELS)}
    with pytest.raises(UnavailableError, match=r"shape \(7, 2, 4, 8\).* must have 6 blocks"):
        tier_of(engine(["layers.0"]), odd, encoding)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_k_and_v_apart_within_a_block_are_moved_unread(device: str) -> None:
    """As two head slots, which is how vLLM describes kernels that want K and V apart."""
    apart = {"layers.0": torch.empty(BLOCKS, 2, TOKENS, HEADS * CHANNELS, device=device)}

    layout = tier_of(engine(["layers.0"], channels=0), apart, encoding).layout

    (plane,) = layout.groups[0].layers[0].planes
    assert (plane.role, plane.encoding) == (PlaneRole.OPAQUE, "kernels of layers.0")
    assert plane.block_bytes == 2 * TOKENS * HEADS * CHANNELS * 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_k_and_v_each_over_all_blocks_are_refused(device: str) -> None:
    whole = torch.empty(2, BLOCKS, TOKENS, HEADS * CHANNELS, device=device)
    apart = {"layers.0": whole.permute(1, 0, 2, 3)}

    with pytest.raises(UnavailableError, match="only blocks in one run of bytes can be moved"):
        tier_of(engine(["layers.0"], channels=0), apart, encoding)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_k_and_v_in_two_halves_of_a_tensor_are_refused(device: str) -> None:
    """As vLLM once had them. Which axis is which is not guessed from sizes."""
    split = {"layers.0": torch.empty(2, BLOCKS, TOKENS, HEADS, CHANNELS, device=device)}

    with pytest.raises(UnavailableError) as refused:
        tier_of(engine(["layers.0"]), split, encoding)

    assert str(refused.value) == (
        "layer layers.0 is a tensor of shape (2, 6, 4, 2, 8) and strides (384, 64, 16, 8, 1), must "
        "have 6 blocks along its first axis, or a multiple of it without gaps"
    )
