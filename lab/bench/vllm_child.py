"""One vLLM engine of `lab bench vllm`, in a process of its own.

    python -m lab.bench.vllm_child '{"side": "penstock", "model": …}'

It says `ready`, then runs a round for every line with a seed and a workload on standard input, and
answers each with a line of JSON behind `ROUND `.
"""

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.bench.vllm_first_token import FirstToken, StepCounts, WorkerCall, first_token
from lab.bench.vllm_workload import Workload

BLOCK_TOKENS = 32
TOML = """
version = 1
model.name = "bench"
{record}[[tiers]]
name = "host"
kind = "host"
blocks = {blocks}
"""
RECORD = 'serve.record = "{path}"\n'
"""Comes before the tiers, where requests are to be recorded."""


def transfer_of(
    side: str, host_blocks: int, block_bytes: int, record: str = ""
) -> dict[str, Any] | None:
    """What vLLM is told about connectors."""
    if side == "penstock":
        recording = RECORD.format(path=record) if record else ""
        return penstock_connector(TOML.format(blocks=host_blocks, record=recording))
    if side == "vllm-offloading":
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuCopySpec",
                "spec_module_path": "lab.bench.vllm_offload_shim",
                "cpu_bytes_to_use": host_blocks * block_bytes,
                # Answers are part of the next prompt.
                "offload_prompt_only": False,
            },
        }
    if side == "lmcache":
        return lmcache_connector(start_lmcache(host_blocks * block_bytes))
    return None


def penstock_connector(config: str) -> dict[str, Any]:
    """What vLLM is told about ours."""
    return {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # In another version it would be off, and be measured as if it were on.
        "kv_connector_extra_config": {"config": config, "any_version": True},
    }


def lmcache_connector(port: int) -> dict[str, Any]:
    """What vLLM is told about LMCache, whose server has this port."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
        },
    }


def start_lmcache(host_bytes: int) -> int:
    """Starts LMCache's server in a process of its own; returns its port.

    It ends with the group of this process, and is up long before the engine is.
    """
    port, http_port = free_port(), free_port()
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)]
    words += ["--l1-size-gb", str(max(1.0, host_bytes / 2**30)), "--eviction-policy", "LRU"]
    # Blocks as small as everybody else's; copies go through the engine's own process.
    words += ["--chunk-size", str(BLOCK_TOKENS), "--supported-transfer-mode", "engine_driven"]
    program = "import sys; from lmcache.cli.main import main; sys.exit(main())"
    subprocess.Popen(
        [sys.executable, "-c", program, *words, "--max-workers", "1"],
        env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
        stdin=subprocess.DEVNULL,
    )
    return port


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def open_engine(asked: dict[str, Any]) -> Any:
    """The engine of one side; all sides but for their connector are the same."""
    return open_llm(
        asked["model"],
        num_gpu_blocks_override=asked["pool"],
        # One request must fit into the pool, of which vLLM keeps a block for itself.
        max_model_len=min(asked.get("longest", 1024), (asked["pool"] - 1) * BLOCK_TOKENS),
        max_num_batched_tokens=1024,
        distributed_executor_backend="mp",
        kv_transfer_config=transfer_of(
            asked["side"], asked["host_blocks"], asked["block_bytes"], asked.get("record", "")
        ),
        scheduler_cls="lab.bench.vllm_timing.TimedScheduler",
        worker_extension_cls="lab.bench.vllm_timing.TimedWorker",
    )


def open_llm(model: str, **options: Any) -> Any:
    """An engine with what all engines that are compared have in common."""
    from vllm import LLM  # noqa: PLC0415 - takes ten seconds

    return LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        enable_prefix_caching=True,
        seed=0,
        disable_log_stats=False,
        **options,
    )


def run_round(llm: Any, workload: Workload, seed: int) -> dict[str, Any]:
    """All conversations, from nothing."""
    from vllm import SamplingParams  # noqa: PLC0415

    llm.reset_prefix_cache(reset_connector=True)
    before = counts()
    llm.collective_rpc("penstock_take")
    sampling = SamplingParams(
        temperature=0.0, max_tokens=workload.answer_tokens, detokenize=False, ignore_eos=True
    )
    outs: list[Any] = []
    answers: list[list[int]] = []
    prompt_tokens = cached_tokens = 0
    began = time.monotonic()
    for wave in workload.waves(seed):
        prompts = [{"prompt_token_ids": tokens} for tokens in wave]
        for out in llm.generate(prompts, sampling, use_tqdm=False):
            outs.append(out)
            answers.append(list(out.outputs[0].token_ids))
            prompt_tokens += len(out.prompt_token_ids)
            cached_tokens += out.num_cached_tokens
    seconds = time.monotonic() - began
    (worker,) = llm.collective_rpc("penstock_take")
    llm.reset_prefix_cache()
    counted = counts()
    steps = counted["steps"]
    found = first_tokens(outs, worker["calls"], counted["first_tokens"])
    return {
        "first_tokens": [asdict(each) for each in found],
        "tokens_per_s": sum(map(len, answers)) / seconds,
        "hit_rate": cached_tokens / prompt_tokens,
        "steps": steps,
        "empty_steps": counted["empty_steps"],
        "scheduler_s": counted["spent_s"] / steps,
        "worker_s": worker["step"] / steps,
        "connector_s": worker["connector"] / steps,
        "answers": answers,
        "recording": {
            "calls_s": counted["recording_s"],
            "thread_s": counted["thread_s"],
            "writer_s": counted["writer_s"] - before["writer_s"],
        },
    }


def counts() -> dict[str, Any]:
    """What the scheduler told last."""
    asked: dict[str, Any] = json.loads(Path(os.environ["PENSTOCK_BENCH_STEPS"]).read_text())
    return asked


def first_tokens(
    outs: list[Any], asked: list[Any], counted: list[dict[str, int]]
) -> list[FirstToken]:
    """What lay between each request of a round and its first token.

    Args:
        outs: The answers, in the order in which their requests were sent.
        asked: The worker's calls.
        counted: The scheduler's steps, for each request in the same order.
    """
    names = ("began", "ended", "cpu_s", "connector_s")
    calls = [WorkerCall(**dict(zip(names, call, strict=True))) for call in asked]
    return [
        first_token(
            calls,
            request=number,
            prompt_tokens=len(out.prompt_token_ids),
            cached_tokens=out.num_cached_tokens,
            seconds=out.metrics.first_token_latency,
            queued=out.metrics.queued_ts,
            scheduled=out.metrics.scheduled_ts,
            answered=out.metrics.first_token_ts,
            counts=StepCounts(**counts),
        )
        for number, (out, counts) in enumerate(zip(outs, counted, strict=True))
    ]


def main(asked: dict[str, Any]) -> None:
    """Runs rounds until standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PENSTOCK_BENCH_STEPS"] = str(Path(folder) / "steps")
        llm = open_engine(asked)
        llm.collective_rpc("penstock_watch")
        say("ready")
        for line in sys.stdin:
            seed, workload = json.loads(line)
            result = run_round(llm, Workload(**workload), seed)
            say(f"ROUND {json.dumps(result)}")
    # Without waiting for the engine's processes, which would wait for us: they end with this one.
    os._exit(0)


def say(text: str) -> None:
    """A line for who has started this process."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
