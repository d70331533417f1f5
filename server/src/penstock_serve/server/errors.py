"""Error responses in OpenAI's format.

| status | type                    | when                                                    |
|--------|-------------------------|---------------------------------------------------------|
| 400    | `invalid_request_error` | the request is wrong; `param` names the field           |
| 401    | `authentication_error`  | the API key is missing or wrong                         |
| 403    | `permission_error`      | `/admin/*` from a client that may not use it; a page of |
|        |                         | another site, anywhere                                  |
| 404    | `invalid_request_error` | no such path, model, or story                           |
| 405    | `invalid_request_error` | the path takes another method                           |
| 408    | `invalid_request_error` | the body was not complete in time                       |
| 413    | `invalid_request_error` | the body is too large                                   |
| 415    | `invalid_request_error` | the body is compressed, or not declared as JSON         |
| 429    | `rate_limit_error`      | too many requests; `Retry-After` says when to retry     |
| 500    | `server_error`          | a defect of ours                                        |
| 409    | `invalid_request_error` | another `/admin/*` operation is under way               |
| 503    | `service_unavailable`   | no instance is ready, or the one that answered was lost, |
|        |                         | or the server is paused, with `Retry-After`             |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from penstock_serve.server.fields import BadRequest
from penstock_serve.server.instance_link import InstanceLost

if TYPE_CHECKING:
    from starlette.exceptions import HTTPException
    from starlette.requests import Request as HttpRequest

RETRY_AFTER_S = 1
PAUSED_RETRY_S = 5
"""Pauses take from seconds to minutes."""
KINDS = {401: "authentication_error", 403: "permission_error"}


def shape(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """An error object as OpenAI's clients expect it."""
    return {"message": message, "type": kind, "param": param, "code": None}


def error(message: str, kind: str, status: int) -> Response:
    return JSONResponse({"error": shape(message, kind)}, status_code=status)


def unavailable(message: str) -> Response:
    return error(message, "service_unavailable", 503)


def paused(message: str) -> Response:
    headers = {"Retry-After": str(PAUSED_RETRY_S)}
    content = {"error": shape(message, "service_unavailable")}
    return JSONResponse(content, status_code=503, headers=headers)


def busy(message: str) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    content = {"error": shape(message, "rate_limit_error")}
    return JSONResponse(content, status_code=429, headers=headers)


def refused(wrong: BadRequest) -> Response:
    """The answer to a request that is wrong, or that may not be asked."""
    if wrong.status == 429:
        return busy(str(wrong))
    kind = KINDS.get(wrong.status, "invalid_request_error")
    content = {"error": shape(str(wrong), kind, wrong.param)}
    headers = {"WWW-Authenticate": "Bearer"} if wrong.status == 401 else None
    return JSONResponse(content, status_code=wrong.status, headers=headers)


async def _bad_request(_http: HttpRequest, wrong: BadRequest) -> Response:
    return refused(wrong)


async def _lost(_http: HttpRequest, lost: InstanceLost) -> Response:
    return unavailable(str(lost))


async def _gone(_http: HttpRequest, _: ClientDisconnect) -> Response:
    # The client disconnected while it sent its request, so this response is not read.
    return Response(status_code=400)


async def _no_path(http: HttpRequest, _: Exception) -> Response:
    return error(f"there is no {http.url.path} here", "invalid_request_error", 404)


async def _no_method(http: HttpRequest, wrong: HTTPException) -> Response:
    message = f"{http.url.path} does not take {http.method}"
    content = {"error": shape(message, "invalid_request_error")}
    return JSONResponse(content, status_code=405, headers=wrong.headers)


async def _defect(_http: HttpRequest, _: Exception) -> Response:
    return error("internal error; see the log of the server", "server_error", 500)


HANDLERS: dict[Any, Any] = {
    BadRequest: _bad_request,
    InstanceLost: _lost,
    ClientDisconnect: _gone,
    404: _no_path,
    405: _no_method,
    500: _defect,
}
"""The application's exception handlers."""
