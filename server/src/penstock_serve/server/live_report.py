"""What `penstock serve` tells its live page: every instance asked once, and what the server saw.

An instance answers between two of its steps. One that is in a long step is not waited for: what it
said last is shown until it answers, and after `SILENT_S` its silence is a reason to worry.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock import Health, __version__
from penstock.errors import counted
from penstock_serve.observe.live import LiveHealth, ServerLive, health_of
from penstock_serve.server.instance_link import InstanceLost
from penstock_serve.server.request_gate import ServerState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock_serve.observe.metrics import ServerMetrics
    from penstock_serve.server.instance_link import InstanceLink
    from penstock_serve.server.router import Router
    from penstock_serve.server.text_endpoint import Admission

WAIT_S = 0.5
"""For instances that have answered before."""
FIRST_WAIT_S = 5.0
"""For those that have not: without them there is nothing to show."""
SILENT_S = 5.0


class _Head(msgspec.Struct):
    """What the server itself reads of an instance's statistics."""

    instance: str
    state: str
    health: Health


@dataclass(slots=True)
class _Said:
    """The last answer of an instance, and the question that it has not answered yet."""

    statistics: bytes = b""
    head: _Head | None = None
    at: float = 0.0
    question: asyncio.Task[bytes] | None = None

    def take(self) -> None:
        """Takes in the answer, if it has come."""
        question = self.question
        if question is None or not question.done():
            return
        self.question = None
        if question.cancelled() or isinstance(question.exception(), InstanceLost):
            return
        self.statistics = question.result()
        self.head = msgspec.json.decode(self.statistics, type=_Head)
        self.at = time.monotonic()


class LiveReport:
    """Makes the documents about a server."""

    def __init__(
        self,
        router: Router,
        metrics: ServerMetrics,
        admission: Admission,
        *,
        model: str,
        expected: int,
    ) -> None:
        """Makes it; it asks nobody yet."""
        self._router = router
        self._metrics = metrics
        self._admission = admission
        self._model = model
        self._expected = expected
        self._said: dict[InstanceLink, _Said] = {}

    async def gather(self) -> bytes:
        """A document, as JSON."""
        await self._ask()
        now = time.monotonic()
        links = [link for link in self._router.ready if self._said[link].statistics]
        return msgspec.json.encode(
            ServerLive(
                version=__version__,
                now=now,
                model=self._model,
                health=self._health(now),
                under_way=self._admission.running,
                requests_max=self._admission.limit,
                retries=self._router.retries,
                instances=[msgspec.Raw(self._said[link].statistics) for link in links],
                traffic=self._metrics.traffic.report(now),
            )
        )

    async def _ask(self) -> None:
        """Asks every instance that has answered the last question, and waits a moment."""
        ready = self._router.ready
        self._said = {link: self._said.get(link) or _Said(at=time.monotonic()) for link in ready}
        questions = []
        for link, said in self._said.items():
            if said.question is None:
                said.question = asyncio.create_task(link.ask("statistics"))
                said.question.add_done_callback(_note_loss)
            questions.append(said.question)
        if questions:
            waits = all(said.statistics for said in self._said.values())
            await asyncio.wait(questions, timeout=WAIT_S if waits else FIRST_WAIT_S)
        for said in self._said.values():
            said.take()

    def _health(self, now: float) -> LiveHealth:
        router = self._router
        state = router.gate.state
        is_ready = bool(router.answering) and state is ServerState.RUNNING
        status = state.value
        if state is ServerState.RUNNING:
            status = "ok" if router.answering else "loading"
        return health_of(is_ready=is_ready, status=status, why=list(self._reasons(now)))

    def _reasons(self, now: float) -> Iterator[str]:
        router = self._router
        if router.gate.state is not ServerState.RUNNING:
            yield f"the server is {router.gate.state.value}"
        missing = self._expected - len(router.links)
        if missing > 0:
            yield f"{missing} of {self._expected} instances ended; the log says why"
        if not router.answering and router.gate.state is ServerState.RUNNING:
            yield "no instance can answer requests"
        for link in router.links:
            yield from self._reasons_of(link, now)

    def _reasons_of(self, link: InstanceLink, now: float) -> Iterator[str]:
        if link.ready is None:
            done = [
                f"{each.layers} of {counted(each.of, 'layer')}" for each in link.loading.values()
            ]
            yield f"{link.name} loads its weights: {', '.join(done) or 'nothing yet'}"
            return
        if link.leaving:
            yield f"{link.name} ends after {counted(link.load, 'request')}"
        if link.held_back:
            yield f"{link.name} gets no requests: {link.held_back}"
        said = self._said.get(link, _Said(at=now))
        if now - said.at > SILENT_S:
            yield f"{link.name} has not answered for {now - said.at:.0f} s: it is busy, or stuck"
        if said.head is not None:
            if said.head.state != "running" and self._router.gate.state is ServerState.RUNNING:
                yield f"{link.name} is {said.head.state}"
            yield from (f"{link.name}: {reason}" for reason in said.head.health.reasons)


def _note_loss(question: asyncio.Task[bytes]) -> None:
    """That an instance was lost is known otherwise, also where nobody waits for its answer."""
    if not question.cancelled():
        question.exception()
