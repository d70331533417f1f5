"""An engine of a pair over NIXL, in a process of its own, that a test gives orders line by line.

{"prompt": "name", "seed": 3}      offers or claims a prompt; the seed says what its KV is
→ {"name": "name", "delivered": true, "right": true, "why": ""}
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import penstock
from penstock.bench.handoff_rank import Commands
from penstock.transport.machine_keys import MachineKeys

BLOCK = 4
LAYERS = 3
SLOTS = 256
BLOCKS = 200
WIDTH = 64
"""A prompt is 200 blocks of 4 tokens, 600 KiB."""
TIMEOUT_S = 20.0
SETTINGS = penstock.HandoffSettings(
    times=penstock.HandoffTimes(resend_s=0.05, resend_cap_s=0.5, ping_s=0.2, suspect_s=2.0),
    bounds=penstock.HandoffBounds(berth_bytes=32_768, berth_count=4),
)
PROGRAM = "from tests.relay.engine_process import main; main()"


def pair_at(prefill: str, decode: str, rank: str = "", keys: str = "") -> penstock.HandoffPair:
    """A pair on this machine, or with the address of a rank and keys on two."""
    ranks = (rank,) if rank else ()
    return penstock.HandoffPair(
        prefill=penstock.HandoffEngine(name="prefill", address=prefill, rank_addresses=ranks),
        decode=penstock.HandoffEngine(name="decode", address=decode),
        model="toy",
        weights="v1",
        transport="auto" if keys else "nixl",
        secret=MachineKeys.read(Path(keys)) if keys else b"",
    )


def kv_of(seed: int, layer: int) -> np.ndarray:
    shape = (BLOCKS, BLOCK, WIDTH)
    return np.random.default_rng((seed, layer)).random(shape, dtype=np.float32)


def main() -> None:
    role, *addresses = sys.argv[1:]
    kv = [np.zeros((SLOTS, BLOCK, WIDTH), dtype=np.float32) for _ in range(LAYERS)]
    opening = penstock.open_prefill if role == "prefill" else penstock.open_decode
    handoff = opening(pair_at(*addresses), kv=kv, block_tokens=BLOCK, settings=SETTINGS)
    commands = Commands()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    seeds: dict[str, int] = {}
    with handoff:
        while True:
            for order in commands.take():
                seeds[order["prompt"]] = order["seed"]
                begin(role, handoff, kv, order["prompt"], order["seed"])
            for result in handoff.step():
                report(role, kv, result, seeds.pop(result.handoff))
            handoff.wait(time.monotonic() + 1.0, descriptors=[commands.descriptor])


def begin(role: str, handoff: object, kv: list[np.ndarray], name: str, seed: int) -> None:
    prompt = [seed, *range(1, BLOCKS * BLOCK)]
    slots = range(BLOCKS)
    if isinstance(handoff, penstock.DecodeHandoff):
        for layer in kv:
            layer[:] = -1.0
        handoff.claim(name, prompt, slots=slots, timeout_s=TIMEOUT_S)
        return
    assert isinstance(handoff, penstock.LocalPrefillHandoff), role
    handoff.offer(name, prompt, slots=slots, timeout_s=TIMEOUT_S)
    for layer in range(LAYERS):
        kv[layer][:BLOCKS] = kv_of(seed, layer)
        handoff.computed({name: len(prompt)}, layer=layer)
    handoff.first_token(name, seed)


def report(role: str, kv: list[np.ndarray], result: penstock.HandoffResult, seed: int) -> None:
    right = role == "prefill" or (
        result.tokens == (seed,)
        and all(
            np.array_equal(layer[:BLOCKS], kv_of(seed, number)) for number, layer in enumerate(kv)
        )
    )
    words = {
        "name": result.handoff,
        "delivered": result.delivered,
        "right": right,
        "why": result.why,
    }
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()
