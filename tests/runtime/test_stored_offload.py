"""An engine with device blocks of its own, and a disk below its host memory."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

import penstock
from tests.runtime.stored_engine import SOON_S, TOML, process_of
from tests.stopped import stop_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

KEYS = [bytes([number]) * 16 for number in range(1, 7)]


def run_until(offload: penstock.Offload, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not done():
        assert time.monotonic() < deadline, offload.health()
        offload.wait(deadline)
        offload.step()


def test_what_one_engine_saved_the_next_one_prefetches_and_loads(tmp_path: Path) -> None:
    toml = TOML.format(path=tmp_path / "disk", weights="v1").replace("blocks = 32\n", "")
    config = penstock.parse_config(toml)
    kv = np.arange(32 * 256, dtype=np.int64).reshape(32, 256)
    with penstock.open_offload(config, kv=kv) as offload:
        run_until(offload, lambda: offload.health().ok)
        offload.save(KEYS, range(6), cause="first")
        run_until(offload, lambda: not offload.busy)
    again = np.zeros_like(kv)
    with penstock.open_offload(config, kv=again) as offload:
        run_until(offload, lambda: offload.health().ok)
        assert offload.lookup(KEYS).below == 6
        offload.prefetch(KEYS, cause="second")
        asked = offload.lookup(KEYS)
        assert (asked.ready, asked.pending, asked.below, asked.rising) == (0, 6, 0, 6)
        run_until(offload, lambda: offload.lookup(KEYS).ready == 6)
        offload.load(KEYS, range(10, 16), cause="second")
        run_until(offload, lambda: not offload.busy)

    assert (again[10:16] == kv[:6]).all()


def test_without_a_supervisor_the_disk_is_off_and_the_rest_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    toml = TOML.format(path=tmp_path / "disk", weights="v1").replace("blocks = 32\n", "")
    kv = np.arange(32 * 256, dtype=np.int64).reshape(32, 256)
    with penstock.open_offload(penstock.parse_config(toml), kv=kv) as offload:
        offload.save(KEYS, range(6), cause="first")
        run_until(offload, lambda: not offload.busy)
        (reason,) = offload.health().reasons
        status = offload.store_status()

        assert offload.lookup(KEYS).ready == 6
        assert status is not None
        assert status.failed
        assert "tier disk is off: no supervisor: '/nowhere/python' cannot be started" in reason


def test_the_store_says_whether_it_has_settled_and_what_it_has(tmp_path: Path) -> None:
    toml = TOML.format(path=tmp_path / "disk", weights="v1").replace("blocks = 32\n", "")
    kv = np.arange(32 * 256, dtype=np.int64).reshape(32, 256)

    with penstock.open_offload(penstock.parse_config(toml), kv=kv) as offload:
        starting = offload.store_status()
        run_until(offload, lambda: offload.health().ok)
        there = offload.store_status()
        offload.save(KEYS, range(6), cause="first")
        run_until(offload, lambda: (now := offload.store_status()) and now.blocks == 6)

    assert starting is not None
    assert there is not None
    assert (starting.due, starting.settled, starting.on) == (True, False, False)
    assert (there.settled, there.on, there.blocks) == (True, True, 0)


def test_blocks_on_their_way_to_a_disk_are_counted_until_it_has_them(tmp_path: Path) -> None:
    toml = TOML.format(path=tmp_path / "disk", weights="v1").replace("blocks = 32\n", "")
    kv = np.arange(32 * 256, dtype=np.int64).reshape(32, 256)

    with penstock.open_offload(penstock.parse_config(toml), kv=kv) as offload:
        run_until(offload, lambda: offload.health().ok)
        before = offload.sinking(KEYS)
        process = process_of(tmp_path / "disk")
        stop_process(process)
        offload.save(KEYS[:4], range(4), cause="first")
        run_until(offload, lambda: offload.lookup(KEYS).ready == 4)
        under_way = offload.sinking(KEYS)
        os.kill(process, signal.SIGCONT)
        run_until(offload, lambda: not offload.sinking(KEYS))

    assert (before, under_way) == (0, 4)


def test_a_question_about_blocks_that_only_others_can_have_is_open_until_it_is_answered(
    tmp_path: Path,
) -> None:
    toml = TOML.format(path=tmp_path / "disk", weights="v1").replace("blocks = 32\n", "")
    kv = np.arange(32 * 256, dtype=np.int64).reshape(32, 256)

    with penstock.open_offload(penstock.parse_config(toml), kv=kv) as offload:
        offload.wait_for_tiers(SOON_S)
        process = process_of(tmp_path / "disk")
        stop_process(process)
        offload.prefetch(KEYS, cause="first")
        asked, others = offload.store_status("first"), offload.store_status("second")
        os.kill(process, signal.SIGCONT)
        run_until(offload, lambda: not (now := offload.store_status("first")) or not now.asked)

    assert asked is not None
    assert others is not None
    assert (asked.asked, asked.searching, others.asked) == (True, False, False)
