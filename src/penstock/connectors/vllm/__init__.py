"""Penstock's tiers below vLLM's own device cache, as a connector that vLLM loads by name.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": "penstock.toml"}}'

| module       | what it is                                                   | knows vLLM |
|--------------|--------------------------------------------------------------|------------|
| `versions`   | which vLLM this is, and which class it gets                  | its number |
| `adapter`    | the class that vLLM calls                                    | yes        |
| `untested`   | the class that another version of vLLM calls: off            | yes        |
| `facing`     | what vLLM calls things: configuration, hashes, events        | yes        |
| `metrics`    | counts as vLLM's logger and metrics page want them           | yes        |
| `settings`   | what the flag may say                                        | no         |
| `engine`     | what Penstock must know about the engine, as values          | no         |
| `keys`       | from a request to the keys of its blocks                     | no         |
| `scheduling` | the scheduler's half: lookups, loads, saves                  | no         |
| `pins`       | device blocks that vLLM must not reuse until they are saved  | no         |
| `working`    | a worker's half: carries plans out, and says what failed     | no         |
| `layerwise`  | loads that a step computes on while they arrive              | no         |
| `layouts`    | from the tensors that vLLM registers to a layout             | no         |
| `sharing`    | how ranks with equal bytes come to share one host tier       | no         |
| `messages`   | what the halves tell each other                              | no         |
| `counting`   | what is counted and logged of loads, saves and requests      | no         |
| `statistics` | what shows up in vLLM's own metrics                          | no         |
| `events`     | KV events, under the names that vLLM gave the blocks         | no         |
| `logs`       | Penstock's log lines in vLLM's log                           | no         |

The one rule: whatever goes wrong here, vLLM computes the right tokens. A block that is not
certainly right is a block that vLLM computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.connectors.vllm.adapter import PenstockConnector

__all__ = ["PenstockConnector"]


def __getattr__(name: str) -> object:
    # Looked up when vLLM asks: everything else here is of use where vLLM is not installed.
    if name in __all__:
        from penstock.connectors.vllm.versions import connector_class  # noqa: PLC0415

        return connector_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
