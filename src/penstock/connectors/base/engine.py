"""What a connector must know about the engine it serves, and the engine's KV as a device tier.

`ServedEngine` describes an engine as values; the connector for an engine reads them from that
engine's own configuration. `tier_of` turns the tensors that the engine registers into a tier: it
reads strides and never guesses them.

| the engine keeps                                   | layout here                              |
|----------------------------------------------------|------------------------------------------|
| on a GPU: K and V dense, [block, head, token, K|V] | a plane K and a plane V, by head         |
| on a GPU: latent KV, [block, 1, token, channel]    | a latent plane                           |
| K and V apart within a block, [block, 2, token, …] | opaque blocks, one a layer               |
| content that only its kernels can read             | opaque blocks, one a layer               |
| on the CPU: blocks packed for an instruction set   | opaque blocks; the set is in the form.   |
|                                                    | For other engines: opaque heads          |

The tensors are views in logical order; the physical order shows in their strides alone. Groups of
a hybrid model share one pool of pages: their tensors overlap, and block ids keep them apart.

The one rule: an engine or a block layout that is not understood is refused with a reason, and the
engine then runs without Penstock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import UnavailableError
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.layout import GroupKind, HeadRange, Layout
from penstock.vocabulary.planes import Axis, Dim, PlaneRole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from penstock.config import Config
    from penstock.connectors.base.keys import Drafts
    from penstock.vocabulary.layout import Group
    from penstock.vocabulary.planes import Plane

HEADS = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL)
LATENT = (Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share a block table."""

    kind: GroupKind
    layer_names: tuple[str, ...]
    block_tokens: int
    channels: int = 0
    """Channels of K, where K and V lie dense side by side; 0 where only the engine reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """One engine: a scheduler and its ranks."""

    name: str
    """Names the engine among those of the machine, the same on all its ranks."""
    groups: tuple[LayerGroup, ...]
    block_count: int
    rank_count: int
    rank: int = 0
    """The number of this rank, in a worker."""
    equal_ranks: bool = False
    """Whether every rank holds the same bytes."""
    kv_dtype: str = "bfloat16"
    kv_heads: int = 1
    """KV heads of the whole model, for those layers that have heads."""
    drafts: Drafts | None = None
    """Layers among those of the groups that draft tokens."""
    device: str = "cpu"
    """Where its KV lies."""
    unsupported: tuple[str, ...] = ()
    """Options of the engine that the connector does not support."""
    irreversible: tuple[str, ...] = ()
    """Options with which it cannot take a step back."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, the same in every group."""
        return self.groups[0].block_tokens

    @property
    def rank_heads(self) -> int:
        """KV heads of one rank; where the model has fewer than ranks, several hold the same."""
        return max(1, self.kv_heads // self.rank_count)

    @property
    def window_groups(self) -> tuple[int, ...]:
        """The KV groups in which a request loses blocks while it runs."""
        whole = {GroupKind.ATTENTION, GroupKind.LATENT}
        return tuple(at for at, group in enumerate(self.groups) if group.kind not in whole)

    @property
    def blocks_stay(self) -> bool:
        """Whether a request keeps every block it was given, in the one group there is."""
        return len(self.groups) == 1 and not self.window_groups

    def why_not(self) -> str:
        """Why this engine must run without Penstock; empty if it need not."""
        if self.unsupported:
            return "; ".join(self.unsupported)
        if not self.groups:
            return "the model has no KV cache"
        sizes = sorted({group.block_tokens for group in self.groups})
        if len(sizes) > 1:
            return f"KV groups have blocks of {' and '.join(map(str, sizes))} tokens, must be equal"
        return ""

    def why_not_layerwise(self) -> str:
        """Why no step may compute on loads before they are verified; empty if one may.

        vLLM can take such a step back where a block id identifies its request, and where all KV
        before the block is still there.
        """
        if not self.blocks_stay:
            kinds = ", ".join(group.kind.name.lower() for group in self.groups)
            return (
                f"is true with {len(self.groups)} KV groups ({kinds}), must be false: a step on "
                "damaged blocks can be taken back with one group only, of attention or latent KV"
            )
        if self.irreversible:
            return f"is true, must be false, or: {'; '.join(self.irreversible)}"
        return ""

    def why_not_handoff(self) -> str:
        """Why prompts of this engine cannot be handed over; empty if they can."""
        if self.device not in {"cpu", "cuda"}:
            return f"KV lies on {self.device}: prompts are handed over on CPUs and CUDA GPUs only"
        return ""

    def fit_config(self, config: Config, *, layerwise: bool = False) -> Config:
        """The configuration with device blocks, block size, ranks and KV groups of this engine.

        Tiers and policies stay as the file has them.
        """
        cache = replace(
            config.cache,
            device=None,
            block_tokens=self.block_tokens,
            rank_count=self.rank_count,
            group_count=len(self.groups),
        )
        shared = self.equal_ranks and self.rank_count > 1 and _has_host_hub(config)
        model = replace(config.model, kv_dtype=self.kv_dtype)
        layer_wise = "auto" if layerwise else config.layer_wise
        return replace(config, cache=cache, equal_ranks=shared, model=model, layer_wise=layer_wise)


def _has_host_hub(config: Config) -> bool:
    return bool(config.tier_kinds) and config.tier_kinds[0].name == "host"


def tier_of(
    engine: ServedEngine, caches: Mapping[str, torch.Tensor], encoding_of: Callable[[str], str]
) -> TensorTier:
    """The engine's KV as a device tier.

    Raises `UnavailableError`: the layout of the tensors is not supported.
    """
    numbers = layer_numbers(engine, caches)
    layouts: list[Layout] = []
    storages: list[torch.UntypedStorage] = []
    for group in engine.groups:
        held = _group(engine, group, caches, numbers, encoding_of)
        # Each group by itself: tensors of different groups may share memory.
        layouts.append(TensorTier.of([held], block_tokens=engine.block_tokens).layout)
        storages += _storages(held)
    return TensorTier(Layout.join(layouts[0], *layouts[1:]), storages)


def handed_tiers(
    engine: ServedEngine, tier: TensorTier, head_encodings: Mapping[int, str]
) -> list[TensorTier]:
    """The same KV, as other engines must know it: a tier for each KV group, with its own blocks.

    Blocks that are moved unread have heads here, too: which ones decides which rank of another
    engine gets them. In the tiers below the device each rank has its own, so there nobody asks.
    Layers are numbered as `handed_layers` says.
    """
    heads = _heads(engine, engine.rank_heads)
    numbers = {layer: at.layer for layer, at in handed_layers(tier.layout).items()}
    found: list[TensorTier] = []
    for group in tier.layout.groups:
        handed = group if engine.equal_ranks else _handed_group(group, heads, head_encodings)
        layers = tuple(replace(each, number=numbers[each.number]) for each in handed.layers)
        layout = Layout(
            groups=(replace(handed, layers=layers),), block_tokens=tier.layout.block_tokens
        )
        found.append(tier.described_by(layout))
    return found


class HandedLayer(NamedTuple):
    """Where the KV of a layer is among what is handed over."""

    group: int
    layer: int


def handed_layers(layout: Layout) -> dict[int, HandedLayer]:
    """Each layer by its number: its KV group, and its number where prompts are handed over.

    There, groups follow each other, so that the layers of one have no gaps. Engines that hand over
    to each other must have the same layers in the same groups.
    """
    found: dict[int, HandedLayer] = {}
    for number, group in enumerate(layout.groups):
        for layer in group.layers:
            found[layer.number] = HandedLayer(number, len(found))
    return found


def _handed_group(group: Group, heads: HeadRange, head_encodings: Mapping[int, str]) -> Group:
    if group.kind is not GroupKind.OPAQUE:
        return group
    if all(layer.number in head_encodings for layer in group.layers):
        layers = tuple(
            replace(layer, planes=(_by_head(layer.planes[0], heads, head_encodings[layer.number]),))
            for layer in group.layers
        )
        return replace(group, layers=layers, heads=heads)
    return replace(group, heads=heads)


def _by_head(plane: Plane, heads: HeadRange, encoding: str) -> Plane:
    """A plane of opaque blocks, each of which is opaque heads one after the other."""
    head_bytes, rest = divmod(plane.block_bytes, heads.count)
    if rest:
        raise UnavailableError(
            f"a block has {plane.block_bytes} bytes and {heads.count} heads: heads of one block "
            "must have equally many bytes"
        )
    dims = (
        plane.dims[0],
        Dim(axis=Axis.HEAD, size=heads.count, stride=head_bytes),
        Dim(axis=Axis.CHANNEL, size=head_bytes, stride=1),
    )
    return replace(plane, dims=dims, encoding=encoding)


def layer_numbers(engine: ServedEngine, caches: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The number of each layer in the layout; one that uses another's KV has the other's."""
    places = {name: number for number, name in enumerate(sorted(caches, key=_natural))}
    numbers: dict[str, int] = {}
    for group in engine.groups:
        owners: dict[int, int] = {}
        for name in sorted(group.layer_names, key=_natural):
            numbers[name] = owners.setdefault(caches[name].data_ptr(), places[name])
    return numbers


def _group(
    engine: ServedEngine,
    group: LayerGroup,
    caches: Mapping[str, torch.Tensor],
    numbers: Mapping[str, int],
    encoding_of: Callable[[str], str],
) -> TensorGroup:
    seen: set[int] = set()
    layers: list[TensorLayer] = []
    kind, heads = group.kind, None
    for name in sorted(group.layer_names, key=_natural):
        tensor = _whole_blocks(name, caches[name], engine.block_count)
        # Layers that use another layer's KV are registered with its tensor.
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        planes = _planes(group, tensor) or [Held.opaque(_opaque(name, tensor), encoding_of(name))]
        if planes[0].encoding:
            kind = GroupKind.OPAQUE
        elif planes[0].axes == HEADS:
            heads = _heads(engine, tensor.shape[1])
        layers.append(TensorLayer(number=numbers[name], planes=planes))
    return TensorGroup(kind=kind, layers=layers, heads=None if kind is GroupKind.OPAQUE else heads)


def _storages(group: TensorGroup) -> list[torch.UntypedStorage]:
    """The storages of a group in the order in which its layout numbers them."""
    tensors = [held.tensor for layer in group.layers for held in layer.planes]
    found = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return list(found.values())


def _whole_blocks(name: str, tensor: torch.Tensor, block_count: int) -> torch.Tensor:
    """The tensor with one of the engine's blocks along its first axis.

    Some kernels have smaller blocks than the engine, several of which then follow each other.
    """
    if tensor.shape[0] == block_count:
        return tensor
    parts, rest = divmod(tensor.shape[0], block_count)
    if rest or parts < 1 or not tensor.is_contiguous():
        raise UnavailableError(
            f"layer {name} is a tensor of shape {tuple(tensor.shape)} and strides "
            f"{tuple(tensor.stride())}, must have {block_count} blocks along its first axis, or a "
            "multiple of it without gaps"
        )
    return tensor.view(block_count, -1)


def _planes(group: LayerGroup, tensor: torch.Tensor) -> list[Held]:
    """The planes of a layer that can be described number by number; else nothing."""
    if tensor.device.type == "cpu" or tensor.ndim != len(HEADS):
        return []
    if group.kind is GroupKind.LATENT:
        return [Held.of(PlaneRole.LATENT, tensor[:, 0], LATENT)] if tensor.shape[1] == 1 else []
    if not 0 < group.channels < tensor.shape[-1]:
        return []
    key, value = tensor[..., : group.channels], tensor[..., group.channels :]
    return [Held.of(PlaneRole.K, key, HEADS), Held.of(PlaneRole.V, value, HEADS)]


def _opaque(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor[0].is_contiguous():
        raise UnavailableError(
            f"layer {name} has blocks of shape {tuple(tensor.shape[1:])} and strides "
            f"{tuple(tensor.stride()[1:])}: only blocks in one run of bytes can be moved unread"
        )
    return tensor


def _heads(engine: ServedEngine, count: int) -> HeadRange:
    """Which of the model's heads this rank holds; where there are too few, ranks repeat them."""
    total = max(engine.kv_heads, count)
    first = engine.rank * total // engine.rank_count
    return HeadRange(first=min(first, total - count), count=count, total=total)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts `layers.10` behind `layers.9`."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))
