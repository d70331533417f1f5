"""Spans for OpenTelemetry, as a collector receives them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock_serve.server.access_log import AccessLog, Tracing, name_request, note_tokens
from tests.serve.conftest import SOON_S, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.types import Receive, Scope, Send

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TIMINGS = {"queued": 2.0, "loading": 0.0, "handed_over": 0.0, "prefill": 30.5, "decode": 7.5}


class Collector:
    """Takes spans over HTTP, as OTLP says."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.services: set[str] = set()
        self.arrived = threading.Event()

    def take(self, body: bytes) -> None:
        for of_service in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                each.value.string_value
                for each in of_service.resource.attributes
                if each.key == "service.name"
            }
            for of_scope in of_service.scope_spans:
                self.spans |= {span.name: span for span in of_scope.spans}
        self.arrived.set()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving_spans = threading.Thread(target=server.serve_forever)
        serving_spans.start()
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}"
        )
        try:
            yield found
        finally:
            server.shutdown()
            serving_spans.join(SOON_S)


@contextmanager
def tracing() -> Iterator[Tracing]:
    found = Tracing()
    try:
        yield found
    finally:
        found.close()


def ask(path: str, *, status: int = 200, method: str = "POST", **headers: str) -> None:
    """Sends a request through the access log; the spans are with the collector afterwards."""

    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        scope["endpoint"] = answer
        name_request(scope, "cmpl-1")
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        note_tokens(scope, prompt=9, cached=[4], completion=3, timings_ms=TIMINGS)

    async def ignore(_message: object) -> None:
        pass

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    with tracing() as found:
        asyncio.run(AccessLog(answer, lambda *_: None, found)(scope, ignore, ignore))  # type: ignore[arg-type]


def test_a_request_is_a_span_with_its_phases_in_the_trace_of_its_client(
    collector: Collector,
) -> None:
    ask("/v1/completions", traceparent=f"00-{TRACE}-{PARENT}-01")

    whole = collector.spans.pop("POST /v1/completions")
    assert whole.trace_id.hex() == TRACE
    assert whole.parent_span_id.hex() == PARENT
    numbers = {each.key: each.value.int_value for each in whole.attributes}
    assert numbers["gen_ai.usage.input_tokens"] == 9
    assert numbers["gen_ai.usage.cache_read.input_tokens"] == 4
    assert numbers["gen_ai.usage.output_tokens"] == 3
    assert numbers["http.response.status_code"] == 200
    # Phases that took no time are left out.
    assert list(collector.spans) == ["queued", "prefill", "decode"]
    assert {span.parent_span_id for span in collector.spans.values()} == {whole.span_id}
    ends = [span.end_time_unix_nano for span in collector.spans.values()]
    assert all(end <= whole.end_time_unix_nano for end in ends)
    assert ends == sorted(ends)
    assert collector.services == {"penstock"}


def test_an_error_of_ours_is_one_and_a_strange_parent_is_none(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")

    ask("/v1/chat/completions", status=503, traceparent="00-ff-\xff-zz")

    whole = collector.spans["POST /v1/chat/completions"]
    assert not whole.parent_span_id
    assert whole.status.code == whole.status.STATUS_CODE_ERROR
    assert collector.services == {"chat"}


def test_probes_are_no_spans(collector: Collector) -> None:
    ask("/health", method="GET")
    ask("/v1/models", method="GET")

    assert collector.spans == {}


def test_a_server_whose_collector_is_away_says_so_and_stops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("penstock_serve.server.access_log.CLOSE_S", 0.05)

    ask("/v1/completions")

    assert "spans not sent: the collector took none within 0.05 s" in caplog.text


def test_without_the_package_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from penstock.errors import UnavailableError\n"
        "from penstock_serve.server.access_log import Tracing\n"
        "try: Tracing()\n"
        "except UnavailableError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=True,
        env=dict(os.environ),
    )

    assert done.stdout.startswith(
        "serve.tracing is true and OpenTelemetry is not installed: "
        'pip install ".[cli]" "./server[otel]" in a clone of the repository'
    )


def test_a_server_sends_the_spans_of_its_requests(
    collector: Collector, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    file = tmp_path / "penstock.toml"
    file.write_text(
        'version = 1\nmodel.name = "small-model"\ncache.blocks = 64\nserve.tracing = true\n'
    )
    with serving(model_folder, "--config", str(file)) as running:
        answer = running.complete([1, 2, 3])
        assert collector.arrived.wait(SOON_S)

    whole = collector.spans["POST /v1/completions"]
    texts = {each.key: each.value.string_value for each in whole.attributes}
    assert texts["gen_ai.response.id"] == answer["id"]
    assert {"prefill", "decode"} <= collector.spans.keys()
