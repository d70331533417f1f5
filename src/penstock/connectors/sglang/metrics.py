"""What the linker counts: on SGLang's metrics page, with `--enable-metrics`, and in its log.

SGLang serves what all of its processes have counted. The one rule: names and meanings are those of
`connectors.base.statistics`, behind `sglang:penstock_`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.connectors.base.statistics import (
    BUCKETS_S,
    COUNTERS,
    GAUGES,
    TIMES,
    combined,
    reduced,
)
from penstock.connectors.sglang.versions import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import Counter, Gauge, Histogram

    from penstock.connectors.base.statistics import Counters, Taken

PREFIX = "sglang:penstock_"
PUBLISH_S = 1.0
"""How often numbers change on the page at most: a step of SGLang takes some milliseconds."""
LOG_S = 60.0
"""How often what was counted is logged at most."""


class LinkerReport:
    """The counts of one rank, as others see them."""

    def __init__(self, counters: Counters, *, rank: int, page: bool) -> None:
        """Shows what is counted from now on.

        Args:
            counters: Nobody else takes from them.
            rank: Which rank it is, a label on the page.
            page: Whether SGLang has a metrics page.
        """
        self._counters = counters
        self._rank = str(rank)
        self._metrics = _make_metrics() if page else {}
        self._published = self._logged = time.monotonic()
        self._unlogged: Taken = {}

    def show(self) -> None:
        """Publishes and logs what was counted, if it is time; SGLang comes by in every step."""
        now = time.monotonic()
        if now - self._published < PUBLISH_S:
            return
        self._published = now
        if taken := self._counters.take():
            self._publish(taken)
            self._unlogged = combined(self._unlogged, taken)
        if self._unlogged and now - self._logged >= LOG_S:
            said = sorted(reduced(self._unlogged).items())
            self._logged, self._unlogged = now, {}
            log.info("rank=%s %s", self._rank, " ".join(f"{name}={value}" for name, value in said))

    def _publish(self, taken: Mapping[str, int | list[float]]) -> None:
        from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415 - as below

        for name, value in taken.items():
            metric = self._metrics.get(name)
            mine = metric.labels(self._rank) if metric is not None else None
            if isinstance(mine, Histogram) and isinstance(value, list):
                for seconds in value:
                    mine.observe(seconds)
            elif isinstance(mine, Counter) and isinstance(value, int):
                mine.inc(value)
            elif isinstance(mine, Gauge) and isinstance(value, int):
                mine.set(value)


def _make_metrics() -> dict[str, Counter | Gauge | Histogram]:
    # SGLang has set up by now where its processes keep what they count, and must before this.
    from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415

    label = ["tp_rank"]
    return {
        **{name: Counter(PREFIX + name, said, label) for name, said in COUNTERS.items()},
        **{
            name: Gauge(PREFIX + name, said, label, multiprocess_mode="mostrecent")
            for name, said in GAUGES.items()
        },
        **{
            name: Histogram(PREFIX + name, said, label, buckets=BUCKETS_S)
            for name, said in TIMES.items()
        },
    }
