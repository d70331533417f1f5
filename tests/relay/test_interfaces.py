"""A relay listens on the interface of its engine's address, and nowhere else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial

import pytest

from penstock.errors import UnavailableError
from penstock.relay.process import (
    DEVICES,
    addresses_of_this_machine,
    hold_relay,
    ucx_environment,
)
from penstock.relay.sides import NixlTarget, NixlWriter
from penstock.transport.remote import HandoffAddresses, WriteDone
from tests.machines.machines import ROOT, RUNTIME, Network, why_no_machines
from tests.relay.relays import apart, listening, needs_nixl, open_ready, pid_of, settle

LIMIT_S = 300.0
HOST_6 = "fd00:77::1"

PROGRAM = """
import json, sys
from tests.relay.test_interfaces import where_relays_listen
print(json.dumps(where_relays_listen(sys.argv[1:])), flush=True)
"""


def addresses(*own: str, peers: tuple[str, ...] = ()) -> HandoffAddresses:
    return HandoffAddresses(own=own, peers=peers)


def where_relays_listen(hosts: list[str]) -> dict[str, list[tuple[str, int]]]:
    """Sends something between two relays at each host; returns where these listened."""
    found = {}
    for host in hosts:
        place = addresses(f"tcp://{host}:5200")
        target = apart(partial(NixlTarget, addresses=place))
        writer = apart(partial(NixlWriter, addresses=place))
        area = open_ready(target, 1 << 16)
        link = writer.connect(area.description)
        link.window(0, 4)[:] = 9
        link.post((), b"part", packed=[(0, 4)])
        assert settle(link) == [WriteDone(0)]
        found[host] = sorted(listening(pid_of(target.relay)) | listening(pid_of(writer.relay)))
        writer.close()
        target.close()
    return found


@needs_nixl
def test_a_relay_of_a_loopback_address_listens_there_and_other_addresses_refuse() -> None:
    target = NixlTarget(addresses=addresses("tcp://127.0.0.1:5200"))
    try:
        open_ready(target, 1 << 16)
        ((host, port),) = listening(pid_of(target.relay))

        assert host == "127.0.0.1"
        socket.create_connection((host, port), timeout=LIMIT_S).close()
        # All of 127.0.0.0/8 is this machine.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=LIMIT_S)
    finally:
        target.close()


@needs_nixl
def test_a_relay_listens_on_the_interface_of_its_address_alone() -> None:
    if why := why_no_machines():
        pytest.skip(why)
    with Network() as network:
        machine = network.machine("first")
        machine.ip(f"addr add {HOST_6}/64 dev eth0 nodad")
        process = machine.start(
            [sys.executable, "-c", PROGRAM, machine.host, f"[{HOST_6}]"],
            folder=str(ROOT),
            env={**os.environ, "XDG_RUNTIME_DIR": RUNTIME},
            stdout=subprocess.PIPE,
        )
        out, _ = process.communicate(timeout=LIMIT_S)
        listened = json.loads(out)

    for host, found in listened.items():
        assert {each for each, _ in found} == {host.strip("[]")}


@needs_nixl
def test_targets_at_one_interface_share_a_relay() -> None:
    first = hold_relay(addresses("tcp://127.0.0.1:1"))
    second = hold_relay(addresses("ipc:///somewhere"))
    first.release()
    second.release()

    assert first is second


@pytest.mark.parametrize(
    ("own", "peers"),
    [
        ((), ()),
        (("ipc:///run/a",), ("ipc:///run/b",)),
        (("tcp://127.0.0.1:1",), ("tcp://localhost:2",)),
        (("tcp://[::1]:1",), ()),
    ],
)
def test_engines_of_one_machine_use_loopback(
    own: tuple[str, ...], peers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DEVICES, raising=False)

    assert dict(ucx_environment(addresses(*own, peers=peers)))[DEVICES] == "lo"


def test_an_address_names_its_interface_for_who_listens_there_and_for_who_dials_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(DEVICES, raising=False)
    for host, name in addresses_of_this_machine():
        if host.startswith(("fe80:", "127.", "::1")):
            continue  # The first kind needs its interface beside it; the others are above.
        address = f"tcp://[{host}]:1" if ":" in host else f"tcp://{host}:1"

        for place in (addresses(address), addresses("tcp://127.0.0.1:1", peers=(address,))):
            found = dict(ucx_environment(place))
            assert found[DEVICES].split(",")[0] == name
            assert ("UCX_TCP_AF_PRIO" in found) == (":" in host)


def test_an_operator_chooses_and_an_engine_that_listens_everywhere_has_all_interfaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(DEVICES, raising=False)
    assert ucx_environment(addresses("tcp://0.0.0.0:1")) == ()

    monkeypatch.setenv(DEVICES, "ib0")
    assert ucx_environment(addresses("tcp://127.0.0.1:1")) == ()


def test_an_address_of_no_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICES, raising=False)

    with pytest.raises(UnavailableError, match="is no address of this machine, which has "):
        ucx_environment(addresses("tcp://no-such-host.invalid:1"))
