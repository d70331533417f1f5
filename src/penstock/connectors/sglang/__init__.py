"""Penstock's tiers below SGLang: an external linker, or a storage backend for its HiCache.

    penstock sglang-config penstock.toml      prints the options for `sglang.launch_server`

| module       | holds                                                            | imports SGLang |
|--------------|------------------------------------------------------------------|----------------|
| `linker`     | the class that SGLang calls                                      | tested version |
| `waiting`    | requests that wait a moment for pages from a disk                | tested version |
| `pools`      | SGLang's options and device pools, or why they are not supported | no             |
| `events`     | KV events of pages below the device, among SGLang's own          | tested version |
| `metrics`    | what the linker counts, on SGLang's metrics page and in its log  | no             |
| `versions`   | which SGLang is installed, which class it gets, the settings     | its version    |
| `untested`   | the class for other versions of SGLang: does nothing             | any version    |
| `storage`    | the class that HiCache calls                                     | tested version |
| `host_pool`  | HiCache's host pools, or why they are not supported              | tested version |
| `pool_pages` | tiers below them, for threads of HiCache that may wait           | no             |

Everything else is in `penstock.connectors.base`, above all in its `pages`, which knows no SGLang.
The one rule: if anything fails here, SGLang still computes the right tokens. A page that may be
wrong is computed by SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.connectors.sglang.linker import PenstockLinker
    from penstock.connectors.sglang.storage import PenstockStorage

__all__ = ["PenstockLinker", "PenstockStorage"]


def __getattr__(name: str) -> object:
    # Imported on first use: `versions` must be importable where SGLang is not installed.
    if name in __all__:
        from penstock.connectors.sglang import versions  # noqa: PLC0415

        return versions.linker_class() if name == "PenstockLinker" else versions.storage_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
