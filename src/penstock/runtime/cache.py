"""The cache of an engine that lets Penstock manage its device blocks, and its leases.

A lease knows its tokens and their keys; the machine knows its blocks. Every change goes to the
machine first, and is made here when the machine has accepted it.

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
import warnings
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.cache.states import LeaseState
from penstock.errors import LeaseError, counted
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.books import PRIORITY_MAX
from penstock.runtime.base import BaseCache
from penstock.vocabulary.arguments import as_flag, as_int, as_seconds, as_text, as_tuple
from penstock.vocabulary.keys import Item, KeyChain, as_token_array

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    from numpy.typing import NDArray

    from penstock.cache.explain import Miss
    from penstock.config import Config
    from penstock.runtime.base import Driven
    from penstock.runtime.driver import Driver
    from penstock.vocabulary.keys import LeaseId, OperationId, PinId, Tokens


if TYPE_CHECKING:
    Leases: TypeAlias = dict[LeaseId, ref["Lease"]]


class Verdict(Enum):
    """What becomes of what a request computed on loads that had not ended."""

    HOLD = "hold"
    """Not every rank has said that what was loaded is right: nothing leaves the step."""
    KEEP = "keep"
    """All of it is right: the token may go out, and be committed."""
    ROLL_BACK = "roll back"
    """Blocks were not what their keys name: what was computed beyond `cached_tokens` is void."""


def deliver_changes(leases: Leases, effects: list[ef.Effect]) -> None:
    """Reports to leases what became of the copies they waited for."""
    for effect in effects:
        if isinstance(effect, ef.LeaseChanged) and effect.lease in leases:
            lease = leases[effect.lease]()
            if lease is not None:
                lease._change(effect)  # noqa: SLF001 - a part of this module


class Lease:
    """What one request holds: made by `Cache.acquire`, ended by `release` or `preempt`."""

    state = LeaseState.RELEASED
    """`LOADING`, `READY`, `LOST` or `RELEASED`."""

    def __init__(
        self,
        driver: Driver,
        leases: Leases,
        granted: ef.Granted,
        request: str,
        prompt: NDArray[np.uint32],
        items: tuple[Item, ...],
        chain: KeyChain,
    ) -> None:
        self.id = granted.lease
        self.request = request
        self._table = granted.table
        self.block_table = _copied(granted.table)
        """Device slots in token order: a copy of what the cache knows, and read-only."""
        self.cached_tokens = granted.cached_tokens
        """How many leading tokens are cached."""
        self.cached_by_tier = granted.cached_by_tier
        """Tokens found in each tier, device first."""
        self.miss: Miss = granted.miss
        """Why no more was found."""
        self.token_count = granted.cached_tokens
        """How many leading tokens have their KV: cached or computed."""
        self._driver = driver
        self._access = driver.access
        self._leases = leases
        """The open leases of the cache. It keeps none alive: a lease that is dropped without
        release warns."""
        self._prompt = prompt
        self._items = items
        self._chain = chain
        self._published = granted.cached_tokens // chain.block_tokens
        self._joined: int | None = None
        self.state = granted.state
        leases[self.id] = ref(self)

    def join(self) -> None:
        """The engine's next step computes on what this lease's loads bring, as they bring it.

        On the rank that computes, `steps.join` has its layers wait for them. From now on
        `take_verdict` says what becomes of the result.

        Raises:
            LeaseError: there are no loads to join: the lease waits for something else, or for
                nothing.
        """
        with self._access:
            self._require_open()
            if not self._driver.machine.loads_of(self.id):
                raise LeaseError(
                    f"lease {self.id} of {self.request!r} is {self.state.name}, must be LOADING "
                    "and wait for loads alone to be joined"
                )
            if self._joined is None:
                self._joined = self.cached_tokens

    def take_verdict(self) -> Verdict:
        """What becomes of what was computed since `join`; asked until it is not `HOLD`.

        After `ROLL_BACK` the request computes again from `cached_tokens` on, or, where the lease
        is `LOST`, from the beginning with another one.
        """
        self._access.require()
        if self.state is LeaseState.LOADING:
            return Verdict.HOLD
        joined, self._joined = self._joined, None
        right = self.state is LeaseState.READY and (joined is None or self.cached_tokens >= joined)
        return Verdict.KEEP if right else Verdict.ROLL_BACK

    @property
    def loads(self) -> tuple[OperationId, ...]:
        """The loads onto the device that it waits for, if it waits for nothing else.

        What they bring may be computed on before it is `READY`: see `EngineSteps`.
        """
        self._access.require()
        return self._driver.machine.loads_of(self.id)

    def grow(self, token_count: int) -> None:
        """Takes room for `token_count` tokens in all.

        After a fork, call it before computing: it separates the two requests. The lease may
        then be `LOADING` for a moment.

        Raises:
            NeverFitsError: the device has fewer blocks than `token_count` tokens need.
            CapacityError: there is no room now; nothing was changed.
            LeaseError: the lease is not ready.
            ValueError: it is not a number of tokens.
        """
        token_count = as_int("token_count", token_count)
        with self._access:
            effects = self._handle(ev.Grow(lease=self.id, token_count=token_count))
            grown = ef.answer(effects, ef.Grown)
            if grown.table is not self._table:
                self._take_table(grown.table)
            self.state = grown.state

    def commit(self, tokens: Tokens) -> None:
        """The KV of these tokens, the next ones, is computed: full blocks are published.

        Raises:
            LeaseError: the lease is not ready, or shares an unfinished block with a fork.
            ValueError: the tokens are not those of the prompt, or there is no room for them.
        """
        added = as_token_array(tokens)
        with self._access:
            self._require_open()
            start = self.token_count
            known = self._prompt[start : start + len(added)]
            if not np.array_equal(known, added[: len(known)]):
                raise ValueError(f"tokens differ from the prompt after token {start}")
            self._commit(start + len(added), added[len(known) :])

    def commit_prompt(self, token_count: int) -> None:
        """The KV of the prompt is computed up to `token_count`: full blocks are published.

        Raises:
            LeaseError: the lease is not ready, or shares an unfinished block with a fork.
            ValueError: the prompt is shorter, or was computed further already.
        """
        token_count = as_int("token_count", token_count)
        with self._access:
            self._require_open()
            if token_count > len(self._prompt):
                raise ValueError(
                    f"token_count is {token_count}, the prompt has {len(self._prompt)} tokens"
                )
            self._commit(token_count, self._prompt[:0])

    def fork(self, request: str) -> Lease:
        """A second request that goes on from the same blocks.

        Raises:
            LeaseError: the lease is not ready.
            ValueError: the name is not a str.
        """
        request = as_text("request", request)
        with self._access:
            effects = self._handle(ev.Fork(lease=self.id, request=request))
            granted = ef.answer(effects, ef.Granted)
            computed = self._prompt[: self.token_count]
            items = tuple(item for item in self._items if item.position < self.token_count)
            chain = self._forked_chain(computed, items)
            return Lease(self._driver, self._leases, granted, request, computed, items, chain)

    def preempt(self) -> None:
        """Gives the blocks back for now; they are written down, to be found on return."""
        self._end(ev.Preempt(lease=self.id))

    def release(self) -> None:
        """Gives the blocks back; what was published stays cached."""
        self._end(ev.ReleaseLease(lease=self.id))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        # With a cache that is closed or broken there is nothing left to release.
        if self.state is not LeaseState.RELEASED and self._access.usable:
            self.release()

    def __repr__(self) -> str:
        return (
            f"<penstock.Lease {self.id} of {self.request!r}: {self.state.name}, "
            f"{counted(self.token_count, 'token')} computed, {self.cached_tokens} of them cached, "
            f"{counted(len(self.block_table), 'block')}>"
        )

    def __del__(self) -> None:
        # Nothing is released here: a step in flight may still use the blocks.
        if self.state is not LeaseState.RELEASED and self._access.usable:
            self._leases.pop(self.id, None)
            warnings.warn(
                f"lease {self.id} of request {self.request!r} was dropped without release or "
                f"preempt: its {len(self.block_table)} blocks stay taken until the cache is closed",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _commit(self, token_count: int, output: NDArray[np.uint32]) -> None:
        chain = self._chain
        full = token_count // chain.block_tokens
        ends_block = full > chain.block_count
        if ends_block:
            # On a copy, so that a refused commit leaves the lease as it was.
            chain = chain.fork()
            chain.extend(output)
        keys = chain.keys
        self._handle(
            ev.Commit(
                lease=self.id,
                token_count=token_count,
                keys=keys[self._published : full],
                frontier=keys[full] if full < len(keys) else None,
            )
        )
        if not ends_block:
            chain.extend(output)
        self._chain = chain
        self._published = max(self._published, full)
        self.token_count = token_count

    def _forked_chain(self, computed: NDArray[np.uint32], items: tuple[Item, ...]) -> KeyChain:
        """The keys of what is computed: a fork may go on otherwise than the prompt does."""
        if self._chain.token_count == self.token_count:
            return self._chain.fork()
        chain = KeyChain(
            self._chain.namespace,
            block_tokens=self._chain.block_tokens,
            algorithm=self._chain.algorithm,
        )
        chain.extend(computed, items)
        return chain

    def _require_open(self) -> None:
        if self.state is LeaseState.RELEASED:
            raise LeaseError(f"lease {self.id} of {self.request!r} was released")

    def _handle(self, event: ev.Event) -> list[ef.Effect]:
        self._require_open()
        effects = self._driver.handle(event)
        deliver_changes(self._leases, effects)
        return effects

    def _end(self, event: ev.Event) -> None:
        with self._access:
            self._handle(event)
            self.state = LeaseState.RELEASED
            del self._leases[self.id]

    def _take_table(self, table: NDArray[np.intp]) -> None:
        self._table = table
        self.block_table = _copied(table)

    def _change(self, change: ef.LeaseChanged) -> None:
        """Takes the end of the copies it waited for; called by its cache."""
        self.state = change.state
        self._take_table(change.table)
        self.miss = change.miss
        self.cached_by_tier = change.cached_by_tier
        if change.cached_tokens > self.token_count:
            # A store had more of its blocks than were known.
            self.cached_tokens = self.token_count = change.cached_tokens
            self._published = change.cached_tokens // self._chain.block_tokens
        elif change.cached_tokens < self.token_count:
            # Blocks did not arrive: the request computes from there on.
            self.cached_tokens = min(self.cached_tokens, change.cached_tokens)
            self.token_count = change.cached_tokens
            self._published = change.cached_tokens // self._chain.block_tokens


def _copied(table: NDArray[np.intp]) -> NDArray[np.int32]:
    """A copy of a table, as engines have theirs; changes to it do not reach the cache's own."""
    own = table.astype(np.int32)
    own.flags.writeable = False
    return own


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
