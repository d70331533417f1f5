"""Every Prometheus metric of `penstock router`, which docs/metrics.md lists.

What the router counts itself is a field of `RouterMetrics`; what it knows of its servers now is
read when the page is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from penstock_serve.observe.metrics import FIRST_TOKEN_S, add_build_info, http_responses
from penstock_serve.observe.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric


class ServerNumbers(NamedTuple):
    """What the router knows of a server now."""

    name: str
    role: str
    is_up: bool
    load: int


class RouterMetrics:
    """What a router has seen, and the page of all its metrics."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """The last requests, for those who look at the router; on no page of metrics."""
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "penstock_router_requests",
            "Requests sent to servers, by how they ended",
            ["server", "role", "outcome"],
            registry=self._registry,
        )
        self.prompts = Counter(
            "penstock_router_prompts",
            "Answers that began, by the role that computed the prompt",
            ["by"],
            registry=self._registry,
        )
        self.retries = Counter(
            "penstock_router_retries",
            "Requests sent to another server of a role, since one failed",
            ["role"],
            registry=self._registry,
        )
        self.first_token_s = Histogram(
            "penstock_router_first_token_seconds",
            "From the request to its first event, or to the whole answer",
            buckets=FIRST_TOKEN_S,
            registry=self._registry,
        )

        self.http_responses = http_responses("penstock_router_http_responses", self._registry)
        add_build_info(self._registry)

    def count_response(self, endpoint: str, status: int) -> None:
        """An HTTP response has ended."""
        self.http_responses.labels(endpoint, str(status)).inc()

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

    def text(self, servers: Sequence[ServerNumbers]) -> bytes:
        """All metrics in Prometheus' text format."""
        now = CollectorRegistry()
        now.register(_Servers(servers))
        return generate_latest(self._registry) + generate_latest(now)


def _values(counter: Counter, label: str) -> dict[str, int]:
    """The values of a counter with one label."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return {
        sample.labels[label]: int(sample.value)
        for sample in samples
        if sample.name.endswith("_total")
    }


class _Servers:
    """What is known of the servers, as a collector."""

    def __init__(self, servers: Sequence[ServerNumbers]) -> None:
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        labels = ["server", "role"]
        up = GaugeMetricFamily("penstock_router_server_up", "1 if it is used", labels=labels)
        now = GaugeMetricFamily("penstock_router_requests_now", "Requests in hand", labels=labels)
        for each in self._servers:
            up.add_metric([each.name, each.role], int(each.is_up))
            now.add_metric([each.name, each.role], each.load)
        yield up
        yield now
