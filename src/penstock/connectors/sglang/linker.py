"""The class that SGLang loads: translates SGLang's calls into those of `connectors.base.pages`.

| SGLang calls, in the scheduler of every rank | becomes                                       |
|----------------------------------------------|-----------------------------------------------|
| `lookup`, once per match of its radix tree    | `PageTiers.find`                              |
| `load`, for what was found                    | `PageTiers.load`: all of it, before it answers |
| `start_layer_wise_loading`                    | nothing: there is nothing left to load         |
| `offload`, when pages enter the radix tree    | `PageTiers.save`, when their numbers are here |
| `num_completed_offloads`, in every step       | `PageTiers.step`, `saves_ended`               |
| `reset`, when its cache is flushed            | `PageTiers.reset`                             |

SGLang's ranks agree among themselves, with collectives of theirs: on the pages that all of them
found, and on how many offloads have ended. Nothing here waits inside of those. What ranks must
answer alike without being asked together is what `load` and `offload` return. So with several ranks
both say yes always, what `lookup` counts was verified, and a load that fails even so is reported
when SGLang asks all ranks for its end.

SGLang names pages in tensors on the device. To read them is to wait for its stream, and so perhaps
for its step: `load` does so, as it waits for its copies anyway. `offload` lets the numbers come; it
is a later call that begins the save.

The one rule: where there are no tiers, for whatever reason, every call answers as if nothing were
cached, and SGLang goes on.
"""

# SGLang has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.disaggregation.kv_events import is_kv_publisher_rank
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from penstock.connectors.base.pages import PageTiers
from penstock.connectors.base.statistics import BlockBytes, TransferCounts
from penstock.connectors.sglang import pools
from penstock.connectors.sglang.events import PageEvents
from penstock.connectors.sglang.metrics import LinkerReport
from penstock.connectors.sglang.versions import log, log_off, read_settings
from penstock.connectors.sglang.waiting import WaitingRequests
from penstock.runtime.open import open_offload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config import Config

NO_LAYERS = -1
"""No layer of a step waits: loads have ended before it begins."""


class LoadedLayers:
    """What SGLang asks about layers that are being loaded: there never are any."""

    consumer_index = NO_LAYERS

    def set_consumer(self, index: int) -> None:
        """SGLang names the loads that its next step computes on."""

    def wait_until(self, layer: int) -> None:
        """SGLang is about to compute a layer."""


class _Offered(NamedTuple):
    """Pages that are to be saved."""

    hashes: Sequence[str]
    numbers: pools.PageNumbers


class PenstockLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Penstock's tiers below SGLang's radix cache, for one rank."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Any = None,
        forward_stream: Any = None,
    ) -> None:
        config = read_settings(extra_config or {})
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.forward_stream = forward_stream
        self._on_gpu = forward_stream is not None and str(pool.device).startswith("cuda")
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LoadedLayers()
        self._page_tokens: int = params.page_size
        self._rank, self._ranks = _place(params)
        self._tiers: PageTiers | None = None
        self._waiting: WaitingRequests | None = None
        self._events: PageEvents | None = None
        self._offered: deque[_Offered] = deque()
        """Pages whose numbers are on their way from the device."""
        self._loaded: set[str] = set()
        """Requests that were loaded for the step that is being put together."""
        self._failed = False
        """Whether a load of that step failed after SGLang was told that it had begun."""
        self._counts = TransferCounts()
        self._report: LinkerReport | None = None
        if why := pools.why_not(server_args, params, components, pool):
            log_off(why)
            return
        self._open(
            config,
            pool,
            marks=pools.marks_of(server_args),
            announces=is_kv_publisher_rank(server_args.kv_events_config),
        )
        self._report = LinkerReport(
            self._counts.counters, rank=self._rank, page=server_args.enable_metrics
        )

    def _open(self, config: Config, pool: Any, *, marks: str, announces: bool) -> None:
        config = pools.engine_of(pool, self._page_tokens).fit_config(config)
        tier = pools.tier_of(pool, self._page_tokens)
        page_bytes = tier.layout.block_bytes
        self._counts = TransferCounts(BlockBytes(loaded=page_bytes, saved=page_bytes))
        self._tiers = PageTiers(
            config,
            open_offload(config, kv=tier),
            self._counts,
            page_bytes=page_bytes,
            part=f"{marks} rank {self._rank} of {self._ranks}",
            verifies=self._ranks > 1,
        )
        if announces:
            self._events = PageEvents(config, self._tiers)
        if self._tiers.offload.persists:
            self._waiting = WaitingRequests(
                self._tiers, page_tokens=self._page_tokens, holds_back=self._ranks == 1
            )
        for each in self._tiers.offload.statistics().tiers[-len(config.cache.tiers) :]:
            log.info(
                "Penstock keeps KV below SGLang's radix cache: tier=%s blocks=%d block_tokens=%d "
                "rank=%d ranks=%d",
                each.name,
                each.slots,
                self._page_tokens,
                self._rank,
                self._ranks,
            )

    # ---------------------------------------------------------------- up

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Every number of leading pages that can be restored; on one rank the largest will do."""
        hashes = _pages_of(transfers).keys
        if self._tiers is None or not hashes:
            return []
        found = self._tiers.find(rid, hashes)
        return [*range(found, 0, -1)] if self._ranks > 1 else [found] * bool(found)

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Loads pages, and says no if one of them did not arrive: SGLang computes them then."""
        pages = _pages_of(transfers)
        if self._tiers is None:
            return False
        self._follow_step()
        if self._events is not None:
            self._events.name(pages.keys)
        if self._tiers.load(rid, pages.keys, self._numbers(pages).wait()):
            self._loaded.add(rid)
            return True
        if self._ranks == 1:
            return False
        self._loaded.add(rid)
        self._failed = True
        return True

    def start_layer_wise_loading(self) -> int:
        self._loaded.clear()
        return NO_LAYERS

    def finish_layer_wise_loading(self, counter_index: int) -> bool:  # noqa: ARG002 - SGLang's
        """Whether the loads of the step that has just ended were good; if not, they end in 503."""
        failed, self._failed = self._failed, False
        return not failed

    def cancel_queued_load(self, rid: str) -> bool:
        """A request is gone before its step begins: nothing writes to its pages any more."""
        if rid not in self._loaded:
            return False
        self._loaded.discard(rid)
        return True

    # ---------------------------------------------------------------- down

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:  # noqa: ARG002
        """Begins to save pages; they are copied in this step and the next ones."""
        if self._tiers is None:
            return False
        pages = _pages_of(transfers)
        self._follow_step()
        if self._events is not None:
            self._events.name(pages.keys)
        self._offered.append(_Offered(pages.keys, self._numbers(pages)))
        self._begin_saves()
        return True

    def num_completed_offloads(self) -> int:
        """How many have ended: SGLang asks in every step, in which the copies go on."""
        if self._tiers is None:
            return 0
        self._begin_saves()
        self._tiers.step()
        if self._report is not None:
            self._report.show()
        return self._tiers.saves_ended()

    def pop_completed_offload(self) -> bool:
        """Whether the oldest of them is wholly below the device; SGLang may offer it again."""
        assert self._tiers is not None
        return self._tiers.take_saved()

    # ---------------------------------------------------------------- the end

    def reset(self) -> None:
        """SGLang's cache was flushed, perhaps for new weights."""
        self._loaded.clear()
        self._offered.clear()
        self._failed = False
        if self._tiers is not None:
            self._tiers.reset("SGLang's cache was flushed")

    def close(self) -> None:
        """Gives the memory back; nothing touches SGLang's afterwards."""
        self._offered.clear()
        if self._tiers is not None:
            self._tiers.close()
            self._tiers = None

    def _follow_step(self) -> None:
        """On a GPU copies wait for what was submitted: SGLang's stream may still write pages."""
        assert self._tiers is not None
        steps = self._tiers.offload.steps
        if self._on_gpu and steps is not None:
            steps.submitted(self.forward_stream.cuda_stream)

    def _begin_saves(self) -> None:
        """Begins with the pages that were offered first, as far as it is known where they lie."""
        assert self._tiers is not None
        while self._offered and self._offered[0].numbers.ready:
            offered = self._offered.popleft()
            self._tiers.save(offered.hashes, offered.numbers.wait())

    def _numbers(self, pages: Any) -> pools.PageNumbers:
        """The device pages of a transfer, which names all of their tokens."""
        return pools.PageNumbers(pages.device_indices, self._page_tokens)


def _place(params: Any) -> tuple[int, int]:
    """Which rank this is, of how many that hold parts of the same pages."""
    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _pages_of(transfers: Sequence[Any]) -> Any:
    """The KV among the pools of a transfer: no other pool is supported."""
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)
