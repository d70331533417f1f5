"""The HTTP application: OpenAI's API, health, metrics, and the state of the caches.

| path                          |                                                              |
|-------------------------------|--------------------------------------------------------------|
| `POST /v1/chat/completions`   | the next turn of a conversation, whole or as a stream         |
| `POST /v1/completions`        | the continuation of a text                                    |
| `GET  /v1/models`             | the one model                                                 |
| `GET  /health`                | 200 when an instance accepts requests, else 503; what is off  |
| `GET  /metrics`               | for Prometheus                                                |
| `GET  /`                      | the live page                                                 |
| `GET  /live`, `/live/events`  | what it shows: as JSON, and as it changes                     |
| `GET  /cache`                 | statistics of every instance, and why requests missed         |
| `GET  /cache/story?request=`  | what happened to a request's blocks                           |
| `GET  /cache/timeline`        | when the last copies and handoffs began and ended             |
| `POST /admin/pause`           | no request begins; those under way end                        |
| `POST /admin/resume`          | requests begin again                                          |
| `POST /admin/sleep`           | memory is given back to the system                            |
| `POST /admin/wake`            | and taken again                                               |
| `POST /admin/reset`           | clears all caches                                             |
| `POST /admin/weights`         | other weights: KV of the old ones is not used any more        |
| `POST /admin/role`            | an instance gets another role                                 |
| `POST /admin/audit`           | every instance checks the invariants of its cache             |

The one rule: every error of a client gets a response in OpenAI's format that says what was wrong.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock import Health, __version__
from penstock.errors import counted, shown
from penstock_serve.engine.defaults import OF_OPENAI
from penstock_serve.observe.live import InstanceStatistics, LiveHealth, ServerLive, health_of
from penstock_serve.server import errors
from penstock_serve.server.control import (
    AskedT,
    Control,
    DrainRequest,
    EmptyRequest,
    RoleRequest,
    SleepRequest,
    WeightsRequest,
    read_order,
)
from penstock_serve.server.fields import BadRequest
from penstock_serve.server.guard import Guard, read_hosts
from penstock_serve.server.http import GuardedApp, read_body
from penstock_serve.server.instance_link import InstanceLost
from penstock_serve.server.live_feed import LiveFeed
from penstock_serve.server.role_balancer import RoleBalancer
from penstock_serve.server.router import ServerState, is_usable
from penstock_serve.server.text_endpoint import Admission, Encoder, TextEndpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp

    from penstock.config import ServeTable
    from penstock_serve.engine.messages import What
    from penstock_serve.engine.sampling_options import Sampling
    from penstock_serve.engine.text import Text
    from penstock_serve.observe.metrics import ServerMetrics
    from penstock_serve.server.control import ControlResult
    from penstock_serve.server.instance_link import InstanceLink
    from penstock_serve.server.router import Router

TENANT_CHARACTERS_MAX = 128


class Server:
    """The endpoints."""

    def __init__(
        self,
        router: Router,
        text: Text,
        metrics: ServerMetrics,
        *,
        model: str,
        settings: ServeTable,
        api_key: str = "",
        instances: int = 0,
        defaults: Sampling = OF_OPENAI,
    ) -> None:
        """Makes them; of `instances` there should be so many, 0: other commands start them."""
        self._router = router
        self._control = Control(router, balances=settings.balance_s > 0)
        self.balancer = (
            RoleBalancer(router, self._control, metrics, pace_s=settings.balance_s)
            if settings.balance_s
            else None
        )
        self._metrics = metrics
        self._model = model
        self._settings = settings
        self._guard = Guard(api_key, read_hosts(settings.allowed_hosts))
        admission = Admission(settings.requests_max)
        report = LiveReport(router, metrics, admission, model, instances)
        self.live = LiveFeed(report.gather, self._guard)
        self._asking = TextEndpoint(
            router=router,
            encoder=Encoder(text),
            text=text,
            metrics=metrics,
            admission=admission,
            model=model,
            defaults=defaults,
        )

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/cache", self.cache),
            Route("/cache/story", self.story),
            Route("/cache/timeline", self.timeline),
            *self.live.routes(),
            Route("/admin/pause", self.pause, methods=["POST"]),
            Route("/admin/resume", self.resume, methods=["POST"]),
            Route("/admin/sleep", self.sleep, methods=["POST"]),
            Route("/admin/wake", self.wake, methods=["POST"]),
            Route("/admin/reset", self.reset, methods=["POST"]),
            Route("/admin/weights", self.weights, methods=["POST"]),
            Route("/admin/role", self.role, methods=["POST"]),
            Route("/admin/audit", self.audit, methods=["POST"]),
        ]
        return GuardedApp(routes, self._guard)

    # For clients.

    async def completions(self, http: HttpRequest) -> ASGIApp:
        """`POST /v1/completions`."""
        return await self._asking.completions(await self._body(http), _tenant(http))

    async def chat(self, http: HttpRequest) -> ASGIApp:
        """`POST /v1/chat/completions`."""
        return await self._asking.chat(await self._body(http), _tenant(http))

    async def models(self, http: HttpRequest) -> Response:
        """`GET /v1/models`."""
        self._guard.require_key(http)
        model: dict[str, object] = {"id": self._model, "object": "model", "created": 0}
        model["owned_by"] = "penstock"
        if self._router.answering:
            # As vLLM and SGLang call the longest context; clients cut prompts to it.
            model["max_model_len"] = self._asking.context
        name = http.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        self._asking.require_model(name)
        return JSONResponse(model)

    # For operators.

    async def health(self, _http: HttpRequest) -> Response:
        """`GET /health`."""
        instances = {link.name: is_usable(link) for link in self._router.links}
        ready = bool(self._router.answering)
        why = [f"{link.name}: {each}" for link in self._router.links for each in link.reasons]
        status = ("degraded" if why else "ok") if ready else "loading"
        state = self._control.state
        if state is not ServerState.RUNNING:
            ready, status = False, state.value
        content = {"status": status, "instances": instances} | ({"why": why} if why else {})
        if self.balancer is not None:
            content["balance"] = self.balancer.report()
        return JSONResponse(content, status_code=200 if ready else 503)

    async def metrics(self, _http: HttpRequest) -> Response:
        """`GET /metrics`."""
        # Instances that are lost meanwhile, or too busy to answer, are left out.
        asked = await asyncio.gather(
            *(link.ask("statistics") for link in self._router.ready), return_exceptions=True
        )
        reported = [
            msgspec.json.decode(each, type=InstanceStatistics)
            for each in asked
            if isinstance(each, bytes)
        ]
        text = self._metrics.text(reported, retries=self._router.retries)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def cache(self, http: HttpRequest) -> Response:
        """`GET /cache`, or `GET /cache?instance=NAME`."""
        self._guard.require_key(http)
        name = http.query_params.get("instance", "")
        return JSONResponse({"instances": await self._ask_all("statistics", only=name)})

    async def story(self, http: HttpRequest) -> Response:
        """`GET /cache/story?request=NAME`."""
        self._guard.require_key(http)
        name = http.query_params.get("request", "")
        if not name:
            raise BadRequest("request is empty, must be the id of an answer", param="request")
        if not self._router.ready:
            return errors.unavailable("no instance is ready")
        # In a prefill instance, each attempt is a request of its own.
        names = [name, *self._router.handoffs_of(name)]
        found = [
            line
            for each in names
            for reported in await self._ask_all("story", each)
            for line in reported
        ]
        if not found:
            raise BadRequest(
                f"request is {shown(name)}, must be the id of an answer that an instance still "
                "remembers",
                param="request",
                status=404,
            )
        return JSONResponse({"request": name, "story": found})

    async def timeline(self, http: HttpRequest) -> Response:
        """`GET /cache/timeline`, or `GET /cache/timeline?instance=NAME`."""
        self._guard.require_key(http)
        name = http.query_params.get("instance", "")
        reported = await self._ask_all("timeline", only=name)
        # Instances on other machines have another clock: each says what it reads `now`.
        return JSONResponse({"now": time.monotonic(), "instances": reported})

    async def pause(self, http: HttpRequest) -> Response:
        """`POST /admin/pause` with `{"mode": "drain" or "abort", "timeout_s": …}`."""
        return _result(await self._control.pause(await self._order(http, DrainRequest)))

    async def resume(self, http: HttpRequest) -> Response:
        """`POST /admin/resume`."""
        await self._order(http, EmptyRequest)
        return _result(await self._control.resume())

    async def sleep(self, http: HttpRequest) -> Response:
        """`POST /admin/sleep` with `{"level": 1 or 2, "host": true or false}`."""
        return _result(await self._control.sleep(await self._order(http, SleepRequest)))

    async def wake(self, http: HttpRequest) -> Response:
        """`POST /admin/wake`."""
        await self._order(http, EmptyRequest)
        return _result(await self._control.wake())

    async def reset(self, http: HttpRequest) -> Response:
        """`POST /admin/reset`."""
        self._guard.require_admin(http)
        return JSONResponse({"reset": self._router.reset("an operator asked for it")})

    async def weights(self, http: HttpRequest) -> Response:
        """`POST /admin/weights` with `{"path": "…", "version": "…"}`, or the version alone."""
        wanted = await self._order(http, WeightsRequest)
        if wanted.path:
            return _result(await self._control.load_weights(wanted))
        names = await self._control.rename_weights(wanted.version)
        return JSONResponse({"reset": names, "weights_version": wanted.version})

    async def role(self, http: HttpRequest) -> Response:
        """`POST /admin/role` with `{"instance": "…", "role": "…"}`."""
        wanted = await self._order(http, RoleRequest)
        return JSONResponse(await self._control.change_role(wanted))

    async def audit(self, http: HttpRequest) -> Response:
        """`POST /admin/audit`: an instance that violates an invariant ends with a traceback."""
        self._guard.require_admin(http)
        asked = await asyncio.gather(*(link.ask("audit") for link in self._router.ready))
        reported = [json.loads(each) for each in asked]
        return JSONResponse({"in_order": [each["instance"] for each in reported]})

    async def _ask_all(self, what: What, of: str = "", *, only: str = "") -> list[Any]:
        links = [link for link in self._router.ready if only in ("", link.name)]
        return await ask_instances(links, what, of, required=bool(only))

    # For all paths.

    async def _order(self, http: HttpRequest, shape: type[AskedT]) -> AskedT:
        """What an operator asks for."""
        self._guard.require_admin(http)
        return read_order(shape, await self._body(http))

    async def _body(self, http: HttpRequest) -> bytes:
        self._guard.require_key(http)
        encoding = http.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise BadRequest(
                f"content-encoding is {shown(encoding)}, must be left out: bodies are read as they "
                "are",
                param="content-encoding",
                status=415,
            )
        settings = self._settings
        return await read_body(http, bytes_max=settings.body_bytes_max, within_s=settings.body_s)


async def ask_instances(
    links: Sequence[InstanceLink], what: What, of: str = "", *, required: bool = False
) -> list[Any]:
    """What instances say, all asked at once; those that are lost meanwhile are left out.

    Raises `InstanceLost`: one that is `required` is lost.
    """
    asked = await asyncio.gather(*(link.ask(what, of) for link in links), return_exceptions=True)
    for each in asked:
        if isinstance(each, BaseException) and (required or not isinstance(each, InstanceLost)):
            raise each
    return [json.loads(each) for each in asked if isinstance(each, bytes)]


def _result(result: ControlResult) -> Response:
    return JSONResponse(result.content(), status_code=503 if result.failed else 200)


def _tenant(http: HttpRequest) -> str:
    tenant = http.headers.get("x-penstock-tenant", "")
    if len(tenant) > TENANT_CHARACTERS_MAX:
        raise BadRequest(
            f"x-penstock-tenant has {len(tenant)} characters, must have at most "
            f"{TENANT_CHARACTERS_MAX}",
            param="x-penstock-tenant",
        )
    return tenant


WAIT_S = 0.5
"""For instances that have answered before."""
FIRST_WAIT_S = 5.0
"""For those that have not: without them there is nothing to show."""
SILENT_S = 5.0


class _Head(msgspec.Struct):
    """What the server itself reads of an instance's statistics."""

    instance: str
    state: str
    health: Health


@dataclass(slots=True)
class _Said:
    """The last answer of an instance, and the question that it has not answered yet."""

    statistics: bytes = b""
    head: _Head | None = None
    at: float = 0.0
    question: asyncio.Task[bytes] | None = None

    def take(self) -> None:
        """Takes in the answer, if it has come."""
        question = self.question
        if question is None or not question.done():
            return
        self.question = None
        if question.cancelled() or isinstance(question.exception(), InstanceLost):
            return
        self.statistics = question.result()
        self.head = msgspec.json.decode(self.statistics, type=_Head)
        self.at = time.monotonic()


@dataclass(slots=True)
class LiveReport:
    """Makes the documents about a server: every instance asked once, and what the server saw.

    An instance answers between two of its steps. One that is in a long step is not waited for: what
    it said last is shown until it answers, and after `SILENT_S` its silence is a reason to worry.
    """

    router: Router
    metrics: ServerMetrics
    admission: Admission
    model: str
    expected: int
    said: dict[InstanceLink, _Said] = field(default_factory=dict)

    async def gather(self) -> bytes:
        """A document, as JSON."""
        await self._ask()
        now = time.monotonic()
        links = [link for link in self.router.ready if self.said[link].statistics]
        return msgspec.json.encode(
            ServerLive(
                version=__version__,
                now=now,
                model=self.model,
                health=self._health(now),
                under_way=self.admission.running,
                requests_max=self.admission.limit,
                retries=self.router.retries,
                instances=[msgspec.Raw(self.said[link].statistics) for link in links],
                traffic=self.metrics.traffic.report(now),
            )
        )

    async def _ask(self) -> None:
        """Asks every instance that has answered the last question, and waits a moment."""
        ready = self.router.ready
        self.said = {link: self.said.get(link) or _Said(at=time.monotonic()) for link in ready}
        questions = []
        for link, said in self.said.items():
            if said.question is None:
                said.question = asyncio.create_task(link.ask("statistics"))
                said.question.add_done_callback(_note_loss)
            questions.append(said.question)
        if questions:
            waits = all(said.statistics for said in self.said.values())
            await asyncio.wait(questions, timeout=WAIT_S if waits else FIRST_WAIT_S)
        for said in self.said.values():
            said.take()

    def _health(self, now: float) -> LiveHealth:
        router = self.router
        state = router.gate.state
        is_ready = bool(router.answering) and state is ServerState.RUNNING
        status = state.value
        if state is ServerState.RUNNING:
            status = "ok" if router.answering else "loading"
        return health_of(is_ready=is_ready, status=status, why=list(self._reasons(now)))

    def _reasons(self, now: float) -> Iterator[str]:
        router = self.router
        if router.gate.state is not ServerState.RUNNING:
            yield f"the server is {router.gate.state.value}"
        missing = self.expected - len(router.links)
        if missing > 0:
            yield f"{missing} of {self.expected} instances ended; the log says why"
        if not router.answering and router.gate.state is ServerState.RUNNING:
            yield "no instance can answer requests"
        for link in router.links:
            yield from self._reasons_of(link, now)

    def _reasons_of(self, link: InstanceLink, now: float) -> Iterator[str]:
        if link.ready is None:
            done = [
                f"{each.layers} of {counted(each.of, 'layer')}" for each in link.loading.values()
            ]
            yield f"{link.name} loads its weights: {', '.join(done) or 'nothing yet'}"
            return
        if link.leaving:
            yield f"{link.name} ends after {counted(link.load, 'request')}"
        if link.held_back:
            yield f"{link.name} gets no requests: {link.held_back}"
        said = self.said.get(link, _Said(at=now))
        if now - said.at > SILENT_S:
            yield f"{link.name} has not answered for {now - said.at:.0f} s: it is busy, or stuck"
        if said.head is not None:
            if said.head.state != "running" and self.router.gate.state is ServerState.RUNNING:
                yield f"{link.name} is {said.head.state}"
            yield from (f"{link.name}: {reason}" for reason in said.head.health.reasons)


def _note_loss(question: asyncio.Task[bytes]) -> None:
    """That an instance was lost is known otherwise, also where nobody waits for its answer."""
    if not question.cancelled():
        question.exception()
