"""The processes that one command starts: instances and their ranks, under a supervisor.

| a process ends                                 | then                                         |
|------------------------------------------------|----------------------------------------------|
| in its first life, since a setting is wrong     | the command ends, with the problem           |
| more than `RESTART.limit` times in its window   | it is given up                               |
| as often in a row without having been ready     | it is given up, however long each start took |
| otherwise                                      | it is started again                          |

When no instance is left that answers, the command ends.

The one rule: all processes end with the command, however it ends; the supervisor ends them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import ConfigError, UnavailableError
from penstock.toolkit import (
    IPC,
    ChannelClosed,
    ChannelFailed,
    OnFailure,
    ProcessExited,
    ProcessSpec,
    RestartsExhausted,
    private_address,
    private_folder,
)
from penstock_serve.engine.process_life import WRONG_SETTING, make_report, read_report
from penstock_serve.engine.spec import InstanceRole, RankSpec, sealed
from penstock_serve.server.plan import SECRET_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.errors import PenstockError
    from penstock.toolkit import Secret, Supervisor
    from penstock_serve.engine.spec import InstanceSpec

logger = logging.getLogger("penstock.serve.processes")

STOP_S = 15.0
"""How long an instance may take to end its step and drain its copies."""
RANK_STOP_S = 5.0
"""A rank ends with its instance; after this time it is killed."""
RESTART = OnFailure(limit=8, window_s=300.0, delay_s=0.5, delay_max_s=30.0)
# The ranks of an instance are on one machine: their collectives use the loopback interface.
RANK_ENVIRONMENT = (("GLOO_SOCKET_IFNAME", "lo"),)
INSTANCE_MODULE = "penstock_serve.engine.instance"
RANK_MODULE = "penstock_serve.engine.rank_process"
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""With one of these a user says how threads wait for each other."""


class Processes:
    """The instances of one command, each with its ranks."""

    def __init__(
        self,
        supervisor: Supervisor,
        specs: Sequence[InstanceSpec],
        *,
        handoff_secret: Secret = b"",
    ) -> None:
        self.failed: asyncio.Future[PenstockError] = asyncio.get_running_loop().create_future()
        """Done when the command cannot go on, with the reason."""
        self._supervisor = supervisor
        # Without one of several commands, a new one that every restart reuses.
        secret = handoff_secret or secrets.token_bytes(SECRET_BYTES)
        self._specs = [msgspec.structs.replace(spec, handoff_secret=secret) for spec in specs]
        answering = {spec.name for spec in specs if spec.role is not InstanceRole.PREFILL}
        self._needed = answering or {spec.name for spec in specs}
        """The instances of which at least one must be alive."""
        self._given_up: set[str] = set()
        self._reports: dict[str, int] = {}
        """What each process reports, as a descriptor."""
        self._not_ready: dict[str, int] = {}
        """How often each process has ended since it was ready last; it was started before."""

    def start(self, server: str, secret: Secret) -> None:
        """Starts them; they dial `server`, unless they join the one of another command."""
        folder = str(private_folder())
        for spec in self._specs:
            placed = msgspec.structs.replace(
                spec,
                server=spec.server if spec.joins else server,
                server_secret=secret,
                folder=folder,
            )
            for process, given in processes_of(placed):
                self._hand_over(process, given)
                self._supervisor.start_process(process)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._supervisor.descriptor, self._watch)
        # The descriptor does not show what arrived before the reader was added.
        loop.call_soon(self._watch)

    def stop(self) -> None:
        """Stops watching them; they end with the supervisor."""
        asyncio.get_running_loop().remove_reader(self._supervisor.descriptor)
        for fd in self._reports.values():
            os.close(fd)
        self._reports.clear()

    def _hand_over(self, process: ProcessSpec, given: InstanceSpec | RankSpec) -> None:
        """Gives the supervisor the spec of a process, and room for reports, for every restart."""
        spec, report = process.descriptors
        fd = sealed(given)
        try:
            self._supervisor.hold(spec, fd)
        finally:
            os.close(fd)
        self._reports[process.name] = make_report()
        self._supervisor.hold(report, self._reports[process.name])

    def _watch(self) -> None:
        for event in self._supervisor.events():
            match event:
                case ProcessExited():
                    self._note_exit(event)
                case RestartsExhausted(name=name):
                    logger.error("process failed too often: %s", event)
                    self._give_up(name, "failed too often")
                case ChannelClosed() | ChannelFailed():
                    self._fail(UnavailableError(f"the supervisor is lost: {event}"))
                    return
                case _:
                    logger.info("supervisor: %s", event)

    def _note_exit(self, event: ProcessExited) -> None:
        name = event.name
        report = read_report(self._reports[name], event.pid)
        if event.code == WRONG_SETTING and report is not None and report.problem:
            if name not in self._not_ready:
                self._fail(ConfigError(report.field, report.problem))
                return
            logger.error("setting is wrong: process=%s %s: %s", name, report.field, report.problem)
        logger.warning("process ended: %s", event)
        was_ready = report is not None and report.is_ready
        self._not_ready[name] = 0 if was_ready else self._not_ready.get(name, 0) + 1
        if event.restart_at is not None and self._not_ready[name] > RESTART.limit:
            # It waits to be started again, so this takes no longer than an answer.
            self._supervisor.stop_process(name)
            self._give_up(name, f"ended {self._not_ready[name]} times before it was ready")

    def _give_up(self, name: str, why: str) -> None:
        self._given_up.add(name.partition("-rank-")[0])
        if self._given_up >= self._needed:
            self._fail(UnavailableError(f"process {name!r} {why}; no instance is left"))
        else:
            logger.error("process given up: name=%s cause=it %s", name, why)

    def _fail(self, why: PenstockError) -> None:
        if not self.failed.done():
            self.failed.set_result(why)


def processes_of(spec: InstanceSpec) -> list[tuple[ProcessSpec, InstanceSpec | RankSpec]]:
    """The processes of one instance, each with the spec that it reads from a descriptor.

    They are stopped in reverse order, so the instance ends before its ranks.
    """
    if spec.ranks > 1:
        spec = msgspec.structs.replace(
            spec, scheduler=private_address(IPC), secret=secrets.token_bytes(SECRET_BYTES)
        )
    whole = _process(spec.name, INSTANCE_MODULE, stop_s=STOP_S + spec.drain_s)
    ranks = [
        (
            _process(f"{spec.name}-rank-{rank}", RANK_MODULE, RANK_ENVIRONMENT, stop_s=RANK_STOP_S),
            RankSpec(instance=spec, rank=rank),
        )
        for rank in range(spec.ranks if spec.ranks > 1 else 0)
    ]
    return [*ranks, (whole, spec)]


def _process(
    name: str, module: str, environment: tuple[tuple[str, str], ...] = (), *, stop_s: float
) -> ProcessSpec:
    held = (f"{name}.spec", f"{name}.report")
    return ProcessSpec(
        name=name,
        module=module,
        arguments=held,
        descriptors=held,
        environment=(*environment, *_waits_asleep()),
        keeps=True,
        restart=RESTART,
        stop_s=stop_s,
    )


def _waits_asleep() -> tuple[tuple[str, str], ...]:
    """Lets threads of one computation wait for each other asleep.

    They spin by default, a little quicker on an idle machine. On a busy one they spin for the time
    that the thread they wait for would need, and a token takes up to ten times as long.
    """
    if any(name in os.environ for name in WAIT_VARIABLES):
        return ()
    return ((WAIT_VARIABLES[0], "PASSIVE"),)
