"""Two engines that share a folder: the second finds what the first one computed.

python examples/shared_store.py
"""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 60.0
CONVERSATION = list(range(100, 116))


def open_engine(folder: str) -> tuple[np.ndarray, penstock.Cache]:
    config = penstock.parse_config(f"""
        version = 1
        model = {{ name = "toy", weights_version = "2026-11" }}
        cache = {{ block_tokens = 4, blocks = 16, load_gate = "off" }}
        tiers = [
            {{ name = "host", kind = "host", blocks = 64 }},
            {{ name = "shared", kind = "objects", url = "file://{folder}", ask_ms = 5000 }},
        ]
    """)
    blocks = np.zeros((16, 4, 256), dtype=np.float32)
    return blocks, penstock.open(config, kv=blocks, wait_for_tiers_s=TIMEOUT_S)


def run_until(cache: penstock.Cache, done: Callable[[], bool]) -> None:
    """What an engine does while no request can run."""
    deadline = time.monotonic() + TIMEOUT_S
    while not done() and time.monotonic() < deadline:
        cache.wait(deadline)
        cache.step()


with tempfile.TemporaryDirectory() as folder:
    blocks, first = open_engine(folder)
    with first.acquire(CONVERSATION) as lease:
        run_until(first, lambda: lease.state is not penstock.LeaseState.LOADING)
        for position, token in enumerate(CONVERSATION):
            blocks[lease.block_table[position // 4], position % 4] = token
        lease.commit(CONVERSATION)
    first.close(TIMEOUT_S)  # What is on its way to the store has so long to arrive.

    blocks, second = open_engine(folder)
    with second.acquire([*CONVERSATION, 1]) as lease:
        run_until(second, lambda: lease.state is not penstock.LeaseState.LOADING)
        print(f"found on the device, in host memory and in the store: {lease.cached_by_tier}")
        assert lease.cached_by_tier == (0, 0, 16)
        assert (blocks[lease.block_table[:4]].reshape(16, -1)[:, 0] == CONVERSATION).all()
    second.close()
