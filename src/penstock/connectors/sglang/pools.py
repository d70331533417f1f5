"""SGLang's options and device pools, as far as the tiers below them must know them.

| SGLang keeps                                     | layout here                             |
|--------------------------------------------------|-----------------------------------------|
| `k_buffer` and `v_buffer`, [token, head, number] | a plane K and a plane V of each layer   |
| `kv_buffer`, [token, 1, number]                  | a latent plane of each layer            |

A page is a block: its tokens follow each other in every buffer. The one rule: a pool or an option
that is not in these tables is refused with a reason, and SGLang then runs without Penstock.
"""

# SGLang has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from penstock.connectors.base.engine import LayerGroup, ServedEngine
from penstock.connectors.base.keys import AdapterFiles
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.layout import GroupKind, HeadRange
from penstock.vocabulary.planes import Axis, PlaneRole

if TYPE_CHECKING:
    from collections.abc import Iterable

HEADS = (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL)
LATENT = (Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL)
PLAIN, SHARED = "MHATokenToKVPool", "MLATokenToKVPool"
POOLS = {PLAIN: GroupKind.ATTENTION, SHARED: GroupKind.LATENT}
"""SGLang's classes of pools whose numbers mean the same wherever they lie. Exactly these: a
subclass keeps something else."""
DTYPES = ("float32", "float16", "bfloat16")
"""Numbers without scales beside them."""
PAGE_TOKENS_MIN = 16
"""A smaller page is not worth what it costs to be named, found and verified."""


def why_not(server_args: Any, params: Any, components: Iterable[Any], pool: Any) -> str:
    """Why SGLang must run without Penstock here; empty if it need not."""
    kinds = sorted(each.name for each in components)
    kind = type(pool).__name__
    reasons = {
        f"the model keeps {' and '.join(kinds)} states, must be FULL alone": kinds != ["FULL"],
        f"the device pool is a {kind}, must be a {' or a '.join(POOLS)}": kind not in POOLS,
        f"the KV is {_name(pool.dtype)}, must be {', '.join(DTYPES)}: others have scales beside "
        "them": _name(pool.dtype) not in DTYPES or pool.store_dtype != pool.dtype,
        "KV does not lie token after token": kind == PLAIN and pool.kv_cache_layout != "nhd",
        f"--page-size is {params.page_size}, must be at least {PAGE_TOKENS_MIN}: --page-size 64": (
            params.page_size < PAGE_TOKENS_MIN
        ),
        "pipeline parallelism is not supported": params.pp_size > 1,
        "context parallelism is not supported": params.attn_cp_size > 1,
        "attention by data parallelism is not supported": server_args.enable_dp_attention,
        "drafts are not supported: their KV lies in another pool": bool(
            server_args.speculative_algorithm
        ),
        "unified memory is not supported: pages move": server_args.enable_unified_memory,
        "handing prompts over is not supported": server_args.disaggregation_mode != "null",
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def marks_of(server_args: Any) -> str:
    """What else of SGLang's options its KV depends on, as a digest.

    The id that SGLang gives an adapter of `--lora-paths` is made from its name and path: after a
    restart there may be other files.
    """
    files = AdapterFiles()
    adapters = [
        f"{each.lora_name}={each.lora_path}={files.version(str(each.lora_path))}"
        for each in server_args.lora_paths or []
    ]
    # The element type as well: pools keep several kinds of fp8 in the same bytes.
    names = ("kv_cache_dtype", "dtype", "quantization", "json_model_override_args")
    said = [*(f"{name}={getattr(server_args, name)}" for name in names), *sorted(adapters)]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def engine_of(pool: Any, page_tokens: int) -> ServedEngine:
    """One rank of the engine, which knows no others."""
    group = LayerGroup(kind=_kind(pool), layer_names=(), block_tokens=page_tokens)
    return ServedEngine(
        name="sglang",
        groups=(group,),
        block_count=_first(pool).shape[0] // page_tokens,
        rank_count=1,
        kv_dtype=_name(pool.dtype),
    )


def tier_of(pool: Any, page_tokens: int) -> TensorTier:
    """The device pool as a tier of pages."""
    if _kind(pool) is GroupKind.LATENT:
        planes = [
            [Held.of(PlaneRole.LATENT, _pages(each, page_tokens)[:, :, 0], LATENT)]
            for each in pool.kv_buffer
        ]
        heads = None
    else:
        planes = [
            [
                Held.of(PlaneRole.K, _pages(key, page_tokens), HEADS),
                Held.of(PlaneRole.V, _pages(value, page_tokens), HEADS),
            ]
            for key, value in zip(pool.k_buffer, pool.v_buffer, strict=True)
        ]
        # Those of this rank: keys name the rank, where there are several.
        heads = HeadRange.all_of(_first(pool).shape[1])
    layers = [TensorLayer(number=at, planes=each) for at, each in enumerate(planes)]
    return TensorTier.of(
        [TensorGroup(kind=_kind(pool), layers=layers, heads=heads)], block_tokens=page_tokens
    )


class PageNumbers:
    """Which device pages the tokens of a transfer lie in, as they come from the device.

    They are made in torch's current stream, and are ready when all work before has ended there.
    """

    __slots__ = ("_event", "_numbers")

    def __init__(self, tokens: torch.Tensor, page_tokens: int) -> None:
        """Begins to bring the numbers of the pages; `tokens` names all tokens of each page."""
        numbers = tokens[::page_tokens] // page_tokens
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether nobody has to wait for them."""
        return self._event is None or self._event.query()

    def wait(self) -> list[int]:
        """The numbers, at once if they are ready."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers


def _pages(tensor: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """A buffer with a page along its first axis; what is left of it is no page."""
    count = tensor.shape[0] // page_tokens
    return tensor[: count * page_tokens].unflatten(0, (count, page_tokens))


def _kind(pool: Any) -> GroupKind:
    return POOLS[type(pool).__name__]


def _first(pool: Any) -> torch.Tensor:
    buffers = pool.kv_buffer if _kind(pool) is GroupKind.LATENT else pool.k_buffer
    found: torch.Tensor = buffers[0]
    return found


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
