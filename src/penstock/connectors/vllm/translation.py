"""Translates between Penstock and vLLM: configuration, KV groups, block hashes, events, metrics.

With `adapter` the only module that imports what the tested version of vLLM has. A change of vLLM's
interfaces is followed here.
"""

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.request import RequestStatus

from penstock.config import SHARED_KINDS
from penstock.connectors.base.engine import LayerGroup, ServedEngine
from penstock.connectors.base.keys import (
    AnnouncedBlock,
    Drafts,
    Medium,
    RemovedEvent,
    StoredEvent,
)
from penstock.connectors.base.statistics import (
    BUCKETS_S,
    COUNTERS,
    GAUGES,
    TIMES,
    Taken,
    combined,
    reduced,
)
from penstock.connectors.vllm.versions import METRICS_PREFIX, found_version
from penstock.errors import UnavailableError
from penstock.vocabulary.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.config import Config
    from penstock.connectors.base.keys import EngineRequest
    from penstock.handoff.driver.prefill_rank import DeviceEvent

KINDS: tuple[tuple[type[Any], GroupKind], ...] = (
    (SlidingWindowMLASpec, GroupKind.SLIDING),
    (SlidingWindowSpec, GroupKind.SLIDING),
    (ChunkedLocalAttentionSpec, GroupKind.SLIDING),
    (MLAAttentionSpec, GroupKind.LATENT),
    (FullAttentionSpec, GroupKind.ATTENTION),
)
"""Specs whose blocks hold the KV of their own tokens and nothing else."""
LOCAL, REMOTE = "LOCAL", "REMOTE"
"""Localities in vLLM's KV events: what is remote, other engines reach as well."""
PACKING = "CPU_ATTN"
"""The CPU's kernels that pack blocks for an instruction set. They say for which."""
PLAIN = ("AMX_MLA", "CPU_MLA")
"""The CPU's kernels that write what a token has one number after the other."""
NEVER = 1 << 62
"""A step that is never reached."""


def engine_of(vllm_config: Any, kv_cache_config: Any) -> ServedEngine:
    """The engine as its configuration describes it."""
    parallel = vllm_config.parallel_config
    unsupported: list[str] = []
    groups: list[LayerGroup] = []
    dtypes: list[str] = []
    for group in kv_cache_config.kv_cache_groups:
        spec = _one_spec(group.kv_cache_spec)
        kind = _kind(spec)
        if kind is None or not group.enable_kv_transfer:
            unsupported.append(f"a KV group is of kind {type(spec).__name__}, must be attention")
            continue
        groups.append(
            LayerGroup(
                kind=kind,
                layer_names=tuple(group.layer_names),
                block_tokens=spec.block_size,
                channels=_dense_channels(spec),
            )
        )
        dtypes.append(str(spec.dtype).removeprefix("torch."))
    unsupported += why_unsupported(vllm_config)
    latent = all(group.kind is GroupKind.LATENT for group in groups)
    return ServedEngine(
        name=f"{vllm_config.kv_transfer_config.engine_id}-{parallel.data_parallel_index}",
        groups=tuple(groups),
        block_count=kv_cache_config.num_blocks,
        rank_count=parallel.world_size,
        rank=parallel.rank,
        equal_ranks=latent and parallel.nnodes == 1,
        kv_dtype=dtypes[0] if dtypes else "",
        kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
        drafts=_drafts(vllm_config),
        device=vllm_config.device_config.device_type,
        unsupported=tuple(unsupported),
        irreversible=_irreversible(vllm_config),
    )


def why_unsupported(vllm_config: Any) -> list[str]:
    """What the connector cannot work with, whatever the model is."""
    parallel = vllm_config.parallel_config
    found = [
        f"{name} parallelism is not supported"
        for name, size in {
            "pipeline": parallel.pipeline_parallel_size,
            "decode context": parallel.decode_context_parallel_size,
            "prefill context": parallel.prefill_context_parallel_size,
        }.items()
        if size > 1
    ]
    if not vllm_config.cache_config.enable_prefix_caching:
        # vLLM switches it off itself where its kernels cannot go on from a cached prefix.
        found.append("vLLM's own prefix caching is off")
    if vllm_config.model_config.enable_sleep_mode:
        # vLLM from 0.33 on asks `supports_sleep_mode`, and does not start.
        found.append("sleep mode is on: vLLM would take memory away that copies read")
    return found


def _drafts(vllm_config: Any) -> Drafts | None:
    """The layers of a draft model, or of one behind the model, which have KV in its blocks."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    # Modules of the model itself are as old as its weights, wherever those lie.
    apart = speculative.model != vllm_config.model_config.model
    return Drafts(
        name=f"{speculative.method}:{speculative.model}" if apart else speculative.method,
        ahead=vllm_config.num_prefill_lookahead_tokens,
    )


def _irreversible(vllm_config: Any) -> tuple[str, ...]:
    """What keeps vLLM from taking a step back on whose loads a block was damaged."""
    found = []
    if vllm_config.speculative_config is not None:
        found.append("speculative decoding is on, leave it off")
    if vllm_config.use_v2_model_runner and vllm_config.model_config.is_multimodal_model:
        # To begin a request again there, vLLM would have to send its pictures again.
        found.append("the model takes more than text, set VLLM_USE_V2_MODEL_RUNNER=0")
    return tuple(found)


def _one_spec(spec: Any) -> Any:
    """Layers of one kind but different sizes are a group of specs: any of them says the kind."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def _kind(spec: Any) -> GroupKind | None:
    # Exactly these: a subclass may keep something else in its blocks.
    return next((kind for known, kind in KINDS if type(spec) is known), None)


def _dense_channels(spec: Any) -> int:
    """Channels of K, if K and V lie side by side, number after number."""
    dense = (
        isinstance(spec, AttentionSpec)
        and spec.kv_quant_mode == KVQuantMode.NONE
        and spec.state_content_bytes is None
        and spec.num_head_slots is None
        and spec.tokens_per_state == 1
    )
    return int(spec.head_size) if dense else 0


def encodings_of(vllm_config: Any, caches: Mapping[str, torch.Tensor]) -> Callable[[str], str]:
    """Which kernels, for which instruction set, wrote the blocks of a layer.

    Raises `UnavailableError`: asked about a layer whose kernels are not known here, on the CPU.
    """
    layers = vllm_config.compilation_config.static_forward_context

    def encoding_of(name: str) -> str:
        layer, tensor = layers[name], caches[name]
        backend = layer.get_attn_backend().get_name()
        written_for = tensor.device.type
        if written_for == "cpu" and backend == PACKING:
            written_for = layer.isa
        elif written_for == "cpu" and backend not in PLAIN:
            raise UnavailableError(
                f"layer {name} is computed on the CPU by {backend}, must be one of "
                f"{', '.join((PACKING, *PLAIN))}: others may pack blocks in a way of their own"
            )
        shape = "x".join(map(str, tensor.shape[1:]))
        return f"vllm {backend} {written_for} {tensor.dtype} {shape}"

    return encoding_of


def head_encodings_of(
    vllm_config: Any, caches: Mapping[str, torch.Tensor], engine: ServedEngine
) -> dict[str, str]:
    """What each head of a block is written in, for layers whose blocks are heads in a row.

    The kernels that pack blocks do so for each head by itself, whatever the number of heads: K of
    all tokens of the block, then V of all. So a head means the same on a rank with more of them.
    """
    layers = vllm_config.compilation_config.static_forward_context
    found: dict[str, str] = {}
    for name, tensor in caches.items():
        is_packed = (
            tensor.device.type == "cpu"
            and layers[name].get_attn_backend().get_name() == PACKING
            # Block, head, token, K and V; kernels may have smaller blocks than the engine.
            and tensor.shape[:-2] == (engine.block_count, engine.rank_heads)
        )
        if is_packed:
            shape = "x".join(map(str, tensor.shape[-2:]))
            found[name] = f"vllm {PACKING} {layers[name].isa} {tensor.dtype} head {shape}"
    return found


def answer_of(vllm_config: Any, engine: ServedEngine) -> dict[str, Any]:
    """What the answer of a prefill engine says of the engine, in the keys of NixlConnector.

    A decode engine with Penstock reads none of them; proxies may.
    """
    parallel = vllm_config.parallel_config
    return {
        "remote_engine_id": engine.name,
        "remote_block_ids": [],
        "remote_host": "localhost",
        "remote_port": 0,
        "tp_size": parallel.tensor_parallel_size,
        "dcp_size": parallel.decode_context_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "transfer_mode": "push",
    }


def version_of(engine: ServedEngine) -> str:
    """What two engines must have in common, beside model and weights, to hand over prompts."""
    drafts = f", drafts {engine.drafts.name}" if engine.drafts is not None else ""
    return f"vllm {found_version()}{drafts}"


def is_completed(request: Any) -> bool:
    """Whether a request that has ended was computed to its end."""
    return request.status in {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}


def current_stream() -> int:
    """The stream that vLLM submits its steps to."""
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream


def use_device(device: torch.device) -> None:
    """Has this thread work on the device of its rank."""
    torch.cuda.set_device(device)


def stream_event() -> Callable[[], DeviceEvent]:
    """Makes events of vLLM's stream."""
    from penstock.movers.cuda.streams import StreamEvent  # noqa: PLC0415 - needs CUDA

    return StreamEvent


def steps_after_allocation(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many steps later than its allocation a block is written to by no earlier step.

    When a step is planned, all but the last of those before it have ended. The last may still write
    to blocks of a request that has ended since. Drafts are computed after the tokens of their step
    are known, and new blocks may be cleared in the step that allocates them: one step later still.
    """
    later = vllm_config.speculative_config is not None or kv_cache_config.needs_kv_cache_zeroing
    return int(vllm_config.max_concurrent_batches) - 1 + int(later)


def stream_beside() -> Callable[[], int]:
    """A stream in which nothing is computed."""
    stream = torch.cuda.Stream()
    return lambda: int(stream.cuda_stream)


def computes(forward_context: Any, batch: Mapping[str, Any]) -> bool:
    """Whether the step has a forward pass; one without is there for connectors alone.

    Args:
        forward_context: of the pass.
        batch: what the V2 model runner says of a pass, which it may replay without a context.
    """
    return forward_context.attn_metadata is not None or bool(batch)


def waits_at_layers(forward_context: Any) -> bool:
    """Whether vLLM comes by at every layer of the step that begins now.

    It does not where the whole step is replayed from a graph, or there is no step.
    """
    return (
        forward_context.attn_metadata is not None
        and forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL
        # Two halves of a batch, each in a thread of its own.
        and forward_context.ubatch_slices is None
    )


def withholding(kv_cache_manager: Any) -> Callable[[str, Sequence[int], int], None]:
    """Has vLLM's prefix cache forget blocks that it has entered before they were loaded.

    vLLM enters them again when it schedules the request next, as far as its computed tokens
    then go: it has counted only the blocks before them as entered.
    """
    (manager,) = kv_cache_manager.coordinator.single_type_managers
    entered: dict[str, int] = manager.num_cached_block

    def withhold(request: str, block_ids: Sequence[int], first: int) -> None:
        kv_cache_manager.evict_blocks(set(block_ids))
        entered[request] = min(entered[request], first)

    return withhold


class AsynchronousScheduler:
    """vLLM's asynchronous scheduling, as far as it concerns one request.

    vLLM has a field for each of these, for a purpose of its own: stages of a pipeline, drafts, and
    resets of its prefix cache.

    Args:
        kv_cache_manager: tells when vLLM begins to plan a step. With the V2 model runner vLLM sets
            the field that holds a request anew with every step that it has planned.
    """

    def __init__(self, kv_cache_manager: Any) -> None:
        self._held: dict[str, Any] = {}
        begin = kv_cache_manager.new_step_starts

        def new_step_starts() -> None:
            for name, request in [*self._held.items()]:
                request.next_decode_eligible_step = NEVER
                if request.is_finished():
                    del self._held[name]
            begin()

        kv_cache_manager.new_step_starts = new_step_starts

    def hold(self, request: Any) -> None:
        # Where vLLM does not know the field, this must fail.
        request.next_decode_eligible_step += NEVER
        self._held[request.request_id] = request

    def resume(self, request: Any) -> None:
        self._held.pop(request.request_id, None)
        request.next_decode_eligible_step = 0
        # How many tokens its steps in flight will give: none is in flight. Of a step that was
        # taken back vLLM still counts the token.
        request.num_output_placeholders = 0

    def discard(self, request: Any) -> None:
        self._held.pop(request.request_id, None)
        request.next_decode_eligible_step = 0
        # Otherwise vLLM uses what a preempted request's last step gives, and looks for invalid
        # blocks in running requests alone.
        request.drop_stale_output = True


def begin_again(scheduler_output: Any, request: Any, kv_cache_manager: Any) -> None:
    """Has workers begin a request anew that this step goes on with.

    The V2 model runner counts a request's computed tokens on the device: it knows nothing of a step
    that was taken back. It replaces what it knows of a request that comes as a new one.
    """
    known = scheduler_output.scheduled_cached_reqs
    at = known.req_ids.index(request.request_id)
    for column in (
        known.req_ids,
        known.new_token_ids,
        known.new_block_ids,
        known.num_computed_tokens,
        known.num_output_tokens,
    ):
        # Some are filled for pipelines only.
        del column[at : at + 1]
    scheduler_output.scheduled_new_reqs.append(
        NewRequestData.from_request(
            request,
            kv_cache_manager.get_block_ids(request.request_id),
            [*request.all_token_ids],
        )
    )


def computed_tokens(kv_cache_manager: Any, request: Any) -> int:
    """How many leading tokens of a request vLLM has on its device; asking changes nothing."""
    _, tokens, _ = kv_cache_manager.coordinator.find_longest_cache_hit(
        request.block_hashes, request.num_tokens - 1
    )
    return int(tokens)


def skipped_blocks(kv_cache_manager: Any) -> Callable[[int], list[int]]:
    """How many leading blocks of each KV group a request with so many computed tokens lost."""
    managers = kv_cache_manager.coordinator.single_type_managers

    def skipped(tokens: int) -> list[int]:
        return [
            manager.get_num_skipped_tokens(tokens) // manager.block_size for manager in managers
        ]

    return skipped


def events_wanted(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def media_of(config: Config) -> dict[str, Medium]:
    """What vLLM calls each tier below the device, by its name."""
    return {
        tier.name: Medium(
            MEDIUM_STORAGE if tier.stored else MEDIUM_CPU,
            REMOTE if kind.name in SHARED_KINDS else LOCAL,
        )
        for tier, kind in zip(config.cache.tiers, config.tier_kinds, strict=True)
    }


def describing(
    kv_cache_config: Any, block_tokens: int
) -> Callable[[EngineRequest, int], AnnouncedBlock]:
    """What vLLM itself says of a block of a request when it announces it."""
    parts = block_tokens // (kv_cache_config.hash_block_size or block_tokens)

    def describe(request: Any, block: int) -> AnnouncedBlock:
        hashes, adapter = request.block_hashes, request.lora_request
        first, end = block * block_tokens, (block + 1) * block_tokens
        extra_keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
        return AnnouncedBlock(
            hash=hashes[(block + 1) * parts - 1],
            parent=hashes[block * parts - 1] if block else None,
            tokens=array("I", request.all_token_ids[first:end]),
            adapter=adapter.lora_name if adapter is not None else None,
            adapter_id=adapter.lora_int_id if adapter is not None else None,
            extra_keys=extra_keys,
            session=request.session_id,
        )

    return describe


def publishing(
    kv_cache_config: Any, block_tokens: int
) -> Callable[[Iterable[StoredEvent | RemovedEvent]], list[Any]]:
    """Has events in vLLM's own form, which has one for each KV group of a block.

    A block below the device has all its groups: it is stored and removed as a whole.
    """
    groups = [
        {
            "group_idx": number,
            "kv_cache_spec_kind": get_kv_cache_spec_kind(group.kv_cache_spec).value,
            "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(group.kv_cache_spec),
        }
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    ]

    # Another version, which `any_version` allows, may not have it.
    has_locality = all("locality" in each.__struct_fields__ for each in (BlockStored, BlockRemoved))

    def publish(events: Iterable[StoredEvent | RemovedEvent]) -> list[Any]:
        found: list[Any] = []
        for event in events:
            place = {"medium": event.medium.name}
            if has_locality:
                place["locality"] = event.medium.locality
            if isinstance(event, StoredEvent):
                found += [_stored(event.block, block_tokens, **place, **group) for group in groups]
                continue
            hashes = [maybe_convert_block_hash(each) for each in event.hashes]
            found += [
                BlockRemoved(block_hashes=hashes, group_idx=number, **place)
                for number in range(len(groups))
            ]
        return found

    return publish


def _stored(block: AnnouncedBlock, block_tokens: int, **place: Any) -> BlockStored:
    parent = maybe_convert_block_hash(block.parent) if block.parent is not None else None
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(block.hash)],
        parent_block_hash=parent,
        token_ids=list(block.tokens),
        block_size=block_tokens,
        lora_id=block.adapter_id,
        lora_name=block.adapter,
        extra_keys=to_event_extra_keys([block.extra_keys]),
        session_id=block.session,
        **place,
    )


@dataclass
class PenstockStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted in some steps."""

    data: Taken = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: PenstockStats) -> PenstockStats:
        return PenstockStats(data=combined(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return reduced(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class PenstockMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters, gauges and histograms on vLLM's metrics page, one of each for every engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics: dict[str, dict[int, Any]] = {}
        self._add(self._counter_cls, COUNTERS)
        # Several API servers share one page, and any of them may have got the last update.
        self._add(self._gauge_cls, GAUGES, multiprocess_mode="mostrecent")
        self._add(self._histogram_cls, TIMES, buckets=[*BUCKETS_S])

    def _add(self, kind: Any, names: Mapping[str, str], **how: Any) -> None:
        for name, documentation in names.items():
            metric = kind(
                name=f"{METRICS_PREFIX}{name}",
                documentation=documentation,
                labelnames=self._labelnames,
                **how,
            )
            self._metrics[name] = {
                engine: metric.labels(*values)
                for engine, values in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name in COUNTERS:
                metric.inc(value)
            elif name in GAUGES:
                metric.set(value)
            else:
                for each in value:
                    metric.observe(each)
