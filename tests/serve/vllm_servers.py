"""Small HTTP servers that speak as vLLM does, and a router in front of them."""

from __future__ import annotations

import asyncio
import json
import select
import threading
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import httpx

from penstock.config.shared_stores import UNIX
from penstock_serve.observe.metrics import RouterMetrics
from penstock_serve.server.access_log import AccessLog
from penstock_serve.server.guard import Guard
from penstock_serve.server.http import HttpServer
from penstock_serve.server.server_socket import address_of, listen
from penstock_serve.server.vllm_app import RouterApp
from penstock_serve.server.vllm_router import VllmRouter
from penstock_serve.server.vllm_server import read_urls
from tests.serve.conftest import ONE_EACH, SOON_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Behaviour = Callable[["Conversation"], None]

LONG = "The lazy dog sleeps while the quick brown fox jumps over it, again and again. " * 20
"""More than a few chunks, so that it is handed over."""


class Conversation(BaseHTTPRequestHandler):
    """One request to a server."""

    protocol_version = "HTTP/1.1"
    server: FakeVllm
    asked: dict[str, Any]

    def log_message(self, *_: object) -> None:
        """The test looks at what matters."""

    def do_GET(self) -> None:
        vllm = self.server
        if self.path == "/health":
            vllm.checks += 1
            if vllm.misses:
                vllm.misses -= 1
                self.hang()
            else:
                self.answer(vllm.health, {})
        elif self.path == "/version":
            self.answer(200, vllm.version)
        elif self.path == "/metrics" and vllm.page:
            self.send_response(200)
            self.send_header("content-length", str(len(vllm.page)))
            self.end_headers()
            self.wfile.write(vllm.page)
        else:
            self.answer(200, {"path": self.path, "key": self.headers.get("authorization")})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.asked = {}
        with suppress(ValueError):
            self.asked = json.loads(body)
        self.server.note(self, body)
        self.server.behave(self)

    def answer(self, status: int, content: Any, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, *pieces: str, ends: bool = True) -> None:
        """Sends a stream in chunks that need not be events."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            data = piece.encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        if ends:
            self.wfile.write(b"0\r\n\r\n")

    def hang(self) -> None:
        """Says nothing (more) until the router closes the connection."""
        self.close_connection = True
        ready, _, _ = select.select([self.connection], [], [], SOON_S)
        assert ready
        self.server.left.release()

    def drop(self) -> None:
        """Closes the connection without another word."""
        self.close_connection = True

    @property
    def handoff(self) -> dict[str, Any]:
        params = self.asked.get("kv_transfer_params") or {}
        return params.get("penstock", {})


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The address of a server that answers everything alike."""

    class Alike(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", "0")))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - as its base class wants it

        def log_message(self, *_: object) -> None:
            """The test looks at what matters."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Alike) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(SOON_S)


class FakeVllm(ThreadingHTTPServer):
    """A server that answers as vLLM does, unless it is told otherwise."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, name: str) -> None:
        self.name = name
        self.health = 200
        self.page = b""
        """What `/metrics` answers, if anything."""
        self.misses = 0
        """Checks of its health that it does not answer."""
        self.checks = 0
        self.version: Any = {"version": "0.32.0"}
        self.behaves: list[Behaviour] = []
        """For the next requests; afterwards it answers as it should."""
        self.always: Behaviour | None = None
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.came = threading.Semaphore(0)
        self.left = threading.Semaphore(0)
        super().__init__(("127.0.0.1", 0), Conversation)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def address(self) -> str:
        return f"ipc:///handoffs/of/{self.name}"

    def note(self, conversation: Conversation, body: bytes) -> None:
        self.asked.append(conversation.asked)
        self.bodies.append(body)
        self.headers.append({k.lower(): v for k, v in conversation.headers.items()})
        with _computed_changed:
            if (conversation.asked.get("kv_transfer_params") or {}).get("do_remote_decode"):
                _computed.add(conversation.handoff.get("handoff"))
                _computed_changed.notify_all()
        self.came.release()

    def behave(self, conversation: Conversation) -> None:
        if self.behaves:
            self.behaves.pop(0)(conversation)
        elif self.always is not None:
            self.always(conversation)
        else:
            reply(conversation)

    def handle_error(self, *_: object) -> None:
        """The router has closed a connection."""

    def stop(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


@contextmanager
def fake_vllm(name: str) -> Iterator[FakeVllm]:
    server = FakeVllm(name)
    try:
        yield server
    finally:
        server.stop()


_computed: set[Any] = set()
"""The names of handoffs whose prompts prefill servers were asked to compute."""
_computed_changed = threading.Condition()


def reply(conversation: Conversation) -> None:
    """As a prefill or decode server with Penstock's connector; decode waits for the KV."""
    vllm, asked = conversation.server, conversation.asked
    params = asked.get("kv_transfer_params") or {}
    if params.get("do_remote_prefill"):
        with _computed_changed:
            name = conversation.handoff.get("handoff")
            assert _computed_changed.wait_for(lambda: name in _computed, SOON_S)
    if params.get("do_remote_decode"):
        own = {"handoff": conversation.handoff.get("handoff"), "address": vllm.address}
        told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "here"}
        content = {"id": "cmpl-prefill", "kv_transfer_params": {**told, "penstock": own}}
        conversation.answer(200, content)
    elif asked.get("stream"):
        conversation.stream(*events_of(vllm))
    else:
        conversation.answer(200, whole_of(vllm), **{"x-of-vllm": "kept"})


def whole_of(vllm: FakeVllm) -> dict[str, Any]:
    return {
        "id": f"cmpl-{vllm.name}",
        "choices": [{"text": "four words of text"}],
        "usage": {"prompt_tokens": 40, "completion_tokens": 4, "total_tokens": 44},
        "new_field": {"of": "vLLM"},
    }


def events_of(vllm: FakeVllm) -> list[str]:
    words = ({"id": f"cmpl-{vllm.name}", "choices": [{"text": each}]} for each in "abc")
    return [f"data: {json.dumps(each)}\n\n" for each in words] + ["data: [DONE]\n\n"]


def fail(status: int) -> Behaviour:
    return lambda conversation: conversation.answer(status, {"error": {"message": f"{status}"}})


def once_asked(other: FakeVllm, behave: Behaviour) -> Behaviour:
    """Behaves so when another server gets its next request: that one is in hand then."""
    while other.came.acquire(blocking=False):
        pass

    def wait_and_behave(conversation: Conversation) -> None:
        assert other.came.acquire(timeout=SOON_S)
        behave(conversation)

    return wait_and_behave


def hang(conversation: Conversation) -> None:
    conversation.hang()


def drop(conversation: Conversation) -> None:
    conversation.drop()


def hang_in_a_handoff(conversation: Conversation) -> None:
    """As a decode server whose prefill server does not compute the prompt."""
    if conversation.asked.get("kv_transfer_params"):
        conversation.hang()
    else:
        reply(conversation)


class RunningRouter:
    """A router on a port of its own, as clients see it."""

    def __init__(
        self,
        prefill: Sequence[FakeVllm],
        decode: Sequence[FakeVllm],
        key: str,
        *,
        drain_s: float = 1.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.bound = listen(host, 0)
        self.address = address_of(self.bound)
        url = "http://localhost" if host.startswith(UNIX) else self.address
        self.client = httpx.Client(base_url=url, timeout=SOON_S, limits=ONE_EACH)
        self._urls = read_urls([each.url for each in prefill], [each.url for each in decode])
        self._key = key
        self._drain_s = drain_s
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def complete(self, prompt: Any = LONG, **more: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **more})

    def stream(self, prompt: Any = LONG, **more: Any) -> str:
        return self.complete(prompt, stream=True, **more).text

    def servers(self) -> dict[str, Any]:
        """The state of each server, by its URL."""
        page = self.client.get("/health").json()
        return {**page["prefill"], **page["decode"]}

    def is_up_after_misses(self, server: FakeVllm, count: int) -> bool:
        """Whether a server that misses so many checks is used when it has answered the next."""
        eventually(lambda: self.servers()[server.url]["up"], wanted=True)
        server.misses, before = count, server.checks
        eventually(lambda: server.checks > before + count, wanted=True)
        return bool(self.servers()[server.url]["up"])

    def counted(self, name: str, **labels: str) -> float:
        found = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"penstock_router_{name}") and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                found += float(line.rpartition(" ")[2])
        return found

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(SOON_S)

    def stop(self) -> None:
        self.client.close()
        self._loop.call_soon_threadsafe(self._http.stop)
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        metrics = RouterMetrics()
        router = VllmRouter(*self._urls, metrics, timeout_s=SOON_S)
        app = RouterApp(router, metrics, Guard(self._key))
        self._http = HttpServer(
            AccessLog(app.app(), metrics.count_response),
            connections_max=100,
            header_s=10.0,
            drain_s=self._drain_s,
            on_stop=app.live.close,
            on_overtime=router.stop,
        )
        await router.start()
        self._ready.set()
        try:
            await self._http.serve(sockets=[self.bound])
        finally:
            router.stop()


@contextmanager
def running(
    prefill: Sequence[FakeVllm], decode: Sequence[FakeVllm], key: str = ""
) -> Iterator[RunningRouter]:
    router = RunningRouter(prefill, decode, key)
    router.start()
    try:
        yield router
    finally:
        router.stop()


@contextmanager
def starting() -> Iterator[Callable[[str], FakeVllm]]:
    """Starts servers by their names; all end with it."""
    with ExitStack() as held:

        def start(name: str) -> FakeVllm:
            server = FakeVllm(name)
            held.callback(server.stop)
            return server

        yield start
