"""What Prometheus reads: the rates that decide between loading and computing are among it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.serve.metrics import Metrics

CONFIG = penstock.parse_config(
    'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4, blocks = 8 }\n'
    'tiers = [{ name = "host", kind = "host", blocks = 16, huge_pages = "never" }]\n'
)


def told_by(cache: penstock.Cache) -> dict[str, Any]:
    """What an instance tells its server, as it arrives there."""
    told = {
        "instance": "instance-0",
        "cache": cache.statistics(),
        "health": cache.health(),
        **dict.fromkeys(("waiting", "loading", "running", "claiming", "preemptions"), 0),
        "handoffs": {},
    }
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(told))
    return found


def scraped(cache: penstock.Cache) -> dict[str, list[tuple[dict[str, str], float]]]:
    text = Metrics().text([told_by(cache)], retries=0).decode()
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


def test_rates_are_there_once_they_were_measured() -> None:
    cache = penstock.open(CONFIG, kv=np.zeros((8, 4, 16)))
    before = scraped(cache)
    with cache.acquire(range(16)) as lease:
        lease.commit(range(16))
    while cache.busy:
        cache.step()
    cache.step()
    cache.computed(1000, 0.5)

    after = scraped(cache)

    assert before["penstock_prefill_tokens_per_second"] == []
    assert before["penstock_hop_bytes_per_second"] == []
    assert after["penstock_prefill_tokens_per_second"] == [({"instance": "instance-0"}, 2000.0)]
    hop = {"instance": "instance-0", "source": "device", "target": "host"}
    ((tokens_of, tokens_per_s),) = after["penstock_hop_tokens_per_second"]
    ((bytes_of, bytes_per_s),) = after["penstock_hop_bytes_per_second"]
    assert tokens_of == bytes_of == hop
    assert bytes_per_s == tokens_per_s * 16 * 8  # Each token has 16 numbers of 8 bytes here.


def test_the_time_until_a_tier_was_ready_is_there() -> None:
    cache = penstock.open(CONFIG, kv=np.zeros((8, 4, 16)))

    found = scraped(cache)["penstock_tier_ready_seconds"]

    ((labels, ready_s),) = found
    assert labels == {"instance": "instance-0", "tier": "host"}
    assert 0 < ready_s < 60
    assert cache.statistics().tiers[1].ready_s == ready_s
