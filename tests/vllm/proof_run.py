"""One vLLM engine in processes of its own, run by `test_proof.py`: prompts in, log-probs out.

    python proof_run.py MODEL plain|proof|sabotaged RANKS

prints a line of JSON for each pass over the prompts: what was generated, its log-probs, and
how many prompt tokens came from a cache.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from tiny_llama import VOCABULARY

from vllm import LLM, SamplingParams

BLOCK = 32
PROMPTS = [9 * BLOCK + 5, 6 * BLOCK + 17, 4 * BLOCK]


def main(model: str, way: str, ranks: int) -> None:
    transfer = {
        "kv_connector": f"{way.capitalize()}Connector",
        "kv_connector_module_path": f"{way}_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK,
        num_gpu_blocks_override=64,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=True,
        seed=0,
        tensor_parallel_size=ranks,
        # A worker of its own, so that scheduler and worker are two processes.
        distributed_executor_backend="mp",
        kv_transfer_config=transfer if way != "plain" else None,
    )
    draw = random.Random(3)
    prompts = [
        {"prompt_token_ids": [draw.randrange(10, VOCABULARY) for _ in range(count)]}
        for count in PROMPTS
    ]
    for _ in range(2):
        told(llm, prompts)
        # vLLM forgets its own cache; what lies below is not touched.
        llm.reset_prefix_cache()


def told(llm: Any, prompts: list[Any]) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, detokenize=False)
    rows = []
    for out in llm.generate(prompts, sampling, use_tqdm=False):
        answer = out.outputs[0]
        rows.append(
            {
                "tokens": list(answer.token_ids),
                "logprobs": [
                    step[token].logprob
                    for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
                ],
                "cached": out.num_cached_tokens,
            }
        )
    sys.stdout.write(f"PASS {json.dumps(rows)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
