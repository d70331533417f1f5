"""A chat server in miniature: a NumPy "model" on a managed cache, with two turns a client.

    python examples/chat.py

`Engine.answer` is the life of a request, from `acquire` to `release`. Eight clients need more
blocks than the device has, so that the second turn of most of them is found in host memory.
"""

from __future__ import annotations

import numpy as np

import penstock

CONFIG = """
version = 1
model.name = "toy"
cache = { block_tokens = 16, blocks = 64 }
tiers = [{ name = "host", kind = "memory", blocks = 512 }]
"""
BLOCK_TOKENS = 16
SYSTEM_PROMPT = list(range(100))
MESSAGE_TOKENS = 40
REPLY_TOKENS = 24


class Engine:
    """Serves one request at a time; a real one would serve many between two steps."""

    def __init__(self) -> None:
        self.kv = np.zeros((64, BLOCK_TOKENS, 8), dtype=np.float32)
        self.cache = penstock.open(penstock.parse_config(CONFIG), kv=self.kv)

    def answer(self, request: str, tokens: list[int]) -> list[int]:
        """Everything that was said, with an answer at the end."""
        with self.cache.acquire(tokens, request=request) as lease:
            while lease.state is penstock.LeaseState.LOADING:
                self.cache.step()
            found = ", ".join(map(str, lease.cached_by_tier))
            print(f"{request}: {len(tokens)} tokens, found {found} (device, host); {lease.miss}")
            self.compute(lease, tokens[lease.cached_tokens :])
            for _ in range(REPLY_TOKENS):
                lease.grow(lease.token_count + 1)
                tokens = [*tokens, self.next_token(lease)]
                self.compute(lease, tokens[-1:])
                self.cache.step()
        return tokens

    def compute(self, lease: penstock.Lease, tokens: list[int]) -> None:
        """The forward pass: writes the KV of the next tokens, then says so."""
        positions = np.arange(lease.token_count, lease.token_count + len(tokens))
        slots = lease.block_table[positions // BLOCK_TOKENS]
        self.kv[slots, positions % BLOCK_TOKENS] = np.sin(tokens)[:, np.newaxis]
        lease.commit(tokens)

    def next_token(self, lease: penstock.Lease) -> int:
        """Looks at all KV so far, as attention does, and makes a token of it."""
        positions = np.arange(lease.token_count)
        slots = lease.block_table[positions // BLOCK_TOKENS]
        return int(abs(self.kv[slots, positions % BLOCK_TOKENS].sum()) * 1000) % 50_000


def main() -> None:
    engine = Engine()
    chats = {
        client: SYSTEM_PROMPT + list(range(1000 * client, 1000 * client + MESSAGE_TOKENS))
        for client in range(1, 9)
    }
    for turn in (1, 2):
        for client, said in chats.items():
            question = [client * 7 + turn] * MESSAGE_TOKENS
            chats[client] = engine.answer(f"client {client}, turn {turn}", said + question)
    statistics = engine.cache.statistics()
    share = statistics.tokens_cached / statistics.tokens_asked
    print(f"{share:.0%} of {statistics.tokens_asked} prompt tokens were found.")


if __name__ == "__main__":
    main()
