"""Far more clients than there is room for, many of which go away in the middle."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve.conftest import eventually, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serve.conftest import Running

CONFIG = """
version = 1
model.name = "small-model"
[cache]
block_tokens = 8
blocks = {blocks}
[[tiers]]
name = "host"
kind = "host"
blocks = 400
[engine]
waiting_max = 8
[serve]
requests_max = {requests_max}
"""
PROMPT_WORDS = 30
PATIENCE_S = 480.0
"""Who has not been let in by then on the busiest machine never will be."""
ROUNDS = 5


async def ask(client: httpx.AsyncClient, seed: int, counts: Counter[str]) -> None:
    draw = random.Random(seed)
    words = " ".join(draw.choice(["block", "lease", "tier", "rank"]) for _ in range(PROMPT_WORDS))
    body = {"prompt": f"{seed} {words}", "max_tokens": 16, "stream": draw.random() < 0.5}
    body["seed"] = seed
    patience_s = draw.uniform(0.05, 2.0) if draw.random() < 0.4 else None
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            async with asyncio.timeout(patience_s):
                answer = await client.post("/v1/completions", json=body)
        except TimeoutError:
            counts["gone"] += 1
            return
        if answer.status_code != 429:
            counts[str(answer.status_code)] += 1
            # The model may say the word; an event or an answer that is an error begins so.
            assert '{"error"' not in answer.text
            return
        counts["429"] += 1
        # Sooner than `Retry-After` says: the server has to withstand that.
        await asyncio.sleep(0.1 * float(answer.headers["retry-after"]))
    counts["never"] += 1


async def crowd(address: str, seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=len(seeds), max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S, limits=limits) as client:
        await asyncio.gather(*(ask(client, seed, counts) for seed in seeds))
    return counts


def crowds(address: str, clients: int) -> Counter[str]:
    """How clients fared; they come again until some were served, some refused, and some left.

    Who is quicker, they or the server, is the machine's business.
    """
    counts: Counter[str] = Counter()
    for first in range(0, ROUNDS * clients, clients):
        found = asyncio.run(crowd(address, range(first, first + clients)))
        assert found["200"] + found["gone"] == clients, found
        counts += found
        if all(counts[outcome] for outcome in ("200", "gone", "429")):
            break
    return counts


def survive(folder: Path, scratch: Path, *options: str, clients: int, blocks: int) -> Counter[str]:
    """Serves a crowd; returns how handoffs ended, of all instances together."""
    file = scratch / "penstock.toml"
    file.write_text(CONFIG.format(blocks=blocks, requests_max=clients // 2), encoding="utf-8")
    with serving(folder, "--config", str(file), *options) as running:
        counts = crowds(running.address, clients)

        assert counts["200"] > 0
        assert counts["gone"] > 0
        assert counts["429"] > 0
        require_nothing_left(running)
        return sum((Counter(reported["handoffs"]) for reported in everybody(running)), Counter())


def everybody(running: Running) -> Any:
    return running.client.get("/cache").json()["instances"]


def require_nothing_left(running: Running) -> None:
    def left() -> set[int]:
        """Who went away is forgotten when word of that has come to the instances."""
        phases = ("waiting", "loading", "claiming", "running")
        return {
            reported["cache"]["leases"] + sum(reported[phase] for phase in phases)
            for reported in everybody(running)
        }

    eventually(left, {0})
    assert {reported["cache"]["blocks_corrupt"] for reported in everybody(running)} == {0}
    assert running.client.post("/admin/audit").status_code == 200


@pytest.mark.parametrize("clients", [80, pytest.param(200, marks=pytest.mark.long)])
def test_a_crowd_is_served_or_refused_and_leaves_nothing_behind(
    model_folder: Path, tmp_path: Path, clients: int
) -> None:
    # A request takes about 14 blocks: a crowd would need ten times what there is.
    survive(model_folder, tmp_path, clients=clients, blocks=clients * 7 // 5)


# Clients that a pair serves while its processes are killed: in `test_faults`.
@pytest.mark.long
def test_a_crowd_before_a_pair_is_served_or_refused_and_leaves_nothing_behind(
    model_folder: Path, tmp_path: Path
) -> None:
    options = ("--prefill-tp", "2", "--decode-tp", "1")

    ends = survive(model_folder, tmp_path, *options, clients=200, blocks=280)

    assert ends["delivered"] > 0
