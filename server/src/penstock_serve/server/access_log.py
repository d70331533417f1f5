"""The access log: one line for each request, with client, path, status and latency.

The one rule: exactly one line for each request, whatever happened to it, without its content.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.toolkit import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from penstock_serve.server.tracing import Tracing

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
