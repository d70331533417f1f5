"""Proof that the offload layer fits an engine that owns its device blocks: a vLLM connector.

The scheduler's half owns the metadata (`open_offload`), the worker's half executes
(`open_rank`). Plans ride on vLLM's connector metadata, reports on its worker metadata, facts
about the ranks on its handshake. Slots are vLLM's own block ids; whole blocks move.

This is a test's connector: one KV group, no adapters, no media, no layer-wise loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

import penstock
from penstock.cache.operations import Purpose
from penstock.runtime.messages import decode_plan, decode_report

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from penstock.vocabulary.keys import KeyChain


@dataclass
class Facts(KVConnectorHandshakeMetadata):
    facts: Any


@dataclass
class Plan(KVConnectorMetadata):
    plan: bytes | None


@dataclass
class Reports(KVConnectorWorkerMetadata):
    reports: list[bytes] = field(default_factory=list)

    def aggregate(self, other: Reports) -> Reports:
        return Reports(self.reports + other.reports)


def parse(vllm_config: Any) -> penstock.Config:
    transfer = vllm_config.kv_transfer_config
    return penstock.parse_config(
        f"""
        version = 1
        model.name = "proof"
        [cache]
        block_tokens = {vllm_config.cache_config.block_size}
        ranks = {vllm_config.parallel_config.world_size}
        [[tiers]]
        name = "host"
        kind = "host"
        blocks = {transfer.get_from_extra_config("host_blocks", 256)}
        """
    )


class Scheduling:
    """The scheduler's half."""

    def __init__(self, config: penstock.Config) -> None:
        self.config = config
        self.offload: Any = None
        self.pool: Any = None
        self.requests: dict[str, Request] = {}
        self.chains: dict[str, KeyChain] = {}
        self.local: dict[str, int] = {}
        """So many leading blocks of a request were in vLLM's own cache."""
        self.saved: dict[str, int] = {}
        self.pinned: dict[Any, list[Any]] = {}

    def keys(self, request: Request) -> list[Any]:
        chain = self.chains.setdefault(request.request_id, self.config.key_chain())
        chain.extend(request.all_token_ids[chain.token_count :])
        return chain.keys

    def matched(self, request: Request, computed: int) -> int:
        tokens = self.config.cache.block_tokens
        # The last token is always computed: the engine needs its logits.
        keys = self.keys(request)[: (request.num_tokens - 1) // tokens]
        found = self.offload.lookup(keys)
        self.local[request.request_id] = computed // tokens
        return max(0, found.ready * tokens - computed)

    def load(self, request: Request, blocks: Any, external: int) -> None:
        tokens = self.config.cache.block_tokens
        slots = blocks.get_block_ids()[0]
        count = external // tokens
        first = self.local[request.request_id]
        keys = self.keys(request)[first : first + count]
        started = self.offload.load(
            keys, slots[first : first + count], cause=f"load {request.request_id}"
        )
        assert len(started.accepted) == count, started

    def save(self, output: Any) -> None:
        tokens = self.config.cache.block_tokens
        for name in output.num_scheduled_tokens:
            request = self.requests[name]
            keys = self.keys(request)
            table = output.kv_connector_block_state.get_block_ids(name)[0]
            # What earlier steps computed: the tokens of this one are not counted yet.
            full = min(request.num_computed_tokens // tokens, len(keys), len(table))
            first = self.saved.get(name, 0)
            if full <= first:
                continue
            self.saved[name] = full
            started = self.offload.save(
                keys[first:full],
                table[first:full],
                cause=f"save {name}",
                parent=keys[first - 1] if first else None,
            )
            if started.operations:
                (operation,) = started.operations  # The prompts here fit into one.
                blocks = [self.pool.blocks[table[first + n]] for n in started.accepted]
                self.pool.touch(blocks)
                self.pinned[operation] = blocks

    def hear(self, reports: list[bytes]) -> None:
        for report in reports:
            self.offload.ranks.receive(report)
        for told in self.offload.poll():
            if getattr(told, "settled", True):
                self.pool.free_blocks(self.pinned.pop(told.operation, []))


class Working:
    """A worker's half."""

    def __init__(self, config: penstock.Config, rank: int) -> None:
        self.config = config
        self.number = rank
        self.rank: Any = None
        self.loads: dict[Any, tuple[str, list[int]]] = {}
        self.received: set[str] = set()
        self.invalid: set[int] = set()
        self.reports: list[bytes] = []

    def step(self, plan: bytes | None) -> None:
        if plan is not None:
            self.rank.take(plan)
            for copy in decode_plan(plan).copies:
                if copy.purpose is Purpose.LOAD:
                    name = copy.cause.removeprefix("load ")
                    self.loads[copy.operation] = (name, copy.target_slots[0].tolist())
        while self.rank.busy:
            if (report := self.rank.step()) is not None:
                self.reports.append(report)
                self._told(report)

    def _told(self, report: bytes) -> None:
        for moved in decode_report(report).moved:
            if moved.operation not in self.loads:
                continue
            name, slots = self.loads.pop(moved.operation)
            self.received.add(name)
            bad = range(len(slots)) if moved.failure else [at for at, _ in moved.faults]
            self.invalid.update(slots[at] for at in bad)


class ProofConnector(KVConnectorBase_V1):
    working_kind = Working

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = parse(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduling = Scheduling(config)
        else:
            self.working = self.working_kind(config, vllm_config.parallel_config.rank)

    # The scheduler's side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, Facts]) -> None:
        facts = [metadata[rank].facts for rank in sorted(metadata)]
        self.scheduling.offload = penstock.open_offload(self.scheduling.config, ranks=facts)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.scheduling.pool = kv_cache_manager.block_pool

    def on_new_request(self, request: Request) -> None:
        self.scheduling.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        matched = self.scheduling.matched(request, computed)
        return matched, matched > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, external: int) -> None:
        if external:
            self.scheduling.load(request, blocks, external)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        self.scheduling.save(scheduler_output)
        self.scheduling.offload.step()
        return Plan(self.scheduling.offload.ranks.take_plan())

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        self.scheduling.hear(told.reports if told is not None else [])

    def request_finished(self, request: Request, _: list[int]) -> tuple[bool, None]:
        half = self.scheduling
        for kept in (half.requests, half.chains, half.local, half.saved):
            kept.pop(request.request_id, None)
        return False, None

    def has_pending_push_work(self) -> bool:
        return bool(self.scheduling.pinned)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        working = self.working
        tensors = [kv_caches[name] for name in sorted(kv_caches)]
        working.rank = penstock.open_rank(working.config, rank=working.number, kv=tensors)

    def get_handshake_metadata(self) -> Facts:
        return Facts(self.working.rank.facts)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are started after the step's forward pass, with its saves."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request joins a step when all its layers are there."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Whole blocks are saved, after the forward pass."""

    def wait_for_save(self) -> None:
        """Nothing waits: the blocks are pinned until the copy has settled."""

    def get_finished(self, _: set[str]) -> tuple[None, set[str]]:
        self.working.step(self._get_connector_metadata().plan)
        received, self.working.received = self.working.received, set()
        return None, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.working.invalid = self.working.invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> Reports | None:
        reports, self.working.reports = self.working.reports, []
        return Reports(reports) if reports else None
