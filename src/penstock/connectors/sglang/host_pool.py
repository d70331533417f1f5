"""A host pool of HiCache as memory of an engine, and what a page of it depends on.

| layout of the pool                               | a page is                                  |
|--------------------------------------------------|--------------------------------------------|
| `layer_first`                                    | a run of bytes for each layer, K and V     |
| `page_first`, `page_first_direct`, `page_head`   | one run of bytes, or one of K and one of V |

Pages are moved unread. SGLang's page hashes name tokens, the request's salt and the id of its
adapter. They name neither model nor weights, element type, layout, shape or rank: the keys here do.

The one rule: a pool that is not understood is refused with the reason.
"""

# SGLang has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from penstock.connectors.sglang.pools import marks_of
from penstock.errors import UnavailableError
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.keys import frame
from penstock.vocabulary.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.config import Config

LAYER_FIRST = "layer_first"
BY_TOKEN = "page_first"
BY_PAGE = ("page_first_direct", "page_head")


def tier_of_pool(pool: Any) -> TensorTier:
    """The pages of a host pool of attention KV, each a block.

    Raises `UnavailableError`: pages of this pool cannot be moved unread.
    """
    runs = [run for buffer in _buffers(pool) for run in _runs(pool, buffer)]
    encoding = f"sglang {pool.layout} {pool.dtype} {pool.page_size}"
    layers = [
        TensorLayer(number=number, planes=[Held.opaque(run, encoding)])
        for number, run in enumerate(runs)
    ]
    group = TensorGroup(kind=GroupKind.OPAQUE, layers=layers)
    return TensorTier.of([group], block_tokens=pool.page_size)


def _buffers(pool: Any) -> Sequence[torch.Tensor]:
    # Imported late: these modules of SGLang load kernels, and the rest of this one needs none.
    from sglang.srt.mem_cache.pool_host.mha import (  # noqa: PLC0415
        AsymmetricMHATokenToKVPoolHost,
        MHATokenToKVPoolHost,
    )
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: PLC0415

    # Not what is derived from them: such pools have scales or places of their own besides.
    if type(pool) in (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost):
        found = [pool.k_buffer, pool.v_buffer]
    elif type(pool) is MLATokenToKVPoolHost:
        found = [pool.kv_buffer]
    else:
        raise UnavailableError(
            f"the host pool is a {type(pool).__name__}, must be one of attention KV alone, without "
            "scales (MHA, GQA, MLA)"
        )
    if not all(isinstance(each, torch.Tensor) for each in found):
        raise UnavailableError(f"the host pool {type(pool).__name__} has no memory of its own")
    return found


def _runs(pool: Any, buffer: torch.Tensor) -> Iterable[torch.Tensor]:
    """Views of a buffer with the pages along the first axis."""
    if not buffer.is_contiguous():
        raise UnavailableError(f"the host pool has a buffer with strides {buffer.stride()}")
    pages, shape = pool.page_num, tuple(buffer.shape)
    if pool.layout == LAYER_FIRST and shape[1] == pages * pool.page_size:
        return [layer.view(pages, -1) for layer in buffer]
    if pool.layout == BY_TOKEN and shape[0] == pages * pool.page_size:
        return [buffer.view(pages, -1)]
    if pool.layout in BY_PAGE and shape[0] == pages:
        return [buffer.view(pages, -1)]
    raise UnavailableError(
        f"hicache_mem_layout is {pool.layout!r} with a buffer of shape {shape}, must be one of "
        f"{', '.join((LAYER_FIRST, BY_TOKEN, *BY_PAGE))}"
    )


def fit_config(config: Config, pool: Any) -> Config:
    """The configuration with page size and element type of a pool, of one rank by itself."""
    cache = replace(
        config.cache, device=None, block_tokens=pool.page_size, rank_count=1, group_count=1
    )
    model = replace(config.model, kv_dtype=str(pool.dtype).removeprefix("torch."))
    return replace(config, cache=cache, model=model, equal_ranks=False)


def part_of(pool: Any, storage: Any, server_args: Any) -> str:
    """What a page depends on beside model, weights and tokens, as a part of its key."""
    # Ranks with equal bytes have equal keys: what one has written, all find.
    rank = "equal" if storage.is_mla_model else f"{storage.tp_rank}/{storage.tp_size}"
    said = (
        str(storage.model_name or ""),
        f"{rank} pp {storage.pp_rank}/{storage.pp_size}",
        f"cp {storage.attn_cp_rank}/{storage.attn_cp_size}",
        f"{pool.layout} {pool.dtype} {pool.page_size} {type(pool).__name__}",
        f"layers {pool.start_layer} {pool.end_layer} {pool.layer_num}",
        *(f"{tuple(each.shape[2:])}" for each in _buffers(pool)),
        marks_of(server_args),
    )
    return (
        "host pool " + hashlib.sha256(b"".join(frame(each.encode()) for each in said)).hexdigest()
    )
