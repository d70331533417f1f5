"""A whole server on one machine: supervisor, instances and their ranks, router, HTTP.

    penstock serve ─┬─ supervisor ─┬─ instance ─┬─ rank 0
                    │              │            └─ rank 1
                    └─ HTTP, router ═ channels ═ instances

The one rule: everything ends with the server, however it ends; the supervisor sees to it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec
import uvicorn

from penstock.engine.checkpoints import find_model
from penstock.engine.spec import PairSpec, RankSpec, Role
from penstock.engine.text import Text
from penstock.errors import UnavailableError
from penstock.runtime.signals import StopSignal
from penstock.runtime.supervisor.client import Supervisor
from penstock.runtime.supervisor.messages import Exited, GaveUp
from penstock.runtime.supervisor.spec import OnFailure, ProcessSpec
from penstock.serve.app import Server, ServerSettings
from penstock.serve.link import Link
from penstock.serve.metrics import Metrics
from penstock.serve.plan import instances_of
from penstock.serve.router import Router
from penstock.transport.base import Closed, Failed
from penstock.transport.zeromq import IPC, Listener
from penstock.transport.zmq_link import private_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from penstock.config import Config
    from penstock.engine.spec import InstanceSpec

logger = logging.getLogger(__name__)

STOP_S = 15.0
"""An instance may end its step and drain its copies for so long."""
GRACE_S = 5
"""Answers under way may end for so long when the server is asked to stop."""
RANK_STOP_S = 5.0
"""A rank ends with its instance; so long after it, it is killed."""
RESTART = OnFailure(limit=8, window_s=300.0, delay_s=0.5, delay_max_s=30.0)
# The ranks of an instance are on one machine: their sums need not be seen outside.
RANK_ENVIRONMENT = (("GLOO_SOCKET_IFNAME", "lo"),)


class Audience(Protocol):
    """Who wants to know how the start goes on."""

    def loading(self, name: str, layers: int, of: int) -> None:
        """A rank has read so many of its layers."""
        ...

    def ready(self, address: str) -> None:
        """Requests are taken, at this address."""
        ...


class Serving:
    """The processes and channels behind an HTTP server."""

    def __init__(
        self, config: Config, supervisor: Supervisor, audience: Audience, address: str
    ) -> None:
        assert config.engine is not None
        assert config.serve is not None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why nobody can be served any more, once that is so."""
        self._specs = {spec.name: spec for spec in _addressed(instances_of(config))}
        self._answering = {n for n, spec in self._specs.items() if spec.role is not Role.PREFILL}
        self._supervisor = supervisor
        self._audience = audience
        self._address = address
        self._announced = False
        self._given_up: set[str] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._listener = Listener("server", IPC)
        self.router = Router()
        self.server = Server(
            self.router,
            Text.of(find_model(config.engine.model or None).path),
            Metrics(),
            model=config.model.name,
            settings=ServerSettings(
                api_key=config.serve.api_key,
                body_bytes_max=config.serve.body_bytes_max,
                requests_max=config.serve.requests_max,
            ),
        )

    def start(self) -> None:
        """Starts the instances, and lets them in as they come."""
        for spec in self._specs.values():
            for process in self._processes(spec):
                self._supervisor.start_process(process)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener.descriptor, self._accept)
        loop.add_reader(self._supervisor.descriptor, self._watch)
        # What came before, the descriptors do not show.
        loop.call_soon(self._accept)
        loop.call_soon(self._watch)

    def stop(self) -> None:
        """Ends all channels; the processes end with the supervisor."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.descriptor)
        loop.remove_reader(self._supervisor.descriptor)
        if self._alarm is not None:
            self._alarm.cancel()
        for link in list(self.router.links):
            link.close()
        self._listener.close()

    def _accept(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while (channel := self._listener.accept()) is not None:
            self.router.add(Link(channel, on_change=self._changed))
            # A new life ends the channel of the earlier one, without a sign on its descriptor.
            for link in list(self.router.links):
                link.look()
        due = self._listener.alarm
        if due is not None:
            # Who dialled and then did not come is to be forgotten.
            self._alarm = asyncio.get_running_loop().call_at(due, self._accept)

    def _changed(self, link: Link) -> None:
        if link.lost:
            self.router.remove(link)
            logger.warning("instance gone: name=%s cause=%s", link.name, link.lost)
            return
        if link.ready is None:
            for rank, at in link.loading.items():
                self._audience.loading(f"{link.name} rank {rank}", at.layers, at.of)
        elif len(self.router.ready) == len(self._specs) and not self._announced:
            self._announced = True
            self._audience.ready(self._address)
        else:
            logger.info("instance ready: name=%s", link.name)

    def _watch(self) -> None:
        for event in self._supervisor.events():
            match event:
                case Exited():
                    logger.warning("process ended: %s", event)
                case GaveUp(name=name):
                    logger.error("process failed too often: %s", event)
                    self._given_up.add(name.partition("-rank-")[0])
                    if self._given_up >= self._answering:
                        self._fail(f"process {name!r} failed too often; no instance is left")
                case Closed() | Failed():
                    self._fail(f"the supervisor is lost: {event}")
                    return
                case _:
                    logger.info("supervisor: %s", event)

    def _fail(self, why: str) -> None:
        if not self.failed.done():
            self.failed.set_result(why)

    def _processes(self, spec: InstanceSpec) -> list[ProcessSpec]:
        """The processes of one instance: stopped in reverse, so that it ends before its ranks."""
        spec = msgspec.structs.replace(spec, server=self._listener.address)
        if spec.ranks > 1:
            spec = msgspec.structs.replace(spec, scheduler=private_address(IPC))
        whole = ProcessSpec(
            name=spec.name,
            module="penstock.engine.instance",
            arguments=(msgspec.json.encode(spec).decode(),),
            restart=RESTART,
            stop_s=STOP_S,
        )
        ranks = [
            ProcessSpec(
                name=f"{spec.name}-rank-{rank}",
                module="penstock.engine.rank_process",
                arguments=(msgspec.json.encode(RankSpec(instance=spec, rank=rank)).decode(),),
                environment=RANK_ENVIRONMENT,
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
        if spec.pair is not None and spec.pair.prefill.name not in pairs:
            ranks = [private_address(IPC) for _ in range(spec.pair.prefill.ranks)]
            change = msgspec.structs.replace
            pairs[spec.pair.prefill.name] = PairSpec(
                prefill=change(
                    spec.pair.prefill, address=private_address(IPC), rank_addresses=ranks
                ),
                decode=change(spec.pair.decode, address=private_address(IPC)),
            )
    return [
        spec
        if spec.pair is None
        else msgspec.structs.replace(spec, pair=pairs[spec.pair.prefill.name])
        for spec in specs
    ]


@asynccontextmanager
async def serving(
    config: Config, supervisor: Supervisor, audience: Audience, address: str
) -> AsyncIterator[Serving]:
    """The instances and the router, without HTTP."""
    found = Serving(config, supervisor, audience, address)
    found.start()
    try:
        yield found
    finally:
        found.stop()


def serve(config: Config, audience: Audience, *, log_level: str = "warning") -> None:
    """Serves a settled configuration until the process is asked to stop.

    Raises:
        UnavailableError: the address is taken, or no instance is left.
    """
    assert config.serve is not None
    # The supervisor comes before the loop and its threads.
    with (
        _bound(config.serve.host, config.serve.port) as bound,
        Supervisor.start() as supervisor,
        StopSignal((signal.SIGINT, signal.SIGTERM)) as stop,
    ):
        asyncio.run(_serve(config, supervisor, audience, bound, stop, log_level))


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


async def _serve(
    config: Config,
    supervisor: Supervisor,
    audience: Audience,
    bound: socket.socket,
    stop: StopSignal,
    log_level: str,
) -> None:
    host, port = bound.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    async with serving(config, supervisor, audience, address) as found:
        server = uvicorn.Server(
            uvicorn.Config(
                found.server.app(),
                log_level=log_level,
                lifespan="off",
                timeout_graceful_shutdown=GRACE_S,
            )
        )

        def end(_: asyncio.Future[str]) -> None:
            server.should_exit = True

        found.failed.add_done_callback(end)
        # While it serves, uvicorn takes the signals; what came before, it does not know.
        server.should_exit = stop.stopping
        await server.serve(sockets=[bound])
        if found.failed.done():
            raise UnavailableError(found.failed.result())
