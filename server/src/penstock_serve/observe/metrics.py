"""Every Prometheus metric of `penstock serve` and `penstock router`.

| what is measured            | is counted in                        | becomes a metric in      |
|-----------------------------|--------------------------------------|--------------------------|
| what an instance's cache did | `machine/books.py`, `statistics.py`  | a row of `METRICS`       |
| an engine's requests         | `observe/live.py`                    | a row of `METRICS`       |
| what the server saw itself   | `ServerMetrics`, where it passes     | a field of `ServerMetrics` |
| what the router saw          | `RouterMetrics`, where it passes     | a field of `RouterMetrics` |

Instances report `InstanceStatistics`, which `/cache` shows as well, so both pages agree.
`tests/observe/test_metrics.py` requires that every number of the statistics has a row here and
that every metric is on the page `docs/metrics.md`, which is made from the texts here.
"""

from __future__ import annotations

import platform
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from penstock import __version__
from penstock_serve.observe.live import PHASES, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from penstock_serve.observe.live import InstanceStatistics, RoutedServer

COUNTER = CounterMetricFamily
"""Only grows; its name on the page ends with `_total`."""
GAUGE = GaugeMetricFamily

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PHASE_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

Samples: TypeAlias = "Iterable[tuple[tuple[str, ...], float | None]]"
"""Values of further labels, and the number; `None` where nothing was measured."""
Kind: TypeAlias = "type[CounterMetricFamily | GaugeMetricFamily]"


class MetricRow(NamedTuple):
    """A metric of each instance; `instance` is its first label."""

    name: str
    """Without `penstock_` before it and `_total` behind it."""
    kind: Kind
    about: str
    read: Callable[[InstanceStatistics], Samples]
    labels: tuple[str, ...] = ()


def of_instance(kind: Kind, name: str, about: str, field: str = "") -> MetricRow:
    """A number of `InstanceStatistics`; `field` is given where it is not called as the metric."""
    read = attrgetter(field or name)
    return MetricRow(name, kind, about, lambda stats: [((), read(stats))])


def of_cache(kind: Kind, name: str, about: str) -> MetricRow:
    """A number of `CacheStatistics`."""
    return of_instance(kind, f"cache_{name}", about, f"cache.{name}")


def of_tier(kind: Kind, name: str, about: str, field: str = "") -> MetricRow:
    """A number of each tier."""
    read, labels = attrgetter(field or name), ("tier",)
    return MetricRow(
        f"tier_{name}",
        kind,
        about,
        lambda stats: [((tier.name,), read(tier)) for tier in stats.cache.tiers],
        labels,
    )


def of_store(kind: Kind, name: str, about: str) -> MetricRow:
    """A number of each tier that a store process serves."""

    def samples(stats: InstanceStatistics) -> Samples:
        return [
            ((tier.name,), getattr(tier.store, name))
            for tier in stats.cache.tiers
            if tier.store is not None
        ]

    return MetricRow(f"store_{name}", kind, about, samples, ("tier",))


def of_hop(kind: Kind, name: str, about: str, field: str = "") -> MetricRow:
    """A number of each pair of tiers between which blocks are copied."""
    read = attrgetter(field or name)
    return MetricRow(
        f"hop_{name}",
        kind,
        about,
        lambda stats: [((hop.source, hop.target), read(hop)) for hop in stats.cache.hops],
        ("source", "target"),
    )


def counts(kind: Kind, name: str, about: str, label: str, field: str) -> MetricRow:
    """Numbers by name."""
    read = attrgetter(field)
    return MetricRow(
        name, kind, about, lambda stats: [((key,), n) for key, n in read(stats).items()], (label,)
    )


STATES = ("running", "paused", "asleep", "without weights")
"""Of an instance."""
PHASES_NOW = ("waiting", "loading", "claiming", "running")


def _phases(stats: InstanceStatistics) -> Samples:
    return [((name,), getattr(stats, name)) for name in PHASES_NOW]


def _states(stats: InstanceStatistics) -> Samples:
    return [((name,), int(stats.state == name)) for name in STATES]


METRICS = (
    MetricRow("requests_now", GAUGE, "Answers by phase", _phases, ("phase",)),
    MetricRow("state", GAUGE, "1 for what an instance does now", _states, ("state",)),
    of_instance(
        GAUGE, "healthy", "0 if something is wrong: a tier or rank is off, see /cache", "health.ok"
    ),
    of_instance(COUNTER, "preemptions", "Answers that gave their blocks back"),
    counts(COUNTER, "handoffs", "Handoffs by how they ended", "outcome", "handoffs"),
    of_instance(COUNTER, "handed_bytes", "Bytes of KV that were handed over, or taken in"),
    of_instance(COUNTER, "handed_seconds", "Time of handoffs that were delivered"),
    of_instance(COUNTER, "handed_parts_verified", "Parts of handoffs whose checksums agreed"),
    of_instance(GAUGE, "landing_bytes", "Memory of landing areas for handoffs, with retired ones"),
    # The cache: requests.
    of_cache(COUNTER, "requests", "Requests that asked for their prefix"),
    of_cache(COUNTER, "requests_refused", "Requests for which there was no room"),
    counts(
        COUNTER,
        "cache_misses",
        "Requests by why no more was found, see the reasons of misses",
        "why",
        "cache.misses",
    ),
    of_cache(COUNTER, "tokens_asked", "Prompt tokens that were asked for"),
    of_cache(
        COUNTER,
        "tokens_not_delivered",
        "Tokens found whose blocks could not be brought to the device",
    ),
    of_cache(
        COUNTER, "tokens_computed_instead", "Tokens found, but quicker to compute than to load"
    ),
    of_cache(GAUGE, "leases", "Requests that hold blocks"),
    of_cache(COUNTER, "leases_lost", "Requests whose blocks were lost while they held them"),
    of_cache(GAUGE, "pins", "Prefixes that are pinned"),
    # The cache: blocks.
    of_cache(GAUGE, "blocks_known", "Blocks in the index"),
    of_cache(GAUGE, "blocks_hollow", "Blocks in the index without a copy, before cached ones"),
    of_cache(COUNTER, "blocks_published", "Blocks that became available to others"),
    of_cache(COUNTER, "blocks_twinned", "Blocks that two requests computed at the same time"),
    of_cache(COUNTER, "blocks_corrupt", "Blocks whose sums did not agree"),
    of_cache(COUNTER, "blocks_missing", "Blocks that were asked for and that a store did not have"),
    of_cache(COUNTER, "blocks_dropped_unsaved", "Blocks evicted before they were written down"),
    of_cache(COUNTER, "saves_refused", "Blocks that no lower tier had room for"),
    of_cache(
        COUNTER,
        "saves_skipped",
        "Blocks not written into a store because too many were on their way",
    ),
    of_cache(COUNTER, "blocks_let_go", "Blocks that their request did not expect to be used again"),
    of_cache(
        COUNTER,
        "hints_refused",
        "Blocks whose priority was not raised because their tenant had its share",
    ),
    # The cache: copies.
    of_cache(COUNTER, "operations_started", "Copies that were begun"),
    counts(
        COUNTER,
        "cache_operations_ended",
        "Copies by how they ended",
        "outcome",
        "cache.operations_ended",
    ),
    of_cache(GAUGE, "operations_running", "Copies under way"),
    of_cache(GAUGE, "operations_ending", "Copies given up whose slots may still be written to"),
    of_cache(COUNTER, "reports_late", "Reports of ranks on copies that had ended"),
    of_cache(COUNTER, "reports_lost", "Reports of ranks that never came"),
    # What decides between loading and computing; absent while nothing was measured.
    of_instance(
        GAUGE,
        "prefill_tokens_per_second",
        "Moving median of the speeds that the engine reported; absent without recent samples",
        "cache.prefill_tokens_per_s",
    ),
    of_hop(
        GAUGE,
        "tokens_per_second",
        "Moving median of a hop; absent without recent samples",
        "tokens_per_s",
    ),
    of_hop(GAUGE, "bytes_per_second", "The same in bytes, on each rank", "bytes_per_s"),
    of_hop(GAUGE, "blocks_queued", "Blocks asked for that have not arrived"),
    of_hop(COUNTER, "blocks_copied", "Blocks that have arrived"),
    of_hop(COUNTER, "bytes_copied", "Their bytes, on each rank"),
    # Tiers.
    of_tier(GAUGE, "on", "1 if the tier is used"),
    of_tier(GAUGE, "slots", "Slots of a tier"),
    of_tier(GAUGE, "free", "Slots without a block"),
    of_tier(GAUGE, "filling", "Slots whose block is being written"),
    of_tier(GAUGE, "ready", "Blocks that can be found"),
    of_tier(GAUGE, "leaving", "Slots whose block is being written down before eviction"),
    of_tier(GAUGE, "doomed", "Slots that cannot be reused yet: something may still write to them"),
    of_tier(GAUGE, "held", "Blocks in use"),
    of_tier(COUNTER, "tokens_cached", "Tokens found here"),
    of_tier(COUNTER, "blocks_evicted", "Copies that made room"),
    of_tier(COUNTER, "blocks_refused", "Blocks not written here, for what lies here is worth more"),
    of_tier(
        GAUGE,
        "saves_waiting",
        "Blocks that the tier missed while it was off, and that are written when it is on",
    ),
    of_tier(
        COUNTER, "saves_dropped", "Blocks that left host memory before they could be written here"
    ),
    of_tier(
        GAUGE,
        "ready_seconds",
        "Until its memory could be used, when it was opened, on the slowest rank",
        "ready_s",
    ),
    of_store(GAUGE, "recovered", "Share of what was there at the start of the store that is known"),
    of_store(GAUGE, "blocks", "Blocks in the tier, of all engines that share it, on each rank"),
    of_store(GAUGE, "block_bytes", "Bytes of those blocks, as they are stored"),
    of_store(GAUGE, "capacity_bytes", "Room of the tier"),
    of_store(COUNTER, "saves_dropped", "Blocks not written because the tier was too slow"),
    of_store(COUNTER, "blocks_corrupt", "Blocks that failed their sums when they were read"),
    of_store(COUNTER, "blocks_reclaimed", "Blocks given up to make room"),
    of_store(
        COUNTER,
        "generations_lost",
        "Times that the record of resets was lost or out of date, which voids all blocks",
    ),
    of_store(
        GAUGE,
        "reset_confirmed",
        "0 while a reset of this engine, not of others, would be lost with its process",
    ),
)
"""What every instance reports."""


class PageMetrics:
    """What a process has seen itself, and the page of its metrics."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """The last requests, for those who look at the process; on no page of metrics."""
        self._registry = CollectorRegistry()

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"penstock_{name}", about, labels, registry=self._registry)

    def _histogram(
        self, name: str, about: str, buckets: Sequence[float], *labels: str
    ) -> Histogram:
        return Histogram(
            f"penstock_{name}", about, labels, buckets=buckets, registry=self._registry
        )

    def _add_responses(self, name: str) -> None:
        """Counts responses, and says which version makes them."""
        self.http_responses = self._counter(
            name,
            "HTTP responses by endpoint (none: no such path) and status (499: the client left "
            "before)",
            *("endpoint", "status"),
        )
        info = Gauge(
            "penstock_build_info",
            "1, with the versions of Penstock and Python",
            ["version", "python"],
            registry=self._registry,
        )
        info.labels(__version__, platform.python_version()).set(1)

    def count_response(self, endpoint: str, status: int) -> None:
        """An HTTP response has ended."""
        self.http_responses.labels(endpoint, str(status)).inc()

    def _text(self, now: Iterable[Metric]) -> bytes:
        """All metrics in Prometheus' text format, those that are known `now` behind the others."""
        behind = CollectorRegistry()
        behind.register(_Known(list(now)))
        return generate_latest(self._registry) + generate_latest(behind)


class _Known:
    """Metrics that are there already, as a collector."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


class ServerMetrics(PageMetrics):
    """What a server has seen itself, and the page of all metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self._counter(
            "requests", "Requests by outcome: answered, aborted, refused, failed", "outcome"
        )
        self.first_token_s = self._histogram(
            "first_token_seconds",
            "Time to first token (TTFT): from the request to its first text",
            FIRST_TOKEN_S,
        )
        self.between_tokens_s = self._histogram(
            "between_tokens_seconds",
            "Inter-token latency (ITL): from one piece of text to the next",
            BETWEEN_TOKENS_S,
        )
        self.request_s = self._histogram(
            "request_seconds",
            "From the request to the end of its answers, of those that were answered",
            WHOLE_S,
        )
        phases = self._histogram(
            "phase_seconds",
            "What answered requests spent their time on, by phase as in timings_ms",
            PHASE_S,
            "phase",
        )
        self._phases = [phases.labels(name) for name in PHASES]
        self._add_responses("http_responses")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self.generated_tokens = self._counter("generated_tokens", "Tokens of answers")

    def answered(self, spent_s: Sequence[float], took_s: float) -> None:
        """A request was answered."""
        self.request_s.observe(took_s)
        for phase, seconds in zip(self._phases, spent_s, strict=False):
            phase.observe(seconds)

    def text(self, instances: Sequence[InstanceStatistics], *, retries: int) -> bytes:
        """All metrics in Prometheus' text format."""
        return self._text(_of_instances(instances, retries))


def _of_instances(instances: Sequence[InstanceStatistics], retries: int) -> Iterator[Metric]:
    """What the instances reported."""
    sent_again = COUNTER("penstock_retries", "Requests sent to another instance")
    sent_again.add_metric([], retries)
    yield sent_again
    for row in METRICS:
        family = row.kind(f"penstock_{row.name}", row.about, labels=["instance", *row.labels])
        for stats in instances:
            for labels, value in row.read(stats):
                # A rate that is not known is left out, not 0.
                if value is not None:
                    family.add_metric([stats.instance, *labels], value)
        yield family


class RouterMetrics(PageMetrics):
    """What a router has seen, and the page of all its metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self._counter(
            "router_requests",
            "Requests sent to servers by outcome. prefill: computed, refused, failed, cancelled "
            "(not needed any more); decode: answered, refused, failed, "
            "broken (in a stream), aborted",
            *("server", "role", "outcome"),
        )
        self.prompts = self._counter(
            "router_prompts",
            "Answers that began, without refused requests, by the role asked to compute the prompt",
            "by",
        )
        self.retries = self._counter(
            "router_retries", "Requests sent to another server of a role, since one failed", "role"
        )
        self.first_token_s = self._histogram(
            "router_first_token_seconds",
            "From the request to its first event, or to the whole answer, if it was not refused",
            FIRST_TOKEN_S,
        )
        self._add_responses("router_http_responses")

    def count(self, server: str, role: str, outcome: str) -> None:
        """A request to a server has ended."""
        self.requests.labels(server, role, outcome).inc()

    @property
    def prompts_by_role(self) -> dict[str, int]:
        """Answers that began, by the role that computed the prompt."""
        return _values(self.prompts, "by")

    @property
    def retry_count(self) -> int:
        """Requests that were sent to another server of a role."""
        return sum(_values(self.retries, "role").values())

    def text(self, servers: Sequence[RoutedServer]) -> bytes:
        """All metrics in Prometheus' text format."""
        return self._text(_of_servers(servers))


def _of_servers(servers: Sequence[RoutedServer]) -> Iterator[Metric]:
    """What is known of the servers."""
    labels = ["server", "role"]
    up = GAUGE("penstock_router_server_up", "1 if it is used", labels=labels)
    now = GAUGE("penstock_router_requests_now", "Requests in hand", labels=labels)
    for each in servers:
        up.add_metric([each.name, each.role], int(each.up))
        now.add_metric([each.name, each.role], each.load)
    yield up
    yield now


def _values(counter: Counter, label: str) -> dict[str, int]:
    """The values of a counter with one label."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return {
        sample.labels[label]: int(sample.value)
        for sample in samples
        if sample.name.endswith("_total")
    }
