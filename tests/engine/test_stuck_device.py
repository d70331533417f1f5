"""A device that does not end a step: the wait for it has a deadline, and its process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from penstock.errors import UnavailableError
from penstock_serve.engine import worker as module
from penstock_serve.engine.batch import TokenSpan
from penstock_serve.engine.engine import Engine, LocalWorkers
from penstock_serve.engine.requests import Request
from penstock_serve.engine.steps import Step
from penstock_serve.engine.worker import CpuLane, Worker
from tests.engine.test_engine import make_engine, prompt, run, tokens_of


class Lane(CpuLane):
    """A GPU as a worker sees it: a test decides when its marks are reached."""

    stuck = False

    def __init__(self) -> None:
        self.waited: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return not self.stuck


def worker_on(lane: Lane, folder: Any, **settings: int) -> tuple[Worker, Engine]:
    made = make_engine(folder, **settings)
    decoder, kv = made.workers.worker.decoder, made.workers.worker.kv  # type: ignore[attr-defined]
    worker = Worker(decoder, kv, block_tokens=8, lane=lane)
    return worker, Engine(made.scheduler, LocalWorkers(worker), step_timeout_s=0.5)


@pytest.mark.parametrize("flying", [1, 2])
def test_a_step_that_does_not_end_in_time_is_an_error(checkpoint_of: Any, flying: int) -> None:
    folder, _ = checkpoint_of("llama")
    lane = Lane()
    _, engine = worker_on(lane, folder, steps_in_flight=flying)
    before = tokens_of(run(engine, Request(id="a", prompt=prompt(20, 1)))["a", 0])

    lane.stuck = True
    with pytest.raises(UnavailableError, match=r"step \d+ was not computed within 0.5 s"):
        run(engine, Request(id="b", prompt=prompt(20, 2)))
    engine.abandon()

    assert len(before) == 16
    # A wait ends at its timeout.
    assert max(lane.waited) <= 0.5


def test_a_rank_gives_a_step_up_as_well(
    checkpoint_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = checkpoint_of("llama")
    lane = Lane()
    lane.stuck = True
    worker, _ = worker_on(lane, folder)
    monkeypatch.setattr(module, "STEP_S", 0.25)

    with pytest.raises(UnavailableError, match=r"step 3 was not computed within 0.25 s"):
        worker.execute(Step(3, [TokenSpan(0, 0, [1, 2, 3], [0])], []))


def test_a_process_that_gives_up_ends_even_inside_a_call_that_does_not() -> None:
    # `pause` stands for a call of CUDA: no Python code runs until it returns, which it does not.
    program = (
        "import ctypes\n"
        "from penstock_serve.engine.process_life import end_within\n"
        "end_within(0.2)\n"
        "ctypes.CDLL(None).pause()\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], timeout=300, check=False)

    assert ended.returncode == -signal.SIGALRM
