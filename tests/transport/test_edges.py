"""Edges of the transports: budgets, seals, descriptors, and deadlines that make nobody spin."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.channel_suite import receive_frame, send_until_full, soon
from lab.fixtures.inproc import InprocFabric
from penstock.errors import UnavailableError
from penstock.testing.writer_process import peer_process
from penstock.transport.base import BacklogError, Empty
from penstock.transport.remote import Fenced, Span, WriteDone
from penstock.transport.shared_memory import SharedTarget, _map, connect_shared
from penstock.transport.waiting import wait_readable
from penstock.transport.zeromq import IPC, ChannelSettings, Listener, dial
from penstock.transport.zmq_link import RefusalReason
from tests.descriptors import open_descriptors
from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.transport.zmq_channel import ZmqChannel

PATIENT = ChannelSettings(
    window_frames=4, heartbeat_s=0.05, silence_s=600.0, settle_s=300.0, open_s=60.0
)

# A writer that takes its memory and stays until it is killed.
WRITER = """
import sys
from penstock.transport.shared_memory import connect_shared

link = connect_shared(bytes.fromhex(sys.argv[1]))
print("connected", flush=True)
sys.stdin.read()
"""

# A peer that opens a channel and stays until it is killed.
PEER = """
import sys
from lab.fixtures.channel_suite import soon
from penstock.transport.zeromq import ChannelSettings, connect

settings = ChannelSettings(heartbeat_s=0.1, silence_s=600.0, open_s=60.0)
channel = connect(sys.argv[1], name="rank 0", deadline=soon(), settings=settings)
sys.stdin.read()
"""


# ------------------------------------------------------------------ ports


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_a_listener_takes_its_ports_from_a_range_and_gives_them_back() -> None:
    [first] = free_ports(1)
    ports = range(first, first + 3)
    settings = ChannelSettings(ports=ports)
    with Listener("engine", "tcp://127.0.0.1:*", settings=settings) as listener:
        assert port_of(listener.address) == first
        for number in range(2):
            rank, channel = met(listener, f"rank {number}")
            rank.send(b"hello")
            assert receive_frame(channel) == b"hello"
            assert listening_ports() & {*ports} == {*ports}
            rank.close()
            channel.close()
            wait_until(lambda: listening_ports() & {*ports} == {first})


def test_a_peer_that_finds_all_ports_in_use_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    [first] = free_ports(1)
    settings = ChannelSettings(ports=range(first, first + 4))
    cause = (
        f"cannot listen on tcp://127.0.0.1: all of the ports {first}-{first + 3} are in use; each "
        "connection takes two"
    )
    with Listener("engine", "tcp://127.0.0.1:*", settings=settings) as listener:
        first_pair = met(listener, "rank 0")
        other = dial(listener.address, name="rank 1", settings=PATIENT)

        while other.failure is None:
            assert listener.accept(deadline=time.monotonic() + 0.01) is None
            other.receive(deadline=time.monotonic() + 0.01)

        assert cause in (other.failure or "")
        assert f"peer refused: name=rank 1 at=engine cause={cause}" in caplog.messages
        assert listener.refused == {RefusalReason.NO_PORT: 1}
        # Nothing of the refused one is left: the next one finds the ports of the first.
        for channel in (*first_pair, other):
            channel.close()
        wait_until(lambda: listening_ports() & {first + 1, first + 2, first + 3} == set())
        for channel in met(listener, "rank 1"):
            channel.close()


def test_a_listener_without_a_free_port_says_which_it_may_use() -> None:
    [first] = free_ports(1)
    settings = ChannelSettings(ports=range(first, first + 1))
    with (
        Listener("engine", "tcp://127.0.0.1:*", settings=settings),
        pytest.raises(UnavailableError, match=f"all of the ports {first}-{first} are in use"),
    ):
        Listener("another", "tcp://127.0.0.1:*", settings=settings)


def met(listener: Listener, name: str) -> tuple[ZmqChannel, ZmqChannel]:
    """A peer that dials, and its channel at the listener."""
    near, far, deadline = dial(listener.address, name=name), None, soon()
    while far is None:
        assert time.monotonic() < deadline
        near.wait_open(deadline=time.monotonic() + 0.01)
        far = listener.accept(deadline=time.monotonic() + 0.01)
    assert near.wait_open(deadline=soon())
    return near, far


def listening_ports() -> set[int]:
    """The ports of this machine at which somebody listens."""
    rows = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    words = (row.split() for row in rows)
    return {int(each[1].rpartition(":")[2], 16) for each in words if each[3] == "0A"}


def wait_until(done: Callable[[], bool]) -> None:
    """ZeroMQ closes sockets in a thread of its own."""
    deadline = soon()
    while not done():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.01)


# ------------------------------------------------------------------ remote writes


def test_a_writer_without_a_budget_moves_a_piece_and_not_a_byte() -> None:
    fabric = InprocFabric()
    target = fabric.target()
    area = target.open_area("writer", 1000)
    link = fabric.connect(area.description)
    number = link.post([Span(np.full(1000, 7, dtype=np.uint8), 0)], b"there")

    ends, spent = link.observe(budget_bytes=0)

    assert (ends, spent) == ([WriteDone(number)], 1000)


def memory_of(size: int, *, sealed: bool) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


@pytest.mark.parametrize(("size", "sealed"), [(8192, False), (4096, True)])
def test_memory_that_could_shrink_or_is_too_small_is_not_mapped(size: int, *, sealed: bool) -> None:
    """Touching pages that are not there any more would kill the writer."""
    fd = memory_of(size, sealed=sealed)

    with pytest.raises(ValueError, match="not sealed, or has less than 8192 bytes"):
        _map(fd, 8192)

    os.close(fd)


def test_sealed_memory_of_the_right_size_is_mapped() -> None:
    fd = memory_of(8192, sealed=True)

    mapped = _map(fd, 8192)

    assert len(mapped) == 8192
    os.close(fd)


def test_a_freed_area_keeps_no_descriptor_of_its_writer() -> None:
    """The target lives on, and has many writers in its life."""
    target = SharedTarget(huge_pages=False)

    def life_of_a_writer() -> None:
        area = target.open_area("writer", 1 << 16)
        with peer_process(WRITER, area.description.hex()) as peer:
            assert peer.hear() == "connected"
            while area.connection is None:
                assert wait_readable(target.descriptor, soon())
                target.notices()
            target.retire(area)
            pidfd = target.fence_descriptor(area)
            assert pidfd is not None
            peer.kill()
            assert wait_readable(pidfd, soon())
        assert target.fence(area) == Fenced()
        target.free(area)

    life_of_a_writer()
    before = open_descriptors()
    life_of_a_writer()

    assert open_descriptors() <= before
    target.close()


def test_a_closed_link_says_that_it_was_closed() -> None:
    target = SharedTarget(huge_pages=False)
    link = connect_shared(target.open_area("writer", 1000).description)
    link.close()

    with pytest.raises(UnavailableError, match="it was closed"):
        link.window(0, 10)

    target.close()


# ------------------------------------------------------------------ channels


@pytest.fixture(name="channels")
def open_channels() -> Iterator[tuple[ZmqChannel, ZmqChannel]]:
    """Both ends of a channel, in this process."""
    with Listener("engine", IPC, settings=PATIENT) as listener:
        near = dial(listener.address, name="rank 0", settings=PATIENT)
        far = None
        while far is None:
            near.wait_open(deadline=time.monotonic() + 0.01)
            far = listener.accept(deadline=time.monotonic() + 0.01)
        assert near.wait_open(deadline=soon())
        yield near, far
        near.close()
        far.close()


def send_when_there_is_room(channel: ZmqChannel, frame: bytes) -> None:
    """What is readable first may be another event: the credit comes behind it."""
    deadline = soon()
    while time.monotonic() < deadline and wait_readable(channel.descriptor, deadline):
        with suppress(BacklogError):
            channel.send(frame)
            return


def test_a_full_channel_looks_for_credit_before_it_refuses_a_frame(
    channels: tuple[ZmqChannel, ZmqChannel],
) -> None:
    near, far = channels
    for _ in range(send_until_full(near, b"x")):
        receive_frame(far)

    send_when_there_is_room(near, b"there is room again")

    assert receive_frame(far) == b"there is room again"


def test_credit_that_comes_while_a_frame_is_refused_wakes_up_who_waits_for_it(
    channels: tuple[ZmqChannel, ZmqChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = channels
    look = near._pump
    looks = iter([lambda: None])

    def look_too_early_once() -> None:
        next(looks, look)()

    for _ in range(send_until_full(near, b"x")):
        receive_frame(far)
    assert wait_readable(near.descriptor, soon())
    monkeypatch.setattr(near, "_pump", look_too_early_once)
    with pytest.raises(BacklogError):
        near.send(b"too early")

    assert wait_readable(near.descriptor, time.monotonic())
    send_when_there_is_room(near, b"there is room again")

    assert receive_frame(far) == b"there is room again"


def test_an_idle_channel_whose_peer_was_heard_waits_for_nothing(
    channels: tuple[ZmqChannel, ZmqChannel],
) -> None:
    near, far = channels
    deadline = soon()
    while near.alarm is not None and time.monotonic() < deadline:
        far.receive()
        assert near.receive(deadline=time.monotonic() + 0.01) == Empty()

    assert near.alarm is None


def test_a_channel_whose_pulse_is_lost_waits_for_a_time_that_is_to_come() -> None:
    """A time in the past would have everybody who waits spin until the channel is given up."""
    settings = ChannelSettings(heartbeat_s=0.1, silence_s=0.5, settle_s=3000.0, open_s=60.0)
    with (
        Listener("engine", IPC, settings=settings) as listener,
        peer_process(PEER, listener.address) as peer,
    ):
        channel = listener.accept(deadline=soon())
        assert channel is not None
        peer.stop()
        deadline = soon()
        while channel._lost_at is None and time.monotonic() < deadline:
            channel.receive(deadline=time.monotonic() + 0.05)

        alarm = channel.alarm

        assert alarm is not None
        assert alarm > time.monotonic() + 1000
        channel.close()


# Prints how large the kernel's table of its open files is when it listens.
LISTENING = """
import resource, sys
from penstock.transport.zeromq import Listener

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), most))
with Listener("engine"), open("/proc/self/status") as status:
    print(*(line.split()[1] for line in status if line.startswith("FDSize:")))
"""


@pytest.mark.parametrize(("limit", "room"), [(8192, 4096), (96, 96)])
def test_opening_a_channel_never_waits_for_the_table_of_open_files_to_grow(
    limit: int, room: int
) -> None:
    """It would wait until every core has been through the kernel's scheduler."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        limit, room = min(limit, most), min(room, most)
    command = [sys.executable, "-c", LISTENING, str(limit)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert int(told) >= room
