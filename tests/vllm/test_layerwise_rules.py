"""What is refused, and where steps may compute on loads, by vLLM's own objects.

No engine is started. An engine whose connector cannot be made does not start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# What vLLM's own imports warn of is not ours.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CONFIG = """
version = 1
model.name = "tiny"
[[tiers]]
name = "host"
kind = "host"
blocks = 8
"""
FULL = "full attention"
SLIDING = "a sliding window"


@pytest.fixture(scope="module")
def configured(model: Callable[[str], Path]) -> Callable[..., Any]:
    """The configuration of an engine with the connector."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - vLLM is not everywhere

    def configure(role: str = "kv_both", **how: Any) -> Any:
        transfer = {
            "kv_connector": "PenstockConnector",
            "kv_connector_module_path": "penstock.connectors.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "config": CONFIG,
                "layerwise": True,
                "any_version": True,
            },
        }
        arguments = EngineArgs(
            model=str(model("llama")),
            skip_tokenizer_init=True,
            max_model_len=1024,
            kv_transfer_config=transfer,
            **how,
        )
        return arguments.create_engine_config()

    return configure


def connect(config: Any, *groups: str) -> Any:
    """The scheduler's half of the connector, for a model with these KV groups."""
    import torch  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    shape: dict[str, Any] = {
        "block_size": 32,
        "num_kv_heads": 2,
        "head_size": 16,
        "dtype": torch.float32,
    }
    specs = {
        FULL: FullAttentionSpec(**shape),
        SLIDING: SlidingWindowSpec(**shape, sliding_window=64),
    }
    described = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layers.{number}"], specs[group])
            for number, group in enumerate(groups)
        ],
    )
    return KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, described)


def test_one_group_with_all_its_blocks_is_served(configured: Callable[..., Any]) -> None:
    assert connect(configured(), FULL)._config.layer_wise == "auto"


@pytest.mark.parametrize("groups", [(FULL, SLIDING), (SLIDING,)])
def test_what_vllm_could_not_take_back_is_refused(
    configured: Callable[..., Any], groups: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=rf"layerwise: is true with {len(groups)} KV groups"):
        connect(configured(), *groups)


def test_asynchronous_scheduling_is_refused_and_the_message_says_what_to_set(
    configured: Callable[..., Any],
) -> None:
    config = configured()
    config.scheduler_config.async_scheduling = True

    with pytest.raises(ConfigError, match="set --no-async-scheduling"):
        connect(config, FULL)


def test_the_runner_that_never_counts_back_is_refused(
    configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without Triton vLLM itself refuses that runner, but only while it is configured.
    config = configured()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")

    with pytest.raises(ConfigError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        connect(config, FULL)


def test_drafts_are_refused(configured: Callable[..., Any]) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}

    with pytest.raises(ConfigError, match="speculative decoding is on"):
        connect(configured(speculative_config=drafts), FULL)


def test_without_the_option_none_of_this_matters(configured: Callable[..., Any]) -> None:
    config = configured()
    config.scheduler_config.async_scheduling = True
    config.kv_transfer_config.kv_connector_extra_config["layerwise"] = False

    assert connect(config, FULL, SLIDING)._config.layer_wise == "off"


def test_failed_loads_that_fail_requests_are_refused_unless_they_are_meant(
    configured: Callable[..., Any],
) -> None:
    config = configured()
    config.kv_transfer_config.kv_load_failure_policy = "fail"

    with pytest.raises(ConfigError, match="kv_load_failure_policy: is 'fail'") as refused:
        connect(config, FULL)

    assert "kv_connector_extra_config.allow_fail must be true" in str(refused.value)
    config.kv_transfer_config.kv_connector_extra_config["allow_fail"] = True
    assert connect(config, FULL)._config is not None


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_engine_on_a_gpu_is_refused_in_a_role(
    configured: Callable[..., Any], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(role)
    config.kv_transfer_config.kv_connector_extra_config["layerwise"] = False
    assert connect(config, SLIDING, FULL)._config is not None

    monkeypatch.setattr(config.device_config, "device_type", "cuda")

    with pytest.raises(ConfigError, match=f"kv_role: is '{role}', must be left out: "):
        connect(config, FULL)


@pytest.mark.parametrize(
    ("metadata", "mode", "halves", "waits"),
    [
        ({}, "NONE", None, True),
        ({}, "PIECEWISE", None, True),
        ({}, "FULL", None, False),
        (None, "NONE", None, False),
        ({}, "NONE", [], False),
    ],
)
def test_layers_wait_where_vllm_comes_by_at_them(
    metadata: Any, mode: str, halves: Any, *, waits: bool
) -> None:
    from vllm.config import CUDAGraphMode  # noqa: PLC0415
    from vllm.forward_context import ForwardContext  # noqa: PLC0415

    from penstock.connectors.vllm.translation import waits_at_layers  # noqa: PLC0415

    context = ForwardContext(
        no_compile_layers={},
        attn_metadata=metadata,
        slot_mapping={},
        cudagraph_runtime_mode=CUDAGraphMode[mode],
        ubatch_slices=halves,
    )

    assert waits_at_layers(context) is waits


def test_vllm_may_capture_whole_steps() -> None:
    from penstock.connectors.vllm import PenstockConnector  # noqa: PLC0415

    for extra in ({}, {"layerwise": True}):
        assert PenstockConnector.requires_piecewise_for_cudagraph(extra) is False
