"""One vLLM engine in processes of its own: runs a list of acts and prints the result of each.

`main` gets the folder of a model and a script: how the engine is set up, and what it does then, one
act after the other. Each act prints a line of JSON: what was generated, its log-probabilities, and
how many prompt tokens came from a cache. `fork_server.py` calls it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asynchronous
import msgspec
import torch
import zmq
from pictures import pictured
from safetensors.torch import load_file, save_file
from tiny_llama import HIDDEN, VOCABULARY, make_tiny_adapter
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from where import ON_GPU, options_of

from vllm import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BLOCK = 32
DEADLINE_S = 300.0
"""What the engine has not done by then it never does."""
SCORES_S = 60.0
"""What a router does not count by then it never does."""
# How quick these models are must not decide which hits are loaded.
CONFIG = """
version = 1
model.name = "tiny"
cache.load_gate = "off"
# A peer that a busy machine keeps waiting is not taken for a lost one.
handoff.handoff_s = 240
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

PEERS = """
[[tiers]]
name = "peers"
kind = "peers"
listen = "{listen}"
peers = "{peers}"
ask_ms = 10000
timeout_s = 60
"""


def main(model: str, script: dict[str, Any]) -> None:
    if wanted := script.get("events"):
        # Where a router waits for them, or `True`: for the act `events`.
        where = wanted if wanted is not True else {"endpoint": f"ipc://{tempfile.mkdtemp()}/events"}
        script["options"] = {
            **script.get("options", {}),
            "kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", **where},
        }
        if wanted is True:
            listen(where["endpoint"])
    llm = open_engine(model, script)
    for act in script["acts"]:
        began = time.monotonic()
        results = ACTS[act["act"]](llm, act)
        results["seconds"] = round(time.monotonic() - began, 2)
        sys.stdout.write(f"ACT {json.dumps(results)}\n")
        sys.stdout.flush()


SUBSCRIPTIONS: list[zmq.Socket[bytes]] = []
"""Where KV events arrive, if this engine publishes them."""


def listen(address: str) -> None:
    # Not before an engine wants it: a context has threads, which do not survive a fork.
    events = zmq.Context.instance().socket(zmq.SUB)
    events.rcvhwm = 0
    events.subscribe(b"")
    events.connect(address)
    SUBSCRIPTIONS.append(events)


def config_of(script: dict[str, Any]) -> str:
    """The configuration of the tiers, with a disk or shared folder if the script names one."""
    text = CONFIG.format(host_blocks=script.get("host_blocks", 1024))
    if "record" in script:
        text = text.replace("[[tiers]]", f'serve.record = "{script["record"]}"\n[[tiers]]')
    if "disk" in script:
        below = DISK.format(path=script["disk"])
    elif "shared" in script:
        below = SHARED.format(path=script["shared"])
    elif "peers" in script:
        below = PEERS.format(**script["peers"])
    else:
        return text
    version = f'model.weights_version = "{script["weights"]}"\n' if script.get("weights") else ""
    return text.replace("[[tiers]]", f"{version}[[tiers]]") + below


def open_engine(model: str, script: dict[str, Any]) -> LLM:
    if script.get("asynchronous") and not ON_GPU:
        asynchronous.switch_on()
    transfer = None
    if script.get("connector"):
        name, module = script["connector"]
        transfer = {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": script.get("role", "kv_both"),
            "kv_load_failure_policy": script.get("policy", "recompute"),
            "kv_connector_extra_config": {
                "config": config_of(script),
                "any_version": "PENSTOCK_VLLM_ANY_VERSION" in os.environ,
                **script.get("extra", {}),
            },
        }
    llm = LLM(
        model=model,
        dtype=script.get("dtype", "float32"),
        # Images are put into a prompt by the model's own processor, which wants a tokenizer.
        skip_tokenizer_init=not script.get("tokenizer"),
        block_size=script.get("block", BLOCK),
        num_gpu_blocks_override=script.get("pool", 512),
        max_model_len=script.get("max_model_len", 1024),
        max_num_batched_tokens=script.get("max_num_batched_tokens", 2048),
        enable_prefix_caching=True,
        seed=0,
        tensor_parallel_size=script.get("ranks", 1),
        # A worker of its own, so that scheduler and worker are two processes.
        distributed_executor_backend="mp",
        kv_transfer_config=transfer,
        disable_log_stats=False,
        **{**options_of(script), **script.get("options", {})},
    )
    steps = 2 if script.get("asynchronous") else 1
    assert llm.llm_engine.vllm_config.max_concurrent_batches == steps
    return llm


def prompts_of(act: dict[str, Any]) -> list[Any]:
    """Prompts of `lengths`, after a common beginning of `shared` tokens, cut to `cut` of them.

    With `documents` there are so many beginnings, of which some are asked about more often.
    """
    if act.get("embeds"):
        return embedded(act)
    if act.get("pictures"):
        return pictured(act)
    draw = random.Random(act.get("seed", 3))
    number = act.get("documents", 1)
    documents = [drawn(draw, act.get("shared", 0)) for _ in range(number)]
    return [
        {
            "prompt_token_ids": (
                documents[min(draw.randrange(number), draw.randrange(number)) if number > 1 else 0]
                + drawn(draw, count)
            )[: act.get("cut")],
            **({"cache_salt": act["salt"]} if act.get("salt") else {}),
        }
        for count in act["lengths"]
    ]


def drawn(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(10, VOCABULARY) for _ in range(count)]


def generate(llm: LLM, act: dict[str, Any]) -> dict[str, Any]:
    """Generates for all prompts at once, or `alone`: one after the other.

    `forget` makes vLLM forget its own cache first.
    """
    prepare(llm, act)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=act.get("max_tokens", 24),
        logprobs=1,
        detokenize=False,
        ignore_eos=True,
        skip_reading_prefix_cache=act.get("skip_reading"),
        extra_args={"kv_transfer_params": act["params"]} if "params" in act else None,
    )
    prompts = prompts_of(act)
    together = [[prompt] for prompt in prompts] if act.get("alone") else [prompts]
    rows = [
        row_of(out)
        for some in together
        for out in llm.generate(some, sampling, use_tqdm=False, lora_request=adapter_of(act))
    ]
    return {"rows": rows, "metrics": metrics_of(llm)}


def row_of(out: Any) -> dict[str, Any]:
    """What an engine answered to one prompt."""
    answer = out.outputs[0]
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [
            step[token].logprob
            for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
        ],
        "cached": out.num_cached_tokens,
    }


def prepare(llm: LLM, act: dict[str, Any]) -> None:
    if "tamper" in act:
        Path(os.environ["PENSTOCK_TAMPER"]).write_text(act["tamper"])
    if act.get("forget"):
        # vLLM wants all blocks free, and a save may still be reading some.
        until(llm.reset_prefix_cache)


def until(done: Callable[[], Any]) -> None:
    """Asks the engine, which goes on meanwhile, until it says yes."""
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, done


def embedded(act: dict[str, Any]) -> list[Any]:
    """Prompts that are embeddings in place of tokens."""
    draw = torch.Generator().manual_seed(act.get("seed", 3))
    return [
        {"prompt_embeds": torch.randn(count, HIDDEN, generator=draw)} for count in act["lengths"]
    ]


def adapter_of(act: dict[str, Any]) -> LoRARequest | None:
    """The adapter that an act names by a number."""
    number = act.get("adapter")
    if number is None:
        return None
    folder = make_tiny_adapter(Path(tempfile.gettempdir()) / f"penstock-adapter-{number}", number)
    return LoRARequest(f"adapter-{number}", number, str(folder))


def reset(llm: LLM, _: dict[str, Any]) -> dict[str, Any]:
    """Everything that was computed is void, also below the device."""
    return {"reset": bool(llm.reset_prefix_cache(reset_connector=True))}


def update(llm: LLM, _: dict[str, Any]) -> dict[str, Any]:
    """New weights in the running engine, and the reset that belongs to them."""
    folder = Path(tempfile.mkdtemp())
    old = Path(llm.llm_engine.model_config.model)
    weights = load_file(old / "model.safetensors")
    for name in weights:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    connected = llm.llm_engine.vllm_config.kv_transfer_config is not None
    until(lambda: llm.reset_prefix_cache(reset_connector=connected))
    return {}


def abort(llm: LLM, act: dict[str, Any]) -> dict[str, Any]:
    """Requests are taken back as soon as the engine has begun to load `found` tokens for them."""
    prepare(llm, act)
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=24, detokenize=False, ignore_eos=True)
    names = [f"aborted-{number}" for number in range(len(act["lengths"]))]
    for name, prompt in zip(names, prompts_of(act), strict=True):
        engine.add_request(name, prompt, sampling)
    want = found_tokens(llm) + act["found"]
    until(lambda: engine.step() is not None and found_tokens(llm) >= want)
    aborted = engine.get_num_unfinished_requests()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return {"aborted": aborted, "metrics": metrics_of(llm)}


def found_tokens(llm: LLM) -> float:
    return metrics_of(llm).get("vllm:penstock_tokens_found", 0.0)


def events(llm: LLM, _: dict[str, Any]) -> dict[str, Any]:
    """The KV events that were published since the last time, by kind and medium.

    Of a block that was stored all that a router learns of it, under its hash and its KV group; of
    each kind and medium its localities.
    """
    found: dict[str, dict[str, Any]] = {}
    localities: dict[str, set[str]] = {}
    (published,) = SUBSCRIPTIONS
    # A busy machine may keep vLLM's publishing thread from running for a while.
    while published.poll(2000):
        batch = msgspec.msgpack.decode(published.recv_multipart()[2], type=KVEventBatch)
        for event in batch.events:
            kind = f"{type(event).__name__} {getattr(event, 'medium', '')}"
            found.setdefault(kind, {}).update(blocks_of(event))
            localities.setdefault(kind, set()).add(str(getattr(event, "locality", None)))
    return {
        "events": found,
        "localities": {kind: sorted(each) for kind, each in localities.items()},
        "metrics": metrics_of(llm),
    }


def join(llm: LLM, act: dict[str, Any]) -> dict[str, Any]:
    """Makes the engine known to a router, and waits until what it publishes arrives there.

    A subscription takes a while, and a router asks for what it missed when the next event comes.
    """
    asked(f"{act['router']}/workers", act["worker"])
    apart = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        extra_args={"kv_transfer_params": {"penstock": {"save": False}}},
    )
    draw = random.Random(0)

    def heard() -> bool:
        tokens = drawn(draw, BLOCK + 1)
        llm.generate([{"prompt_token_ids": tokens}], apart, use_tqdm=False)
        return scored(act, tokens)[0] == 1

    until(heard)
    return {}


def scores(llm: LLM, act: dict[str, Any]) -> dict[str, Any]:
    """How many blocks of each prompt a router counts, down to each tier: `want`, if it comes."""
    nudge = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    deadline = time.monotonic() + SCORES_S
    found: list[list[int]] = []
    while found != act["want"] and time.monotonic() < deadline:
        # vLLM publishes events of below the device in its steps only.
        llm.generate([{"prompt_token_ids": [11]}], nudge, use_tqdm=False)
        found = [scored(act, prompt["prompt_token_ids"]) for prompt in prompts_of(act)]
    return {"scores": found}


def scored(act: dict[str, Any], tokens: list[int]) -> list[int]:
    asks = {"model_name": act["model"], "token_ids": tokens}
    (worker,) = asked(f"{act['router']}/overlap_scores", asks)["workers"]
    return [worker[f"{tier}_blocks"] for tier in ("device", "host_pinned", "disk")]


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SCORES_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def blocks_of(event: Any) -> dict[str, Any]:
    hashes = [str(each) for each in getattr(event, "block_hashes", [])]
    names = [f"{name} of group {getattr(event, 'group_idx', None)}" for name in hashes]
    if not isinstance(event, BlockStored):
        return dict.fromkeys(names)
    size = event.block_size
    if len(event.token_ids) != size * len(hashes):
        # A window has passed some of its blocks, and it does not say which tokens are left.
        return {}
    parents = [str(event.parent_block_hash), *hashes]
    return {
        name: {
            "parent": parents[number],
            "tokens": event.token_ids[number * size : (number + 1) * size],
            "size": size,
            "adapter": [event.lora_id, event.lora_name],
            "extra_keys": msgspec.to_builtins((event.extra_keys or [])[number : number + 1]),
            "group": [event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window],
            "session": event.session_id,
        }
        for number, name in enumerate(names)
    }


def arenas(_llm: LLM, _act: dict[str, Any]) -> dict[str, Any]:
    """For each worker the memory that it has mapped for the host tier, by inode."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text()
            mine = os.getsid(int(process.name)) == os.getsid(0)
        except OSError:
            continue  # It has ended meanwhile, or is somebody else's.
        inodes = {line.split()[4] for line in maps.splitlines() if "memfd:penstock-" in line}
        if mine and inodes:
            found.append(sorted(inodes))
    return {"arenas": found}


def store(llm: LLM, act: dict[str, Any]) -> dict[str, Any]:
    """The engine is used until so many `blocks` are on the disk, or it is `on` again."""
    nudge = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)

    def has_come() -> bool:
        # Metrics come with answers; a prompt of one token changes nothing below the device.
        llm.generate([{"prompt_token_ids": [11]}], nudge, use_tqdm=False)
        metrics = metrics_of(llm)
        saved = metrics.get("vllm:penstock_disk_blocks_saved", 0)
        on = metrics.get("vllm:penstock_disk_on", 0)
        return bool(saved >= act.get("blocks", 0) and on >= act.get("on", 0))

    until(has_come)
    return {"metrics": metrics_of(llm)}


def kill_store(_llm: LLM, _act: dict[str, Any]) -> dict[str, Any]:
    """The store process is killed while the engine runs."""
    killed = [pid for pid, words in processes() if b"penstock.store" in words]
    kill_all(killed)
    return {"killed": len(killed)}


def die(_llm: LLM, _act: dict[str, Any]) -> dict[str, Any]:
    """Every process of the engine is killed, the store process first."""
    found = sorted(processes(), key=lambda each: b"penstock.store" not in each[1])
    kill_all([pid for pid, _ in found if pid != os.getpid()])
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nothing survives SIGKILL")


def kill_all(pids: Iterable[int]) -> None:
    """Kills processes; those that end with one of the others may be gone before their turn."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes() -> list[tuple[int, list[bytes]]]:
    """The processes of this engine with the words of their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == os.getsid(0):
                found.append((int(folder.name), (folder / "cmdline").read_bytes().split(b"\0")))
        except OSError:
            continue  # It has ended meanwhile.
    return found


def metrics_of(llm: LLM) -> dict[str, float]:
    wanted = ("vllm:penstock", "vllm:num_preemptions", "vllm:external_prefix_cache", "vllm:spec_")
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(wanted) and not metric.name.endswith("_per_pos"):
            # A histogram has no value of its own: how many there were is enough here.
            value = metric.count if hasattr(metric, "count") else metric.value
            found[metric.name] = found.get(metric.name, 0) + value
    return found


ACTS = {
    each.__name__: each
    for each in (
        *(generate, reset, update, abort, events, join, scores),
        *(arenas, store, kill_store, die),
    )
}
