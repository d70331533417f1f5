"""Asks vLLM servers for completions, as a proxy for prefill and decode does.

| way       | asks                                                                            |
|-----------|---------------------------------------------------------------------------------|
| `alone`   | one server                                                                      |
| `in_turn` | the prefill server with one token, then the decode server with what it answered, |
|           | as vLLM's example proxy does, for any connector                                  |
| `at_once` | both at the same time, under a name of its own; Penstock only                    |

All are called by several threads at a time. The one rule: no answer without an end: what a server
does not say within the timeout is an error, and is told as one.
"""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass, field
from itertools import count
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from lab.bench.vllm_servers import VllmServer

ANSWER_S = 120.0
REMOTE_DECODE = {
    # What vLLM's example proxy sends to the prefill server.
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked for."""

    tokens: Sequence[int]
    answer_tokens: int
    salt: str
    """Prompts with another one share no cached prefix."""

    def body(self, **more: object) -> dict[str, Any]:
        """The request of vLLM's completion API."""
        return {
            "model": "bench",
            "prompt": list(self.tokens),
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "cache_salt": self.salt,
            **more,
        }


@dataclass(slots=True)
class Answer:
    """What came back, and when."""

    began: float
    times: list[float] = field(default_factory=list)
    """Of its tokens, on the monotonic clock."""
    logprobs: list[float] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    error: str = ""
    ended: float = 0.0

    @property
    def first_s(self) -> float:
        """From the request to the first token."""
        return self.times[0] - self.began


def alone(server: VllmServer, prompt: Prompt, **more: object) -> Answer:
    """One server answers it."""
    return _answer(lambda: stream(server, prompt.body(**more)))


def in_turn(prefill: VllmServer, decode: VllmServer, prompt: Prompt) -> Answer:
    """The prefill server, then the decode server with its answer."""

    def tokens() -> Iterator[dict[str, Any]]:
        yield from stream(decode, prompt.body(kv_transfer_params=prefilled(prefill, prompt)))

    return _answer(tokens)


def prefilled(prefill: VllmServer, prompt: Prompt) -> dict[str, Any]:
    """Has a prompt computed: what the decode server must be told."""
    asked = prompt.body(kv_transfer_params=REMOTE_DECODE, max_tokens=1)
    reported: dict[str, Any] = ask(prefill, asked)["kv_transfer_params"]
    return reported


class AtOnce:
    """Asks both servers of a pair at the same time."""

    def __init__(self, address: str) -> None:
        """Makes it.

        Args:
            address: The prefill server's, as its first answer told.
        """
        self._address = address
        self._numbers = count()

    def __call__(self, prefill: VllmServer, decode: VllmServer, prompt: Prompt) -> Answer:
        name = f"{prompt.salt}-{next(self._numbers)}"
        remote = {**REMOTE_DECODE, "penstock": {"handoff": name}}
        asked = prompt.body(kv_transfer_params=remote, max_tokens=1)
        asking = Thread(target=_ask_and_forget, args=[prefill, asked])
        asking.start()
        own = {"handoff": name, "address": self._address}
        reported = {"do_remote_prefill": True, "do_remote_decode": False, "penstock": own}
        answer = alone(decode, prompt, kv_transfer_params=reported)
        asking.join(ANSWER_S)
        return answer


def together(ask_one: Callable[[Prompt], Answer], prompts: Sequence[Prompt]) -> list[Answer]:
    """Asks all prompts at the same time."""
    answers: list[Answer | None] = [None] * len(prompts)

    def ask_at(place: int) -> None:
        answers[place] = ask_one(prompts[place])

    threads = [Thread(target=ask_at, args=[place]) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answer for answer in answers if answer is not None]


def stream(server: VllmServer, body: dict[str, Any]) -> Generator[dict[str, Any]]:
    """The parts of a streamed answer, one a token."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    try:
        answer = _post(link, {**body, "stream": True})
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        link.close()


def ask(server: VllmServer, body: dict[str, Any]) -> dict[str, Any]:
    """An answer as a whole."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    try:
        answer: dict[str, Any] = json.load(_post(link, body))
        return answer
    finally:
        link.close()


def _post(link: http.client.HTTPConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
    link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = link.getresponse()
    if answer.status != http.HTTPStatus.OK:
        reported = answer.read()[:300].decode("utf-8", "replace")
        raise http.client.HTTPException(f"status {answer.status}: {reported}")
    return answer


def _ask_and_forget(server: VllmServer, body: dict[str, Any]) -> None:
    try:
        ask(server, body)
    except (OSError, http.client.HTTPException):
        # Whether the prompt arrived is seen at the decode server.
        return


def _answer(tokens: Callable[[], Iterator[dict[str, Any]]]) -> Answer:
    answer = Answer(began=time.monotonic())
    try:
        for part in tokens():
            _take(answer, part)
    except (OSError, http.client.HTTPException) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.monotonic()
    return answer


def _take(answer: Answer, part: dict[str, Any]) -> None:
    if "error" in part:
        raise http.client.HTTPException(str(part["error"])[:300])
    for choice in part["choices"]:
        if reported := choice["logprobs"]:
            answer.times += [time.monotonic()] * len(reported["tokens"])
            answer.logprobs += reported["token_logprobs"]
            answer.words += reported["tokens"]
