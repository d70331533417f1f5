"""The supervisor's loop, and the table of its processes with the state of each.

    start ─→ STARTING ─→ RUNNING ─→ ended with status 0 ──────────────→ removed
                │           └─────→ failed ─→ WAITING ─→ STARTING …
                │                      └────→ failed too often ───────→ removed
                └─→ never ran: refused ───────────────────────────────→ removed
    stop ──→ STOPPING: SIGTERM; at its deadline SIGKILL ──────────────→ removed

Nothing here waits. The loop calls when a descriptor is readable or a time has come.

Everything it waits for is a descriptor or a time, so one poll does all the waiting, and an idle
supervisor uses no CPU.

The rules:

- A process is removed only after it was reaped. Until then its name is in use, and everything that
  it was started with is held. It also keeps its pid until then, so a signal to it, or to its group,
  cannot hit another process. That is why nothing ignores SIGCHLD or reaps elsewhere.
- Only the request to stop and the end of the channel end it. A frame that it cannot read is
  answered with the reason, and nothing else happens.
"""

from __future__ import annotations

import enum
import math
import os
import select
import signal
import sys
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.supervisor.descriptors import (
    HeldDescriptors,
    close_all,
    list_descriptors,
    make_inheritable,
    make_private,
    serve_keep_request,
)
from penstock.supervisor.messages import (
    PROBLEM_CHARACTERS_MAX,
    READY_S,
    AnyReply,
    Done,
    EventQueue,
    Fetch,
    Forget,
    Hold,
    MessageError,
    Never,
    OnFailure,
    ProcessEvent,
    ProcessExited,
    ProcessStarted,
    RequestRefused,
    RequestRefusedError,
    RestartsExhausted,
    StartProcess,
    StopAll,
    StopProcess,
    SupervisorReady,
    decode_request,
    encode,
    receive_packet,
    require_room,
)
from penstock.transport.base import ChannelClosed, ChannelFailed
from penstock.transport.unix_sockets import Packet, channel_pair, send_packet

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping
    from typing import Self

    from penstock.supervisor.messages import AnyRequest, OtherRequest, ProcessSpec


PROCESSES_MAX = 64


class ProcessState(enum.Enum):
    """See the picture above."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"


class RestartHistory:
    """The restarts of one process within the window of its policy.

    No window holds more restarts than the limit, wherever the window begins.
    """

    def __init__(self, policy: Never | OnFailure) -> None:
        self._policy = policy
        self._restarts: deque[float] = deque()

    def plan(self, now: float) -> float | None:
        """When to start again after a failure at `now`; `None`: never."""
        policy = self._policy
        if isinstance(policy, Never):
            return None
        while self._restarts and self._restarts[0] <= now - policy.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= policy.limit:
            return None
        delay_s = min(policy.delay_s * 2.0 ** len(self._restarts), policy.delay_max_s)
        self._restarts.append(now + delay_s)
        return now + delay_s


@dataclass(slots=True, kw_only=True)
class _Child:
    """A process that the engine has asked for, through all its restarts."""

    spec: ProcessSpec
    history: RestartHistory
    process: Process | None = None
    """Absent while it waits to be started again."""
    state: ProcessState = ProcessState.WAITING
    due: float = math.inf
    """When `advance` has something to do for it."""
    starter: int | None
    """The request to answer when it runs for the first time."""
    stoppers: list[int] = field(default_factory=list)
    """The requests to answer when it has ended."""
    problem: str = ""


class ProcessTable:
    """All processes, in the order of their first start."""

    def __init__(
        self,
        held: HeldDescriptors,
        *,
        on_event: Callable[[ProcessEvent], None],
        answer: Callable[[Done | RequestRefused], None],
    ) -> None:
        self._held = held
        self._on_event = on_event
        self._answer = answer
        self._children: dict[str, _Child] = {}
        self._closing = False
        self._in_order = False

    # Requests.

    def start(self, request: int, spec: ProcessSpec, now: float) -> None:
        """Starts a process; answers when it runs its module, or failed before.

        Raises `RequestRefusedError`: it was not started.
        """
        if self._closing:
            raise RequestRefusedError(
                f"process {spec.name!r} comes too late: all processes are being stopped"
            )
        if spec.name in self._children:
            state = self._children[spec.name].state.value
            raise RequestRefusedError(
                f"name is {spec.name!r}, but that process is {state}: stop it first"
            )
        if len(self._children) >= PROCESSES_MAX:
            raise RequestRefusedError(
                f"name is {spec.name!r}, but {PROCESSES_MAX} processes are the most there may be",
                blame="world",
            )
        child = _Child(spec=spec, history=RestartHistory(spec.restart), starter=request)
        try:
            self._spawn(child, now)
        except OSError as error:
            raise RequestRefusedError(
                f"process {spec.name!r} cannot be started: {error.strerror}", blame="world"
            ) from error
        self._children[spec.name] = child

    def stop(self, request: int, name: str, stop_s: float | None, now: float) -> None:
        """Stops a process; answers when it has ended.

        Raises `RequestRefusedError`: there is no such process.
        """
        if name not in self._children:
            known = ", ".join(self._children) or "none"
            raise RequestRefusedError(f"name is {name!r}, must be a process; there are: {known}")
        child = self._children[name]
        require_room(child.stoppers, f"process {name!r}")
        child.stoppers.append(request)
        self._begin_stop(child, child.spec.stop_s if stop_s is None else stop_s, now)

    def stop_all_in_order(self, now: float) -> None:
        """Stops all processes, the last started first, each after the one before has ended."""
        self._closing = True
        for child in [each for each in self._children.values() if each.process is None]:
            self._remove(child, now)  # It must not be restarted meanwhile.
        self._in_order = True
        self._stop_next(now)

    def stop_all_at_once(self, now: float) -> None:
        """Stops all processes, without an order."""
        self._closing, self._in_order = True, False
        for child in [*self._children.values()]:
            self._begin_stop(child, child.spec.stop_s, now)

    # For the loop.

    def __len__(self) -> int:
        return len(self._children)

    def users_of(self, descriptor: str) -> list[str]:
        """The processes that are, or may again be, started with a descriptor."""
        return [
            name for name, each in self._children.items() if descriptor in each.spec.descriptors
        ]

    def watched(self) -> Iterator[tuple[int, Callable[[float], object]]]:
        """Descriptors, each with the function to call with the time when it is readable."""
        for child in self._children.values():
            process = child.process
            if process is None:
                continue
            yield process.pidfd, partial(self._exited, child)
            if process.report is not None:
                yield process.report, partial(self._reported, child)
            if process.keeping is not None:
                yield process.keeping.fileno(), partial(self._serve_keeping, child)

    def due(self) -> float:
        """When `advance` has to be called at the latest."""
        return min((child.due for child in self._children.values()), default=math.inf)

    def advance(self, now: float) -> None:
        """Restarts the processes whose delay is over; kills those whose deadline has passed."""
        for child in [each for each in self._children.values() if each.due <= now]:
            if child.state is ProcessState.WAITING:
                self._restart(child, now)
                continue
            if child.state is ProcessState.STARTING:
                child.problem = f"it was not ready within {READY_S:g} s"
            assert child.process is not None
            child.process.kill()
            child.due = math.inf

    # One process.

    def _spawn(self, child: _Child, now: float) -> None:
        spec = child.spec
        given = {name: self._held.fetch(name) for name in spec.descriptors}
        child.process = Process.spawn(spec, given, self._held.kept_by(spec.name))
        child.state, child.due, child.problem = ProcessState.STARTING, now + READY_S, ""

    def _restart(self, child: _Child, now: float) -> None:
        try:
            self._spawn(child, now)
        except OSError as error:
            child.problem = f"it cannot be started: {error.strerror}"
            self._failed(child, None, ProcessExit(code=None, signal=None), now)

    def _reported(self, child: _Child, _now: float) -> None:
        process = child.process
        if process is None or process.report is None:
            return  # The same poll found its end, which was handled first.
        reported = process.read_report()
        child.problem = child.problem or reported
        if child.problem or child.state is not ProcessState.STARTING:
            return  # Its exit follows.
        child.state, child.due = ProcessState.RUNNING, math.inf
        self._on_event(ProcessStarted(name=child.spec.name, pid=process.pid))
        if child.starter is not None:
            self._answer(Done(request=child.starter, pid=process.pid))
            child.starter = None

    def _serve_keeping(self, child: _Child, _now: float) -> bool:
        """Serves one request to keep a descriptor; false if there was none."""
        process = child.process
        if process is None or process.keeping is None:
            return False
        try:
            return serve_keep_request(process.keeping, self._held, child.spec.name)
        except OSError:
            process.end_keeping()
            return False

    def _exited(self, child: _Child, now: float) -> None:
        self._reported(child, now)
        while self._serve_keeping(child, now):  # It may have sent some just before its end.
            pass
        process = child.process
        assert process is not None
        ended = process.reap()
        child.process, child.due = None, math.inf
        if child.starter is not None:
            self._refuse_start(child, ended)
            self._remove(child, now)
        elif child.state is ProcessState.STOPPING or self._closing or ended.code == 0:
            self._on_event(_exited(child, process.pid, ended))
            self._remove(child, now)
        else:
            self._failed(child, process.pid, ended, now)

    def _failed(self, child: _Child, pid: int | None, ended: ProcessExit, now: float) -> None:
        spec = child.spec
        restart_at = child.history.plan(now)
        self._on_event(_exited(child, pid, ended, restart_at))
        if restart_at is not None:
            child.state, child.due = ProcessState.WAITING, restart_at
            return
        if isinstance(spec.restart, OnFailure):
            limit, window_s = spec.restart.limit, spec.restart.window_s
            self._on_event(RestartsExhausted(name=spec.name, restarts=limit, window_s=window_s))
        self._remove(child, now)

    def _refuse_start(self, child: _Child, ended: ProcessExit) -> None:
        assert child.starter is not None
        problem = child.problem
        if ended.signal is not None:
            problem += f" (signal {ended.signal})"
        self._answer(
            RequestRefused(
                request=child.starter,
                blame="world",
                problem=f"process {child.spec.name!r} did not start: {problem}",
            )
        )

    def _begin_stop(self, child: _Child, stop_s: float, now: float) -> None:
        if child.process is None:
            self._remove(child, now)
            return
        if child.state is not ProcessState.STOPPING:
            if child.state is ProcessState.STARTING:
                child.problem = "it was stopped before it was ready"
            child.state, child.due = ProcessState.STOPPING, math.inf
            child.process.terminate()
        # A second request may shorten the time that is left, but not lengthen it.
        child.due = min(child.due, now + stop_s)

    def _remove(self, child: _Child, now: float) -> None:
        del self._children[child.spec.name]
        self._held.forget_kept_by(child.spec.name)
        for request in child.stoppers:
            self._answer(Done(request=request))
        if self._in_order:
            self._stop_next(now)

    def _stop_next(self, now: float) -> None:
        if self._children:
            last = next(reversed(self._children.values()))
            self._begin_stop(last, last.spec.stop_s, now)


def _exited(
    child: _Child, pid: int | None, ended: ProcessExit, restart_at: float | None = None
) -> ProcessExited:
    return ProcessExited(
        name=child.spec.name,
        pid=pid,
        code=ended.code,
        signal=ended.signal,
        restart_at=restart_at,
        problem=child.problem,
    )


IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The supervisor ignores these: it ends with the engine. Its processes do not ignore them."""

_RUNS = b"+"
_REPORT_BYTES_MAX = 4096
"""A pipe takes this much in one piece."""


class ProcessExit(NamedTuple):
    """How a process ended: one of the two is set."""

    code: int | None
    signal: int | None


class Process:
    """A child process that leads a process group."""

    def __init__(self, pid: int, pidfd: int, report: int, keeping: socket.socket | None) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.keeping = keeping
        """Its requests to keep descriptors for its next life; absent if it may not."""
        self.report: int | None = report
        """The pipe of its start report; absent once that was read."""

    @classmethod
    def spawn(cls, spec: ProcessSpec, given: Mapping[str, int], kept: Mapping[str, int]) -> Self:
        """Starts a process that has these descriptors and no others but its output.

        Raises `OSError`: the system cannot create it.
        """
        with ExitStack() as undo:
            report, its_report = os.pipe()
            undo.callback(os.close, report)
            keeping, its_keeping = channel_pair() if spec.keeps else (None, None)
            if keeping is not None:
                undo.callback(keeping.close)
            try:
                pid = _spawn(spec, given, kept, its_report, its_keeping)
            finally:
                os.close(its_report)
                if its_keeping is not None:
                    its_keeping.close()
            undo.callback(_kill_unwatched, pid)
            process = cls(pid, os.pidfd_open(pid), report, keeping)
            undo.pop_all()
            return process

    def read_report(self) -> str:
        """Why its module does not run, empty if it does; call once, when `report` is readable."""
        assert self.report is not None
        fd, self.report = self.report, None
        written = os.read(fd, _REPORT_BYTES_MAX)
        os.close(fd)
        if written == _RUNS:
            return ""
        return written.decode(errors="replace") or "it ended before it was ready"

    def terminate(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the process and to its group."""
        # It may have left its group, or have changed to a user whose processes we may not kill.
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> ProcessExit:
        """Reads how it ended; call once its pidfd is readable."""
        # Kills the rest of its group first: after the process has been reaped, another group may
        # get the number.
        self.kill()
        result = os.waitid(os.P_PID, self.pid, os.WEXITED)
        assert result is not None
        self.close()
        if result.si_code == os.CLD_EXITED:
            return ProcessExit(code=result.si_status, signal=None)
        return ProcessExit(code=None, signal=result.si_status)

    def end_keeping(self) -> None:
        """Closes the socket of its requests to keep descriptors."""
        if self.keeping is not None:
            self.keeping.close()
            self.keeping = None

    def close(self) -> None:
        """Closes the descriptors that watch it."""
        os.close(self.pidfd)
        self.end_keeping()
        if self.report is not None:
            os.close(self.report)
            self.report = None


def write_start_report(fd: int, problem: str) -> None:
    """Reports that this process runs its module, or why not; closes the pipe."""
    os.write(fd, problem.encode(errors="replace")[:_REPORT_BYTES_MAX] or _RUNS)
    os.close(fd)


def _kill_unwatched(pid: int) -> None:
    """Ends a process for which no pidfd could be opened."""
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _spawn(
    spec: ProcessSpec,
    given: Mapping[str, int],
    kept: Mapping[str, int],
    report: int,
    keeping: socket.socket | None,
) -> int:
    keeper = () if keeping is None else (keeping.fileno(),)
    passed = (report, *keeper, *given.values(), *kept.values())
    arguments = [
        *(sys.executable, "-P", "-m", "penstock.supervisor.child"),
        *(spec.name, str(os.getpid()), str(report), ",".join(map(str, keeper))),
        *(list_descriptors(given), list_descriptors(kept)),
        *(spec.module, *spec.arguments),
    ]
    try:
        make_inheritable(passed)
        # Not by `subprocess`, which would bring threads and selectors along, nor by a fork:
        # a failure to execute is an OSError here.
        return os.posix_spawn(
            sys.executable,
            arguments,
            {**os.environ, **dict(spec.environment)},
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setpgroup=0,
            setsigmask=(),
            setsigdef=IGNORED,
        )
    finally:
        make_private(passed)


REPLIES_MAX = 64
"""With more answers that the engine has not read, no further requests are read."""


class SupervisorLoop:
    """Runs one supervisor, from its start to its end."""

    def __init__(self, channel: socket.socket, engine: int) -> None:
        self._channel = channel
        self._engine = engine
        self._engine_gone = False
        self._stop_requests: list[int] = []
        self._stopped = False
        self._held = HeldDescriptors()
        self._events = EventQueue()
        self._replies: deque[tuple[AnyReply, int | None]] = deque()
        self._processes = ProcessTable(self._held, on_event=self._events.add, answer=self._reply)

    def run(self) -> None:
        """Serves the engine until it ends or asks to stop, and all processes have ended."""
        self._reply(SupervisorReady(pid=os.getpid()))
        while True:
            self._flush()
            if self._over():  # Asked here, as `_flush` may have sent the last answer.
                break
            called = self._wait()
            now = time.monotonic()
            for callback in called:
                callback(now)
            self._processes.advance(now)
            self._answer_stop()
        self._held.close()

    def _over(self) -> bool:
        if len(self._processes):
            return False
        return self._engine_gone or (self._stopped and not self._replies)

    def _answer_stop(self) -> None:
        if self._stop_requests and not len(self._processes):
            for request in self._stop_requests:
                self._reply(Done(request=request))
            self._stop_requests.clear()
            self._stopped = True

    # Waiting.

    def _wait(self) -> list[Callable[[float], object]]:
        poller = select.poll()
        callbacks: dict[int, Callable[[float], object]] = {}
        for fd, callback in self._processes.watched():
            poller.register(fd, select.POLLIN)
            callbacks[fd] = callback
        if not self._engine_gone:
            poller.register(self._engine, select.POLLIN)
            callbacks[self._engine] = self._lose_engine
            poller.register(self._channel, self._interest())
            callbacks[self._channel.fileno()] = self._serve
        ready = poller.poll(_timeout_ms(self._processes.due() - time.monotonic()))
        return [callbacks[fd] for fd, _ in ready]

    def _interest(self) -> int:
        reading = select.POLLIN if len(self._replies) < REPLIES_MAX else 0
        writing = select.POLLOUT if self._replies or len(self._events) else 0
        return reading | writing

    def _lose_engine(self, now: float) -> None:
        self._engine_gone = True
        self._processes.stop_all_at_once(now)

    # Requests and answers.

    def _serve(self, now: float) -> None:
        if len(self._replies) >= REPLIES_MAX:
            return  # Writable, or closed: the next `_flush` finds out.
        packet = receive_packet(self._channel)
        if isinstance(packet, ChannelClosed | ChannelFailed):
            self._lose_engine(now)
        elif isinstance(packet, Packet):
            self._handle(packet, now)

    def _handle(self, packet: Packet, now: float) -> None:
        try:
            asked = _read_request(packet)
        except MessageError as error:
            self._refuse(error.request, "caller", str(error))
            close_all(packet.descriptors)
            return
        try:
            if isinstance(asked, Hold):
                self._hold(asked, packet.descriptors[0])
            else:
                self._carry_out(asked, now)
        except RequestRefusedError as error:
            self._refuse(asked.request, error.blame, error.problem)
            close_all(packet.descriptors)

    def _hold(self, asked: Hold, fd: int) -> None:
        self._held.hold(asked.name, fd)
        self._reply(Done(request=asked.request))

    def _carry_out(self, asked: OtherRequest, now: float) -> None:
        match asked:
            case Fetch(request=request, name=name):
                self._fetch(request, name)
            case Forget(request=request, name=name):
                self._require_unused(name)
                self._held.forget(name)
                self._reply(Done(request=request))
            case StartProcess(request=request, spec=spec):
                self._processes.start(request, spec, now)
            case StopProcess(request=request, name=name, stop_s=stop_s):
                self._processes.stop(request, name, stop_s, now)
            case StopAll(request=request):
                require_room(self._stop_requests, "all processes")
                self._stop_requests.append(request)
                self._processes.stop_all_in_order(now)

    def _fetch(self, request: int, name: str) -> None:
        fd = self._held.fetch(name)
        try:
            self._reply(Done(request=request), fd)
        except OSError as error:
            problem = f"descriptor {name!r} cannot be sent: {error.strerror}"
            raise RequestRefusedError(problem, blame="world") from error

    def _require_unused(self, name: str) -> None:
        if users := self._processes.users_of(name):
            raise RequestRefusedError(
                f"descriptor {name!r} is in use: stop these processes first: {', '.join(users)}"
            )

    def _refuse(self, request: int, blame: Literal["caller", "world"], problem: str) -> None:
        self._reply(
            RequestRefused(request=request, blame=blame, problem=problem[:PROBLEM_CHARACTERS_MAX])
        )

    def _reply(self, reply: AnyReply, fd: int | None = None) -> None:
        # A copy of the descriptor: the name may be forgotten before the engine reads the answer.
        self._replies.append((reply, None if fd is None else os.dup(fd)))

    def _flush(self) -> None:
        """Sends as much as the channel takes; events before answers, as they happened before."""
        try:
            while not self._engine_gone and self._send_next():
                pass
        except ConnectionError:
            self._lose_engine(time.monotonic())

    def _send_next(self) -> bool:
        if (event := self._events.next()) is not None:
            sent = send_packet(self._channel, encode(event))
            if sent:
                self._events.drop()
            return sent
        if not self._replies:
            return False
        reply, fd = self._replies[0]
        sent = send_packet(self._channel, encode(reply), fd)
        if sent:
            self._replies.popleft()
            close_all(() if fd is None else (fd,))
        return sent


def _read_request(packet: Packet) -> AnyRequest:
    if packet.problem:
        raise MessageError(packet.problem)
    asked = decode_request(packet.frame)
    came, wanted = len(packet.descriptors), int(isinstance(asked, Hold))
    if came != wanted:
        problem = f"{came} descriptors came with {type(asked).__name__}, must be {wanted}"
        raise MessageError(problem, request=asked.request)
    return asked


def _timeout_ms(seconds: float) -> int | None:
    # Rounded up: a poll that ends slightly early would have to be repeated.
    return None if math.isinf(seconds) else max(0, math.ceil(seconds * 1000))
