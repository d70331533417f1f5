"""The HTTP server: limits and timeouts of connections, and the graceful stop.

| while the client                | timeout        | then                                         |
|---------------------------------|----------------|----------------------------------------------|
| sends the head of a request     | `header_s`     | 408, and the connection is closed            |
| sends the body                  | `body_s`       | the same (checked by the application)        |
| sends a body after its response | `LINGER_S`     | the connection is closed                     |
| does not read its response      | `WRITE_S`      | the connection is closed, the request aborted |
| is idle between two requests    | `KEEP_ALIVE_S` | the connection is closed                     |

Beyond `connections_max`, a new connection replaces the one that has been idle longest; if none is
idle, it gets status 503.

`HttpServer.stop` closes idle connections and accepts no new ones, and `on_stop` ends streams that
would never end. Requests under way have `drain_s` to finish; then `on_overtime` must end them. A
second `stop` skips that time.

The one rule: whatever a client does or fails to do, it affects only its own connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.errors import shown
from penstock_serve.server import errors
from penstock_serve.server.fields import BadRequest
from penstock_serve.server.server_socket import BACKLOG

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Iterator

    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    from penstock import StopSignal
    from penstock_serve.server.guard import Guard

logger = logging.getLogger("penstock.serve.http")

JSON = "application/json"
KEEP_ALIVE_S = 65.0
"""Longer than clients and proxies usually keep an idle connection (httpx 5 s, many proxies 60 s):
they should close it, so that none is closed at the moment it is used again."""
LINGER_S = 5.0
WRITE_S = 60.0
HEAD_BYTES_MAX = 64 * 1024
LAST_S = 2.0
"""How long the last error responses may take to be sent after `drain_s`."""
ACCEPTS_A_ROUND = 64
"""The most connections that asyncio accepts before any of them is counted."""
_EVERY_S = 1.0


@dataclass(slots=True, kw_only=True)
class Limits:
    """Limits of connections, and the idle ones, the one that has been idle longest first."""

    connections_max: int
    header_s: float
    waiting: dict[Connection, None] = field(default_factory=dict)
    stopping: bool = False
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last connection is closed after the stop."""


class Connection(H11Protocol):
    """One connection of a client, with a timeout for every wait."""

    def __init__(self, *, limits: Limits, **given: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(**given)
        self._limits = limits
        self._head_alarm: asyncio.TimerHandle | None = None
        self._write_alarm: asyncio.TimerHandle | None = None

    # Called by uvicorn and asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limits.waiting[self] = None
        self._set_head_alarm(self._limits.header_s)
        if self._limits.stopping:
            transport.close()
        elif len(self.connections) > self._limits.connections_max:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn leaves its own timer running if the connection was broken.
        self._unset_keepalive_if_required()
        self._limits.waiting.pop(self, None)
        self._set_head_alarm(None)
        self._set_write_alarm(None)
        if self._limits.stopping and not self.connections:
            self._limits.empty.set()

    def data_received(self, data: bytes) -> None:
        began = self.timeout_keep_alive_task is not None
        super().data_received(data)
        if self._is_answering:
            self._begin_answering()
        elif began and self.conn.their_state is h11.IDLE:
            self._set_head_alarm(self._limits.header_s)

    def on_response_complete(self) -> None:
        self._limits.waiting[self] = None
        body_is_left = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        if body_is_left:
            # It is read and dropped, so that the client gets to see the response.
            self._set_head_alarm(LINGER_S)
        elif self._is_answering:
            self._begin_answering()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_write_alarm(WRITE_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_write_alarm(None)

    def send_400_response(self, msg: str) -> None:
        # As JSON, like all errors of this server.
        self._refuse(400, f"the request cannot be read as HTTP/1.1 ({msg.rstrip('.').lower()})")

    # Called by other connections and by timers.

    @property
    def may_close(self) -> bool:
        """Whether it is idle and its last response was sent completely."""
        return not self.transport.get_write_buffer_size()

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _begin_answering(self) -> None:
        self._limits.waiting.pop(self, None)
        self._set_head_alarm(None)

    def _make_room(self) -> None:
        oldest = next((each for each in self._limits.waiting if each.may_close), None)
        if oldest is not None and oldest is not self:
            oldest.give_up()
            return
        self._refuse(503, f"{len(self.connections) - 1} connections are open, at most that many")

    def give_up(self) -> None:
        """Closes the connection, which is idle."""
        self._limits.waiting.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def _head_is_late(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(408, f"the head did not come within {self._limits.header_s:g} s")
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Sends an error for data that is not a request, and closes the connection."""
        client = self.client[0] if self.client else "unknown"
        logger.info("no request: client=%s status=%d cause=%s", client, status, message)
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            # An answer is under way: nothing can be added to it.
            self.transport.abort()
            return
        kind = "service_unavailable" if status == 503 else "invalid_request_error"
        body = json.dumps({"error": errors.shape(message, kind)}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        answer = h11.Response(status_code=status, headers=[*headers, ("connection", "close")])
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _set_head_alarm(self, after_s: float | None) -> None:
        if self._head_alarm is not None:
            self._head_alarm.cancel()
        late = self._head_is_late
        self._head_alarm = None if after_s is None else self.loop.call_later(after_s, late)

    def _set_write_alarm(self, after_s: float | None) -> None:
        if self._write_alarm is not None:
            self._write_alarm.cancel()
        late = self.transport.abort
        self._write_alarm = None if after_s is None else self.loop.call_later(after_s, late)


class HttpServer(uvicorn.Server):
    """uvicorn's server with limits and a graceful stop."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        connections_max: int,
        header_s: float,
        drain_s: float,
        on_overtime: Callable[[], None],
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = Limits(connections_max=connections_max, header_s=header_s)
        self._drain_s = drain_s
        self._on_overtime = on_overtime
        self._on_stop = on_stop
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, limits=self._limits),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,  # type: ignore[arg-type]
                backlog=ACCEPTS_A_ROUND,
                h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            )
        )
        # Its warnings are about clients, which the access log reports already.
        logging.getLogger("uvicorn").setLevel(logging.ERROR)

    def stop(self) -> None:
        """Stops gracefully; called again, at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    # Called by uvicorn.

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the command, which has more than this server to stop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            # More may wait in the kernel than are accepted at once.
            each.listen(BACKLOG)

    async def main_loop(self) -> None:
        while not self._stop.is_set():
            await self.on_tick(0)  # Updates the `Date` header of responses.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _EVERY_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for responses under way, at most `drain_s`."""
        self._limits.stopping = True
        for server in self.servers:
            server.close()
        for each in sockets or ():
            each.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self._on_stop()
        under_way = len(self.server_state.tasks)
        logger.info("stopping: under_way=%d drain_s=%g", under_way, self._drain_s)
        if not await self._ended(self._drain_s, self._hurry):
            logger.warning("answers cut off: under_way=%d", len(self.server_state.tasks))
            self._on_overtime()
            await self._ended(LAST_S)
        await self._emptied(LAST_S)
        for connection in list(self.server_state.connections):
            # The client had its time to read the response.
            connection.transport.abort()
        await self._ended(LAST_S)

    async def _emptied(self, within_s: float) -> None:
        """Waits until all responses are sent."""
        if self.server_state.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._limits.empty.wait(), within_s)

    async def _ended(self, within_s: float, unless: asyncio.Event | None = None) -> bool:
        """Whether every request ends within a time."""
        tasks = set(self.server_state.tasks)
        if not tasks:
            return True
        ends = asyncio.create_task(_all_of(tasks))
        stops = asyncio.create_task(unless.wait() if unless else asyncio.Event().wait())
        try:
            await asyncio.wait({ends, stops}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            return ends.done()
        finally:
            for each in (ends, stops):
                each.cancel()
            await asyncio.gather(ends, stops, return_exceptions=True)


async def _all_of(tasks: set[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


async def serve_until_stopped(server: HttpServer, bound: socket.socket, stop: StopSignal) -> None:
    """Serves until a stop signal; a second one skips the rest of `drain_s`."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_failure)

    obeyed = 0

    def asked() -> None:
        nonlocal obeyed
        os.read(stop.descriptor, 1)
        while obeyed < stop.times:
            obeyed += 1
            server.stop()

    loop.add_reader(stop.descriptor, asked)
    try:
        await server.serve(sockets=[bound])
    finally:
        loop.remove_reader(stop.descriptor)


class GuardedApp:
    """An application that refuses pages of other sites at every path, known or not."""

    def __init__(self, routes: list[Route], guard: Guard) -> None:
        self._app = Starlette(routes=routes, exception_handlers=errors.HANDLERS)
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._guard.require_own_site(HttpRequest(scope))
        except BadRequest as refused:
            await errors.refused(refused)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def require_json(http: HttpRequest) -> None:
    """Refuses a body that is not declared as JSON.

    A page of any site may have a browser send other types without asking the server first.
    Raises `BadRequest`: there is a body, and it has another type or none.
    """
    given = http.headers.get("content-type", "")
    length = http.headers.get("content-length", "0")
    has_no_body = not length.strip("0") and "transfer-encoding" not in http.headers
    if has_no_body or given.partition(";")[0].strip().lower() == JSON:
        return
    found = f"is {shown(given)}" if given else "is missing"
    raise BadRequest(
        f"content-type {found}, must be {JSON}: add the header 'Content-Type: {JSON}', in curl "
        f"with -H 'Content-Type: {JSON}'",
        param="content-type",
        status=415,
    )


async def read_body(http: HttpRequest, *, bytes_max: int, within_s: float) -> bytes:
    """The body of a request, which must be JSON.

    Raises `BadRequest`: it is of another type, or too long, or does not come in time.
    """
    require_json(http)
    too_large = BadRequest(f"the body has more than {bytes_max} bytes", status=413)
    # Before any of it is asked for. h11 has checked that it has digits alone, not how many.
    if int(http.headers.get("content-length", "0")[:20]) > bytes_max:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for part in http.stream():
                body += part
                if len(body) > bytes_max:
                    raise too_large
    except TimeoutError as error:
        raise BadRequest(f"the body did not come within {within_s:g} s", status=408) from error
    return bytes(body)


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs `work`, and cancels it if the client disconnects; the body must have been read."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _log_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs in one line that no descriptor is left; other failures are defects of ours."""
    error = context.get("exception")
    if isinstance(error, OSError) and "accept" in context["message"]:
        logger.error("no connection taken: cause=%s", error.strerror)
    else:
        loop.default_exception_handler(context)
