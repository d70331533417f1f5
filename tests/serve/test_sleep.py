"""Servers that sleep and wake."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import always_load_options, eventually, pids_of, serving
from tests.serve.test_new_weights import cached
from tests.serve.test_roles import STORY, reported, require_same

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Running

MIB = 1 << 20
# A block has 2 layers x 2 x 8 tokens x 3 heads x 16 channels x 4 bytes: 6 KiB.
LARGE = ("--blocks", "8000", "--block-tokens", "8", "--host-gib", "0.05")


def post(running: Running, what: str, body: Any = None) -> Any:
    answer = running.client.post(f"/admin/{what}", json={} if body is None else body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def resident(running: Running, kind: str = "RssAnon|RssShmem") -> int:
    """Memory of the processes of all instances."""
    total = 0
    for name in running.client.get("/health").json()["instances"]:
        for pid in pids_of(name, running):
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            total += sum(int(each) << 10 for each in re.findall(rf"(?:{kind}):\s+(\d+)", status))
    return total


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return always_load_options(tmp_path_factory.mktemp("always"))


@pytest.fixture(scope="module")
def large(model_folder: Path, always: tuple[str, str]) -> Iterator[Running]:
    """For all tests that leave it awake."""
    with serving(model_folder, *LARGE, *always) as running:
        yield running


@pytest.fixture(scope="module")
def disk_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored") / "disk"


@pytest.fixture(scope="module")
def stored(model_folder: Path, disk_folder: Path, always: tuple[str, str]) -> Iterator[Running]:
    """A server with a disk."""
    with serving(model_folder, *LARGE, *disk_at(disk_folder), *always) as running:
        yield running


def test_a_server_gives_its_memory_back_and_answers_the_same_afterwards(large: Running) -> None:
    require_sleep(large)


@pytest.mark.long
def test_ranks_give_their_memory_back_and_answer_the_same_afterwards(model_folder: Path) -> None:
    with serving(model_folder, *LARGE, "--tp", "2") as running:
        require_sleep(running)


def require_sleep(running: Running) -> None:
    post(running, "reset")
    first = reported(running, STORY, logprobs=5)
    before = resident(running, "RssShmem")

    assert post(running, "sleep", {"level": 2, "host": True})["state"] == "asleep"

    assert before - resident(running, "RssShmem") > 35 * MIB
    refused = running.client.post("/v1/completions", json={"prompt": STORY})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "the server is asleep" in refused.json()["error"]["message"]
    assert running.client.get("/health").json()["status"] == "asleep"
    assert running.client.post("/admin/resume").status_code == 409
    assert running.client.post("/admin/weights", json={"path": "/"}).status_code == 409
    post(running, "sleep", {"level": 2, "host": True})

    assert post(running, "wake")["state"] == "running"
    assert post(running, "wake")["state"] == "running"

    again = reported(running, STORY, logprobs=5)
    require_same(again, first)
    assert cached(again) == 0
    assert cached(reported(running, STORY)) > 0
    post(running, "audit")


def test_device_blocks_are_given_back_and_come_from_host_memory_afterwards(large: Running) -> None:
    first = reported(large, STORY, logprobs=5)
    # About 450 blocks of 6 KiB are touched.
    for number in range(9):
        reported(large, f"{number} " * 200, max_tokens=1)
    before = resident(large, "RssAnon")

    post(large, "sleep")

    assert before - resident(large, "RssAnon") > MIB
    post(large, "wake")
    again = reported(large, STORY, logprobs=5)
    require_same(again, first)
    assert cached(again) > 0
    post(large, "audit")


def test_an_instance_that_restarts_while_the_server_sleeps_sleeps_too(large: Running) -> None:
    first = reported(large, STORY, logprobs=5)
    post(large, "sleep")
    [pid] = pids_of("instance-0", large)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pids_of("instance-0", large) not in ([], [pid]), wanted=True)
    eventually(lambda: large.client.get("/cache").json()["instances"] != [], wanted=True)

    eventually(lambda: large.cache()["state"], "asleep")

    post(large, "wake")
    require_same(reported(large, STORY, logprobs=5), first)


def test_a_disk_keeps_what_was_cached_through_a_sleep(stored: Running) -> None:
    # What is computed while the store process starts is not saved there.
    eventually(lambda: [each["on"] for each in _disks(stored)], [True])
    prompt = f"It sleeps, and the disk does not. {STORY}"
    first = reported(stored, prompt, logprobs=5)
    eventually(lambda: _disks(stored)[0]["ready"] > 0, wanted=True)

    post(stored, "sleep", {"host": True, "level": 2})
    post(stored, "wake")

    again = reported(stored, prompt, logprobs=5)
    require_same(again, first)
    assert cached(again) > 0


def disk_at(folder: Path) -> tuple[str, ...]:
    return "--disk", str(folder), "--disk-gib", "0.05"


def _disks(running: Running) -> list[Any]:
    instances = running.client.get("/cache").json()["instances"]
    return [each["cache"]["tiers"][2] for each in instances]
