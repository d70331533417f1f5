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
from tests.runtime.stored_engine import Engine, all_but_the_last_block, process_of, prompt

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0


def kill_while_saving(folder: Path, first: int, random: Random) -> list[int]:
    """Kills an engine, or its store process and then the engine; returns what it had saved."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.stored_engine", str(folder), str(first)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
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
    for number in range(kills):
        with failing_seed(number):
            saved = kill_while_saving(folder, 1 + number * 1000, Random(number))
            with Engine(folder) as engine:
                engine.wait_until_on()
                for each in saved[-20:]:
                    assert engine.save(prompt(each)) == all_but_the_last_block(prompt(each))
                engine.cache.audit()


def test_saved_prompts_are_found_after_a_few_kills(tmp_path: Path) -> None:
    kill_many_times(tmp_path / "disk", 5)


@pytest.mark.long
def test_saved_prompts_are_found_after_many_kills(tmp_path: Path) -> None:
    kill_many_times(tmp_path / "disk", 100)
