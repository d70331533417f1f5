"""One request for text, from its admission to the last byte of its answer.

The one rule: a client that goes away takes its request along, whatever the request is doing,
and whether its answer is a stream or not.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from penstock.serve import errors
from penstock.serve.access import name_request, note_failure, note_tokens
from penstock.serve.answers import Piece, pieces_of
from penstock.serve.fields import BadRequest
from penstock.serve.link import Lost, Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from starlette.types import Receive, Scope, Send

    from penstock.engine import messages as ms
    from penstock.observe.metrics import ServerMetrics
    from penstock.serve.answers import Reader
    from penstock.serve.forms import Form
    from penstock.serve.router import Router


REFUSED_FIELDS = frozenset({"logit_bias", "stop_token_ids"})
"""Fields that only an instance can check; it begins its refusal with their names."""


class Admission:
    """How many prompts are under way, and how many may be."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0

    def refusal(self, count: int = 1) -> str:
        """Why so many more are not taken now; empty if they are."""
        if self.running + count <= self.limit:
            return ""
        return f"{self.running} requests are under way, at most {self.limit} may be"


@dataclass(frozen=True, slots=True)
class Part:
    """One prompt of a request, and who follows its answers."""

    submit: ms.Submit
    reader: Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Generating:
    """An answer in the making: an ASGI response that ends with its client."""

    parts: Sequence[Part]
    """A prompt each, all of which are answered at once."""
    form: Form
    stream: bool
    tells_usage: bool
    """Whether a stream ends with the usage."""
    router: Router
    metrics: ServerMetrics
    admission: Admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, unless too many requests are under way or the client goes away."""
        name_request(scope, self.parts[0].submit.id)
        refusal = self.admission.refusal(len(self.parts))
        if refusal:
            self.metrics.requests.labels("refused").inc()
            await errors.busy(refusal)(scope, receive, send)
            return
        self.admission.running += len(self.parts)
        try:
            await self._while_connected(scope, receive, send)
        finally:
            self.admission.running -= len(self.parts)
            note_tokens(
                scope,
                prompt=sum(reader.prompt_tokens for reader in self._readers),
                cached=[sum(reader.cached) for reader in self._readers],
                completion=sum(reader.completion_tokens for reader in self._readers),
            )

    async def _while_connected(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces()) as pieces:
            # The first piece tells whether the request was taken: until then a status can be
            # chosen.
            try:
                first = await anext(pieces)
            except Refusal as refusal:
                response = _refused(refusal)
            except Lost as lost:
                response = errors.unavailable(str(lost))
            else:
                if self.stream:
                    await self._stream(first, pieces, scope, send)
                    return
                response = await self._whole(first, pieces)
        await response(scope, receive, send)

    async def _whole(self, first: Piece, pieces: AsyncGenerator[Piece, None]) -> Response:
        try:
            found = [first, *[piece async for piece in pieces]]
        except Lost as lost:
            return errors.unavailable(f"{lost}, in the middle of the answer")
        except Refusal as refusal:
            # One of several prompts.
            return _refused(refusal)
        return JSONResponse(self.form.whole(self._readers, found))

    async def _stream(
        self, first: Piece, pieces: AsyncGenerator[Piece, None], scope: Scope, send: Send
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
        except Lost as lost:
            note_failure(scope)
            message = f"{lost}, in the middle of the answer"
            await _event(send, {"error": errors.shape(message, "server_error")})
        except Refusal as refusal:
            # One of several prompts: the stream has begun with another.
            note_failure(scope)
            kind = "rate_limit_error" if refusal.kind == "busy" else "invalid_request_error"
            await _event(send, {"error": errors.shape(str(refusal), kind)})
        else:
            if self.tells_usage:
                await _event(send, self.form.last_chunk(self._readers))
            await send(
                {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True}
            )
        await send({"type": "http.response.body", "body": b""})

    @property
    def _readers(self) -> list[Reader]:
        return [part.reader for part in self.parts]

    def _pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces of all answers as they come."""
        streams = [self._measured(part) for part in self.parts]
        return streams[0] if len(streams) == 1 else _merged(streams)

    async def _measured(self, part: Part) -> AsyncGenerator[Piece, None]:
        """The pieces of one prompt's answers, measured as they pass."""
        metrics, submit = self.metrics, part.submit
        metrics.prompt_tokens.inc(len(submit.prompt))
        began = last = time.monotonic()
        outcome = "aborted"
        stop = partial(self.router.stop, submit.id)
        try:
            tokens = self.router.generate(submit)
            async with aclosing(pieces_of(part.reader, tokens, stop)) as pieces:
                async for piece in pieces:
                    now = time.monotonic()
                    is_first = last == began
                    seen = metrics.first_token_s if is_first else metrics.between_tokens_s
                    seen.observe(now - last)
                    last = now
                    metrics.generated_tokens.inc(piece.generated)
                    yield piece
            outcome = "answered"
        except Lost:
            outcome = "failed"
            raise
        except Refusal:
            outcome = "refused"
            raise
        finally:
            metrics.requests.labels(outcome).inc()


def _refused(refusal: Refusal) -> Response:
    """What a client hears of an instance's refusal."""
    if refusal.kind == "busy":
        return errors.busy(str(refusal))
    field = str(refusal).partition(" ")[0]
    raise BadRequest(str(refusal), param=field if field in REFUSED_FIELDS else None) from refusal


async def _merged(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of several streams as they come; the first failure ends all of them."""
    # Answers have bounded numbers of tokens, and so has this.
    queue: asyncio.Queue[Piece | asyncio.Task[None]] = asyncio.Queue()

    async def follow(stream: AsyncGenerator[Piece, None]) -> None:
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
            if isinstance(found, Piece):
                yield found
            else:
                running -= 1
                found.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone; the request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _event(send: Send, content: dict[str, Any]) -> None:
    body = f"data: {json.dumps(content)}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
