"""The router's benchmark: instances answer what they are asked, and every row is there."""

from __future__ import annotations

import pytest

from lab.bench.report import BenchReport
from lab.bench.router import run_router
from lab.bench.router_http import run_router_http


def test_decisions_requests_and_events_of_small_fleets_are_measured() -> None:
    report = BenchReport(version="0", command="lab bench router")
    run_router(report, engines=(1, 4), decisions=20, events=40)

    rows = {
        (row.params["instances"], row.params["pairs"], row.metric): row
        for row in report.document().rows
    }
    alone = {"decision", "request", "event", "memory"}
    assert {metric for count, pairs, metric in rows if count == 1} == alone
    assert {metric for count, pairs, metric in rows if count == 4 and not pairs} == alone
    assert {metric for count, pairs, metric in rows if pairs} == {"decision", "request"}
    assert all(row.median > 0 for row in rows.values())


@pytest.mark.long
def test_requests_streams_and_events_of_the_real_process_are_measured() -> None:
    report = BenchReport(version="0", command="lab bench router --http")
    run_router_http(report, seconds=1.0, rounds=1, instances=2)

    rows = {row.metric: row.median for row in report.document().rows}
    assert set(rows) == {"request", "stream", "models", "event"}
    assert all(each > 0 for each in rows.values())
