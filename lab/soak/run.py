"""Rounds of load, faults and calm, until the time is over.

    load and faults (`LOAD_S`) ─→ calm: all mended, nothing under way ─→ every prompt once, a look
             ↑                                                                  │
             └──────────────────────────────────────────────────────────────────┘

Calm has to come within `CALM_S`: health is `ok`, every instance is there, and nothing is held.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from lab.soak.clients import Clients
from lab.soak.faults import Faults
from lab.soak.meter import Look, growth, look
from lab.soak.world import INSTANCES, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab.soak.world import World

LOAD_S = 30.0
CALM_S = 180.0
ASK_AGAIN_S = 0.25
CLIENTS = 6
PHASES = ("waiting", "loading", "claiming", "running")


@dataclass(slots=True)
class Outcome:
    """What was seen."""

    looks: list[Look] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    """Of requests."""
    findings: list[str] = field(default_factory=list)


def soak(
    folder: Path, *, minutes: float, seed: int, load_s: float, progress: Callable[[Look], None]
) -> Outcome:
    """Runs it, and says what was found; a round that has begun is ended.

    Raises `UnavailableError`: Redis is not installed, or something does not start.
    """
    with running(folder) as world:
        return asyncio.run(_soak(world, 60 * minutes, seed, load_s, progress))


async def _soak(
    world: World, seconds: float, seed: int, load_s: float, progress: Callable[[Look], None]
) -> Outcome:
    outcome, clients, faults = Outcome(), Clients(world.address, seed), Faults(world, seed)
    await clients.learn()
    began = time.monotonic()
    while time.monotonic() < began + seconds and not outcome.findings:
        await _under_load(clients, faults, load_s)
        outcome.findings += await _calm(world)
        answers = clients.counts["answered"]
        found = look(
            world,
            minutes=round((time.monotonic() - began) / 60, 2),
            answers=answers,
            unanswered=clients.counts.total() - answers,
            faults=faults.counts.total(),
            cached=await clients.ask_all(),
        )
        outcome.findings += await _calm(world)
        outcome.findings += clients.findings
        outcome.looks.append(found)
        progress(found)
    outcome.findings += growth(outcome.looks)
    outcome.faults, outcome.ends = dict(faults.counts), dict(clients.counts)
    return outcome


async def _under_load(clients: Clients, faults: Faults, load_s: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(load_s, stop.set)
    async with asyncio.TaskGroup() as group:
        group.create_task(clients.load(CLIENTS, stop))
        group.create_task(faults.go_on(stop))


async def _calm(world: World) -> list[str]:
    """Waits until nothing is wrong and nothing is under way; says what is, if that lasts."""
    deadline = time.monotonic() + CALM_S
    async with httpx.AsyncClient(base_url=world.address, timeout=CALM_S) as client:
        while why := await _why_no_calm(client):
            if time.monotonic() > deadline:
                return [f"after {CALM_S:g} s without a fault: {why}"]
            await asyncio.sleep(ASK_AGAIN_S)
        audit = await client.post("/admin/audit")
    return [] if audit.status_code == httpx.codes.OK else [f"audit: {audit.text[:300]}"]


async def _why_no_calm(client: httpx.AsyncClient) -> str:
    health = (await client.get("/health")).json()
    missing = [name for name in INSTANCES if not health["instances"].get(name)]
    if health["status"] != "ok" or missing:
        return f"health is {health}"
    said: list[dict[str, Any]] = (await client.get("/cache")).json()["instances"]
    held = {
        each["instance"]: each["cache"]["leases"] + sum(each[phase] for phase in PHASES)
        for each in said
    }
    if set(held) != set(INSTANCES):
        return f"only {sorted(held)} say what they hold"
    return f"leases and requests are left: {held}" if any(held.values()) else ""
