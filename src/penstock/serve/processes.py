"""The processes that one command starts: instances and their ranks, under a supervisor.

The one rule: everything ends with the command, however it ends; the supervisor sees to it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from penstock.engine.spec import PairSpec, RankSpec, Role
from penstock.runtime.supervisor.messages import Exited, GaveUp
from penstock.runtime.supervisor.spec import OnFailure, ProcessSpec
from penstock.transport.base import Closed, Failed
from penstock.transport.zeromq import IPC
from penstock.transport.zmq_link import private_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.spec import InstanceSpec
    from penstock.runtime.supervisor.client import Supervisor

logger = logging.getLogger(__name__)

STOP_S = 15.0
"""An instance may end its step and drain its copies for so long."""
RANK_STOP_S = 5.0
"""A rank ends with its instance; so long after it, it is killed."""
RESTART = OnFailure(limit=8, window_s=300.0, delay_s=0.5, delay_max_s=30.0)
# The ranks of an instance are on one machine: their sums need not be seen outside.
RANK_ENVIRONMENT = (("GLOO_SOCKET_IFNAME", "lo"),)


class Processes:
    """The instances of one command, each with its ranks."""

    def __init__(self, supervisor: Supervisor, specs: Sequence[InstanceSpec]) -> None:
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why nobody can be served any more, once that is so."""
        self._supervisor = supervisor
        self._specs = _addressed(specs)
        answering = {spec.name for spec in specs if spec.role is not Role.PREFILL}
        self._needed = answering or {spec.name for spec in specs}
        """Those without which there is nothing left to do."""
        self._given_up: set[str] = set()

    def start(self, server: str) -> None:
        """Starts them; they dial `server`, unless they join the one of another command."""
        for spec in self._specs:
            placed = spec if spec.joins else msgspec.structs.replace(spec, server=server)
            for process in processes_of(placed):
                self._supervisor.start_process(process)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._supervisor.descriptor, self._watch)
        # What came before, the descriptor does not show.
        loop.call_soon(self._watch)

    def stop(self) -> None:
        """Nobody looks after them any more; they end with the supervisor."""
        asyncio.get_running_loop().remove_reader(self._supervisor.descriptor)

    def _watch(self) -> None:
        for event in self._supervisor.events():
            match event:
                case Exited():
                    logger.warning("process ended: %s", event)
                case GaveUp(name=name):
                    logger.error("process failed too often: %s", event)
                    self._given_up.add(name.partition("-rank-")[0])
                    if self._given_up >= self._needed:
                        self._fail(f"process {name!r} failed too often; no instance is left")
                case Closed() | Failed():
                    self._fail(f"the supervisor is lost: {event}")
                    return
                case _:
                    logger.info("supervisor: %s", event)

    def _fail(self, why: str) -> None:
        if not self.failed.done():
            self.failed.set_result(why)


def processes_of(spec: InstanceSpec) -> list[ProcessSpec]:
    """The processes of one instance: stopped in reverse, so that it ends before its ranks."""
    if spec.ranks > 1:
        spec = msgspec.structs.replace(spec, scheduler=private_address(IPC))
    whole = ProcessSpec(
        name=spec.name,
        module="penstock.engine.instance",
        arguments=(msgspec.json.encode(spec).decode(),),
        keeps=True,
        restart=RESTART,
        stop_s=STOP_S,
    )
    ranks = [
        ProcessSpec(
            name=f"{spec.name}-rank-{rank}",
            module="penstock.engine.rank_process",
            arguments=(msgspec.json.encode(RankSpec(instance=spec, rank=rank)).decode(),),
            environment=RANK_ENVIRONMENT,
            keeps=True,
            restart=RESTART,
            stop_s=RANK_STOP_S,
        )
        for rank in range(spec.ranks if spec.ranks > 1 else 0)
    ]
    return [*ranks, whole]


def _addressed(specs: Sequence[InstanceSpec]) -> list[InstanceSpec]:
    """The instances, and where those that hand KV over find each other in every life."""
    pairs: dict[str, PairSpec] = {}
    for spec in specs:
        pair = spec.pair
        if pair is None or pair.prefill.address or pair.prefill.name in pairs:
            continue
        ranks = [private_address(IPC) for _ in range(pair.prefill.ranks)]
        change = msgspec.structs.replace
        pairs[pair.prefill.name] = PairSpec(
            prefill=change(pair.prefill, address=private_address(IPC), rank_addresses=ranks),
            decode=change(pair.decode, address=private_address(IPC)),
        )
    return [
        spec
        if spec.pair is None or spec.pair.prefill.name not in pairs
        else msgspec.structs.replace(spec, pair=pairs[spec.pair.prefill.name])
        for spec in specs
    ]
