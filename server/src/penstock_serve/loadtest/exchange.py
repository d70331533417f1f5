"""One request to a server with OpenAI's API: sent, streamed, measured.

| what went wrong     | means                                                                    |
|---------------------|--------------------------------------------------------------------------|
| `unreachable`       | no connection, or it was closed before an answer began                   |
| `timeout`           | the answer had not ended within the time for a request                   |
| `status N`          | the server answered with an HTTP status other than 200                   |
| `cut`               | the connection, or the stream, ended within the answer                   |
| `garbage`           | what came is not an event stream of OpenAI's API, or longer than allowed |
| `error in stream`   | the stream has an error object                                           |
| `empty`             | the answer ended properly and has no token                               |
| `not sent`          | too many requests were under way already                                 |

Each request has a connection of its own, so the time to the first token includes connecting.

The one rule: whatever a server does ends within the timeout as a `StreamedAnswer`, with or without
a `Failure`.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import h11
import msgspec

from penstock.errors import UnavailableError, shown
from penstock_serve.server.guard import wrong_key
from penstock_serve.server.vllm_server import ServerUrl, VllmAnswer, VllmFailure, VllmRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock_serve.loadtest.workloads import ChatMessage

LINE_BYTES_MAX = 1 << 20
"""Of one event; the largest of an honest server has some kB."""
ANSWER_BYTES_MAX = 64 << 20
ERROR_BYTES_MAX = 1 << 20
"""Of an answer with a bad status; its message is short."""
MESSAGE_CHARACTERS = 300
"""What is kept of a server's message."""
TOKENS_MAX = 1 << 31
RETRY_AFTER_MAX_S = 30.0
"""A server that wants more is not waited for any longer: the run would stand still."""
MODELS_S = 30.0
"""For `GET /v1/models`, which needs no computation."""

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_FIELDS = (b"event:", b"id:", b"retry:", b":")
"""Lines of an event stream that hold no answer."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class StreamUsage(msgspec.Struct):
    """What the server counted; it comes with the last event."""

    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were not computed; `None` if the server does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: StreamUsage | None = None
    error: Any = None


class ServedModel(msgspec.Struct):
    """A model of a server."""

    id: str
    max_model_len: Any = None

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and answer together; `None` if the server does not say."""
        said = self.max_model_len
        return said if isinstance(said, int) and 0 < said <= TOKENS_MAX else None


class _Models(msgspec.Struct):
    data: list[ServedModel]


_EVENTS = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request has no whole answer."""

    kind: str
    message: str
    retry_after_s: float = 0.0
    """How long the server wants to be left alone."""


class _Failed(Exception):  # noqa: N818 - of a server, not of ours
    def __init__(self, kind: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message, retry_after_s=retry_after_s)


@dataclass(slots=True, kw_only=True)
class StreamedAnswer:
    """What came back, with the loop's times at which it came."""

    began_s: float
    token_times_s: list[float] = field(default_factory=list)
    """Of each event with text. A server may put several tokens into one."""
    ended_s: float = 0.0
    texts: list[str] = field(default_factory=list)
    usage: StreamUsage | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """Whom to ask, and how."""

    url: ServerUrl
    model: str
    api: str = "chat"
    """One of `PATHS`."""
    api_key: str = field(default="", repr=False)
    timeout_s: float = 120.0
    """For a whole request."""
    ignore_eos: bool = False
    """Ask for answers of full length: an extension that vLLM, SGLang and Penstock know."""

    def body(self, history: Sequence[ChatMessage], output_tokens: int) -> bytes:
        """The body of a request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.api == "chat":
            fields["messages"] = [{"role": each.role, "content": each.content} for each in history]
        elif len(history) == 1:
            fields["prompt"] = history[0].content
        else:
            said = [f"{each.role}: {each.content}" for each in history]
            fields["prompt"] = "\n\n".join([*said, "assistant:"])
        return msgspec.json.encode(fields)

    async def ask(self, history: Sequence[ChatMessage], output_tokens: int) -> StreamedAnswer:
        """Sends a request and receives its answer; never raises for what a server does."""
        loop = asyncio.get_running_loop()
        body = self.body(history, output_tokens)
        answer = StreamedAnswer(began_s=loop.time())
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._stream(body, answer)
        except TimeoutError:
            answer.failure = Failure(
                kind="timeout", message=f"the answer did not end within {self.timeout_s:g} s"
            )
        except _Failed as failed:
            answer.failure = failed.failure
        answer.ended_s = loop.time()
        return answer

    async def _stream(self, body: bytes, answer: StreamedAnswer) -> None:
        exchange = self._exchange()
        try:
            request = VllmRequest(
                method="POST", path=PATHS[self.api], headers=self._headers(), body=body
            )
            try:
                await exchange.begin(self.url, request)
            except VllmFailure as failure:
                kind = "garbage" if _is_garbage(failure) else "unreachable"
                raise _Failed(kind, str(failure)) from failure
            if exchange.status != 200:
                raise await _refusal(exchange)
            _require_event_stream(exchange)
            await _receive(exchange, answer)
        finally:
            exchange.close()
        if not answer.token_times_s:
            raise _Failed("empty", "the answer has no token")

    def _exchange(self) -> VllmAnswer:
        # Whoever calls has the deadline of the whole request.
        return VllmAnswer(str(self.url), self.timeout_s, connect_s=self.timeout_s)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
        if self.api_key:
            headers.append((b"authorization", f"Bearer {self.api_key}".encode()))
        return headers

    async def served_model(self) -> ServedModel:
        """What the server says about the model that is asked, or about its first one.

        Of a model that was named, nothing need be known: the run shows whether there is one.
        Raises `UnavailableError`: it cannot be reached, or does not name its models; `ConfigError`:
        it has a key, and this is another one.
        """
        if not self.model:
            return (await self._models())[0]
        try:
            listed = await self._models()
        except UnavailableError:
            listed = []
        return next((each for each in listed if each.id == self.model), ServedModel(id=self.model))

    async def _models(self) -> list[ServedModel]:
        what = f"GET {self.url}/v1/models"
        exchange = self._exchange()
        try:
            async with asyncio.timeout(min(MODELS_S, self.timeout_s)):
                request = VllmRequest(method="GET", path="/v1/models", headers=self._headers())
                await exchange.begin(self.url, request)
                if exchange.status != 200:
                    raise await _refusal(exchange)
                body = await _short_body(exchange)
        except TimeoutError as error:
            raise UnavailableError(f"{what} was not answered in time") from error
        except _Failed as failed:
            if failed.failure.kind == "status 401":
                raise wrong_key(str(self.url)) from failed
            raise UnavailableError(f"{what}: {failed}") from failed
        except VllmFailure as failure:
            raise UnavailableError(str(failure)) from failure
        finally:
            exchange.close()
        try:
            found = msgspec.json.decode(body, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnavailableError(f"{what} names no model: give the name with --model") from error
        if not found:
            raise UnavailableError(f"{what} names no model: give the name with --model")
        return found


def _is_garbage(failure: VllmFailure) -> bool:
    """Whether what came is not HTTP, rather than an end too early."""
    cause = failure.__cause__
    return isinstance(cause, h11.RemoteProtocolError) and "closed" not in str(cause).lower()


async def _part(exchange: VllmAnswer) -> bytes:
    try:
        return await exchange.next_part()
    except VllmFailure as failure:
        kind = "garbage" if _is_garbage(failure) else "cut"
        raise _Failed(kind, str(failure)) from failure


async def _short_body(exchange: VllmAnswer) -> bytes:
    body = bytearray()
    while part := await _part(exchange):
        body += part
        if len(body) > ERROR_BYTES_MAX:
            raise _Failed("garbage", f"the answer is longer than {ERROR_BYTES_MAX} bytes")
    return bytes(body)


async def _refusal(exchange: VllmAnswer) -> _Failed:
    """What the server said with a bad status."""
    status = exchange.status
    body = await _short_body(exchange)
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = body.decode("utf-8", errors="replace")
    if isinstance(said, dict):
        said = said.get("error", said)
    if isinstance(said, dict):
        said = said.get("message", said)
    return _Failed(f"status {status}", _quoted(said), _retry_after_s(exchange))


def _quoted(said: object) -> str:
    text = said if isinstance(said, str) else shown(said)
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_CHARACTERS else f"{text[:MESSAGE_CHARACTERS]}…"


def _retry_after_s(exchange: VllmAnswer) -> float:
    given = dict(exchange.headers).get(b"retry-after", b"0")
    try:
        seconds = float(given)
    except ValueError:
        return 0.0  # A date: as if nothing was said.
    return min(seconds, RETRY_AFTER_MAX_S) if 0 < seconds < math.inf else 0.0


def _require_event_stream(exchange: VllmAnswer) -> None:
    kind = dict(exchange.headers).get(b"content-type", b"").decode("latin-1")
    if not kind.startswith("text/event-stream"):
        raise _Failed("garbage", f"content-type is {shown(kind)}, must be text/event-stream")


async def _receive(exchange: VllmAnswer, answer: StreamedAnswer) -> None:
    """Reads events up to `[DONE]`."""
    loop = asyncio.get_running_loop()
    rest = b""
    received = 0
    while part := await _part(exchange):
        now = loop.time()
        received += len(part)
        if received > ANSWER_BYTES_MAX:
            raise _Failed("garbage", f"the answer is longer than {ANSWER_BYTES_MAX} bytes")
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise _Failed("garbage", f"an event is longer than {LINE_BYTES_MAX} bytes")
        for line in lines:
            if _take_line(line.rstrip(b"\r"), answer, now):
                return
    raise _Failed("cut", "the stream ended without [DONE]")


def _take_line(line: bytes, answer: StreamedAnswer, now: float) -> bool:
    """Notes what a line says; returns whether it ends the answer."""
    if not line or line.startswith(_FIELDS):
        return False
    if not line.startswith(b"data:"):
        raise _Failed("garbage", f"a line of the stream is {_start(line)}")
    data = line[5:].strip()
    if data == b"[DONE]":
        return True
    try:
        event = _EVENTS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Failed("garbage", f"an event is {_start(data)}: {error}") from error
    if event.error is not None:
        said = event.error
        said = said.get("message", said) if isinstance(said, dict) else said
        raise _Failed("error in stream", _quoted(said))
    if event.usage is not None:
        answer.usage = _sensible(event.usage)
    text = "".join(map(_text_of, event.choices))
    if text or any(each.delta and each.delta.tool_calls for each in event.choices):
        answer.token_times_s.append(now)
        answer.texts.append(text)
    return False


def _start(line: bytes) -> str:
    return shown(line[:100].decode("utf-8", errors="replace"))


def _sensible(usage: StreamUsage) -> StreamUsage:
    if (usage.cached_tokens or 0) > usage.prompt_tokens:
        raise _Failed(
            "garbage",
            f"usage has {usage.cached_tokens} cached_tokens of {usage.prompt_tokens} prompt_tokens",
        )
    return usage


def _text_of(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    delta = choice.delta
    return delta.content or delta.reasoning_content or delta.reasoning or ""
