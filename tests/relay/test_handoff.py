"""Prompts that travel between processes over NIXL, on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lab.fixtures.handoff_pair import Shape
from penstock.transport.unix_sockets import private_folder, socket_path
from tests.relay.fleet import Fleet, disturb, draw_acts
from tests.relay.party_process import PROGRAM, PartyOrders
from tests.relay.relays import needs_nixl

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_nixl
ROOT = Path(__file__).parents[2]


class LocalPlace:
    """This machine, over its loopback interface."""

    def __init__(self, shape: Shape) -> None:
        self._folder = private_folder()
        self._schedulers = {each: self._address() for each in ("prefill", "decode")}
        self._ranks = tuple(self._address() for _ in range(shape.prefill_ranks))

    def _address(self) -> str:
        return f"ipc://{socket_path(self._folder)}"

    def start(self, name: str, shape: Shape, log: Any) -> subprocess.Popen[Any]:
        orders = PartyOrders(name=name, shape=shape, ranks=self._ranks, **self._schedulers)
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, msgspec.json.encode(orders).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
        )


@pytest.fixture(name="fleet")
def make_fleet(tmp_path: Path) -> Iterator[Fleet]:
    shape = Shape(prefill_ranks=1, decode_ranks=1, channels=128)
    fleet = Fleet(LocalPlace(shape), shape, tmp_path)
    yield fleet
    fleet.close()


def test_prompts_travel_between_the_processes_of_two_engines(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.deliver()
    fleet.finish()

    assert fleet.outcomes["delivered"] >= 4
    assert fleet.checked == fleet.outcomes["delivered"]


@pytest.mark.long
def test_parties_that_are_killed_or_stopped_cost_no_wrong_prompt(fleet: Fleet) -> None:
    disturb(fleet, draw_acts(fleet, seed=1, kills=11, stops=4))
