"""An engine of tests with a shared store below its host memory, and servers for such a store."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

import penstock
from tests.runtime.stored_engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

    from tests.store.redis_server import RedisServer

    Place = Callable[[str, str], "SharingEngine"]

HEAD = """
version = 1
[model]
name = "m"
weights_version = "v1"
[cache]
block_tokens = 4
blocks = 32
load_gate = "off"
[[tiers]]
name = "host"
kind = "host"
blocks = 16
[[tiers]]
name = "shared"
gib = 0.03
"""
PATIENT = "ask_ms = 10000\ntimeout_s = 60\n"
"""For tests in which the store answers, however busy the computer is."""


class SharingEngine(Engine):
    """An engine of the tests with a shared store below its host memory."""

    def __init__(
        self, folder: Path, store: str, limits: str = PATIENT, *, block_numbers: int = 256
    ) -> None:
        self.folder = folder
        self.kv = np.zeros((32, block_numbers), dtype=np.int64)
        self.cache = penstock.open(penstock.parse_config(HEAD + limits + store), kv=self.kv)

    def look_for(self, tokens: list[int]) -> None:
        """Asks the store, and waits for its answer and for what it brings."""
        self.cache.prefetch(tokens, request="r")
        self.run_until(lambda: not self._is_searching() and not self.cache.busy)

    def _is_searching(self) -> bool:
        status = self.cache.store_status("r")
        assert status is not None
        return status.searching


@contextmanager
def places_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limits: str = PATIENT
) -> Iterator[Place]:
    """Opens an engine on a machine of this name: each has a store process of its own."""
    with ExitStack() as undo:

        def opened(name: str, store: str) -> SharingEngine:
            own = folder / name
            own.mkdir(exist_ok=True)
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
            engine = undo.enter_context(SharingEngine(own, store, limits))
            engine.wait_until_on()
            return engine

        yield opened


def of_redis(redis: RedisServer) -> str:
    """The tier of a Redis."""
    return f'kind = "redis"\nurl = "{redis.url}"\n'
