"""Walks are counted in every process that takes part, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

from lab.walks.counting import Counting
from lab.walks.walks import block_to_disk_and_back, layer_to_decode


def test_a_block_passes_the_engine_and_the_store_process() -> None:
    walked = block_to_disk_and_back()

    assert walked.processes == 2
    assert walked.calls > walked.files > 20


def test_a_layer_stays_in_one_process() -> None:
    walked = layer_to_decode()

    assert walked.processes == 1
    assert walked.calls > walked.files > 20


def test_what_happens_while_nobody_counts_is_left_out() -> None:
    with Counting() as counting:
        subprocess.run([sys.executable, "-c", "import penstock; penstock.Cache"], check=True)
        before = counting.found()
        with counting.on():
            subprocess.run([sys.executable, "-c", "import penstock; penstock.Cache"], check=True)
        after = counting.found()

    assert (before.files, before.calls, before.processes) == (0, 0, 0)
    assert after.files > 0
    assert after.processes == 1
