"""One SGLang engine of `lab bench sglang`, in a process of its own.

    python -m lab.bench.sglang_child '{"side": "penstock storage", "model": …}'

It says `ready`, then answers every line on standard input, a prompt as `[seed, tokens]`, with a
line of JSON behind `ROUND `: the seconds to its first token, how many of its tokens were cached,
the log-probability of that token, and the CPU seconds of SGLang's scheduler thread and of the
process that it belongs to. That thread computes, too: there is no GPU here.
"""

# SGLang has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from lab.bench.vllm_child import say
from lab.bench.vllm_model import VOCABULARY

PAGE_TOKENS = 64
TAIL_TOKENS = 16
"""After whole pages, so that all of them can be found: the last token is always computed."""
STEP_TOKENS = 2048
SCHEDULER = "sglang::schedul"
"""How the process is called that schedules and computes, in the 15 characters of Linux."""
TOML = """
version = 1
model = {{ name = "bench", weights_version = "1" }}
cache.load_gate = "off"
cache.load_tokens_min = 1
[[tiers]]
name = "host"
kind = "host"
blocks = {pages}
[[tiers]]
name = "disk"
kind = "disk"
path = "{folder}"
gib = {gib}
write = "write_through"
"""


def options_of(asked: dict[str, Any]) -> dict[str, Any]:
    """What SGLang is told about caches; all else is the same on every side."""
    side, folder = asked["side"], asked["folder"]
    toml = TOML.format(pages=asked["host_pages"], folder=folder, gib=asked["gib"])
    hicache = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    if side == "hicache file":
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = folder
        return {**hicache, "hicache_storage_backend": "file"}
    if side == "penstock storage":
        extra = {
            "backend_name": "penstock",
            "class_name": "PenstockStorage",
            "module_path": "penstock.connectors.sglang",
            "interface_v1": 1,
            "config": toml,
        }
        return {
            **hicache,
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(extra),
        }
    if side == "penstock linker":
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "PenstockLinker",
                "linker_module_path": "penstock.connectors.sglang",
                "linker_extra_config": {"config": toml},
            },
        }
    if side == "lmcache":
        file = Path(folder) / "lmcache.yaml"
        file.write_text(
            f"mp_host: 127.0.0.1\nmp_port: {asked['port']}\nchunk_size: {PAGE_TOKENS}\n"
            "extra_config:\n  lmcache.mp.mp_transfer_mode: engine_driven\n"
        )
        return {"enable_lmcache": True, "lmcache_config_file": str(file)}
    return {}


def open_engine(asked: dict[str, Any]) -> Any:
    """An engine on the CPU, with SGLang's own attention in PyTorch."""
    import sglang  # noqa: PLC0415

    return sglang.Engine(
        model_path=asked["model"],
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        page_size=PAGE_TOKENS,
        # A prompt, and some room for what keeps the engine at work.
        max_total_tokens=(asked["pages"] + 8) * PAGE_TOKENS,
        chunked_prefill_size=STEP_TOKENS,
        max_running_requests=2,
        random_seed=0,
        log_level="warning",
        **options_of(asked),
    )


def ask(engine: Any, scheduler: Path, seed: int, tokens: int) -> dict[str, float]:
    """The first token of a prompt that is drawn by a seed."""
    prompt = Random(seed).choices(range(VOCABULARY), k=tokens)
    thread_s, process_s = cpu_seconds(scheduler)
    began = time.perf_counter()
    (out,) = engine.generate(
        input_ids=[prompt],
        sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
    )
    seconds = time.perf_counter() - began
    thread_after, process_after = cpu_seconds(scheduler)
    about = out["meta_info"]
    return {
        "seconds": seconds,
        "cached": about["cached_tokens"],
        "logprob": about["output_token_logprobs"][0][0],
        "thread_s": thread_after - thread_s,
        "process_s": process_after - process_s,
    }


def cpu_seconds(process: Path) -> tuple[float, float]:
    """The CPU time of a process's first thread, and of all its threads that live."""
    times = {}
    for task in (process / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            times[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return times[process.name], sum(times.values())


def find_scheduler() -> Path:
    """The process of this engine that schedules: it belongs to the session of this process."""
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with suppress(OSError):
                ours = os.getsid(int(each.name)) == os.getsid(0)
                if ours and (each / "comm").read_text().startswith(SCHEDULER):
                    return each
    raise RuntimeError(f"SGLang has no process {SCHEDULER!r}")


def main(asked: dict[str, Any]) -> None:
    """Answers until standard input ends."""
    engine = open_engine(asked)
    scheduler = find_scheduler()
    say("ready")
    for line in sys.stdin:
        say(f"ROUND {json.dumps(ask(engine, scheduler, *json.loads(line)))}")
    # Without waiting for the engine's processes, which would wait for us: they end with this one.
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
