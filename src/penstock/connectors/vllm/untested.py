"""The connector for untested versions of vLLM: off, unless `any_version` is set.

vLLM asks for a class before it passes the configuration, so the choice is made when an object is
created. A disabled connector needs three names of vLLM, without which there are no connectors.

The one rule: whatever vLLM calls here, nothing is cached.
"""

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

import inspect
from abc import update_abstractmethods
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from penstock.connectors.vllm.versions import (
    WHERE,
    asks_any_version,
    connector_itself,
    log_off,
    which,
)

# Old versions do not ask connectors whether they support several KV groups.
KnowsGroups: Any = getattr(base, "SupportsHMA", object)


class Nothing(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to every rank in each step: empty."""


class DisabledConnector(KVConnectorBase_V1, KnowsGroups):  # type: ignore[misc]
    """Penstock, switched off."""

    def __new__(cls, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> Any:
        """The real connector, if `any_version` is set."""
        if _any_version(vllm_config):
            return connector_itself()(vllm_config, role, kv_cache_config)
        return super().__new__(cls)

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        # The base class of an old version does not take an argument that vLLM does not pass.
        given = () if kv_cache_config is None else (kv_cache_config,)
        super().__init__(vllm_config, role, *given)
        if role is KVConnectorRole.SCHEDULER:
            log_off(f"{which()}; {WHERE}.any_version = true tries it nevertheless")

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, *_args: Any, **_how: Any) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, *_args: Any, **_how: Any) -> Nothing:
        return Nothing()

    def request_finished(self, *_args: Any, **_how: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, *_args: Any, **_how: Any) -> tuple[bool, None]:
        return False, None

    def reset_cache(self) -> bool:
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        # Statistics exist only if the real connector counted them.
        return connector_itself().build_kv_connector_stats(data) if data else None

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any) -> Any:
        if _any_version(vllm_config):
            return connector_itself().build_prom_metrics(vllm_config, *args)
        return None


def _any_version(vllm_config: Any) -> bool:
    return asks_any_version(vllm_config.kv_transfer_config.kv_connector_extra_config)


def _do_nothing(*_args: Any, **_how: Any) -> None:
    """Implements the other abstract methods."""


def _answer_the_rest() -> None:
    for name in DisabledConnector.__abstractmethods__:
        # A method in place of a property would be truthy.
        read = isinstance(inspect.getattr_static(DisabledConnector, name), property)
        setattr(DisabledConnector, name, property(_do_nothing) if read else _do_nothing)
    update_abstractmethods(DisabledConnector)


_answer_the_rest()
