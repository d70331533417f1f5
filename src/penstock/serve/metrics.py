"""Prometheus metrics of a server and of the caches behind it, made anew for every scrape.

The server counts requests and times as they pass; what the caches did comes from their own
statistics, so there is one source for `/metrics`, `/cache` and the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

COUNTS = {
    "requests": "Requests that asked for their prefix",
    "tokens_asked": "Prompt tokens that were asked for",
    "tokens_computed_instead": "Tokens found, but quicker to compute than to load",
    "blocks_published": "Blocks that became available to others",
    "blocks_corrupt": "Blocks whose sums did not agree",
    "blocks_dropped_unsaved": "Blocks evicted before they were written down",
    "saves_refused": "Blocks that no lower tier had room for",
    "operations_started": "Copies that were begun",
    "reports_lost": "Reports of ranks that never came",
}
TIER_COUNTS = {
    "tokens_cached": "Tokens found here",
    "blocks_evicted": "Copies that made room",
}
TIER_GAUGES = {
    "slots": "Slots of a tier",
    "ready": "Blocks that can be found",
    "held": "Blocks in use",
}


class Metrics:
    """What one server has seen."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "penstock_requests",
            "Requests by how they ended",
            ["outcome"],
            registry=self._registry,
        )
        self.first_token_s = Histogram(
            "penstock_first_token_seconds",
            "From the request to its first text",
            buckets=FIRST_TOKEN_S,
            registry=self._registry,
        )
        self.between_tokens_s = Histogram(
            "penstock_between_tokens_seconds",
            "From one piece of text to the next",
            buckets=BETWEEN_TOKENS_S,
            registry=self._registry,
        )
        self.prompt_tokens = Counter(
            "penstock_prompt_tokens", "Tokens of prompts", registry=self._registry
        )
        self.generated_tokens = Counter(
            "penstock_generated_tokens", "Tokens of answers", registry=self._registry
        )

    def text(self, instances: Sequence[Mapping[str, Any]], *, retries: int) -> bytes:
        """All metrics in Prometheus' text format."""
        behind = CollectorRegistry()
        behind.register(_Behind(instances, retries))
        return generate_latest(self._registry) + generate_latest(behind)


class _Behind:
    """What the instances told, as a collector."""

    def __init__(self, instances: Sequence[Mapping[str, Any]], retries: int) -> None:
        self._instances = instances
        self._retries = retries

    def collect(self) -> Iterator[Metric]:
        """Every metric of every instance."""
        retries = CounterMetricFamily("penstock_retries", "Requests sent to another instance")
        retries.add_metric([], self._retries)
        yield retries
        yield from self._of_engines()
        for name, about in COUNTS.items():
            counter = CounterMetricFamily(f"penstock_cache_{name}", about, labels=["instance"])
            for told in self._instances:
                counter.add_metric([told["instance"]], told["cache"][name])
            yield counter
        misses = CounterMetricFamily(
            "penstock_cache_misses", "Requests by why no more was found", labels=["instance", "why"]
        )
        for told in self._instances:
            for why, count in told["cache"]["misses"].items():
                misses.add_metric([told["instance"], why], count)
        yield misses
        yield from self._of_rates()
        yield from self._of_tiers()

    def _of_engines(self) -> Iterator[Metric]:
        now = GaugeMetricFamily(
            "penstock_requests_now", "Answers by phase", labels=["instance", "phase"]
        )
        healthy = GaugeMetricFamily(
            "penstock_healthy", "1 if nothing is wrong", labels=["instance"]
        )
        leases = GaugeMetricFamily(
            "penstock_cache_leases", "Requests that hold blocks", labels=["instance"]
        )
        preempted = CounterMetricFamily(
            "penstock_preemptions", "Answers that gave their blocks back", labels=["instance"]
        )
        handoffs = CounterMetricFamily(
            "penstock_handoffs", "Handoffs by how they ended", labels=["instance", "outcome"]
        )
        for told in self._instances:
            who = told["instance"]
            for phase in ("waiting", "loading", "claiming", "running"):
                now.add_metric([who, phase], told[phase])
            for outcome, count in told["handoffs"].items():
                handoffs.add_metric([who, outcome], count)
            healthy.add_metric([who], told["health"]["ok"])
            leases.add_metric([who], told["cache"]["leases"])
            preempted.add_metric([who], told["preemptions"])
        yield from (now, healthy, leases, preempted, handoffs)

    def _of_rates(self) -> Iterator[Metric]:
        """What decides between loading and computing; what was not measured lately is not there."""
        prefill = GaugeMetricFamily(
            "penstock_prefill_tokens_per_second",
            "Moving median of what the engine told",
            labels=["instance"],
        )
        labels = ["instance", "source", "target"]
        tokens = GaugeMetricFamily(
            "penstock_hop_tokens_per_second", "Moving median of a hop", labels=labels
        )
        size = GaugeMetricFamily(
            "penstock_hop_bytes_per_second", "The same on each rank", labels=labels
        )
        queued = GaugeMetricFamily(
            "penstock_hop_blocks_queued", "Blocks asked for that have not arrived", labels=labels
        )
        for told in self._instances:
            _add_known(prefill, [told["instance"]], told["cache"]["prefill_tokens_per_s"])
            for hop in told["cache"]["hops"]:
                which = [told["instance"], hop["source"], hop["target"]]
                _add_known(tokens, which, hop["tokens_per_s"])
                _add_known(size, which, hop["bytes_per_s"])
                queued.add_metric(which, hop["blocks_queued"])
        yield from (prefill, tokens, size, queued)

    def _of_tiers(self) -> Iterator[Metric]:
        labels = ["instance", "tier"]
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
            **{
                name: CounterMetricFamily(f"penstock_tier_{name}", about, labels=labels)
                for name, about in TIER_COUNTS.items()
            },
            **{
                name: GaugeMetricFamily(f"penstock_tier_{name}", about, labels=labels)
                for name, about in TIER_GAUGES.items()
            },
        }
        for told in self._instances:
            for tier in told["cache"]["tiers"]:
                for name, family in families.items():
                    family.add_metric([told["instance"], tier["name"]], tier[name])
        yield from families.values()
        ready_s = GaugeMetricFamily(
            "penstock_tier_ready_seconds",
            "Until its memory could be used, when it was opened, on the slowest rank",
            labels=labels,
        )
        for told in self._instances:
            for tier in told["cache"]["tiers"]:
                _add_known(ready_s, [told["instance"], tier["name"]], tier["ready_s"])
        yield ready_s


def _add_known(family: GaugeMetricFamily, labels: Sequence[str], value: float | None) -> None:
    """Adds what there is: a rate that nobody knows is no zero."""
    if value is not None:
        family.add_metric(labels, value)
