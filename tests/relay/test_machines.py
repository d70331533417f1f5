"""Prompts that travel between two machines over NIXL: namespaces, joined by a cable."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from penstock.testing.peer_process import PeerProcess
from penstock.transport.machine_keys import MachineKeys
from tests.machines.machines import Network, why_no_machines
from tests.relay.engine_process import PROGRAM, TIMEOUT_S
from tests.relay.engines import ROLES, Engines, disturb
from tests.relay.relays import needs_nixl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.machines.machines import Machine

pytestmark = [needs_nixl]
PORT = 5200


class MachinePeer(PeerProcess):
    """A process of one of the machines."""

    def __init__(self, machine: Machine, arguments: list[str], folder: Path) -> None:
        self._process = machine.start(
            [sys.executable, "-c", PROGRAM, *arguments],
            folder=str(folder),
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.buffer, self._process.stdout.buffer
        self._said = b""


class MachineEngines(Engines):
    """The prefill engine on one machine, the decode engine on another."""

    def __init__(self, machines: dict[str, Machine], folder: Path) -> None:
        self.machines = machines
        self._folder = folder
        keys = {role: MachineKeys.new() for role in ROLES}
        for role in ROLES:
            own = keys[role]
            for each, machine in machines.items():
                own = own.with_peer(machine.host, keys[each].public)
            own.write(folder / f"{role}.keys")
        prefill, decode = (f"tcp://{machines[role].host}" for role in ROLES)
        self._addresses = [f"{prefill}:{PORT}", f"{decode}:{PORT}", f"{prefill}:{PORT + 1}"]
        super().__init__()

    def start(self, role: str) -> PeerProcess:
        keys = str(self._folder / f"{role}.keys")
        return MachinePeer(self.machines[role], [role, *self._addresses, keys], self._folder)


@pytest.fixture(name="engines")
def make_engines(tmp_path: Path) -> Iterator[MachineEngines]:
    if why := why_no_machines():
        pytest.skip(why)
    with Network() as network:
        engines = MachineEngines({role: network.machine(role) for role in ROLES}, tmp_path)
        yield engines
        engines.close()


def test_prompts_travel_between_machines_and_a_cut_cable_costs_time_alone(
    engines: MachineEngines,
) -> None:
    engines.deliver()

    engines.machines["prefill"].cut()
    began = time.monotonic()
    lost = engines.result("decode", engines.begin())
    took = time.monotonic() - began
    engines.machines["prefill"].heal()
    engines.deliver()

    assert not lost["delivered"]
    assert took < 2 * TIMEOUT_S


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_kills_and_stops_between_machines_cost_no_wrong_prompt(
    engines: MachineEngines, seed: int
) -> None:
    disturb(engines, kills=30, stops=10, seed=seed)
