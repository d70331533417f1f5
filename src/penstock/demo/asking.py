"""One request over HTTP, streamed, and what was heard of it, with times.

Nothing but the standard library: whoever can run the server can run its clients.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANSWER_S = 300.0
"""A prompt on a busy machine takes seconds; then something is wrong."""
ALTERNATIVES = 5
"""Log-probabilities that are asked for with each token, besides its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One token of an answer."""

    token: int
    logprobs: dict[int, float]
    """Its own log-probability, and those of the most probable ones, by token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request and its answer."""

    chat: str
    number: int
    """Of the turn, from 0."""
    client: int
    request: str
    """What the server calls it."""
    messages: list[dict[str, str]]
    text: str
    heard: tuple[Heard, ...]
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


def get(address: str, path: str) -> dict[str, Any]:
    """What the server tells about itself.

    Raises:
        UnavailableError: it does not answer, or not as it should.
    """
    return _exchange(address, "GET", path)


def post(address: str, path: str) -> dict[str, Any]:
    """Has the server do something.

    Raises:
        UnavailableError: it does not answer, or not as it should.
    """
    return _exchange(address, "POST", path)


def _exchange(address: str, method: str, path: str) -> dict[str, Any]:
    connection = HTTPConnection(urlsplit(address).netloc, timeout=ANSWER_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        told: dict[str, Any] = json.loads(_checked(response).read())
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"{method} {path} was not answered: {error}") from error
    finally:
        connection.close()
    return told


def ask(
    address: str,
    messages: list[dict[str, str]],
    *,
    chat: str,
    number: int,
    client: int,
    max_tokens: int,
    cache: str,
    on_first: Callable[[], None],
) -> Turn:
    """Asks for the next turn of a conversation, greedily, and listens to the end.

    Raises:
        UnavailableError: the server does not answer, or the answer breaks off.
    """
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": ALTERNATIVES,
        "cache": cache,
    }
    connection = HTTPConnection(urlsplit(address).netloc, timeout=ANSWER_S)
    sent = time.monotonic()
    first = None
    events: list[dict[str, Any]] = []
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
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
    return Turn(
        chat=chat,
        number=number,
        client=client,
        request=events[0]["id"],
        messages=messages,
        text="".join(choice["delta"]["content"] for choice in choices),
        heard=tuple(_heard(row) for each in choices for row in each["logprobs"]["content"]),
        prompt_tokens=events[-1]["usage"]["prompt_tokens"],
        cached_by_tier=events[-1]["usage"]["cached_by_tier"],
        sent=sent,
        first=first,
        ended=ended,
    )


def _checked(response: HTTPResponse) -> HTTPResponse:
    if response.status != 200:
        told = response.read().decode(errors="replace")
        raise UnavailableError(f"the server answered with status {response.status}: {told}")
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


def _heard(row: dict[str, Any]) -> Heard:
    rows = [row, *row["top_logprobs"]]
    return Heard(
        token=row["token_id"], logprobs={each["token_id"]: each["logprob"] for each in rows}
    )
