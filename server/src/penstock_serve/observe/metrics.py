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
from collections import Counter as Counted
from functools import partial
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


class MetricSource(NamedTuple):
    """Values in the statistics, one or several; `rows` makes metrics of their fields."""

    prefix: str
    labels: tuple[str, ...]
    values: Callable[[InstanceStatistics], Iterable[tuple[tuple[str, ...], object]]]
    """Each with its values of the labels."""

    def rows(self, **given: str | tuple[str, str]) -> Iterator[MetricRow]:
        """A metric of each name, with its text, and its field where that is called otherwise.

        Counters have their `_total`.
        """
        for full, about in given.items():
            name = full.removesuffix("_total")
            text, field = (about, name) if isinstance(about, str) else about
            kind = GAUGE if name == full else COUNTER
            read = partial(self._read, attrgetter(field))
            yield MetricRow(f"{self.prefix}{name}", kind, text, read, self.labels)

    def _read(self, field: Callable[[object], float], stats: InstanceStatistics) -> Samples:
        return [(labels, field(value)) for labels, value in self.values(stats)]


INSTANCE = MetricSource("", (), lambda stats: [((), stats)])
CACHE = MetricSource("cache_", (), lambda stats: [((), stats.cache)])
HOPS = MetricSource(
    "hop_",
    ("source", "target"),
    lambda stats: [((hop.source, hop.target), hop) for hop in stats.cache.hops],
)
TIERS = MetricSource(
    "tier_", ("tier",), lambda stats: [((tier.name,), tier) for tier in stats.cache.tiers]
)
STORES = MetricSource(
    "store_",
    ("tier",),
    lambda stats: [((each.name,), each.store) for each in stats.cache.tiers if each.store],
)
"""Tiers that a store process serves."""


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
    *INSTANCE.rows(
        healthy=("0 if something is wrong: a tier or rank is off, see /cache", "health.ok"),
        preemptions_total="Answers that gave their blocks back",
        places="Requests that a step has room for",
        step_seconds_total="Time in which steps were computed, or prepared one after the other",
        place_seconds_total="That time, by the number of their requests",
    ),
    counts(COUNTER, "handoffs", "Handoffs by how they ended", "outcome", "handoffs"),
    *INSTANCE.rows(
        handed_bytes_total="Bytes of KV that were handed over, or taken in",
        handed_seconds_total="Time of handoffs that were delivered",
        handed_parts_verified_total="Parts of handoffs whose checksums agreed",
        landing_bytes="Memory of landing areas for handoffs, with retired ones",
    ),
    # The cache: requests.
    *CACHE.rows(
        requests_total="Requests that asked for their prefix",
        requests_refused_total="Requests for which there was no room",
    ),
    counts(
        COUNTER,
        "cache_misses",
        "Requests by why no more was found, see the reasons of misses",
        "why",
        "cache.misses",
    ),
    *CACHE.rows(
        tokens_asked_total="Prompt tokens that were asked for",
        tokens_not_delivered_total="Tokens found whose blocks could not be brought to the device",
        tokens_computed_instead_total="Tokens found, but quicker to compute than to load",
        leases="Requests that hold blocks",
        leases_lost_total="Requests whose blocks were lost while they held them",
        pins="Prefixes that are pinned",
    ),
    # The cache: blocks.
    *CACHE.rows(
        blocks_known="Blocks in the index",
        blocks_hollow="Blocks in the index without a copy, before cached ones",
        blocks_published_total="Blocks that became available to others",
        blocks_twinned_total="Blocks that two requests computed at the same time",
        blocks_corrupt_total="Blocks whose sums did not agree",
        blocks_missing_total="Blocks that were asked for and that a store did not have",
        blocks_dropped_unsaved_total="Blocks evicted before they were written down",
        saves_refused_total="Blocks that no lower tier had room for",
        saves_skipped_total="Blocks not written into a store because too many were on their way",
        blocks_let_go_total="Blocks that their request did not expect to be used again",
        hints_refused_total="Blocks whose priority was not raised because their tenant had its "
        "share",
    ),
    # The cache: copies.
    *CACHE.rows(
        operations_started_total="Copies that were begun",
    ),
    counts(
        COUNTER,
        "cache_operations_ended",
        "Copies by how they ended",
        "outcome",
        "cache.operations_ended",
    ),
    *CACHE.rows(
        operations_running="Copies under way",
        operations_ending="Copies given up whose slots may still be written to",
        reports_late_total="Reports of ranks on copies that had ended",
        reports_lost_total="Reports of ranks that never came",
    ),
    # What decides between loading and computing; absent while nothing was measured.
    *INSTANCE.rows(
        prefill_tokens_per_second=(
            "Moving median of the speeds that the engine reported; absent without recent samples",
            "cache.prefill_tokens_per_s",
        ),
    ),
    *HOPS.rows(
        tokens_per_second=("Moving median of a hop; absent without recent samples", "tokens_per_s"),
        bytes_per_second=("The same in bytes, on each rank", "bytes_per_s"),
        blocks_queued="Blocks asked for that have not arrived",
        blocks_copied_total="Blocks that have arrived",
        bytes_copied_total="Their bytes, on each rank",
    ),
    # Tiers.
    *TIERS.rows(
        on="1 if the tier is used",
        slots="Slots of a tier",
        free="Slots without a block",
        filling="Slots whose block is being written",
        ready="Blocks that can be found",
        leaving="Slots whose block is being written down before eviction",
        doomed="Slots that cannot be reused yet: something may still write to them",
        held="Blocks in use",
        tokens_cached_total="Tokens found here",
        blocks_evicted_total="Copies that made room",
        blocks_refused_total="Blocks not written here, for what lies here is worth more",
        saves_waiting="Blocks that the tier missed while it was off, and that are written "
        "when it is on",
        saves_dropped_total="Blocks that left host memory before they could be written here",
        ready_seconds=(
            "Until its memory could be used, when it was opened, on the slowest rank",
            "ready_s",
        ),
    ),
    *STORES.rows(
        recovered="Share of what was there at the start of the store that is known",
        blocks="Blocks in the tier, of all engines that share it, on each rank",
        block_bytes="Bytes of those blocks, as they are stored",
        capacity_bytes="Room of the tier",
        saves_dropped_total="Blocks not written because the tier was too slow",
        blocks_corrupt_total="Blocks that failed their sums when they were read",
        blocks_reclaimed_total="Blocks given up to make room",
        generations_lost_total="Times that the record of resets was lost or out of date, which "
        "voids all blocks",
        reset_confirmed="0 while a reset of this engine, not of others, would be lost with its "
        "process",
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
        self.role_changes = self._counter(
            "role_changes",
            "Changes of roles by load (serve.balance_s), by the new role and outcome: done, failed",
            *("role", "outcome"),
        )
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
    by_role = GAUGE("penstock_instances", "Instances that report, by role", labels=["role"])
    for role, count in Counted(stats.role for stats in instances).items():
        by_role.add_metric([role], count)
    yield by_role
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
