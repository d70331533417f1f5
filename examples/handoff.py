"""Two engines in two processes: one computes a prompt, the other gets its KV and goes on."""

import subprocess
import sys
import tempfile
import time

import numpy as np

import penstock

LAYERS, BLOCKS, BLOCK_TOKENS = 3, 16, 4
PROMPT = list(range(100, 110))  # two full blocks and a half
TIMEOUT_S = 60.0


def open_pair(folder: str) -> penstock.HandoffPair:
    return penstock.HandoffPair(
        prefill=penstock.HandoffEngine(name="prefill", address=f"ipc://{folder}/prefill"),
        decode=penstock.HandoffEngine(name="decode", address=f"ipc://{folder}/decode"),
        model="toy",
        weights="v1",
    )


def kv_blocks() -> list[np.ndarray]:
    """The engine's KV: an array for each layer, with the blocks along its first axis."""
    return [np.zeros((BLOCKS, BLOCK_TOKENS, 2), dtype=np.float32) for _ in range(LAYERS)]


def attend(token: int, layer: int) -> tuple[float, float]:
    """What the toy model keeps of a token in a layer."""
    return token + layer, token * (layer + 1)


def wait_for_result(handoff: penstock.Handoff) -> penstock.HandoffResult:
    deadline = time.monotonic() + TIMEOUT_S
    while not (results := handoff.step()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the handoff has not ended in {TIMEOUT_S:g} s")
        handoff.wait(deadline)
    return results[0]


def prefill(folder: str) -> None:
    kv, slots = kv_blocks(), [0, 1, 2]
    with penstock.open_prefill(open_pair(folder), kv=kv, block_tokens=BLOCK_TOKENS) as handoff:
        handoff.offer("request-1", PROMPT, slots=slots, timeout_s=TIMEOUT_S)
        for layer in range(LAYERS):
            for position, token in enumerate(PROMPT):
                block, place = divmod(position, BLOCK_TOKENS)
                kv[layer][slots[block], place] = attend(token, layer)
            handoff.computed({"request-1": len(PROMPT)}, layer=layer)
        handoff.first_token("request-1", 110)
        wait_for_result(handoff)


def decode(folder: str) -> None:
    kv, slots = kv_blocks(), [7, 3, 5]
    print("decode: waits until the prefill engine has started, some seconds", flush=True)
    with penstock.open_decode(open_pair(folder), kv=kv, block_tokens=BLOCK_TOKENS) as handoff:
        handoff.claim("request-1", PROMPT, slots=slots, timeout_s=TIMEOUT_S)
        print(f"decode: waits for the KV of {len(PROMPT)} tokens", flush=True)
        result = wait_for_result(handoff)
    if not result.delivered:
        print(f"decode: failed, the prompt must be computed here: {result.why}")
        return
    found = np.stack([layer[slots].reshape(-1, 2)[: len(PROMPT)] for layer in kv])
    right = found == [[attend(token, layer) for token in PROMPT] for layer in range(LAYERS)]
    print(f"decode: delivered, {right.all()} KV of {len(PROMPT)} tokens, and then {result.tokens}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["prefill"]:
        prefill(sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            other = subprocess.Popen([sys.executable, __file__, "prefill", folder])
            decode(folder)
            other.wait(TIMEOUT_S)
