"""The processes of one supervisor, and what becomes of each.

    start ─→ STARTING ─→ RUNNING ─→ ended with status 0 ──────────────→ gone
                │           └─────→ failed ─→ WAITING ─→ STARTING …
                │                      └────→ failed too often ───────→ gone
                └─→ never ran: refused ───────────────────────────────→ gone
    stop ──→ STOPPING: SIGTERM; at its deadline SIGKILL ──────────────→ gone

Nothing here waits. The loop calls in when a descriptor is readable or a time has come.

The one rule: a process is gone only after it was reaped. Until then it has its name, and
everything that it was started with is held.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from penstock.supervisor.messages import (
    Done,
    Event,
    Exited,
    GaveUp,
    Refused,
    Started,
)
from penstock.supervisor.process import Exit, Process
from penstock.supervisor.refusing import RefusedError, require_room
from penstock.supervisor.restarts import RestartHistory
from penstock.supervisor.spec import READY_S, OnFailure
from penstock.supervisor.wishes import Heard, hear_wish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.supervisor.holdings import Holdings
    from penstock.supervisor.spec import ProcessSpec

PROCESSES_MAX = 64


class State(enum.Enum):
    """Where a process stands."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of the crew."""

    spec: ProcessSpec
    history: RestartHistory
    process: Process | None = None
    """Absent while it waits to be started again."""
    state: State = State.WAITING
    due: float = math.inf
    """When something is to be done about it, whatever its descriptors say."""
    starter: int | None
    """The request to be answered when it runs for the first time."""
    stoppers: list[int] = field(default_factory=list)
    """The requests to be answered when it has ended."""
    problem: str = ""


class Crew:
    """All processes, in the order of their first start."""

    def __init__(
        self,
        holdings: Holdings,
        *,
        tell: Callable[[Event], None],
        answer: Callable[[Done | Refused], None],
    ) -> None:
        self._holdings = holdings
        self._tell = tell
        self._answer = answer
        self._members: dict[str, Member] = {}
        self._closing = False
        self._in_order = False

    # What is asked.

    def start(self, request: int, spec: ProcessSpec, now: float) -> None:
        """Starts a process; answers when it runs, or did not get so far.

        Raises:
            RefusedError: there is no process.
        """
        if self._closing:
            raise RefusedError(f"process {spec.name!r} comes too late: all are to stop")
        if spec.name in self._members:
            state = self._members[spec.name].state.value
            raise RefusedError(f"name is {spec.name!r}, but that process is {state}: stop it first")
        if len(self._members) >= PROCESSES_MAX:
            raise RefusedError(
                f"name is {spec.name!r}, but {PROCESSES_MAX} processes are the most there may be",
                blame="world",
            )
        member = Member(spec=spec, history=RestartHistory(spec.restart), starter=request)
        try:
            self._spawn(member, now)
        except OSError as error:
            raise RefusedError(
                f"process {spec.name!r} cannot be started: {error.strerror}", blame="world"
            ) from error
        self._members[spec.name] = member

    def stop(self, request: int, name: str, stop_s: float | None, now: float) -> None:
        """Has a process end; answers when it has.

        Raises:
            RefusedError: there is no such process.
        """
        if name not in self._members:
            known = ", ".join(self._members) or "none"
            raise RefusedError(f"name is {name!r}, must be a process; there are: {known}")
        member = self._members[name]
        require_room(member.stoppers, f"process {name!r}")
        member.stoppers.append(request)
        self._begin_stop(member, member.spec.stop_s if stop_s is None else stop_s, now)

    def stop_all_in_order(self, now: float) -> None:
        """Has all processes end, the last started first, each after the one before has."""
        self._closing = True
        for member in [each for each in self._members.values() if each.process is None]:
            self._remove(member, now)  # Before the time of its restart comes.
        self._in_order = True
        self._stop_next(now)

    def stop_all_at_once(self, now: float) -> None:
        """Has all processes end, as soon as each can."""
        self._closing, self._in_order = True, False
        for member in [*self._members.values()]:
            self._begin_stop(member, member.spec.stop_s, now)

    # What is to be watched.

    def __len__(self) -> int:
        return len(self._members)

    def users_of(self, descriptor: str) -> list[str]:
        """The processes that are, or may again be, started with a descriptor."""
        return [name for name, each in self._members.items() if descriptor in each.spec.descriptors]

    def watched(self) -> Iterator[tuple[int, Callable[[float], object]]]:
        """Descriptors, and what to call with the time when one is readable."""
        for member in self._members.values():
            process = member.process
            if process is None:
                continue
            yield process.pidfd, partial(self._exited, member)
            if process.report is not None:
                yield process.report, partial(self._reported, member)
            if process.wishes is not None:
                yield process.wishes.fileno(), partial(self._wished, member)

    def due(self) -> float:
        """When `advance` is to be called, if nothing happens before."""
        return min((member.due for member in self._members.values()), default=math.inf)

    def advance(self, now: float) -> None:
        """Does what the time has come for."""
        for member in [each for each in self._members.values() if each.due <= now]:
            if member.state is State.WAITING:
                self._restart(member, now)
                continue
            if member.state is State.STARTING:
                member.problem = f"it was not ready within {READY_S:g} s"
            assert member.process is not None
            member.process.kill()
            member.due = math.inf

    # What happens to one.

    def _spawn(self, member: Member, now: float) -> None:
        spec = member.spec
        given = {name: self._holdings.fetch(name) for name in spec.descriptors}
        member.process = Process.spawn(spec, given, self._holdings.kept_by(spec.name))
        member.state, member.due, member.problem = State.STARTING, now + READY_S, ""

    def _restart(self, member: Member, now: float) -> None:
        try:
            self._spawn(member, now)
        except OSError as error:
            member.problem = f"it cannot be started: {error.strerror}"
            self._failed(member, None, Exit(code=None, signal=None), now)

    def _reported(self, member: Member, _now: float) -> None:
        process = member.process
        if process is None or process.report is None:
            return  # Its end, which came with the same poll, was looked at first.
        said = process.read_report()
        member.problem = member.problem or said
        if member.problem or member.state is not State.STARTING:
            return  # Its end follows.
        member.state, member.due = State.RUNNING, math.inf
        self._tell(Started(name=member.spec.name, pid=process.pid))
        if member.starter is not None:
            self._answer(Done(request=member.starter, pid=process.pid))
            member.starter = None

    def _wished(self, member: Member, _now: float) -> bool:
        """Takes in a wish of the process; whether there was one."""
        process = member.process
        if process is None or process.wishes is None:
            return False
        heard = hear_wish(process.wishes, self._holdings, member.spec.name)
        if heard is Heard.END:
            process.end_wishes()
        return heard is Heard.WISH

    def _exited(self, member: Member, now: float) -> None:
        self._reported(member, now)
        while self._wished(member, now):  # What it asked for last counts as well.
            pass
        process = member.process
        assert process is not None
        ended = process.reap()
        member.process, member.due = None, math.inf
        if member.starter is not None:
            self._refuse_start(member, ended)
            self._remove(member, now)
        elif member.state is State.STOPPING or self._closing or ended.code == 0:
            self._tell(_exited(member, process.pid, ended))
            self._remove(member, now)
        else:
            self._failed(member, process.pid, ended, now)

    def _failed(self, member: Member, pid: int | None, ended: Exit, now: float) -> None:
        spec = member.spec
        restart_at = member.history.plan(now)
        self._tell(_exited(member, pid, ended, restart_at))
        if restart_at is not None:
            member.state, member.due = State.WAITING, restart_at
            return
        if isinstance(spec.restart, OnFailure):
            limit, window_s = spec.restart.limit, spec.restart.window_s
            self._tell(GaveUp(name=spec.name, restarts=limit, window_s=window_s))
        self._remove(member, now)

    def _refuse_start(self, member: Member, ended: Exit) -> None:
        assert member.starter is not None
        problem = member.problem
        if ended.signal is not None:
            problem += f" (signal {ended.signal})"
        self._answer(
            Refused(
                request=member.starter,
                blame="world",
                problem=f"process {member.spec.name!r} did not start: {problem}",
            )
        )

    def _begin_stop(self, member: Member, stop_s: float, now: float) -> None:
        if member.process is None:
            self._remove(member, now)
            return
        if member.state is not State.STOPPING:
            if member.state is State.STARTING:
                member.problem = "it was stopped before it was ready"
            member.state, member.due = State.STOPPING, math.inf
            member.process.terminate()
        # Who asks a second time may shorten what is left, but not lengthen it.
        member.due = min(member.due, now + stop_s)

    def _remove(self, member: Member, now: float) -> None:
        del self._members[member.spec.name]
        self._holdings.forget_kept_by(member.spec.name)
        for request in member.stoppers:
            self._answer(Done(request=request))
        if self._in_order:
            self._stop_next(now)

    def _stop_next(self, now: float) -> None:
        if self._members:
            last = next(reversed(self._members.values()))
            self._begin_stop(last, last.spec.stop_s, now)


def _exited(
    member: Member, pid: int | None, ended: Exit, restart_at: float | None = None
) -> Exited:
    return Exited(
        name=member.spec.name,
        pid=pid,
        code=ended.code,
        signal=ended.signal,
        restart_at=restart_at,
        problem=member.problem,
    )
