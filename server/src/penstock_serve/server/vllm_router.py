"""Sends each request to two vLLM servers: one computes the prompt, the other one answers.

    client ─→ router ─┬─→ prefill server: computes the prompt, hands each layer over
                      └─→ decode server: takes it, answers

Both are asked at once, under a handoff name that is drawn here. For that the router must know the
address of the prefill server for handoffs, which each of its answers has: until the first one, a
prompt is computed first, then answered.

| before the answer begins             | then                                              |
|--------------------------------------|---------------------------------------------------|
| the prefill server fails             | another one computes the prompt; at last, decode  |
| it refuses the request (status 4xx)  | decode computes the prompt, or refuses it, too    |
| the decode server fails              | another one answers                               |
| it refuses the request               | the client gets its answer                        |

A server is chosen by what it was sent before, what it has in hand, and its failures, with the
weights of `[routing]`. Of equals, the one that had the last request with the same
`prompt_cache_key` is chosen, or the next in turn.

The one rule: requests at both servers end when the request of the client ends, however that is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.config import RoutingTable
from penstock_serve.server.vllm_requests import read_computed, relayed
from penstock_serve.server.vllm_server import (
    BLOCKS_A_CHUNK,
    FailureVerdict,
    VllmFailure,
    VllmRequest,
    VllmServer,
    WholeAnswer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec

    from penstock_serve.observe.metrics import RouterMetrics
    from penstock_serve.server.vllm_requests import PromptRequest
    from penstock_serve.server.vllm_server import Headers, ServerUrl, VllmAnswer

logger = logging.getLogger("penstock.serve.vllm_router")

PREFILLS_MAX = 2
"""How many servers are tried for a prompt; then the one that answers computes it."""
NOT_HANDING_S = 60.0
"""A prefill server whose answer names no address is not asked for prompts for so long: it has no
connector, or one for another role."""
COMPUTED_S = 1.0
"""The answer of a prefill server comes about when the first token does; later it is not needed."""
EVENT_BYTES_MAX = 16 << 20
EVENT_END = b"\n\n"
EVENT_STREAM = b"text/event-stream"
OK, TOO_MANY = 200, 429
CACHE_KEYS_MAX = 4096
"""Cache keys that are remembered: clients choose them."""
_ERROR = b'data: {"error"'


class NoServer(Exception):  # noqa: N818 - becomes status 503, or what a server said
    """No server can answer a request; `answer` is what the last one said, if it said something."""

    def __init__(self, problem: str, answer: WholeAnswer | None = None) -> None:
        super().__init__(problem)
        self.answer = answer


class _NotComputed(Exception):  # noqa: N818 - the prompt is computed elsewhere
    """A prefill server did not compute a prompt.

    `refused`: it refused the request, as the others would.
    """

    def __init__(self, problem: str, *, refused: bool = False) -> None:
        super().__init__(problem)
        self.refused = refused


@dataclass(slots=True, eq=False)
class BegunAnswer:
    """An answer whose first event or whole body is there."""

    status: int
    headers: Headers
    first: bytes
    server: VllmServer
    rest: VllmAnswer | None = None
    """Where further events come from."""
    prefill: asyncio.Task[msgspec.Raw] | None = None

    async def next_part(self) -> bytes:
        """Further bytes, empty at the end."""
        return b"" if self.rest is None else await self.rest.next_part()

    def close(self) -> None:
        """Aborts what has not ended; may be called twice."""
        if self.rest is not None:
            self.server.end(self.rest)
        if self.prefill is not None:
            self.prefill.cancel()


class VllmRouter:
    """The servers, and which of them get a request."""

    def __init__(
        self,
        prefill: Sequence[ServerUrl],
        decode: Sequence[ServerUrl],
        metrics: RouterMetrics,
        *,
        timeout_s: float,
        settings: RoutingTable | None = None,
    ) -> None:
        """Makes it; `start` lets it see its servers."""
        self.prefill = [VllmServer(url, timeout_s=timeout_s) for url in prefill]
        self.decode = [VllmServer(url, timeout_s=timeout_s) for url in decode]
        self._metrics = metrics
        self._settings = settings or RoutingTable()
        self._choices = 0
        self._chosen: dict[VllmServer, int] = {}
        self._had_key: dict[tuple[bool, bytes, str], VllmServer] = {}
        """Who computed, or else answered, the last request with a salt and a cache key."""
        self._watching: list[asyncio.Task[None]] = []
        self._stopped = False

    @property
    def servers(self) -> list[VllmServer]:
        return [*self.prefill, *self.decode]

    async def start(self) -> None:
        """Checks all servers once, and then again and again."""
        await asyncio.gather(*(server.check() for server in self.servers))
        self._watching = [asyncio.create_task(server.watch()) for server in self.servers]

    def stop(self) -> None:
        """Ends all requests and checks; may be called twice."""
        self._stopped = True
        for task in self._watching:
            task.cancel()
        for server in self.servers:
            server.abort_all("was left: the router is stopping")

    async def get(self, path: str, headers: Headers) -> WholeAnswer:
        """What a decode server says to a request without a prompt.

        Raises `NoServer`: none answers.
        """
        request = VllmRequest(method="GET", path=path, headers=headers)
        tried: set[VllmServer] = set()
        while True:
            server = self._choose(self.decode, None, tried)
            if server is None:
                raise self._nobody(None)
            tried.add(server)
            with suppress(VllmFailure):
                answer = await server.ask(request)
                try:
                    return await answer.whole()
                finally:
                    server.end(answer)

    async def answer(self, request: PromptRequest) -> BegunAnswer:
        """Has a request answered; close the answer.

        Raises `NoServer`: no server can answer it.
        """
        tried: set[VllmServer] = set()
        last: VllmFailure | None = None
        while not self._stopped and len(tried) < self._settings.attempts_max:
            server = self._choose(self.decode, request, tried)
            if server is None:
                break
            if tried:
                self._metrics.retries.labels("decode").inc()
            tried.add(server)
            try:
                return await self._answer_at(server, request)
            except VllmFailure as failure:
                last = failure
                if failure.verdict is not FailureVerdict.OURS:
                    server.note_failure()
                self._metrics.count(server.name, "decode", "failed")
                logger.warning("no answer: cause=%s", failure)
        raise self._nobody(last)

    def _nobody(self, last: VllmFailure | None) -> NoServer:
        if last is not None:
            return NoServer(str(last), last.answer)
        if self._stopped:
            return NoServer("the router is stopping")
        causes = "; ".join(f"{each.name} {each.cause}" for each in self.decode if not each.is_up)
        return NoServer(f"no decode server is up: {causes}" if causes else "no server answered")

    # One attempt: a decode server, and prefill servers until one computes the prompt.

    async def _answer_at(self, decode: VllmServer, request: PromptRequest) -> BegunAnswer:
        tried: set[VllmServer] = set()
        while request.may_hand_over and len(tried) < PREFILLS_MAX:
            if decode.memory.leading(request.chunks) == len(request.chunks):
                # It has the prompt but for a chunk, which is computed sooner than handed over.
                break
            prefill = self._choose(self._prefilling(), request, tried, computes=True)
            if prefill is None:
                break
            if tried:
                self._metrics.retries.labels("prefill").inc()
            tried.add(prefill)
            try:
                begun = await self._answer_with(prefill, decode, request)
            except _NotComputed as failure:
                logger.warning("prompt not computed: cause=%s", failure)
                if failure.refused:
                    break
            else:
                self._count_prompt("prefill", begun)
                return begun
        with _Pending(decode, request):
            begun = await self._begin(decode, request, request.for_decode_alone())
        self._count_prompt("decode", begun)
        return begun

    def _count_prompt(self, role: str, begun: BegunAnswer) -> None:
        """Counts who computed a prompt; one that was refused was computed by nobody."""
        if begun.status == OK:
            self._metrics.prompts.labels(role).inc()

    async def _answer_with(
        self, prefill: VllmServer, decode: VllmServer, request: PromptRequest
    ) -> BegunAnswer:
        """Asks both servers.

        Raises `_NotComputed`: the prefill server fails, before the answer begins; `VllmFailure`:
        the decode server fails.
        """
        handoff = f"router-{secrets.token_hex(16)}"
        address = prefill.address
        computing = asyncio.create_task(self._compute(prefill, request, handoff))
        computing.add_done_callback(_take_result)
        answering: asyncio.Task[BegunAnswer] | None = None
        begun: BegunAnswer | None = None
        try:
            if address:
                ask = request.for_decode(handoff, address)
            else:
                # Its answer has the address.
                ask = request.for_decode_after(await computing)
            answering = asyncio.create_task(self._begin(decode, request, ask))
            await asyncio.wait({computing, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                await computing
            begun = await answering
        finally:
            if begun is None:
                await _cancel(computing, answering)
        begun.prefill = computing
        asyncio.get_running_loop().call_later(COMPUTED_S, computing.cancel)
        return begun

    async def _compute(
        self, prefill: VllmServer, request: PromptRequest, handoff: str
    ) -> msgspec.Raw:
        """Has a prompt computed: what its server says for the decode server.

        Raises `_NotComputed`: the server failed, or refused it.
        """
        outcome = "cancelled"
        try:
            with _Pending(prefill, request):
                whole = await self._computed(prefill, request.for_prefill(handoff))
            outcome = "refused" if whole.status != 200 else "failed"
            if whole.status != 200:
                refusal = f"{prefill.name} refused a prompt: status {whole.status}"
                raise _NotComputed(refusal, refused=True)
            params, address = read_computed(whole)
            if not address:
                self._note_no_handoff(prefill)
                raise _NotComputed(f"{prefill.name} hands nothing over")
            prefill.address = address
            prefill.memory.add(request.chunks)
            outcome = "computed"
        except VllmFailure as failure:
            outcome = "failed"
            if failure.verdict is not FailureVerdict.OURS:
                prefill.note_failure()
            raise _NotComputed(str(failure)) from failure
        finally:
            self._metrics.count(prefill.name, "prefill", outcome)
        return params

    async def _computed(self, prefill: VllmServer, request: VllmRequest) -> WholeAnswer:
        answer = await prefill.ask(request)
        try:
            return _usable(prefill, await answer.whole())
        finally:
            prefill.end(answer)

    async def _begin(
        self, decode: VllmServer, request: PromptRequest, ask: VllmRequest
    ) -> BegunAnswer:
        """Asks the server that answers, until its first event or whole answer is there.

        Raises `VllmFailure`: it fails.
        """
        answer = await decode.ask(ask)
        begun: BegunAnswer | None = None
        try:
            begun = await _first_of(decode, answer)
            if begun.status == 200:
                decode.memory.add(request.chunks)
        finally:
            if begun is None or begun.rest is None:
                decode.end(answer)
        return begun

    # Choices.

    def _prefilling(self) -> list[VllmServer]:
        now = asyncio.get_running_loop().time()
        return [server for server in self.prefill if now >= server.hands_over_after]

    def _choose(
        self,
        servers: Sequence[VllmServer],
        request: PromptRequest | None,
        tried: set[VllmServer],
        *,
        computes: bool = False,
    ) -> VllmServer | None:
        """The best server that is up, for a prompt or for a request without one.

        If none is, one that is only silent may answer: nothing is lost by asking it. A prompt is
        then better computed where it is answered.
        """
        chunks = request.chunks if request is not None else []
        usable = [server for server in servers if server.is_up]
        if not usable and not computes:
            usable = [server for server in servers if server.is_silent]
        worths = {server: self._worth(server, chunks) for server in usable if server not in tried}
        if not worths:
            return None
        least = max(worths.values()) - self._settings.equal_blocks
        equal = [server for server, worth in worths.items() if worth >= least]
        if request is None or request.affinity is None:
            return self._next_in_turn(equal)
        key = (computes, *request.affinity)
        last = self._had_key.pop(key, None)
        chosen = last if last in equal else self._next_in_turn(equal)
        self._had_key[key] = chosen
        if len(self._had_key) > CACHE_KEYS_MAX:
            del self._had_key[next(iter(self._had_key))]
        return chosen

    def _next_in_turn(self, servers: Sequence[VllmServer]) -> VllmServer:
        chosen = min(servers, key=lambda server: self._chosen.get(server, 0))
        self._choices += 1
        self._chosen[chosen] = self._choices
        return chosen

    def _worth(self, server: VllmServer, chunks: Sequence[bytes]) -> float:
        weights = self._settings
        return (
            weights.cached_weight * BLOCKS_A_CHUNK * server.memory.leading(chunks)
            - server.pending_blocks
            - weights.load_weight * server.load
            - weights.failed_weight * server.failures(weights.failed_s)
        )

    def _note_no_handoff(self, prefill: VllmServer) -> None:
        if prefill.address:
            # It has handed prompts over before: this one was preempted, perhaps.
            prefill.note_failure()
            return
        prefill.hands_over_after = asyncio.get_running_loop().time() + NOT_HANDING_S
        logger.warning(
            "prefill server not used: url=%s for_s=%g cause=its answer has no "
            "kv_transfer_params.penstock; start it with the flag that `penstock vllm-config "
            "--role kv_producer` prints",
            prefill.name,
            NOT_HANDING_S,
        )


class _Pending:
    """Counts what a server has to compute of a prompt, while it does."""

    def __init__(self, server: VllmServer, request: PromptRequest) -> None:
        self._server = server
        missing = len(request.chunks) - server.memory.leading(request.chunks)
        self._blocks = BLOCKS_A_CHUNK * missing

    def __enter__(self) -> None:
        self._server.pending_blocks += self._blocks

    def __exit__(self, *_: object) -> None:
        self._server.pending_blocks -= self._blocks


async def _first_of(server: VllmServer, answer: VllmAnswer) -> BegunAnswer:
    """An answer as soon as it is one that the client may get.

    Raises `VllmFailure`: it is an error that another server might not give.
    """
    kind = next((value for name, value in answer.headers if name == b"content-type"), b"")
    headers = relayed(answer.headers)
    if answer.status != 200 or not kind.startswith(EVENT_STREAM):
        whole = _usable(server, await answer.whole())
        return BegunAnswer(whole.status, headers, whole.body, server)
    first = b""
    while EVENT_END not in first and len(first) < EVENT_BYTES_MAX:
        part = await answer.next_part()
        if not part:
            raise VllmFailure(f"{server.name} ended its stream before the first event")
        first += part
    if first.startswith(_ERROR):
        whole = await answer.whole(first)
        raise VllmFailure(f"{server.name} answered with an error", whole)
    server.note_begun(answer)
    return BegunAnswer(answer.status, headers, first, server, answer)


def _usable(server: VllmServer, whole: WholeAnswer) -> WholeAnswer:
    """An answer that other servers would give, too.

    Raises `VllmFailure`: it is another one.
    """
    if whole.status >= 500 or whole.status == TOO_MANY:
        raise VllmFailure(f"{server.name} answered with status {whole.status}", whole)
    return whole


def _take_result(task: asyncio.Task[msgspec.Raw]) -> None:
    """Its failure was logged and counted, also where nobody waits for it any more."""
    if not task.cancelled():
        task.exception()


async def _cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels tasks; an answer that had begun meanwhile is closed."""
    found = [task for task in tasks if task is not None]
    for task in found:
        task.cancel()
    for result in await asyncio.gather(*found, return_exceptions=True):
        if isinstance(result, BegunAnswer):
            result.close()
