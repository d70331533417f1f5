"""Penstock's tiers below vLLM's own device cache, as a connector that vLLM loads by name.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": "penstock.toml"}}'

| module        | holds                                                         | imports vLLM     |
|---------------|---------------------------------------------------------------|------------------|
| `adapter`     | the class that vLLM calls                                     | tested version   |
| `translation` | vLLM's configuration, hashes, events and metrics              | tested version   |
| `versions`    | which vLLM is installed, which class it gets, and its log     | its version      |
| `untested`    | the class for other versions of vLLM: does nothing            | any version      |

Everything else a connector needs is in `penstock.connectors.base`, which knows no vLLM, and prompts
that are handed over in `penstock.connectors.handoff`. The one rule: if anything fails here, vLLM
still computes the right tokens. A block that may be wrong is computed by vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.connectors.vllm.adapter import PenstockConnector

__all__ = ["PenstockConnector"]


def __getattr__(name: str) -> object:
    # Imported on first use: `versions` must be importable where vLLM is not installed.
    if name in __all__:
        from penstock.connectors.vllm.versions import connector_class  # noqa: PLC0415

        return connector_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
