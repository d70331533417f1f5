"""KV events under the names that vLLM gave the blocks, so that routers can follow both.

A router knows blocks by vLLM's hashes, from the events of vLLM's own cache. So that it
understands that a block it knows now also lies in host memory, events from here carry the
same hashes and say the same of each block as vLLM does, but for the medium. Penstock's keys
never leave the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.connectors.vllm.keys import Request
    from penstock.machine.kv_events import KvEvent
    from penstock.vocabulary.ids import Key

    Describe = Callable[[Request, int], "Block"]

HELD_MAX = 1 << 20
"""Blocks whose vLLM names are remembered; beyond it further ones are not announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block as a router knows it."""

    hash: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    adapter: str | None = None
    adapter_id: int | None = None
    extra_keys: tuple[object, ...] | None = None
    """What beside tokens is in the hash, as vLLM keeps it."""
    session: str | None = None
    """Of the request that had it stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A block lies in host memory from now on."""

    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Blocks lie there no more."""

    hashes: list[bytes]


class Announcer:
    """From what happens in one tier to what vLLM publishes."""

    def __init__(self, tier: str, *, describe: Describe) -> None:
        """Nothing is known yet.

        Args:
            tier: Whose blocks are announced.
            describe: What vLLM says of a block of a request, by its number.
        """
        self._tier = tier
        self._describe = describe
        self._expected: dict[Key, Block] = {}
        self._stored: dict[Key, bytes] = {}
        self._events: list[Stored | Removed] = []

    def expect(self, request: Request, blocks: Iterable[tuple[int, Key]]) -> None:
        """These blocks of a request, by number and key, are being written."""
        for number, key in blocks:
            if len(self._expected) + len(self._stored) >= HELD_MAX or key in self._stored:
                continue
            self._expected[key] = self._describe(request, number)

    def forget(self, keys: Iterable[Key]) -> None:
        """The writing of these has ended; those that were not stored never will be."""
        for key in keys:
            self._expected.pop(key, None)

    def note(self, events: Iterable[KvEvent]) -> None:
        """What happened in the tiers since the last call."""
        for event in events:
            match event:
                case BlocksStored() if event.tier == self._tier:
                    self._note_stored(event.keys)
                case BlocksRemoved() if event.tier == self._tier:
                    self._note_removed(event.keys)
                case AllCleared():
                    # vLLM's own "all cleared" would speak for its device cache as well.
                    self._note_removed(list(self._stored))
                case _:
                    pass

    def take(self) -> list[Stored | Removed]:
        """What there is to publish."""
        events, self._events = self._events, []
        return events

    def _note_stored(self, keys: Iterable[Key]) -> None:
        for key in keys:
            block = self._expected.pop(key, None)
            if block is not None:
                self._stored[key] = block.hash
                self._events.append(Stored(block=block))

    def _note_removed(self, keys: Iterable[Key]) -> None:
        hashes = [self._stored.pop(key) for key in keys if key in self._stored]
        if hashes:
            self._events.append(Removed(hashes=hashes))
