"""The cache of an engine that lets Penstock manage its device blocks.

    cache = penstock.open(config, kv=arrays)
    lease = cache.acquire(tokens)
    ... the engine computes from lease.cached_tokens on, into lease.block_table ...
    lease.commit(tokens)
    lease.release()
    cache.step()            # once per engine iteration

No call waits. A lease that is `LOADING` becomes `READY` in some later `step`: its blocks are on
their way, or a store is asked which of them it has.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from penstock.errors import counted
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.books import PRIORITY_MAX
from penstock.runtime.base import BaseCache
from penstock.runtime.lease import Lease, deliver_changes
from penstock.vocabulary.arguments import as_flag, as_int, as_seconds, as_text, as_tuple
from penstock.vocabulary.keys import Item, as_token_array

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from penstock.config import Config
    from penstock.runtime.base import Driven
    from penstock.runtime.driver import Driver
    from penstock.runtime.lease import Leases
    from penstock.vocabulary.ids import PinId
    from penstock.vocabulary.keys import KeyChain, Tokens


class Cache(BaseCache):
    """A prefix cache over the engine's device blocks and the tiers below them."""

    def __init__(self, driven: Driven) -> None:
        self._leases: Leases = {}
        super().__init__(driven, partial(deliver_changes, self._leases))
        self._config = driven.config
        self._request_next = 1

    @property
    def config(self) -> Config:
        """The configuration in effect: with the KV's element type and the weights of today."""
        return self._config

    def acquire(  # noqa: PLR0913 - a request may have that many wishes
        self,
        tokens: Tokens,
        *,
        request: str = "",
        tenant: str = "",
        adapter: str = "",
        items: Iterable[Item] = (),
        reuse: bool = True,
        load: bool = True,
        store: bool = True,
        priority: int = 0,
        ttl_s: float | None = None,
        keep_tokens: int | None = None,
        load_timeout_s: float | None = None,
        search_s: float | None = None,
    ) -> Lease:
        """Matches a prompt over all tiers, pins what was found, and takes room for the rest.

        Args:
            tokens: The prompt: ints, or a buffer of 32-bit integers.
            request: A name for logs and stories; made up if empty.
            tenant: Who pays; tenants share nothing.
            adapter: The adapter (LoRA) the KV depends on, if any.
            items: Images and other media in the prompt.
            reuse: Whether cached blocks may be used at all.
            load: Whether blocks may be brought up from lower tiers.
            store: Whether what is computed may be cached.
            priority: Blocks of lower priority leave first.
            ttl_s: After this many seconds its blocks are the first to leave.
            keep_tokens: Blocks after so many leading tokens are let go at its end; 0: it is over.
            load_timeout_s: Blocks that have not arrived by then are computed instead.
            search_s: It is `LOADING` for so long at most until a store has said what it has; 0: no
                store is asked. By default twice the store's `ask_ms`; see the interface's page.

        Raises:
            NeverFitsError: the device has fewer blocks than the prompt needs.
            CapacityError: there is no room now; nothing was changed.
            ValueError: there are no tokens, they are not token ids, or a wish makes no sense.
        """
        prompt, items = as_token_array(tokens).copy(), _as_items(items)  # A copy: it is kept.
        chain = self._config.key_chain(tenant=tenant, adapter=adapter)
        chain.extend(prompt, items)
        event = ev.Acquire(
            request=as_text("request", request) or f"request-{self._request_next}",
            keys=chain.keys,
            token_count=chain.token_count,
            tenant=tenant,
            namespace=chain.namespace.encode(),
            content=_content_of(prompt, self._config.cache.block_tokens),
            reuse=as_flag("reuse", reuse),
            load=as_flag("load", load),
            store=as_flag("store", store),
            priority=as_int("priority", priority, -PRIORITY_MAX, PRIORITY_MAX),
            ttl_s=None if ttl_s is None else as_seconds("ttl_s", ttl_s),
            keep_blocks=self._keep_blocks(keep_tokens),
            deadline=self._load_deadline(load_timeout_s),
            search_until=self._search_end(search_s, chain.block_count),
        )
        return self._grant(event, prompt, items, chain)

    def _grant(
        self,
        event: ev.Acquire,
        prompt: NDArray[np.uint32],
        items: tuple[Item, ...],
        chain: KeyChain,
    ) -> Lease:
        with self._access:
            self._memory.require_awake()
            effects = self._driver.acquire(event)
            self._deliver(effects)
            granted = ef.answer(effects, ef.Granted)
            self._request_next += event.request == f"request-{self._request_next}"
            return Lease(self._driver, self._leases, granted, event.request, prompt, items, chain)

    def _keep_blocks(self, keep_tokens: int | None) -> int | None:
        if keep_tokens is None:
            return None
        return -(-as_int("keep_tokens", keep_tokens) // self._config.cache.block_tokens)

    def _load_deadline(self, load_timeout_s: float | None) -> float | None:
        if load_timeout_s is None:
            return None
        return self._driver.deadline(as_seconds("load_timeout_s", load_timeout_s))

    def _search_end(self, search_s: float | None, block_count: int) -> float | None:
        wanted_s = None if search_s is None else as_seconds("search_s", search_s, zero=True)
        return self._driver.search_end(wanted_s, block_count)

    def prefetch(
        self,
        tokens: Tokens,
        *,
        request: str = "",
        tenant: str = "",
        adapter: str = "",
        items: Iterable[Item] = (),
        load_timeout_s: float | None = None,
    ) -> int:
        """Brings blocks of a prompt up to the first tier below the device, ahead of `acquire`.

        For a request that waits in the engine's queue: what lies on a disk is in host memory when
        its turn comes. What is not known to lie anywhere is looked for in the store process.

        Args:
            tokens: The prompt.
            request: As for `acquire`.
            tenant: As for `acquire`.
            adapter: As for `acquire`.
            items: As for `acquire`.
            load_timeout_s: What has not arrived by then is given up.

        Returns:
            How many blocks are on their way now; more may follow.

        Raises:
            ValueError: there are no tokens, they are not token ids, or a wish makes no sense.
        """
        chain = self._config.key_chain(tenant=tenant, adapter=adapter)
        chain.extend(as_token_array(tokens), _as_items(items))
        event = ev.Prefetch(
            keys=chain.keys,
            cause=as_text("request", request) or "prefetch",
            deadline=None
            if load_timeout_s is None
            else self._driver.deadline(as_seconds("load_timeout_s", load_timeout_s)),
        )
        with self._access:
            self._memory.require_awake()
            effects = self._driver.prefetch(event)
            self._deliver(effects)
            return len(ef.answer(effects, ef.Started).accepted)

    def pin(self, tokens: Tokens, *, tenant: str = "", adapter: str = "") -> Pin:
        """Keeps the full blocks of a prefix from leaving, cached already or not.

        Raises:
            NeverFitsError: the prefix alone is more than `pin_share` allows.
            CapacityError: with what is pinned already it would be more.
            ValueError: the tokens are no token ids.
        """
        chain = self._config.key_chain(tenant=tenant, adapter=adapter)
        chain.extend(tokens)
        with self._access:
            self._memory.require_awake()
            effects = self._driver.handle(ev.PinBlocks(keys=chain.keys))
            return Pin(self._driver, ef.answer(effects, ef.Pinned), len(chain.keys))

    def reset(self, why: str) -> None:
        """Voids everything cached, as after a change of weights; running leases go on."""
        why = as_text("why", why)
        with self._access:
            self._deliver(self._driver.reset(why))

    def change_weights(self, version: str) -> None:
        """The model has other weights: nothing of before is found, and new keys say so.

        Blocks below the device are kept under their own version, and found again when it comes
        back; those on the device are dropped. If the version before was empty, or is the same,
        everything in memory is void. Running leases go on; what they compute is not found by
        others.

        Raises:
            ConfigError: the version is not a string that a key can hold.
        """
        model = replace(self._config.model, weights_version=as_text("version", version))
        config = replace(self._config, model=model)
        with self._access:
            before = self._config.model.weights_version
            self._deliver(self._driver.change_weights(config, before=before))
            self._config = config

    def __repr__(self) -> str:
        machine = self._driver.machine
        model = self._config.model.name
        counts = f"{len(machine.open_requests())} leases, {machine.pin_count} pins"
        return f"<penstock.Cache of {model!r}: {counts}, {self._describe_tiers()}>"


class Pin:
    """A pinned prefix: made by `Cache.pin`, ended by `unpin`."""

    def __init__(self, driver: Driver, pinned: ef.Pinned, block_count: int) -> None:
        self.id: PinId = pinned.pin
        self.block_count = block_count
        self.present = pinned.present
        """How many of its blocks were cached when it was pinned."""
        self._driver = driver
        self._pinned = True

    def unpin(self) -> None:
        """Lets the blocks leave again when their turn comes.

        Raises:
            ValueError: they are not pinned any more.
        """
        with self._driver.access:
            self._driver.handle(ev.UnpinBlocks(pin=self.id))
            self._pinned = False

    def __repr__(self) -> str:
        state = "pinned" if self._pinned else "unpinned"
        return f"<penstock.Pin {self.id}: {counted(self.block_count, 'block')}, {state}>"

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        # With a cache that is closed or broken there is nothing left to unpin.
        if self._pinned and self._driver.access.usable:
            self.unpin()


def _as_items(items: Iterable[Item]) -> tuple[Item, ...]:
    if type(items) is tuple and not items:
        return items
    found: tuple[Item, ...] = as_tuple("items", items)
    for index, item in enumerate(found):
        if type(item) is not Item:
            raise ValueError(f"items[{index}] is {reprlib.repr(item)}, must be an Item")
    return found


def _content_of(prompt: NDArray[np.uint32], block_tokens: int) -> int:
    """A hash of the first block's tokens alone; 0 if there is no full block."""
    if len(prompt) < block_tokens:
        return 0
    return xxh3_64_intdigest(prompt[:block_tokens].tobytes())
