"""Requests that wait a moment for pages from a disk, before SGLang puts a step together.

SGLang asks its linker about a request once, when it is about to compute it, and takes what is in
host memory then. What only a disk has would be computed every time. So a function of SGLang's
scheduler is wrapped, by the registry that SGLang has for its plugins:

| requests in the waiting queue       | on one rank                         | on several ranks |
|-------------------------------------|-------------------------------------|------------------|
| new ones                            | pages come up from a disk meanwhile | the same         |
| the first ones, while pages come up | are left out of the planned step    | are computed     |

Ranks see their disks at different times and must plan the same steps: so with several of them
nothing is left out. `connectors.base.requests` says for what a request waits, and how long at most.

The one rule: the queue is whole whenever SGLang looks at it outside of that function.
"""

# SGLang has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.connectors.base.pages import PageTiers

PLANS_PREFILL = "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw"
FIRST = 8
"""How many requests at the head of the queue wait for pages; those behind them wait anyway."""


class WaitingRequests:
    """The requests of one scheduler that have not begun."""

    def __init__(self, tiers: PageTiers, *, page_tokens: int, holds_back: bool) -> None:
        """Has SGLang's scheduler ask here before it plans a step."""
        self._tiers = tiers
        self._page_tokens = page_tokens
        self._holds_back = holds_back
        self._hashes: dict[str, Sequence[str]] = {}
        """Of each request that was seen: its pages that are not on the device."""
        HookRegistry.register(PLANS_PREFILL, self._plan, HookType.AROUND)
        HookRegistry.apply_hooks()

    def _plan(self, plan: Callable[..., Any], scheduler: Any, *given: Any, **how: Any) -> Any:
        queue = scheduler.waiting_queue
        for request in queue:
            if request.rid not in self._hashes:
                hashes = self._hashes[request.rid] = self._missing_pages(request, scheduler)
                if hashes:
                    self._tiers.expect(request.rid, hashes)
        if len(self._hashes) > FIRST + 2 * len(queue):
            waiting = {each.rid for each in queue}
            self._hashes = {rid: each for rid, each in self._hashes.items() if rid in waiting}
        held = [each for each in queue[:FIRST] if self._holds_back and self._waits(each.rid)]
        if not held:
            return plan(scheduler, *given, **how)
        scheduler.waiting_queue = [each for each in queue if each not in held]
        try:
            return plan(scheduler, *given, **how)
        finally:
            scheduler.waiting_queue = held + scheduler.waiting_queue

    def _waits(self, rid: str) -> bool:
        hashes = self._hashes[rid]
        return bool(hashes) and self._tiers.comes(rid, hashes)

    def _missing_pages(self, request: Any, scheduler: Any) -> Sequence[str]:
        """The hashes of those full pages of a request that are not on the device, as in a match."""
        tree, size = scheduler.tree_cache, self._page_tokens
        tokens = request.origin_input_ids + request.output_ids
        key = RadixKey(
            token_ids=tokens,
            extra_key=request.extra_key,
            limit=request._compute_max_prefix_len(len(tokens)),  # noqa: SLF001 - its only name
            cache_salt=request.cache_salt,
        )
        # Without a request, so that the linker is not asked.
        match = tree.match_prefix(MatchPrefixParams(key=key))
        held = match.device_prefix_len
        count = (len(key) - held) // size * size
        last = tree.get_last_hash_value(match.last_device_node) if held else None
        if not count or (held and last is None):
            return ()
        hashes: Sequence[str] = get_storage_hash_str(key[held : held + count], last, page_size=size)
        return hashes
