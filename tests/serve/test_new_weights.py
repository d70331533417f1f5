"""A checkpoint that is loaded in place: answers are those of a server that began with it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.serve.conftest import (
    SOON_S,
    command,
    eventually,
    kill_all,
    make_checkpoint,
    pids_of,
    serving,
)
from tests.serve.test_lives import nobody_comes_back
from tests.serve.test_roles import SIZES, STORY, delivered, reported, require_same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Running


NAMES = ("instance-0", "instance-1")
PAIR = ("--prefill", "1", "--decode", "1")


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    folder = tmp_path_factory.mktemp("other") / "small-model"
    make_checkpoint(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wanted(other_folder: Path) -> Any:
    """What a server answers that began with the other weights."""
    with serving(other_folder, *SIZES) as fresh:
        return reported(fresh, STORY, logprobs=5)


@pytest.fixture(scope="module")
def pair(model_folder: Path) -> Iterator[Running]:
    """For all tests that give it its own weights back."""
    with serving(model_folder, *PAIR, *SIZES) as running:
        yield running


def load(running: Running, folder: Path, **more: Any) -> Any:
    answer = running.client.post("/admin/weights", json={"path": str(folder), **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: Any) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_wrong_checkpoint_is_refused_and_the_server_goes_on(
    pair: Running, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "longer", positions=1024)
    before = reported(pair, STORY)

    for path, message in (
        (tmp_path / "longer", "whose positions is 1024, must be 512"),
        (tmp_path / "nowhere", "must be a folder with a checkpoint, or a .gguf file"),
    ):
        answer = pair.client.post("/admin/weights", json={"path": str(path)})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
        assert message in answer.json()["error"]["message"]

    after = reported(pair, STORY)
    assert after["choices"] == before["choices"]
    assert cached(after) > 0


def test_both_instances_answer_as_a_server_that_began_with_the_new_weights(
    pair: Running, model_folder: Path, other_folder: Path, wanted: Any
) -> None:
    require_new_weights(pair, model_folder, other_folder, wanted)


# The pair above has two instances as well; what each rank loads is in `tests/engine`.
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [("--instances", "2"), ("--tp", "2"), ("--prefill-tp", "2", "--decode-tp", "1")],
)
def test_every_instance_answers_as_a_server_that_began_with_the_new_weights(
    model_folder: Path, other_folder: Path, wanted: Any, options: tuple[str, ...]
) -> None:
    with serving(model_folder, *options, *SIZES) as running:
        require_new_weights(running, model_folder, other_folder, wanted)


def require_new_weights(
    running: Running, model_folder: Path, other_folder: Path, wanted: Any
) -> None:
    old = [reported(running, STORY, logprobs=5) for _ in range(3)]

    result = load(running, other_folder, version="step-2")

    names = sorted(each["instance"] for each in running.client.get("/cache").json()["instances"])
    assert sorted(result["instances"]) == names
    assert (result["state"], result["failed"], result["aborted"]) == ("running", {}, 0)
    assert result["weights_version"].startswith("step-2@")
    hands_over = "prefill-0" in names
    before = delivered(running) if hands_over else 0
    found = [reported(running, STORY, logprobs=5) for _ in range(4)]
    for each in found:
        require_same(each, wanted)
    assert cached(found[0]) == 0
    assert old[0]["choices"] != found[0]["choices"]
    if hands_over:
        assert delivered(running) == before + 1

    load(running, model_folder, version="step-2")

    require_same(reported(running, STORY, logprobs=5), old[0])
    in_order = running.client.post("/admin/audit").json()["in_order"]
    assert sorted(in_order) == names


@pytest.mark.long  # Killed ranks and instances come back: test_lives. New weights stay: above.
def test_an_instance_that_was_killed_comes_back_with_the_new_weights(
    pair: Running, model_folder: Path, other_folder: Path, wanted: Any
) -> None:
    load(pair, other_folder, version="step-2")
    [pid] = pids_of("decode-0", pair)

    with nobody_comes_back(pair):
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: pair.client.get("/health").status_code, 503)

    eventually(lambda: pair.client.get("/health").status_code, 200)
    found = reported(pair, STORY, logprobs=5)
    require_same(found, wanted)
    assert versions(pair, "decode-0")["decode-0"].startswith("step-2@")
    load(pair, model_folder)


# Whoever is lost in a load, and comes back to it, is played in `test_control`.
@pytest.mark.long
def test_an_instance_that_is_killed_while_it_loads_leaves_everybody_on_one_version(
    model_folder: Path, other_folder: Path, wanted: Any
) -> None:
    with serving(model_folder, "--instances", "2", "--tp", "2", *SIZES) as running:
        old = [reported(running, STORY, logprobs=5) for _ in range(4)]
        before = versions(running, "instance-0")
        # A rank that is stopped keeps its instance in the middle of the load.
        processes = pids_of("instance-1", running)
        [rank] = [pid for pid in processes if "instance-1-rank-1" in command(pid)]
        os.kill(rank, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(
                running.client.post, "/admin/weights", json={"path": str(other_folder)}
            )
            # The loads of both were begun at the same time.
            eventually(lambda: versions(running, "instance-0") != before, wanted=True)
            kill_all(processes)
            answer = call.result(SOON_S)

        said = answer.json()
        assert answer.status_code == 503
        assert said["instances"] == ["instance-0"]
        assert said["failed"]["instance-1"].endswith("loads the weights before its next request")
        eventually(lambda: versions(running), dict.fromkeys(NAMES, said["weights_version"]))
        eventually(
            lambda: running.client.get("/health").json()["instances"], dict.fromkeys(NAMES, True)
        )
        for number in range(6):
            found = reported(running, STORY, logprobs=5)
            require_same(found, wanted)
            assert number or not cached(found)
        assert old[0]["choices"] != found["choices"]
        again = running.client.post("/admin/weights", json={"path": str(other_folder)})
        assert (again.status_code, sorted(again.json()["instances"])) == (200, sorted(NAMES))


def versions(running: Running, instance: str = "") -> dict[str, str]:
    given = {"instance": instance} if instance else {}
    instances = running.client.get("/cache", params=given).json()["instances"]
    return {each["instance"]: each["weights_version"] for each in instances}
