"""One vLLM engine of `lab bench vllm-gpu`, in a process of its own.

    python -m lab.bench.vllm_gpu_child '{"side": "penstock", "model": …}'

It says `ready`, then does what each line on standard input asks, and answers with a line of JSON
behind `ROUND `. Scheduler and worker are in this process: nothing but the engine lies between a
request and its first token.
"""

# vLLM has no types that mypy could see from here.

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from random import Random
from typing import Any, cast

from lab.bench.vllm_child import penstock_connector

PLAIN, OFFLOADING, OURS, OUR_LAYERS = SIDES = (
    "plain",
    "offloading",
    "penstock",
    "penstock by layers",
)
PREFILL, DECODE = "prefill", "decode"
"""The engines of a pair."""
ROLES = {PREFILL: "kv_producer", DECODE: "kv_consumer"}
BLOCK_TOKENS = 16
TOML = """
version = 1
model.name = "bench"
[[tiers]]
name = "host"
kind = "host"
gib = {gib}
"""
VOCABULARY = (10, 31_000)


def transfer_of(side: str, gib: int) -> dict[str, Any] | None:
    """What vLLM is told about connectors."""
    if side == OFFLOADING:
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            # Answers are part of the next prompt.
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": gib << 30,
                "offload_prompt_only": False,
            },
        }
    if side == PLAIN:
        return None
    ours = penstock_connector(TOML.format(gib=gib))
    ours["kv_connector_extra_config"]["layerwise"] = side == OUR_LAYERS
    ours["kv_role"] = ROLES.get(side, ours["kv_role"])
    return ours


def load_wide() -> str:
    """The name of weights that are random, the same in each engine, and wide.

    With those that vLLM makes up, answers do not depend on what is in the KV cache.
    """
    import torch  # noqa: PLC0415
    from vllm.model_executor.model_loader import register_model_loader  # noqa: PLC0415
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: PLC0415

    @register_model_loader("wide")
    class WideLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: torch.nn.Module, model_config: object) -> None:  # noqa: ARG002
            device = next(model.parameters()).device
            draw = torch.Generator(device).manual_seed(0)
            for name, weight in model.named_parameters():
                if weight.ndim < 2:
                    weight.data.fill_(1.0)
                else:
                    wide = 1.0 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5
                    weight.data.normal_(0.0, wide, generator=draw)

    return "wide"


class Engine:
    """vLLM with one side's connector, driven step by step."""

    def __init__(self, asked: dict[str, Any]) -> None:
        from vllm import LLM  # noqa: PLC0415 - takes ten seconds

        how: dict[str, Any] = {
            "load_format": load_wide(),
            "skip_tokenizer_init": True,
            "block_size": BLOCK_TOKENS,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 64,
            "enable_prefix_caching": True,
            "seed": 0,
            "disable_log_stats": False,
            **asked["options"],
        }
        self._engine = LLM(
            model=asked["model"],
            dtype=asked["dtype"],
            num_gpu_blocks_override=asked["pool_tokens"] // how["block_size"],
            max_model_len=asked["longest"],
            kv_transfer_config=transfer_of(asked["side"], asked["gib"]),
            **how,
        ).llm_engine
        self._names = map(str, itertools.count())

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Prompts, one after the other: seconds to the first token, and what they found.

        With `question` each ends with so many tokens that are new.
        """
        if asked.get("forget"):
            self._forget()
        found: dict[str, Any] = {"first_s": [], "cached": [], "answers": [], "logprobs": []}
        for document in prompts_of(asked):
            name = next(self._names)
            prompt = document + drawn(Random(f"question {name}"), asked.get("question", 0))
            began = time.perf_counter()
            self._add(name, prompt, asked["answer"], told=asked.get("told", False))
            first, out = self._until_done(began)[name]
            found["first_s"].append(first)
            found["cached"].append(out.num_cached_tokens or 0)
            answer = out.outputs[0]
            found["answers"].append(list(answer.token_ids))
            if answer.logprobs:
                found["logprobs"].append(
                    [
                        step[token].logprob
                        for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
                    ]
                )
        return found

    def chats(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Chats that come back when the device has forgotten them, some of them at a time."""
        draw = Random(asked["seed"])
        talks = [drawn(draw, asked["system"]) for _ in range(asked["chats"])]
        first_s: list[float] = []
        cached = prompted = 0
        began = time.perf_counter()
        for _ in range(asked["turns"]):
            for start in range(0, len(talks), asked["together"]):
                some = talks[start : start + asked["together"]]
                sent = time.perf_counter()
                names = {}
                for talk in some:
                    talk.extend(drawn(draw, asked["question"]))
                    name = next(self._names)
                    names[name] = talk
                    self._add(name, list(talk), asked["answer"])
                for name, (first, out) in self._until_done(sent).items():
                    first_s.append(first)
                    cached += out.num_cached_tokens or 0
                    prompted += len(names[name])
                    # Drawn, so that every side computes the same.
                    names[name] += drawn(Random(f"{asked['seed']} {name}"), asked["answer"])
        seconds = time.perf_counter() - began
        answered = asked["turns"] * asked["chats"] * asked["answer"]
        share = cached / prompted
        return {"first_s": first_s, "tokens_per_s": answered / seconds, "found": share}

    def decode(self, asked: dict[str, Any]) -> dict[str, Any]:
        """New prompts, all at once: tokens a second of their answers while everything is saved."""
        for prompt in prompts_of(asked):
            self._add(next(self._names), prompt, asked["answer"])
        waiting, tokens, spent = asked["count"], 0, 0.0
        ends: list[float] = []
        while self._engine.has_unfinished_requests():
            if not waiting and not ends:
                ends.append(time.perf_counter())
                spent = time.thread_time()
            for out in self._engine.step():
                if ends:
                    tokens += 1
                elif len(out.outputs[0].token_ids) == 1:
                    waiting -= 1
            if ends:
                ends.append(time.perf_counter())
        return {
            "tokens_per_s": tokens / (ends[-1] - ends[0]),
            "thread_s": (time.thread_time() - spent) / (len(ends) - 1),
            "steps_s": [end - begin for begin, end in itertools.pairwise(ends)],
        }

    def offer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Computes prompts for a decode engine, all at once: what that one must be told."""
        for name, prompt in zip(asked["names"], prompts_of(asked), strict=True):
            params = {"do_remote_decode": True, "penstock": {"handoff": name}}
            self._add(name, prompt, 1, params=params)
        done = self._until_done(time.perf_counter())
        return {"params": [done[name][1].kv_transfer_params for name in asked["names"]]}

    def claim(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answers prompts, all at once; a prefill engine computes them if an address is given."""
        began = time.perf_counter()
        for name, prompt in zip(asked["names"], prompts_of(asked), strict=True):
            own = {"handoff": name, "address": asked["address"]}
            params = {"do_remote_prefill": True, "penstock": own} if asked["address"] else None
            self._add(name, prompt, asked["answer"], params=params)
        done = self._until_done(began)
        seconds = time.perf_counter() - began
        outs = [done[name] for name in asked["names"]]
        return {
            "first_s": [first for first, _ in outs],
            "cached": [out.num_cached_tokens or 0 for _, out in outs],
            "answers": [list(out.outputs[0].token_ids) for _, out in outs],
            "prompts_per_s": len(outs) / seconds,
        }

    def _add(
        self,
        name: str,
        prompt: list[int],
        answer: int,
        *,
        told: bool = False,
        params: dict[str, Any] | None = None,
    ) -> None:
        from vllm import SamplingParams  # noqa: PLC0415

        sampling = SamplingParams(
            temperature=0,
            max_tokens=answer,
            detokenize=False,
            ignore_eos=True,
            logprobs=1 if told else None,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        self._engine.add_request(name, cast("Any", {"prompt_token_ids": prompt}), sampling)

    def _until_done(self, began: float) -> dict[str, tuple[float, Any]]:
        """Steps until nothing is left: for each request its first token, and its last output."""
        first: dict[str, float] = {}
        done: dict[str, tuple[float, Any]] = {}
        while self._engine.has_unfinished_requests():
            for out in self._engine.step():
                if out.outputs[0].token_ids:
                    first.setdefault(out.request_id, time.perf_counter() - began)
                if out.finished:
                    done[out.request_id] = first[out.request_id], out
        return done

    def _forget(self) -> None:
        deadline = time.monotonic() + 60
        while not self._engine.reset_prefix_cache():
            # A save may still read blocks.
            self._engine.step()
            if time.monotonic() > deadline:
                raise TimeoutError("vLLM does not forget its device cache")


def prompts_of(asked: dict[str, Any]) -> list[list[int]]:
    """Prompts of one length, by their seed."""
    draw = Random(asked["seed"])
    return [drawn(draw, asked["tokens"]) for _ in range(asked["count"])]


def drawn(draw: Random, count: int) -> list[int]:
    """Tokens of no meaning."""
    return [draw.randrange(*VOCABULARY) for _ in range(count)]


def main() -> None:
    """Answers until the input ends."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    asked = json.loads(sys.argv[1])
    engine = Engine(asked)
    acts = {
        act.__name__: act
        for act in (engine.ask, engine.chats, engine.decode, engine.offer, engine.claim)
    }
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        act = json.loads(line)
        sys.stdout.write(f"ROUND {json.dumps(acts[act['do']](act))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
