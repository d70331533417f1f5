"""One vLLM replica of `lab bench shared-prefix`, in a process of its own.

    python -m lab.bench.vllm_shared_child '{"side": "penstock redis", "model": …}'

It says `ready`, then answers every line on standard input, a prompt as `[seed, tokens]`, with a
line of JSON behind `ROUND `: the seconds to its first token, how many of its tokens were cached,
the log-probability of that token, and whether the store was in use then.
"""

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

import json
import os
import sys
from random import Random
from typing import Any

from lab.bench.vllm_child import (
    BLOCK_TOKENS,
    lmcache_connector,
    open_llm,
    penstock_connector,
    say,
)
from lab.bench.vllm_model import VOCABULARY

TAIL_TOKENS = 16
"""After the prefix, so that all of it can be found: the last token of a prompt is always computed,
with the block that it lies in."""
BATCH_TOKENS = 2048
STORE_IS_ON = "vllm:penstock_disk_on"
TOML = """
version = 1
model = {{ name = "bench", weights_version = "1" }}
cache.load_gate = "off"
[[tiers]]
name = "host"
kind = "host"
blocks = {blocks}
[[tiers]]
name = "shared"
ask_ms = 1000
timeout_s = 30
{store}
"""
"""Limits for a busy machine: a question that is not answered in time is a miss, and says nothing
of how long a load takes."""


def transfer_of(asked: dict[str, Any]) -> dict[str, Any] | None:
    """What vLLM is told about connectors."""
    side, blocks = asked["side"], asked["blocks"]
    if side.startswith("penstock"):
        return penstock_connector(TOML.format(blocks=2 * blocks, store=asked["store"]))
    if side == "vllm mooncake":
        return {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    if side == "lmcache redis":
        return lmcache_connector(asked["port"])
    return None


def open_replica(asked: dict[str, Any]) -> Any:
    """An engine; all sides but for their connector are the same."""
    return open_llm(
        asked["model"],
        # A prompt with its tail, a nudge, and the block that vLLM keeps for itself.
        num_gpu_blocks_override=asked["blocks"] + 8,
        max_model_len=(asked["blocks"] + 2) * BLOCK_TOKENS,
        max_num_batched_tokens=BATCH_TOKENS,
        kv_transfer_config=transfer_of(asked),
    )


def ask(llm: Any, seed: int, tokens: int) -> dict[str, float]:
    """The first token of a prompt that is drawn by a seed."""
    from vllm import SamplingParams  # noqa: PLC0415

    wanted = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, detokenize=False)
    prompt = {"prompt_token_ids": Random(seed).choices(range(VOCABULARY), k=tokens)}
    (out,) = llm.generate([prompt], wanted, use_tqdm=False)
    (answer,) = out.outputs
    chosen = answer.logprobs[0][answer.token_ids[0]]
    return {
        "seconds": out.metrics.first_token_latency,
        "cached": out.num_cached_tokens,
        "logprob": chosen.logprob,
        "on": store_is_on(llm),
    }


def store_is_on(llm: Any) -> bool:
    """Whether Penstock's store process has opened the store; peers do that as they start."""
    config = llm.llm_engine.vllm_config.kv_transfer_config
    if config is None or config.kv_connector != "PenstockConnector":
        return True
    return any(each.name == STORE_IS_ON and each.value for each in llm.get_metrics())


def main(asked: dict[str, Any]) -> None:
    """Answers until standard input ends."""
    llm = open_replica(asked)
    say("ready")
    for line in sys.stdin:
        say(f"ROUND {json.dumps(ask(llm, *json.loads(line)))}")
    # Without waiting for the engine's processes, which would wait for us: they end with this one.
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
