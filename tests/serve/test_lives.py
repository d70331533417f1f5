"""Processes that die: what their clients hear, and that all come back or all end."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from tests.serve.conftest import command, descendants, eventually, serving

if TYPE_CHECKING:
    from tests.serve.conftest import Running

SIZES = ("--blocks", "64", "--block-tokens", "8", "--host-gib", "0.01")
KEY = {"Authorization": "Bearer secret"}
LONG = {"prompt": "A story without an end", "max_tokens": 450, "temperature": 0, "stream": True}


def status(running: Running) -> int:
    return running.client.get("/health").status_code


def completed(running: Running) -> Any:
    answer = running.client.post(
        "/v1/completions",
        json={"prompt": "What is left?", "max_tokens": 6, "temperature": 0},
        headers=KEY,
    )
    return answer.json()


def arenas(running: Running) -> dict[str, set[int]]:
    """The host memory of each rank, by the numbers that its files have."""
    found: dict[str, set[int]] = {}
    for name, pid in running.children().items():
        if "rank" in name:
            links = list(Path(f"/proc/{pid}/fd").iterdir())
            found[name] = {os.stat(each).st_ino for each in links if _is_arena(each)}
    return found


def _is_arena(link: Path) -> bool:
    return "memfd:penstock-" in os.readlink(link)


def test_a_killed_rank_ends_its_instance_which_comes_back_with_all_ranks(
    model_folder: Path,
) -> None:
    with serving(model_folder, "--tp", "2", "--api-key", "secret", *SIZES) as running:
        before = completed(running)
        children = running.children()
        memory = arenas(running)
        refused = running.client.post("/v1/completions", json={"prompt": "x"})

        with running.client.stream("POST", "/v1/completions", json=LONG, headers=KEY) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(children["rank-1"], signal.SIGKILL)
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        lost = running.client.post("/v1/completions", json={"prompt": "x"}, headers=KEY)
        unready = status(running)
        eventually(lambda: status(running), 200)
        after = completed(running)

        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert "in the middle of the answer" in rest[-1]["error"]["message"]
        assert lost.status_code == unready == 503
        assert lost.json()["error"]["type"] == "service_unavailable"
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
        assert not set(children.values()) & set(running.children().values())
        # The memory outlived the ranks: nobody had to make it anew.
        assert all(len(numbers) == 1 for numbers in memory.values())
        assert arenas(running) == memory

        killed_server_leaves_nothing(running, processes=3)


def killed_server_leaves_nothing(running: Running, *, processes: int) -> None:
    pids = [pid for pid in descendants(running.process.pid) if "penstock.engine" in command(pid)]
    assert len(pids) == processes
    watched = [os.pidfd_open(pid) for pid in pids]

    running.process.kill()

    deadline = time.monotonic() + 40
    for pidfd in watched:
        ended, _, _ = select.select([pidfd], [], [], max(0, deadline - time.monotonic()))
        os.close(pidfd)
        assert ended


def test_requests_without_a_token_yet_go_to_another_instance(model_folder: Path) -> None:
    with serving(model_folder, "--instances", "2", *SIZES) as running:
        victim = running.children()["instance"]
        # Stopped, it takes requests and answers none, until it is killed.
        os.kill(victim, signal.SIGSTOP)
        with httpx.Client(base_url=running.address, timeout=60) as client:
            answers = _ask_many(client, victim)

        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 6
        metrics = running.client.get("/metrics").text
        retries = [line for line in metrics.splitlines() if "penstock_retries_total" in line]
        assert float(retries[-1].split()[-1]) > 0
        eventually(
            lambda: running.client.get("/health").json()["instances"],
            {"instance-0": True, "instance-1": True},
        )

        _server_ends_with_its_supervisor(running)


def _server_ends_with_its_supervisor(running: Running) -> None:
    instance = running.children()["instance"]
    _, _, fields = Path(f"/proc/{instance}/stat").read_text().rpartition(")")
    supervisor = int(fields.split()[1])

    os.kill(supervisor, signal.SIGKILL)

    assert running.process.wait(timeout=60) == 3
    assert running.children() == {}


def _ask_many(client: httpx.Client, victim: int) -> list[Any]:
    def ask(number: int) -> Any:
        body = {"prompt": f"Question {number}", "max_tokens": 4, "temperature": 0}
        return client.post("/v1/completions", json=body).json()

    with ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(ask, number) for number in range(6)]
        # Some are with the one that answers; when those are done, the rest is with the other.
        eventually(lambda: sum(each.done() for each in asked) >= 1, wanted=True)
        os.kill(victim, signal.SIGKILL)
        return [each.result(timeout=60) for each in asked]
