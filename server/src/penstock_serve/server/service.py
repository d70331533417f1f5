"""What one `penstock serve` runs: everything, the router alone, or instances for a router.

    penstock serve ─┬─ supervisor ─┬─ instance ─┬─ rank 0
                    │              │            └─ rank 1
                    └─ HTTP, router ═ channels ═ instances

| `engine.role`, `serve.router`       | HTTP and router | instances                     |
|-------------------------------------|-----------------|-------------------------------|
| `both`, none                        | here            | here                          |
| `router`, an address                | here            | those that dial the address   |
| `rank`                              | there           | ranks of one, here            |
| any other, an address               | there           | here                          |

The one rule: everything that a command started ends with it, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from penstock import StopSignal
from penstock.config import port_range
from penstock.toolkit import IPC, ChannelSettings, Listener, Supervisor, recorder_of
from penstock_serve.engine.checkpoints import find_model
from penstock_serve.engine.defaults import defaults_of
from penstock_serve.engine.text import Text
from penstock_serve.observe.metrics import ServerMetrics
from penstock_serve.server.access_log import AccessLog, Tracing
from penstock_serve.server.app import Server
from penstock_serve.server.http import HttpServer, serve_until_stopped
from penstock_serve.server.instance_link import InstanceLink
from penstock_serve.server.plan import SECRET_BYTES, instances_of, secrets_of
from penstock_serve.server.processes import Processes
from penstock_serve.server.router import RequestGate, Router
from penstock_serve.server.server_socket import address_of, raise_descriptor_limit

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Sequence
    from types import FrameType

    from penstock.config import Config
    from penstock.toolkit import Recorder, Secret

logger = logging.getLogger("penstock.serve.service")


class StartListener(Protocol):
    """Gets callbacks about the progress of the start."""

    def loading(self, name: str, layers: int, of: int) -> None:
        """A rank has loaded `layers` of its `of` layers."""
        ...

    def waiting(self, address: str, router: str) -> None:
        """HTTP is served at `address`; the router waits for instances at `router`."""
        ...

    def ready(
        self, address: str, ready_s: Sequence[float] = (), tiers_off: Sequence[str] = ()
    ) -> None:
        """Requests are accepted."""
        ...


class Service:
    """The router, and the instances that connect to it."""

    def __init__(
        self,
        config: Config,
        progress: StartListener,
        *,
        address: str,
        expected: Sequence[str],
        api_key: str,
        secret: Secret,
    ) -> None:
        assert config.engine is not None
        assert config.serve is not None
        self._expected = expected
        """Instances that this command starts; none: other commands start them."""
        self._progress = progress
        self._address = address
        self._announced = False
        self._stopped = False
        self._alarm: asyncio.TimerHandle | None = None
        address_here = IPC if expected else config.serve.router
        settings = ChannelSettings(
            ports=port_range(config.serve.ports), silence_s=config.serve.silence_s
        )
        self._listener = Listener("server", address_here, secret=secret, settings=settings)
        self._recorder = recorder_of(config)
        self.router = _router_of(config, self._recorder)
        model = find_model(config.engine.model or None)
        self.tracing = Tracing() if config.serve.tracing else None
        self.metrics = ServerMetrics()
        self.server = Server(
            self.router,
            Text.of(model.path),
            self.metrics,
            model=config.model.name,
            defaults=defaults_of(model),
            settings=config.serve,
            api_key=api_key,
            instances=len(expected),
        )

    @property
    def instance_address(self) -> str:
        """The address that instances connect to."""
        return self._listener.address

    def start(self) -> None:
        """Accepts instances from now on."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener.descriptor, self._accept)
        # The descriptor does not show what arrived before the reader was added.
        loop.call_soon(self._accept)
        if self.server.balancer is not None:
            self.server.balancer.start()
        if not self._expected:
            self._progress.waiting(self._address, self.instance_address)

    def stop(self) -> None:
        """Closes all channels, which ends every request; may be called twice."""
        if self._stopped:
            return
        self._stopped = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.descriptor)
        if self._alarm is not None:
            self._alarm.cancel()
        if self.server.balancer is not None:
            self.server.balancer.stop()
        for link in list(self.router.links):
            link.close()
        self.router.pairs.close()
        self._listener.close()
        if self._recorder is not None:
            self._recorder.close()
        if self.tracing is not None:
            self.tracing.close()

    def _accept(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while (channel := self._listener.accept()) is not None:
            self.router.add(InstanceLink(channel, on_change=self._changed))
            # A restarted instance ends the channel of its earlier life, which the descriptor of
            # that channel does not show.
            for link in list(self.router.links):
                link.look()
        due = self._listener.alarm
        if due is not None:
            # Forgets instances that dialled and did not connect in time.
            self._alarm = asyncio.get_running_loop().call_at(due, self._accept)

    def _changed(self, link: InstanceLink) -> None:
        if link.lost:
            self.router.remove(link)
            # Why a process did not start is logged, or said, where its end is seen.
            level = logging.WARNING if link.was_ready and not self._stopped else logging.INFO
            logger.log(level, "instance gone: name=%s cause=%s", link.name, link.lost)
            return
        if link.leaving:
            logger.info("instance leaving: name=%s requests=%d", link.name, link.load)
            return
        if link.ready is None:
            for rank, at in link.loading.items():
                self._progress.loading(f"{link.name} rank {rank}", at.layers, at.of)
        elif self._complete and not self._announced:
            self._announced = True
            there = [link.ready for link in self.router.links if link.ready is not None]
            times = zip(*(each.ready_s for each in there), strict=False)
            reasons = zip(*(each.tiers_off for each in there), strict=False)
            self._progress.ready(
                self._address,
                [max(each) for each in times],
                [next(filter(None, each), "") for each in reasons],
            )
        else:
            logger.info("instance ready: name=%s", link.name)

    @property
    def _complete(self) -> bool:
        """Whether all instances of this command are ready, or one of another command's."""
        if self._expected:
            return len(self.router.ready) == len(self._expected)
        return bool(self.router.answering)


def _router_of(config: Config, recorder: Recorder | None) -> Router:
    assert config.serve is not None
    waits = config.serve.when_paused == "wait"
    gate = RequestGate(waits=waits, wait_s=config.serve.paused_wait_s)
    return Router(config.routing, gate, recorder, salt=config.salt)


@asynccontextmanager
async def _processes(
    config: Config, supervisor: Supervisor, address: str, secret: Secret
) -> AsyncIterator[Processes]:
    """The instances of this command, if it starts some; `secret` is that of their server."""
    _, handoff_secret = secrets_of(config)
    found = Processes(supervisor, instances_of(config), handoff_secret=handoff_secret)
    found.start(address, secret)
    try:
        yield found
    finally:
        found.stop()


def serve(
    config: Config, progress: StartListener, bound: socket.socket | None, *, api_key: str = ""
) -> None:
    """Serves a settled configuration until the process gets a stop signal.

    Raises `ConfigError`: an instance cannot start with a setting; `UnavailableError`: an address is
    in use, or no instance is left.
    """
    # The supervisor is started before the event loop and its threads.
    with Supervisor.start() as supervisor, StopSignal((signal.SIGINT, signal.SIGTERM)) as stop:
        if bound is None:
            asyncio.run(_join(config, supervisor, stop))
        else:
            asyncio.run(_serve(config, supervisor, progress, bound, stop, api_key))
        _end_at_once_if_asked_again(stop)


def _end_at_once_if_asked_again(stop: StopSignal) -> None:
    """While instances end, which may take seconds, another signal ends the command at once.

    The supervisor then ends everything that it started. The status is that of a program which the
    signal ended, as shells have it: answers may have been cut off.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        logging.shutdown()
        os._exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)
    if stop.times > 1:
        end(stop.last, None)


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
            raise processes.failed.result()


async def _serve(
    config: Config,
    supervisor: Supervisor,
    progress: StartListener,
    bound: socket.socket,
    stop: StopSignal,
    api_key: str,
) -> None:
    expected = [spec.name for spec in instances_of(config)]
    # Own instances get a new secret; those of other commands have the roles' common one.
    secret = secrets.token_bytes(SECRET_BYTES) if expected else secrets_of(config)[0]
    found = Service(
        config,
        progress,
        address=address_of(bound),
        expected=expected,
        api_key=api_key,
        secret=secret,
    )
    found.start()
    try:
        async with _processes(config, supervisor, found.instance_address, secret) as processes:
            await _answer(config, found, processes, bound, stop)
    finally:
        found.stop()


async def _answer(
    config: Config, found: Service, processes: Processes, bound: socket.socket, stop: StopSignal
) -> None:
    assert config.serve is not None
    server = HttpServer(
        AccessLog(found.server.app(), found.metrics.count_response, found.tracing),
        connections_max=raise_descriptor_limit(config.serve.connections_max),
        header_s=config.serve.header_s,
        drain_s=config.serve.drain_s,
        on_stop=found.server.live.close,
        on_overtime=found.stop,
    )
    processes.failed.add_done_callback(lambda _: server.stop())
    await serve_until_stopped(server, bound, stop)
    if processes.failed.done():
        raise processes.failed.result()
