"""A rank for the tests of its memory: it has its arena kept, and serves its owner.

    python -m kept_rank CONFIG RANK SEED ADDRESS

A SIGTERM ends it in good order: what it has begun is told.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from lab.fixtures.rank_channels import serve
from penstock.config import parse_config
from penstock.runtime.open import open_rank
from penstock.supervisor.descriptors import keeper
from penstock.transport.waiting import StopSignal
from penstock.transport.zeromq import connect


def main(text: str, number: str, seed: str, address: str) -> None:
    kv = np.random.default_rng(int(seed)).random((8, 4, 16))
    config = parse_config(text)
    rank = open_rank(config, rank=int(number), kv=kv, keeper=keeper())
    with StopSignal() as stop, rank:
        channel = connect(address, name=f"rank {number}", deadline=time.monotonic() + 300)
        until = time.monotonic() + 3600
        serve(channel, rank, until=until, descriptors=[stop.descriptor], drain_s=5.0)
        channel.close()


main(*sys.argv[1:])
