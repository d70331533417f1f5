"""`penstock router`: the HTTP application in front of vLLM servers, and its life.

| path                                           |                                           |
|------------------------------------------------|-------------------------------------------|
| `POST /v1/completions`, `/v1/chat/completions` | sent to a prefill and a decode server     |
| `GET  /v1/models`                              | asked of a decode server                  |
| `GET  /health`                                 | 200 when a decode server is up, else 503  |
| `GET  /metrics`                                | for Prometheus                            |
| `GET  /`, `/live`, `/live/events`              | the live page, and what it shows          |

Answers of vLLM pass unread, with their status and headers. A stream that breaks off ends with an
error event and `[DONE]`, as vLLM's own streams do.

The one rule: a client that disconnects ends its requests at both servers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock import StopSignal, __version__
from penstock_serve.observe.live import HANDED, RoutedServer, RouterLive, health_of
from penstock_serve.observe.metrics import RouterMetrics
from penstock_serve.server import errors
from penstock_serve.server.access_log import AccessLog, name_request, note_failure, note_tokens
from penstock_serve.server.dashboard import MetricsWatch
from penstock_serve.server.http import (
    GuardedApp,
    HttpServer,
    read_body,
    serve_until_stopped,
    while_connected,
)
from penstock_serve.server.live_feed import LiveFeed
from penstock_serve.server.server_socket import raise_descriptor_limit
from penstock_serve.server.vllm_requests import AnswerHead, PromptRequest, relayed
from penstock_serve.server.vllm_router import EVENT_END, NoServer, VllmRouter
from penstock_serve.server.vllm_server import VllmFailure

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp, Receive, Scope, Send

    from penstock_serve.observe.live import RequestRecord
    from penstock_serve.server.guard import Guard
    from penstock_serve.server.vllm_router import BegunAnswer
    from penstock_serve.server.vllm_server import ServerUrl, WholeAnswer

logger = logging.getLogger("penstock.serve.vllm_app")

CONNECTIONS_MAX = 1024
DESCRIPTORS_A_REQUEST = 3
"""The client's connection, and one to each server."""
HEADER_S = 10.0
BODY_S = 60.0
BODY_BYTES_MAX = 64 << 20
"""vLLM's own limit is its operator's; images in a body take megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """What `penstock router` is told."""

    prefill: Sequence[ServerUrl]
    decode: Sequence[ServerUrl]
    guard: Guard
    """Who may ask; without a key, whatever clients send goes to vLLM, which may want its own."""
    timeout_s: float = 600.0
    """How long a server may be silent, before and within its answer."""
    drain_s: float = 20.0


class RouterApp:
    """The endpoints."""

    def __init__(self, router: VllmRouter, metrics: RouterMetrics, guard: Guard) -> None:
        self._router = router
        self._metrics = metrics
        self._guard = guard
        self.live = LiveFeed(self._gather, guard)
        # A prompt that is handed over is on the pages of two servers; the one that answers counts.
        self.pages = MetricsWatch([each.url for each in router.decode], what="metrics page")

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self.text, methods=["POST"]),
            Route("/v1/chat/completions", self.text, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            *self.live.routes(),
        ]
        return GuardedApp(routes, self._guard)

    async def text(self, http: HttpRequest) -> ASGIApp:
        """`POST /v1/completions` and `POST /v1/chat/completions`."""
        began = time.monotonic()
        self._guard.require_key(http)
        body = await read_body(http, bytes_max=BODY_BYTES_MAX, within_s=BODY_S)
        request = PromptRequest.read(http.url.path, http.headers.raw, body)
        return RelayedAnswer(request, self._router, self._metrics, began)

    async def models(self, http: HttpRequest) -> Response:
        """`GET /v1/models`, and `GET /v1/models/NAME`."""
        self._guard.require_key(http)
        wanted = PromptRequest.read(http.url.path, http.headers.raw, b"")
        path = http.scope.get("raw_path", b"").decode("ascii", "replace") or http.url.path
        try:
            return _response(await self._router.get(path, wanted.headers))
        except NoServer as problem:
            return errors.unavailable(str(problem))

    async def health(self, _http: HttpRequest) -> Response:
        """`GET /health`."""
        ready, status = self._readiness()
        servers: dict[str, dict[str, Any]] = {"prefill": {}, "decode": {}}
        for each in self._servers():
            more = {"version": each.version} if each.up else {"cause": each.cause}
            servers[each.role][each.name] = {"up": each.up, **more}
        return JSONResponse({"status": status, **servers}, status_code=200 if ready else 503)

    async def metrics(self, _http: HttpRequest) -> Response:
        """`GET /metrics`."""
        text = self._metrics.text(self._servers())
        return Response(text, media_type="text/plain; version=0.0.4")

    def _readiness(self) -> tuple[bool, str]:
        """Whether requests are answered, and what `/health` says of it."""
        ready = any(server.is_up for server in self._router.decode)
        return ready, "ok" if ready else "no decode server is up"

    def _servers(self) -> list[RoutedServer]:
        """All servers as the router sees them, those that compute prompts first."""
        roles = {"prefill": self._router.prefill, "decode": self._router.decode}
        return [
            RoutedServer(
                name=each.name,
                role=role,
                up=each.is_up,
                version=each.version,
                cause=each.cause,
                load=each.load,
            )
            for role, found in roles.items()
            for each in found
        ]

    async def _gather(self) -> bytes:
        """The document of the live page."""
        now = time.monotonic()
        self.pages.ask_soon(now)
        servers = self._servers()
        is_ready, status = self._readiness()
        down = [
            f"{each.name} ({each.role}) is down: {each.cause}" for each in servers if not each.up
        ]
        traffic, counted = self._metrics.traffic.report(now), self.pages.traffic(now)
        # Answers pass unread: their tokens are counted by the servers that make them.
        rates = msgspec.structs.replace(
            traffic.rates, output_tokens_per_s=counted.rates.output_tokens_per_s
        )
        return msgspec.json.encode(
            RouterLive(
                version=__version__,
                now=now,
                health=health_of(is_ready=is_ready, status=status, why=down),
                servers=servers,
                prompts=self._metrics.prompts_by_role,
                retries=self._metrics.retry_count,
                traffic=msgspec.structs.replace(traffic, rates=rates, between=counted.between),
                sources=counted.slices,
                tiers=self.pages.tiers(),
            )
        )


@dataclass(frozen=True, slots=True)
class RelayedAnswer:
    """An ASGI response: what vLLM answers, as it comes."""

    request: PromptRequest
    router: VllmRouter
    metrics: RouterMetrics
    began: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        traffic = self.metrics.traffic
        record = traffic.begin("", prompt_tokens=None, now=self.began)
        outcome = "aborted"
        try:
            outcome = await self._answer_recorded(record, scope, receive, send)
        finally:
            traffic.end(record, outcome=outcome, generated=record.generated, now=time.monotonic())

    async def _answer_recorded(
        self, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> str:
        try:
            begun = await self.router.answer(self.request)
        except NoServer as problem:
            said = problem.answer
            response = errors.unavailable(str(problem)) if said is None else _response(said)
            await response(scope, receive, send)
            return "failed"
        outcome = "aborted"
        try:
            outcome = await self._relay(begun, record, scope, send)
        finally:
            begun.close()
            self.metrics.count(begun.server.name, "decode", outcome)
        return outcome

    async def _relay(
        self, begun: BegunAnswer, record: RequestRecord, scope: Scope, send: Send
    ) -> str:
        now = time.monotonic()
        _note_head(scope, record, begun)
        if begun.status == 200:
            self.metrics.first_token_s.observe(now - self.began)
            is_handed = begun.prefill is not None
            found = {HANDED: record.prompt_tokens} if is_handed and record.prompt_tokens else {}
            self.metrics.traffic.first_token(record, found=found, is_warm=is_handed, now=now)
        head = {"type": "http.response.start", "status": begun.status, "headers": begun.headers}
        if begun.rest is None:
            length = (b"content-length", str(len(begun.first)).encode())
            await send({**head, "headers": [*begun.headers, length]})
            await send({"type": "http.response.body", "body": begun.first})
            return "answered" if begun.status == 200 else "refused"
        await send(head)
        try:
            await _send_events(begun, send)
        except VllmFailure as failure:
            logger.warning("answer broken off: cause=%s", failure)
            begun.server.note_failure()
            note_failure(scope)
            error = {"error": errors.shape(str(failure), "service_unavailable")}
            await _send_part(send, f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode())
            outcome = "broken"
        else:
            outcome = "answered"
        await send({"type": "http.response.body", "body": b""})
        return outcome


async def _send_events(begun: BegunAnswer, send: Send) -> None:
    """Passes events on, whole ones only: what follows a broken one is an event of its own."""
    held = begun.first
    while True:
        end = held.rfind(EVENT_END) + len(EVENT_END)
        if end >= len(EVENT_END):
            await _send_part(send, held[:end])
            held = held[end:]
        part = await begun.next_part()
        if not part:
            break
        held += part
    if held:
        await _send_part(send, held)


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _note_head(scope: Scope, record: RequestRecord, begun: BegunAnswer) -> None:
    """Has log and live page name the request as its answer does, and count its tokens."""
    head = AnswerHead.read(begun.first.partition(EVENT_END)[0] if begun.rest else begun.first)
    record.by = begun.server.name
    if head.id:
        record.request = head.id
        name_request(scope, head.id)
    if head.usage is not None:
        record.prompt_tokens = head.usage.prompt_tokens
        record.generated = head.usage.completion_tokens or 0
        details = head.usage.prompt_tokens_details
        note_tokens(
            scope,
            prompt=head.usage.prompt_tokens,
            cached=[details.cached_tokens or 0] if details else [],
            completion=head.usage.completion_tokens or 0,
        )


def _response(answer: WholeAnswer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers.extend(relayed(answer.headers))
    return response


def run_router(
    settings: RouterSettings, bound: socket.socket, on_start: Callable[[VllmRouter], None]
) -> None:
    """Serves until the process gets a stop signal."""
    with StopSignal((signal.SIGINT, signal.SIGTERM)) as stop:
        asyncio.run(_run(settings, bound, on_start, stop))


async def _run(
    settings: RouterSettings,
    bound: socket.socket,
    on_start: Callable[[VllmRouter], None],
    stop: StopSignal,
) -> None:
    metrics = RouterMetrics()
    router = VllmRouter(settings.prefill, settings.decode, metrics, timeout_s=settings.timeout_s)
    fit = raise_descriptor_limit(DESCRIPTORS_A_REQUEST * CONNECTIONS_MAX)
    app = RouterApp(router, metrics, settings.guard)
    server = HttpServer(
        AccessLog(app.app(), metrics.count_response),
        connections_max=max(1, fit // DESCRIPTORS_A_REQUEST),
        header_s=HEADER_S,
        drain_s=settings.drain_s,
        on_stop=app.live.close,
        on_overtime=router.stop,
    )
    # Whether somebody looks or not, so that whoever opens the page sees what went before.
    asking = asyncio.create_task(app.pages.run())
    try:
        await router.start()
        on_start(router)
        await serve_until_stopped(server, bound, stop)
    finally:
        router.stop()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
