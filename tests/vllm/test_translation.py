"""What the connector knows of vLLM by name is what vLLM has; no engine is started."""

from __future__ import annotations

from array import array
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

import penstock
from penstock.connectors.base.engine import ServedEngine
from penstock.connectors.base.keys import AnnouncedBlock, RemovedEvent, StoredEvent
from penstock.errors import UnavailableError
from tests.connectors.orders import ORDERS

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize(
    ("dtype", "isa"),
    [(torch.float32, ""), (torch.bfloat16, ""), (torch.float32, "vec16"), (torch.float32, "vec")],
)
def test_kernels_write_each_head_of_a_block_as_if_it_were_alone(
    dtype: torch.dtype, isa: str
) -> None:
    """With `isa` left out, with the instructions that vLLM uses here."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    from vllm import _custom_ops as ops  # noqa: PLC0415

    heads, tokens, channels = 4, 32, 64
    torch.manual_seed(3)
    key, value = (torch.randn(tokens, heads, channels).to(dtype) for _ in range(2))
    # Blocks are not filled from their first token on, nor in one go.
    slots = torch.randperm(2 * tokens)[:tokens]

    def written(first: int, count: int) -> torch.Tensor:
        cache = torch.zeros(2, count, 2 * tokens, channels, dtype=dtype)
        of = slice(first, first + count)
        # Contiguous, as the model's own projections are.
        ops.cpu_attn_reshape_and_cache(
            key[:, of].contiguous(),
            value[:, of].contiguous(),
            *cache.chunk(2, dim=2),
            slots,
            isa or _get_attn_isa(dtype, tokens, channels),
        )
        return cache

    whole = written(0, heads)

    assert whole.count_nonzero() == 2 * tokens * heads * channels
    assert torch.equal(whole, torch.cat([written(0, 1), written(1, 2), written(3, 1)], dim=1))


def test_the_encoding_of_a_head_does_not_depend_on_how_many_there_are() -> None:
    from penstock.connectors.vllm.translation import head_encodings_of  # noqa: PLC0415

    def encodings(backend: str, kv_heads: int, ranks: int) -> dict[str, str]:
        name = SimpleNamespace(get_name=lambda: backend)
        layer = SimpleNamespace(get_attn_backend=lambda: name, isa="vec")
        compiled = SimpleNamespace(static_forward_context={"layers.0": layer})
        config = SimpleNamespace(compilation_config=compiled)
        caches = {"layers.0": torch.zeros(4, 2, 32, 128)}
        engine = ServedEngine(
            name="e", groups=(), block_count=4, rank_count=ranks, kv_heads=kv_heads
        )
        return head_encodings_of(config, caches, engine)

    expected = {"layers.0": "vllm CPU_ATTN vec torch.float32 head 32x128"}
    assert encodings("CPU_ATTN", 2, 1) == encodings("CPU_ATTN", 4, 2) == expected
    # Other kernels, and layers that do not have the heads that the model says: not cut.
    assert encodings("CPU_MLA", 2, 1) == {}
    assert encodings("CPU_ATTN", 8, 2) == {}


def test_sleep_mode_is_refused_whether_vllm_asks_or_not() -> None:
    from penstock.connectors.vllm.adapter import PenstockConnector  # noqa: PLC0415
    from penstock.connectors.vllm.translation import why_unsupported  # noqa: PLC0415

    def why(*, sleeps: bool) -> list[str]:
        sizes = dict.fromkeys(("pipeline", "decode_context", "prefill_context"), 1)
        return why_unsupported(
            SimpleNamespace(
                parallel_config=SimpleNamespace(
                    **{f"{name}_parallel_size": size for name, size in sizes.items()}
                ),
                cache_config=SimpleNamespace(enable_prefix_caching=True),
                model_config=SimpleNamespace(enable_sleep_mode=sleeps),
            )
        )

    # vLLM 0.32 does not ask, and takes the memory away: then the connector is off.
    assert why(sleeps=False) == []
    assert why(sleeps=True) == ["sleep mode is on: vLLM would take memory away that copies read"]
    assert not PenstockConnector.supports_sleep_mode(None)


@pytest.mark.parametrize("states_first", [True, False])
def test_a_model_with_states_is_refused_by_the_kind_of_its_group(*, states_first: bool) -> None:
    """Whichever group comes first: vLLM must start without the connector."""
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
        FullAttentionSpec,
        KVCacheGroupSpec,
        MambaSpec,
    )

    from penstock.connectors.vllm.translation import engine_of  # noqa: PLC0415

    states = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    attention = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    specs = [states, attention] if states_first else [attention, states]
    sizes = dict.fromkeys(("pipeline", "decode_context", "prefill_context"), 1)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{f"{name}_parallel_size": size for name, size in sizes.items()},
            world_size=1,
            rank=0,
            nnodes=1,
            data_parallel_index=0,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(
            enable_sleep_mode=False, get_total_num_kv_heads=partial(int, 2)
        ),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        use_v2_model_runner=False,
    )
    groups = [KVCacheGroupSpec([f"layers.{at}"], spec) for at, spec in enumerate(specs)]

    engine = engine_of(config, SimpleNamespace(kv_cache_groups=groups, num_blocks=8))

    assert engine.why_not() == "a KV group is of kind MambaSpec, must be attention"


def test_the_kernels_that_are_known_are_those_that_vllm_has_for_the_cpu() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415

    from penstock.connectors.vllm.translation import PACKING, PLAIN  # noqa: PLC0415

    for name in (PACKING, *PLAIN):
        assert AttentionBackendEnum[name].get_class().get_name() == name


def events_below(tmp_path: Path) -> dict[str, list[Any]]:
    """What vLLM publishes of a block that comes to each tier and leaves it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415

    from penstock.connectors.vllm import translation  # noqa: PLC0415

    config = penstock.parse_config(
        f"""
        version = 1
        model.name = "any"
        model.weights_version = "1"
        tiers = [
            {{ name = "host", kind = "host", blocks = 8 }},
            {{ name = "disk", kind = "disk", path = "{tmp_path}", gib = 1 }},
            {{ name = "shared", kind = "redis", url = "redis://127.0.0.1:6379" }},
        ]
        """
    )
    attention = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
    publish = translation.publishing(
        SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=attention)]), 4
    )
    block = AnnouncedBlock(hash=b"h" * 32, parent=None, tokens=array("I", range(4)))
    return {
        tier: publish(
            [StoredEvent(block=block, medium=medium), RemovedEvent(hashes=[b"h"], medium=medium)]
        )
        for tier, medium in translation.media_of(config).items()
    }


def test_events_say_which_blocks_other_engines_reach_as_well(tmp_path: Path) -> None:
    places = {
        tier: {(event.medium, event.locality) for event in events}
        for tier, events in events_below(tmp_path).items()
    }

    assert places == {
        "host": {("CPU", "LOCAL")},
        "disk": {("STORAGE", "LOCAL")},
        "shared": {("STORAGE", "REMOTE")},
    }


def test_a_vllm_whose_events_have_no_locality_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.connectors.vllm import translation  # noqa: PLC0415

    for event in (translation.BlockStored, translation.BlockRemoved):
        fields = [(name, Any, None) for name in event.__struct_fields__ if name != "locality"]
        older = msgspec.defstruct(event.__name__, fields)
        monkeypatch.setattr(translation, event.__name__, older)

    media = {event.medium for events in events_below(tmp_path).values() for event in events}

    assert media == {"CPU", "STORAGE"}


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
