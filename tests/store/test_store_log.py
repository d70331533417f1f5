"""What a store process writes to the standard error of the program that has the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

LIMIT_S = 300.0
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import logging, sys
from pathlib import Path
from penstock.logs import set_up_logs
from tests.runtime.stored_engine import Engine

how, folder = sys.argv[1:]
if how == "info":
    logging.getLogger("penstock").setLevel("INFO")
if how == "json":
    set_up_logs("info", as_json=True)
logging.getLogger("penstock").addHandler(logging.NullHandler())  # For the engine's own lines.
logging.getLogger("penstock").propagate = False
with Engine(Path(folder)) as engine:
    tiers = lambda: engine.cache.statistics().tiers
    engine.run_until(lambda: tiers()[-1].on)
"""
LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|ERROR) penstock\.store\.[\w.]+ store .* "
    r"process=store pid=\d+ tier=disk folder=\S+"
)


def said_by(how: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", PROGRAM, how, str(folder)]
    done = subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True
    )
    return done.stderr


def test_a_program_that_asked_for_no_log_has_a_quiet_standard_error(tmp_path: Path) -> None:
    assert said_by("quiet", tmp_path) == ""


def test_a_program_that_asked_for_the_log_sees_when_and_which_store_says_it(tmp_path: Path) -> None:
    lines = said_by("info", tmp_path).splitlines()

    assert len(lines) >= 2
    assert all(LINE.fullmatch(line) for line in lines), lines


def test_lines_of_a_store_are_json_where_those_of_its_program_are(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in said_by("json", tmp_path).splitlines()]

    assert lines
    assert {(each["process"], each["tier"]) for each in lines} == {("store", "disk")}
    assert all({"time", "level", "logger", "message", "pid", "folder"} <= {*each} for each in lines)


def test_what_a_store_cannot_do_is_said_to_every_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.store", "{}"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert done.returncode == 1
    assert re.fullmatch(
        r"\S+Z ERROR penstock\.store\S* store ends: cause=store: cannot be read: .* "
        r"process=store pid=\d+\n",
        done.stderr,
    )
