"""Dialling another machine: how often, and how soon after a cable was put back."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.machines.conftest import line_of
from tests.machines.machines import SOON_S
from tests.serve.conftest import eventually

if TYPE_CHECKING:
    from tests.machines.conftest import Site
    from tests.machines.machines import Machine

PORT = 7000
DIAL = """
import sys, time
from pathlib import Path
from penstock.transport.machine_keys import MachineKeys
from penstock.transport.zeromq import ChannelSettings, dial
address, file, seconds = sys.argv[1:]
channel = dial(address, name="dialler", secret=MachineKeys.read(Path(file)),
               settings=ChannelSettings(open_s=float(seconds)))
print("dialling", flush=True)
print(channel.wait_open(deadline=time.monotonic() + float(seconds)), channel.failure, flush=True)
"""
LISTEN = """
import sys, time
from pathlib import Path
from penstock.transport.machine_keys import MachineKeys
from penstock.transport.zeromq import Listener
address, file, seconds = sys.argv[1:]
with Listener("listener", address, secret=MachineKeys.read(Path(file))) as listener:
    print("listening", flush=True)
    channel = listener.accept(deadline=time.monotonic() + float(seconds))
    print(channel is not None, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def machines(site: Site) -> tuple[Machine, Machine]:
    return site.add("first"), site.add("second")


def start(site: Site, machine: Machine, program: str, *arguments: str) -> subprocess.Popen[str]:
    [address, seconds] = arguments
    return machine.start(
        [sys.executable, "-c", program, address, str(site.keys(machine)), seconds],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def counted(machine: Machine, name: str) -> int:
    """What the kernel of a machine has counted of its TCP connections."""
    with open(f"/proc/{machine.pid}/net/snmp") as file:
        names, values = (line.split() for line in file if line.startswith("Tcp:"))
    return int(values[names.index(name)])


def test_an_address_where_nobody_listens_is_tried_less_and_less_often(
    site: Site, machines: tuple[Machine, Machine]
) -> None:
    first, second = machines
    before = counted(first, "AttemptFails")

    dialler = start(site, first, DIAL, f"tcp://{second.host}:{PORT}", "4")
    said, _ = dialler.communicate(timeout=SOON_S)

    assert "False no answer" in said
    # At 0, 0.1, 0.3, 0.7, 1.5 and 3.1 s; ten times a second were 40.
    assert 3 <= counted(first, "AttemptFails") - before <= 10


def test_whoever_is_dialled_during_a_cut_is_dialled_anew_and_found_after_it(
    site: Site, machines: tuple[Machine, Machine]
) -> None:
    first, second = machines
    address = f"tcp://{second.host}:{PORT}"
    listener = start(site, second, LISTEN, address, "120")
    line_of(listener, "listening")

    second.cut()
    before = counted(first, "ActiveOpens")
    dialler = start(site, first, DIAL, address, "120")
    line_of(dialler, "dialling")
    # The kernel alone would open one connection, and try it again after 1, 3, 7 and 15 s, ever more
    # seldom: it learns nothing of the cable.
    eventually(lambda: counted(first, "ActiveOpens") >= before + 3, wanted=True)
    second.heal()

    line_of(dialler, "True")
    for process in (listener, dialler):
        process.communicate(timeout=SOON_S)
