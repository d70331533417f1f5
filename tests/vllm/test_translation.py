"""What the connector knows of vLLM by name is what vLLM has; no engine is started."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.errors import UnavailableError
from tests.connectors.orders import ORDERS

# What vLLM's own imports warn of is not ours.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CACHES = {"layers.0": torch.zeros(4, 2, 32, 128)}


def encoded(backend: str, **of_the_layer: Any) -> str:
    """What the form says of a layer that these kernels compute on the CPU."""
    from penstock.connectors.vllm.translation import encodings_of  # noqa: PLC0415 - imports vLLM

    name = SimpleNamespace(get_name=lambda: backend)
    layer = SimpleNamespace(get_attn_backend=lambda: name, **of_the_layer)
    compiled = SimpleNamespace(static_forward_context={"layers.0": layer})
    return encodings_of(SimpleNamespace(compilation_config=compiled), CACHES)("layers.0")


def test_the_physical_orders_are_those_that_vllm_has() -> None:
    from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: PLC0415

    assert {layout.name: layout.stride_order for layout in KVCacheLayout} == {
        order: tuple("LBHNC".index(axis) for axis in order) for order in ORDERS
    }


def test_the_form_says_for_which_instruction_set_blocks_are_packed() -> None:
    assert encoded("CPU_ATTN", isa="vec16") == "vllm CPU_ATTN vec16 torch.float32 2x32x128"
    assert encoded("AMX_MLA") == "vllm AMX_MLA cpu torch.float32 2x32x128"


def test_kernels_of_the_cpu_that_do_not_say_how_they_pack_are_refused() -> None:
    with pytest.raises(AttributeError, match="isa"):
        encoded("CPU_ATTN")
    with pytest.raises(UnavailableError, match=r"layers\.0 is computed on the CPU by CPU_NEW"):
        encoded("CPU_NEW", isa="vec")


def test_the_kernels_that_are_known_are_those_that_vllm_has_for_the_cpu() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415

    from penstock.connectors.vllm.translation import PACKING, PLAIN  # noqa: PLC0415

    for name in (PACKING, *PLAIN):
        assert AttentionBackendEnum[name].get_class().get_name() == name


def test_metrics_are_registered_with_vllm_and_take_what_was_counted() -> None:
    from prometheus_client import (  # noqa: PLC0415 - comes with vLLM
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
    )

    from penstock.connectors.vllm.translation import PenstockMetrics, PenstockStats  # noqa: PLC0415

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = PenstockMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})
    first = PenstockStats(data={"tokens_loaded": 32, "host_slots_ready": 9, "load_seconds": [0.5]})
    both = first.aggregate(PenstockStats(data={"tokens_loaded": 64, "host_slots_ready": 3}))

    metrics.observe(both.to_dict(), 1)

    def shown(name: str) -> float | None:
        return registry.get_sample_value(f"vllm:penstock_{name}", {"engine": "1"})

    assert (shown("tokens_loaded_total"), shown("host_slots_ready")) == (96, 3)
    assert (shown("load_seconds_count"), shown("load_seconds_sum")) == (1, 0.5)
    assert (shown("timeouts_total"), shown("checksum_failures_total")) == (0, 0)
    # With several API servers, of a gauge the page shows the last that any of them was told.
    assert metrics._metrics["host_slots_ready"][1]._multiprocess_mode == "mostrecent"
