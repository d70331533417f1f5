"""What the tests of NIXL need of the machine, and what they do with targets and writers."""

from __future__ import annotations

import os
import select
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from penstock.relay import process
from penstock.relay.agents import is_installed
from penstock.relay.sides import NixlTarget, NixlWriter
from penstock.transport.remote import Fenced
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.relay.process import RelayProcess
    from penstock.relay.sides import NixlArea, NixlLink
    from penstock.transport.remote import WriteEnd

needs_nixl = pytest.mark.skipif(
    not is_installed(), reason="NIXL is not installed: pip install --no-deps nixl-cu12"
)
Side = TypeVar("Side", NixlTarget, NixlWriter)
WAIT_S = 60.0
"""A busy machine may be late; it takes this long only if something failed."""
LOOK_S = 0.02


def apart(make: Callable[[], Side]) -> Side:
    """A target or a writer that shares its relay with no other one of this process."""
    made = make()
    process._held.clear()
    return made


def until(condition: Callable[[], bool], descriptor: int, why: str) -> None:
    """Waits for something that a descriptor may show."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, why
        wait_readable(descriptor, time.monotonic() + LOOK_S)


def pause(seconds: float) -> None:
    """Lets other processes go on for a while."""
    select.select([], [], [], seconds)


def open_ready(target: NixlTarget, size: int, peer: str = "rank 0") -> NixlArea:
    """An area that can be connected to, full of zeros."""
    area = target.open_area(peer, size)

    def is_ready() -> bool:
        target.notices()
        assert not area.failure, area.failure
        return area.ready

    until(is_ready, target.descriptor, "the area is not ready")
    area.memory[:] = 0
    return area


def await_fence(target: NixlTarget, area: NixlArea) -> None:
    """Waits for the fence of a retired area."""

    def holds() -> bool:
        target.notices()
        return target.fence(area) == Fenced()

    until(holds, target.descriptor, "the fence does not hold")


def settle(link: NixlLink) -> list[WriteEnd]:
    """Waits until all writes of a link have ended; returns how."""
    ended: list[WriteEnd] = []

    def is_idle() -> bool:
        ended.extend(link.observe(budget_bytes=1 << 40)[0])
        return not link.busy

    until(is_idle, link.descriptor or 0, "the writes do not end")
    return ended


def pid_of(relay: RelayProcess, *, after: int | None = None) -> int:
    """The process of a relay that runs; `after` is one that was killed."""

    def runs() -> bool:
        relay.poll()
        return relay.pid not in {None, after}

    until(runs, relay.descriptor, "there is no relay")
    pid = relay.pid
    assert pid is not None
    return pid


def listening(pid: int) -> set[tuple[str, int]]:
    """Where the TCP sockets of a process listen: address and port."""
    own = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                host, port = row[1].split(":")
                # The kernel prints each four bytes as a number of this machine.
                words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
                packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
                found.add((str(ip_address(packed)), int(port, 16)))
    return found


def received_bytes(pid: int) -> int:
    """Bytes that wait in the kernel for the TCP sockets of a process."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        own.add(os.readlink(entry))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    queues = [row[4].split(":")[1] for row in rows if f"socket:[{row[9]}]" in own]
    return sum(int(queue, 16) for queue in queues)
