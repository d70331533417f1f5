"""One SGLang engine of `lab bench sglang-gpu`, in a process of its own.

    python -m lab.bench.sglang_gpu_child '{"side": "penstock", "model": …}'

It says `ready`, then does what each line on standard input asks, and answers with a line of JSON
behind `ROUND `.
"""

# SGLang has no types that mypy could see from here.

from __future__ import annotations

import json
import os
import sys
import time
from random import Random
from typing import TYPE_CHECKING, Any

from lab.bench.vllm_child import say
from lab.bench.vllm_gpu_child import drawn

if TYPE_CHECKING:
    from pathlib import Path

PLAIN, OWN, HICACHE, OURS = SIDES = ("plain", "own hits", "hicache", "penstock")
PAGE_TOKENS = 64
TOML = """
version = 1
model.name = "bench"
[[tiers]]
name = "host"
kind = "host"
gib = {gib}
"""


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """Writes a Llama with random weights to a folder.

    They are wider than usual: otherwise answers hardly depend on what is in the KV cache.
    """
    import torch  # noqa: PLC0415 - only where SGLang is
    from safetensors.torch import save_file  # noqa: PLC0415

    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, config["torch_dtype"])
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    weights: dict[str, torch.Tensor] = {}

    def wide(name: str, rows: int, columns: int, deviation: float | None = None) -> None:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        weight.normal_(0.0, deviation or 1.5 * columns**-0.5, generator=draw)
        weights[f"{name}.weight"] = weight.cpu()

    wide("model.embed_tokens", config["vocab_size"], hidden, 1.0)
    wide("lm_head", config["vocab_size"], hidden)
    norms = ["model.norm"]
    for layer in range(config["num_hidden_layers"]):
        here = f"model.layers.{layer}"
        wide(f"{here}.self_attn.q_proj", heads, hidden)
        wide(f"{here}.self_attn.k_proj", kv_heads, hidden)
        wide(f"{here}.self_attn.v_proj", kv_heads, hidden)
        wide(f"{here}.self_attn.o_proj", hidden, heads)
        wide(f"{here}.mlp.gate_proj", inner, hidden)
        wide(f"{here}.mlp.up_proj", inner, hidden)
        wide(f"{here}.mlp.down_proj", hidden, inner)
        norms += [f"{here}.input_layernorm", f"{here}.post_attention_layernorm"]
    weights |= {f"{name}.weight": torch.ones(hidden, dtype=dtype) for name in norms}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def options_of(side: str, gib: int) -> dict[str, Any]:
    """What SGLang is told about caches."""
    if side == HICACHE:
        return {"enable_hierarchical_cache": True, "hicache_size": gib}
    if side == OURS:
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "PenstockLinker",
                "linker_module_path": "penstock.connectors.sglang",
                "linker_extra_config": {"config": TOML.format(gib=gib)},
            },
        }
    return {}


class Engine:
    """SGLang with one side's cache."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import sglang  # noqa: PLC0415 - takes ten seconds

        self._engine = sglang.Engine(
            model_path=asked["model"],
            skip_tokenizer_init=True,
            page_size=PAGE_TOKENS,
            max_total_tokens=asked["pool_tokens"],
            chunked_prefill_size=8192,
            max_running_requests=64,
            random_seed=0,
            log_level="warning",
            **asked["options"],
            **options_of(asked["side"], asked["gib"]),
        )

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One prompt: seconds to the first token, what it found, and the answer."""
        prompt = drawn(Random(asked["seed"]), asked["tokens"])
        began = time.perf_counter()
        first, out = None, None
        for out in self._engine.generate(  # noqa: B007 - the last one has everything
            input_ids=prompt,
            sampling_params=_greedy(asked["answer"]),
            return_logprob=True,
            stream=True,
        ):
            first = first or time.perf_counter() - began
        assert out is not None
        about = out["meta_info"]
        scores = [[token, score] for score, token, *_ in about["output_token_logprobs"]]
        details = about.get("cached_tokens_details") or {}
        return {
            "first_s": first,
            "cached": about["cached_tokens"],
            "host": details.get("host", 0),
            "scores": scores,
        }

    def decode(self, asked: dict[str, Any]) -> dict[str, Any]:
        """New prompts, all at once: tokens of their answers a second, from the first prompt on."""
        draw = Random(asked["seed"])
        prompts = [drawn(draw, asked["tokens"]) for _ in range(asked["count"])]
        began = time.perf_counter()
        outs = self._engine.generate(input_ids=prompts, sampling_params=_greedy(asked["answer"]))
        seconds = time.perf_counter() - began
        return {"tokens_per_s": sum(len(each["output_ids"]) for each in outs) / seconds}


def _greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}


def main(asked: dict[str, Any]) -> None:
    """Answers until standard input ends."""
    engine = Engine(asked)
    acts = {act.__name__: act for act in (engine.ask, engine.decode)}
    say("ready")
    for line in sys.stdin:
        act = json.loads(line)
        say(f"ROUND {json.dumps(acts[act['do']](act))}")
    # Without waiting for the engine's processes, which would wait for us: they end with this one.
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
