"""What a router takes for the death of a vLLM server, and what not."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from penstock_serve.server import vllm_server
from penstock_serve.server.vllm_server import MISSES_MAX, ServerUrl, VllmServer, within
from tests.serve.conftest import SOON_S
from tests.serve.vllm_servers import FakeVllm, fake_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNKS = [b"first", b"second"]


@pytest.fixture
def decode() -> Iterator[FakeVllm]:
    with fake_vllm("decode") as server:
        yield server


@contextmanager
def unreachable() -> Iterator[ServerUrl]:
    """A server that accepts no connection any more: its queue is full."""
    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = held.enter_context(socket.socket())
            waiting.settimeout(0)
            waiting.connect_ex(listener.getsockname())
        yield ServerUrl("http", "127.0.0.1", listener.getsockname()[1])


async def known(decode: FakeVllm) -> VllmServer:
    """A server that is up, and has had a prompt."""
    server = VllmServer(ServerUrl.read("--vllm-decode", decode.url), timeout_s=SOON_S)
    await server.check()
    assert server.is_up
    server.address = decode.address
    server.memory.add(CHUNKS)
    return server


def test_a_slow_connection_is_a_miss_and_no_death(
    decode: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "CONNECT_S", 0.1)

    async def check() -> None:
        server = await known(decode)
        there = server.url
        with unreachable() as server.url:
            for _ in range(MISSES_MAX - 1):
                await server.check()
                assert server.is_up
            await server.check()
        assert (server.is_up, server.is_silent) == (False, True)
        # It may be the network: what is known of it is kept.
        assert server.memory.leading(CHUNKS) == len(CHUNKS)
        assert (server.address, server.version) == (decode.address, "0.32.0")

        server.url = there
        await server.check()
        assert (server.is_up, server.is_silent) == (True, False)
        assert server.memory.leading(CHUNKS) == len(CHUNKS)

    asyncio.run(check())


def test_a_server_that_refuses_connections_is_dead_and_what_was_known_of_it_is_not_kept(
    decode: FakeVllm,
) -> None:
    async def check() -> None:
        server = await known(decode)
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        server.url = ServerUrl("http", "127.0.0.1", port)

        await server.check()

        assert (server.is_up, server.is_silent) == (False, False)
        assert server.memory.leading(CHUNKS) == 0
        assert (server.address, server.version) == ("", "")

    asyncio.run(check())


def test_the_router_s_own_stall_is_no_miss_of_a_server(
    decode: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that stands still for longer than all timeouts finds the answers that came."""
    monkeypatch.setattr(vllm_server, "CONNECT_S", 0.5)
    monkeypatch.setattr(vllm_server, "CHECK_S", 0.5)

    async def check() -> None:
        servers = [await known(decode) for _ in range(3)]
        for _ in range(MISSES_MAX + 1):
            checks = asyncio.gather(*(server.check() for server in servers))
            # So that the connections are begun.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            threading.Event().wait(0.7)
            await checks
            assert [server.is_up for server in servers] == [True] * 3

    asyncio.run(check())


def test_a_router_without_descriptors_blames_no_server(decode: FakeVllm) -> None:
    async def check() -> None:
        server = await known(decode)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as last:
            # The next one would have this number.
            lowest = last.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            for _ in range(MISSES_MAX + 1):
                await server.check()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert server.is_up

    asyncio.run(check())


def test_work_that_takes_too_long_is_cancelled() -> None:
    async def wait() -> None:
        cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        with pytest.raises(TimeoutError):
            await within(0.05, work())
        assert cancelled.is_set()

    asyncio.run(wait())
