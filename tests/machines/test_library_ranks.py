"""One cache with ranks on other machines, as a library: killed, cut off, and brought back."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.machines.conftest import line_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.machines.conftest import Site
    from tests.machines.machines import Machine

PORT = 7300
LOST_S = 300.0
"""A silent rank is lost after 6.2 s; the rest is for a busy computer."""


class Owner:
    """The process with the cache, and its ranks on machines of their own."""

    def __init__(self, site: Site) -> None:
        self.site = site
        here, *self.machines = (site.add(name) for name in ("owner", "first", "second"))
        self.address = f"tcp://{here.host}:{PORT}"
        self.process = self._start(here, "owner")
        self.ranks = [self.start_rank(rank) for rank in range(2)]
        line_of(self.process, "met")

    def _start(self, machine: Machine, role: str, *more: str) -> subprocess.Popen[str]:
        return machine.python(
            "tests.machines.ranks_program",
            *(role, self.address, str(self.site.keys(machine)), *more),
            folder=self.site.home(machine),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start_rank(self, rank: int) -> subprocess.Popen[str]:
        return self._start(self.machines[rank], "rank", str(rank))

    def tell(self, word: str, answer: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return line_of(self.process, answer).strip()

    def close(self) -> None:
        for process in (self.process, *self.ranks):
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def owner(site: Site) -> Iterator[Owner]:
    found = Owner(site)
    yield found
    found.close()


def test_ranks_on_two_machines_save_and_load(owner: Owner) -> None:
    assert owner.tell("save", "saved") == "saved done"
    assert owner.tell("load", "loaded") == "loaded done"
    assert owner.tell("health", "health") == "health"


def test_a_rank_that_is_cut_off_fails_its_operations_and_comes_back(owner: Owner) -> None:
    owner.machines[1].cut()
    began = time.monotonic()
    owner.tell("begin", "began")
    ended = owner.tell("end", "ended")
    took_s = time.monotonic() - began
    lost = owner.tell("health", "health")
    owner.machines[1].heal()
    rejoined = owner.tell("rejoin", "rejoined")

    assert ended.split()[1] == "failed"
    assert took_s < LOST_S
    assert "rank 1 is lost" in lost
    assert rejoined == "rejoined 1"
    assert owner.tell("save", "saved") == "saved done"
    assert owner.tell("load", "loaded") == "loaded done"
    assert owner.tell("health", "health") == "health"


@pytest.mark.long
def test_a_slow_cable_only_takes_longer(owner: Owner) -> None:
    owner.machines[0].limit(mbit=1)

    saved, loaded = owner.tell("save", "saved"), owner.tell("load", "loaded")
    owner.machines[0].limit(mbit=1000)

    assert (saved, loaded) == ("saved done", "loaded done")
    assert owner.tell("health", "health") == "health"


def test_a_killed_rank_is_replaced_and_both_have_the_right_bytes(owner: Owner) -> None:
    owner.ranks[0].kill()
    owner.ranks[0].communicate()
    owner.ranks[0] = owner.start_rank(0)

    assert owner.tell("rejoin", "rejoined") == "rejoined 0"
    assert owner.tell("save", "saved") == "saved done"
    assert owner.tell("load", "loaded") == "loaded done"
    assert owner.tell("close", "closed") == "closed True"
    assert line_of(owner.ranks[0], "ended").startswith("ended True")
