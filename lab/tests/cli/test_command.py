"""The `lab` command that `make` puts beside Python, as a clone has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "lab"
SOON_S = 300.0


@pytest.mark.skipif(not COMMAND.exists(), reason=f"make has put no {COMMAND} there")
def test_it_simulates_with_several_processes() -> None:
    # More seeds than one process takes at a time: others are started, which import the command.
    options = ["sim", "--scenario", "cache", "--seeds", "51", "--jobs", "2"]
    ran = subprocess.run(
        [COMMAND, *options], capture_output=True, text=True, timeout=SOON_S, check=False
    )

    assert ran.returncode == 0, ran.stderr
    assert "nothing was found" in ran.stdout
