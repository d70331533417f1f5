"""What the log says of tiers that start, go and come back, as an operator reads it."""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.runtime.stored_engine import Engine, prompt, store_pid

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="penstock.runtime.status")
    return caplog


def said(lines: pytest.LogCaptureFixture) -> list[str]:
    """Level and text of the lines about health."""
    return [
        f"{each.levelname} {each.getMessage()}"
        for each in lines.records
        if each.name == "penstock.runtime.status"
    ]


def test_a_normal_start_of_a_disk_is_no_warning(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    with Engine(tmp_path / "disk") as engine:
        engine.wait_until_on()

        assert said(lines) == [
            "INFO starting: tier disk cause=the store process is starting",
            "INFO tier disk is on",
        ]


def test_a_disk_that_goes_and_comes_back_is_two_warnings_and_the_second_says_on(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    with Engine(tmp_path / "disk") as engine:
        engine.wait_until_on()
        lines.clear()

        os.kill(store_pid(engine), signal.SIGKILL)
        engine.run_until(lambda: not engine.cache.health().ok)
        engine.wait_until_on()

        first, *between, last = said(lines)
        assert first.startswith("WARNING degraded: tier disk is off cause=the store process ")
        assert last == "WARNING recovered: tier disk is on"
        # How the process has ended is known a little later, and said too.
        assert all("has ended" in each for each in between)


def test_a_reset_and_other_weights_are_no_degradation(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    with Engine(tmp_path / "disk") as engine:
        engine.wait_until_on()
        engine.save(prompt(1))
        lines.clear()

        engine.cache.reset("the operator wants it")
        engine.save(prompt(1))
        engine.cache.change_weights("v2")
        engine.run_until(lambda: not engine.cache.health().ok)
        engine.wait_until_on()

        assert {each.partition(" ")[0] for each in said(lines)} == {"INFO"}


def test_a_folder_that_cannot_be_used_is_one_warning_with_the_reason(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "disk").symlink_to(tmp_path / "nowhere")
    with Engine(tmp_path / "disk") as engine:
        engine.run_until(lambda: "cannot be used" in engine.cache.health().reasons[0])

        started, warned = said(lines)
        assert started.startswith("INFO starting: tier disk ")
        assert warned.startswith("WARNING degraded: tier disk is off cause=folder ")
