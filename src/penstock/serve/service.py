"""What one command runs: everything, the router alone, or instances that join a router.

    penstock serve ─┬─ supervisor ─┬─ instance ─┬─ rank 0
                    │              │            └─ rank 1
                    └─ HTTP, router ═ channels ═ instances

| `engine.role`, `serve.router`       | HTTP and router | instances                     |
|-------------------------------------|-----------------|-------------------------------|
| `both`, none                        | here            | here                          |
| `router`, an address                | here            | those that dial the address   |
| any other, an address               | there           | here                          |

The one rule: everything ends with its command, however that ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from penstock.engine.checkpoints import find_model
from penstock.engine.defaults import defaults_of
from penstock.engine.text import Text
from penstock.errors import UnavailableError
from penstock.observe.metrics import ServerMetrics
from penstock.runtime.stop_signal import StopSignal
from penstock.serve.access_log import AccessLog
from penstock.serve.app import Server, ServerSettings
from penstock.serve.http import HttpServer
from penstock.serve.instance_link import InstanceLink
from penstock.serve.plan import instances_of, secrets_of
from penstock.serve.processes import Processes
from penstock.serve.role_secret import SECRET_BYTES
from penstock.serve.router import Router
from penstock.serve.server_socket import address_of, raise_descriptor_limit
from penstock.supervisor.client import Supervisor
from penstock.transport.zeromq import IPC, Listener

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Sequence
    from types import FrameType

    from penstock.config import Config

logger = logging.getLogger(__name__)


class StartListener(Protocol):
    """Is told how the start proceeds."""

    def loading(self, name: str, layers: int, of: int) -> None:
        """How many of its layers a rank has read."""
        ...

    def waiting(self, address: str, router: str) -> None:
        """HTTP is served at this address; instances that others start may come to the router."""
        ...

    def ready(self, address: str, ready_s: Sequence[float] = ()) -> None:
        """Requests are taken, at this address.

        Args:
            address: Where.
            ready_s: How long the memory of each tier took until it could be used, device first.
        """
        ...


class Service:
    """The channels behind an HTTP server, and who comes over them."""

    def __init__(
        self,
        config: Config,
        audience: StartListener,
        *,
        address: str,
        expected: int,
        api_key: str,
        secret: bytes,
    ) -> None:
        assert config.engine is not None
        assert config.serve is not None
        self._expected = expected
        """Instances that this command starts; 0: all come from elsewhere."""
        self._audience = audience
        self._address = address
        self._announced = False
        self._stopped = False
        self._alarm: asyncio.TimerHandle | None = None
        door = IPC if expected else config.serve.router
        self._listener = Listener("server", door, secret=secret)
        self.router = Router()
        model = find_model(config.engine.model or None)
        self.server = Server(
            self.router,
            Text.of(model.path),
            ServerMetrics(),
            model=config.model.name,
            defaults=defaults_of(model),
            settings=ServerSettings(
                api_key=api_key,
                body_bytes_max=config.serve.body_bytes_max,
                body_s=config.serve.body_s,
                requests_max=config.serve.requests_max,
            ),
        )

    @property
    def door(self) -> str:
        """Where instances are let in."""
        return self._listener.address

    def start(self) -> None:
        """Lets instances in as they come."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener.descriptor, self._accept)
        # What came before, the descriptor does not show.
        loop.call_soon(self._accept)
        if not self._expected:
            self._audience.waiting(self._address, self.door)

    def stop(self) -> None:
        """Ends all channels, and with them every request; twice does no harm."""
        if self._stopped:
            return
        self._stopped = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.descriptor)
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
            self.router.add(InstanceLink(channel, on_change=self._changed))
            # A new life ends the channel of the earlier one, without a sign on its descriptor.
            for link in list(self.router.links):
                link.look()
        due = self._listener.alarm
        if due is not None:
            # Who dialled and then did not come is to be forgotten.
            self._alarm = asyncio.get_running_loop().call_at(due, self._accept)

    def _changed(self, link: InstanceLink) -> None:
        if link.lost:
            self.router.remove(link)
            level = logging.INFO if self._stopped else logging.WARNING
            logger.log(level, "instance gone: name=%s cause=%s", link.name, link.lost)
            return
        if link.leaving:
            logger.info("instance leaving: name=%s requests=%d", link.name, link.load)
            return
        if link.ready is None:
            for rank, at in link.loading.items():
                self._audience.loading(f"{link.name} rank {rank}", at.layers, at.of)
        elif self._complete and not self._announced:
            self._announced = True
            told = [link.ready.ready_s for link in self.router.links if link.ready is not None]
            self._audience.ready(self._address, [max(times) for times in zip(*told, strict=False)])
        else:
            logger.info("instance ready: name=%s", link.name)

    @property
    def _complete(self) -> bool:
        """Whether all are there that are started here; of others, one that answers."""
        if self._expected:
            return len(self.router.ready) == self._expected
        return bool(self.router.answering)


@asynccontextmanager
async def _processes(
    config: Config, supervisor: Supervisor, door: str, secret: bytes
) -> AsyncIterator[Processes]:
    """The instances of this command, if it starts some; `secret` is that of their server."""
    _, pair_secret = secrets_of(config)
    found = Processes(supervisor, instances_of(config), pair_secret=pair_secret)
    found.start(door, secret)
    try:
        yield found
    finally:
        found.stop()


def serve(
    config: Config, audience: StartListener, bound: socket.socket | None, *, api_key: str = ""
) -> None:
    """Does what a settled configuration says until the process is asked to stop.

    Args:
        config: What to run.
        audience: Who is told how the start goes on.
        bound: The socket of the HTTP server; without it, instances join a router elsewhere.
        api_key: What clients must send, if anything.

    Raises:
        UnavailableError: an address is taken, or no instance is left.
    """
    # The supervisor comes before the loop and its threads.
    with Supervisor.start() as supervisor, _stop_signal() as stop:
        if bound is None:
            asyncio.run(_join(config, supervisor, stop))
        else:
            asyncio.run(_serve(config, supervisor, audience, bound, stop, api_key))
        _end_at_once_if_asked_again(stop)


def _stop_signal() -> StopSignal:
    return StopSignal((signal.SIGINT, signal.SIGTERM))


def _end_at_once_if_asked_again(stop: StopSignal) -> None:
    """While instances end, which may take seconds, another signal ends the command.

    The supervisor ends everything that it started when the command is gone.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        logging.shutdown()
        os._exit(0)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)
    if stop.times > 1:
        end(signal.SIGTERM, None)


async def _join(config: Config, supervisor: Supervisor, stop: StopSignal) -> None:
    """Runs instances that dial the router of another command."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(stop.descriptor, asked.set)
    secret, _ = secrets_of(config)
    async with _processes(config, supervisor, "", secret) as processes:
        processes.failed.add_done_callback(lambda _: asked.set())
        await asked.wait()
        asyncio.get_running_loop().remove_reader(stop.descriptor)
        if processes.failed.done():
            raise UnavailableError(processes.failed.result())


async def _serve(
    config: Config,
    supervisor: Supervisor,
    audience: StartListener,
    bound: socket.socket,
    stop: StopSignal,
    api_key: str,
) -> None:
    expected = len(instances_of(config))
    # Instances of its own know what nobody else does; others have what the roles have in common.
    secret = secrets.token_bytes(SECRET_BYTES) if expected else secrets_of(config)[0]
    found = Service(
        config,
        audience,
        address=address_of(bound),
        expected=expected,
        api_key=api_key,
        secret=secret,
    )
    found.start()
    try:
        async with _processes(config, supervisor, found.door, secret) as processes:
            await _answer(config, found, processes, bound, stop)
    finally:
        found.stop()


async def _answer(
    config: Config, found: Service, processes: Processes, bound: socket.socket, stop: StopSignal
) -> None:
    assert config.serve is not None
    server = HttpServer(
        AccessLog(found.server.app()),
        connections_max=raise_descriptor_limit(config.serve.connections_max),
        header_s=config.serve.header_s,
        drain_s=config.serve.drain_s,
        on_overtime=found.stop,
    )
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_tell_failure)

    def asked() -> None:
        for _ in range(os.eventfd_read(stop.descriptor)):
            server.stop()

    loop.add_reader(stop.descriptor, asked)
    processes.failed.add_done_callback(lambda _: server.stop())
    try:
        await server.serve(sockets=[bound])
    finally:
        loop.remove_reader(stop.descriptor)
    if processes.failed.done():
        raise UnavailableError(processes.failed.result())


def _tell_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A machine that has no descriptor left is told of in one line; the rest is a defect."""
    error = context.get("exception")
    if isinstance(error, OSError) and "accept" in context["message"]:
        logger.error("no connection taken: cause=%s", error.strerror)
    else:
        loop.default_exception_handler(context)
