"""Descriptors from rank 0 to the others, in processes and sockets for real."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from contextlib import closing

import pytest

from penstock.connectors.base.worker import ArenaServer, fetch_arenas
from penstock.errors import UnavailableError
from penstock.transport.unix_sockets import NamedFolder

PEER = """
import os, sys
from penstock.connectors.base.worker import fetch_arenas
arenas = fetch_arenas(sys.argv[1], timeout_s=300.0)
sys.stdout.write(os.pread(arenas["host"], 5, 0).decode())
"""


@pytest.fixture
def engine() -> str:
    return uuid.uuid4().hex


def test_every_rank_gets_the_memory_of_the_first(engine: str) -> None:
    memory = os.memfd_create("shared")
    os.write(memory, b"bytes")
    host = ArenaServer(engine, peers=2)
    command = [sys.executable, "-c", PEER, engine]
    peers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    host.hand_out({"host": memory}, timeout_s=300.0)

    assert [peer.communicate(timeout=300)[0] for peer in peers] == ["bytes", "bytes"]
    os.close(memory)


def test_nobody_waits_for_a_rank_that_does_not_come(engine: str) -> None:
    host = ArenaServer(engine, peers=1)

    with pytest.raises(UnavailableError, match="0 of 1 rank"):
        host.hand_out({}, timeout_s=0.01)
    with pytest.raises(UnavailableError, match="does not share"):
        fetch_arenas(engine, timeout_s=0.01)


def test_a_first_rank_that_stays_silent_is_not_waited_for(engine: str) -> None:
    with (
        closing(NamedFolder(f"arenas of {engine}")) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        listener.bind(bytes(folder.path / "arenas"))
        listener.listen(1)

        with pytest.raises(UnavailableError, match="does not share"):
            fetch_arenas(engine, timeout_s=0.05)


def test_two_engines_do_not_meet(engine: str) -> None:
    host = ArenaServer(engine, peers=1)

    with pytest.raises(UnavailableError, match="cannot meet"):
        ArenaServer(engine, peers=1)
    with pytest.raises(UnavailableError, match="0 of 1"):
        host.hand_out({}, timeout_s=0.01)
