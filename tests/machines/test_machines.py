"""The machines that the other tests use: separate, and gone with the process that made them."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.machines.machines import RUNTIME, SOON_S, Network, why_no_machines

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT = 5000
MEGABYTE = 1 << 20


@pytest.fixture
def network() -> Iterator[Network]:
    why = why_no_machines()
    if why:
        pytest.skip(why)
    with Network() as network:
        yield network


def listen(host: str) -> socket.socket:
    return socket.create_server((host, PORT))


def send(writer: socket.socket) -> None:
    writer.sendall(bytes(MEGABYTE // 2))
    writer.shutdown(socket.SHUT_WR)


def reaches(host: str, timeout_s: float) -> bool:
    try:
        socket.create_connection((host, PORT), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def test_a_cable_that_was_cut_and_put_back_carries_again(network: Network) -> None:
    first, second = network.machine("first"), network.machine("second")
    with second.call(listen, second.host):
        before = first.call(reaches, second.host, SOON_S)
        second.cut()
        meanwhile = first.call(reaches, second.host, 0.5)
        second.heal()
        afterwards = first.call(reaches, second.host, SOON_S)

    assert (before, meanwhile, afterwards) == (True, False, True)
    assert "cable1" not in {name for _, name in socket.if_nameindex()}


def test_a_slow_cable_takes_its_time(network: Network) -> None:
    first, second = network.machine("first"), network.machine("second")
    second.limit(mbit=8)
    with (
        second.call(listen, second.host) as server,
        first.call(socket.create_connection, (second.host, PORT)) as writer,
    ):
        reader, _ = server.accept()
        began = time.monotonic()
        with reader:
            threading.Thread(target=send, args=(writer,)).start()
            while reader.recv(MEGABYTE):
                pass
        took_s = time.monotonic() - began

    # Half a MiB at 1 MB/s, less what may be sent at once.
    assert took_s > 0.3


def test_machines_have_neither_files_nor_an_identity_in_common(network: Network) -> None:
    script = f"cat /proc/sys/kernel/random/boot_id; touch {RUNTIME}/here; ls {RUNTIME} /dev/shm"
    found = [
        network.machine(name).start(["sh", "-c", script], stdout=subprocess.PIPE).communicate()[0]
        for name in ("first", "second")
    ]

    ids = {Path("/proc/sys/kernel/random/boot_id").read_text()}
    ids |= {text.splitlines(keepends=True)[0] for text in found}
    assert len(ids) == 3
    assert not Path(RUNTIME, "here").exists()


def test_a_killed_machine_has_no_process_left(network: Network) -> None:
    machine = network.machine("first")
    process = machine.start(["sh", "-c", "sleep 1000 & echo $$; wait"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    inside = int(process.stdout.readline())

    machine.kill()

    assert process.wait(SOON_S) == -9
    assert inside != process.pid, "the machine has pids of its own"
    process.stdout.close()


PROGRAM = """
import subprocess, sys
from tests.machines.machines import Network
with Network() as network:
    machine = network.machine("first")
    process = machine.start(["sleep", "1000"])
    print(machine.pid, process.pid, flush=True)
    sys.stdin.read()
"""


def test_machines_end_with_the_process_that_made_them(network: Network) -> None:
    assert network.machines == []
    maker = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert maker.stdout is not None
    pids = [int(word) for word in maker.stdout.readline().split()]
    ends = [os.pidfd_open(pid) for pid in pids]

    maker.kill()
    maker.communicate(timeout=SOON_S)

    assert len(ends) == 2
    for end in ends:
        # A descriptor of a process is readable once it has ended.
        assert _ended(end), f"one of {pids} is still there"
        os.close(end)


def _ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], SOON_S)[0])
