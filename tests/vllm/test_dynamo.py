"""NVIDIA's own router behind vLLM with Penstock: what it counts of a prompt follows the tiers.

The router is `dynamo.select_service` of the package `ai-dynamo-runtime`, which `make test-long`
installs into `.venv-dynamo`. It needs no GPU, etcd or NATS: it is told of a worker over HTTP and
listens to the events that vLLM publishes. For each worker and prompt it counts the leading blocks
that lie on the device, there or in host memory, and there, in host memory or on a disk.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, HITS, LENGTHS, PENSTOCK, cached, generate

from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Results, Run

DYNAMO = Path(__file__).resolve().parents[2] / ".venv-dynamo"
INSTALLED = any(DYNAMO.glob("lib/python3*/site-packages/dynamo/select_service"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.skipif(
        not INSTALLED, reason="no ai-dynamo-runtime in .venv-dynamo, where `make test-long` puts it"
    ),
]

READY_S = 60.0
"""A router that does not answer by then never does."""
LOOK_S = 0.05
"""Between two questions whether it is ready: it does not tell."""
MODEL = "tiny"
POOL, HOST_BLOCKS = 40, 64
"""Blocks on the device and in host memory: room for the prompts of two seeds, and of three."""
BLOCKS = [length // BLOCK for length in LENGTHS]
DEVICE = [[count, count, count] for count in BLOCKS]
HOST = [[0, count, count] for count in BLOCKS]
DISK = [[0, 0, count] for count in BLOCKS]
NOWHERE = [[0, 0, 0] for _ in BLOCKS]


class Router:
    """The router, and the places where it listens to an engine."""

    def __init__(self, log: Path) -> None:
        """Starts it."""
        port, events = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self.published = {
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{events + 1}",
        }
        self.worker = {
            "worker_id": 1,
            "model_name": MODEL,
            "endpoint": "http://127.0.0.1:9",  # Where requests would go: nobody sends any.
            "block_size": BLOCK,
            "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{events}"},
            "replay_endpoint": f"tcp://127.0.0.1:{events + 1}",
        }
        with log.open("wb") as printed:
            self._process = subprocess.Popen(
                [
                    str(DYNAMO / "bin" / "python"),
                    "-m",
                    "dynamo.select_service",
                    "--port",
                    str(port),
                ],
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
        self._log = log

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=READY_S).close()
                return
            printed = self._log.read_text(errors="replace")
            assert self._process.poll() is None, printed
            assert time.monotonic() < deadline, printed
            Event().wait(LOOK_S)

    def forget_worker(self) -> None:
        """What an operator's platform does when an engine has ended."""
        request = urllib.request.Request(f"{self.url}/workers/1", method="DELETE")
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            assert json.load(answer)["worker_id"] == 1

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    started = Router(tmp_path / "router.log")
    try:
        started.wait_ready()
        yield started
    finally:
        started.close()


def run_engine(run: Run, router: Router, acts: list[dict[str, Any]], **how: Any) -> Results:
    """The results of acts of an engine that the router knows, and that has its tiers."""
    join = {"act": "join", "router": router.url, "model": MODEL, "worker": router.worker}
    results, _ = run(
        "llama",
        [{"act": "store", "on": 1}, join, *acts],
        connector=PENSTOCK,
        weights="random, seed 0",
        events=router.published,
        pool=POOL,
        host_blocks=HOST_BLOCKS,
        **how,
    )
    return results[2:]


def answered(*seeds: int, since: int) -> list[dict[str, Any]]:
    """Answers the prompts of seeds, and waits until all are stored that were answered `since`."""
    return [
        act
        for seed in seeds
        for act in (
            generate(seed=seed, max_tokens=1, alone=True),
            {"act": "store", "blocks": sum(BLOCKS) * (seed - since + 1)},
        )
    ]


def scores(router: Router, want: list[list[int]]) -> dict[str, Any]:
    """What the router counts of the prompts of seed 3."""
    act = {"act": "scores", "router": router.url, "model": MODEL, "lengths": LENGTHS}
    return {**act, "want": want}


def told(results: Results) -> list[list[list[int]]]:
    return [each["scores"] for each in results if "scores" in each]


def test_what_the_router_counts_follows_blocks_down_up_and_through_a_restart(
    run: Run, router: Router, tmp_path: Path
) -> None:
    first = run_engine(
        run,
        router,
        [
            scores(router, NOWHERE),
            *answered(3, since=3),
            scores(router, DEVICE),
            *answered(4, 5, since=3),
            scores(router, HOST),
            *answered(6, 7, since=3),
            scores(router, DISK),
            generate(max_tokens=1, alone=True),
            scores(router, DEVICE),
        ],
        disk=str(tmp_path / "disk"),
    )
    router.forget_worker()
    second = run_engine(
        run,
        router,
        [
            scores(router, NOWHERE),
            generate(max_tokens=1, alone=True),
            scores(router, DEVICE),
            *answered(8, 9, since=8),
            scores(router, HOST),
            *answered(10, 11, since=8),
            scores(router, DISK),
            {"act": "reset"},
            scores(router, NOWHERE),
        ],
        disk=str(tmp_path / "disk"),
    )

    assert told(first) == [NOWHERE, DEVICE, HOST, DISK, DEVICE]
    assert cached(first[-2]) == HITS, "what the router was told of can be loaded"
    assert told(second) == [NOWHERE, DEVICE, HOST, DISK, NOWHERE]
    assert cached(second[1]) == HITS


def test_the_router_counts_no_block_of_a_shared_store_for_one_engine(
    run: Run, router: Router, tmp_path: Path
) -> None:
    """Every engine can load it: the router leaves out what is `REMOTE`."""
    results = run_engine(
        run,
        router,
        [
            *answered(3, since=3),
            *answered(4, 5, since=3),
            scores(router, HOST),
            *answered(6, 7, since=3),
            scores(router, NOWHERE),
        ],
        shared=str(tmp_path / "store"),
    )

    assert told(results) == [HOST, NOWHERE]
