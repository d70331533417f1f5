"""A rank in a process of its own whose loads take long: run with `python -m`.

    python -m lab.bench.interference.slow_rank ADDRESS DELAY_S

It does what `penstock.runtime.rank.serve` does, but begins with the copies of a plan that loads
blocks only so many seconds after the plan came. Meanwhile it waits on its channel, as a rank
does that has nothing to do.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import penstock
from penstock.cache.operations import Purpose
from penstock.runtime.messages import decode_plan
from penstock.transport.base import Empty, ReceivedFrame
from penstock.transport.waiting import wait_any
from penstock.transport.zeromq import connect

BLOCK_TOKENS = 16
DEVICE_BLOCKS = 8
HOST_BLOCKS = 32
BLOCK_BYTES = 4096
START_S = 30.0
LIFE_S = 600.0
"""An engine that has gone is noticed by its channel; this is for one that hangs."""


def slow_config() -> penstock.Config:
    """The settings that the engine and its rank share."""
    return penstock.parse_config(
        f'version = 1\n[model]\nname = "bench"\n[cache]\nblock_tokens = {BLOCK_TOKENS}\n'
        f'blocks = {DEVICE_BLOCKS}\n[[tiers]]\nname = "host"\nkind = "host"\n'
        f"blocks = {HOST_BLOCKS}\n"
    )


def main(address: str, delay_s: float) -> None:
    """Serves one engine until it goes."""
    kv = np.zeros((DEVICE_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    give_up = time.monotonic() + LIFE_S
    with penstock.open_rank(slow_config(), rank=0, kv=kv) as rank:
        channel = connect(address, name="rank 0", deadline=time.monotonic() + START_S)
        channel.send(rank.facts.to_bytes())
        while isinstance(received := channel.receive(deadline=give_up), ReceivedFrame):
            copies = decode_plan(received.frame).copies
            if any(copy.purpose is Purpose.LOAD for copy in copies):
                begins = time.monotonic() + delay_s
                while (
                    time.monotonic() < begins and not wait_any([channel], deadline=begins).channels
                ):
                    continue
            rank.take(received.frame)
            while rank.busy:
                report = rank.step()
                if report is not None:
                    channel.send(report)
        channel.close()
        if isinstance(received, Empty):
            raise SystemExit(f"the engine said nothing for {LIFE_S:g} s")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
