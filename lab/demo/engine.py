"""A small engine on a managed cache: continuous batching, chunked prefill, forks, preemption.

It does with a lease what every engine has to do (docs/api.md), and one thing more: it computes
the KV of every cached token anew and compares. A request does so once before it uses what was
found, and once more at its end, when nothing else may have written to its blocks.

The one rule that must not break: no byte counts as verified that was not compared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lab.demo.toy_model import KV, KV_BYTES_PER_TOKEN, ToyModel
from penstock.cache.states import LeaseState
from penstock.errors import CapacityError, InvariantViolation

if TYPE_CHECKING:
    from penstock.cache.explain import Miss
    from penstock.runtime.cache import Cache
    from penstock.runtime.lease import Lease

CHUNK_TOKENS = 64
"""A prefill computes so many tokens a step, so that others decode in between."""
STEPS_MAX = 100_000
"""Far more than the demonstration takes: beyond it, something waits for ever."""
DIFFERENCES_TOLD = 10
"""The first few tell what went wrong; thousands would not tell more."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt, and the answer as far as it has come."""

    name: str
    tenant: str
    tokens: list[int]
    """The prompt, then what was generated."""
    reply_count: int
    """So many tokens are to be generated."""
    sample: int = 0
    """Which of several possible answers."""
    store: bool = True
    lease: Lease | None = None
    model: ToyModel | None = None
    """The weights in effect when its lease was granted."""
    generated: int = 0
    checked: bool = False
    """Whether what was found in the cache has been compared."""
    found_tokens: int = 0
    """What its last acquire found."""
    cached_tokens: int = 0
    """What of it arrived and was right."""

    @property
    def done(self) -> bool:
        """Whether its answer is complete."""
        return self.generated == self.reply_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a request was told when it acquired its blocks."""

    request: str
    prompt_tokens: int
    cached_tokens: int
    miss: Miss


@dataclass(slots=True)
class Tally:
    """What the engine did and compared; only ever grows."""

    tokens_computed: int = 0
    tokens_verified: int = 0
    bytes_verified: int = 0
    preemptions: int = 0
    refusals: int = 0
    """Requests that had to wait because the device was full."""
    recomputed_tokens: int = 0
    """Tokens that were found but did not arrive, or arrived wrong."""
    grants: list[Grant] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


class ToyEngine:
    """Runs requests on one cache whose device blocks lie in `kv`."""

    def __init__(self, cache: Cache, kv: KV, model: ToyModel) -> None:
        self.cache = cache
        self.kv = kv
        self.model = model
        self.block_tokens = kv.shape[3]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = 0
        self.tally = Tally()

    # ---------------------------------------------------------------- for whoever has requests

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self.waiting.append(request)

    def finish(self, *requests: Request) -> None:
        """Steps until these requests are done, and the copies they caused as well."""
        while any(self._has(request) for request in requests) or self.cache.busy:
            self.step()

    def run_until_prefilled(self, request: Request) -> None:
        """Steps until a request is about to generate, or further."""
        while request.lease is None or request.lease.token_count < len(request.tokens):
            self.step()

    def run_until_checked(self, request: Request) -> None:
        """Steps until what a request found has been compared."""
        while not request.checked:
            self.step()

    def abort(self, request: Request) -> None:
        """The client is gone: gives everything back, wherever the request is."""
        if request.lease is not None:
            self.running.remove(request)
            request.lease.release()
        else:
            self.waiting.remove(request)

    def fork(self, request: Request, name: str) -> Request:
        """A second answer to the same prompt."""
        assert request.lease is not None
        other = Request(
            name=name,
            tenant=request.tenant,
            tokens=list(request.tokens),
            reply_count=request.reply_count,
            sample=request.sample + 1,
            lease=request.lease.fork(name),
            model=request.model,
            generated=request.generated,
            checked=True,
        )
        self.running.append(other)
        return other

    def preempt(self, request: Request) -> None:
        """Gives a request's blocks back for now; it comes back as the next in the queue."""
        assert request.lease is not None
        request.lease.preempt()
        self.running.remove(request)
        self.waiting.appendleft(request)
        request.lease = None
        self.tally.preemptions += 1

    # ---------------------------------------------------------------- one iteration

    def step(self) -> list[Request]:
        """One iteration of the engine; returns the requests that are done."""
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise InvariantViolation(f"requests still wait after {STEPS_MAX} steps")
        self.cache.step()
        self._admit()
        for request in list(self.running):
            # A preemption on behalf of an earlier one may have taken this one out.
            if request.lease is not None:
                self._advance(request, request.lease)
        done = [request for request in self.running if request.done]
        for request in done:
            self._retire(request)
        return done

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            try:
                lease = self.cache.acquire(
                    request.tokens, request=request.name, tenant=request.tenant, store=request.store
                )
            except CapacityError:
                self.tally.refusals += 1
                return
            self.waiting.popleft()
            self.running.append(request)
            request.lease = lease
            request.model = self.model
            request.checked = False
            request.found_tokens = lease.cached_tokens
            self.tally.grants.append(
                Grant(
                    request=request.name,
                    prompt_tokens=len(request.tokens),
                    cached_tokens=lease.cached_tokens,
                    miss=lease.miss,
                )
            )

    def _advance(self, request: Request, lease: Lease) -> None:
        if lease.state is LeaseState.LOST:
            lease.release()
            self.running.remove(request)
            self.waiting.appendleft(request)
            request.lease = None
        elif lease.state is LeaseState.READY:
            if not request.checked:
                self._check_found(request, lease)
            elif lease.token_count < len(request.tokens):
                self._prefill(request, lease)
            elif not request.done:
                self._decode(request, lease)

    def _check_found(self, request: Request, lease: Lease) -> None:
        self._verify(request, lease, "found in the cache")
        request.checked = True
        request.cached_tokens = lease.cached_tokens
        self.tally.recomputed_tokens += request.found_tokens - lease.cached_tokens

    def _prefill(self, request: Request, lease: Lease) -> None:
        first = lease.token_count
        chunk = request.tokens[first : first + CHUNK_TOKENS]
        self._compute(request, lease, first, first + len(chunk))
        lease.commit(chunk)

    def _decode(self, request: Request, lease: Lease) -> None:
        assert request.model is not None
        count = len(request.tokens)
        if not self._make_room(request, lease, count + 1):
            return
        token = request.model.next_token(request.tokens, sample=request.sample)
        request.tokens.append(token)
        request.generated += 1
        self._compute(request, lease, count, count + 1)
        lease.commit([token])

    def _make_room(self, request: Request, lease: Lease, token_count: int) -> bool:
        """Whether the lease has room now; if not, the youngest request makes way."""
        while True:
            try:
                lease.grow(token_count)
            except CapacityError:
                youngest = self.running[-1]
                self.preempt(youngest)
                if youngest is request:
                    return False
            else:
                # After a fork the unfinished block is copied first.
                return lease.state is LeaseState.READY

    def _retire(self, request: Request) -> None:
        assert request.lease is not None
        self._verify(request, request.lease, "at the end of its request")
        request.lease.release()
        self.running.remove(request)

    def _has(self, request: Request) -> bool:
        return request in self.running or request in self.waiting

    # ---------------------------------------------------------------- bytes

    def _compute(self, request: Request, lease: Lease, first: int, end: int) -> None:
        assert request.model is not None
        blocks, offsets = np.divmod(np.arange(first, end), self.block_tokens)
        values = request.model.kv(request.tokens[:end], first)
        self.kv[:, :, lease.block_table[blocks], offsets] = values
        self.tally.tokens_computed += end - first

    def _verify(self, request: Request, lease: Lease, when: str) -> None:
        """Compares all KV that the request has with what the model computes from its tokens."""
        assert request.model is not None
        count = lease.token_count
        blocks, offsets = np.divmod(np.arange(count), self.block_tokens)
        present = self.kv[:, :, lease.block_table[blocks], offsets]
        wrong = (present != request.model.kv(request.tokens[:count])).any(axis=(0, 1, 3, 4))
        self.tally.tokens_verified += count
        self.tally.bytes_verified += count * KV_BYTES_PER_TOKEN
        if wrong.any() and len(self.tally.differences) < DIFFERENCES_TOLD:
            token = int(np.flatnonzero(wrong)[0])
            slot = int(lease.block_table[token // self.block_tokens])
            self.tally.differences.append(
                f"{request.name}: the KV of {int(wrong.sum())} of {count} tokens is not what the "
                f"model computes, {when}; first token {token}, in device slot {slot}"
            )
