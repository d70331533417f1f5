"""The live page at `/`, and what it shows: `/live` as JSON, `/live/events` as it changes.

    viewers ─→ LiveFeed ─→ gather()      once a second for all of them, while there are any

| path           | answers                                                                     |
|----------------|-----------------------------------------------------------------------------|
| `/`            | the page, without any data: it needs no key, and asks for one if there is   |
| `/live`        | one document of `observe/live.py`, at most a second old                     |
| `/live/events` | server-sent events, one document each                                       |

The page is one file without anything from elsewhere. Its script and its style are allowed by their
hashes, and nothing else is.

The one rule: nobody who looks costs an instance more than one question a second, all together.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from penstock_serve.observe.miss_reasons import MISS_ADVICE
from penstock_serve.server import errors
from penstock_serve.server.http import while_connected

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp, Receive, Scope, Send

    from penstock_serve.server.guard import Guard

EVENT_STREAM = "text/event-stream"
TICK_S = 1.0
VIEWERS_MAX = 16
"""Each of them is a connection, and some kilobytes a second."""


class LiveFeed:
    """Documents about a server, made once for everybody who looks."""

    def __init__(
        self, gather: Callable[[], Awaitable[bytes]], guard: Guard, *, every_s: float = TICK_S
    ) -> None:
        """Makes it; nothing runs until somebody looks."""
        self._gather = gather
        self._guard = guard
        self._document = b""
        self._every_s = every_s
        self._made_at = -every_s
        self._making = asyncio.Lock()
        self._viewers = 0
        self._ticking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        """Set when there is another document; then replaced."""
        self._closed = asyncio.Event()

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page),
            Route("/live", self.now),
            Route("/live/events", self.events),
        ]

    async def page(self, _http: HttpRequest) -> Response:
        """`GET /`."""
        page = live_page(needs_key=self._guard.needs_key)
        return HTMLResponse(page.html, headers=page.headers)

    async def now(self, http: HttpRequest) -> Response:
        """`GET /live`."""
        self._guard.require_key(http)
        headers = {"cache-control": "no-store"}
        return Response(await self.document(), media_type="application/json", headers=headers)

    async def events(self, http: HttpRequest) -> ASGIApp:
        """`GET /live/events`."""
        self._guard.require_key(http)
        if http.method == "HEAD":
            # Who asks for the head alone is no viewer, and would be one for ever.
            return Response(headers={"content-type": EVENT_STREAM, "cache-control": "no-store"})
        if self._viewers >= VIEWERS_MAX:
            return errors.busy(f"{self._viewers} viewers look at this page, at most that many may")
        return self._answer

    async def document(self) -> bytes:
        """A document that is at most one tick old."""
        async with self._making:
            # Whoever waited for the lock finds the document that was made meanwhile.
            now = asyncio.get_running_loop().time()
            if now - self._made_at >= self._every_s:
                self._document, self._made_at = await self._gather(), now
            return self._document

    def close(self) -> None:
        """Ends the streams of all viewers: the server stops."""
        self._closed.set()
        self._news.set()

    async def _answer(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self._viewers += 1
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        try:
            await while_connected(self._send_documents(send), receive)
        finally:
            self._viewers -= 1
            if not self._viewers and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    async def _send_documents(self, send: Send) -> None:
        headers = [
            (b"content-type", EVENT_STREAM.encode()),
            (b"cache-control", b"no-store"),
            # nginx and its like would keep events back until they have a page of them.
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        document = await self.document()
        while not self._closed.is_set():
            news = self._news
            # Whoever reads slowly waits here, and misses documents: the next one has it all.
            body = b"data: " + document + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await news.wait()
            document = self._document
        await send({"type": "http.response.body", "body": b""})

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._closed.is_set():
            await self.document()
            news, self._news = self._news, asyncio.Event()
            news.set()
            due = max(due + self._every_s, loop.time())
            try:
                async with asyncio.timeout_at(due):
                    await self._closed.wait()
            except TimeoutError:
                continue


@dataclass(frozen=True, slots=True)
class LivePage:
    """The page, and the headers that it is sent with."""

    html: str
    headers: dict[str, str]


@cache
def live_page(*, needs_key: bool) -> LivePage:
    """The page; it is read when somebody asks for it first."""
    html = files("penstock_serve.server").joinpath("live.html").read_text(encoding="utf-8")
    advice = {reason.value: each for reason, each in MISS_ADVICE.items()}
    # As JSON in a script element, which ends at the first `</`.
    html = html.replace("{{ADVICE}}", json.dumps(advice).replace("<", "\\u003c"))
    html = html.replace("{{KEY}}", "needed" if needs_key else "none")
    policy = {
        "default-src": "'none'",
        "script-src": _hashes_of(html, "script"),
        "style-src": _hashes_of(html, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return LivePage(html, headers)


def _hashes_of(html: str, element: str) -> str:
    found = re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
