"""The HTTP application: OpenAI's API, health, metrics, and the state of the caches.

| path                          |                                                              |
|-------------------------------|--------------------------------------------------------------|
| `POST /v1/chat/completions`   | the next turn of a conversation, whole or as a stream         |
| `POST /v1/completions`        | the continuation of a text                                    |
| `GET  /v1/models`             | the one model                                                 |
| `GET  /health`                | 200 when an instance accepts requests, else 503               |
| `GET  /metrics`               | for Prometheus                                                |
| `GET  /cache`                 | statistics of every instance, and why requests missed         |
| `GET  /cache/story?request=`  | what happened to a request's blocks                           |
| `GET  /cache/timeline`        | when the last copies and handoffs began and ended             |
| `POST /admin/reset`           | clears all caches                                             |
| `POST /admin/weights`         | the weights changed: KV of the old ones is not used any more  |
| `POST /admin/audit`           | every instance checks the invariants of its cache             |

The one rule: every error of a client gets a response in OpenAI's format that says what was wrong.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.engine.defaults import Defaults
from penstock.errors import shown
from penstock.observe.statistics import InstanceStatistics
from penstock.serve import errors
from penstock.serve.fields import BadRequest
from penstock.serve.guard import Guard
from penstock.serve.openai_requests import read_weights
from penstock.serve.router import handoffs_of
from penstock.serve.text_endpoint import Admission, Encoder, TextEndpoint

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp

    from penstock.engine.messages import What
    from penstock.engine.text import Text
    from penstock.observe.metrics import ServerMetrics
    from penstock.serve.router import Router

TENANT_CHARACTERS_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits of the server."""

    api_key: str = field(default="", repr=False)
    """Empty: everybody who can reach the port is served."""
    body_bytes_max: int = 1 << 20
    requests_max: int = 512
    """Requests under way; more are answered with 429."""
    body_s: float = 60.0
    """Timeout of a request's body."""


class Server:
    """The endpoints."""

    def __init__(
        self,
        router: Router,
        text: Text,
        metrics: ServerMetrics,
        *,
        model: str,
        settings: ServerSettings,
        defaults: Defaults | None = None,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._model = model
        self._settings = settings
        self._guard = Guard(settings.api_key)
        self._asking = TextEndpoint(
            router,
            Encoder(text),
            text,
            metrics,
            Admission(settings.requests_max),
            model=model,
            defaults=defaults or Defaults(),
        )

    def app(self) -> Starlette:
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
            Route("/admin/reset", self.reset, methods=["POST"]),
            Route("/admin/weights", self.weights, methods=["POST"]),
            Route("/admin/audit", self.audit, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers=errors.HANDLERS)

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
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "penstock"}
        name = http.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        self._asking.require_model(name)
        return JSONResponse(model)

    # For operators.

    async def health(self, _http: HttpRequest) -> Response:
        """`GET /health`."""
        instances = {
            link.name: link.ready is not None and not link.leaving for link in self._router.links
        }
        ready = bool(self._router.answering)
        return JSONResponse(
            {"status": "ok" if ready else "loading", "instances": instances},
            status_code=200 if ready else 503,
        )

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
        names = [name, *handoffs_of(name)]
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
        return JSONResponse({"instances": await self._ask_all("timeline", only=name)})

    async def reset(self, http: HttpRequest) -> Response:
        """`POST /admin/reset`."""
        self._guard.require_admin(http)
        return JSONResponse({"reset": self._router.reset("an operator asked for it")})

    async def weights(self, http: HttpRequest) -> Response:
        """`POST /admin/weights` with `{"version": "…"}`."""
        self._guard.require_admin(http)
        version = read_weights(await self._body(http))
        if not 1 <= len(version.encode()) <= TENANT_CHARACTERS_MAX:
            raise BadRequest(
                f"version has {len(version.encode())} bytes, must have from 1 to "
                f"{TENANT_CHARACTERS_MAX}",
                param="version",
            )
        names = self._router.reset(f"weights are now {version}", weights_version=version)
        return JSONResponse({"reset": names, "weights_version": version})

    async def audit(self, http: HttpRequest) -> Response:
        """`POST /admin/audit`: an instance that violates an invariant ends with a traceback."""
        self._guard.require_admin(http)
        reported = await self._ask_all("audit")
        return JSONResponse({"in_order": [each["instance"] for each in reported]})

    async def _ask_all(self, what: What, of: str = "", *, only: str = "") -> list[Any]:
        asked = [link for link in self._router.ready if only in ("", link.name)]
        return [json.loads(await link.ask(what, of)) for link in asked]

    # For all paths.

    async def _body(self, http: HttpRequest) -> bytes:
        self._guard.require_key(http)
        limit, within_s = self._settings.body_bytes_max, self._settings.body_s
        body = bytearray()
        try:
            async with asyncio.timeout(within_s):
                async for part in http.stream():
                    body += part
                    if len(body) > limit:
                        raise BadRequest(f"the body has more than {limit} bytes", status=413)
        except TimeoutError as error:
            raise BadRequest(f"the body did not come within {within_s:g} s", status=408) from error
        return bytes(body)


def _tenant(http: HttpRequest) -> str:
    tenant = http.headers.get("x-penstock-tenant", "")
    if len(tenant) > TENANT_CHARACTERS_MAX:
        raise BadRequest(
            f"x-penstock-tenant has {len(tenant)} characters, must have at most "
            f"{TENANT_CHARACTERS_MAX}",
            param="x-penstock-tenant",
        )
    return tenant
