"""Prompts that travel between two machines over NIXL, while any party is killed or stopped.

The machines are namespaces, joined by a cable; what is not KV goes over TCP, with keys.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lab.fixtures.handoff_pair import Shape
from penstock.transport.machine_keys import MachineKeys
from tests.machines.machines import ROOT, RUNTIME, Network, why_no_machines
from tests.relay.fleet import ENGINES, Fleet, disturb, draw_acts
from tests.relay.party_process import PROGRAM, PartyOrders
from tests.relay.relays import needs_nixl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.machines.machines import Machine

pytestmark = [needs_nixl]
PORT = 5200
SMALL = Shape(prefill_ranks=1, decode_ranks=1, channels=128)
WIDE = Shape(prefill_ranks=2, decode_ranks=2, channels=128)


class MachinesPlace:
    """The prefill engine on one machine, the decode engine on another."""

    def __init__(self, machines: dict[str, Machine], shape: Shape, folder: Path) -> None:
        self.machines = machines
        self._folder = folder
        keys = {engine: MachineKeys.new() for engine in ENGINES}
        for engine, own in keys.items():
            for each, machine in machines.items():
                own = own.with_peer(machine.host, keys[each].public)  # noqa: PLW2901
            own.write(folder / f"{engine}.keys")
        hosts = {engine: f"tcp://{machine.host}" for engine, machine in machines.items()}
        self._schedulers = {engine: f"{host}:{PORT}" for engine, host in hosts.items()}
        self._ranks = tuple(
            f"{hosts['prefill']}:{PORT + 1 + rank}" for rank in range(shape.prefill_ranks)
        )

    def start(self, name: str, shape: Shape, log: Any) -> subprocess.Popen[Any]:
        engine = name.partition("/")[0]
        orders = PartyOrders(
            name=name,
            shape=shape,
            ranks=self._ranks,
            keys=str(self._folder / f"{engine}.keys"),
            **self._schedulers,
        )
        return self.machines[engine].start(
            [sys.executable, "-c", PROGRAM, msgspec.json.encode(orders).decode()],
            folder=str(ROOT),
            env={**os.environ, "XDG_RUNTIME_DIR": RUNTIME, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )


@pytest.fixture(name="network")
def make_network() -> Iterator[Network]:
    if why := why_no_machines():
        pytest.skip(why)
    with Network() as network:
        yield network


@pytest.fixture(name="fleet")
def make_fleet(request: pytest.FixtureRequest, network: Network, tmp_path: Path) -> Iterator[Fleet]:
    shape = getattr(request, "param", SMALL)
    machines = {engine: network.machine(engine) for engine in ENGINES}
    fleet = Fleet(MachinesPlace(machines, shape, tmp_path), shape, tmp_path)
    yield fleet
    fleet.close()


def test_prompts_travel_between_machines_and_a_cut_cable_costs_time_alone(
    network: Network, fleet: Fleet
) -> None:
    prefill, _ = network.machines
    fleet.deliver()

    prefill.cut()
    lost = fleet.begin()
    fleet.until(lambda: "decode" not in lost.open, "decode gives the prompt up")
    prefill.heal()
    fleet.until(lambda: not fleet.prompts, "prefill learns it")
    fleet.deliver()

    assert not lost.delivered
    assert lost.whys


def test_parties_that_are_killed_or_stopped_cost_no_wrong_prompt(fleet: Fleet) -> None:
    disturb(fleet, draw_acts(fleet, seed=1, kills=3, stops=1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("fleet", "seed"),
    [(WIDE if seed % 2 else SMALL, seed) for seed in range(10)],
    indirect=["fleet"],
    ids=[f"seed{seed}" for seed in range(10)],
)
def test_three_hundred_kills_and_a_hundred_stops_cost_no_wrong_prompt(
    fleet: Fleet, seed: int
) -> None:
    disturb(fleet, draw_acts(fleet, seed=seed, kills=30, stops=10))
