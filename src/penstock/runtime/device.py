"""The engine's own memory as a tier, and how blocks that leave it are summed.

| `kv`                                         | tier          | cells are summed by |
|----------------------------------------------|---------------|---------------------|
| NumPy arrays                                 | `ArrayTier`   | xxh3                |
| torch tensors on the CPU                     | `TensorTier`  | xxh3                |
| torch tensors on a GPU                       | `CudaTier`    | mix64               |
| a `TensorTier` that the engine described     | as above      | by where it lies    |
| a `CudaTier`, to choose layer-wise loads     | as it is      | mix64               |

Another kind of device is a row of `ALGORITHMS`, and movers to and from it. torch is not imported
here unless the engine has imported it, which it has if it gives us tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.errors import ConfigError, UnavailableError
from penstock.tiers.arrays import ArrayTier, opaque_layout
from penstock.vocabulary.arguments import as_tuple
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.dtypes import DTYPE_NAMES, DType
from penstock.vocabulary.layers import GroupKind
from penstock.vocabulary.planes import PlaneRole

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray

    from penstock.config import Config
    from penstock.movers.cuda.device import CudaTier
    from penstock.tiers.tensors import TensorTier
    from penstock.vocabulary.layout import Layout

    Memory: TypeAlias = NDArray[np.generic] | torch.Tensor
    Kv: TypeAlias = Memory | Sequence[Memory] | TensorTier | CudaTier
    DeviceTier: TypeAlias = ArrayTier | TensorTier | CudaTier

ALGORITHMS: Mapping[str, Algorithm] = {"arrays": Algorithm.XXH3, "cuda": Algorithm.MIX64}
"""How cells are summed, by the medium of the device: whatever costs least there."""
_MOVERS_OF_GPUS = "penstock.movers.cuda.device"


def device_tier(config: Config, kv: Kv, layout: Layout | None) -> tuple[DeviceTier, Algorithm]:
    """The device tier over the engine's memory.

    Raises `ConfigError`: the configuration does not fit the memory; `ValueError`: the memory cannot
    be used, or does not fit the layout.
    """
    tier = memory_tier(
        kv,
        layout,
        block_tokens=config.cache.block_tokens,
        layer_wise=config.layer_wise == "auto",
    )
    _require_kv_dtype(config, kv, layout)
    algorithm = ALGORITHMS.get(tier.medium)
    if algorithm is None:
        raise ValueError(f"kv lies on {tier.medium!r}, must be on one of {', '.join(ALGORITHMS)}")
    if tier.layout.block_tokens != config.cache.block_tokens:
        raise ConfigError(
            "cache.block_tokens",
            f"is {config.cache.block_tokens}, must be {tier.layout.block_tokens}, the tokens of a "
            "block of the layout",
        )
    if len(tier.layout.groups) != config.cache.group_count:
        raise ConfigError(
            "cache.groups",
            f"is {config.cache.group_count}, must be {len(tier.layout.groups)}, the groups of the "
            "layout",
        )
    managed = config.cache.device
    if managed is not None and tier.slot_count < managed.slot_count:
        raise ConfigError(
            "cache.blocks",
            f"is {managed.slot_count}, must be at most {tier.slot_count}, the blocks that kv has",
        )
    return tier, algorithm


_RAW_ITEMSIZES: Mapping[str, frozenset[int]] = {
    # NumPy has no bfloat16 and no float8: engines keep them in integers of the same size.
    "uint8": frozenset({1, 2, 4, 8}),
    "int8": frozenset({1}),
    "uint16": frozenset({2}),
    "int16": frozenset({2}),
    "uint32": frozenset({4}),
    "int32": frozenset({4}),
    "uint64": frozenset({8}),
    "int64": frozenset({8}),
}
"""Element types that say nothing about the numbers kept in them, and the sizes of those numbers."""
_KV_ROLES = frozenset({PlaneRole.K, PlaneRole.V, PlaneRole.LATENT})


def _require_kv_dtype(config: Config, kv: object, layout: Layout | None) -> None:
    """Keys name the element type of the KV: a wrong name would be found by another engine.

    Whoever describes tensors as a tier says the type there.
    Raises `ConfigError`: `model.kv_dtype` is not the type of what is in `kv`.
    """
    named = config.model.kv_dtype
    if not named:
        return
    for found in sorted(_element_types(kv, layout)):
        if _is_kept_as(found, DType.parse(named)):
            continue
        if found in DTYPE_NAMES:
            problem = f"is {named!r}, must be {found!r}, the element type of the KV that was given"
        else:
            problem = f"is {named!r}, the KV that was given has elements of {found!r}"
        raise ConfigError("model.kv_dtype", problem)


def kv_dtype_of(kv: object, layout: Layout | None) -> str:
    """The element type of the KV, as keys name it; empty where the memory does not say it."""
    types = _element_types(kv, layout)
    (found,) = types if len(types) == 1 else ("",)
    return found if found in DTYPE_NAMES and found not in _RAW_ITEMSIZES else ""


def _is_kept_as(found: str, named: DType) -> bool:
    """Whether numbers of one type may be kept in elements of this one."""
    if found in _RAW_ITEMSIZES:
        return named.itemsize in _RAW_ITEMSIZES[found]
    return found in DTYPE_NAMES and DType.parse(found) is named


def _element_types(kv: object, layout: Layout | None) -> set[str]:
    """By the layout where there is one, else by the arrays."""
    if layout is not None:
        planes = [plane for layer in layout.layers for plane in layer.planes]
        return {
            plane.dtype.value for plane in planes if plane.role in _KV_ROLES and not plane.encoding
        }
    given = kv if isinstance(kv, list | tuple) else [kv]
    types = [getattr(array, "dtype", None) for array in given]
    return {str(each).removeprefix("torch.") for each in types if each is not None}


def memory_tier(
    kv: Kv, layout: Layout | None, *, block_tokens: int, layer_wise: bool = True
) -> DeviceTier:
    """The tier over the engine's memory, whatever kind of memory it is.

    Raises `ValueError`: the memory cannot be used, or does not fit the layout.
    """
    if kv is None:
        raise ValueError(
            "kv is None, must be the engine's KV: NumPy arrays or torch tensors, one or one a "
            "layer, with the blocks along the first axis"
        )
    if _MOVERS_OF_GPUS in sys.modules and (given := _given_cuda_tier(kv, layout)) is not None:
        return given
    if "torch" in sys.modules:
        tier = _tensor_tier(kv, layout, block_tokens=block_tokens)
        if tier is not None:
            return _on_its_device(tier, layer_wise=layer_wise)
    arrays = _arrays(kv)
    if layout is None:
        layout = opaque_layout(arrays, block_tokens=block_tokens)
    return ArrayTier(layout, arrays)


def _given_cuda_tier(kv: object, layout: Layout | None) -> CudaTier | None:
    """What the engine made itself; `None` if there is something else in `kv`."""
    from penstock.movers.cuda.device import CudaTier  # noqa: PLC0415 - needs CUDA

    if isinstance(kv, CudaTier):
        _require_no_layout(layout)
        return kv
    return None


def _on_its_device(tier: TensorTier, *, layer_wise: bool) -> DeviceTier:
    if tier.medium != "cuda":
        return tier
    try:
        from penstock.movers.cuda.device import CudaTier  # noqa: PLC0415 - needs CUDA
    except ImportError as error:
        raise UnavailableError(
            f"kv lies on {tier.device}: there is no module {error.name!r} to move blocks there"
        ) from error
    return CudaTier(tier, layerwise=layer_wise)


def _require_no_layout(layout: Layout | None) -> None:
    if layout is not None:
        raise ValueError("layout is given, must be left out: kv has one of its own")


def _tensor_tier(kv: object, layout: Layout | None, *, block_tokens: int) -> TensorTier | None:
    """The tier over torch tensors; `None` if there is something else in `kv`."""
    import torch  # noqa: PLC0415 - see above

    from penstock.tiers.tensors import TensorTier  # noqa: PLC0415

    if isinstance(kv, TensorTier):
        _require_no_layout(layout)
        return kv
    given = [kv] if isinstance(kv, torch.Tensor) else kv
    if not isinstance(given, list | tuple) or not given:
        return None
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    if len(tensors) < len(given):
        return None
    if layout is None:
        return _opaque_tier(tensors, block_tokens=block_tokens)
    return TensorTier(layout, [tensor.untyped_storage() for tensor in tensors])


def _opaque_tier(tensors: Sequence[torch.Tensor], *, block_tokens: int) -> TensorTier:
    """Tensors, one a layer, of which only the first axis is known: the block."""
    from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier  # noqa: PLC0415

    layers = [
        TensorLayer(
            number=number,
            planes=[Held.opaque(tensor, f"{tensor.dtype} {tuple(tensor.shape[1:])}")],
        )
        for number, tensor in enumerate(tensors)
    ]
    group = TensorGroup(kind=GroupKind.OPAQUE, layers=layers)
    return TensorTier.of([group], block_tokens=block_tokens)


def _arrays(kv: object) -> list[NDArray[np.generic]]:
    if not isinstance(kv, np.ndarray | Sequence) or isinstance(kv, str | bytes):
        raise ValueError(  # noqa: TRY004 - as for everything else that is wrong with kv
            f"kv is a {type(kv).__name__}, must be NumPy arrays or torch tensors, one or one a "
            "layer"
        )
    given: list[object] = [kv] if isinstance(kv, np.ndarray) else [*as_tuple("kv", kv)]
    if not given:
        raise ValueError("kv is empty, must have at least one array")
    arrays = [array for array in given if isinstance(array, np.ndarray)]
    if len(arrays) < len(given):
        kinds = sorted({type(array).__name__ for array in given})
        raise ValueError(
            f"kv has {', '.join(kinds)} in it, must have NumPy arrays or torch tensors alone"
        )
    if any(array.dtype.hasobject for array in arrays):
        raise ValueError("kv has arrays of Python objects in it, must have arrays of numbers")
    return arrays
