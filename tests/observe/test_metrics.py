"""What Prometheus reads: the rates that decide between loading and computing are among it."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock
from lab.reference_pages import completed
from penstock.machine.statistics import (
    CacheStatistics,
    HopStatistics,
    StoreStatistics,
    TierStatistics,
)
from penstock_serve.observe.live import PHASES, InstanceStatistics
from penstock_serve.observe.metrics import COUNTER, METRICS, RouterMetrics, ServerMetrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = completed((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
NO_METRIC = {
    "epoch": "a number for the protocol, not a measurement",
    "healthy": "the same as `health`, of which there is a metric",
    "lost_ranks": "a lost rank shows in `health`",
    "name": "a label",
    "source": "a label",
    "store": "a table of its own",
    "target": "a label",
    "why_off": "a text; `tier_on` says that it is off",
    "hops": "has metrics of its own",
    "tiers": "has metrics of its own",
}

CONFIG = penstock.parse_config(
    'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4, blocks = 8 }\n'
    'tiers = [{ name = "host", kind = "host", blocks = 16, huge_pages = "never" }]\n'
)


def told_by(cache: penstock.Cache) -> InstanceStatistics:
    """What an instance reports, as it arrives at the server."""
    told = InstanceStatistics(
        instance="instance-0",
        role="both",
        state="running",
        weights_version="1",
        cache=cache.statistics(),
        health=cache.health(),
        waiting=1,
        loading=2,
        running=3,
        claiming=4,
        preemptions=5,
        handoffs={"delivered": 6},
        handed_bytes=7,
        handed_seconds=7.5,
        landing_bytes=8,
        handed_parts_verified=8,
        token_bytes=9,
    )
    return msgspec.json.decode(msgspec.json.encode(told), type=InstanceStatistics)


def scraped(cache: penstock.Cache) -> dict[str, list[tuple[dict[str, str], float]]]:
    text = ServerMetrics().text([told_by(cache)], retries=0).decode()
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
    assert 0 < ready_s < 600
    assert cache.statistics().tiers[1].ready_s == ready_s


def test_answers_are_counted_by_phase_and_handoffs_by_outcome() -> None:
    cache = penstock.open(CONFIG, kv=np.zeros((8, 4, 16)))

    found = scraped(cache)

    phases = {labels["phase"]: value for labels, value in found["penstock_requests_now"]}
    assert phases == {"waiting": 1, "loading": 2, "running": 3, "claiming": 4}
    handoff = {"instance": "instance-0", "outcome": "delivered"}
    assert found["penstock_handoffs"] == [(handoff, 6.0)]
    assert found["penstock_retries"] == [({}, 0.0)]


def test_answered_requests_are_counted_by_where_their_time_went() -> None:
    metrics = ServerMetrics()
    metrics.answered([0.25, 0, 0, 1, 2], 3.5)
    metrics.answered([], 1.0)

    text = metrics.text([], retries=0).decode()

    found = {
        (sample.name, sample.labels.get("phase", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["penstock_request_seconds_sum", ""] == 4.5
    assert {phase: found["penstock_phase_seconds_sum", phase] for phase in PHASES} == {
        "queued": 0.25,
        "loading": 0,
        "handed_over": 0,
        "prefill": 1,
        "decode": 2,
    }
    assert f'penstock_build_info{{python="{platform.python_version()}"' in text
    assert f'version="{penstock.__version__}"}} 1.0' in text


def test_every_metric_of_server_and_router_is_on_the_page() -> None:
    for text in (ServerMetrics().text([], retries=0), RouterMetrics().text([])):
        for family in text_string_to_metric_families(text.decode()):
            name = family.name + ("_total" if family.type == "counter" else "")
            # When a series began is added by the client library.
            assert f"`{name}" in PAGE or name.endswith("_created")


@pytest.mark.parametrize(
    ("statistics", "prefix"),
    [
        (CacheStatistics, "cache_"),
        (TierStatistics, "tier_"),
        (StoreStatistics, "store_"),
        (HopStatistics, "hop_"),
    ],
)
def test_every_number_of_the_statistics_is_a_metric(
    statistics: type[msgspec.Struct], prefix: str
) -> None:
    # A metric has its unit written out: `ready_s` is `ready_seconds`.
    known = {row.name.replace("per_second", "per_s").replace("_seconds", "_s") for row in METRICS}

    missing = [
        field.name
        for field in msgspec.structs.fields(statistics)
        if not {prefix + field.name, field.name} & known and field.name not in NO_METRIC
    ]

    assert not missing


def test_a_metric_is_defined_once_and_is_on_the_page() -> None:
    names = [f"penstock_{row.name}{'_total' if row.kind is COUNTER else ''}" for row in METRICS]

    listed = set(re.findall(r"penstock_[a-z_]+", PAGE))

    assert len(set(names)) == len(names)
    assert not sorted(set(names) - listed)
