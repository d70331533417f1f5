"""An engine without a model: its cache on one machine, its ranks on others.

python -m tests.machines.ranks_program owner ADDRESS KEYS     tells what it does, and is told
python -m tests.machines.ranks_program rank ADDRESS KEYS N    serves one owner after the other
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import penstock
from lab.fixtures.rank_channels import CarryingEngine, meet, serve
from penstock.errors import PeerError, UnavailableError
from penstock.transport.machine_keys import MachineKeys
from penstock.transport.zeromq import Listener, connect

LONG_S = 120.0
SHAPE = (8, 4, 1 << 14)
CONFIG = """
version = 1
model.name = "none"
cache = { block_tokens = 4, ranks = 2 }
tiers = [{ name = "host", kind = "host", blocks = 32 }]
"""


def kv_of(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).random(SHAPE, dtype=np.float32)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def run_rank(address: str, keys: MachineKeys, rank: int) -> None:
    """Opens the rank anew for every owner, and after every loss of one."""
    while True:
        kv = kv_of(rank)
        opened = penstock.open_rank(penstock.parse_config(CONFIG), rank=rank, kv=kv)
        deadline = time.monotonic() + LONG_S
        channel = connect(address, name=f"rank {rank}", deadline=deadline, secret=keys)
        try:
            why = serve(channel, opened, until=time.monotonic() + LONG_S)
        except (PeerError, UnavailableError) as error:
            why = str(error)
        # The owner had blocks 0 to 2 saved, and loaded into 5 to 7.
        say("ended", np.array_equal(kv[5:8], kv_of(rank)[0:3]), why)
        channel.close()
        opened.close()


def run_owner(address: str, keys: MachineKeys) -> None:
    config = penstock.parse_config(CONFIG)
    names = config.key_chain().extend(range(12))
    with Listener("owner", address, secret=keys) as listener:
        channels, facts = [], []
        for _ in range(2):
            channel = listener.accept(deadline=time.monotonic() + LONG_S)
            assert channel is not None
            channels.append(channel)
            facts.append(meet(channel, deadline=time.monotonic() + LONG_S))
        cache = penstock.open_offload(config, ranks=facts)
        engine = CarryingEngine(cache, facts, channels)
        say("met")
        for line in sys.stdin:
            match line.split():
                case ["save"]:
                    cache.reset("saved anew")
                    cache.save(names, [0, 1, 2], cause="save")
                    say("saved", *outcomes(engine))
                case ["load"]:
                    cache.load(names, [5, 6, 7], cause="load")
                    say("loaded", *outcomes(engine))
                case ["begin"]:  # A save that has been ordered, and no more.
                    cache.reset("saved anew")
                    cache.save(names, [0, 1, 2], cause="save")
                    say("began")
                case ["end"]:
                    say("ended", *outcomes(engine))
                case ["health"]:
                    say("health", *cache.health().reasons)
                case ["rejoin"]:
                    channel = listener.accept(deadline=time.monotonic() + LONG_S)
                    assert channel is not None
                    found = meet(channel, deadline=time.monotonic() + LONG_S)
                    engine.rejoin(found, channel)
                    say("rejoined", found.rank)
                case ["close"]:
                    say("closed", engine.close().clean)
                    return


def outcomes(engine: CarryingEngine[penstock.Offload]) -> list[str]:
    """How what was under way has ended."""
    engine.finish(deadline=time.monotonic() + LONG_S)
    return [each.outcome.value for each in engine.cache.poll() if hasattr(each, "outcome")]


if __name__ == "__main__":
    role, place, file, *number = sys.argv[1:]
    if role == "owner":
        run_owner(place, MachineKeys.read(Path(file)))
    else:
        run_rank(place, MachineKeys.read(Path(file)), int(number[0]))
