"""What `penstock bench vllm` does around its engines; the engines themselves need vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from penstock.bench.vllm_engine import worker_cores
from penstock.bench.vllm_run import low_end

PROGRAM = """
import sys
from penstock.bench.vllm_engine import ending_in_order

with ending_in_order():
    try:
        print("running", flush=True)
        sys.stdin.read()
    finally:
        print("engines ended", flush=True)
"""


def test_a_request_to_end_the_benchmark_ends_what_it_has_started() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "running\n"

        program.send_signal(signal.SIGTERM)
        told, _ = program.communicate(timeout=60)

    assert told == "engines ended\n"
    assert program.returncode == 128 + signal.SIGTERM


def test_the_scheduler_has_a_core_of_its_own_where_there_are_two() -> None:
    cores = sorted(os.sched_getaffinity(0))

    wanted = [int(core) for core in worker_cores().split(",")]

    assert wanted == (cores[1:] if len(cores) > 1 else cores)


@pytest.mark.parametrize(
    ("count", "below"), [(1, 0), (5, 0), (6, 0), (9, 1), (12, 2), (15, 3), (25, 7)]
)
def test_the_low_end_of_an_interval_leaves_out_as_many_as_the_odds_allow(
    count: int, below: int
) -> None:
    # The table of the sign test: so many samples may lie below the interval.
    assert low_end([float(number) for number in reversed(range(count))]) == below
