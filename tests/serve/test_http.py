"""Connections of clients that are slow, rude, many, or that have to be sent away."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from penstock_serve.server import http
from penstock_serve.server.http import HttpServer
from penstock_serve.server.server_socket import listen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

SOON_S = 600.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Application:
    """Answers at once; `/stream` only when the test lets it."""

    def __init__(self) -> None:
        self.asked = 0
        self.begun = asyncio.Event()
        self.end = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/flood":
            while not self.left.is_set():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
            self.begun.set()
            gone = asyncio.create_task(_gone(receive))
            ends = asyncio.create_task(self.end.wait())
            await asyncio.wait({gone, ends}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.left.set()
            gone.cancel()
            ends.cancel()
        await send({"type": "http.response.body", "body": b"answered"})


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Served:
    def __init__(self, server: HttpServer, app: Application, port: int) -> None:
        self.server = server
        self.app = app
        self.port = port
        self.task: asyncio.Task[None]
        self.writers: list[asyncio.StreamWriter] = []

    async def dial(self, say: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(say)
        return reader, writer


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Served]:
    app = Application()
    bound = listen("127.0.0.1", 0)
    given = {
        "connections_max": 8,
        "header_s": SOON_S,
        "drain_s": SOON_S,
        "on_overtime": app.end.set,
    }
    server = HttpServer(app, **{**given, **options})
    served = Served(server, app, bound.getsockname()[1])
    served.task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield served
    finally:
        server.stop()
        server.stop()
        await asyncio.wait_for(served.task, SOON_S)
        for writer in served.writers:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * SOON_S))  # type: ignore[arg-type]


def answer_of(raw: bytes) -> tuple[int, Any]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_a_head_that_does_not_come_is_given_up_with_a_word() -> None:
    async def test() -> None:
        async with serving(header_s=0.2) as served:
            silent, _a = await served.dial()
            slow, _b = await served.dial(b"GET / HTTP/1.1\r\nHost: x\r\nX-")

            assert await silent.read() == b""
            status, body = answer_of(await slow.read())
            assert status == 408
            assert body["error"]["message"] == "the head did not come within 0.2 s"
            assert served.app.asked == 0

    run(test)


def test_a_second_head_has_its_own_time() -> None:
    async def test() -> None:
        async with serving() as served:
            reader, writer = await served.dial(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await served.app.begun.wait()
            served.server._limits.header_s = 0.2  # The first head had all the time it needed.
            served.app.end.set()
            await reader.readuntil(b"answered")
            writer.write(b"GET / HT")

            assert b" 408 " in await reader.read()

    run(test)


def test_a_byte_now_and_then_gives_no_more_time() -> None:
    async def test() -> None:
        async with serving(header_s=0.3) as served:
            reader, writer = await served.dial(b"GET / HTTP/1.1\r\n")
            drip = asyncio.create_task(_drip(writer))

            try:
                assert b" 408 " in await reader.read()
            except ConnectionResetError:
                pass  # A byte that arrived with the close: the connection has ended, too.
            finally:
                drip.cancel()

    run(test)


async def _drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await asyncio.sleep(0.02)


def test_a_body_that_nobody_reads_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINGER_S", 0.2)

    async def test() -> None:
        async with serving() as served:
            reader, writer = await served.dial(
                b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n"
            )
            drip = asyncio.create_task(_drip(writer))

            reported = await reader.readuntil(b"answered")
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await reader.readexactly(1000)
            drip.cancel()
            assert b" 200 " in reported

    run(test)


def test_one_connection_too_many_takes_the_place_of_the_one_that_waits_longest() -> None:
    async def test() -> None:
        async with serving(connections_max=3) as served:
            busy, _busy = await served.dial(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await served.app.begun.wait()
            oldest, _a = await served.dial(b"GET / HT")
            newer, newer_writer = await served.dial(GET)
            await newer.readuntil(b"answered")
            asker, _b = await served.dial(GET)

            await asker.readuntil(b"answered")
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await oldest.readexactly(1)
            newer_writer.write(GET)
            await newer.readuntil(b"answered")
            served.app.end.set()
            await busy.readuntil(b"answered")

    run(test)


def test_where_every_connection_is_busy_one_more_is_refused() -> None:
    async def test() -> None:
        async with serving(connections_max=1) as served:
            busy, _busy = await served.dial(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await served.app.begun.wait()
            another, _a = await served.dial()

            status, body = answer_of(await another.read())
            assert status == 503
            assert body["error"]["type"] == "service_unavailable"
            served.app.end.set()
            await busy.readuntil(b"answered")

    run(test)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged at the level of a warning; another test may have asked for more."""
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "rude",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\nHost: x\r\n bad\x00: y\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 70_000,
        b"GET /" + b"x" * 70_000,
    ],
)
def test_what_is_no_http_gets_an_answer_in_our_shape(
    rude: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serving() as served:
            reader, _writer = await served.dial(rude)

            status, body = answer_of(await reader.readuntil(b"}}"))
            assert status == 400
            assert body["error"]["type"] == "invalid_request_error"
            assert served.app.asked == 0

    run(test)
    assert not warnings_of(caplog)


def test_nonsense_in_the_middle_of_an_answer_ends_that_connection_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with serving() as served:
            reader, writer = await served.dial(
                b"POST /stream HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            await served.app.begun.wait()
            writer.write(b"this is no chunk\r\n")

            await served.app.left.wait()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await reader.readuntil(b"answered")
            other, _writer = await served.dial(GET)
            await other.readuntil(b"answered")

    run(test)
    assert not warnings_of(caplog)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test() -> None:
        async with serving() as served:
            reader, _writer = await served.dial(GET * 5)

            for _ in range(5):
                await reader.readuntil(b"answered")
            assert served.app.asked == 5

    run(test)


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "WRITE_S", 0.2)

    async def test() -> None:
        async with serving() as served:
            reader, writer = await served.dial(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
            writer.transport.pause_reading()  # type: ignore[attr-defined]

            while served.server.server_state.connections or not served.app.asked:
                await asyncio.sleep(0.01)
            served.app.left.set()
            del reader

    run(test)


def test_a_stop_lets_answers_end_and_takes_no_more() -> None:
    async def test() -> None:
        async with serving() as served:
            reader, _writer = await served.dial(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await served.app.begun.wait()
            idle, _a = await served.dial(GET)
            await idle.readuntil(b"answered")

            served.server.stop()

            assert await idle.read() == b"\r\n0\r\n\r\n" or idle.at_eof()
            with pytest.raises(ConnectionRefusedError):
                await served.dial()
            assert not served.task.done()
            served.app.end.set()
            await reader.readuntil(b"answered")
            await served.task

    run(test)


@pytest.mark.parametrize("signals", [1, 2])
def test_when_the_time_is_over_or_it_is_asked_again_what_is_left_is_ended(signals: int) -> None:
    async def test() -> None:
        drain_s = 0.1 if signals == 1 else SOON_S
        async with serving(drain_s=drain_s) as served:
            reader, _writer = await served.dial(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await served.app.begun.wait()

            for _ in range(signals):
                served.server.stop()

            # `on_overtime` has the application end.
            await reader.readuntil(b"answered")
            await served.task

    run(test)


def test_a_client_that_does_not_read_keeps_nobody_from_stopping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "LAST_S", 0.2)

    async def test() -> None:
        async with serving(drain_s=0, on_overtime=lambda: None) as served:
            _reader, _writer = await served.dial(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await served.app.begun.wait()

            served.server.stop()

            await served.task
            await served.app.left.wait()

    run(test)
