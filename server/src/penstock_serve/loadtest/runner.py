"""A run of a load test: when each request is sent, and what became of it.

| loop   | sessions begin                                  | so the load                      |
|--------|-------------------------------------------------|----------------------------------|
| open   | at their own times, however slow the server is  | is that of users who keep coming |
| closed | when one of N before has ended                  | adapts itself to the server      |

In both, a turn is sent a gap after the turn before it has ended, or later where the server asked
for it (`Retry-After`). A failed request is counted and not sent again.

The one rule: every request that was sent, or should have been, is one record.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock_serve.loadtest.exchange import Failure, StreamedAnswer
from penstock_serve.loadtest.workloads import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock_serve.loadtest.exchange import LoadTarget
    from penstock_serve.loadtest.workloads import ScriptSession, ScriptTurn

OPEN_SESSIONS_MAX = 4096
"""At once, in an open loop. A server so far behind does not recover within the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """A request of a run, and its answer; times are seconds of the run."""

    session: int
    turn: int
    late_s: float
    """How much later it was sent than it should have been: the generator's own fault."""
    answer: StreamedAnswer


class LoadRun:
    """Sends the requests of sessions.

    Args:
        target: Who is asked.
        concurrency: So many sessions at a time; `None` for an open loop.
        seconds: No request is sent after so many; `None`: all are.
        own_answers: A history has the server's answers instead of those of the script.
        progress: Is called after each request.
    """

    def __init__(
        self,
        target: LoadTarget,
        *,
        concurrency: int | None,
        seconds: float | None = None,
        own_answers: bool = False,
        progress: Callable[[LoadRun], None] | None = None,
    ) -> None:
        self.asked: list[SentRequest] = []
        self.errors = 0
        self.running = 0
        self.began_s = 0.0
        self._target = target
        self._concurrency = concurrency
        self._seconds = seconds
        self._own_answers = own_answers
        self._progress = progress

    async def run(self, sessions: Iterator[ScriptSession]) -> None:
        """Runs until all sessions have ended; what was `asked` remains if it is cancelled."""
        self.began_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            if self._concurrency is None:
                await self._begin_sessions(sessions, tasks)
            else:
                for _ in range(self._concurrency):
                    tasks.create_task(self._play_all(sessions))

    async def _begin_sessions(
        self, sessions: Iterator[ScriptSession], tasks: asyncio.TaskGroup
    ) -> None:
        under_way: set[asyncio.Task[float]] = set()
        for session in sessions:
            due_s = self.began_s + session.at_s
            if not await self._wait_until(due_s):
                return
            if len(under_way) >= OPEN_SESSIONS_MAX:
                self._note_unsent(session)
                continue
            task = tasks.create_task(self._play(session, due_s))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    async def _play_all(self, sessions: Iterator[ScriptSession]) -> None:
        """Plays one session after the other."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for session in sessions:
            if not await self._wait_until(due_s):
                return
            due_s = await self._play(session, loop.time())

    async def _play(self, session: ScriptSession, due_s: float) -> float:
        """Plays one session; returns the time from which on the server may be asked again."""
        loop = asyncio.get_running_loop()
        history = list(session.opening)
        for number, turn in enumerate(session.turns):
            if not await self._wait_until(due_s):
                break
            if not session.keeps_history:
                del history[len(session.opening) :]
            history += turn.messages
            late_s = max(0.0, loop.time() - due_s)
            self.running += 1
            try:
                answer = await self._target.ask(history, turn.output_tokens)
            finally:
                self.running -= 1
            self._note(
                SentRequest(session=session.number, turn=number, late_s=late_s, answer=answer)
            )
            history.append(self._remembered(turn, answer))
            pause_s = answer.failure.retry_after_s if answer.failure else 0.0
            following = session.turns[number + 1 : number + 2]
            due_s = loop.time() + max([pause_s, *(each.gap_s for each in following)])
        return due_s

    def _remembered(self, turn: ScriptTurn, answer: StreamedAnswer) -> ChatMessage:
        own = "".join(answer.texts) if self._own_answers and answer.failure is None else ""
        return ChatMessage(role="assistant", content=own or turn.answer)

    async def _wait_until(self, due_s: float) -> bool:
        """Waits until a time; returns whether the run still goes on then."""
        now = asyncio.get_running_loop().time()
        end_s = float("inf") if self._seconds is None else self.began_s + self._seconds
        await asyncio.sleep(max(0.0, min(due_s, end_s) - now))
        return due_s < end_s and asyncio.get_running_loop().time() < end_s

    def _note_unsent(self, session: ScriptSession) -> None:
        now = asyncio.get_running_loop().time()
        failure = Failure(
            kind="not sent",
            message=f"{OPEN_SESSIONS_MAX} sessions were under way: the server is too far behind",
        )
        for number in range(len(session.turns)):
            answer = StreamedAnswer(began_s=now, ended_s=now, failure=failure)
            self._note(SentRequest(session=session.number, turn=number, late_s=0.0, answer=answer))

    def _note(self, asked: SentRequest) -> None:
        self.asked.append(asked)
        self.errors += asked.answer.failure is not None
        if self._progress is not None:
            self._progress(self)
