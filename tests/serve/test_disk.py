"""`penstock serve --disk`: conversations are found again by the next server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cli.app import run
from tests.runtime.stored_engine import (
    TOML,
    Engine,
    all_but_the_last_block,
    process_of,
    processes_of,
    prompt,
)
from tests.serve.conftest import descendants, eventually, kill_all, pids_of, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serve.conftest import Running

SIZES = ("--blocks", "64", "--block-tokens", "8", "--host-gib", "0.01")
PROMPT = "A block that is on a disk is found by the server that comes next. " * 3
SOON_S = 600.0


def disk_of(running: Running) -> Any:
    [instance] = running.client.get("/cache").json()["instances"]
    return instance["cache"]["tiers"][-1]


def test_a_folder_that_cannot_be_used_is_not_called_ready(
    model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").symlink_to(tmp_path / "nowhere")
    options = (*SIZES, "--disk", str(tmp_path / "disk"), "--disk-gib", "0.05")
    with serving(model_folder, *options) as running:
        why = f"folder {tmp_path / 'disk'} cannot be used: File exists"

        assert f"→ disk 0.05 GiB off: {why})" in running.ready_line
        assert disk_of(running)["why_off"] == why
        health = running.client.get("/health")
        assert health.status_code == 200
        assert health.json()["status"] == "degraded"
        assert health.json()["why"] == [f"instance-0: tier disk is off: {why}"]


def test_a_server_that_comes_after_a_killed_one_answers_its_conversations_from_the_disk(
    model_folder: Path, tmp_path: Path, always_load: tuple[str, str]
) -> None:
    options = (*SIZES, *always_load, "--disk", str(tmp_path / "disk"), "--disk-gib", "0.05")
    with serving(model_folder, *options) as running:
        # A prompt that comes as soon as the server is ready is kept.
        assert "→ disk 0.05 GiB on)" in running.ready_line
        first = running.complete(PROMPT, max_tokens=4)
        eventually(lambda: disk_of(running)["ready"] > 4, wanted=True)
        saved = disk_of(running)["ready"]
        store = process_of(tmp_path / "disk")
        os.kill(store, signal.SIGKILL)
        # A server that has no requests starts another one all the same.
        eventually(lambda: bool(processes_of(tmp_path / "disk") - {store}), wanted=True)
        kill_all([*descendants(running.process.pid), running.process.pid])
    with serving(model_folder, *options) as running:
        # More may have been saved before the kill.
        eventually(lambda: disk_of(running)["ready"] >= saved, wanted=True)
        second = running.complete(PROMPT, max_tokens=4)

    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["cached_by_tier"]["disk"] >= 8 * (saved - 1)
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_reset_that_an_instance_did_not_live_to_carry_out_voids_the_disk_of_the_next_one(
    model_folder: Path, tmp_path: Path, always_load: tuple[str, str]
) -> None:
    options = (*SIZES, *always_load, "--disk", str(tmp_path / "disk"), "--disk-gib", "0.05")
    with serving(model_folder, *options) as running:
        eventually(lambda: disk_of(running)["on"], wanted=True)
        blocks = running.complete(PROMPT)["usage"]["prompt_tokens"] // 8
        eventually(lambda: disk_of(running)["store"]["blocks"] >= blocks, wanted=True)
        pids = pids_of("instance-0", running)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

        reset = running.client.post("/admin/reset")
        kill_all(pids)
        eventually(lambda: pids_of("instance-0", running) not in ([], pids), wanted=True)
        eventually(lambda: running.client.get("/health").status_code, wanted=200)
        eventually(lambda: disk_of(running)["on"], wanted=True)

        assert reset.json() == {"reset": ["instance-0"]}
        assert running.complete(PROMPT)["usage"]["cached_by_tier"]["disk"] == 0


def test_two_engines_share_the_disk_that_a_store_command_serves(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    file = tmp_path / "store.toml"
    file.write_text(TOML.format(path=folder, weights="any"))
    command = [sys.executable, "-m", "penstock.cli.entry", "store", "--config", str(file)]
    with subprocess.Popen(command) as store:
        eventually((folder / "socket").exists, wanted=True)
        with Engine(folder) as one, Engine(folder) as other:
            one.wait_until_on()
            other.wait_until_on()
            one.save(prompt(1))

            other.cache.prefetch(prompt(1))
            other.run_until(lambda: other.cache.statistics().tiers[1].ready == 8)

            assert other.answer(prompt(1)) == all_but_the_last_block(prompt(1))
            assert processes_of(folder) == set()  # Neither has started one of its own.
        assert store.poll() is None  # It belongs to none of them.
        store.terminate()
        assert store.wait(SOON_S) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--disk", "/x"], "penstock: --disk: is given without --disk-gib, must be given with it"),
        (["--disk-gib", "1"], "penstock: --disk-gib: is given without --disk, must be given with"),
        (
            ["--disk", "/x", "--disk-gib", "1", "--host-gib", "0"],
            "penstock: --disk: is given without host memory, must be given with --host-gib",
        ),
    ],
)
def test_a_disk_that_makes_no_sense_is_refused_in_one_line(
    model_folder: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["serve", "--model", str(model_folder), "--port", "0", *options])

    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith(said)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "penstock: --config: is missing, must be a file with a stored tier\n"),
        (["--config", "/nowhere"], "penstock: /nowhere: cannot be read: No such file"),
    ],
)
def test_a_store_without_a_disk_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["store", *arguments])

    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith(said)
    assert error.count("\n") == 1
