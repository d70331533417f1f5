"""Prompts that travel between two processes over NIXL, while engines and relays die and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.testing.peer_process import PeerProcess
from penstock.transport.private_folder import private_folder, socket_path
from tests.relay.engine_process import PROGRAM
from tests.relay.engines import ROLES, Engines, disturb
from tests.relay.relays import needs_nixl

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_nixl


class LocalEngines(Engines):
    """Both on this machine, over its loopback interface."""

    def __init__(self) -> None:
        folder = private_folder()
        self._addresses = [f"ipc://{socket_path(folder)}" for _ in ROLES]
        super().__init__()

    def start(self, role: str) -> PeerProcess:
        return PeerProcess(PROGRAM, (role, *self._addresses), ())


@pytest.fixture(name="engines")
def make_engines() -> Iterator[Engines]:
    engines = LocalEngines()
    yield engines
    engines.close()


def test_prompts_travel_between_two_processes(engines: Engines) -> None:
    name = engines.begin()

    found = {role: engines.result(role, name) for role in ROLES}

    assert found["decode"] == {"name": name, "delivered": True, "right": True, "why": ""}
    assert found["prefill"]["delivered"]


def test_engines_and_relays_that_are_killed_or_stopped_cost_no_wrong_prompt(
    engines: Engines,
) -> None:
    disturb(engines, kills=11, stops=4, seed=1)
