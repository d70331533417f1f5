"""Leases as the engine sees them.

A lease knows its tokens and their keys; the machine knows its blocks. Every change goes to the
machine first, and is made here when the machine has accepted it.
"""

from __future__ import annotations

import warnings
from enum import Enum
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np

from penstock.cache.states import LeaseState
from penstock.errors import LeaseError, counted
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.vocabulary.arguments import as_int, as_text
from penstock.vocabulary.keys import KeyChain, as_token_array

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from penstock.cache.explain import Miss
    from penstock.runtime.driver import Driver
    from penstock.vocabulary.ids import LeaseId, OperationId
    from penstock.vocabulary.keys import Item, Tokens

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

    def _take_table(self, table: NDArray[np.int32]) -> None:
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


def _copied(table: NDArray[np.int32]) -> NDArray[np.int32]:
    """A copy of a table, so that changes to it do not reach the cache's own."""
    own = table.copy()
    own.flags.writeable = False
    return own
