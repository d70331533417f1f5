"""Every Prometheus metric of `penstock serve`: a new one is a row in `METRICS`.

| what is measured            | is counted in                        | becomes a metric in      |
|-----------------------------|--------------------------------------|--------------------------|
| what an instance's cache did | `machine/books.py`, `statistics.py`  | a row of `METRICS`       |
| an engine's requests         | `observe/statistics.py`              | a row of `METRICS`       |
| what the server saw itself   | `ServerMetrics`, where it passes     | a field of `ServerMetrics` |

Instances report `InstanceStatistics`, which `/cache` shows as well, so both pages agree.
`tests/observe/test_metrics.py` requires that every number of the statistics has a row here and
that docs/metrics.md lists every metric.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from penstock import __version__
from penstock_serve.observe.traffic import PHASES, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from penstock.toolkit import HopStatistics, StoreStatistics, TierStatistics
    from penstock_serve.observe.statistics import InstanceStatistics

COUNTER = CounterMetricFamily
"""Only grows; its name on the page ends with `_total`."""
GAUGE = GaugeMetricFamily

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PHASE_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

Samples: TypeAlias = "Iterable[tuple[tuple[str, ...], float | None]]"
"""Values of further labels, and the number; `None` where nothing was measured."""


class MetricRow(NamedTuple):
    """A metric of each instance; `instance` is its first label."""

    name: str
    """Without `penstock_` before it and `_total` behind it."""
    kind: type[CounterMetricFamily | GaugeMetricFamily]
    about: str
    read: Callable[[InstanceStatistics], Samples]
    labels: tuple[str, ...] = ()


def one(read: Callable[[InstanceStatistics], float | None]) -> Callable[..., Samples]:
    """Reads a metric that has no further labels."""
    return lambda stats: [((), read(stats))]


def by_store(read: Callable[[StoreStatistics], float]) -> Callable[..., Samples]:
    """Reads a metric of each tier that a store process serves."""
    return lambda stats: [
        ((tier.name,), read(tier.store)) for tier in stats.cache.tiers if tier.store is not None
    ]


def by_tier(read: Callable[[TierStatistics], float | None]) -> Callable[..., Samples]:
    """Reads a metric of each tier."""
    return lambda stats: [((tier.name,), read(tier)) for tier in stats.cache.tiers]


def by_hop(read: Callable[[HopStatistics], float | None]) -> Callable[..., Samples]:
    """Reads a metric of each pair of tiers between which blocks are copied."""
    return lambda stats: [((hop.source, hop.target), read(hop)) for hop in stats.cache.hops]


def by_name(read: Callable[[InstanceStatistics], dict[str, int]]) -> Callable[..., Samples]:
    return lambda stats: [((name,), count) for name, count in read(stats).items()]


STATES = ("running", "paused", "asleep", "without weights")
"""Of an instance."""
_TIER = ("tier",)
_HOP = ("source", "target")

METRICS = (
    MetricRow(
        "requests_now",
        GAUGE,
        "Answers by phase",
        by_name(
            lambda stats: {
                "waiting": stats.waiting,
                "loading": stats.loading,
                "claiming": stats.claiming,
                "running": stats.running,
            }
        ),
        ("phase",),
    ),
    MetricRow(
        "state",
        GAUGE,
        "1 for what an instance does now",
        by_name(lambda stats: {name: int(stats.state == name) for name in STATES}),
        ("state",),
    ),
    MetricRow("healthy", GAUGE, "1 if nothing is wrong", one(lambda stats: stats.health.ok)),
    MetricRow(
        "preemptions",
        COUNTER,
        "Answers that gave their blocks back",
        one(lambda stats: stats.preemptions),
    ),
    MetricRow(
        "handoffs",
        COUNTER,
        "Handoffs by how they ended",
        by_name(lambda stats: stats.handoffs),
        ("outcome",),
    ),
    MetricRow(
        "handed_bytes",
        COUNTER,
        "Bytes of KV that were handed over, or taken in",
        one(lambda stats: stats.handed_bytes),
    ),
    MetricRow(
        "handed_seconds",
        COUNTER,
        "Time of handoffs that were delivered",
        one(lambda stats: stats.handed_seconds),
    ),
    MetricRow(
        "handed_parts_verified",
        COUNTER,
        "Parts of handoffs whose checksums agreed",
        one(lambda stats: stats.handed_parts_verified),
    ),
    MetricRow(
        "landing_bytes",
        GAUGE,
        "Memory of landing areas for handoffs, with retired ones",
        one(lambda stats: stats.landing_bytes),
    ),
    # The cache: requests.
    MetricRow(
        "cache_requests",
        COUNTER,
        "Requests that asked for their prefix",
        one(lambda stats: stats.cache.requests),
    ),
    MetricRow(
        "cache_requests_refused",
        COUNTER,
        "Requests for which there was no room",
        one(lambda stats: stats.cache.requests_refused),
    ),
    MetricRow(
        "cache_misses",
        COUNTER,
        "Requests by why no more was found",
        by_name(lambda stats: stats.cache.misses),
        ("why",),
    ),
    MetricRow(
        "cache_tokens_asked",
        COUNTER,
        "Prompt tokens that were asked for",
        one(lambda stats: stats.cache.tokens_asked),
    ),
    MetricRow(
        "cache_tokens_not_delivered",
        COUNTER,
        "Tokens found whose blocks could not be brought to the device",
        one(lambda stats: stats.cache.tokens_not_delivered),
    ),
    MetricRow(
        "cache_tokens_computed_instead",
        COUNTER,
        "Tokens found, but quicker to compute than to load",
        one(lambda stats: stats.cache.tokens_computed_instead),
    ),
    MetricRow(
        "cache_leases", GAUGE, "Requests that hold blocks", one(lambda stats: stats.cache.leases)
    ),
    MetricRow(
        "cache_leases_lost",
        COUNTER,
        "Requests whose blocks were lost while they held them",
        one(lambda stats: stats.cache.leases_lost),
    ),
    MetricRow("cache_pins", GAUGE, "Prefixes that are pinned", one(lambda stats: stats.cache.pins)),
    # The cache: blocks.
    MetricRow(
        "cache_blocks_known",
        GAUGE,
        "Blocks in the index",
        one(lambda stats: stats.cache.blocks_known),
    ),
    MetricRow(
        "cache_blocks_hollow",
        GAUGE,
        "Blocks in the index without a copy, before cached ones",
        one(lambda stats: stats.cache.blocks_hollow),
    ),
    MetricRow(
        "cache_blocks_published",
        COUNTER,
        "Blocks that became available to others",
        one(lambda stats: stats.cache.blocks_published),
    ),
    MetricRow(
        "cache_blocks_twinned",
        COUNTER,
        "Blocks that two requests computed at the same time",
        one(lambda stats: stats.cache.blocks_twinned),
    ),
    MetricRow(
        "cache_blocks_corrupt",
        COUNTER,
        "Blocks whose sums did not agree",
        one(lambda stats: stats.cache.blocks_corrupt),
    ),
    MetricRow(
        "cache_blocks_missing",
        COUNTER,
        "Blocks that were asked for and that a store did not have",
        one(lambda stats: stats.cache.blocks_missing),
    ),
    MetricRow(
        "cache_blocks_dropped_unsaved",
        COUNTER,
        "Blocks evicted before they were written down",
        one(lambda stats: stats.cache.blocks_dropped_unsaved),
    ),
    MetricRow(
        "cache_saves_refused",
        COUNTER,
        "Blocks that no lower tier had room for",
        one(lambda stats: stats.cache.saves_refused),
    ),
    MetricRow(
        "cache_saves_skipped",
        COUNTER,
        "Blocks not written into a store because too many were on their way",
        one(lambda stats: stats.cache.saves_skipped),
    ),
    MetricRow(
        "cache_blocks_let_go",
        COUNTER,
        "Blocks that their request did not expect to be used again",
        one(lambda stats: stats.cache.blocks_let_go),
    ),
    MetricRow(
        "cache_hints_refused",
        COUNTER,
        "Blocks whose priority was not raised because their tenant had its share",
        one(lambda stats: stats.cache.hints_refused),
    ),
    # The cache: copies.
    MetricRow(
        "cache_operations_started",
        COUNTER,
        "Copies that were begun",
        one(lambda stats: stats.cache.operations_started),
    ),
    MetricRow(
        "cache_operations_ended",
        COUNTER,
        "Copies by how they ended",
        by_name(lambda stats: stats.cache.operations_ended),
        ("outcome",),
    ),
    MetricRow(
        "cache_operations_running",
        GAUGE,
        "Copies under way",
        one(lambda stats: stats.cache.operations_running),
    ),
    MetricRow(
        "cache_operations_ending",
        GAUGE,
        "Copies given up whose slots may still be written to",
        one(lambda stats: stats.cache.operations_ending),
    ),
    MetricRow(
        "cache_reports_late",
        COUNTER,
        "Reports of ranks on copies that had ended",
        one(lambda stats: stats.cache.reports_late),
    ),
    MetricRow(
        "cache_reports_lost",
        COUNTER,
        "Reports of ranks that never came",
        one(lambda stats: stats.cache.reports_lost),
    ),
    # What decides between loading and computing; absent while nothing was measured.
    MetricRow(
        "prefill_tokens_per_second",
        GAUGE,
        "Moving median of the speeds that the engine reported",
        one(lambda stats: stats.cache.prefill_tokens_per_s),
    ),
    MetricRow(
        "hop_tokens_per_second",
        GAUGE,
        "Moving median of a hop",
        by_hop(lambda hop: hop.tokens_per_s),
        _HOP,
    ),
    MetricRow(
        "hop_bytes_per_second",
        GAUGE,
        "The same in bytes, on each rank",
        by_hop(lambda hop: hop.bytes_per_s),
        _HOP,
    ),
    MetricRow(
        "hop_blocks_queued",
        GAUGE,
        "Blocks asked for that have not arrived",
        by_hop(lambda hop: hop.blocks_queued),
        _HOP,
    ),
    MetricRow(
        "hop_blocks_copied",
        COUNTER,
        "Blocks that have arrived",
        by_hop(lambda hop: hop.blocks_copied),
        _HOP,
    ),
    MetricRow(
        "hop_bytes_copied",
        COUNTER,
        "Their bytes, on each rank",
        by_hop(lambda hop: hop.bytes_copied),
        _HOP,
    ),
    # Tiers.
    MetricRow("tier_on", GAUGE, "1 if the tier is used", by_tier(lambda tier: tier.on), _TIER),
    MetricRow("tier_slots", GAUGE, "Slots of a tier", by_tier(lambda tier: tier.slots), _TIER),
    MetricRow("tier_free", GAUGE, "Slots without a block", by_tier(lambda tier: tier.free), _TIER),
    MetricRow(
        "tier_filling",
        GAUGE,
        "Slots whose block is being written",
        by_tier(lambda tier: tier.filling),
        _TIER,
    ),
    MetricRow(
        "tier_ready", GAUGE, "Blocks that can be found", by_tier(lambda tier: tier.ready), _TIER
    ),
    MetricRow(
        "tier_leaving",
        GAUGE,
        "Slots whose block is being written down before eviction",
        by_tier(lambda tier: tier.leaving),
        _TIER,
    ),
    MetricRow(
        "tier_doomed",
        GAUGE,
        "Slots that cannot be reused yet: something may still write to them",
        by_tier(lambda tier: tier.doomed),
        _TIER,
    ),
    MetricRow(
        "tier_closing",
        GAUGE,
        "Slots in use that a smaller tier has too many",
        by_tier(lambda tier: tier.closing),
        _TIER,
    ),
    MetricRow("tier_held", GAUGE, "Blocks in use", by_tier(lambda tier: tier.held), _TIER),
    MetricRow(
        "tier_tokens_cached",
        COUNTER,
        "Tokens found here",
        by_tier(lambda tier: tier.tokens_cached),
        _TIER,
    ),
    MetricRow(
        "tier_blocks_evicted",
        COUNTER,
        "Copies that made room",
        by_tier(lambda tier: tier.blocks_evicted),
        _TIER,
    ),
    MetricRow(
        "tier_blocks_refused",
        COUNTER,
        "Blocks not written here, for what lies here is worth more",
        by_tier(lambda tier: tier.blocks_refused),
        _TIER,
    ),
    MetricRow(
        "tier_saves_waiting",
        GAUGE,
        "Blocks that the tier missed while it was off, and that are written when it is on",
        by_tier(lambda tier: tier.saves_waiting),
        _TIER,
    ),
    MetricRow(
        "tier_saves_dropped",
        COUNTER,
        "Blocks that left host memory before they could be written here",
        by_tier(lambda tier: tier.saves_dropped),
        _TIER,
    ),
    MetricRow(
        "tier_ready_seconds",
        GAUGE,
        "Until its memory could be used, when it was opened, on the slowest rank",
        by_tier(lambda tier: tier.ready_s),
        _TIER,
    ),
    MetricRow(
        "store_recovered",
        GAUGE,
        "Share of what was there at the start of the store that is known",
        by_store(lambda store: store.recovered),
        _TIER,
    ),
    MetricRow(
        "store_blocks",
        GAUGE,
        "Blocks in the tier, of all engines, on each rank",
        by_store(lambda store: store.blocks),
        _TIER,
    ),
    MetricRow(
        "store_block_bytes",
        GAUGE,
        "Bytes of those blocks, as they are stored",
        by_store(lambda store: store.block_bytes),
        _TIER,
    ),
    MetricRow(
        "store_capacity_bytes",
        GAUGE,
        "Room of the tier",
        by_store(lambda store: store.capacity_bytes),
        _TIER,
    ),
    MetricRow(
        "store_saves_dropped",
        COUNTER,
        "Blocks not written because the tier was too slow",
        by_store(lambda store: store.saves_dropped),
        _TIER,
    ),
    MetricRow(
        "store_blocks_corrupt",
        COUNTER,
        "Blocks that failed their sums when they were read",
        by_store(lambda store: store.blocks_corrupt),
        _TIER,
    ),
    MetricRow(
        "store_blocks_reclaimed",
        COUNTER,
        "Blocks given up to make room",
        by_store(lambda store: store.blocks_reclaimed),
        _TIER,
    ),
    MetricRow(
        "store_generations_lost",
        COUNTER,
        "Times that the record of resets was lost or out of date, which voids all blocks",
        by_store(lambda store: store.generations_lost),
        _TIER,
    ),
    MetricRow(
        "store_reset_confirmed",
        GAUGE,
        "0 while a reset of this engine would be lost with its process",
        by_store(lambda store: int(store.reset_confirmed)),
        _TIER,
    ),
)
"""What every instance reports."""


def http_responses(name: str, registry: CollectorRegistry) -> Counter:
    """Counts responses by the endpoint that made them, and their status."""
    about = "HTTP responses; 499: the client left before"
    return Counter(name, about, ["endpoint", "status"], registry=registry)


def add_build_info(registry: CollectorRegistry) -> None:
    """Says which version runs."""
    info = Gauge(
        "penstock_build_info", "1, with the version", ["version", "python"], registry=registry
    )
    info.labels(__version__, platform.python_version()).set(1)


class ServerMetrics:
    """What a server has seen itself, and the page of all metrics."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """The last requests, for those who look at the server; on no page of metrics."""
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
        self.request_s = Histogram(
            "penstock_request_seconds",
            "From the request to the end of its answers, of those that were answered",
            buckets=WHOLE_S,
            registry=self._registry,
        )
        phases = Histogram(
            "penstock_phase_seconds",
            "What answered requests spent their time on",
            ["phase"],
            buckets=PHASE_S,
            registry=self._registry,
        )
        self._phases = [phases.labels(name) for name in PHASES]
        self.http_responses = http_responses("penstock_http_responses", self._registry)
        add_build_info(self._registry)
        self.prompt_tokens = Counter(
            "penstock_prompt_tokens", "Tokens of prompts", registry=self._registry
        )
        self.generated_tokens = Counter(
            "penstock_generated_tokens", "Tokens of answers", registry=self._registry
        )

    def count_response(self, endpoint: str, status: int) -> None:
        """An HTTP response has ended."""
        self.http_responses.labels(endpoint, str(status)).inc()

    def answered(self, spent_s: Sequence[float], took_s: float) -> None:
        """A request was answered."""
        self.request_s.observe(took_s)
        for phase, seconds in zip(self._phases, spent_s, strict=False):
            phase.observe(seconds)

    def text(self, instances: Sequence[InstanceStatistics], *, retries: int) -> bytes:
        """All metrics in Prometheus' text format."""
        behind = CollectorRegistry()
        behind.register(_Instances(instances, retries))
        return generate_latest(self._registry) + generate_latest(behind)


class _Instances:
    """What the instances reported, as a collector."""

    def __init__(self, instances: Sequence[InstanceStatistics], retries: int) -> None:
        self._instances = instances
        self._retries = retries

    def collect(self) -> Iterator[Metric]:
        retries = COUNTER("penstock_retries", "Requests sent to another instance")
        retries.add_metric([], self._retries)
        yield retries
        for row in METRICS:
            family = row.kind(f"penstock_{row.name}", row.about, labels=["instance", *row.labels])
            for stats in self._instances:
                for labels, value in row.read(stats):
                    # A rate that is not known is left out, not 0.
                    if value is not None:
                        family.add_metric([stats.instance, *labels], value)
            yield family
