"""Why requests miss: the reasons that a lease gives, and the history of a request and a block.

python examples/misses.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import penstock
from penstock import MissReason

STORY, OTHER = list(range(12)), list(range(100, 113))


def open_cache(blocks: int, more: str = "", tiers: str = "[]") -> penstock.Cache:
    config = penstock.parse_config(f"""
        version = 1
        model.name = "toy"
        cache = {{ block_tokens = 4, blocks = {blocks}{more} }}
        tiers = {tiers}
    """)
    return penstock.open(config, kv=np.zeros((blocks, 4, 8), dtype=np.float32))


def serve(cache: penstock.Cache, tokens: list[int], **wishes: Any) -> penstock.Lease:  # noqa: ANN401
    """A request from beginning to end; its lease says what it found."""
    with cache.acquire(tokens, **wishes) as lease:
        while lease.state is penstock.LeaseState.LOADING:
            cache.step()
        lease.commit(tokens[lease.cached_tokens :])
    while cache.busy:
        cache.step()
    return lease


with open_cache(blocks=4) as cache:
    assert str(serve(cache, STORY).miss) == "block 0: never seen"
    second = serve(cache, STORY)  # The last token is always computed: of twelve, eight are used.
    assert (second.cached_tokens, str(second.miss)) == (8, "complete")
    serve(cache, OTHER)  # needs all four blocks
    miss = serve(cache, STORY).miss
    print(f"the third time: {miss}")
    assert miss.reason is MissReason.EVICTED
    assert miss.departure is not None
    assert (miss.departure.tier, miss.departure.policy) == ("device", "lru")

with open_cache(blocks=16, more=", quotas = { free = 0.25 }") as cache:
    with cache.acquire(STORY), cache.acquire(STORY) as early:  # Neither has committed anything.
        assert early.miss.reason is MissReason.FILLING
    serve(cache, STORY)
    assert serve(cache, STORY, tenant="acme").miss.reason is MissReason.NAMESPACE
    assert serve(cache, STORY, reuse=False).miss.reason is MissReason.OPTED_OUT
    serve(cache, STORY, tenant="free")
    serve(cache, OTHER, tenant="free")  # Four blocks are all it may have.
    assert serve(cache, STORY, tenant="free").miss.reason is MissReason.OVER_QUOTA
    cache.reset("an experiment ends")
    assert serve(cache, STORY).miss.reason is MissReason.RESET
    cache.change_weights("step 400")
    assert serve(cache, STORY).miss.reason is MissReason.WEIGHTS

with open_cache(blocks=4, tiers='[{ name = "host", kind = "memory", blocks = 64 }]') as cache:
    serve(cache, STORY, request="monday")
    serve(cache, OTHER, request="tuesday")
    assert serve(cache, STORY, request="wednesday").cached_by_tier == (0, 8)
    lines = [line.split(maxsplit=1)[1] for line in cache.story("wednesday")]
    print("\n".join(lines))
    assert lines[0] == "evicted cause=wednesday [2 blocks] from device"
    assert lines[1].startswith("acquired cause=wednesday [2 blocks]")
    assert "filled device cause=wednesday [2 blocks]" in lines
    assert lines[-1] == "released cause=wednesday"

    namespace = penstock.Namespace(model="toy", kv_dtype="float32")
    key = penstock.KeyChain(namespace, block_tokens=4).extend(STORY)[0]
    lines = [line.split(maxsplit=1)[1] for line in cache.story(key)]
    assert lines[0].startswith("published cause=monday")
    assert any(line.startswith("evicted cause=tuesday") for line in lines)

    statistics = cache.statistics()
    shares = {tier.name: tier.tokens_cached / statistics.tokens_asked for tier in statistics.tiers}
    assert shares == {"device": 0.0, "host": 8 / 37}
    assert statistics.misses["never seen"] == 2
