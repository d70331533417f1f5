"""What an operator does to instances, and the bodies of `POST /admin/*` that ask for it.

    result = await control.pause(DrainRequest(mode="drain", timeout_s=30))
    result.failed                   # {} or why, by the name of the instance
    control.resume()

Requests are held at the router first, then those under way end, then every instance is told. The
router remembers the wanted state: an instance that was away gets it before its first request.

The one rule: one operation at a time. A second one waits for the first, within its own timeout.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec

from penstock.errors import shown
from penstock_serve.engine import messages as ms
from penstock_serve.engine.checkpoints import version_of
from penstock_serve.server.fields import (
    BadRequest,
    flag,
    number,
    one_of,
    read_fields,
    read_object,
    readers_of,
    refuse,
    whole,
    word,
)
from penstock_serve.server.instance_link import InstanceLost
from penstock_serve.server.router import ServerState, is_usable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from penstock_serve.server.instance_link import InstanceLink
    from penstock_serve.server.router import Router


TIMEOUT_S_MAX = 86_400.0
VERSION_BYTES_MAX = 128
ROLES = ("both", "prefill", "decode")
AUTO = "auto"
"""In the place of a role: the balance may change it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """How the requests under way end."""

    mode: Annotated[str, one_of("drain", "abort")] = "drain"
    """`drain`: they have `timeout_s` to finish, and are aborted then. `abort`: at once."""
    timeout_s: Annotated[float, number(0, TIMEOUT_S_MAX)] = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepRequest(DrainRequest):
    """Memory that all instances give back."""

    level: Annotated[int, whole(1, 2)] = 1
    """1: the KV of the device. 2: the weights, too."""
    host: Annotated[bool, flag] = False
    """Whether host memory is given back, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyRequest:
    """A call that takes no fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """Another role for one instance."""

    instance: Annotated[str, word]
    role: Annotated[str, one_of(*ROLES, AUTO)]
    timeout_s: Annotated[float, number(0, TIMEOUT_S_MAX)] = 60.0
    """How long the requests of the old role may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRequest(DrainRequest):
    """Other weights for all instances."""

    path: Annotated[str, _path] = ""
    """The checkpoint that is loaded; empty: the weights were changed by other means."""
    version: Annotated[str, _version] = ""
    load_timeout_s: Annotated[float, number(0.1, TIMEOUT_S_MAX)] = 600.0
    """How long an instance may take to load."""

    def __post_init__(self) -> None:
        if not self.version and not self.path:
            raise BadRequest("version is missing, must be a string", param="version")


AskedT = TypeVar("AskedT", DrainRequest, SleepRequest, EmptyRequest, RoleRequest, WeightsRequest)


def read_order(shape: type[AskedT], body: bytes) -> AskedT:
    """The body of a `POST /admin/*`, which may be empty.

    Raises `BadRequest`: a field is wrong, or missing.
    """
    known = readers_of(shape)
    found = read_fields(read_object(body or b"{}"), known)
    for name, right in (("instance", "the name of an instance"), ("role", " or ".join(ROLES))):
        if name in known and name not in found:
            raise BadRequest(f"{name} is missing, must be {right}", param=name)
    return shape(**found)


def _path(name: str, value: object) -> str:
    path: str = word(name, value)
    if not path or "\0" in path:
        refuse(name, value, "a folder with a checkpoint, or a .gguf file")
    return path


def _version(name: str, value: object) -> str:
    version: str = word(name, value)
    length = len(version.encode())
    if not 1 <= length <= VERSION_BYTES_MAX:
        raise BadRequest(
            f"{name} has {length} bytes, must have from 1 to {VERSION_BYTES_MAX}", param=name
        )
    return version


logger = logging.getLogger("penstock.serve.control")

CHECK_S = 60.0
"""How long an instance may take to read the headers of a checkpoint."""
LOAD_S = 3600.0
"""A load that takes longer has failed, whoever waits for it."""
SETTLE_S = 30.0
"""How long an instance may take to end its aborted requests and their handoffs."""
AFTER_LOSS = "it loads the weights before its next request"
"""What an instance does that is lost while others load."""
TURN_S_MIN = 1.0
"""How long an operation waits for the one before it at least, whatever its own timeout is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlResult:
    """What an operation did."""

    state: str
    """Of the server, now."""
    done: list[str] = field(default_factory=list)
    """The instances that did it."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why others did not, by their names."""
    more: dict[str, object] = field(default_factory=dict)
    """What only this operation has to say."""

    def content(self) -> dict[str, Any]:
        """For a response."""
        return {
            "state": self.state,
            "instances": self.done,
            "failed": self.failed,
            **self.more,
        }


class WantedWeights(NamedTuple):
    """Weights in files."""

    path: str
    digest: str


class Control:
    """The wanted state of all instances."""

    def __init__(self, router: Router, *, balances: bool = False) -> None:
        """Of this router's instances; `balances`: roles are changed by load, too."""
        self._router = router
        self._balances = balances
        self.by_hand: set[str] = set()
        """Instances whose role the balance leaves alone: an operator chose it."""
        self._outgoing: dict[InstanceLink, set[str]] = {}
        """Requests that began in an earlier role of their instance."""
        self._gate = router.gate
        self._turn = asyncio.Lock()
        self._checkpoint: WantedWeights | None = None
        """The weights that all instances are to have, if they were changed."""
        self._slept: SleepRequest | None = None
        """How all instances sleep, if they do."""
        self._loads: set[asyncio.Task[None]] = set()
        router.on_ready = self._catch_up

    @property
    def state(self) -> ServerState:
        return self._gate.state

    async def pause(self, wanted: DrainRequest) -> ControlResult:
        """Lets no request begin, ends those under way, and waits until the instances are idle.

        Raises `BadRequest`: another operation did not end in time.
        """
        async with self._alone(wanted.timeout_s):
            self._gate.hold(ServerState.PAUSED)
            aborted = await self._drain(wanted)
            done, failed = await self._order_all(ms.Pause, SETTLE_S)
            return self._result(done, failed, aborted=aborted)

    async def resume(self) -> ControlResult:
        """Lets requests begin again.

        Raises `BadRequest`: another operation did not end in time, or the server is asleep.
        """
        async with self._alone(SETTLE_S):
            self._require_awake()
            # A channel keeps its order: the instance resumes before it gets a request.
            for link in self._router.ready:
                link.send(ms.Resume())
            self._gate.release(ServerState.PAUSED)
            return self._result([link.name for link in self._router.ready], {})

    async def load_weights(self, wanted: WeightsRequest) -> ControlResult:
        """Replaces the weights of all instances; returns when all have them, or have failed.

        An instance that failed gets no requests until it has them: by the same call again, or
        after its restart.
        Raises `BadRequest`: an instance cannot load this checkpoint, or the server is asleep;
        nothing was changed; `InstanceLost`: no instance is ready.
        """
        async with self._alone(wanted.timeout_s):
            self._require_awake()
            digest = await self._checked(wanted.path)
            version = version_of(wanted.version, digest)
            names = [link.name for link in self._router.ready]
            if version == self._router.weights_version and self._router.loads_weights:
                # Repeated: those that have them go on.
                done, failed = await self._load_all(wanted, names)
                return self._result(done, failed, aborted=0, weights_version=version)
            self._gate.hold(ServerState.LOADING)
            try:
                aborted = await self._drain(wanted)
                await self._order_all(ms.Pause, SETTLE_S)
                self._checkpoint = WantedWeights(wanted.path, digest)
                self._router.want_weights(version)
                done, failed = await self._load_all(wanted, names)
            finally:
                self._resume_unless_paused()
                self._gate.release(ServerState.LOADING)
            return self._result(done, failed, aborted=aborted, weights_version=version)

    async def sleep(self, wanted: SleepRequest) -> ControlResult:
        """Ends requests as `pause` does; then all instances give memory back.

        Raises `BadRequest`: another operation did not end in time.
        """
        async with self._alone(wanted.timeout_s):
            self._gate.hold(ServerState.ASLEEP)
            aborted = await self._drain(wanted)
            self._slept = wanted
            await self._order_all(ms.Pause, SETTLE_S)
            timeout_s = wanted.timeout_s + SETTLE_S
            done, failed = await self._order_all(_sleep_order(wanted), timeout_s)
            return self._result(done, failed, aborted=aborted)

    async def wake(self) -> ControlResult:
        """All instances take their memory again, and requests begin, unless they are paused.

        An instance that cannot gets no requests until the same call succeeds.
        Raises `BadRequest`: another operation did not end in time.
        """
        async with self._alone(SETTLE_S):
            self._slept = None
            done, failed = await self._order_all(ms.Wake, LOAD_S)
            for link in self._router.ready:
                if link.name in failed:
                    link.held_back = failed[link.name]
                elif not self._is_outdated(link):
                    link.held_back = ""
            self._resume_unless_paused()
            self._gate.release(ServerState.ASLEEP)
            return self._result(done, failed)

    async def rename_weights(self, version: str) -> list[str]:
        """The weights were changed by other means: nothing that is cached is found any more.

        Returns:
            The names of the ready instances.
        Raises `BadRequest`: another operation did not end in time.
        """
        async with self._alone(SETTLE_S):
            return self._router.reset(f"weights are now {version}", weights_version=version)

    async def change_role(self, wanted: RoleRequest) -> dict[str, Any]:
        """Gives an instance another role; returns what a client is told.

        New requests follow the new role at once. It returns when those of the old role have ended,
        or after `timeout_s`, and says how many have not; other operations may begin meanwhile.
        The balance leaves the role alone from then on, until it is `auto`.
        Raises `BadRequest`: there is no such instance, it cannot have the role, another operation
        did not end in time, or the server is asleep; `InstanceLost`: the instance is gone, and has
        the role when it is back.
        """
        async with self._alone(wanted.timeout_s):
            self._require_awake()
            link = self._ready_link(wanted.instance)
            before = self._router.role_of(link)
            role = before
            if wanted.role == AUTO:
                self._require_balance()
                self.by_hand.discard(link.name)
            else:
                role = msgspec.convert(wanted.role, ms.RoleName)
                self._set_role(link, role)
                if self._balances:
                    self.by_hand.add(link.name)
        left = await self._wait_old_role_ended(link, role, wanted.timeout_s)
        return {"instance": link.name, "role": role, "before": before, "unfinished": left}

    async def rebalance(self, instance: str, role: ms.RoleName, *, timeout_s: float) -> int:
        """Gives an instance another role because of its load; returns as `change_role` does.

        Returns:
            How many requests of the old role have not ended.
        Raises `BadRequest`: as `change_role` does, or the server does not run, an operator has
        chosen a role of the instance meanwhile, or it is the last of its role; `InstanceLost`.
        """
        async with self._alone(timeout_s):
            link = self._ready_link(instance)
            before = self._router.role_of(link)
            others = [each for each in self._router.ready if each is not link and is_usable(each)]
            if self._gate.state is not ServerState.RUNNING:
                raise BadRequest(f"the server is {self._gate.state.value}", status=409)
            if instance in self.by_hand:
                raise BadRequest(f"{instance!r} has a role that an operator chose", status=409)
            if not any(self._router.role_of(each) == before for each in others):
                raise BadRequest(f"{instance!r} is the only one of its role", status=409)
            self._set_role(link, role)
        return await self._wait_old_role_ended(link, role, timeout_s)

    def drains(self, link: InstanceLink) -> bool:
        """Whether an instance has requests that began in an earlier role."""
        return bool(self._outgoing.get(link, set()) & set(link.requests))

    def _set_role(self, link: InstanceLink, role: ms.RoleName) -> None:
        same = role == self._router.role_of(link)
        try:
            self._router.set_role(link, role)
        except ValueError as error:
            raise BadRequest(f"role {error}", param="role") from error
        self._outgoing = {each: ids for each, ids in self._outgoing.items() if self.drains(each)}
        if not same:
            self._outgoing[link] = set(link.requests)

    async def _wait_old_role_ended(
        self, link: InstanceLink, role: ms.RoleName, timeout_s: float
    ) -> int:
        """Waits for the requests of an earlier role; returns how many are left after a timeout."""
        left = await _wait_ended(link, self._outgoing.get(link, set()), timeout_s)
        if link.lost:
            raise InstanceLost(f"{link.lost}; its role is {role!r} when it is back")
        return left

    def _require_balance(self) -> None:
        if not self._balances:
            raise BadRequest(
                f"role is {AUTO!r}, must be {' or '.join(ROLES)} while serve.balance_s is 0",
                param="role",
            )

    def _ready_link(self, name: str) -> InstanceLink:
        for link in self._router.ready:
            if link.name == name:
                return link
        known = ", ".join(link.name for link in self._router.ready)
        raise BadRequest(
            f"instance is {shown(name)}, must be one that is ready: {known or 'none is'}",
            param="instance",
            status=404,
        )

    def _is_outdated(self, link: InstanceLink) -> bool:
        """Whether an instance has to load weights before it gets requests."""
        router = self._router
        return router.loads_weights and router.weights_of(link) != router.weights_version

    def _require_awake(self) -> None:
        if self._gate.holds(ServerState.ASLEEP):
            raise BadRequest("the server is asleep, must be woken first", status=409)

    def _resume_unless_paused(self) -> None:
        if not self._gate.holds(ServerState.PAUSED):
            for link in self._router.ready:
                link.send(ms.Resume())

    async def _checked(self, path: str) -> str:
        """The digest of a checkpoint that every instance can load."""
        links = self._router.ready
        if not links:
            raise InstanceLost("no instance is ready")
        order = partial(ms.CheckWeights, path=path)
        results = await asyncio.gather(*(_carried_out(link, order, CHECK_S) for link in links))
        found = {link.name: result for link, result in zip(links, results, strict=True)}
        lost = [f"instance {link.name!r}: {link.lost}" for link in links if link.lost]
        if lost:
            raise InstanceLost(f"{path!r} was not loaded, nothing was changed: {'; '.join(lost)}")
        for name, result in found.items():
            if result.problem:
                raise BadRequest(f"{result.problem} (instance {name!r})", param="path")
        digests = {result.digest for result in results}
        if len(digests) > 1:
            each = ", ".join(f"{name}: {result.digest}" for name, result in found.items())
            raise BadRequest(
                f"path is {path!r}, must have the same files for all instances; digests: {each}",
                param="path",
            )
        return digests.pop()

    async def _load_all(
        self, wanted: WeightsRequest, names: list[str]
    ) -> tuple[list[str], dict[str, str]]:
        """Has all instances load; returns who has the weights, and why others of `names` do not."""
        tasks = {
            link: self._start_load(link) for link in self._router.ready if self._is_outdated(link)
        }
        if tasks:
            # A load that takes longer goes on; its instance gets no requests before its end.
            await asyncio.wait(tasks.values(), timeout=wanted.load_timeout_s)
        done = [link.name for link in self._router.ready if not link.held_back]
        causes = {
            link.name: f"{link.lost}; {AFTER_LOSS}" if link.lost else link.held_back
            for link in tasks
        }
        failed = {
            name: causes.get(name, f"it was lost; {AFTER_LOSS}")
            for name in dict.fromkeys([*names, *causes])
            if name not in done
        }
        return done, failed

    def _start_load(self, link: InstanceLink) -> asyncio.Task[None]:
        link.held_back = f"it has not loaded weights {self._router.weights_version} yet"
        task = asyncio.create_task(self._load_and_sleep(link))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return task

    async def _load_and_sleep(self, link: InstanceLink) -> None:
        """Loads weights; an instance that comes back to a server that sleeps then sleeps, too."""
        await self._load(link)
        if self._slept is not None and not link.lost:
            link.send(_sleep_order(self._slept)(id=0))

    async def _load(self, link: InstanceLink) -> None:
        checkpoint, version = self._checkpoint, self._router.weights_version
        assert checkpoint is not None
        order = partial(
            ms.LoadWeights, path=checkpoint.path, digest=checkpoint.digest, version=version
        )
        result = await _carried_out(link, order, LOAD_S)
        if self._router.weights_version != version:
            # Others are wanted by now, and are being loaded.
            return
        if result.problem:
            link.held_back = result.problem
            logger.error("weights not loaded: instance=%s cause=%s", link.name, result.problem)
        elif not link.lost:  # It may have died just after its answer.
            self._router.note_weights(link)
            link.held_back = ""

    def _catch_up(self, link: InstanceLink) -> None:
        """Brings an instance that was away to the wanted state, before it gets a request."""
        if self._gate.holds(ServerState.PAUSED):
            link.send(ms.Pause(id=0))
        if self._is_outdated(link):
            self._start_load(link)
        elif self._slept is not None:
            link.send(_sleep_order(self._slept)(id=0))

    async def _drain(self, wanted: DrainRequest) -> int:
        """Ends the requests under way; returns how many had to be aborted."""
        if wanted.mode == "drain" and await self._gate.wait_idle(wanted.timeout_s):
            return 0
        aborted = self._gate.running
        refusal = self._gate.refusal()
        self._gate.abort()
        for link in self._router.links:
            link.refuse_all(refusal.kind, str(refusal))
        await self._gate.wait_idle(SETTLE_S)
        return aborted

    async def _order_all(
        self, make: Callable[..., ms.Order], timeout_s: float
    ) -> tuple[list[str], dict[str, str]]:
        """Gives all instances an order; returns who carried it out, and why others did not."""
        links = self._router.ready
        results = await asyncio.gather(*(_carried_out(link, make, timeout_s) for link in links))
        found = {link.name: each.problem for link, each in zip(links, results, strict=True)}
        failed = {name: problem for name, problem in found.items() if problem}
        for name, problem in failed.items():
            logger.warning("order failed: instance=%s cause=%s", name, problem)
        return [name for name in found if name not in failed], failed

    def _result(self, done: list[str], failed: dict[str, str], **more: object) -> ControlResult:
        return ControlResult(state=self.state.value, done=done, failed=failed, more=more)

    @asynccontextmanager
    async def _alone(self, timeout_s: float) -> AsyncIterator[None]:
        """Waits for the operation under way, if there is one."""
        waited_s = max(timeout_s, TURN_S_MIN)
        try:
            await asyncio.wait_for(self._turn.acquire(), waited_s)
        except TimeoutError as error:
            raise BadRequest(
                f"another /admin/* operation did not end within {waited_s:g} s", status=409
            ) from error
        try:
            yield
        finally:
            self._turn.release()


def _sleep_order(wanted: SleepRequest) -> Callable[..., ms.Sleep]:
    return partial(ms.Sleep, host=wanted.host, weights=wanted.level > 1, timeout_s=wanted.timeout_s)


async def _carried_out(
    link: InstanceLink, make: Callable[..., ms.Order], timeout_s: float
) -> ms.OrderResult:
    """The result of an order, also if the instance is gone."""
    try:
        answer = await link.order(make, timeout_s=timeout_s)
    except InstanceLost as lost:
        return ms.OrderResult(problem=str(lost))
    return msgspec.json.decode(answer, type=ms.OrderResult)


async def _wait_ended(link: InstanceLink, requests: set[str], timeout_s: float) -> int:
    """Waits until requests have ended; returns how many have not in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while left := requests & set(link.requests):
                await link.wait_ended(next(iter(left)))
    except TimeoutError:
        pass
    return len(requests & set(link.requests))
