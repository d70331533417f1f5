"""What plain vLLM is asked, for all tests here: one engine a model, with room for all of it.

Engines take long to start. What they compute in float32 does not depend, in four digits, on what
else they compute, so one of them gives the answers that every test compares with.
"""

from __future__ import annotations

import random
from typing import Any

from comparing import BLOCK, generate


def crowd(drawn: int, count: int, longest: int, **how: Any) -> dict[str, Any]:
    """Requests of many lengths, all at once."""
    draw = random.Random(drawn)
    return generate(lengths=[draw.randrange(40, longest) for _ in range(count)], **how)


FIRST_BLOCK = {"cut": BLOCK + 8, "max_tokens": 1}
SHARED = 8 * BLOCK
CROWD = crowd(11, 32, 160, max_tokens=48, seed=5)
FOLLOWERS = generate(lengths=[20 + number for number in range(24)], shared=SHARED, seed=6)
STRANGERS = {**FOLLOWERS, "seed": 8}
"""As many, as long, and of none of these is anything cached."""
FEWER = crowd(12, 12, 160, max_tokens=48, seed=7)
THREE = {**FOLLOWERS, "lengths": FOLLOWERS["lengths"][:3]}
SHORTER_CROWD = crowd(13, 32, 120, max_tokens=24, seed=5)
SMALLER_CROWD = crowd(13, 10, 120, max_tokens=24, seed=5)
"""For the trained model, which is much larger than the others."""
LONG = generate(max_tokens=3 * BLOCK)

KINDS = {
    # Cold, from vLLM's own cache, and again after one block of each prompt.
    "cold": generate(),
    "cached": generate(),
    "first block": generate(forget=True, **FIRST_BLOCK),
    "behind it": generate(),
    "again": generate(),
}
ACTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        **KINDS,
        "crowd": CROWD,
        "followers": FOLLOWERS,
        "strangers": STRANGERS,
        "fewer": FEWER,
        "three": THREE,
        "long": LONG,
        "update": {"act": "update"},
        "new weights": generate(),
    },
    "latent": KINDS,
    "hybrid": {**KINDS, "crowd": SHORTER_CROWD},
    "smollm2": {**KINDS, "crowd": SMALLER_CROWD},
}
# vLLM's kernels for latent attention need bfloat16 on the CPU, where the same tokens computed in
# other pieces differ in the third digit of KV, and in most answers after a few tokens. So requests
# run one at a time, and are compared with what plain vLLM computes in the same pieces.
LATENT: dict[str, Any] = {"dtype": "bfloat16", "options": {"max_num_seqs": 1}}
SETUPS: dict[str, dict[str, Any]] = {
    "llama": {},
    "latent": LATENT,
    # Six KV groups take six blocks of the pool for each block of tokens.
    "hybrid": {"pool": 2048},
    "smollm2": {},
}
