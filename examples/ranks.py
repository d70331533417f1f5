"""An owner and two ranks: plans and reports travel with the engine's own messages.

python examples/ranks.py

Owner and ranks are this one process here. SIGTERM ends the loop, as a service manager would.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np

import penstock

config = penstock.parse_config("""
version = 1
model.name = "toy"
cache = { block_tokens = 4, ranks = 2 }
tiers = [{ name = "host", kind = "host", blocks = 32 }]
""")

# In the process of each rank.
kv = [np.full((8, 4, 16), 1.0 + rank, dtype=np.float32) for rank in range(2)]
ranks = [penstock.open_rank(config, rank=rank, kv=kv[rank]) for rank in range(2)]
messages = [rank.facts.to_bytes() for rank in ranks]

# In the process of the owner.
facts = [penstock.RankFacts.from_bytes(message) for message in messages]
offload = penstock.open_offload(config, ranks=facts)


def engine_step() -> None:
    offload.step()
    plan = offload.ranks.take_plan()  # None if there is nothing to do
    for rank in ranks:  # in each rank's process
        if plan is not None:
            rank.take(plan)
        report = rank.step()
        if report is not None:
            offload.ranks.receive(report)  # in the owner's process


keys = config.key_chain().extend(range(12))
with penstock.StopSignal() as stop:
    offload.save(keys, [0, 1, 2], cause="first")
    while offload.busy:
        engine_step()
    print(f"{offload.lookup(keys).ready} blocks in host memory, filled on every rank")

    os.kill(os.getpid(), signal.SIGTERM)  # what a service manager does
    while not stop.stopping:
        engine_step()
        offload.wait(time.monotonic() + 1.0, descriptors=[stop.descriptor])
    offload.drain()
    while offload.busy:
        engine_step()
closed = [offload.close(), *(rank.close(timeout_s=5.0) for rank in ranks)]
print(f"all closed cleanly: {all(each.clean for each in closed)}; {offload.health().reasons}")
