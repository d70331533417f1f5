"""Changes roles by load: looks at all instances now and then, and carries out what `balance` says.

    balancer = RoleBalancer(router, control, metrics, pace_s=30.0)
    balancer.start()
    balancer.stop()

A change is carried out as `POST /admin/role` does it. The rule: roles change only while every
instance that was there is ready, answers, and has nothing left of an earlier role.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from penstock_serve.observe.live import InstanceStatistics
from penstock_serve.server.balance import InstanceWork, RoleBalance
from penstock_serve.server.fields import BadRequest
from penstock_serve.server.instance_link import InstanceLost
from penstock_serve.server.router import RequestCounts, ServerState, is_usable

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_serve.engine.messages import RoleName
    from penstock_serve.observe.metrics import ServerMetrics
    from penstock_serve.server.balance import RoleChange
    from penstock_serve.server.control import Control
    from penstock_serve.server.instance_link import InstanceLink
    from penstock_serve.server.router import Router

logger = logging.getLogger("penstock.serve.balance")

LOOKS_A_PACE = 8
"""How often instances are looked at in the time of one change."""
LOOK_S_MIN = 0.1
CHANGE_S = 60.0
"""How long the requests of an old role may take to end."""
GONE_S = 300.0
"""An instance that has not come back by then is not waited for."""


@dataclass(slots=True)
class _Seen:
    """What an instance had done when it was looked at last."""

    at: float
    step_s: float
    place_s: float
    counts: RequestCounts


class RoleBalancer:
    """Looks at the instances of a router, and changes their roles."""

    def __init__(
        self,
        router: Router,
        control: Control,
        metrics: ServerMetrics,
        *,
        pace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of one router; `clock` is in seconds, and never goes back."""
        self._router = router
        self._control = control
        self._metrics = metrics
        self._clock = clock
        self._look_s = max(LOOK_S_MIN, pace_s / LOOKS_A_PACE)
        self._balance = RoleBalance(pace_s)
        self._seen: dict[InstanceLink, _Seen] = {}
        self._roles: dict[str, RoleName] = {}
        """When the instances were looked at last."""
        self._known: dict[str, float] = {}
        """When each instance was there last, unless it has left."""
        self._last: dict[str, Any] | None = None
        self._stopped = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._changing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Looks at the instances from now on."""
        self._looking = asyncio.create_task(self._run())
        self._looking.add_done_callback(_log_defect)

    def stop(self) -> None:
        """Changes nothing more; may be called twice."""
        self._stopped.set()
        for task in (self._looking, self._changing):
            if task is not None:
                task.cancel()

    def report(self) -> dict[str, Any]:
        """For `/health`: the last change, and which roles an operator chose."""
        return {"last_change": self._last, "by_hand": sorted(self._control.by_hand)}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._stopped.is_set():
            await self.look()
            due = max(due + self._look_s, loop.time())
            try:
                async with asyncio.timeout_at(due):
                    await self._stopped.wait()
            except TimeoutError:
                continue

    async def look(self) -> None:
        """Asks all instances what they did, and begins a change if that is wanted."""
        links = self._router.ready
        asked = await asyncio.gather(
            *(link.ask("statistics") for link in links), return_exceptions=True
        )
        for each in asked:
            if isinstance(each, BaseException) and not isinstance(each, InstanceLost):
                raise each
        now = self._clock()
        roles = {link.name: self._router.role_of(link) for link in self._router.ready}
        if any(self._roles.get(name, role) != role for name, role in roles.items()):
            # By whomever: what instances did in their old roles says little now.
            self._balance.note_end(now, done=True)
        self._roles |= roles
        answers = {
            link: msgspec.json.decode(answer, type=InstanceStatistics)
            for link, answer in zip(links, asked, strict=True)
            if isinstance(answer, bytes) and link in self._router.counts
        }
        steady = self._is_steady(now, answers)
        works = [self._work(now, link, told) for link, told in answers.items()]
        self._seen = {link: self._seen[link] for link in answers}
        change = self._balance.propose(now, works, steady=steady)
        if change is not None:
            self._changing = asyncio.create_task(self._change(change))
            self._changing.add_done_callback(_log_defect)

    def _is_steady(self, now: float, answers: dict[InstanceLink, InstanceStatistics]) -> bool:
        """Whether roles may be changed."""
        links = self._router.links
        for link in links:
            self._known[link.name] = now
            if link.leaving:
                del self._known[link.name]
        names = {link.name for link in links}
        down = [name for name, at in self._known.items() if name not in names and now < at + GONE_S]
        return (
            self._router.gate.state is ServerState.RUNNING
            and (self._changing is None or self._changing.done())
            and not down
            and all(is_usable(link) and not self._control.drains(link) for link in links)
            and all(link in answers and answers[link].state == "running" for link in links)
        )

    def _work(self, now: float, link: InstanceLink, told: InstanceStatistics) -> InstanceWork:
        counts = self._router.counts[link]
        seen = self._seen.get(link)
        copied = RequestCounts(counts.computed, counts.begun, counts.handed, counts.waited_s)
        self._seen[link] = _Seen(now, told.step_seconds, told.place_seconds, copied)
        if seen is None:
            seen = self._seen[link]
        return InstanceWork(
            name=link.name,
            role=self._router.role_of(link),
            may_change=link.name not in self._control.by_hand,
            settled=not self._control.drains(link),
            step_s=told.step_seconds - seen.step_s,
            room_s=max(
                (told.place_seconds - seen.place_s) / told.places,
                _blocks_in_use(told) * (now - seen.at),
            ),
            computed=counts.computed - seen.counts.computed,
            begun=counts.begun - seen.counts.begun,
            handed=counts.handed - seen.counts.handed,
            waited_s=counts.waited_s - seen.counts.waited_s,
            waiting=told.waiting,
            in_hand=link.load,
        )

    async def _change(self, change: RoleChange) -> None:
        name, role = change.instance, change.role
        logger.info("role changes: instance=%s role=%s why=%s", name, role, change.why)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        last = {"instance": name, "role": role, "at": at, "why": change.why}
        self._last = last | {"outcome": "under way"}
        try:
            left = await self._control.rebalance(name, role, timeout_s=CHANGE_S)
            problem = f"{left} of its requests did not end within {CHANGE_S:g} s" if left else ""
        except (BadRequest, InstanceLost) as error:
            problem = str(error)
        self._balance.note_end(self._clock(), done=not problem)
        outcome = "failed" if problem else "done"
        self._metrics.role_changes.labels(role, outcome).inc()
        self._last = last | {"outcome": outcome} | ({"problem": problem} if problem else {})
        if problem:
            logger.warning("role not changed: instance=%s role=%s cause=%s", name, role, problem)


def _blocks_in_use(told: InstanceStatistics) -> float:
    """The share of an instance's device blocks that its running requests hold.

    Those of requests that wait for a handoff are left out: they say how slow prefill is.
    """
    device = told.cache.tiers[0]
    active = told.running + told.claiming
    if not (active and device.slots):
        return 0.0
    return device.held / device.slots * told.running / active


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("roles are not balanced any more: cause=%r", error, exc_info=error)
