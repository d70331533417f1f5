"""The three walks: a block to the disk and back, a layer to the decode engine, a chat.

Each is made once before it is counted, so that what is done at a first time is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np

import penstock
from lab.walks.counting import Counting, Walked
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

BLOCK_TOKENS, BLOCKS, LAYERS = 16, 8, 2
SOON_S = 300.0
STORED = """
version = 1
model = {{ name = "walk", weights_version = "v1" }}
cache = {{ block_tokens = 16, blocks = 8, load_gate = "off" }}
tiers = [
    {{ name = "host", kind = "host", blocks = 8 }},
    {{ name = "disk", kind = "disk", path = "{folder}", gib = 0.03, write = "write_through" }},
]
"""


def block_to_disk_and_back() -> Walked:
    """One block is computed, saved to host memory and disk, and loaded after both forgot it."""
    with tempfile.TemporaryDirectory() as folder, Counting() as counting:
        config = penstock.parse_config(STORED.format(folder=f"{folder}/disk"))
        kv = np.zeros((BLOCKS, 4096), dtype=np.uint8)
        with penstock.open(config, kv=kv, wait_for_tiers_s=SOON_S) as cache:
            _save_and_load(cache, 0, counting=None)
            _save_and_load(cache, 1, counting=counting)
        return counting.found()


def _save_and_load(cache: penstock.Cache, number: int, *, counting: Counting | None) -> None:
    prompt = _tokens(1000 * number)
    with _counted(counting):
        _serve(cache, prompt)
    for other in range(1, 2 * BLOCKS + 1):
        _serve(cache, _tokens(1000 * number + 50 * other))
    with _counted(counting):
        found = _serve(cache, prompt)
    if found != BLOCK_TOKENS:
        raise RuntimeError(f"{found} tokens were found, not {BLOCK_TOKENS}: nothing was walked")


def _counted(counting: Counting | None) -> AbstractContextManager[None]:
    return nullcontext() if counting is None else counting.on()


def _tokens(first: int) -> list[int]:
    return list(range(first, first + BLOCK_TOKENS + 1))


def _serve(cache: penstock.Cache, prompt: list[int]) -> int:
    deadline = time.monotonic() + SOON_S
    with cache.acquire(prompt) as lease:
        _step(cache, deadline, lambda: lease.state is not penstock.LeaseState.LOADING)
        found = lease.token_count
        lease.commit_prompt(len(prompt))
    _step(cache, deadline, lambda: not cache.busy)
    return found


def _step(cache: penstock.Cache, deadline: float, done: Callable[[], bool]) -> None:
    while not done():
        cache.wait(deadline)
        cache.step()


def layer_to_decode() -> Walked:
    """The last layer of a prompt is computed, and arrives; both engines are in this process."""
    with tempfile.TemporaryDirectory() as folder, Counting() as counting:
        pair = penstock.HandoffPair(
            prefill=penstock.HandoffEngine(name="prefill", address=f"ipc://{folder}/prefill"),
            decode=penstock.HandoffEngine(name="decode", address=f"ipc://{folder}/decode"),
            model="walk",
            weights="v1",
        )
        kv = [[np.zeros((BLOCKS, BLOCK_TOKENS, 2)) for _ in range(LAYERS)] for _ in range(2)]
        with (
            penstock.open_prefill(pair, kv=kv[0], block_tokens=BLOCK_TOKENS) as prefill,
            penstock.open_decode(pair, kv=kv[1], block_tokens=BLOCK_TOKENS) as decode,
        ):
            _hand_over(prefill, decode, "first", counting=None)
            _hand_over(prefill, decode, "second", counting=counting)
        return counting.found()


def _hand_over(
    prefill: penstock.LocalPrefillHandoff,
    decode: penstock.DecodeHandoff,
    name: str,
    *,
    counting: Counting | None,
) -> None:
    prompt = list(range(BLOCK_TOKENS))
    prefill.offer(name, prompt, slots=[1], timeout_s=SOON_S)
    decode.claim(name, prompt, slots=[2], timeout_s=SOON_S)
    prefill.computed({name: len(prompt)}, layer=0)
    prefill.first_token(name, 1)
    # Everything but the last layer is under way before it counts.
    for _ in range(50):
        prefill.wait(time.monotonic() + 0.01)
        prefill.step()
        decode.step()
    with _counted(counting):
        prefill.computed({name: len(prompt)}, layer=LAYERS - 1)
        while not (results := decode.step()):
            prefill.step()
            decode.wait(time.monotonic() + 0.01)
    if not results[0].delivered:
        raise RuntimeError(f"the prompt was not delivered: {results[0].why}")
    while not prefill.step():
        decode.step()
        prefill.wait(time.monotonic() + 0.01)


def one_chat() -> Walked:
    """One chat of eight tokens with `penstock serve`, all its processes together."""
    with Counting() as counting:
        options = ["--port", "0", "--blocks", "256", "--host-gib", "0.1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.entry", "serve", *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            address = process.stdout.readline().partition(" at ")[2].split("/v1")[0]
            if not address:
                raise UnavailableError("penstock serve did not start; it has said why")
            _chat(address, "The first one opens everything.")
            with counting.on():
                _chat(address, "And this one is counted.")
        finally:
            process.terminate()
            process.wait(SOON_S)
            process.stdout.close()
        return counting.found()


def _chat(address: str, text: str) -> None:
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SOON_S) as answer:
        answer.read()


WALKS: dict[str, Callable[[], Walked]] = {
    "a block to the disk and back": block_to_disk_and_back,
    "a layer to decode": layer_to_decode,
    "a chat of eight tokens": one_chat,
}
