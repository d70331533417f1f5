"""vLLM's own prefix cache on our benchmark's work, as a child process.

`lab.bench.peer` runs this file by its path, with the Python of an environment that has
vLLM. It answers JSON lines on stdout; each order on stdin gets one answer:

    started  →  {"kind": "ready", "vllm": "0.32.0", "hash": "sha256"}
             or {"kind": "refusal", "reason": "..."}, and the process ends
    {"op": "round", "tokens": n, "block": b, "source": "list", "seed": s, "blocks": p}
             →  {"kind": "timings", "keys_ns": ..., ...}

The prompts come from `lab/bench/prompts.py`, whose path is the only argument. The one rule:
this file imports nothing of Penstock, which the other environment does not have.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import time
import zlib
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

HASH = "sha256"
"""vLLM's default for block hashes."""
PROMPTS: dict[str, Any] = {}
"""What `lab/bench/prompts.py` defines, once it was loaded."""


class CacheCore:
    """The classes of vLLM's cache core, without a model, an engine or a device."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        self._managing: Any = importlib.import_module("vllm.v1.core.kv_cache_manager")
        self._requests: Any = importlib.import_module("vllm.v1.request")
        self._sampling: Any = importlib.import_module("vllm.sampling_params")
        self._hashing: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        functions: Any = importlib.import_module("vllm.utils.hashing")
        self.version: str = importlib.import_module("vllm").__version__
        self._hash = functions.get_hash_fn_by_name(HASH)
        self._hashing.init_none_hash(self._hash)

    def open_cache(self, *, usable: int, block: int) -> Any:  # noqa: ANN401 - vLLM's own class
        """An empty cache in which `usable` blocks can be handed out."""
        attention = self._interface.FullAttentionSpec(
            block_size=block, num_kv_heads=8, head_size=128, dtype=self._torch.bfloat16
        )
        config = self._interface.KVCacheConfig(
            # vLLM keeps one block of the pool to itself, as its null block.
            num_blocks=usable + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[self._interface.KVCacheGroupSpec(["layer"], attention)],
        )
        return self._managing.KVCacheManager(
            config,
            max_model_len=1 << 24,
            scheduler_block_size=block,
            hash_block_size=block,
            enable_caching=True,
            log_stats=False,
        )

    def prepare_request(self, name: str, tokens: list[int], block: int) -> Callable[[], Any]:
        """What makes a request: its construction hashes every full block of the prompt."""
        hasher = self._hashing.get_request_block_hasher(block, self._hash)
        sampling = self._sampling.SamplingParams(max_tokens=1)
        make = self._requests.Request
        return lambda: make(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=hasher,
        )


class Round:
    """One round of work on a fresh cache: a miss, a full hit, and a miss in a full pool."""

    def __init__(self, core: CacheCore, order: dict[str, Any]) -> None:
        self._core = core
        self._tokens: int = order["tokens"]
        self._block: int = order["block"]
        self._source: str = order["source"]
        self._seed: int = order["seed"]
        self._usable: int = order["blocks"]
        self._cache = core.open_cache(usable=self._usable, block=self._block)

    def run(self) -> dict[str, int]:
        """Does the work and returns what each part of it took."""
        drawn = PROMPTS["draw_tokens"](self._seed, self._tokens)
        gc.collect()
        gc.disable()
        # vLLM takes a prompt as a list of ints only, so a buffer has to be converted.
        convert_ns, prompt = timed(drawn.tolist)
        keys_ns, request = timed(self._core.prepare_request("miss", prompt, self._block))
        miss = self._serve(request, hit_tokens=0)
        request = self._core.prepare_request("hit", prompt, self._block)()
        hit = self._serve(request, hit_tokens=self._tokens - self._block)
        self._fill_pool()
        request = self._other_request(0, self._tokens)
        evict = self._serve(request, hit_tokens=0)
        require(self._cached_blocks() == self._usable, "the newcomer did not evict block by block")
        gc.enable()
        return {
            "tokens_crc32": zlib.crc32(drawn.tobytes()),
            "convert_ns": convert_ns if self._source == "buffer" else 0,
            "keys_ns": keys_ns,
            **{f"miss_{part}_ns": ns for part, ns in miss.items()},
            **{f"hit_{part}_ns": ns for part, ns in hit.items()},
            **{f"evict_{part}_ns": ns for part, ns in evict.items()},
        }

    def _serve(self, request: Any, *, hit_tokens: int) -> dict[str, int]:  # noqa: ANN401
        """Takes one request through the cache: match, allocate (and publish), free."""
        cache = self._cache
        match_ns, match = timed(lambda: cache.get_computed_blocks(request))
        blocks, cached = match[0], match[1]
        require(cached == hit_tokens, f"{cached} tokens were cached, expected {hit_tokens}")
        rest = request.num_tokens - cached
        allocate_ns, slots = timed(lambda: cache.allocate_slots(request, rest, cached, blocks))
        require(slots is not None, "the pool had no room")
        request.num_computed_tokens = cached + rest
        free_ns, _ = timed(lambda: cache.free(request))
        return {"match": match_ns, "allocate": allocate_ns, "free": free_ns}

    def _fill_pool(self) -> None:
        """Serves other prompts until no block of the pool is without content."""
        number = 1
        while (room := self._usable - self._cached_blocks()) > 0:
            tokens = min(room * self._block, self._tokens)
            self._serve(self._other_request(number, tokens), hit_tokens=0)
            number += 1

    def _other_request(self, number: int, tokens: int) -> Any:  # noqa: ANN401 - vLLM's own class
        seed = PROMPTS["other_seed"](self._seed, number)
        prompt = PROMPTS["draw_tokens"](seed, tokens).tolist()
        return self._core.prepare_request(f"other-{number}", prompt, self._block)()

    def _cached_blocks(self) -> int:
        return len(self._cache.block_pool.cached_block_hash_to_block)


def timed(work: Callable[[], T]) -> tuple[int, T]:
    """Does the work; how many nanoseconds it took, and its result."""
    started_ns = time.perf_counter_ns()
    result = work()
    return time.perf_counter_ns() - started_ns, result


def require(condition: bool, problem: str) -> None:  # noqa: FBT001 - reads as a sentence
    """Ends the process where the work is not the work that both sides are measured for."""
    if not condition:
        raise RuntimeError(f"not the work that was ordered: {problem}")


def answer(out: TextIO, kind: str, **fields: object) -> None:
    """Writes one line to the benchmark."""
    out.write(json.dumps({"kind": kind, **fields}) + "\n")
    out.flush()


def keep_stdout() -> TextIO:
    """Takes stdout for the answers; whatever else prints goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def main() -> int:
    """Imports vLLM, then answers orders until stdin ends."""
    answers = keep_stdout()
    PROMPTS.update(runpy.run_path(sys.argv[1]))
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    try:
        core = CacheCore()
    except (ImportError, OSError, RuntimeError, AttributeError) as problem:
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        answer(answers, "refusal", reason=reason)
        return 1
    # What the import left behind is out of reach of every later collection.
    gc.freeze()
    answer(answers, "ready", vllm=core.version, hash=HASH)
    for line in sys.stdin:
        order = json.loads(line)
        require(order["op"] == "round", f"unknown order {order['op']!r}")
        answer(answers, "timings", **Round(core, order).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
