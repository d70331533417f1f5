"""One log line for each request: who asked for what, how it ended, and how long it took.

The one rule: exactly one line a request, whatever happened to it, and nothing of its content.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.observe.logs import FIELDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("penstock.serve.access")

SCOPE_KEY = "penstock.seen"
CLIENT_GONE = 499
"""What proxies log for a client that left before its answer began."""
CHARACTERS_MAX = 256
"""Of a value that the client chose."""


@dataclass(slots=True)
class Seen:
    """What is known of one request; whoever learns more notes it here."""

    request: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")
    status: int = CLIENT_GONE
    complete: bool = False
    failed: bool = False
    tokens: dict[str, int] = field(default_factory=dict)


def note_tokens(scope: Scope, *, prompt: int, cached: Sequence[int], completion: int) -> None:
    """Notes how many tokens a request had, for its log line."""
    seen: Seen | None = scope.get(SCOPE_KEY)
    if seen is not None:
        seen.tokens = {
            "prompt_tokens": prompt,
            "cached_tokens": sum(cached),
            "completion_tokens": completion,
        }


def note_failure(scope: Scope) -> None:
    """Notes that an answer which had begun ends with an error."""
    seen: Seen | None = scope.get(SCOPE_KEY)
    if seen is not None:
        seen.failed = True


def name_request(scope: Scope, name: str) -> None:
    """Gives a request the name that its answer has; before the answer begins."""
    seen: Seen | None = scope.get(SCOPE_KEY)
    if seen is not None:
        seen.request = name


class AccessLog:
    """An application that logs each request of another one, and tells clients its name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Has the request answered, and logs how that went."""
        seen = scope[SCOPE_KEY] = Seen()
        began = time.monotonic()

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                named = (b"x-request-id", seen.request.encode("ascii"))
                message = {**message, "headers": [*message.get("headers", []), named]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                seen.complete = not seen.failed

        try:
            await self._app(scope, receive, tell)
        finally:
            _log(scope, seen, time.monotonic() - began)


def _log(scope: Scope, seen: Seen, took_s: float) -> None:
    client = scope.get("client")
    fields: dict[str, object] = {
        "request": seen.request,
        "client": client[0] if client else "unknown",
        "method": _cut(scope["method"]),
        # Without the query, which may hold what is nobody's business; percent-encoded as it came.
        "path": _cut(scope.get("raw_path", b"").decode("latin-1") or scope["path"]),
        "status": seen.status,
        "complete": seen.complete,
        "latency_ms": round(took_s * 1000, 1),
        **seen.tokens,
    }
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    if given:
        fields["client_request"] = _cut(given.decode("latin-1"))
    logger.info("", extra={FIELDS: fields})


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}…"
