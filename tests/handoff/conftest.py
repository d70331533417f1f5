"""Two small engines for tests of the handoff's public interface."""

from __future__ import annotations

import os
import select
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from penstock.transport.unix_sockets import private_folder, socket_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 4
LAYERS = 3
SLOTS = 16
SOON_S = 120.0
"""Longer than anything takes that works: a busy machine is no failure."""
SETTINGS = penstock.HandoffSettings(
    times=penstock.HandoffTimes(resend_s=0.05, resend_cap_s=0.5, ping_s=0.2, suspect_s=SOON_S),
    bounds=penstock.HandoffBounds(berth_bytes=4096, berth_count=4),
)
"""Nobody is suspected: a busy machine may keep both engines from saying anything."""


def memory() -> list[np.ndarray]:
    return [np.zeros((SLOTS, BLOCK, 2), dtype=np.float32) for _ in range(LAYERS)]


def a_pair(**changes: object) -> penstock.HandoffPair:
    folder = private_folder()
    engines = {
        name: penstock.HandoffEngine(name=name, address=f"ipc://{socket_path(folder)}")
        for name in ("prefill", "decode")
    }
    return penstock.HandoffPair(**{**engines, "model": "toy", "weights": "v1", **changes})


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def require_files_at_most(most: int) -> None:
    """Waits, because connections end in a thread of ZeroMQ."""
    deadline = time.monotonic() + SOON_S
    while open_files() > most and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    assert open_files() <= most


class Engines:
    """A prefill and a decode engine in this process."""

    def __init__(self, stack: ExitStack, **changes: object) -> None:
        self.pair = a_pair(**changes)
        self.source, self.target = memory(), memory()
        opened = {"block_tokens": BLOCK, "settings": SETTINGS}
        self.prefill = stack.enter_context(
            penstock.open_prefill(self.pair, kv=self.source, **opened)
        )
        self.decode = stack.enter_context(penstock.open_decode(self.pair, kv=self.target, **opened))
        self.results: dict[str, list[penstock.HandoffResult]] = {"prefill": [], "decode": []}

    def compute(self, name: str, prompt: list[int], slots: list[int]) -> None:
        for layer, blocks in enumerate(self.source):
            for position, token in enumerate(prompt):
                blocks[slots[position // BLOCK], position % BLOCK] = token + layer
            self.prefill.computed({name: len(prompt)}, layer=layer)
        self.prefill.first_token(name, 42)

    def meet(self) -> None:
        """Hands something over, so that the engines have met."""
        self.decode.claim("meeting", [1], slots=[15])
        self.prefill.offer("meeting", [1], slots=[15])
        self.compute("meeting", [1], [15])
        self.finish()
        self.results = {"prefill": [], "decode": []}

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON_S
        while not done():
            assert time.monotonic() < deadline, self.results
            self.results["prefill"] += self.prefill.step()
            self.results["decode"] += self.decode.step()
            self.decode.wait(
                time.monotonic() + 0.01,
                descriptors=self.prefill.descriptors,
            )

    def finish(self, count: int = 1) -> None:
        self.until(lambda: all(len(found) >= count for found in self.results.values()))


@pytest.fixture(name="engines")
def make_engines() -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(stack)
