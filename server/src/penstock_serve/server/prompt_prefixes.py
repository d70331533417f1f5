"""Which prompts a server was sent, so that prompts with the same beginning go there again.

A router for servers that tokenize prompts themselves knows prompts as they came: as JSON. A prompt
is cut into chunks of `CHUNK_BYTES` of that, and a chunk is named by a hash of everything up to its
end. Text and token lists that begin alike have chunks in common if they were written alike; if
not, a hit is missed, nothing else. What a server has evicted is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_BYTES = 256
BLOCKS_A_CHUNK = 4
"""256 bytes of text or of a JSON list have about 64 tokens: four blocks of 16, which the weights of
`[routing]` count in."""
CHUNKS_MAX = 4096
"""Of one prompt; what follows does not matter for the choice of a server."""
REMEMBERED_MAX = 1 << 16
"""Chunks of one server, about 10 MB: 16 MiB of text, more than fits into most KV caches."""


def chunks_of(prompt: bytes, *context: bytes) -> list[bytes]:
    """The names of a prompt's full chunks."""
    name = blake2b(repr(context).encode(), digest_size=16).digest()
    found = []
    last = min(len(prompt), CHUNKS_MAX * CHUNK_BYTES) - CHUNK_BYTES
    for start in range(0, last + 1, CHUNK_BYTES):
        name = blake2b(name + prompt[start : start + CHUNK_BYTES], digest_size=16).digest()
        found.append(name)
    return found


class PromptMemory:
    """The chunks that one server was sent, the latest `REMEMBERED_MAX`."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[bytes, None] = OrderedDict()

    def add(self, chunks: Sequence[bytes]) -> None:
        # The first chunks last: a chunk is of no use without those before it.
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > REMEMBERED_MAX:
            self._chunks.popitem(last=False)

    def leading(self, chunks: Sequence[bytes]) -> int:
        """How many leading chunks of a prompt it was sent."""
        for position, chunk in enumerate(chunks):
            if chunk not in self._chunks:
                return position
        return len(chunks)
