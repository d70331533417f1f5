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
from penstock.serve.link import Lost, Refusal
from penstock.serve.shapes import BadRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Receive, Scope, Send

    from penstock.engine import messages as ms
    from penstock.engine.text import Text
    from penstock.serve.answers import Form, Reader
    from penstock.serve.metrics import Metrics
    from penstock.serve.router import Router


class Admission:
    """How many requests are under way, and how many may be."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generating:
    """An answer in the making: an ASGI response that ends with its client."""

    submit: ms.Submit
    reader: Reader
    form: Form
    stream: bool
    tells_usage: bool
    """Whether a stream ends with the usage."""
    router: Router
    text: Text
    metrics: Metrics
    admission: Admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, unless too many requests are under way or the client goes away."""
        name_request(scope, self.submit.id)
        if self.admission.running >= self.admission.limit:
            self.metrics.requests.labels("refused").inc()
            refused = errors.busy(
                f"{self.admission.running} requests are under way, at most that many"
            )
            await refused(scope, receive, send)
            return
        self.admission.running += 1
        try:
            await self._while_connected(scope, receive, send)
        finally:
            self.admission.running -= 1
            note_tokens(
                scope,
                prompt=self.reader.prompt_tokens,
                cached=self.reader.cached,
                completion=self.reader.completion_tokens,
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
        async with aclosing(self._measured()) as pieces:
            # The first piece tells whether the request was taken: until then a status can be
            # chosen.
            try:
                first = await anext(pieces)
            except Refusal as refusal:
                if refusal.kind != "busy":
                    raise BadRequest(str(refusal)) from refusal
                response = errors.busy(str(refusal))
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
        return JSONResponse(self.form.whole(self.reader, found, self.text))

    async def _stream(
        self, first: Piece, pieces: AsyncGenerator[Piece, None], scope: Scope, send: Send
    ) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        begun = {first.answer}
        await _event(send, self.form.chunk(first, self.text, first=True))
        try:
            async for piece in pieces:
                is_first = piece.answer not in begun
                begun.add(piece.answer)
                await _event(send, self.form.chunk(piece, self.text, first=is_first))
        except Lost as lost:
            note_failure(scope)
            message = f"{lost}, in the middle of the answer"
            await _event(send, {"error": errors.shape(message, "server_error")})
        else:
            if self.tells_usage:
                await _event(send, self.form.last_chunk(self.reader))
            await send(
                {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True}
            )
        await send({"type": "http.response.body", "body": b""})

    async def _measured(self) -> AsyncGenerator[Piece, None]:
        """The pieces of the request's answers, measured as they pass."""
        metrics = self.metrics
        metrics.prompt_tokens.inc(len(self.submit.prompt))
        began = last = time.monotonic()
        outcome = "aborted"
        stop = partial(self.router.stop, self.submit.id)
        try:
            tokens = self.router.generate(self.submit)
            async with aclosing(pieces_of(self.reader, tokens, stop)) as pieces:
                async for piece in pieces:
                    now = time.monotonic()
                    is_first = last == began
                    seen = metrics.first_token_s if is_first else metrics.between_tokens_s
                    seen.observe(now - last)
                    last = now
                    metrics.generated_tokens.inc(len(piece.progress))
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


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone; the request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _event(send: Send, content: dict[str, Any]) -> None:
    body = f"data: {json.dumps(content)}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
