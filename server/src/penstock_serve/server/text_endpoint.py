"""Requests for text, from their body to the last byte of the answer.

`TextEndpoint` reads, encodes and checks a request; `TextResponse` is its ASGI response. `Encoder`
turns text into tokens in threads, so that a long text delays only its own request: tokenizers
release the GIL, and short and long texts have threads of their own. A text that is certainly too
long is refused by its number of characters, before it is encoded.

Three rules: a request is checked as a whole before any of its prompts is sent to an instance; when
a client disconnects, its request ends, whatever its state; and the number of texts that wait to be
encoded is bounded.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import JSONResponse, Response

from penstock.errors import counted, shown
from penstock_serve.engine.requests import Request
from penstock_serve.engine.text import TextTooLong
from penstock_serve.observe.live import HANDED
from penstock_serve.server import errors
from penstock_serve.server.access_log import name_request, note_failure, note_tokens
from penstock_serve.server.answers import (
    AnswerFormat,
    AnswerPiece,
    AnswerReader,
    pieces_of,
    timings_ms,
)
from penstock_serve.server.fields import BadRequest
from penstock_serve.server.http import while_connected
from penstock_serve.server.instance_link import InstanceLost, RequestRefusal
from penstock_serve.server.openai_requests import (
    TOKENS_DEFAULT,
    TextRequest,
    read_chat,
    read_completion,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from penstock_serve.engine import messages as ms
    from penstock_serve.engine.sampling_options import Sampling
    from penstock_serve.engine.text import Text
    from penstock_serve.observe.live import RequestRecord
    from penstock_serve.observe.metrics import ServerMetrics
    from penstock_serve.server.router import Router


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEndpoint:
    """Turns requests for text into responses."""

    router: Router
    encoder: Encoder
    text: Text
    metrics: ServerMetrics
    admission: Admission
    model: str
    defaults: Sampling

    async def completions(self, body: bytes, tenant: str) -> ASGIApp:
        """The response to `POST /v1/completions`."""
        request = read_completion(body)
        refused = self._refusal(request, count=len(request.prompts))
        if refused is not None:
            return refused
        longest = self._facts.positions - 1
        prompts: list[list[int]] = []
        for at, prompt in enumerate(request.prompts):
            param = "prompt" if len(request.prompts) == 1 else f"prompt[{at}]"
            if isinstance(prompt, str):
                tokens = await self.encoder.encode(prompt, longest=longest, param=param)
            else:
                tokens = prompt
            _require_length(tokens, longest=longest, param=param)
            prompts.append(tokens)
        texts = [
            (given if isinstance(given, str) else self.text.decode(given)) if request.echo else None
            for given in request.prompts
        ]
        return self._answer(request, prompts, texts, tenant=tenant, chat=False)

    async def chat(self, body: bytes, tenant: str) -> ASGIApp:
        """The response to `POST /v1/chat/completions`."""
        request = read_chat(body)
        refused = self._refusal(request)
        if refused is not None:
            return refused
        longest = self._facts.positions - 1
        tokens = await self.encoder.encode_chat(
            request.messages, longest=longest, variables=request.chat_template_kwargs
        )
        _require_length(tokens, longest=longest, param="messages")
        return self._answer(request, [tokens], [None], tenant=tenant, chat=True)

    def require_model(self, name: str | None) -> None:
        """Refuses a request for another model."""
        if name not in {None, self.model}:
            raise BadRequest(
                f"model is {shown(name)}, must be {self.model!r}", param="model", status=404
            )

    def _refusal(self, request: TextRequest, count: int = 1) -> ASGIApp | None:
        """The error response, if it cannot be answered now; checked before encoding."""
        self.require_model(request.model)
        if count > self.admission.limit:
            raise BadRequest(
                f"prompt has {count} entries, must have at most {self.admission.limit}, which is "
                "how many requests may be under way",
                param="prompt",
            )
        refusal = self.admission.refusal(count)
        if refusal:
            self.metrics.requests.labels("refused").inc()
            return errors.busy(refusal)
        if self.router.gate.refuses:
            self.metrics.requests.labels("refused").inc()
            return errors.paused(str(self.router.gate.refusal()))
        if not self.router.answering:
            return errors.unavailable("no instance is ready")
        return None

    @property
    def context(self) -> int:
        """The most tokens of prompt and answer together; there must be an instance that answers."""
        return self._facts.positions

    @property
    def _facts(self) -> ms.InstanceReady:
        facts = self.router.answering[0].ready
        assert facts is not None
        return facts

    def _answer(
        self,
        request: TextRequest,
        prompts: Sequence[list[int]],
        texts: Sequence[str | None],
        *,
        tenant: str,
        chat: bool,
    ) -> ASGIApp:
        if not self.router.answering:
            # All instances were lost while the prompt was encoded.
            return errors.unavailable("no instance is ready")
        facts = self._facts
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        readers = [
            AnswerReader(
                self.text,
                request,
                self._submit(
                    request, tokens, facts, name=f"{name}-{at}" if at else name, tenant=tenant
                ),
                echo=text,
                first_choice=at * request.n,
            )
            for at, (tokens, text) in enumerate(zip(prompts, texts, strict=True))
        ]
        return TextResponse(
            readers=readers,
            form=AnswerFormat(
                id=name,
                model=self.model,
                chat=chat,
                logprobs=request.logprobs is not None,
                tiers=facts.tiers,
                text=self.text,
            ),
            stream=request.stream,
            includes_usage=request.include_usage,
            router=self.router,
            metrics=self.metrics,
            admission=self.admission,
        )

    def _submit(
        self,
        request: TextRequest,
        tokens: list[int],
        facts: ms.InstanceReady,
        *,
        name: str,
        tenant: str,
    ) -> Request:
        given = {name: getattr(request, name) for name in OF_THE_MODEL}
        return Request(
            id=name,
            prompt=tuple(tokens),
            max_tokens=_max_tokens(request, room=facts.positions - len(tokens)),
            min_tokens=request.min_tokens,
            ignores_stop_tokens=request.ignore_eos,
            stop_tokens=frozenset(request.stop_token_ids),
            answers=request.n,
            sampling=replace(
                self.defaults,
                presence_penalty=request.presence_penalty,
                frequency_penalty=request.frequency_penalty,
                logit_bias=request.logit_bias,
                seed=request.seed,
                logprobs=request.logprobs or 0,
                **{name: value for name, value in given.items() if value is not None},
            ),
            scores_prompt=request.scores_prompt,
            first_alone=request.logprobs is None and request.n == 1,
            priority=request.priority,
            hints=request.hints,
            cache_key=request.prompt_cache_key,
            tenant=tenant,
            reuse=request.cache != "off",
            store=request.cache == "use",
        )


def _require_length(tokens: Sequence[int], *, longest: int, param: str) -> None:
    if not tokens:
        raise BadRequest(f"{param} is empty, must have at least one token", param=param)
    if len(tokens) > longest:
        raise BadRequest(
            f"{param} has {len(tokens)} tokens, must have at most {longest}, the longest context "
            "less one",
            param=param,
        )


def _max_tokens(request: TextRequest, *, room: int) -> int:
    """The longest answer; by default bounded by the room that the prompt leaves."""
    given = request.max_tokens
    if given is None:
        given = min(max(TOKENS_DEFAULT, request.min_tokens), room)
    if request.min_tokens > given:
        raise BadRequest(
            f"min_tokens is {request.min_tokens}, must be at most {room}, what the prompt leaves "
            "of the longest context",
            param="min_tokens",
        )
    if given > room:
        raise BadRequest(
            f"max_tokens is {given}, must be at most {room}, what the prompt leaves of the longest "
            "context",
            param="max_tokens",
        )
    # An instance always samples one token; with max_tokens 0, only the prompt is returned.
    return max(1, given)


OF_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options whose defaults are the model's."""
REFUSED_FIELDS = frozenset({"logit_bias", "stop_token_ids"})
"""Fields that only an instance can check; its refusal begins with the field's name."""
REFUSED_KINDS = {"busy": "rate_limit_error", "paused": "service_unavailable"}
"""OpenAI's name for each kind of refusal; any other is an invalid request."""


class Admission:
    """Limits the number of prompts under way."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0

    def refusal(self, count: int = 1) -> str:
        """Why `count` more are refused now; empty if they are not."""
        if self.running + count <= self.limit:
            return ""
        return f"{counted(self.running, 'request')} under way, at most {self.limit} may be"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextResponse:
    """An ASGI response; the request ends when the client disconnects."""

    readers: Sequence[AnswerReader]
    """One for each prompt; they are answered at the same time."""
    form: AnswerFormat
    stream: bool
    includes_usage: bool
    """Whether a stream ends with the usage."""
    router: Router
    metrics: ServerMetrics
    admission: Admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name_request(scope, self.readers[0].sent.id)
        refusal = self.admission.refusal(len(self.readers))
        if refusal:
            self.metrics.requests.labels("refused").inc()
            await errors.busy(refusal)(scope, receive, send)
            return
        self.admission.running += len(self.readers)
        try:
            await while_connected(self._answer(scope, receive, send), receive)
        finally:
            self.admission.running -= len(self.readers)
            note_tokens(
                scope,
                prompt=sum(reader.prompt_tokens for reader in self.readers),
                cached=[sum(reader.cached) for reader in self.readers],
                completion=sum(reader.completion_tokens for reader in self.readers),
                timings_ms=timings_ms(self.readers),
            )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces()) as pieces:
            # Until the first piece, the instance may still refuse the request with a status.
            try:
                first = await anext(pieces)
            except RequestRefusal as refusal:
                response = _refused(refusal)
            except InstanceLost as lost:
                response = errors.unavailable(str(lost))
            else:
                if self.stream:
                    await self._stream(first, pieces, scope, send)
                    return
                response = await self._whole(first, pieces)
        await response(scope, receive, send)

    async def _whole(
        self, first: AnswerPiece, pieces: AsyncGenerator[AnswerPiece, None]
    ) -> Response:
        try:
            found = [first, *[piece async for piece in pieces]]
        except InstanceLost as lost:
            return errors.unavailable(f"{lost}, in the middle of the answer")
        except RequestRefusal as refusal:
            # Of one of several prompts, or of a request that was aborted by a pause.
            return _refused(refusal)
        return JSONResponse(self.form.whole(self.readers, found))

    async def _stream(
        self,
        first: AnswerPiece,
        pieces: AsyncGenerator[AnswerPiece, None],
        scope: Scope,
        send: Send,
    ) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        begun = {first.choice}
        await _event(send, self.form.chunk(first, first=True))
        try:
            async for piece in pieces:
                is_first = piece.choice not in begun
                begun.add(piece.choice)
                await _event(send, self.form.chunk(piece, first=is_first))
        except InstanceLost as lost:
            note_failure(scope)
            message = f"{lost}, in the middle of the answer"
            await _event(send, {"error": errors.shape(message, "server_error")})
        except RequestRefusal as refusal:
            # Of one of several prompts, or of a request that was aborted by a pause.
            note_failure(scope)
            kind = REFUSED_KINDS.get(refusal.kind, "invalid_request_error")
            await _event(send, {"error": errors.shape(str(refusal), kind)})
        else:
            if self.includes_usage:
                await _event(send, self.form.last_chunk(self.readers))
            await send(
                {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True}
            )
        await send({"type": "http.response.body", "body": b""})

    def _pieces(self) -> AsyncGenerator[AnswerPiece, None]:
        """The pieces of all answers as they come."""
        streams = [self._measured(reader) for reader in self.readers]
        return streams[0] if len(streams) == 1 else _merged(streams)

    async def _measured(self, reader: AnswerReader) -> AsyncGenerator[AnswerPiece, None]:
        """The pieces of one prompt's answers, measured as they pass."""
        metrics, submit = self.metrics, reader.sent
        metrics.prompt_tokens.inc(len(submit.prompt))
        began = first = last = time.monotonic()
        record = metrics.traffic.begin(submit.id, prompt_tokens=len(submit.prompt), now=began)
        outcome = "aborted"
        stop = partial(self.router.stop, submit.id)
        try:
            tokens = self.router.generate(submit)
            async with aclosing(pieces_of(reader, tokens, stop)) as pieces:
                async for piece in pieces:
                    now = time.monotonic()
                    is_first = last == began
                    seen = metrics.first_token_s if is_first else metrics.between_tokens_s
                    seen.observe(now - last)
                    if is_first:
                        first = now
                        self._note_first_token(record, reader, now)
                    gap_s = None if is_first else (now - last) / max(1, piece.generated)
                    metrics.traffic.token(generated=piece.generated, gap_s=gap_s, now=now)
                    reader.decode_s = now - first
                    last = now
                    metrics.generated_tokens.inc(piece.generated)
                    yield piece
            outcome = "answered"
        except InstanceLost:
            outcome = "failed"
            raise
        except RequestRefusal:
            outcome = "refused"
            raise
        finally:
            metrics.requests.labels(outcome).inc()
            if outcome == "answered":
                metrics.answered(reader.phases_s, time.monotonic() - began)
            tokens_out = reader.completion_tokens
            metrics.traffic.end(record, outcome=outcome, generated=tokens_out, now=time.monotonic())

    def _note_first_token(self, record: RequestRecord, reader: AnswerReader, now: float) -> None:
        cached = sum(reader.cached)
        found = {tier: n for tier, n in zip(self.form.tiers, reader.cached, strict=False) if n}
        if reader.handed:
            found[HANDED] = reader.prompt_tokens - cached
        # A system prompt that all requests share makes none of them much quicker.
        is_warm = 2 * cached >= reader.prompt_tokens
        self.metrics.traffic.first_token(record, found=found, is_warm=is_warm, now=now)


def _refused(refusal: RequestRefusal) -> Response:
    if refusal.kind == "busy":
        return errors.busy(str(refusal))
    if refusal.kind == "paused":
        return errors.paused(str(refusal))
    field = str(refusal).partition(" ")[0]
    raise BadRequest(str(refusal), param=field if field in REFUSED_FIELDS else None) from refusal


async def _merged(
    streams: Sequence[AsyncGenerator[AnswerPiece, None]],
) -> AsyncGenerator[AnswerPiece, None]:
    """The pieces of several streams as they come; the first failure ends all of them."""
    # Bounded by the number of tokens of the answers.
    queue: asyncio.Queue[AnswerPiece | asyncio.Task[None]] = asyncio.Queue()

    async def follow(stream: AsyncGenerator[AnswerPiece, None]) -> None:
        async with aclosing(stream):
            async for piece in stream:
                queue.put_nowait(piece)

    tasks = [asyncio.create_task(follow(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    running = len(tasks)
    try:
        while running:
            found = await queue.get()
            if isinstance(found, AnswerPiece):
                yield found
            else:
                running -= 1
                found.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _event(send: Send, content: dict[str, Any]) -> None:
    body = f"data: {json.dumps(content)}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


LONG_CHARACTERS = 20_000
"""A text of this length takes tens of milliseconds."""
WAITING_MAX = 256
FoundT = TypeVar("FoundT")


class Encoder:
    """A tokenizer with threads of its own."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._short = ThreadPoolExecutor(2, thread_name_prefix="encode")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="encode-long")
        self._waiting = 0

    async def encode(self, text: str, *, longest: int, param: str) -> list[int]:
        """The tokens of a text.

        Raises `BadRequest`: it has more tokens than the longest that is allowed, or too many wait.
        """
        return await self._run(
            len(text), longest, param, lambda: self._text.encode(text, longest=longest)
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        longest: int,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation.

        Raises `BadRequest`: it has more tokens than the longest that is allowed, the model's
        template does not take it, or too many wait.
        """
        characters = sum(len(turn["content"]) + 1 for turn in messages)
        return await self._run(
            characters,
            longest,
            "messages",
            lambda: self._text.encode_chat(messages, longest=longest, variables=variables),
        )

    async def _run(
        self, characters: int, longest: int, param: str, encode: Callable[[], FoundT]
    ) -> FoundT:
        if self._waiting >= WAITING_MAX:
            raise BadRequest(
                f"{self._waiting} texts wait to be encoded, at most {WAITING_MAX} may", status=429
            )
        threads = self._long if characters > LONG_CHARACTERS else self._short
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, encode)
        except TextTooLong as error:
            raise BadRequest(
                f"{param} {error}, must have at most {longest}, the longest context less one",
                param=param,
            ) from error
        except ValueError as error:
            raise BadRequest(str(error), param=param) from error
        finally:
            self._waiting -= 1
