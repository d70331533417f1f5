"""A vLLM server behind the router: its address, its health, and requests to it over HTTP.

| state  | when                                                       | the next check is after    |
|--------|------------------------------------------------------------|----------------------------|
| up     | `GET /health` is 200, `GET /version` says vLLM's version   | `CHECK_EVERY_S`            |
| down   | it refuses connections, or is not healthy                  | `RETRY_S`, then twice as   |
| silent | it could not be reached, or did not answer, `MISSES_MAX`   | long each time, to a limit |
|        | checks in a row                                            |                            |

A server that is silent is asked only if no other one is up. What is known of it is kept: it may be
the network, or a machine that stands still. What this process causes itself is not counted: time in
which its event loop stood still does not pass, and a lack of descriptors or ports is nobody's miss.

A request that fails has the server checked at once. When a server goes down, requests to it that
have no answer yet fail, so that they can be sent to another one.

Each request has a connection of its own: closing it is how vLLM is told to abort the request.

The one rule: every wait for a server has a timeout, and every failure is a `VllmFailure`.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import os
import ssl
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlsplit

import h11
import msgspec

from penstock.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

logger = logging.getLogger("penstock.serve.vllm_server")

CONNECT_S = 3.0
TICK_S = 0.25
"""In one tick, no more time passes than this, however long the event loop stood still."""
CHECK_S = 5.0
"""How long a server may take to answer a check."""
CHECK_EVERY_S = 2.0
CHECK_EVERY_MAX_S = 10.0
RETRY_S = 0.25
"""The first check after a server went down; the time doubles with each further one."""
MISSES_MAX = 3
"""A busy machine may miss a check; so many in a row, and the server hangs."""
ANSWER_BYTES_MAX = 256 << 20
"""A whole answer is kept until it is complete, so that another server can be asked until then."""
FAILURES_KEPT = 16
"""More failures of one server within `routing.failed_s` do not make it worse."""
_READ_BYTES = 64 << 10
_SCHEMES = {"http": 80, "https": 443}
_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}

Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")


class FailureVerdict(enum.Enum):
    """What a failure says about the server."""

    DEAD = "it does not serve"
    SILENT = "it may, or may not"
    OURS = "nothing: the failure is ours"


class VllmFailure(Exception):  # noqa: N818 - of a server, not of ours
    """A server did not answer, or with an error that another server might not give.

    `answer` is what it said, if it said something.
    """

    def __init__(
        self,
        problem: str,
        answer: WholeAnswer | None = None,
        verdict: FailureVerdict = FailureVerdict.SILENT,
    ) -> None:
        super().__init__(problem)
        self.answer = answer
        self.verdict = verdict


async def within(seconds: float, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, if it comes within `seconds` of this process's own time.

    After a stall of this process, or of the machine, what was waited for is often there already:
    a plain timeout would be over before it is looked at.
    Raises `TimeoutError`: it did not come; `work` was cancelled.
    """
    loop = asyncio.get_running_loop()
    working = asyncio.ensure_future(work)
    left = seconds
    try:
        while True:
            began, tick = loop.time(), min(left, TICK_S)
            await asyncio.wait({working}, timeout=tick)
            if working.done():
                return working.result()
            left -= min(loop.time() - began, tick)
            if left <= 0:
                raise TimeoutError
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


class ServerUrl(NamedTuple):
    """Where a server is."""

    scheme: str
    host: str
    port: int
    path: str = ""
    """Before the paths of the API; without a slash at the end."""

    @classmethod
    def read(cls, option: str, text: str) -> ServerUrl:
        """Reads a URL.

        Raises `ConfigError`: it is none of an HTTP server; the message names the option.
        """
        problem = ConfigError(
            option, f"is {shown(text)}, must be a URL such as http://HOST:PORT, without /v1"
        )
        try:
            parts = urlsplit(text)
            port = parts.port or _SCHEMES.get(parts.scheme, 0)
        except ValueError as error:
            raise problem from error
        path = parts.path.rstrip("/")
        extra = parts.query or parts.fragment or "@" in parts.netloc
        usable = text.isascii() and text.isprintable() and " " not in text
        if not (usable and port and parts.hostname) or extra or path.endswith("/v1"):
            raise problem
        return cls(parts.scheme, parts.hostname, port, path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRequest:
    """A request to a server."""

    method: str
    path: str
    headers: Headers = field(default_factory=list)
    """Without those that belong to one connection."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that has come completely."""

    status: int
    headers: Headers
    body: bytes


@cache
def _trusted() -> ssl.SSLContext:
    """The machine's certificates, which take milliseconds to read."""
    return ssl.create_default_context()


class VllmAnswer:
    """A request under way: first its head, then the parts of its body."""

    def __init__(self, server: str, timeout_s: float, *, connect_s: float | None = None) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._connect_s = CONNECT_S if connect_s is None else connect_s
        self._http = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._aborted = ""
        self.status = 0
        self.headers: Headers = []

    async def begin(self, url: ServerUrl, request: VllmRequest) -> None:
        """Sends the request and receives the head of the answer.

        Raises `VllmFailure`: the server did not answer.
        """
        try:
            await within(self._connect_s, self._open(url))
            assert self._writer is not None
            if self._aborted:
                raise self._failure(self._aborted)
            async with asyncio.timeout(self._timeout_s):
                self._writer.write(self._encoded(url, request))
                await self._writer.drain()
        except TimeoutError as error:
            raise self._failure("cannot be reached: it did not answer in time") from error
        except UnicodeError as error:
            raise self._failure(f"cannot be reached: no host has this name ({error})") from error
        except ssl.SSLError as error:
            cause = error.reason or str(error)
            raise self._failure(
                f"cannot be reached: {cause}; if it has no TLS, its address begins with http://"
            ) from error
        except OSError as error:
            cause = error.strerror or str(error)
            if isinstance(error, ConnectionError) and error.errno is not None:
                # asyncio's own text repeats the address.
                cause = os.strerror(error.errno)
            raise self._failure(f"cannot be reached: {cause}", _verdict_of(error)) from error
        event = await self._next_event()
        while not isinstance(event, h11.Response):
            # Such as 100, which is no answer yet.
            if not isinstance(event, h11.InformationalResponse):
                raise self._failure("closed the connection without an answer")
            event = await self._next_event()
        self.status, self.headers = event.status_code, list(event.headers)

    async def _open(self, url: ServerUrl) -> None:
        # The name that is verified is the host's.
        secure = _trusted() if url.scheme == "https" else None
        opened = asyncio.open_connection(url.host, url.port, ssl=secure)
        # Kept here: whoever waits for this may be cancelled as it comes.
        self._reader, self._writer = await opened

    async def next_part(self) -> bytes:
        """The next part of the body, empty at its end.

        Raises `VllmFailure`: the answer breaks off.
        """
        while isinstance(event := await self._next_event(), h11.Data):
            if event.data:
                return bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise self._failure("closed the connection within its answer")
        return b""

    async def whole(self, begun: bytes = b"", *, bytes_max: int = ANSWER_BYTES_MAX) -> WholeAnswer:
        """Receives the rest of the body; `begun` is what has been received of it.

        Raises `VllmFailure`: the answer breaks off, or is too long.
        """
        body = bytearray(begun)
        while part := await self.next_part():
            body += part
            if len(body) > bytes_max:
                raise self._failure(f"answered with more than {bytes_max} bytes")
        return WholeAnswer(self.status, self.headers, bytes(body))

    def abort(self, cause: str) -> None:
        """Ends it from outside: whoever reads it gets a `VllmFailure`."""
        self._aborted = cause
        self.close()

    def close(self) -> None:
        """Closes the connection: a request that has not ended is aborted; may be called twice."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _encoded(self, url: ServerUrl, request: VllmRequest) -> bytes:
        host = f"[{url.host}]" if ":" in url.host else url.host
        head = h11.Request(
            method=request.method,
            target=f"{url.path}{request.path}",
            headers=[
                (b"host", f"{host}:{url.port}".encode()),
                (b"connection", b"close"),
                (b"content-length", str(len(request.body)).encode()),
                *request.headers,
            ],
        )
        events = (head, h11.Data(data=request.body), h11.EndOfMessage())
        return b"".join(self._http.send(event) or b"" for event in events)

    async def _next_event(self) -> object:
        assert self._reader is not None
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                async with asyncio.timeout(self._timeout_s):
                    self._http.receive_data(await self._reader.read(_READ_BYTES))
        except TimeoutError as error:
            raise self._failure(f"said nothing for {self._timeout_s:g} s") from error
        except OSError as error:
            raise self._failure(f"broke the connection: {error.strerror or error}") from error
        except h11.RemoteProtocolError as error:
            if self._http.their_state is h11.ERROR and self._reader.at_eof() and not self.status:
                raise self._failure("closed the connection without an answer") from error
            raise self._failure(f"broke off its answer ({error})") from error
        return event

    def _failure(
        self, problem: str, verdict: FailureVerdict = FailureVerdict.SILENT
    ) -> VllmFailure:
        return VllmFailure(f"{self._server} {self._aborted or problem}", verdict=verdict)


async def fetch(
    url: ServerUrl, path: str, *, timeout_s: float, bytes_max: int = ANSWER_BYTES_MAX
) -> WholeAnswer:
    """The answer to a GET.

    Raises `VllmFailure`: there is none, or none that is whole.
    """
    answer = VllmAnswer(str(url), timeout_s)
    try:
        await answer.begin(url, VllmRequest(method="GET", path=path))
        return await answer.whole(bytes_max=bytes_max)
    finally:
        answer.close()


def _verdict_of(error: OSError) -> FailureVerdict:
    """What it says of a server that a connection to it failed."""
    if error.errno in _OWN_LIMITS:
        return FailureVerdict.OURS
    # Nobody listens there. Other causes are of the network, or of the machine that resolves names.
    return (
        FailureVerdict.DEAD if isinstance(error, ConnectionRefusedError) else FailureVerdict.SILENT
    )


class _Version(msgspec.Struct):
    """What vLLM answers to `GET /version`."""

    version: str


class VllmServer:
    """One server, as the router sees it."""

    def __init__(self, url: ServerUrl, *, timeout_s: float) -> None:
        self.url = url
        self.name = str(url)
        self.is_up = False
        self.is_silent = False
        """Whether it is down only since it does not answer."""
        self.cause = "it was not checked yet"
        """Why it is down."""
        self.version = ""
        self.address = ""
        """Where decode servers take prompts from it; empty until one of its answers says so."""
        self.hands_over_after = 0.0
        """When it may be asked again for prompts, after it has handed nothing over."""
        self.memory = PromptMemory()
        self.pending_blocks = 0
        """What it has to compute, of the prompts that it was sent."""
        self._timeout_s = timeout_s
        self._answers: dict[VllmAnswer, bool] = {}
        """Requests in hand, and whether their answers have begun."""
        self._failed: deque[float] = deque(maxlen=FAILURES_KEPT)
        self._misses = 0
        self._check_now = asyncio.Event()

    @property
    def load(self) -> int:
        """Requests in hand."""
        return len(self._answers)

    def failures(self, within_s: float) -> int:
        """How many requests it failed lately."""
        since = asyncio.get_running_loop().time() - within_s
        while self._failed and self._failed[0] < since:
            self._failed.popleft()
        return len(self._failed)

    def note_failure(self) -> None:
        """A request failed: the server is checked at once."""
        self._failed.append(asyncio.get_running_loop().time())
        self._check_now.set()

    async def ask(self, request: VllmRequest) -> VllmAnswer:
        """Sends a request; give the answer back with `end`.

        Raises `VllmFailure`: there is no answer.
        """
        answer = VllmAnswer(self.name, self._timeout_s)
        self._answers[answer] = False
        begun = False
        try:
            await answer.begin(self.url, request)
            begun = True
        finally:
            if not begun:
                self.end(answer)
        return answer

    def note_begun(self, answer: VllmAnswer) -> None:
        """The client gets this answer: it is not given up when a check fails."""
        self._answers[answer] = True

    def end(self, answer: VllmAnswer) -> None:
        """Closes an answer, complete or not."""
        answer.close()
        self._answers.pop(answer, None)

    def abort_all(self, cause: str) -> None:
        """Ends all requests in hand."""
        for answer in list(self._answers):
            answer.abort(cause)

    async def watch(self) -> None:
        """Checks the server again and again, until it is cancelled."""
        wait_s = RETRY_S
        while True:
            wait_s = CHECK_EVERY_S if self.is_up else min(2 * wait_s, CHECK_EVERY_MAX_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._check_now.wait()
            self._check_now.clear()
            was_up = self.is_up
            await self.check()
            if was_up and not self.is_up:
                wait_s = RETRY_S / 2

    async def check(self) -> None:
        """Asks how it is, and notes the answer."""
        try:
            problem = await within(CHECK_S, self._problem())
            verdict = FailureVerdict.DEAD
        except TimeoutError:
            problem, verdict = (
                f"did not answer GET /health within {CHECK_S:g} s",
                FailureVerdict.SILENT,
            )
        except VllmFailure as failure:
            problem, verdict = str(failure).removeprefix(f"{self.name} "), failure.verdict
        if not problem:
            self._misses = 0
            self._rise()
            return
        self._misses += verdict is FailureVerdict.SILENT
        if verdict is FailureVerdict.DEAD or not self.version or self._misses >= MISSES_MAX:
            self._fall(problem, verdict)

    async def _problem(self) -> str:
        """What it says is wrong with it; empty if nothing is. Whoever calls this has a timeout.

        Raises `VllmFailure`: it says nothing.
        """
        health = await fetch(self.url, "/health", timeout_s=2 * CHECK_S)
        if health.status != 200:
            return f"answered GET /health with status {health.status}"
        if not self.version or self.is_silent:
            self.version = _version_in(await fetch(self.url, "/version", timeout_s=2 * CHECK_S))
        if not self.version:
            return "is no vLLM server: GET /version does not say vLLM's version"
        return ""

    def _rise(self) -> None:
        if not self.is_up:
            logger.info("server up: url=%s version=%s", self.name, self.version)
        self.is_up, self.is_silent, self.cause = True, False, ""

    def _fall(self, cause: str, verdict: FailureVerdict) -> None:
        if cause != self.cause:
            logger.warning("server down: url=%s cause=%s", self.name, cause)
        self.is_up, self.cause = False, cause
        self.is_silent = verdict is FailureVerdict.SILENT and bool(self.version)
        if not self.is_silent:
            # The next life has another address, and nothing cached.
            self.version = self.address = ""
            self.hands_over_after = 0.0
            self.memory = PromptMemory()
        for answer in [each for each, begun in self._answers.items() if not begun]:
            answer.abort(cause)


def _version_in(answer: WholeAnswer) -> str:
    try:
        return msgspec.json.decode(answer.body, type=_Version).version
    except msgspec.DecodeError:
        return ""


def read_urls(prefill: Sequence[str], decode: Sequence[str]) -> list[list[ServerUrl]]:
    """The URLs of prefill and of decode servers.

    Raises `ConfigError`: one is wrong, or given twice, or there is no decode server.
    """
    if not decode:
        raise ConfigError("--vllm-decode", "is not given, must be the URL of a vLLM server")
    found: dict[ServerUrl, str] = {}
    for option, texts in (("--vllm-prefill", prefill), ("--vllm-decode", decode)):
        for text in texts:
            url = ServerUrl.read(option, text)
            if url in found:
                raise ConfigError(
                    option, f"is {shown(text)}, which {found[url]} names already: give it once"
                )
            found[url] = option
    return [
        [url for url, option in found.items() if option == f"--vllm-{role}"]
        for role in ("prefill", "decode")
    ]


CHUNK_BYTES = 256
BLOCKS_A_CHUNK = 4
"""256 bytes of text or of a JSON list have about 64 tokens: four blocks of 16, which the weights of
`[routing]` count in."""
CHUNKS_MAX = 4096
"""Of one prompt; what follows does not matter for the choice of a server."""
REMEMBERED_MAX = 1 << 16
"""Chunks of one server, about 10 MB: 16 MiB of text, more than fits into most KV caches."""


def chunks_of(prompt: bytes, *context: bytes) -> list[bytes]:
    """The names of a prompt's full chunks."""
    name = blake2b(repr(context).encode(), digest_size=16).digest()
    found = []
    last = min(len(prompt), CHUNKS_MAX * CHUNK_BYTES) - CHUNK_BYTES
    for start in range(0, last + 1, CHUNK_BYTES):
        name = blake2b(name + prompt[start : start + CHUNK_BYTES], digest_size=16).digest()
        found.append(name)
    return found


class PromptMemory:
    """The chunks that one server was sent, the latest `REMEMBERED_MAX`.

    So prompts with the same beginning go there again. The router knows prompts as they came: as
    JSON. A prompt is cut into chunks of `CHUNK_BYTES` of that, and a chunk is named by a hash of
    everything up to its end. Text and token lists that begin alike have chunks in common if they
    were written alike; if not, a hit is missed, nothing else. What a server has evicted is not
    known here.
    """

    def __init__(self) -> None:
        self._chunks: OrderedDict[bytes, None] = OrderedDict()

    def add(self, chunks: Sequence[bytes]) -> None:
        # The first chunks last: a chunk is of no use without those before it.
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > REMEMBERED_MAX:
            self._chunks.popitem(last=False)

    def leading(self, chunks: Sequence[bytes]) -> int:
        """How many leading chunks of a prompt it was sent."""
        for position, chunk in enumerate(chunks):
            if chunk not in self._chunks:
                return position
        return len(chunks)
