"""A process that this one starts for itself, under a supervisor of its own.

The process is started again when it has ended, with a growing pause until one has worked; so is a
supervisor that cannot be started, does not answer, or was lost, whose processes the kernel has
killed. The one rule: nothing here waits, and nothing is given up. A supervisor is asked for its
process before it has said that it is ready.
"""

from __future__ import annotations

import logging
import select
import time
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.supervisor.client import Supervisor
from penstock.supervisor.messages import ProcessExited, ProcessStarted
from penstock.supervisor.spec import READY_S
from penstock.transport.base import ChannelFailed

if TYPE_CHECKING:
    from penstock.supervisor.spec import ProcessSpec

logger = logging.getLogger(__name__)

ANSWER_S = READY_S + 15.0
ANSWER_MAX_S = 8 * ANSWER_S
"""Within this time a supervisor starts, and says what became of a process that was asked for, which
has `READY_S` to run; then another supervisor is asked. Doubled each time: a machine may be that
busy."""
RESTART_S = 0.1
RESTART_MAX_S = 30.0
"""Before a process that has ended is started again; doubled each time, until one has worked."""


class EmbeddedProcess:
    """A process of this one; it belongs to one thread.

    Args:
        spec: the process. Its name is what messages call it.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._supervisor: Supervisor | None = None
        """`None` while there is none: it was lost, or cannot be started."""
        self._epoll = select.epoll()
        self._asked_at: float | None = None
        """When a process was asked for of which nothing was heard since."""
        self._start_at = 0.0
        """When the next process may be asked for."""
        self._pause_s = RESTART_S
        self._answer_s = ANSWER_S
        self._runs = False
        self.why = ""
        """Why there is none."""
        # It takes a while to start, and the first process is asked for soon.
        try:
            self._take_supervisor(Supervisor.begin())
        except UnavailableError as error:
            self._note(str(error))

    @property
    def descriptor(self) -> int:
        """Readable when `poll` may find something."""
        return self._epoll.fileno()

    def start(self, now: float) -> None:
        """Starts the process, unless it runs or was asked for."""
        if self._asked_at is not None and now >= self._asked_at + self._answer_s:
            self._note(f"the supervisor has not answered for {self._answer_s:g} s")
            self._answer_s = min(2 * self._answer_s, ANSWER_MAX_S)
            self._drop_supervisor(time.monotonic())
        if self._runs or self._asked_at is not None or now < self._start_at:
            return
        self._start_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, RESTART_MAX_S)
        try:
            if self._supervisor is None:
                self._take_supervisor(Supervisor.begin())
            assert self._supervisor is not None
            self._supervisor.begin_process(self._spec)
        except UnavailableError as error:
            self._note(str(error))
        else:
            self._asked_at = now

    def _take_supervisor(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._epoll.register(supervisor.descriptor, select.EPOLLIN)

    def _drop_supervisor(self, deadline: float) -> None:
        """Ends the supervisor, and with it the process if there is one."""
        supervisor, self._supervisor = self._supervisor, None
        self._runs = False
        self._asked_at = None
        if supervisor is None:
            return
        self._epoll.unregister(supervisor.descriptor)
        supervisor.look()
        # One that has not begun yet has nothing to end in order.
        supervisor.close(deadline=deadline if supervisor.has_begun else time.monotonic())

    def note_success(self) -> None:
        """A process works: the next pause is a short one."""
        self._pause_s = RESTART_S
        self._answer_s = ANSWER_S
        self.why = ""

    def poll(self) -> None:
        """Takes what the supervisor reports."""
        if self._supervisor is None:
            return
        for event in self._supervisor.events():
            match event:
                case ProcessStarted():
                    self._runs = True
                    self._asked_at = None
                case ProcessExited():
                    self._runs = False
                    self._asked_at = None
                    self._note(self._why_ended(event))
                case ChannelFailed():
                    self._drop_supervisor(time.monotonic())
                    self._note(f"the {self._spec.name} process cannot be started: {event.cause}")
                case _:
                    pass

    def _why_ended(self, exited: ProcessExited) -> str:
        ended = exited.problem or (
            f"signal {exited.signal}"
            if exited.signal
            else f"status {exited.code}, and its log says why"
        )
        return f"the {self._spec.name} process has ended: {ended}"

    def _note(self, why: str) -> None:
        if why != self.why:
            self.why = why
            logger.warning("embedded %s: %s", self._spec.name, why)

    def close(self, deadline: float) -> None:
        self._drop_supervisor(deadline)
        self._epoll.close()
