"""Processes that die: what their clients get, and that all come back or all end."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve.conftest import SOON_S, command, descendants, eventually, pids_of, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Running

SIZES = ("--blocks", "64", "--block-tokens", "8", "--host-gib", "0.01")
KEY = {"Authorization": "Bearer secret"}
PREFIX = "Whoever has the beginning of a prompt is asked for the rest of it. "
ATTEMPTS = 5
STALL_S = 8.0
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
            found[name] = set()
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # It was closed as we looked.
                    if "memfd:penstock-" in os.readlink(link):
                        found[name].add(os.stat(link).st_ino)
    return found


def computing(running: Running) -> set[str]:
    """The processes that have loaded torch."""
    maps = {name: f"/proc/{pid}/maps" for name, pid in running.children().items()}
    return {name for name, path in maps.items() if "libtorch" in Path(path).read_text()}


@pytest.mark.long  # A killed rank of a pair, and all processes anew: test_faults.
def test_a_killed_rank_ends_its_instance_which_comes_back_with_all_ranks(
    model_folder: Path,
) -> None:
    with serving(model_folder, "--tp", "2", "--api-key", "secret", *SIZES) as running:
        before = completed(running)
        memory = arenas(running)
        assert computing(running) == {"rank-0", "rank-1"}
        refused = running.client.post("/v1/completions", json={"prompt": "x"})

        for _ in range(ATTEMPTS):
            last, lost, unready = killed_while_it_answers(running)
            # The other word means that we were kept from it until the answer was whole.
            if last != "[DONE]":
                break
        after = completed(running)

        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert "in the middle of the answer" in json.loads(last)["error"]["message"]
        assert lost.status_code == unready == 503
        assert lost.json()["error"]["type"] == "service_unavailable"
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
        # The memory outlived the ranks: nobody had to make it anew.
        assert all(len(numbers) == 1 for numbers in memory.values())
        assert arenas(running) == memory

        killed_server_leaves_nothing(running, processes=3)


def supervisor_of(running: Running) -> int:
    """The process that starts its instances, and again when they end."""
    instance = running.children()["instance"]
    _, _, fields = Path(f"/proc/{instance}/stat").read_text().rpartition(")")
    return int(fields.split()[1])


@contextmanager
def nobody_comes_back(running: Running) -> Iterator[None]:
    """Meanwhile what ends is not started again, however long it takes us to look."""
    supervisor = supervisor_of(running)
    os.kill(supervisor, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(supervisor, signal.SIGCONT)


def killed_while_it_answers(running: Running) -> tuple[str, httpx.Response, int]:
    """Kills a rank; the last event of its client, and others when there was nobody to ask.

    Returns when all its processes are others, and answer again.
    """
    before = set(running.children().values())
    with nobody_comes_back(running):
        last = last_word_of_an_answer(running, killing=running.children()["rank-1"])
        lost = running.client.post("/v1/completions", json={"prompt": "x"}, headers=KEY)
        unready = status(running)
    eventually(lambda: before & set(running.children().values()), set())
    eventually(lambda: status(running), 200)
    return last, lost, unready


def last_word_of_an_answer(running: Running, *, killing: int) -> str:
    """The last event of a client whose process was killed."""
    with running.client.stream("POST", "/v1/completions", json=LONG, headers=KEY) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(killing, signal.SIGKILL)
        said = [line.removeprefix("data: ") for line in lines if line]
    return said[-1]


def killed_server_leaves_nothing(running: Running, *, processes: int) -> None:
    pids = [
        pid for pid in descendants(running.process.pid) if "penstock_serve.engine" in command(pid)
    ]
    assert len(pids) == processes
    watched = [os.pidfd_open(pid) for pid in pids]

    running.process.kill()

    deadline = time.monotonic() + SOON_S
    for pidfd in watched:
        ended, _, _ = select.select([pidfd], [], [], max(0, deadline - time.monotonic()))
        os.close(pidfd)
        assert ended


@pytest.mark.long  # A killed rank is in test_faults; what no token was sent of is in test_router.
def test_requests_without_a_token_yet_go_to_another_instance(model_folder: Path) -> None:
    with serving(model_folder, "--instances", "2", *SIZES) as running:
        victim = keeper_of(PREFIX, running)
        # Stopped, it takes requests and answers none, until it is killed.
        os.kill(victim, signal.SIGSTOP)
        with httpx.Client(base_url=running.address, timeout=SOON_S) as client:
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


def test_an_instance_that_stands_still_for_some_seconds_is_not_lost(server: Running) -> None:
    """As long as machines do that are copied, frozen, or short of memory."""
    before = server.children()
    with ThreadPoolExecutor(1) as client:
        for pid in before.values():
            os.kill(pid, signal.SIGSTOP)
        try:
            asked = client.submit(server.complete, "Who stands still?")
            threading.Event().wait(STALL_S)
        finally:
            for pid in before.values():
                os.kill(pid, signal.SIGCONT)
        answer = asked.result(timeout=SOON_S)

    assert answer["choices"][0]["finish_reason"] == "length"
    assert server.children() == before


def keeper_of(prefix: str, running: Running) -> int:
    """The instance that has a prefix, and so gets the next request that begins with it."""
    running.complete(prefix)

    def keepers() -> list[str]:
        instances = running.client.get("/cache").json()["instances"]
        return [each["instance"] for each in instances if each["cache"]["blocks_known"]]

    eventually(lambda: len(keepers()), 1)
    [name] = keepers()  # Its KV events reached the router before this answer.
    [pid] = pids_of(name, running)
    return pid


def _server_ends_with_its_supervisor(running: Running) -> None:
    os.kill(supervisor_of(running), signal.SIGKILL)

    assert running.process.wait(timeout=SOON_S) == 3
    assert running.children() == {}


def _ask_many(client: httpx.Client, victim: int) -> list[Any]:
    def ask(number: int) -> Any:
        body = {"prompt": f"{PREFIX}Question {number}", "max_tokens": 4, "temperature": 0}
        return client.post("/v1/completions", json=body).json()

    with ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(ask, number) for number in range(6)]
        # The first is with the one that has its prefix; the next is not, as that one is busy.
        eventually(lambda: sum(each.done() for each in asked) >= 1, wanted=True)
        os.kill(victim, signal.SIGKILL)
        return [each.result(timeout=SOON_S) for each in asked]
