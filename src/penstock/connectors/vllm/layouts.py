"""From the tensors that vLLM registers to a layout: strides are read, never guessed.

| vLLM keeps                                        | here                                     |
|---------------------------------------------------|------------------------------------------|
| on a GPU: K and V dense, [block, head, token, K|V] | a plane K and a plane V, by head         |
| on a GPU: latent KV, [block, 1, token, channel]    | a latent plane                           |
| K and V apart within a block, [block, 2, token, …] | opaque blocks, one a layer               |
| content that only its kernels can read             | opaque blocks, one a layer               |
| on the CPU: blocks packed for an instruction set    | opaque blocks; the set is in the form    |

The tensors are views in vLLM's logical order; the physical order, which is one of six, shows
in their strides alone. Groups of a hybrid model share one pool of pages: their tensors lie
over each other, and block ids keep them apart.

The one rule: a block that cannot be described is refused, and the engine runs without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.layers import GroupKind, HeadRange
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.planes import Axis, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from penstock.connectors.vllm.engine import Engine, LayerGroup

HEADS = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL)
LATENT = (Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL)


def tier_of(
    engine: Engine, caches: Mapping[str, torch.Tensor], encoding_of: Callable[[str], str]
) -> TensorTier:
    """The KV of vLLM as a device tier.

    Args:
        engine: The engine, as this rank sees it.
        caches: The tensor of each layer.
        encoding_of: Which kernels wrote a layer's blocks, for blocks only they can read.

    Raises:
        UnavailableError: the tensors lie in a way that is not understood here.
    """
    numbers = layer_numbers(engine, caches)
    layouts: list[Layout] = []
    storages: list[torch.UntypedStorage] = []
    for group in engine.groups:
        held = _group(engine, group, caches, numbers, encoding_of)
        # Each group by itself: what lies over another group's tensors is no overlap.
        layouts.append(TensorTier.of([held], block_tokens=engine.block_tokens).layout)
        storages += _storages(held)
    return TensorTier(Layout.join(layouts[0], *layouts[1:]), storages)


def layer_numbers(engine: Engine, caches: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The number of each layer in the layout; one that uses another's KV has the other's."""
    places = {name: number for number, name in enumerate(sorted(caches, key=_natural))}
    numbers: dict[str, int] = {}
    for group in engine.groups:
        owners: dict[int, int] = {}
        for name in sorted(group.layer_names, key=_natural):
            numbers[name] = owners.setdefault(caches[name].data_ptr(), places[name])
    return numbers


def _group(
    engine: Engine,
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
    """The tensor with one of vLLM's blocks along its first axis.

    Some kernels have smaller blocks than vLLM's own, several of which then follow each other.
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
        return [Held.of(Role.LATENT, tensor[:, 0], LATENT)] if tensor.shape[1] == 1 else []
    if not 0 < group.channels < tensor.shape[-1]:
        return []
    key, value = tensor[..., : group.channels], tensor[..., group.channels :]
    return [Held.of(Role.K, key, HEADS), Held.of(Role.V, value, HEADS)]


def _opaque(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor[0].is_contiguous():
        raise UnavailableError(
            f"layer {name} has blocks of shape {tuple(tensor.shape[1:])} and strides "
            f"{tuple(tensor.stride()[1:])}: only blocks in one run of bytes can be moved unread"
        )
    return tensor


def _heads(engine: Engine, count: int) -> HeadRange:
    """Which of the model's heads this rank holds; where there are too few, ranks repeat them."""
    total = max(engine.kv_heads, count)
    first = engine.rank * total // engine.rank_count
    return HeadRange(first=min(first, total - count), count=count, total=total)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts `layers.10` behind `layers.9`."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))
