"""One model whose ranks are on two machines: the same answers, whatever is cut or killed."""

from __future__ import annotations

import select
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.machines.conftest import HTTP_PORT, SIZES, Client, line_of
from tests.serve.conftest import SOON_S

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.machines.conftest import Reference, Site
    from tests.machines.machines import Machine

RANKS_PORT = 7300
PROMPTS = [f"Number {each}: half of the model is here, and half is there." for each in range(4)]


@dataclass
class Split:
    """A server with one rank of its model, and a machine with the other."""

    site: Site
    here: Machine
    there: Machine
    client: Client
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"tcp://{self.here.host}:{RANKS_PORT}"

    def serve(self) -> None:
        """Starts the server with rank 0."""
        web = ("--host", self.here.host, "--port", str(HTTP_PORT), "--drain-s", "1")
        ranks = ("--tp", "2", "--ranks-at", self.address, "--ranks-here", "0")
        self.processes["serve"] = self.site.serve(self.here, *ranks, *web, *SIZES)

    def join(self, *more: str) -> None:
        """Starts rank 1."""
        ranks = ("--role", "rank", "--tp", "2", "--ranks-at", self.address, "--ranks-here", "1")
        self.processes["rank"] = self.site.serve(self.there, *ranks, *SIZES, *more)

    def wait(self) -> None:
        joined = f"penstock: ready: rank 1 of instance-0 has joined {self.address}"
        line_of(self.processes["rank"], joined)
        self.client.wait_for("instance-0")

    def require_right(self, right: Reference) -> None:
        assert [self.client.text(prompt, cache="off") for prompt in PROMPTS] == [
            right.text(prompt) for prompt in PROMPTS
        ]


@pytest.fixture(scope="module")
def split(site: Site) -> Iterator[Split]:
    here, there = site.add("here"), site.add("there")
    found = Split(site, here, there, Client(here, f"http://{here.host}:{HTTP_PORT}"))
    found.serve()
    found.join()
    line_of(found.processes["serve"], f"penstock: ready: small-model at http://{here.host}")
    found.wait()
    yield found
    found.client.close()


def test_ranks_on_two_machines_answer_as_one_engine_does(split: Split, right: Reference) -> None:
    split.require_right(right)

    [reported] = split.client.get("/cache").json()["instances"]
    assert reported["health"]["ok"], reported


def test_what_was_saved_on_both_machines_is_loaded_again(split: Split, right: Reference) -> None:
    # More prompts than the device has blocks: those of the first go to host memory.
    first, *others = [f"{each} and once more: " + PROMPTS[0] * 8 for each in range(6)]
    found = [split.client.text(prompt) for prompt in (first, *others)]

    again = split.client.complete(first).json()

    assert again["choices"][0]["text"] == found[0] == right.text(first)
    assert again["usage"]["cached_by_tier"]["host"] > 0


@pytest.mark.long
def test_a_cut_between_ranks_ends_the_request_in_time_and_the_instance_comes_back(
    split: Split, right: Reference
) -> None:
    split.there.cut()
    began = time.monotonic()
    answer = split.client.complete(PROMPTS[0], cache="off")
    took_s = time.monotonic() - began
    split.there.heal()
    split.wait()

    assert answer.status_code == 503, answer.text
    assert took_s < SOON_S
    split.require_right(right)


@pytest.mark.long
def test_a_killed_rank_command_is_replaced_by_the_next(split: Split, right: Reference) -> None:
    split.processes["rank"].kill()
    split.join()
    split.wait()

    split.require_right(right)


@pytest.mark.long
def test_ranks_wait_for_the_next_server(split: Split, right: Reference) -> None:
    split.processes["serve"].send_signal(signal.SIGTERM)
    assert split.processes["serve"].wait(SOON_S) == 0
    split.serve()
    line_of(split.processes["serve"], "penstock: ready: ")
    split.wait()

    split.require_right(right)


def test_a_rank_with_other_settings_is_refused_with_the_reason(split: Split) -> None:
    split.processes["rank"].kill()
    split.join("--dtype", "bfloat16")
    deadline = time.monotonic() + SOON_S
    problem = "engine.dtype is 'bfloat16' at rank 1, must be 'float32' as here"

    while problem not in split.site.log(split.there):
        assert time.monotonic() < deadline, split.site.log(split.there)
        select.select([], [], [], 0.1)

    assert problem in split.site.log(split.here)
