"""How an engine embeds Penstock: a scheduler's loop in which many requests share every step.

    python examples/embed.py

Five places are numbered; the rest is the engine. Requests need three times the blocks there are.
"""

from __future__ import annotations

import numpy as np

import penstock

BLOCKS, BLOCK_TOKENS, ANSWER_TOKENS = 48, 16, 40
CONFIG = f"""
version = 1
model.name = "toy"
cache = {{ block_tokens = {BLOCK_TOKENS}, blocks = {BLOCKS} }}
tiers = [{{ name = "host", kind = "host", gib = 0.01 }}]
"""


class _Request:
    def __init__(self, name: str, prompt: list[int]) -> None:
        self.name, self.tokens, self.end = name, prompt, len(prompt) + ANSWER_TOKENS
        self.lease: penstock.Lease | None = None


class _Engine:
    def __init__(self) -> None:
        self.kv = np.zeros((BLOCKS, BLOCK_TOKENS, 64), dtype=np.float32)
        self.cache = penstock.open(penstock.parse_config(CONFIG), kv=self.kv)  # 1. open
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []

    def step(self) -> None:
        self.cache.step()  # copies advance here, and only here
        while self.waiting and self.admit(self.waiting[0]):
            request = self.waiting.pop(0)
            if request.lease is not None:
                self.running.append(request)
        for request in list(self.running):
            if (lease := request.lease) and lease.state is penstock.LeaseState.READY:
                self.advance(request, lease)  # those still `LOADING` delay nobody

    def admit(self, request: _Request) -> bool:
        try:
            request.lease = self.cache.acquire(request.tokens, request=request.name)  # 2. acquire
        except penstock.NeverFitsError as refused:
            request.lease = None
            print(f"{request.name}: refused; {refused}")  # it would wait for ever
        except penstock.CapacityError:
            return False  # no room now, and nothing has changed: try again in the next step
        return True

    def advance(self, request: _Request, lease: penstock.Lease) -> None:
        try:
            lease.grow(len(request.tokens))  # 3. grow
        except penstock.CapacityError:
            lease.preempt()  # its blocks are written down, and found again later
            self.running.remove(request)
            self.waiting.append(request)
            return
        self.compute(lease, request.tokens)
        lease.commit(request.tokens[lease.token_count :])  # 4. commit: others find full blocks now
        request.tokens.append(len(request.tokens))
        if len(request.tokens) == request.end:
            lease.release()  # 5. release
            self.running.remove(request)
            print(f"{request.name}: found {lease.cached_by_tier}; {lease.miss}")

    def compute(self, lease: penstock.Lease, tokens: list[int]) -> None:
        blocks, rows = divmod(np.arange(len(tokens)), BLOCK_TOKENS)
        slots, known = lease.block_table[blocks], lease.token_count
        kv = np.cumsum(tokens, dtype=np.float32)[:, np.newaxis]  # of all tokens so far, as KV is
        assert (self.kv[slots[:known], rows[:known]] == kv[:known]).all(), "KV of other tokens"
        self.kv[slots[known:], rows[known:]] = kv[known:]


engine = _Engine()
engine.waiting = [_Request(f"chat {n}", [*range(100), *[100 + n] * 60]) for n in range(12)]
engine.waiting.insert(6, _Request("too long", list(range(BLOCKS * BLOCK_TOKENS + 1))))
while engine.waiting or engine.running:
    engine.step()
print(f"closed: {engine.cache.close(timeout_s=30.0)}")
