"""The linker for untested versions of SGLang: off, unless `any_version` is set.

SGLang asks for a class before it passes the configuration, so the choice is made when an object is
created. The one rule: whatever SGLang calls here, nothing is cached.
"""

# SGLang has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

from abc import update_abstractmethods
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from penstock.connectors.sglang.versions import (
    WHERE,
    asks_any_version,
    linker_itself,
    log_off,
    which,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class NoLayers:
    """Stands for layers that are being loaded: there never are any."""

    consumer_index = -1

    def set_consumer(self, index: int) -> None:
        """SGLang names loads."""

    def wait_until(self, layer: int) -> None:
        """SGLang is about to compute a layer."""


class DisabledLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Penstock, switched off."""

    def __new__(
        cls, *given: Any, extra_config: Mapping[str, object] | None = None, **how: Any
    ) -> Any:
        """The real linker, if `any_version` is set."""
        if asks_any_version(extra_config or {}):
            return linker_itself()(*given, extra_config=extra_config, **how)
        return super().__new__(cls)

    def __init__(self, *_given: Any, **_how: Any) -> None:
        self.pools: dict[Any, Any] = {}
        self.layer_done_counter = NoLayers()
        log_off(f"{which()}; {WHERE}.any_version = true tries it nevertheless")

    def lookup(self, *_given: Any, **_how: Any) -> list[int]:
        return []

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, *_given: Any, **_how: Any) -> bool:
        return True

    def num_completed_offloads(self) -> int:
        return 0


def _no(*_given: Any, **_how: Any) -> bool:
    """Answers the other methods: nothing is loaded, cancelled or saved."""
    return False


for _name in DisabledLinker.__abstractmethods__:
    setattr(DisabledLinker, _name, _no)
update_abstractmethods(DisabledLinker)
