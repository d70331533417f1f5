"""What breaks, drawn from a seed, one thing after the other, and is mended again.

| fault                                 | mended by                                 |
|---------------------------------------|-------------------------------------------|
| a process is killed                   | the server's supervisor                   |
| a process stands still for a while    | going on, or the supervisor, if too late  |
| Redis stands still, or ends           | going on, or a new one with nothing in it |
| bytes on the disk are damaged         | sums: its blocks are computed again       |
| everything cached is dropped          |                                           |
| an instance takes another role        | the next such fault                       |

The server itself is never harmed: who ends it ends everything, and there is nothing to look at.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx

from lab.soak.world import INSTANCES, SILENCE_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from lab.soak.world import Role, World

PAUSE_S = (1.0, 5.0)
"""Between two faults."""
KILLS_MAX, KILLS_S = 5, 300.0
"""Of one instance: one that ends eight times in five minutes is not started again."""
DAMAGED_BYTES = 64
ROLES = {"decode": "prefill", "prefill": "decode"}


class Faults:
    """Breaks things while clients ask."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._draw = random.Random(seed)
        self._kills: dict[str, deque[float]] = {}
        self._stopped: set[int] = set()
        self._roles = {name: name.partition("-")[0] for name in INSTANCES}
        self.counts: Counter[str] = Counter()

    async def go_on(self, stop: asyncio.Event) -> None:
        """Draws one fault after the other until `stop`; then all is mended."""
        ways: dict[Callable[[], Awaitable[None]], int] = {
            self._kill: 3,
            self._stand_still: 3,
            self._stop_redis: 1,
            self._kill_redis: 1,
            self._damage: 2,
            self._reset: 1,
            self._change_role: 1,
        }
        try:
            while not stop.is_set():
                [way] = self._draw.choices(list(ways), list(ways.values()))
                await way()
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self._draw.uniform(*PAUSE_S))
        finally:
            for pid in list(self._stopped):
                self._proceed(pid)
        await self._take_roles_back()

    def _victim(self) -> Role:
        there = [role for role in self._world.processes() if role.name != "server"]
        return self._draw.choice(there)

    def _may_end(self, role: Role) -> bool:
        """Whether its instance has not been ended too often lately."""
        if not role.instance:
            return True
        ended = self._kills.setdefault(role.instance, deque())
        now = time.monotonic()
        while ended and ended[0] < now - KILLS_S:
            ended.popleft()
        if len(ended) >= KILLS_MAX:
            return False
        ended.append(now)
        return True

    async def _kill(self) -> None:
        role = self._victim()
        # The supervisor of all instances restarts them: with it, everything ends.
        if role.name == "supervisor" and not role.instance:
            return
        if self._may_end(role):
            self._signal(role.pid, signal.SIGKILL)
            self.counts[f"kill {_kind(role)}"] += 1

    async def _stand_still(self) -> None:
        role = self._victim()
        long = self._draw.random() < 0.3
        if (role.name == "supervisor" and not role.instance) or (long and not self._may_end(role)):
            return
        self._signal(role.pid, signal.SIGSTOP)
        self._stopped.add(role.pid)
        self.counts[f"stop {_kind(role)}{' for long' if long else ''}"] += 1
        await asyncio.sleep(self._draw.uniform(1, 2) * SILENCE_S if long else self._draw.random())
        self._proceed(role.pid)

    async def _stop_redis(self) -> None:
        self._world.redis.signal(signal.SIGSTOP)
        self.counts["stop redis"] += 1
        try:
            await asyncio.sleep(self._draw.uniform(0.5, 5))
        finally:
            self._world.redis.signal(signal.SIGCONT)

    async def _kill_redis(self) -> None:
        self._world.redis.kill()
        self.counts["kill redis"] += 1
        try:
            await asyncio.sleep(self._draw.uniform(0, 3))
        finally:
            self._world.redis.start()

    async def _damage(self) -> None:
        files = sorted(self._world.disk.glob("*.segment"))
        if not files:
            return
        try:
            with self._draw.choice(files).open("r+b") as file:
                size = max(DAMAGED_BYTES + 1, file.seek(0, os.SEEK_END))
                file.seek(self._draw.randrange(size - DAMAGED_BYTES))
                file.write(self._draw.randbytes(DAMAGED_BYTES))
        except FileNotFoundError:
            return  # Its blocks were given up since it was listed.
        self.counts["damage on disk"] += 1

    async def _reset(self) -> None:
        await self._post("/admin/reset", {})

    async def _change_role(self) -> None:
        name = self._draw.choice(INSTANCES)
        await self._take_role(name, ROLES[self._roles[name]])

    async def _take_roles_back(self) -> None:
        for name, role in self._roles.items():
            first = name.partition("-")[0]
            if role != first:
                await self._take_role(name, first)

    async def _take_role(self, name: str, role: str) -> None:
        body = {"instance": name, "role": role, "timeout_s": 5}
        if await self._post("/admin/role", body) == httpx.codes.OK:
            self._roles[name] = role

    async def _post(self, path: str, body: dict[str, object]) -> int:
        async with httpx.AsyncClient(base_url=self._world.address, timeout=60.0) as client:
            answer = await client.post(path, json=body)
        self.counts[f"{path.rpartition('/')[2]} {answer.status_code}"] += 1
        return answer.status_code

    def _signal(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):  # It has ended since it was found.
            os.kill(pid, number)

    def _proceed(self, pid: int) -> None:
        self._stopped.discard(pid)
        self._signal(pid, signal.SIGCONT)

    def report(self) -> str:
        return json.dumps(dict(sorted(self.counts.items())))


def _kind(role: Role) -> str:
    """For the counts: its name without a number."""
    return "rank" if "rank" in role.name else role.name.rpartition("-")[0] or role.name
