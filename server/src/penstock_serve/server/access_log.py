"""What is written about each request: a line of the access log, and spans for OpenTelemetry.

    POST /v1/chat/completions      as the client's `traceparent` says, or the root of a trace
    ├── queued
    ├── loading                    blocks that were cached below the device
    ├── handed_over
    ├── prefill
    └── decode

Spans are made when a request has ended, from times that were measured anyway, and sent by a thread
of OpenTelemetry in the server's process; engines do nothing. Where they go is said by its standard
variables `OTEL_*`.

The rules:

- Exactly one line for each request, whatever happened to it, without its content.
- Spans hold numbers, never what was asked or answered. Those that nobody takes are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError, server_install_hint
from penstock.toolkit import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from opentelemetry.trace import Span
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


logger = logging.getLogger("penstock.serve.access")

SCOPE_KEY = "penstock.request_log"
CLIENT_GONE = 499
"""The status that proxies log for a client that disconnected before the response began."""
CHARACTERS_MAX = 256
"""Longer values of a client are cut in the log."""


@dataclass(slots=True)
class RequestLog:
    """The log entry of one request, which is filled in while it runs."""

    request: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")
    status: int = CLIENT_GONE
    complete: bool = False
    failed: bool = False
    numbers: dict[str, float] = field(default_factory=dict)
    """Its tokens, and what it spent its time on."""


def note_tokens(
    scope: Scope,
    *,
    prompt: int,
    cached: Sequence[int],
    completion: int,
    timings_ms: Mapping[str, float] | None = None,
) -> None:
    entry: RequestLog | None = scope.get(SCOPE_KEY)
    if entry is not None:
        entry.numbers = {
            "prompt_tokens": prompt,
            "cached_tokens": sum(cached),
            "completion_tokens": completion,
            **{f"{phase}_ms": spent for phase, spent in (timings_ms or {}).items()},
        }


def note_failure(scope: Scope) -> None:
    """Notes that a response which had begun ends with an error."""
    entry: RequestLog | None = scope.get(SCOPE_KEY)
    if entry is not None:
        entry.failed = True


def name_request(scope: Scope, name: str) -> None:
    """Sets the id that the response carries; call it before the response begins."""
    entry: RequestLog | None = scope.get(SCOPE_KEY)
    if entry is not None:
        entry.request = name


class AccessLog:
    """ASGI middleware that logs and counts requests, and adds the header `x-request-id`."""

    def __init__(
        self, app: ASGIApp, count: Callable[[str, int], None], tracing: Tracing | None = None
    ) -> None:
        """Wraps an application."""
        self._app = app
        self._count = count
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = scope[SCOPE_KEY] = RequestLog()
        began = time.monotonic()

        async def send_logged(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                named = (b"x-request-id", entry.request.encode("ascii"))
                message = {**message, "headers": [*message.get("headers", []), named]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                entry.complete = not entry.failed

        try:
            await self._app(scope, receive, send_logged)
        finally:
            # What no route leads to has no endpoint: paths of strangers are no labels.
            self._count(getattr(scope.get("endpoint"), "__name__", "none"), entry.status)
            took_s = time.monotonic() - began
            _log(scope, entry, took_s)
            if self._tracing is not None:
                self._tracing.record(scope, entry, took_s)


def _log(scope: Scope, entry: RequestLog, took_s: float) -> None:
    client = scope.get("client")
    fields: dict[str, object] = {
        "request": entry.request,
        "client": client[0] if client else "unknown",
        "method": _cut(scope["method"]),
        # Without the query, which may hold private data; percent-encoded as it arrived.
        "path": _cut(scope.get("raw_path", b"").decode("latin-1") or scope["path"]),
        "status": entry.status,
        "complete": entry.complete,
        "latency_ms": round(took_s * 1000, 1),
        **entry.numbers,
    }
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    if given:
        fields["client_request"] = _cut(given.decode("latin-1"))
    logger.info("", extra={FIELDS: fields})


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}…"


tracing_logger = logging.getLogger("penstock.serve.tracing")

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
            tracing_logger.warning("spans not sent: the collector took none within %g s", CLOSE_S)


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
