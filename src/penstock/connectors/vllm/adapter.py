"""The class that vLLM loads: translates vLLM's calls into those of `connectors.base`.

| vLLM calls, in the scheduler        | becomes                  |
|-------------------------------------|--------------------------|
| `on_new_request`                    | `SchedulerConnector.expect_request`  |
| `get_num_new_matched_tokens`        | `SchedulerConnector.find_tokens`     |
| `update_state_after_alloc`          | `SchedulerConnector.start_load`   |
| `build_connector_meta`              | `SchedulerConnector.plan_step`        |
| `update_connector_output`           | `SchedulerConnector.apply_reports`        |
| `request_finished_all_groups`       | `SchedulerConnector.finish_request`    |
| `reset_cache`                       | `SchedulerConnector.reset`       |

| vLLM calls, in a worker             | becomes                  |
|-------------------------------------|--------------------------|
| `register_kv_caches`                | `open_rank`              |
| `start_load_kv`                     | `WorkerConnector.before_forward` |
| `wait_for_layer_load`               | `WorkerConnector.wait_layer`     |
| `wait_for_save`                     | `WorkerConnector.after_forward`  |
| `get_transfer_results`              | `WorkerConnector.take_received`  |
| `build_connector_worker_meta`       | `WorkerConnector.take_reports`   |

RankHandshake about ranks reach the scheduler with vLLM's handshake. The one rule: where there is no
half, for whatever reason, every call answers as if nothing were cached, and vLLM goes on.
"""

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from penstock.connectors.base.engine import (
    handed_layers,
    handed_tiers,
    layer_numbers,
    tier_of,
)
from penstock.connectors.base.keys import EventAnnouncer
from penstock.connectors.base.layerwise import LayerwiseScheduler, joined_blocks
from penstock.connectors.base.requests import Pins
from penstock.connectors.base.scheduler import SchedulerConnector
from penstock.connectors.base.statistics import BlockBytes, PrefillTimer, TransferCounts
from penstock.connectors.base.worker import (
    ArenaServer,
    ReceivedLoads,
    WorkerConnector,
    copied_blocks,
    fetch_arenas,
)
from penstock.connectors.handoff.progress import StepProgress
from penstock.connectors.handoff.rank import RankSides
from penstock.connectors.handoff.requests import (
    EngineBlocks,
    HandoffRequests,
    HandoffStep,
    HandoffThread,
    engine_cores,
)
from penstock.connectors.handoff.scheduler import SchedulerHandoffs
from penstock.connectors.vllm import translation
from penstock.connectors.vllm.translation import PenstockMetrics, PenstockStats
from penstock.connectors.vllm.versions import (
    WHERE,
    log,
    log_into_vllm,
    log_off,
    read_settings,
)
from penstock.errors import ConfigError, UnavailableError
from penstock.runtime.messages import RankFacts
from penstock.runtime.open import WRITER, open_offload, open_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from penstock.config import Config
    from penstock.connectors.base.engine import ServedEngine
    from penstock.connectors.base.scheduler import StepPlan
    from penstock.connectors.handoff.rank import RankAddresses
    from penstock.runtime.rank import Rank
    from penstock.tiers.tensors import TensorTier


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a rank sends to the scheduler when it starts."""

    facts: bytes | None
    why_not: str = ""
    handoff: RankAddresses | None = None
    """Where the rank listens, if prompts are handed over."""


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler sends to every rank, once a step."""

    step: StepPlan | None
    handoff: HandoffStep | None = None
    timed: int = 0
    """The number of the step, if it is timed."""


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ranks send to the scheduler, once a step."""

    reports: list[bytes] = field(default_factory=list)
    timed: int = 0
    """The number of the step, as the scheduler gave it."""
    sent_early: int = 0
    """Bytes of prompts that were sent since the last report, before their last step began."""
    joined: int = 0
    """The number of the step, if it computed on loads."""

    def aggregate(self, other: WorkerReports) -> WorkerReports:
        """The reports of two ranks; their order means nothing."""
        return WorkerReports(
            self.reports + other.reports,
            max(self.timed, other.timed),
            self.sent_early + other.sent_early,
            max(self.joined, other.joined),
        )


class PenstockConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Penstock's tiers below vLLM's device cache."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_into_vllm()
        transfer = vllm_config.kv_transfer_config
        settings = read_settings(
            transfer.kv_connector_extra_config,
            failure_policy=transfer.kv_load_failure_policy,
            role=transfer.kv_role,
        )
        self._engine: ServedEngine = translation.engine_of(vllm_config, kv_cache_config)
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        self._facts = RankHandshake(facts=None)
        self._tier: TensorTier | None = None
        self._handed_tiers: list[TensorTier] = []
        """The same KV as other engines know it, by KV group, if prompts are handed over."""
        self._hand_out: Callable[[], None] | None = None
        self._received = ReceivedLoads()
        self._pool: Any = None
        self._withhold: Callable[[str, Sequence[int], int], None] | None = None
        self._layerwise = settings.layerwise
        self._counts_on_device = self._layerwise and vllm_config.use_v2_model_runner
        """Whether workers do not see by themselves that a step was taken back."""
        self._layers: dict[str, int] = {}
        self._at_layers: WorkerConnector | None = None
        """Set while the layers of this step wait for loads."""
        self._computes = True
        """Whether this step has a forward pass."""
        self._take_events: Callable[[], list[Any]] = list
        """The KV events to publish: none, unless vLLM publishes events."""
        self._timed = 0
        """The number of this step, if it is timed, in a worker."""
        self._config: Config | None = None
        self._settings = settings
        self._handoffs: HandoffRequests | None = None
        """The requests that are handed over, in the scheduler."""
        self._rank_handoffs: RankSides | None = None
        self._handoff_thread: HandoffThread | None = None
        self._empty_steps = 0
        """Steps since the last one that computes something, in the scheduler."""
        self._progress: StepProgress | None = None
        """What steps compute on a GPU of prompts that are handed over."""
        self._handed: HandoffStep | None = None
        """What the scheduler's side says of handoffs in this step, in a worker."""
        self._sent_early = 0
        """Bytes that this worker has reported."""
        if why_not := self._engine.why_not():
            self._run_without(why_not)
            return
        if self._layerwise and (refused := self._engine.why_not_layerwise()):
            raise ConfigError(f"{WHERE}.layerwise", refused)
        if settings.hands_over and (refused := self._engine.why_not_handoff()):
            raise ConfigError("kv_role", f"is {transfer.kv_role!r}, must be left out: {refused}")
        self._handoff_settings = settings.handoff(self._engine.device)
        self._config = self._engine.fit_config(settings.config, layerwise=self._layerwise)

    def _run_without(self, why: str) -> None:
        self._facts = RankHandshake(facts=None, why_not=why)
        # Ranks send the reason in their handshake: only the scheduler logs it, once.
        if self.role is KVConnectorRole.SCHEDULER:
            log_off(why)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """No: copies may read memory that vLLM takes away."""
        return False

    # ---------------------------------------------------------------- the scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Keeps vLLM's block pool, in which blocks are pinned."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._pool = kv_cache_manager.block_pool
        if self._layerwise and self._config is not None:
            self._withhold = translation.withholding(kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, RankHandshake]) -> None:
        """Every rank is ready: opens the cache over them."""
        if self._config is None:
            return
        missing = [each.why_not for _, each in sorted(metadata.items()) if each.facts is None]
        if missing:
            self._run_without(missing[0])
            return
        ranks = [RankFacts.from_bytes(each.facts) for each in metadata.values() if each.facts]
        try:
            offload = open_offload(self._config, ranks=ranks)
        except ConfigError as error:
            self._run_without(str(error))
            return
        # Then the next step is planned before this one has ended with its copies.
        overlap = self._vllm_config.scheduler_config.async_scheduling
        pins = Pins(self._pool)
        self._scheduler = SchedulerConnector(
            self._config,
            offload,
            pins,
            null_block=self._pool.null_block.block_id,
            window_groups=self._engine.window_groups,
            drafts=self._engine.drafts,
            step_blocks=0 if overlap else copied_blocks(ranks),
            announcer=self._make_announcer(self._config),
            joins=self._make_joins(ranks, pins if overlap else None),
            speed=PrefillTimer(offload.computed),
            counts=TransferCounts(BlockBytes.of(ranks, shared=self._config.equal_ranks)),
        )
        for tier in offload.statistics().tiers[-len(self._config.cache.tiers) :]:
            log.info(
                "Penstock keeps KV below vLLM's device cache: tier=%s blocks=%d block_tokens=%d "
                "ranks=%d shared=%s",
                tier.name,
                tier.slots,
                self._engine.block_tokens,
                len(ranks),
                self._config.equal_ranks,
            )

        if self._settings.hands_over:
            self._open_handoffs(self._config, metadata, self._scheduler)

    def _open_handoffs(
        self,
        config: Config,
        metadata: Mapping[int, RankHandshake],
        scheduler: SchedulerConnector,
    ) -> None:
        ranks = [each.handoff for _, each in sorted(metadata.items()) if each.handoff is not None]
        handoffs = SchedulerHandoffs(
            self._engine.name,
            ranks,
            model=config.model.name,
            weights=config.model.weights_version,
            version=translation.version_of(self._engine),
            step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
            settings=self._handoff_settings,
            transport=self._settings.transport,
        )
        self._handoffs = HandoffRequests(
            HandoffThread(self._engine.name, handoffs),
            handoffs,
            self._pool,
            counters=scheduler.counters,
            blocks=EngineBlocks(
                self._engine.block_tokens,
                translation.skipped_blocks(self._kv_cache_manager),
                self._pool.null_block.block_id if self._engine.window_groups else None,
                translation.steps_after_allocation(self._vllm_config, self._kv_cache_config),
            ),
            answer=translation.answer_of(self._vllm_config, self._engine),
            prefills=self._settings.prefills,
            decodes=self._settings.decodes,
        )
        log.info(
            "Penstock hands prompts over: role=%s address=%s",
            self._vllm_config.kv_transfer_config.kv_role,
            handoffs.address,
        )

    def _make_joins(
        self, ranks: Sequence[RankFacts], overlapping: Pins | None
    ) -> LayerwiseScheduler | None:
        if self._withhold is None:
            return None
        return LayerwiseScheduler(
            self._withhold,
            blocks_max=joined_blocks(ranks),
            overlapping=(translation.AsynchronousScheduler(self._kv_cache_manager), overlapping)
            if overlapping
            else None,
        )

    def _make_announcer(self, config: Config) -> EventAnnouncer | None:
        wanted = translation.events_wanted(self._vllm_config)
        if not wanted or not config.cache.tiers:
            return None
        described = self._kv_cache_config, self._engine.block_tokens
        publish = translation.publishing(*described)
        announcer = EventAnnouncer(
            translation.media_of(config), describe=translation.describing(*described)
        )
        self._take_events = lambda: publish(announcer.take())
        return announcer

    def on_new_request(self, request: Any) -> None:
        """Has blocks that lie on a disk brought up while the request waits for its turn."""
        if self._handoffs is not None:
            self._handoffs.expect(request)
        if self._scheduler is not None:
            manager = self._kv_cache_manager
            self._scheduler.expect_request(
                request, lambda: translation.computed_tokens(manager, request)
            )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """`None`, for a bounded time: blocks of the request are coming up from a disk."""
        if self._scheduler is None:
            return 0, False
        if self._handoffs is not None:
            if self._scheduler.must_compute(request):
                self._handoffs.give_up(request)
            received = self._handoffs.find_tokens(request, num_computed_tokens)
            if received:
                self._scheduler.follow_request(request, num_computed_tokens)
                return received, True
        matched = self._scheduler.find_tokens(request, num_computed_tokens)
        if matched is None:
            return None, False
        if self._handoffs is not None and self._handoffs.is_offered(request):
            # Its KV is sent before a step that it joined would be verified.
            return matched, matched > 0
        return matched, matched > 0 and not self._scheduler.can_join(request, matched)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Starts the load, or the handoff, that vLLM made room for."""
        if (
            num_external_tokens
            and self._handoffs is not None
            and self._handoffs.is_claimed(request)
        ):
            if self._scheduler is not None:
                self._scheduler.note_started(request)
            self._handoffs.start_claim(request, blocks.get_block_ids(), num_external_tokens)
            return
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.start_load(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The plan of this step."""
        if self._scheduler is None:
            return StepMetadata(None)
        if self._handoffs is not None:
            self._wait_for_prompts(self._handoffs, scheduler_output.total_num_scheduled_tokens)
        step = (
            scheduler_output.num_scheduled_tokens,
            scheduler_output.kv_connector_block_state.get_block_ids,
            scheduler_output.preempted_req_ids or (),
        )
        plan = self._scheduler.plan_step(
            *step, receiving=self._handoffs is not None and self._handoffs.receiving
        )
        if self._counts_on_device:
            for request in self._scheduler.taken_back:
                translation.begin_again(scheduler_output, request, self._kv_cache_manager)
        return StepMetadata(
            plan,
            None if self._handoffs is None else self._handoffs.plan_step(*step),
            self._scheduler.timed_step,
        )

    def _wait_for_prompts(self, handoffs: HandoffRequests, scheduled_tokens: int) -> None:
        """VLLM steps on while a prompt is on its way, also when it can compute nothing else.

        A step that is under way must not wait for this thread, nor must copies.
        """
        self._empty_steps = 0 if scheduled_tokens else self._empty_steps + 1
        idle = self._empty_steps >= self._vllm_config.max_concurrent_batches
        if idle and self._scheduler is not None and not self._scheduler.pending:
            handoffs.wait()

    def update_connector_output(self, connector_output: Any) -> None:
        """The reports of ranks about earlier steps."""
        if self._scheduler is not None:
            reported = connector_output.kv_connector_worker_meta or WorkerReports()
            self._scheduler.apply_reports(reported.reports, reported.timed, reported.joined)
            if reported.sent_early:
                self._scheduler.counters.add("bytes_sent_early", reported.sent_early)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keeps no block for longer than vLLM needs it."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same with several KV groups."""
        if self._scheduler is not None:
            # What is still read is pinned.
            self._scheduler.finish_request(request.request_id, block_ids)
        if self._handoffs is None:
            return False, None
        completed = translation.is_completed(request)
        return False, self._handoffs.finish(request, completed=completed)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step on for copies to end."""
        if self._handoffs is not None and self._handoffs.pending:
            return True
        return self._scheduler is not None and self._scheduler.pending

    def reset_cache(self) -> bool:
        """Drops everything below the device: the weights have changed, or a client asked for it."""
        if self._scheduler is not None:
            self._scheduler.reset("vLLM reset its connector")
        if self._handoffs is not None:
            self._handoffs.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """KV events of the tiers, in vLLM's own form."""
        return self._take_events()

    def get_kv_connector_stats(self) -> PenstockStats | None:
        """What was counted since the last call."""
        if self._scheduler is None:
            return None
        taken = self._scheduler.take_statistics()
        return PenstockStats(data=taken) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PenstockStats:
        """Statistics from what was sent."""
        return PenstockStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> PenstockMetrics:
        """Metrics on vLLM's own page."""
        return PenstockMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---------------------------------------------------------------- a worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens this rank's tiers: vLLM has its memory."""
        if self._config is None:
            return
        try:
            encodings = translation.encodings_of(self._vllm_config, kv_caches)
            self._tier = tier_of(self._engine, kv_caches, encodings)
            self._layers = layer_numbers(self._engine, kv_caches)
            if self._settings.hands_over:
                self._handed_tiers = self._describe_handed(kv_caches, self._tier)
            if not self._config.equal_ranks:
                self._open_rank(self._config, arenas=None)
            elif self._engine.rank == WRITER:
                rank = self._open_rank(self._config, arenas=None)
                host = ArenaServer(self._engine.name, peers=self._engine.rank_count - 1)
                self._hand_out = lambda: host.hand_out(rank.arenas)
        except (UnavailableError, ValueError) as error:
            self._rank_without(str(error))

    def _describe_handed(
        self, caches: dict[str, torch.Tensor], tier: TensorTier
    ) -> list[TensorTier]:
        heads = translation.head_encodings_of(self._vllm_config, caches, self._engine)
        numbered = {self._layers[name]: encoding for name, encoding in heads.items()}
        return handed_tiers(self._engine, tier, numbered)

    def get_handshake_metadata(self) -> RankHandshake:
        """What the scheduler must know of this rank; by now every rank has its memory."""
        try:
            if self._hand_out is not None:
                self._hand_out()
            elif self._worker is None and self._tier is not None and self._config is not None:
                self._open_rank(self._config, arenas=fetch_arenas(self._engine.name))
        except (UnavailableError, ValueError) as error:
            self._rank_without(str(error))
        self._hand_out = None
        return self._facts

    def _open_rank(self, config: Config, *, arenas: Mapping[str, int] | None) -> Rank:
        assert self._tier is not None
        rank = open_rank(config, rank=self._engine.rank, kv=self._tier, arenas=arenas)
        on_gpu = self._tier.device.type == "cuda"
        self._worker = self._make_worker(rank, on_gpu=on_gpu)
        self._facts = RankHandshake(facts=rank.facts.to_bytes())
        if self._handed_tiers:
            name = self._engine.name
            layers = handed_layers(self._tier.layout)
            # Also the threads of ZeroMQ, which starts them with the first socket.
            with engine_cores():
                handoffs = RankSides(
                    name, self._engine.rank, self._handed_tiers, layers, self._handoff_settings
                )
                self._facts.handoff = handoffs.addresses
                self._rank_handoffs = handoffs
                device = self._tier.device
                self._handoff_thread = HandoffThread(
                    f"{name}/{self._engine.rank}",
                    handoffs,
                    begin=partial(translation.use_device, device) if on_gpu else None,
                )
            if on_gpu:
                self._progress = StepProgress(
                    self._handoff_thread,
                    handoffs,
                    layers=layers,
                    stream=translation.current_stream,
                    make_event=translation.stream_event(),
                )
        return rank

    def _rank_without(self, why: str) -> None:
        self._run_without(f"rank {self._engine.rank}: {why}")
        self._tier, self._handed_tiers = None, []
        self.shutdown()

    def _make_worker(self, rank: Rank, *, on_gpu: bool) -> WorkerConnector:
        assert self._config is not None
        return WorkerConnector(
            rank,
            group_count=len(self._engine.groups),
            stream=translation.current_stream if on_gpu else lambda: 0,
            blocks_stay=self._engine.blocks_stay,
            beside=translation.stream_beside() if on_gpu and self._layerwise else None,
            layers=self._layers,
            wait_s=self._config.cache.operation_timeout_s,
            copies_itself=not on_gpu,
        )

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._timed = connector_metadata.timed
        self._handed = connector_metadata.handoff
        if self._handed is not None and (self._handed.restarted or self._handed.added):
            assert self._handoff_thread is not None
            assert self._rank_handoffs is not None
            if self._handed.restarted:
                # This step may compute others into their blocks.
                self._handoff_thread.make(self._rank_handoffs.restart, self._handed.restarted)
            self._handoff_thread.post(self._rank_handoffs.extend, self._handed.added)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """What the step computes on starts now, the rest when it was submitted."""
        self._at_layers = None
        self._computes = translation.computes(forward_context, kwargs)
        if self._worker is not None and self._layerwise:
            step = self._get_connector_metadata().step
            by_layer = translation.waits_at_layers(forward_context)
            if self._worker.before_forward(step, by_layer=by_layer):
                self._at_layers = self._worker

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A layer waits for what it reads; without `layerwise` all of it was there before."""
        if self._at_layers is not None:
            self._at_layers.wait_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """A layer of the prompts that are handed over is computed; the rest is saved later."""
        if self._handed is None or not self._handed.computed:
            return
        if self._progress is not None:
            self._progress.layer(self._handed.computed, self._layers[layer_name])
        else:
            assert self._handoff_thread is not None
            assert self._rank_handoffs is not None
            self._handoff_thread.post(
                self._rank_handoffs.computed, self._handed.computed, self._layers[layer_name]
            )

    def wait_for_save(self) -> None:
        """The step is submitted, drafts included. Nothing waits: sources are pinned."""
        if self._progress is not None and self._handed is not None and self._handed.computed:
            self._progress.end(self._handed.computed)
        if self._worker is not None:
            step = self._get_connector_metadata().step
            self._worker.after_forward(step, computes=self._computes)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Requests whose loads have ended on this rank, and whose handoffs have ended on all."""
        self._received = self._worker.take_received() if self._worker else ReceivedLoads()
        handed = self._handed or HandoffStep()
        # Layers that draft tokens are computed after this call.
        self._handed = HandoffStep(computed=handed.computed) if handed.computed else None
        return KVConnectorTransferResults(
            finished_recving=self._received.requests | handed.received,
            failed_recving=self._received.failed | handed.failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of those requests that vLLM must compute; asked right after the above."""
        return self._received.invalid_blocks

    def build_connector_worker_meta(self) -> WorkerReports | None:
        """Reports for the scheduler's side."""
        timed, self._timed = self._timed, 0
        sent = self._rank_handoffs.early_bytes if self._rank_handoffs is not None else 0
        early, self._sent_early = sent - self._sent_early, sent
        found = WorkerReports(timed=timed, sent_early=early)
        if self._worker is not None:
            found.reports = self._worker.take_reports()
            found.joined = self._worker.take_joined_step()
        return found if found != WorkerReports() else None

    def shutdown(self) -> None:
        """Closes the rank and frees its memory; nothing touches vLLM's memory afterwards."""
        # Before the memory goes that these threads read and write.
        if self._handoff_thread is not None:
            self._handoff_thread.close()
        if self._handoffs is not None:
            self._handoffs.close()
        working, self._worker = self._worker, None
        if working is not None:
            working.close()
        scheduling, self._scheduler = self._scheduler, None
        if scheduling is not None:
            scheduling.close()
