"""Spans of requests for OpenTelemetry: one for each request, with a child for each phase.

    POST /v1/chat/completions      as the client's `traceparent` says, or the root of a trace
    ├── queued
    ├── loading                    blocks that were cached below the device
    ├── handed_over
    ├── prefill
    └── decode

Spans are made when a request has ended, from times that were measured anyway, and sent by a thread
of OpenTelemetry in the server's process; engines do nothing. Where they go is said by its standard
variables `OTEL_*`.

The one rule: spans hold numbers, never what was asked or answered. Those that nobody takes are
dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError, server_install_hint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.trace import Span
    from starlette.types import Scope

    from penstock_serve.server.access_log import RequestLog

logger = logging.getLogger("penstock.serve.tracing")

CLOSE_S = 5.0
"""How long the last spans may take to be sent when the server stops."""
CONTEXT_HEADERS = (b"traceparent", b"tracestate")
TRACED = "/v1/"
"""The paths of requests for text; nobody wants to see probes."""
ERROR_MIN = 500
_NS = 1_000_000_000
_PHASE = "_ms"
"""How the access log's names of phases end."""


class Tracing:
    """Makes spans, and sends them."""

    def __init__(self) -> None:
        """Reads the environment.

        Raises `UnavailableError`: OpenTelemetry is not installed.
        """
        try:
            # Only with `serve.tracing`: an extra, which takes a while to import.
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
            from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context  # noqa: PLC0415
            from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
                TraceContextTextMapPropagator,
            )
        except ImportError as error:
            raise UnavailableError(
                "serve.tracing is true and OpenTelemetry is not installed: "
                f"{server_install_hint('otel')} ({error})"
            ) from error
        # `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` have precedence.
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = Resource.create({"service.name": "penstock"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("penstock")
        self._extract = TraceContextTextMapPropagator().extract
        self._within = set_span_in_context
        self._server, self._error = SpanKind.SERVER, StatusCode.ERROR

    def record(self, scope: Scope, entry: RequestLog, took_s: float) -> None:
        """A request has ended now."""
        if not scope["path"].startswith(TRACED) or scope["method"] != "POST":
            return
        ended = time.time_ns()
        began = ended - int(took_s * _NS)
        # A path that no route leads to was chosen by a stranger.
        name = f"POST {scope['path']}" if "endpoint" in scope else "POST"
        span = self._tracer.start_span(
            name,
            context=self._extract(_context_of(scope["headers"])),
            kind=self._server,
            attributes=_attributes_of(entry),
            start_time=began,
        )
        if entry.status >= ERROR_MIN or entry.failed:
            span.set_status(self._error)
        self._add_phases(span, entry, began, ended)
        span.end(end_time=ended)

    def _add_phases(self, span: Span, entry: RequestLog, began: int, ended: int) -> None:
        """The phases, one after the other up to the end; they are known by their lengths."""
        phases = {
            name.removesuffix(_PHASE): int(spent * 1_000_000)
            for name, spent in entry.numbers.items()
            if name.endswith(_PHASE)
        }
        context = self._within(span)
        at = max(began, ended - sum(phases.values()))
        for name, spent in phases.items():
            if spent:
                child = self._tracer.start_span(name, context=context, start_time=at)
                at = min(at + spent, ended)
                child.end(end_time=at)

    def close(self) -> None:
        """Sends what is left, for a few seconds at most."""
        # Its own limit is 30 s, too long for a server that stops while its collector is away.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            logger.warning("spans not sent: the collector took none within %g s", CLOSE_S)


def _context_of(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """What a client says of its own span; OpenTelemetry ignores what makes no sense."""
    return {
        name.decode("ascii"): value.decode("latin-1")
        for name, value in headers
        if name in CONTEXT_HEADERS
    }


def _attributes_of(entry: RequestLog) -> dict[str, str | int | float | bool]:
    numbers = entry.numbers
    found: dict[str, str | int | float | bool] = {
        "http.request.method": "POST",
        "http.response.status_code": entry.status,
        "gen_ai.response.id": entry.request,
        "penstock.complete": entry.complete,
    }
    names = {
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "completion_tokens": "gen_ai.usage.output_tokens",
        "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    }
    return found | {name: int(numbers[of]) for of, name in names.items() if of in numbers}
