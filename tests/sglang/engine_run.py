"""One SGLang engine in processes of its own: runs a list of acts and prints the result of each.

`main` gets the folder of a model and a script: how the engine is set up, and what it does then, one
act after the other. Each act prints a line of JSON. `fork_server.py` calls it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import storage_acts
from fastapi import HTTPException
from processes import session_of
from watched_linker import write_whole

import sglang

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 2048
"""Of the model that `tiny_llama.py` makes."""
PAGE = 16
DEADLINE_S = 300.0
"""What the engine has not done by then it never does."""
# How quick this model is must not decide which hits are loaded.
CONFIG = """
version = 1
model.name = "tiny"
cache.load_tokens_min = 1
{below}
[[tiers]]
name = "host"
kind = "host"
blocks = {host_blocks}
"""
DISK = """
[[tiers]]
name = "disk"
kind = "disk"
path = "{path}"
gib = 0.25
write = "write_through"
"""

SHARED = """
[[tiers]]
name = "shared"
kind = "objects"
url = "file://{path}"
write = "write_through"
ask_ms = 10000
"""


def main(model: str, script: dict[str, Any]) -> None:
    """Starts an engine and runs the acts of a script."""
    engine = open_engine(model, script)
    for act in script["acts"]:
        result = ACTS[act.get("do", "generate")](engine, act)
        sys.stdout.write(f"ACT {json.dumps(result)}\n")
        sys.stdout.flush()
    engine.shutdown()


def config_of(script: dict[str, Any]) -> str:
    """The configuration, as a text: `host` blocks, and a `disk` or a `shared` store in a folder."""
    below = "".join(
        tier.format(path=script[name])
        for name, tier in (("disk", DISK), ("shared", SHARED))
        if name in script
    )
    weights = f'model.weights_version = "{script.get("weights", "v1")}"' if below else ""
    return CONFIG.format(host_blocks=script.get("host", 512), below=weights) + below


def linked(script: dict[str, Any]) -> dict[str, Any]:
    """SGLang's options for a linker."""
    if not script.get("linker"):
        return {}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        # SGLang's Python interface wants an object; its command line wants JSON.
        "unified_cache_external_linker_config": {
            "linker": script.get("class", "WatchedLinker"),
            "linker_module_path": script.get("module", "watched_linker"),
            "linker_extra_config": {"config": config_of(script), **script.get("extra", {})},
        },
    }


def open_engine(model: str, script: dict[str, Any]) -> Any:
    """An engine on the CPU, with SGLang's own attention in PyTorch."""
    return sglang.Engine(
        model_path=model,
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        page_size=script.get("page", PAGE),
        max_total_tokens=script.get("pool", 4096),
        max_running_requests=script.get("running", 8),
        random_seed=0,
        log_level="info",
        **linked(script),
        **script.get("options", {}),
    )


def drawn(draw: random.Random, count: int) -> list[int]:
    """Token ids that mean nothing."""
    return [draw.randrange(10, VOCABULARY) for _ in range(count)]


def prompts_of(act: dict[str, Any]) -> list[list[int]]:
    """Prompts of `lengths`, after a common beginning of `shared` tokens; `last_first` if asked."""
    draw = random.Random(act.get("seed", 3))
    beginning = drawn(draw, act.get("shared", 0))
    prompts = [beginning + drawn(draw, count) for count in act["lengths"]]
    return prompts[::-1] if act.get("last_first") else prompts


def generate(engine: Any, act: dict[str, Any]) -> dict[str, Any]:
    """Generates for all prompts at once, or `alone`: one after the other."""
    prompts = prompts_of(act)
    together = [[prompt] for prompt in prompts] if act.get("alone") else [prompts]
    rows = [
        row_of(out)
        for some in together
        for out in engine.generate(
            input_ids=some,
            sampling_params={
                "temperature": 0.0,
                "max_new_tokens": act.get("max_tokens", 12),
                "ignore_eos": True,
            },
            return_logprob=True,
        )
    ]
    return {"rows": rows}


def row_of(out: dict[str, Any]) -> dict[str, Any]:
    """What an engine answered to one prompt."""
    about = out["meta_info"]
    return {
        "tokens": list(out["output_ids"]),
        "logprobs": [step[0] for step in about["output_token_logprobs"]],
        "cached": about["cached_tokens"],
        "where": about.get("cached_tokens_details"),
        "ended": about["finish_reason"],
    }


def refused(engine: Any, act: dict[str, Any]) -> dict[str, Any]:
    """The status with which SGLang refuses a request; 200 if it answers."""
    try:
        generate(engine, act)
    except HTTPException as error:
        return {"status": int(error.status_code)}
    return {"status": 200}


def store(_engine: Any, act: dict[str, Any]) -> dict[str, Any]:
    """Waits until the disk is on, or has so many `blocks` of this engine, or `of_all`.

    SGLang steps when it is idle.
    """
    until(
        lambda: (
            counted().get("disk_blocks_saved", 0) >= act.get("blocks", 0)
            and counted().get("disk_blocks", 0) >= act.get("of_all", 0)
            and counted().get("disk_on", 0) == act.get("on", 1)
        )
    )
    return counts(_engine, act)


def counts(_engine: Any, _act: dict[str, Any]) -> dict[str, Any]:
    """What the linker has counted, of the first rank."""
    return {"counts": counted()}


def counted() -> dict[str, float]:
    """Written by `watched_linker.py` when something has changed."""
    path = Path(os.environ["PENSTOCK_COUNTS"])
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found


def tamper(_engine: Any, act: dict[str, Any]) -> dict[str, Any]:
    """From now on `watched_linker.py` does this to loads."""
    write_whole(Path(os.environ["PENSTOCK_TAMPER"]), act["word"])
    return {}


def flush(engine: Any, _act: dict[str, Any]) -> dict[str, Any]:
    """SGLang's cache is flushed, and all that lies below it with it."""
    # It waits until the scheduler is through with what it has answered.
    flushing = engine.tokenizer_manager.flush_cache(timeout_s=DEADLINE_S)
    if not engine.loop.run_until_complete(flushing).success:
        raise TimeoutError("SGLang's cache was not flushed: it has requests")
    return {}


def abort(engine: Any, act: dict[str, Any]) -> dict[str, Any]:
    """A request is taken back while it waits for a disk, which does not answer."""

    async def ask_and_abort() -> dict[str, Any]:
        asked = asyncio.ensure_future(
            engine.async_generate(
                input_ids=prompts_of(act)[0],
                sampling_params={"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
                rid="taken-back",
            )
        )
        deadline = time.monotonic() + DEADLINE_S
        before = counted().get("lookups", 0)
        while counted().get("lookups", 0) == before:
            assert time.monotonic() < deadline, "the request was never looked up"
            await asyncio.sleep(0.01)
        engine.tokenizer_manager.abort_request(rid="taken-back")
        answer: dict[str, Any] = await asked
        return answer

    return {"ended": engine.loop.run_until_complete(ask_and_abort())["meta_info"]["finish_reason"]}


def signal_store(_engine: Any, act: dict[str, Any]) -> dict[str, Any]:
    """The store process gets a signal, by its name."""
    for pid in stores():
        os.kill(pid, getattr(signal, act["signal"]))
    return {"signalled": len(stores())}


def die(_engine: Any, _act: dict[str, Any]) -> dict[str, Any]:
    """Every process of the engine is killed, the store process first."""
    mine = [pid for pid in session_of(os.getsid(0)) if pid != os.getpid()]
    for pid in sorted(mine, key=lambda pid: pid not in stores()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nothing survives SIGKILL")


def stores() -> list[int]:
    """The store processes of this engine."""
    found = []
    for pid in session_of(os.getsid(0)):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"penstock.store" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def until(done: Callable[[], bool]) -> None:
    """Looks again and again, as nothing tells this process."""
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, counted()
        time.sleep(0.02)


ACTS = {
    each.__name__: each
    for each in (generate, refused, store, counts, tamper, flush, abort, signal_store, die)
} | storage_acts.ACTS
