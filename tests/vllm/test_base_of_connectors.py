"""What vLLM's base of connectors has, method by method: an answer for each, or a reason for none.

A connector inherits what it does not answer, and the answer of the base may be wrong for it:
`supports_sleep_mode` is true there. So a vLLM whose base has something else fails here, and the
next release is noticed before anybody runs it (`make test-vllm-newest`).
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

# What vLLM's own imports warn of is not ours.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BASE = frozenset(
    """
    __init__(self, vllm_config, role, kv_cache_config)
    _get_connector_metadata(self)
    bind_connector_metadata(self, connector_metadata)
    bind_gpu_block_pool(self, gpu_block_pool)
    bind_kv_cache_manager(self, kv_cache_manager)
    build_connector_meta(self, scheduler_output) (abstract)
    build_connector_worker_meta(self)
    build_kv_connector_stats(cls, data=None) (class)
    build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues) (class)
    clear_connector_metadata(self)
    finish_forward(self)
    get_block_ids_with_load_errors(self)
    get_external_cache_hit_sources(self, request, num_external_tokens)
    get_finished(self, finished_req_ids)
    get_finished_count(self)
    get_handshake_metadata(self)
    get_kv_connector_kv_cache_events(self)
    get_kv_connector_stats(self)
    get_loaded_kv_cache_group_ids(self, request)
    get_mem_pool_context(self)
    get_num_new_matched_tokens(self, request, num_computed_tokens) (abstract)
    get_required_kvcache_layout(cls, vllm_config) (class)
    get_transfer_results(self, finished_req_ids)
    handle_preemptions(self, kv_connector_metadata)
    has_connector_metadata(self)
    has_pending_block_frees(self)
    has_pending_push_work(self)
    on_new_request(self, request)
    register_finished_partial_tail(self, request, block_ids, partial_tail_offloads)
    register_kv_caches(self, kv_caches)
    request_finished(self, request, block_ids)
    requires_kv_delivery (property)
    requires_piecewise_for_cudagraph(cls, extra_config) (class)
    reset_cache(self)
    reset_capture_state(self)
    role (property)
    save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs) (abstract)
    set_host_xfer_buffer_ops(self, copy_operation)
    set_xfer_handshake_metadata(self, metadata)
    set_xfer_handshake_metadata_pp_aware(self, metadata)
    shutdown(self)
    start_load_kv(self, forward_context, **kwargs) (abstract)
    supports_divergent_local_hybrid_hits (property)
    take_events(self)
    update_connector_output(self, connector_output)
    update_state_after_alloc(self, request, blocks, num_external_tokens) (abstract)
    wait_for_layer_load(self, layer_name) (abstract)
    wait_for_save(self) (abstract)
    """.strip().split("\n    ")
)
"""Of vLLM 0.32."""
ADDED: dict[tuple[int, int], frozenset[str]] = {
    (0, 32): frozenset(),
    (0, 33): frozenset(
        {
            "supports_sleep_mode(cls, kv_transfer_config) (class)",
            "unregister_kv_caches(self)",
            "restore_kv_caches(self)",
        }
    ),
}
"""What each tested version has beside that."""
INHERITED = {
    "_get_connector_metadata": "the base's own",
    "bind_gpu_block_pool": "the pool comes with the cache manager",
    "clear_connector_metadata": "the base's own",
    "finish_forward": "a step has nothing to do between its forward pass and its drafts",
    "get_external_cache_hit_sources": "all hits are of `_cache_hit_source`",
    "get_finished": "`get_transfer_results` is asked in its place",
    "get_finished_count": "every rank reports",
    "get_kv_connector_kv_cache_events": "events come from the scheduler's side",
    "get_loaded_kv_cache_group_ids": "all groups are loaded, or the connector is off",
    "get_mem_pool_context": "any memory can be copied",
    "get_required_kvcache_layout": "any layout can be read",
    "handle_preemptions": "saves of preempted requests are cancelled in the plan of the step",
    "has_connector_metadata": "the base's own",
    "has_pending_block_frees": "pinned blocks are few: vLLM need not wait for them",
    "register_finished_partial_tail": "without state-space layers there are none",
    "requires_piecewise_for_cudagraph": "with one graph a step waits for all its loads at once",
    "reset_capture_state": "capturing changes nothing",
    "restore_kv_caches": "`supports_sleep_mode` is false",
    "role": "the base's own",
    "set_host_xfer_buffer_ops": "the connector copies by itself",
    "set_xfer_handshake_metadata_pp_aware": "pipeline parallelism is refused",
    "supports_divergent_local_hybrid_hits": "without state-space layers there are none",
    "unregister_kv_caches": "`supports_sleep_mode` is false",
}
"""Why the answer of the base is right."""


def described(of: type) -> frozenset[str]:
    """Its methods with their arguments."""
    found = set()
    for name, member in vars(of).items():
        if isinstance(member, property):
            found.add(f"{name} (property)")
        call = getattr(member, "__func__", member)
        if not inspect.isfunction(call) or (name.startswith("__") and name != "__init__"):
            continue
        signature = inspect.signature(call)
        bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        line = f"{name}{signature.replace(parameters=bare, return_annotation=signature.empty)}"
        line += " (class)" if call is not member else ""
        found.add(line + (" (abstract)" if getattr(call, "__isabstractmethod__", False) else ""))
    return frozenset(found)


def installed() -> tuple[int, int]:
    from vllm import __version__  # noqa: PLC0415 - only where the tests of vLLM run

    major, minor = __version__.split(".")[:2]
    return int(major), int(minor)


def of_vllm(name: str) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: PLC0415 - as above

    return getattr(base, name)


def test_the_base_has_what_is_known_of_this_version() -> None:
    """Also of a version that is not known: it is compared with the newest that is."""
    found = described(of_vllm("KVConnectorBase_V1"))

    known = BASE | ADDED.get(installed(), ADDED[max(ADDED)])

    assert (sorted(found - known), sorted(known - found)) == ([], [])


def test_what_surrounds_the_base_is_what_is_known() -> None:
    (asked,) = described(of_vllm("SupportsHMA"))

    assert asked == "request_finished_all_groups(self, request, block_ids) (abstract)"
    told = [each.name for each in fields(of_vllm("KVConnectorTransferResults"))]
    assert told == ["finished_sending", "finished_recving", "failed_recving"]


def test_each_method_of_the_base_is_answered_or_there_is_a_reason_why_not() -> None:
    from penstock.connectors.vllm.adapter import PenstockConnector  # noqa: PLC0415 - imports vLLM

    names = {line.partition("(")[0].strip() for line in BASE.union(*ADDED.values())}

    answered = {name for name in names if name in vars(PenstockConnector)}

    assert names - answered == set(INHERITED)


def test_the_tested_versions_are_those_whose_base_is_known() -> None:
    from penstock.connectors.vllm.versions import TESTED  # noqa: PLC0415 - beside the others

    assert set(TESTED) == set(ADDED)
