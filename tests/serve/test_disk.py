"""`penstock serve --disk`: conversations are found again by the next server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.stored_engine import process_of, processes_of
from tests.serve.conftest import descendants, eventually, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serve.conftest import Running

SIZES = ("--blocks", "64", "--block-tokens", "8", "--host-gib", "0.01")
PROMPT = "A block that is on a disk is found by the server that comes next. " * 3
SOON_S = 60.0


def disk_of(running: Running) -> Any:
    [instance] = running.client.get("/cache").json()["instances"]
    return instance["cache"]["tiers"][-1]


def cached(running: Running, prompt: str) -> int:
    answer = running.complete(prompt, max_tokens=4)
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_server_that_comes_after_a_killed_one_answers_its_conversations_from_the_disk(
    model_folder: Path, tmp_path: Path
) -> None:
    options = (*SIZES, "--disk", str(tmp_path / "disk"), "--disk-gib", "0.05")
    with serving(model_folder, *options) as running:
        eventually(lambda: disk_of(running)["on"], wanted=True)
        first = running.complete(PROMPT, max_tokens=4)
        eventually(lambda: disk_of(running)["ready"] > 4 and disk_of(running)["filling"], wanted=0)
        saved = disk_of(running)["ready"]
        store = process_of(tmp_path / "disk")
        os.kill(store, signal.SIGKILL)
        # A server that has no requests starts another one all the same.
        eventually(lambda: bool(processes_of(tmp_path / "disk") - {store}), wanted=True)
        for pid in [*descendants(running.process.pid), running.process.pid]:
            os.kill(pid, signal.SIGKILL)
    with serving(model_folder, *options) as running:
        eventually(lambda: disk_of(running)["ready"], wanted=saved)
        second = running.complete(PROMPT, max_tokens=4)

    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 8 * (saved - 1)
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


def test_two_instances_share_the_disk_that_a_store_command_serves(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    file = tmp_path / "store.toml"
    file.write_text(
        f'version = 1\nmodel.name = "any"\n[[tiers]]\nname = "host"\nkind = "host"\nblocks = 1\n'
        f'[[tiers]]\nname = "disk"\nkind = "disk"\npath = "{folder}"\ngib = 0.05\n'
    )
    command = [sys.executable, "-m", "penstock.cli.entry", "store", "--config", str(file)]
    with subprocess.Popen(command) as store:
        options = (*SIZES, "--disk", str(folder), "--disk-gib", "0.05")
        with serving(model_folder, *options) as one:
            eventually(lambda: disk_of(one)["on"], wanted=True)
            assert cached(one, PROMPT) == 0
            eventually(lambda: disk_of(one)["ready"] > 4 and disk_of(one)["filling"], wanted=0)
            with serving(model_folder, *options) as other:
                eventually(lambda: disk_of(other)["ready"], wanted=disk_of(one)["ready"])

                assert cached(other, PROMPT) > 0
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
    model_folder: Path, options: list[str], said: str
) -> None:
    command = [sys.executable, "-m", "penstock.cli.entry", "serve", "--model", str(model_folder)]
    done = subprocess.run(
        [*command, "--port", "0", *options],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )

    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "penstock: --config: is missing, must be a file with a tier of kind 'disk'\n"),
        (["--config", "/nowhere"], "penstock: /nowhere: cannot be read: No such file"),
    ],
)
def test_a_store_without_a_disk_is_refused_in_one_line(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "penstock.cli.entry", "store", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith(said)
