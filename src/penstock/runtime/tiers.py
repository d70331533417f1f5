"""The tiers of a rank: the engine's own memory, and those below it, as the configuration says.

| `kv`                                         | tier          | cells are summed by |
|----------------------------------------------|---------------|---------------------|
| NumPy arrays                                 | `ArrayTier`   | xxh3                |
| torch tensors on the CPU                     | `TensorTier`  | xxh3                |
| torch tensors on a GPU                       | `CudaTier`    | mix64               |
| a `TensorTier` that the engine described     | as above      | by where it lies    |
| a `CudaTier`, to choose layer-wise loads     | as it is      | mix64               |

Another kind of device is a row of `ALGORITHMS`, and movers to and from it. torch is not imported
here unless the engine has imported it, which it has if it gives us tensors.

A new kind of tier adds a row to `BUILDERS`; other distributions add kinds by entry points. A
refusal names the setting as the file spells it, such as `tiers[0].gib`, whichever layer found the
fault.

Host memory may outlive its rank, if a supervisor keeps its descriptors (`KeptArenas`): the next
life of the rank maps it again, its pages are there already, and an owner that lived on finds its
blocks. A kept arena is used only where it fits to the byte; otherwise a new one replaces it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from penstock.cache.settings import BLOCKS_MAX, HUB
from penstock.config.values import NOT_PERSISTED, SHARED_KINDS
from penstock.errors import ConfigError, UnavailableError, counted
from penstock.extensions import OTHER_TIERS
from penstock.store.disk.format import ROW_BYTES, SEGMENT_BYTES, Geometry
from penstock.store.process.messages import BLOCKS_MAX as JOB_BLOCKS_MAX
from penstock.store.shared.values import HEAD_BYTES
from penstock.tiers.arena import MemoryCalls
from penstock.tiers.arrays import ArrayTier, opaque_layout
from penstock.tiers.base import KeepsSums
from penstock.tiers.host import HostTier, MemoryTier, slots_in, tier_bytes
from penstock.tiers.linux_memory import require_room
from penstock.vocabulary.arguments import as_tuple
from penstock.vocabulary.checksums import SUM_BYTES, Algorithm
from penstock.vocabulary.layout import GroupKind
from penstock.vocabulary.planes import DTYPE_NAMES, DType, PlaneRole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from numpy.typing import NDArray

    from penstock.cache.settings import CacheSettings, TierSettings
    from penstock.config import Config, TierKind
    from penstock.movers.cuda.mover import CudaTier
    from penstock.supervisor.descriptors import Keeper
    from penstock.tiers.base import SlotStore
    from penstock.tiers.tensors import TensorTier
    from penstock.vocabulary.layout import Layout


if TYPE_CHECKING:
    Memory: TypeAlias = NDArray[np.generic] | torch.Tensor
    Kv: TypeAlias = Memory | Sequence[Memory] | TensorTier | CudaTier
    DeviceTier: TypeAlias = ArrayTier | TensorTier | CudaTier

ALGORITHMS: Mapping[str, Algorithm] = {"arrays": Algorithm.XXH3, "cuda": Algorithm.MIX64}
"""How cells are summed, by the medium of the device: whatever costs least there."""
_MOVERS_OF_GPUS = "penstock.movers.cuda.mover"


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
    from penstock.movers.cuda.mover import CudaTier  # noqa: PLC0415 - needs CUDA

    if isinstance(kv, CudaTier):
        _require_no_layout(layout)
        return kv
    return None


def _on_its_device(tier: TensorTier, *, layer_wise: bool) -> DeviceTier:
    if tier.medium != "cuda":
        return tier
    try:
        from penstock.movers.cuda.mover import CudaTier  # noqa: PLC0415 - needs CUDA
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


logger = logging.getLogger(__name__)

GIB = 1 << 30


class LowerTiers(NamedTuple):
    """The tiers below one rank's device, as far as they could be made."""

    settings: CacheSettings
    """In which every tier knows its slots."""
    stores: list[SlotStore | None]
    off: dict[int, str]
    """Why a tier is `None`, by its index, counted from the device on."""
    arenas: dict[str, int]
    """The descriptor of each host tier, by name."""
    ready_s: dict[int, float]
    """How long it took to make or to map each, by its index."""


def build_lower_tiers(
    config: Config,
    layout: Layout,
    *,
    kernel: MemoryCalls | None = None,
    arenas: Mapping[str, int] | None = None,
    writes: bool = True,
    kept: KeptArenas | None = None,
) -> LowerTiers:
    """Makes the tiers below a device with this layout, on the machine that `kernel` speaks for.

    Raises `ConfigError`: a tier does not fit the blocks or the machine, or `arenas` names no host
    tier; `UnavailableError`: the machine does not give a required tier the memory it needs.
    """
    arenas = dict(arenas or {})
    orders = [
        _sized(_Order(f"tiers[{index}]", tier, kind, layout, kernel), config)
        for index, (tier, kind) in enumerate(
            zip(config.cache.tiers, config.tier_kinds, strict=True)
        )
    ]
    # Built anew, so that what depends on the number of slots is checked once more.
    settings = replace(config.cache, tiers=tuple(order.tier for order in orders))
    _require_host_tiers(orders, arenas)
    stores: list[SlotStore | None] = []
    off = _not_persisted(config)
    ready_s: dict[int, float] = {}
    for tier, order in enumerate(orders, start=HUB):
        stores.append(None)
        if order.tier.stored or (tier != HUB and not writes):
            continue
        began = time.perf_counter()
        given = arenas.get(order.tier.name)
        try:
            if kept is not None and given is None and order.kind.name == "host":
                stores[-1] = _made_or_kept(order, tier, kept)
            else:
                stores[-1] = _made(order, given, writes=writes)
        except UnavailableError as error:
            if order.kind.required:
                raise
            off[tier] = str(error)
        ready_s[tier] = time.perf_counter() - began
    made = {
        order.tier.name: store.arena.fd
        for order, store in zip(orders, stores, strict=True)
        if isinstance(store, HostTier)
    }
    return LowerTiers(settings, stores, off, made, ready_s)


def _not_persisted(config: Config) -> dict[int, str]:
    """Why tiers that the store process serves stay off, if they do."""
    if config.persists:
        return {}
    why = f"model.weights_version {NOT_PERSISTED}"
    tiers = enumerate(config.cache.tiers, start=HUB)
    return {index: why for index, tier in tiers if tier.stored}


class _Order(NamedTuple):
    """A tier that is to be made."""

    place: str
    """Its table in the file."""
    tier: TierSettings
    kind: TierKind
    layout: Layout
    kernel: MemoryCalls | None


def _sized(order: _Order, config: Config) -> _Order:
    """The same order, with the slots that its GiB come to."""
    size_gib = order.kind.gib
    if not size_gib:
        return order
    size, one = int(size_gib * GIB), tier_bytes(order.layout, 1)
    if order.tier.stored:
        slots = size // _stored_bytes(order, size, config)
    else:
        slots = slots_in(size, order.layout.block_bytes, len(order.layout.cells))
    if slots < 1:
        raise ConfigError(
            f"{order.place}.gib",
            f"is {size_gib}, must have room for one block, which takes {one} bytes with its sums",
        )
    if slots > BLOCKS_MAX:
        raise ConfigError(
            f"{order.place}.gib",
            f"is {size_gib}, must have room for at most {BLOCKS_MAX} blocks; it has for {slots}",
        )
    return order._replace(tier=replace(order.tier, slot_count=slots))


def _stored_bytes(order: _Order, size: int, config: Config) -> int:
    """What a block takes below host memory, on all ranks."""
    if config.cache.operation_blocks_max > JOB_BLOCKS_MAX:
        raise ConfigError(
            "cache.operation_blocks_max",
            f"is {config.cache.operation_blocks_max}, must be at most {JOB_BLOCKS_MAX} with a tier "
            f"of kind {order.kind.name!r}",
        )
    # All ranks share a disk; of those that hold equal bytes, it keeps one part.
    parts = 1 if config.equal_ranks else config.cache.rank_count
    block_bytes, cell_count = order.layout.block_bytes, len(order.layout.cells)
    if order.kind.name in SHARED_KINDS:
        return parts * (HEAD_BYTES + cell_count * SUM_BYTES + block_bytes)
    least = Geometry.least_bytes(block_bytes=block_bytes, cell_count=cell_count)
    # One segment that is filled and one that can be given up, of each part of a block.
    if size < 2 * parts * least:
        raise ConfigError(
            f"{order.place}.gib",
            f"is {order.kind.gib}, must be at least {2 * parts * least / GIB:.6g} for blocks of "
            f"{block_bytes} bytes on {counted(parts, 'rank')}",
        )
    geometry = Geometry(
        segment_bytes=max(SEGMENT_BYTES, least), block_bytes=block_bytes, cell_count=cell_count
    )
    return parts * (geometry.slot_bytes + ROW_BYTES)


def _require_host_tiers(orders: list[_Order], arenas: Mapping[str, int]) -> None:
    hosts = [order.tier.name for order in orders if order.kind.name == "host"]
    for name in arenas:
        if name not in hosts:
            known = ", ".join(hosts) or "none"
            raise ConfigError("arenas", f"has {name!r}, must be a tier of kind 'host': {known}")


def _made_or_kept(order: _Order, index: int, kept: KeptArenas) -> SlotStore:
    """The tier of an earlier life, where there is one that fits; else a new one, to be kept."""
    fd = kept.descriptor(index)
    if fd is not None:
        try:
            return _attached(order, fd, writes=True)
        except (UnavailableError, ValueError) as error:
            logger.warning("kept arena left: name=%s cause=%s", order.tier.name, error)
    tier = _built(order)
    if isinstance(tier, HostTier):
        kept.keep(index, tier.arena.fd)
    return tier


def _made(order: _Order, fd: int | None, *, writes: bool) -> SlotStore:
    if fd is None and not writes:
        raise UnavailableError("the rank that writes it has no memory to share")
    return _built(order) if fd is None else _attached(order, fd, writes=writes)


def _built(order: _Order) -> SlotStore:
    return BUILDERS.get(order.kind.name, _from_entry_point)(order)


def _attached(order: _Order, fd: int, *, writes: bool) -> SlotStore:
    tier = HostTier.attach(fd, order.layout, order.tier.slot_count, writable=writes)
    logger.info(
        "host tier attached: name=%s blocks=%d gib=%.2f writes=%s",
        order.tier.name,
        tier.slot_count,
        tier.arena.size / GIB,
        writes,
    )
    return tier


def _memory(order: _Order) -> SlotStore:
    # NumPy takes address space for more than there is, and the kernel kills who touches it.
    size_bytes = order.tier.slot_count * (
        order.layout.block_bytes + len(order.layout.cells) * SUM_BYTES
    )
    kernel = order.kernel or MemoryCalls()
    try:
        require_room(size_bytes, kernel.read, setting="size")
    except ConfigError as error:
        raise _spelled_as_in_the_file(error, order) from error
    return MemoryTier(order.layout, order.tier.slot_count)


def _host(order: _Order) -> SlotStore:
    options = order.kind.options
    node = options["numa_node"]
    try:
        tier = HostTier.create(
            order.layout,
            order.tier.slot_count,
            name=order.tier.name,
            huge_pages=options["huge_pages"] == "auto",
            numa_node=None if node == -1 else int(node),
            kernel=order.kernel,
        )
    except ConfigError as error:
        raise _spelled_as_in_the_file(error, order) from error
    arena = tier.arena
    logger.info(
        "host tier ready: name=%s blocks=%d gib=%.2f pages=%s numa_node=%s ready_s=%.2f "
        "fallbacks=%s",
        order.tier.name,
        tier.slot_count,
        arena.size / GIB,
        arena.pages.value,
        "any" if arena.numa_node is None else arena.numa_node,
        arena.ready_s,
        "; ".join(arena.fallbacks) or "none",
    )
    return tier


def _from_entry_point(order: _Order) -> SlotStore:
    place, slot_count = f"{order.place}.kind", order.tier.slot_count
    factory = OTHER_TIERS.find(order.kind.name, place)
    if factory is None:
        raise ConfigError(place, f"is {order.kind.name!r}, which is not installed in this process")
    try:
        tier: SlotStore = factory.build(
            order.layout, slot_count, name=order.tier.name, options=dict(order.kind.options)
        )
    except ConfigError as error:
        raise _spelled_as_in_the_file(error, order) from error
    if not isinstance(tier, KeepsSums) or tier.slot_count != slot_count:
        raise ConfigError(
            place,
            f"is {order.kind.name!r}, which made a {type(tier).__name__}; must make a tier of "
            f"{slot_count} slots that keeps checksums: see penstock.testing.SumKeepingTierSuite",
        )
    return tier


def _spelled_as_in_the_file(error: ConfigError, order: _Order) -> ConfigError:
    if error.field != "size":
        return ConfigError(f"{order.place}.{error.field}", error.problem)
    if order.kind.gib:
        return ConfigError(f"{order.place}.gib", f"is {order.kind.gib}, {error.problem}")
    blocks = order.tier.slot_count
    return ConfigError(f"{order.place}.blocks", f"is {blocks}, {error.problem}")


BUILDERS: dict[str, Callable[[_Order], SlotStore]] = {"memory": _memory, "host": _host}
"""How a tier of each built-in kind is made."""


class KeptArenas(NamedTuple):
    """What is kept for one rank."""

    keeper: Keeper
    rank: int

    def descriptor(self, tier: int) -> int | None:
        """The arena of a tier, if an earlier life had one kept."""
        return self.keeper.kept(self._name(tier))

    def keep(self, tier: int, fd: int) -> None:
        """Has a new arena kept; if that fails, the next life of the rank starts empty."""
        try:
            self.keeper.keep(self._name(tier), fd)
        except UnavailableError as error:
            logger.warning(
                "arena not kept: rank=%d tier=%d cause=%s; a restart will find it empty",
                self.rank,
                tier,
                error,
            )

    def _name(self, tier: int) -> str:
        # By number: the keeper rejects some names that tiers may have.
        return f"arena.{self.rank}.{tier}"
