"""Penstock's tiers below SGLang's radix cache, as an external linker that SGLang loads by name.

    penstock sglang-config penstock.toml      prints the options for `sglang.launch_server`

| module     | holds                                                            | imports SGLang |
|------------|------------------------------------------------------------------|----------------|
| `linker`   | the class that SGLang calls                                      | tested version |
| `waiting`  | requests that wait a moment for pages from a disk                | tested version |
| `pools`    | SGLang's options and device pools, or why they are not supported | no             |
| `metrics`  | what the linker counts, on SGLang's metrics page and in its log  | no             |
| `versions` | which SGLang is installed, which class it gets, the settings     | its version    |
| `untested` | the class for other versions of SGLang: does nothing             | any version    |

Everything else is in `penstock.connectors.base`, above all in its `pages`, which knows no SGLang.
The one rule: if anything fails here, SGLang still computes the right tokens. A page that may be
wrong is computed by SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.connectors.sglang.linker import PenstockLinker

__all__ = ["PenstockLinker"]


def __getattr__(name: str) -> object:
    # Imported on first use: `versions` must be importable where SGLang is not installed.
    if name in __all__:
        from penstock.connectors.sglang.versions import linker_class  # noqa: PLC0415

        return linker_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
