"""A router that is not ours: it knows what the page on KV events says, and nothing of Penstock."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import zmq

SNAPSHOT = b"\xff" * 8
END = b"\xff" * 8
SOON_MS = 60_000


class Subscriber:
    """What one instance has cached, by medium, as its events say."""

    def __init__(self, published: str, replayed: str, *, slow: bool = False) -> None:
        self._context = zmq.Context()
        self._live: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._again: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        if slow:
            self._live.set(zmq.RCVHWM, 1)
            self._live.set(zmq.RCVBUF, 4096)
        self._live.subscribe(b"")
        self._live.connect(published)
        self._again.connect(replayed)
        self.blocks: dict[str, dict[Any, Any]] = defaultdict(dict)
        """Hash to the event that stored it, with the block's own tokens."""
        self.number = -1
        """Of the last batch that was applied."""
        self.gaps: list[int] = []
        """Numbers that were missed."""
        self.orphans = 0
        """Blocks whose parent was not there when they came."""
        self.topics: set[bytes] = set()

    def held(self) -> dict[str, set[Any]]:
        return {medium: set(blocks) for medium, blocks in self.blocks.items() if blocks}

    def read(self, wait_ms: int = SOON_MS) -> bool:
        """Applies the next live batch, after those that it missed; whether there was one."""
        if not self._live.poll(wait_ms):
            return False
        topic, number, payload = self._live.recv_multipart()
        at = int.from_bytes(number, "big")
        self.topics.add(topic)
        if at <= self.number:
            return True
        if at > self.number + 1:
            self.gaps += range(self.number + 1, at)
            self.ask((self.number + 1).to_bytes(8, "big"))
        if at == self.number + 1:
            self._apply(at, payload)
        return True

    def ask(self, first: bytes) -> list[int]:
        """Asks for batches from a number on, or for a snapshot; the numbers of what came."""
        self.send(first)
        found: list[int] = []
        while (batch := self.receive()) is not None:
            found.append(batch[0])
            if first == SNAPSHOT or batch[0] > self.number:
                self._apply(*batch)
        return found

    def send(self, *parts: bytes) -> None:
        self._again.send_multipart((b"", *parts))

    def receive(self) -> tuple[int, bytes] | None:
        """One batch of an answer; `None` at its end."""
        assert self._again.poll(SOON_MS), "no answer to a request for a replay"
        _, _topic, number, payload = self._again.recv_multipart()
        return None if number == END else (int.from_bytes(number, "big"), payload)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _apply(self, number: int, payload: bytes) -> None:
        _time, events, _instance = msgspec.msgpack.decode(payload)
        for event in events:
            match event.pop("type"):
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    for each in event["block_hashes"]:
                        del self.blocks[event["medium"]][each]
                case "AllBlocksCleared":
                    self.blocks.clear()
        self.number = number

    def _store(self, event: dict[str, Any]) -> None:
        held, size = self.blocks[event["medium"]], event["block_size"]
        parent = event["parent_block_hash"]
        everywhere = {each for blocks in self.blocks.values() for each in blocks}
        self.orphans += parent is not None and parent not in everywhere
        for place, each in enumerate(event["block_hashes"]):
            assert each not in held, "stored twice"
            tokens = event["token_ids"][place * size : (place + 1) * size]
            held[each] = {**event, "parent": parent, "tokens": tokens}
            parent = each
