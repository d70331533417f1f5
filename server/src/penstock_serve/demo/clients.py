"""The server of the demonstration, and clients that talk to it at the same time.

`served` starts `penstock serve`, waits until it is ready, and ends it. A client starts when the
one before it has its first token; then it sends its next request as soon as it has an answer.
Requests are streamed, and each token is kept with its time. Only the standard library is used, so
that whoever can run the server can run its clients.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock_serve.demo.chats import Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """The settings of one round of conversations."""

    address: str
    clients: int
    max_tokens: int
    cache: str = "use"
    said: Mapping[tuple[str, int], str] | None = None
    """Answers of an earlier round by chat and turn: the prompts of this round repeat them."""


def hold(talk: Talk, chats: Sequence[Chat]) -> list[ChatTurn]:
    """Runs all conversations to their end.

    Raises `UnavailableError`: a client got no answer.
    """
    begun = [threading.Event() for _ in range(talk.clients + 1)]
    begun[0].set()
    with ThreadPoolExecutor(talk.clients) as pool:
        asked = [
            pool.submit(
                _talk, talk, chats[number :: talk.clients], begun[number : number + 2], number
            )
            for number in range(talk.clients)
        ]
        return [turn for each in asked for turn in each.result()]


def _talk(
    talk: Talk,
    chats: Sequence[Chat],
    begun: Sequence[threading.Event],
    client: int,
) -> list[ChatTurn]:
    mine, next_one = begun
    turns: list[ChatTurn] = []
    answers: dict[str, tuple[str, ...]] = {chat.name: () for chat in chats}
    try:
        if not mine.wait(ANSWER_S):
            raise UnavailableError(f"client {client} had to wait for its turn for {ANSWER_S} s")
        for number in range(max((len(chat.questions) for chat in chats), default=0)):
            for chat in chats:
                turn = ask(
                    talk,
                    chat.messages(answers[chat.name]),
                    chat=chat.name,
                    number=number,
                    client=client,
                    on_first=next_one.set,
                )
                turns.append(turn)
                said = turn.text if talk.said is None else talk.said[chat.name, number]
                answers[chat.name] += (said,)
    finally:
        # Also after an error, so that the next client does not wait.
        next_one.set()
    return turns


ANSWER_S = 300.0
"""The timeout of an answer; on a busy machine a prompt takes seconds."""
ALTERNATIVES = 5
"""Log-probabilities that are requested with each token, besides its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredToken:
    """One token of an answer."""

    token: int
    logprobs: dict[int, float]
    """Its own log-probability, and those of the most probable ones, by token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One request and its answer."""

    chat: str
    number: int
    """Of the turn, from 0."""
    client: int
    request: str
    """The server's id of it."""
    messages: list[dict[str, str]]
    text: str
    tokens: tuple[AnsweredToken, ...]
    prompt_tokens: int
    cached_by_tier: dict[str, int]
    sent: float
    first: float
    ended: float
    """On the monotonic clock, which all processes of a machine share."""

    @property
    def first_token_s(self) -> float:
        """How long the client waited for its first token."""
        return self.first - self.sent


def call(address: str, method: str, path: str) -> dict[str, Any]:
    """The JSON response to a request without a body.

    Raises `UnavailableError`: there is none.
    """
    connection = HTTPConnection(urlsplit(address).netloc, timeout=ANSWER_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        found: dict[str, Any] = json.loads(_checked(response).read())
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"{method} {path} was not answered: {error}") from error
    finally:
        connection.close()
    return found


def ask(
    talk: Talk,
    messages: list[dict[str, str]],
    *,
    chat: str,
    number: int,
    client: int,
    on_first: Callable[[], None],
) -> ChatTurn:
    """Requests the next turn of a conversation, greedily, and reads the whole stream.

    Raises `UnavailableError`: the server does not answer, or the stream ends early.
    """
    body = {
        "messages": messages,
        "max_tokens": talk.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": ALTERNATIVES,
        "cache": talk.cache,
    }
    connection = HTTPConnection(urlsplit(talk.address).netloc, timeout=ANSWER_S)
    sent = time.monotonic()
    first = None
    events: list[dict[str, Any]] = []
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        for event in _events(_checked(connection.getresponse())):
            if first is None:
                first = time.monotonic()
                on_first()
            events.append(event)
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"{chat}, turn {number + 1}: no answer: {error}") from error
    finally:
        connection.close()
    ended = time.monotonic()
    if first is None or "usage" not in events[-1]:
        raise UnavailableError(f"{chat}, turn {number + 1}: the answer broke off: {events[-1:]}")
    choices = [event["choices"][0] for event in events if event.get("choices")]
    return ChatTurn(
        chat=chat,
        number=number,
        client=client,
        request=events[0]["id"],
        messages=messages,
        text="".join(choice["delta"]["content"] for choice in choices),
        tokens=tuple(_token_of(row) for each in choices for row in each["logprobs"]["content"]),
        prompt_tokens=events[-1]["usage"]["prompt_tokens"],
        cached_by_tier=events[-1]["usage"]["cached_by_tier"],
        sent=sent,
        first=first,
        ended=ended,
    )


def _checked(response: HTTPResponse) -> HTTPResponse:
    if response.status != 200:
        body = response.read().decode(errors="replace")
        raise UnavailableError(f"the server answered with status {response.status}: {body}")
    return response


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to its `[DONE]`."""
    while line := response.readline():
        content = line.decode().removeprefix("data: ").strip()
        if content == "[DONE]":
            return
        if content:
            event: dict[str, Any] = json.loads(content)
            if "error" in event:
                raise UnavailableError(f"the stream ended: {event['error']['message']}")
            yield event


def _token_of(row: dict[str, Any]) -> AnsweredToken:
    rows = [row, *row["top_logprobs"]]
    return AnsweredToken(
        token=row["token_id"], logprobs={each["token_id"]: each["logprob"] for each in rows}
    )


READY_S = 300.0
"""The timeout of the start: three processes read a model, maybe from a cold disk."""
STOP_S = 30.0
ERROR_BYTES = 2000
"""How much of the server's standard error is shown if it does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running server, and how long it took to get ready."""

    address: str
    line: str
    """The line that it printed when it was ready."""
    ready_s: float


@contextmanager
def served(options: Sequence[str]) -> Iterator[Served]:
    """`penstock serve` with these options, on a free port of the loopback interface.

    Raises `UnavailableError`: it did not get ready.
    """
    command = [sys.executable, "-m", "penstock.cli.entry", "serve", "--port", "0", *options]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            line = _ready_line(process, errors, deadline=began + READY_S)
            address = line.partition(" at ")[2].split("/v1")[0]
            yield Served(address=address, line=line, ready_s=time.monotonic() - began)
        finally:
            _end(process)


def _ready_line(process: subprocess.Popen[str], errors: TextIO, *, deadline: float) -> str:
    assert process.stdout is not None
    while time.monotonic() < deadline:
        found, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        line = process.stdout.readline() if found else ""
        if line.startswith("penstock: ready"):
            return line.strip()
        if not line:
            break
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - ERROR_BYTES))
    raise UnavailableError(f"penstock serve did not get ready; it said: {errors.read().strip()}")


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        # Its supervisor ends everything that it started.
        process.kill()
        process.wait(STOP_S)
    process.stdout.close()
