"""The connector's counts as vLLM's logger and its /metrics page want them."""

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from penstock.connectors.vllm.statistics import (
    BUCKETS_S,
    COUNTERS,
    GAUGES,
    PREFIX,
    TIMES,
    Taken,
    combined,
    reduced,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class PenstockStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted in some steps."""

    data: Taken = field(default_factory=dict)

    def reset(self) -> None:
        """Forgets it."""
        self.data = {}

    def aggregate(self, other: PenstockStats) -> PenstockStats:
        """Two of them as one."""
        return PenstockStats(data=combined(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return reduced(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


class PenstockMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters, gauges and histograms on vLLM's own page, one of each for every engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics: dict[str, dict[int, Any]] = {}
        self._add(self._counter_cls, COUNTERS)
        # Several API servers share one page, and any of them may be the one that was told last.
        self._add(self._gauge_cls, GAUGES, multiprocess_mode="mostrecent")
        self._add(self._histogram_cls, TIMES, buckets=[*BUCKETS_S])

    def _add(self, kind: Any, names: Mapping[str, str], **how: Any) -> None:
        for name, documentation in names.items():
            metric = kind(
                name=f"{PREFIX}{name}",
                documentation=documentation,
                labelnames=self._labelnames,
                **how,
            )
            self._metrics[name] = {
                engine: metric.labels(*values)
                for engine, values in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what was counted."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name in COUNTERS:
                metric.inc(value)
            elif name in GAUGES:
                metric.set(value)
            else:
                for each in value:
                    metric.observe(each)
