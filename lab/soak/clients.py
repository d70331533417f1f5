"""Clients that know the answers.

Prompts are conversations that begin alike, as tokens. Their answers are asked for before anything
breaks, without a cache, twice: alone, and several at a time. Every later answer must be the same.

The one rule: an answer may be refused (429, 503), cut off with an error, or not be waited for. It
is never another one, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any, NamedTuple

import httpx

from lab.soak.world import VOCABULARY
from penstock.errors import UnavailableError

HANG_S = 240.0
"""No request takes so long, however busy the machine is."""
RETRY_S = 0.3
ANSWER_TOKENS = 12
BEGINNINGS, CONVERSATIONS, TURNS = 3, 16, 4
FINDINGS_MAX = 50


class Prompt(NamedTuple):
    """One prompt, and what the model answers."""

    tokens: list[int]
    answer: str


def draw_prompts(seed: int) -> list[list[int]]:
    """Conversations that share beginnings; each turn contains the ones before."""
    draw = random.Random(seed)

    def text(length: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(length)]

    beginnings = [text(draw.randrange(40, 120)) for _ in range(BEGINNINGS)]
    prompts = []
    for number in range(CONVERSATIONS):
        so_far = list(beginnings[number % BEGINNINGS])
        for _ in range(TURNS):
            so_far += text(draw.randrange(12, 60))
            prompts.append(list(so_far))
    return prompts


class Clients:
    """Clients that ask one request after the other until they are to stop."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._seed = seed
        self._round = 0
        self._prompts: list[Prompt] = []
        self.counts: Counter[str] = Counter()
        """By how requests ended: answered, refused, cut off, left."""
        self.findings: list[str] = []
        """What no client should get."""

    async def learn(self) -> None:
        """Asks for the answers while nothing is broken.

        Raises `UnavailableError`: the server does not answer, or an answer depends on what is
        computed beside it.
        """
        drawn = draw_prompts(self._seed)
        async with self._client(8) as client:
            alone = [await self._known(client, tokens) for tokens in drawn]
            beside = await asyncio.gather(*(self._known(client, tokens) for tokens in drawn))
        self._prompts = [
            Prompt(tokens, one)
            for tokens, one, other in zip(drawn, alone, beside, strict=True)
            if one == other
        ]
        if len(self._prompts) < len(drawn) * 0.9:
            raise UnavailableError("answers depend on what is computed beside them")

    async def load(self, count: int, stop: asyncio.Event) -> None:
        """So many clients ask until `stop`; returns when the last one has ended."""
        self._round += 1
        async with self._client(count) as client:
            await asyncio.gather(*(self._ask_on(client, n, stop) for n in range(count)))

    async def ask_all(self) -> int:
        """Asks every prompt once while nothing breaks; returns how many tokens were cached."""
        cached = 0
        async with self._client(4) as client:
            for prompt in self._prompts:
                body = self._body(prompt.tokens)
                try:
                    answer = await client.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self._note(f"in calm: {error!r}")
                    continue
                if answer.status_code != httpx.codes.OK:
                    self._note(f"in calm: {answer.status_code} {answer.text[:200]}")
                    continue
                self._compare(prompt, _text_of(answer.json()), "in calm")
                cached += sum(answer.json()["usage"]["cached_by_tier"].values())
        return cached

    def _client(self, count: int) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=count, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self._address, timeout=HANG_S, limits=limits)

    @staticmethod
    def _body(tokens: list[int], **wishes: object) -> dict[str, Any]:
        asked = {"prompt": tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        return {**asked, "ignore_eos": True, **wishes}

    async def _known(self, client: httpx.AsyncClient, tokens: list[int]) -> str:
        answer = await client.post("/v1/completions", json=self._body(tokens, cache="off"))
        if answer.status_code != httpx.codes.OK:
            raise UnavailableError(f"the server answers {answer.status_code}: {answer.text}")
        return _text_of(answer.json())

    async def _ask_on(self, client: httpx.AsyncClient, number: int, stop: asyncio.Event) -> None:
        draw = random.Random(f"{self._seed} {self._round} {number}")
        while not stop.is_set():
            prompt = draw.choice(self._prompts)
            patience_s = draw.uniform(0.02, 0.8) if draw.random() < 0.1 else None
            outcome = await self._ask(client, prompt, patience_s, stream=draw.random() < 0.5)
            self.counts[outcome] += 1
            if outcome in {"refused", "no connection"}:
                await asyncio.sleep(RETRY_S)

    async def _ask(
        self, client: httpx.AsyncClient, prompt: Prompt, patience_s: float | None, *, stream: bool
    ) -> str:
        body = self._body(prompt.tokens, stream=stream)
        try:
            async with asyncio.timeout(patience_s):
                answer = await client.post("/v1/completions", json=body)
        except TimeoutError:
            return "left"
        except httpx.TimeoutException:
            return self._note(f"no answer within {HANG_S:g} s")
        except httpx.TransportError as error:
            return self._note(f"the server is gone: {error!r}")
        if answer.status_code in {429, 503}:
            return "refused"
        if answer.status_code != httpx.codes.OK:
            return self._note(f"{answer.status_code} {answer.text[:200]}")
        if stream:
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            if not events or events[-1] != "[DONE]":
                return "cut off" if '{"error"' in answer.text else self._note("a stream broke off")
            parts = [json.loads(event) for event in events[:-1]]
            found = "".join(map(_text_of, parts))
        else:
            found = _text_of(answer.json())
        return self._compare(prompt, found, "under load")

    def _compare(self, prompt: Prompt, found: str, when: str) -> str:
        if found == prompt.answer:
            return "answered"
        return self._note(f"{when}: a prompt of {len(prompt.tokens)} tokens got another answer")

    def _note(self, what: str) -> str:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(what)
        return "strange"


def _text_of(answer: Any) -> str:  # noqa: ANN401 - what JSON has
    return "".join(choice["text"] for choice in answer["choices"])
