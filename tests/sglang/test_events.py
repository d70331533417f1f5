"""KV events: what SGLang publishes of the tiers below it agrees with what it says of its device."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Run

pytestmark = pytest.mark.sglang

PAGE = 16
PROMPTS = {"lengths": [200, 330], "alone": True}
PAGES = 200 // PAGE + 330 // PAGE
JOIN_S = 60.0


class Subscriber:
    """Hears everything that an engine publishes at an address, from its beginning on."""

    def __init__(self, address: str) -> None:
        self.events: list[Any] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVTIMEO, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.subscribe(b"")
        self._socket.connect(address)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                *_, payload = self._socket.recv_multipart()
            except zmq.Again:
                if self._ends.is_set():
                    return
            else:
                self.events += msgspec.msgpack.decode(payload)[1]

    def close(self) -> None:
        """Takes what has arrived."""
        self._ends.set()
        self._thread.join(JOIN_S)
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[Subscriber]:
    subscriber = Subscriber(f"ipc://{tmp_path}/events")
    yield subscriber
    subscriber.close()


def pages_of(events: list[Any], medium: str) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """What events say of the pages that came to a medium: the page before, and the tokens."""
    found: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for event in events:
        if event["type"] == "BlockStored" and event.get("medium") == medium:
            size, tokens = event["block_size"], event["token_ids"]
            chain = [event["parent_block_hash"], *event["block_hashes"]]
            for number, (before, name) in enumerate(pairwise(chain)):
                found[name] = before, tuple(tokens[number * size : (number + 1) * size])
    return found


def test_pages_that_are_saved_are_announced_as_sglang_announces_its_own(
    run: Run, subscriber: Subscriber, tmp_path: Path
) -> None:
    events = {"publisher": "zmq", "topic": "", "endpoint": f"ipc://{tmp_path}/events"}
    run(
        [PROMPTS, {"do": "store", "blocks": PAGES}, PROMPTS],
        linker=True,
        disk=str(tmp_path / "disk"),
        options={"kv_events_config": json.dumps(events)},
    )
    subscriber.close()

    on_device = pages_of(subscriber.events, "GPU")
    for medium in ("CPU_PINNED", "DISK"):
        below = pages_of(subscriber.events, medium)
        assert len(below) >= PAGES
        assert below == {name: on_device[name] for name in below}


def test_pages_that_leave_host_memory_are_announced_as_gone(
    run: Run, subscriber: Subscriber, tmp_path: Path
) -> None:
    events = {"publisher": "zmq", "topic": "", "endpoint": f"ipc://{tmp_path}/events"}
    run(
        [{**PROMPTS, "seed": seed} for seed in range(4)],
        linker=True,
        host=40,
        options={"kv_events_config": json.dumps(events)},
    )
    subscriber.close()

    stored = pages_of(subscriber.events, "CPU_PINNED")
    removed = [
        name
        for event in subscriber.events
        if event["type"] == "BlockRemoved" and event.get("medium") == "CPU_PINNED"
        for name in event["block_hashes"]
    ]
    assert len(stored) - len(removed) <= 40
    assert set(removed) <= stored.keys()
