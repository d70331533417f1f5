"""A process that this one starts for itself, under a supervisor of its own.

The process is started again when it has ended, with a growing pause until one has worked; so is a
supervisor that was lost, whose processes the kernel has killed. The one rule: nothing here waits
after it was made. A new supervisor is asked for its process before it has said that it is ready.
"""

from __future__ import annotations

import logging
import select
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.supervisor.client import Supervisor
from penstock.supervisor.messages import ProcessExited, ProcessStarted
from penstock.transport.base import ChannelFailed

if TYPE_CHECKING:
    from penstock.supervisor.spec import ProcessSpec

logger = logging.getLogger(__name__)

START_S = 10.0
"""Within this time a process that was asked for runs; then it is asked for again."""
RESTART_S = 0.1
RESTART_MAX_S = 30.0
"""Before a process that has ended is started again; doubled each time, until one has worked."""


class EmbeddedProcess:
    """A process of this one; it belongs to one thread.

    Args:
        spec: the process. Its name is what messages call it.

    Raises:
        UnavailableError: no supervisor can be started.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._supervisor = Supervisor.start()
        self._epoll = select.epoll()
        self._epoll.register(self._supervisor.descriptor, select.EPOLLIN)
        self._asked_at: float | None = None
        """When a process was asked for that has not ended."""
        self._start_at = 0.0
        """When the next process may be asked for."""
        self._pause_s = RESTART_S
        self._runs = False
        self._lost = False
        """Whether the supervisor is lost."""
        self.why = ""
        """Why there is none."""

    @property
    def descriptor(self) -> int:
        """Readable when `poll` may find something."""
        return self._epoll.fileno()

    def start(self, now: float) -> None:
        """Starts the process, unless it runs or was asked for."""
        asked = self._asked_at is not None and now < self._asked_at + START_S
        if self._runs or asked or now < self._start_at:
            return
        self._start_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, RESTART_MAX_S)
        try:
            if self._lost:
                self._replace_supervisor(now)
            self._supervisor.begin_process(self._spec)
        except UnavailableError as error:
            self._note(str(error))
        else:
            self._asked_at = now

    def _replace_supervisor(self, now: float) -> None:
        replacement = Supervisor.begin()
        self._supervisor.close(deadline=now)
        self._supervisor = replacement
        self._epoll.register(replacement.descriptor, select.EPOLLIN)
        self._lost = False

    def note_success(self) -> None:
        """A process works: the next pause is a short one."""
        self._pause_s = RESTART_S

    def poll(self) -> None:
        """Takes what the supervisor reports."""
        if self._lost:
            return
        for event in self._supervisor.events():
            match event:
                case ProcessStarted():
                    self._runs = True
                case ProcessExited():
                    self._runs = False
                    self._asked_at = None
                    self._note(self._why_ended(event))
                case ChannelFailed():
                    self._runs = False
                    self._asked_at = None
                    self._lost = True
                    self._epoll.unregister(self._supervisor.descriptor)
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
        self._supervisor.close(deadline=deadline)
        self._epoll.close()
