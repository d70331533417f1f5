"""After `kill -9` of an engine or its store process, the next engine finds what was saved."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from penstock.testing import failing_seed
from tests.runtime.stored_engine import Engine, check, process_of

ROOT = Path(__file__).resolve().parents[2]
START_S = 600.0
CHECKED_MAX = 20


def kill_while_saving(folder: Path, first: int, before: list[int], random: Random) -> list[int]:
    """Kills an engine, or its store process and then the engine; returns what it had saved.

    The engine has found all prompts of `before`, or fails.
    """
    arguments = [str(folder), str(first), *map(str, before)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.stored_engine", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], START_S)[0], "nothing was saved"
            if random.random() < 0.5:
                os.kill(process_of(folder), signal.SIGKILL)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(random.uniform(0.0, 0.3))
        finally:
            process.kill()
        whole, _, _ = process.stdout.read().rpartition(b"\n")
    return [int(line) for line in whole.split()]


def kill_many_times(folder: Path, kills: int) -> None:
    saved: list[int] = []
    for number in range(kills):
        with failing_seed(number):
            saved = kill_while_saving(folder, 1 + number * 1000, saved, Random(number))
            assert saved, "nothing was found, or nothing was saved"
            saved = saved[-CHECKED_MAX:]
    with Engine(folder) as engine:
        check(engine, saved)


def test_saved_prompts_are_found_after_a_few_kills(tmp_path: Path) -> None:
    kill_many_times(tmp_path / "disk", 2)


@pytest.mark.long
def test_saved_prompts_are_found_after_many_kills(tmp_path: Path) -> None:
    kill_many_times(tmp_path / "disk", 100)
