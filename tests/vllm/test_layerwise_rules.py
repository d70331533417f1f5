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


def described(*groups: str) -> Any:
    """The KV of a model with these groups."""
    import torch  # noqa: PLC0415
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
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layers.{number}"], specs[group])
            for number, group in enumerate(groups)
        ],
    )


def connect(config: Any, *groups: str) -> Any:
    """The scheduler's half of the connector, for a model with these KV groups."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: PLC0415

    return KVConnectorFactory.create_connector(
        config, KVConnectorRole.SCHEDULER, described(*groups)
    )


def test_one_group_with_all_its_blocks_is_served(configured: Callable[..., Any]) -> None:
    assert connect(configured(), FULL)._config.layer_wise == "auto"


@pytest.mark.parametrize("groups", [(FULL, SLIDING), (SLIDING,)])
def test_what_vllm_could_not_take_back_is_refused(
    configured: Callable[..., Any], groups: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=rf"layerwise: is true with {len(groups)} KV groups"):
        connect(configured(), *groups)


def test_asynchronous_scheduling_is_served(configured: Callable[..., Any]) -> None:
    config = configured()
    config.scheduler_config.async_scheduling = True

    assert connect(config, FULL)._config.layer_wise == "auto"


class Planning:
    """vLLM's asynchronous scheduler, and a request in a step whose results are not there.

    The first of its blocks was cached, which stands for one that was loaded.
    """

    def __init__(self, config: Any, *, v2: bool) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: PLC0415
        from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415

        from penstock.connectors.vllm.translation import AsynchronousScheduler  # noqa: PLC0415

        config.kv_transfer_config = None
        config.scheduler_config.async_scheduling = True
        config.cache_config.num_gpu_blocks = 8
        self.scheduler: Any = AsyncScheduler(
            config, described(FULL), StructuredOutputManager(config), block_size=32
        )
        first = self.request("first", 40)
        self.answer(self.scheduler.schedule())
        self.scheduler.finish_requests("first", first.status.FINISHED_ABORTED)
        self.requested = self.request("again", 48)
        self.scheduler.use_v2_model_runner = v2
        self.step = self.scheduler.schedule()
        self.engine = AsynchronousScheduler(self.scheduler.kv_cache_manager)

    def request(self, name: str, tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams  # noqa: PLC0415
        from vllm.utils.hashing import sha256  # noqa: PLC0415
        from vllm.v1.core.kv_cache_utils import (  # noqa: PLC0415
            get_request_block_hasher,
            init_none_hash,
        )
        from vllm.v1.request import Request  # noqa: PLC0415

        init_none_hash(sha256)
        request = Request(
            name,
            [*range(tokens)],
            SamplingParams(max_tokens=9),
            None,
            block_hasher=get_request_block_hasher(32, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def answer(self, step: Any, invalid: tuple[int, ...] = ()) -> None:
        """The results of a step: token 7 for each request, and blocks that failed to load."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: PLC0415

        names = [*step.num_scheduled_tokens]
        self.scheduler.update_from_output(
            step,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[[7] for _ in names],
                kv_connector_output=KVConnectorOutput(invalid_block_ids=set(invalid)),
            ),
        )

    def hold(self) -> None:
        """As the connector does it: while vLLM puts the request's step together, not after it."""
        self.engine.hold(self.requested)
        if self.scheduler.use_v2_model_runner:
            # What vLLM does next, for a stage of a pipeline.
            self.requested.next_decode_eligible_step = self.scheduler.current_step + 1

    def plan(self) -> int:
        """How many tokens of the request the next step has."""
        return int(self.scheduler.schedule().num_scheduled_tokens.get("again", 0))


@pytest.fixture(params=[False, True], ids=["V1 runner", "V2 runner"])
def planning(configured: Callable[..., Any], request: pytest.FixtureRequest) -> Planning:
    planning = Planning(configured(), v2=request.param)
    assert planning.step.num_scheduled_tokens == {"again": 16}
    return planning


def test_vllm_plans_no_step_of_a_request_that_is_held(planning: Planning) -> None:
    planning.hold()

    meanwhile = planning.plan()
    planning.answer(planning.step)
    planning.engine.resume(planning.requested)

    assert meanwhile == 0
    assert planning.plan() == 1
    assert [*planning.requested.output_token_ids] == [7]


def test_vllm_takes_back_the_one_step_of_a_request_that_was_held(planning: Planning) -> None:
    ((block, *_),) = planning.scheduler.kv_cache_manager.get_block_ids("again")
    planning.hold()
    assert planning.plan() == 0

    planning.answer(planning.step, invalid=(block,))
    planning.engine.resume(planning.requested)

    # All 48 of the prompt, and not the token that was dropped.
    assert planning.plan() == 48
    assert not planning.requested.output_token_ids


def test_vllm_uses_no_token_of_a_held_request_that_was_preempted(planning: Planning) -> None:
    planning.hold()
    planning.scheduler.running.remove(planning.requested)
    planning.scheduler._preempt_request(planning.requested, 0.0)

    planning.engine.discard(planning.requested)
    planning.answer(planning.step)

    assert not planning.requested.output_token_ids
    assert planning.plan() > 0


def test_left_to_itself_vllm_uses_it(planning: Planning) -> None:
    """The control, and one more: by itself it plans the next step at once."""
    assert planning.plan() == 1
    planning.scheduler.running.remove(planning.requested)
    planning.scheduler._preempt_request(planning.requested, 0.0)

    planning.answer(planning.step, invalid=(1, 2))

    assert [*planning.requested.output_token_ids] == [7]


@pytest.mark.parametrize("planning", [True], indirect=True, ids=["V2 runner"])
def test_workers_that_count_by_themselves_begin_a_request_again(planning: Planning) -> None:
    from penstock.connectors.vllm.translation import begin_again  # noqa: PLC0415

    manager = planning.scheduler.kv_cache_manager
    blocks = manager.get_block_ids("again")
    planning.hold()
    planning.answer(planning.step, invalid=(blocks[0][0],))
    planning.engine.resume(planning.requested)
    planning.request("other", 40)
    planned = planning.scheduler._update_after_schedule

    def plan(step: Any) -> None:
        """Where vLLM asks its connector, before it counts what the step will have computed."""
        known = step.scheduled_cached_reqs
        assert (known.req_ids, known.num_computed_tokens) == (["again"], [0])
        begin_again(step, planning.requested, manager)
        planned(step)

    planning.scheduler._update_after_schedule = plan
    step = planning.scheduler.schedule()

    known = step.scheduled_cached_reqs
    assert known.num_reqs == 0
    assert known.new_block_ids == known.num_computed_tokens == known.num_output_tokens == []
    _, again = step.scheduled_new_reqs
    assert (again.req_id, again.num_computed_tokens) == ("again", 0)
    assert again.prefill_token_ids == [*range(48)]
    assert again.block_ids == blocks
    assert step.num_scheduled_tokens == {"again": 48, "other": 8}


def test_the_runner_that_counts_on_the_device_is_served_but_for_pictures(
    configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without Triton vLLM itself refuses that runner, but only while it is configured.
    config = configured()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert connect(config, FULL)._config.layer_wise == "auto"

    monkeypatch.setattr(type(config.model_config), "is_multimodal_model", True)

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
def test_an_engine_takes_a_role_on_a_cpu_or_a_cuda_gpu_and_on_no_other_device(
    configured: Callable[..., Any], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(role)
    config.kv_transfer_config.kv_connector_extra_config["layerwise"] = False
    assert connect(config, SLIDING, FULL)._config is not None

    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    assert connect(config, FULL)._handoff_settings.bounds.berth_bytes == 16 << 20

    monkeypatch.setattr(config.device_config, "device_type", "xpu")
    with pytest.raises(
        ConfigError, match=f"kv_role: is '{role}', must be left out: KV lies on xpu"
    ):
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
