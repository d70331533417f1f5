"""Processes that are killed under load: nobody hangs, nothing leaks, and all come back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve.conftest import command, eventually, pids_of, serving
from tests.serve.test_lives import killed_server_leaves_nothing
from tests.serve.test_overload import require_nothing_left

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Running

# A request takes about 12 blocks of 8 tokens.
SIZES = ("--blocks", "96", "--block-tokens", "8", "--host-gib", "0.01")
BOTH = ("prefill-0", "decode-0")
HANG_S = 600.0
"""An answer that takes longer on the busiest machine will never come."""


class Load:
    """Clients that ask, one request after the other, until they are stopped."""

    def __init__(self, address: str, clients: int) -> None:
        self.address = address
        self.counts: Counter[str] = Counter()
        self.strange: list[str] = []
        """Errors that no client should get."""
        self._clients = clients
        self._stop = threading.Event()

    def run(self) -> None:
        asyncio.run(self._all())

    def stop(self) -> None:
        self._stop.set()

    def answered(self) -> int:
        return self.counts["200"]

    async def _all(self) -> None:
        limits = httpx.Limits(max_connections=self._clients, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.address, timeout=HANG_S, limits=limits
        ) as client:
            await asyncio.gather(*(self._ask(client, seed) for seed in range(self._clients)))

    async def _ask(self, client: httpx.AsyncClient, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stop.is_set():
            words = " ".join(draw.choice(["block", "lease", "tier", "rank"]) for _ in range(30))
            body = {"prompt": f"{seed} {words}", "max_tokens": 12, "temperature": 0}
            body["stream"] = draw.random() < 0.5
            patience_s = draw.uniform(0.05, 1.0) if draw.random() < 0.2 else None
            self.counts[await self._outcome(client, body, patience_s)] += 1

    async def _outcome(
        self, client: httpx.AsyncClient, body: dict[str, Any], patience_s: float | None
    ) -> str:
        try:
            async with asyncio.timeout(patience_s):
                answer = await client.post("/v1/completions", json=body)
        except TimeoutError:
            return "gone"
        except httpx.TimeoutException:
            return self._call_strange("no answer")
        except httpx.TransportError:
            # The server itself is gone.
            await asyncio.sleep(0.05)
            return "no server"
        if answer.status_code == 200:
            broken = '{"error"' in answer.text
            return "broken" if broken else "200"
        if answer.status_code not in {429, 503} or "error" not in answer.json():
            return self._call_strange(f"{answer.status_code}: {answer.text}")
        # As `Retry-After` asks.
        await asyncio.sleep(0.25)
        return str(answer.status_code)

    def _call_strange(self, what: str) -> str:
        self.strange.append(what)
        return "strange"


@contextmanager
def load_on(running: Running, clients: int) -> Iterator[Load]:
    load = Load(running.address, clients)
    thread = threading.Thread(target=load.run)
    thread.start()
    try:
        yield load
    finally:
        load.stop()
        thread.join(2 * HANG_S)
        assert not thread.is_alive(), "a client hangs"


def process_of(running: Running, instance: str, rank: int) -> int:
    """One rank of an instance that has several."""
    [found] = [pid for pid in pids_of(instance, running) if f"-rank-{rank}.spec" in command(pid)]
    return found


def kill_under(load: Load, pid: int) -> None:
    before = load.answered()
    eventually(lambda: load.answered() >= before + 10, wanted=True)
    os.kill(pid, signal.SIGKILL)


def require_back(running: Running, load: Load, before: dict[str, set[int]], lost: str) -> None:
    """All instances are there again, one of them with other processes, and answer."""

    def all_new() -> bool:
        now = set(pids_of(lost, running))
        return len(now) == len(before[lost]) and not now & before[lost]

    eventually(all_new, wanted=True)
    there = dict.fromkeys(before, True)
    eventually(lambda: running.client.get("/health").json()["instances"], there)
    answered = load.answered()
    eventually(lambda: load.answered() >= answered + 10, wanted=True)


def survive_kills(
    folder: Path, *, clients: int, rounds: int, prefill_tp: int, victims: tuple[str, ...]
) -> None:
    options = ("--prefill-tp", str(prefill_tp), "--decode-tp", "2")
    with serving(folder, *options, *SIZES) as running:
        with load_on(running, clients) as load:
            for victim in victims * rounds:
                before = {name: set(pids_of(name, running)) for name in ("prefill-0", "decode-0")}
                kill_under(load, process_of(running, victim, 1))
                require_back(running, load, before, victim)

        require_nothing_left(running)
        assert load.strange == []
        assert load.counts["no server"] == 0
        # Requests on the lost instance, and those that came while there was none.
        assert load.counts["503"] + load.counts["broken"] > 0

        with load_on(running, clients) as load:
            eventually(lambda: load.answered() >= 10, wanted=True)
            killed_server_leaves_nothing(running, processes=sum(map(len, before.values())))
            eventually(lambda: load.counts["no server"] >= clients, wanted=True)
        assert load.strange == []


def test_killed_ranks_and_a_killed_router_hang_nobody_and_leak_nothing(
    model_folder: Path,
) -> None:
    survive_kills(model_folder, clients=12, rounds=1, prefill_tp=1, victims=("decode-0",))


@pytest.mark.long
def test_killed_ranks_of_either_role_hang_nobody_and_leak_nothing(model_folder: Path) -> None:
    survive_kills(model_folder, clients=12, rounds=1, prefill_tp=2, victims=BOTH)


@pytest.mark.long
def test_killed_ranks_under_a_large_load_hang_nobody_and_leak_nothing(model_folder: Path) -> None:
    survive_kills(model_folder, clients=40, rounds=3, prefill_tp=2, victims=BOTH)
