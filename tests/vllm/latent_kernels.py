"""Latent attention (MLA) on CPUs without AMX: vLLM's five AMX kernels, computed by torch.

vLLM's CPU build runs latent attention in two ways. With AMX it uses its AMX backend, which can
continue from a cached prefix. Without AMX it uses a reference backend with which it switches
prefix caching off, sets blocks to 16 tokens, and with that everything the connector is for.

So `how()` decides from the machine, before an engine is started, what the tests do:

| machine            | the tests run                                                           |
|--------------------|-------------------------------------------------------------------------|
| x86 with AMX       | vLLM as it is                                                           |
| x86 without AMX    | vLLM's AMX backend, with the five kernels below in place of the C++ ones |
| another processor  | no latent attention: vLLM never selects the AMX backend there           |

Scheduling, paging, block tables, weights and the backend's own Python code are vLLM's in both
cases. The kernels are installed as a vLLM plugin, in every process of an engine.
"""

from __future__ import annotations

import functools
import platform
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

AMX = "vLLM's AMX kernels"
BY_TORCH = (
    "this CPU has no AMX, without which vLLM switches prefix caching off for latent attention: "
    "its five AMX kernels are computed by torch (tests/vllm/latent_kernels.py)"
)
NOT_HERE = "vLLM uses its AMX backend for latent attention on x86 only, this is "


def how(*, machine: str, has_amx: bool) -> str:
    """What computes latent attention on such a machine; `NOT_HERE…` where nothing does."""
    if machine not in {"x86_64", "AMD64"}:
        return NOT_HERE + machine
    return AMX if has_amx else BY_TORCH


@functools.cache
def how_here() -> str:
    """The same for this machine, by the same question that vLLM asks."""
    import torch  # noqa: PLC0415 - this file is also read where there is none

    return how(machine=platform.machine(), has_amx=torch.cpu._is_amx_tile_supported())


def make_plugin(folder: Path) -> Path:
    """A folder which, on `PYTHONPATH`, makes vLLM call `install` in each of its processes."""
    described = folder / "penstock_latent_kernels-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: penstock-latent-kernels\nVersion: 1\n"
    )
    (described / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\npenstock_latent_kernels = {__name__}:install\n"
    )
    return folder


def install() -> None:
    """Defines the kernels that this build of vLLM lacks, and has vLLM select its AMX backend."""
    import torch  # noqa: PLC0415
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    library = torch.library.Library("_C", "FRAGMENT")
    for schema, kernel in KERNELS.items():
        library.define(schema)
        library.impl(kernel.__name__, kernel, "CPU")
    KEPT.append(library)
    for asked in ("get_attn_backend_cls", "check_and_update_config"):
        setattr(CpuPlatform, asked, classmethod(_with_amx(getattr(CpuPlatform, asked).__func__)))
    sys.stderr.write(f"LATENT {BY_TORCH}\n")


KEPT: list[object] = []
"""What a library defines is gone with it."""


def _with_amx(decide: Callable[..., Any]) -> Callable[..., Any]:
    """Has one of vLLM's decisions made as on a machine with AMX, and no other decision."""

    @functools.wraps(decide)
    def decided(*args: Any, **how: Any) -> Any:
        import torch  # noqa: PLC0415

        asked = torch.cpu._is_amx_tile_supported
        torch.cpu._is_amx_tile_supported = lambda: True
        try:
            return decide(*args, **how)
        finally:
            torch.cpu._is_amx_tile_supported = asked

    return decided


# ---------------------------------------------------------------- the kernels


def convert_weight_packed(weight: torch.Tensor) -> torch.Tensor:
    """The weight as it is: only `bmm_cpu` reads it."""
    return weight.clone()


def bmm_cpu(
    out: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    is_vnni: bool,  # noqa: ARG001, FBT001 - vLLM's signature
    scale: torch.Tensor | None,
) -> None:
    """For every head: `mat1` times `mat2`, transposed."""
    product = mat1.float() @ mat2.float().transpose(1, 2)
    out.copy_(product if scale is None else product * scale)


def concat_and_cache_mla_cpu(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes each token's latent KV and its rotary part into its place; -1 is padding."""
    flat, rank = kv_cache.view(-1, kv_cache.shape[-1]), kv_c.shape[-1]
    wanted = slot_mapping >= 0
    places = slot_mapping[wanted].long()
    flat[places, :rank] = kv_c[: len(wanted)][wanted]
    flat[places, rank:] = k_pe[: len(wanted)][wanted]


def decode_attention_cpu(
    query: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    output: torch.Tensor,
    _key: torch.Tensor | None,
    _value: torch.Tensor | None,
    _loc: torch.Tensor | None,
    _attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *_unused: Any,
) -> None:
    """One token of each request attends to all of its cached tokens, itself included."""
    for number, (row, length) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        places = req_to_token[row, :length].long()
        mine = query[number : number + 1]
        output[number : number + 1] = _attend(mine, k_buffer, v_buffer, places, sm_scale)


def extend_attention_cpu(
    q_extend: torch.Tensor,
    _k_extend: torch.Tensor | None,
    _v_extend: torch.Tensor | None,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    _max_len_extend: int,
    sm_scale: float,
    *_unused: Any,
) -> None:
    """The last tokens of each request attend to all cached tokens up to themselves.

    vLLM has written these tokens into the cache before it calls this.
    """
    lengths = (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc)
    for row, length, count, first in zip(*(each.tolist() for each in lengths), strict=True):
        places = req_to_token[row, :length].long()
        mine = slice(first, first + count)
        o_extend[mine] = _attend(q_extend[mine], k_buffer, v_buffer, places, sm_scale)


def _attend(
    query: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    places: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of (tokens, heads, channels), which are the last of those in `places`."""
    import torch  # noqa: PLC0415

    keys, values = k_buffer[places, 0].float(), v_buffer[places, 0].float()
    scores = torch.einsum("thc,sc->ths", query.float(), keys) * scale
    count, length = len(query), len(places)
    later = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
    weights = scores.masked_fill(later[:, None, :], -torch.inf).softmax(dim=-1)
    return torch.einsum("ths,sc->thc", weights, values).to(query.dtype)


ATTENTION = (
    "Tensor k_buffer, Tensor v_buffer, {}Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, {}float sm_scale, float logit_cap, bool is_cross_attn, "
    "int sliding_window_size, Tensor? encoder_lens, Tensor? sinks"
)
KERNELS: dict[str, Callable[..., Any]] = {
    "convert_weight_packed(Tensor weight) -> Tensor": convert_weight_packed,
    "bmm_cpu(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()": bmm_cpu,
    "concat_and_cache_mla_cpu(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, "
    "Tensor slot_mapping) -> ()": concat_and_cache_mla_cpu,
    "decode_attention_cpu(Tensor query, "
    + ATTENTION.format(
        "Tensor(a!) output, Tensor? key, Tensor? value, Tensor? loc, Tensor attn_logits, ", ""
    )
    + ") -> ()": decode_attention_cpu,
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, "
    "Tensor(a!) o_extend, "
    + ATTENTION.format("", "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, ")
    + ", Tensor? tree_mask) -> ()": extend_attention_cpu,
}
"""The kernels by vLLM's own signatures (`vllm/_custom_ops.py`)."""
