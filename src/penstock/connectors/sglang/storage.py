"""Disk and shared tiers below SGLang's HiCache: the class that it loads as storage backend.

    sglang.launch_server --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "penstock", "class_name":
        "PenstockStorage", "module_path": "penstock.connectors.sglang", "interface_v1": 1,
        "config": "penstock.toml"}'

| SGLang calls, in threads of its own | becomes           |
|-------------------------------------|-------------------|
| `batch_exists`, `batch_exists_v2`   | `PoolPages.find`  |
| `batch_get_v1`, `batch_get_v2`      | `PoolPages.load`  |
| `batch_set_v1`, `batch_set_v2`      | `PoolPages.save`  |
| `clear`                             | `PoolPages.reset` |

Pages are copied between SGLang's host pool and Penstock's host memory, from which the store process
writes them and into which it reads them. That memory needs to hold what is on its way only.

The one rule: no call raises, and none outlasts its deadline. What goes wrong is a miss.
"""

# SGLang has no types that mypy could see from here.
# ruff: noqa: ANN401, ARG002

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_server_args

from penstock.connectors.base.keys import PageKeys
from penstock.connectors.sglang.host_pool import fit_config, part_of, tier_of_pool
from penstock.connectors.sglang.pool_pages import PoolPages
from penstock.connectors.sglang.versions import (
    WHERE_STORED,
    log,
    log_off,
    read_storage_settings,
    storage_is_off,
    which,
)
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.open import open_offload

if TYPE_CHECKING:
    from collections.abc import Callable

TIERS_S = 30.0
"""A store starts within a second or two; on a machine that is busy, later. Nobody waits yet."""
CLOSE_S = 5.0
"""What is still being written when SGLang stops may take so long."""

ResultT = TypeVar("ResultT")


class PenstockStorage(HiCacheStorage):  # type: ignore[misc]
    """Penstock's disk and shared tiers below SGLang's HiCache."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        self._config = read_storage_settings(extra)
        self._off = storage_is_off(extra)
        if self._off:
            log_off(f"{which()}; {WHERE_STORED}.any_version = true tries it nevertheless")
        self._storage = storage_config
        self._pages: PoolPages | None = None
        self._keys: PageKeys | None = None
        self._page_tokens = 0

    # ---------------------------------------------------------------- the pool

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Opens the tiers below a host pool.

        Raises `PenstockError`: the pool is not supported, or the configuration does not fit it.
        """
        super().register_mem_pool_host(mem_pool_host)
        if self._off:
            return
        config = fit_config(self._config, mem_pool_host)
        offload = open_offload(config, kv=tier_of_pool(mem_pool_host), wait_for_tiers_s=TIERS_S)
        self._page_tokens = mem_pool_host.page_size
        part = part_of(mem_pool_host, self._storage, get_server_args())
        self._keys = PageKeys(config, part=part)
        self._pages = PoolPages(offload)
        for why in offload.health().reasons:
            log.warning("%s", why)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Takes note of a pool.

        Raises `ConfigError`: it is a second one, whose pages nobody would keep.
        """
        if host_pool_name != PoolName.KV:
            raise ConfigError(
                "hicache_storage_backend",
                f"is Penstock's, and the model has a host pool {host_pool_name!s} beside that of "
                "attention KV: must be left out for models with sliding windows or states, and for "
                "draft models",
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # ---------------------------------------------------------------- pages

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are there."""
        return self._call(0, lambda pages, made: pages.find(made.of(keys)))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """The same, as SGLang asks where a model has several pools."""
        if pool_transfers:
            return PoolTransferResult.empty()
        return PoolTransferResult(self.batch_exists(keys, extra_info), {})

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Brings pages into the host pool; which of them have arrived."""
        return self._call(
            [False] * len(keys),
            lambda pages, made: pages.load(made.of(keys), self._slots(host_indices)),
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Writes pages of the host pool down; which of them are kept."""
        return self._call(
            [False] * len(keys),
            lambda pages, made: pages.save(made.of(keys), self._slots(host_indices)),
        )

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """`batch_get_v1` for each pool."""
        return self._each(self.batch_get_v1, transfers, extra_info)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """`batch_set_v1` for each pool."""
        return self._each(self.batch_set_v1, transfers, extra_info)

    def _each(
        self, call: Callable[..., list[bool]], transfers: list[Any], extra_info: Any
    ) -> dict[str, list[bool]]:
        return {
            each.name: call(each.keys or [], each.host_indices, extra_info)
            if each.name == PoolName.KV
            else [False] * len(each.keys or [])
            for each in transfers
        }

    def _slots(self, host_indices: Any) -> list[int]:
        """The pages of the pool, from the tokens that SGLang names."""
        first = host_indices[:: self._page_tokens]
        return [int(slot) for slot in first // self._page_tokens]

    # ---------------------------------------------------------------- one page, as older code asks

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: with `interface_v1`, SGLang reads pages into the host pool."""
        return

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> list[None]:
        """Nothing, as `get`."""
        return [None] * len(keys)

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Nothing, as `get`."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Nothing, as `get`."""
        return False

    # ---------------------------------------------------------------- all of it

    def clear(self) -> None:
        """Voids all pages of the model, for all engines that share its tiers."""
        self._call(None, lambda pages, _: pages.reset("SGLang cleared its storage"))

    def close(self) -> None:
        """Gives everything back."""
        self._call(None, lambda pages, _: pages.close(CLOSE_S))
        self._pages = None

    def _call(self, miss: ResultT, ask: Callable[[PoolPages, PageKeys], ResultT]) -> ResultT:
        """What the tiers answer, or a miss where they cannot."""
        pages, made = self._pages, self._keys
        if pages is None or made is None:
            return miss
        try:
            return ask(pages, made)
        except PenstockError as error:
            log.warning("%s", error)
            return miss
