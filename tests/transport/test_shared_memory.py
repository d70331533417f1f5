"""Shared memory between processes that stop, go on and die in the middle of a write."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UnavailableError
from penstock.testing.writer_process import drawn_bytes, peer_process
from penstock.transport import shared_memory
from penstock.transport.remote import (
    NOTICE_BYTES_MAX,
    SPARE_MAX,
    Fenced,
    NotYet,
    Span,
    WriteDone,
    WriteFailed,
)
from penstock.transport.shared_memory import (
    CALLERS_MAX,
    Description,
    SharedTarget,
    call,
    connect_shared,
    decode_description,
    encode_description,
)
from penstock.transport.waiting import wait_readable
from tests.descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.testing.writer_process import PeerProcess
    from penstock.transport.shared_memory import SharedArea, SharedLink

SIZE = 8 << 20

# The worst of writers: it takes the memory, and writes to all of it without end, whatever
# anybody says. Each round writes the same value everywhere.
SCRIBBLER = """
import mmap, socket, sys
import numpy as np
from penstock.transport.shared_memory import call, decode_description
from penstock.transport.waiting import wait_readable

description = decode_description(bytes.fromhex(sys.argv[1]))
connection = call(description)
wait_readable(connection.fileno(), 1e18)
_, fds, _, _ = socket.recv_fds(connection, 1, 1)
memory = np.frombuffer(mmap.mmap(fds[0], description.size), dtype=np.uint8)
print("writing", flush=True)
value = 0
while True:
    memory[:] = value
    value = (value + 1) % 64
"""

# A writer that has a child, which tries to write after its parent has died.
PARENT = """
import os, sys
import numpy as np
from penstock.transport.remote import Span
from penstock.transport.shared_memory import connect_shared
from penstock.transport.waiting import wait_readable

link = connect_shared(bytes.fromhex(sys.argv[1]))
wait_readable(link.descriptor, 1e18)
link.observe(budget_bytes=0)
link.post([Span(np.full(1000, 7, dtype=np.uint8), 0)], b"")
child = os.fork()
if child == 0:
    link.observe(budget_bytes=1000)
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), flush=True)
sys.stdin.read()
"""

TARGET = """
import sys
from penstock.transport.shared_memory import SharedTarget

target = SharedTarget()
area = target.open_area("rank 0", 1 << 20)
print(area.description.hex(), flush=True)
sys.stdin.readline()
target.notices()
print("given", flush=True)
sys.stdin.read()
"""


@pytest.fixture(name="target")
def make_target() -> Iterator[SharedTarget]:
    target = SharedTarget()
    yield target
    target.close()


def let_in(target: SharedTarget, peer: PeerProcess) -> None:
    """Gives a peer its memory as soon as it asks, and waits until it writes."""
    assert wait_readable(target.descriptor, time.monotonic() + 60)
    while not any(area.connection for area in target.open_areas):
        target.notices()
    assert peer.hear() == "writing"


def own_link(target: SharedTarget, area: SharedArea) -> SharedLink:
    """A link of this very process."""
    link = connect_shared(area.description)
    target.notices()
    link.observe(budget_bytes=0)
    assert link.connected
    return link


def counts(memory: np.ndarray) -> set[int]:
    return set(np.unique(memory).tolist())


@pytest.mark.parametrize("seed", range(3))
def test_memory_is_reused_only_after_a_stopped_writer_was_killed(
    target: SharedTarget, seed: int
) -> None:
    """It is stopped at a random moment, most likely within a copy."""
    chance = random.Random(seed)
    area = target.open_area("rank 0", SIZE)
    with peer_process(SCRIBBLER, area.description.hex()) as peer:
        let_in(target, peer)
        wait_readable(area.pidfd or -1, time.monotonic() + chance.uniform(0.0, 0.02))
        peer.stop()
        target.retire(area)

        stopped = target.fence(area)
        with pytest.raises(ValueError, match="cannot be freed: the process of 'rank 0' is alive"):
            target.free(area)
        peer.kill()
        dead = target.fence(area)
        target.free(area)
        again = target.open_area("rank 1", SIZE)
        again.memory[:] = 200

        assert stopped == NotYet("the process of 'rank 0' is alive")
        assert dead == Fenced()
        assert again.arena is area.arena
        assert counts(again.memory) == {200}


@pytest.mark.parametrize("seed", range(3))
def test_no_byte_of_memory_in_use_changes_when_a_stopped_writer_goes_on(
    target: SharedTarget, seed: int
) -> None:
    """It scribbles over the memory that was retired with it, which nobody else got."""
    chance = random.Random(seed)
    area = target.open_area("rank 0", SIZE)
    with peer_process(SCRIBBLER, area.description.hex()) as peer:
        let_in(target, peer)
        wait_readable(area.pidfd or -1, time.monotonic() + chance.uniform(0.0, 0.02))
        peer.stop()
        target.retire(area)
        if target.fence(area) == Fenced():  # It must not be; but who asks, believes it.
            target.free(area)
        others = [target.open_area(f"rank {number}", SIZE) for number in (1, 2)]
        for other in others:
            other.memory[:] = 200
        before = area.memory.copy()

        peer.resume()
        deadline = time.monotonic() + 60
        while (area.memory == before).all():
            assert time.monotonic() < deadline, "the writer did not go on"
        untouched = [counts(other.memory) for other in others]
        peer.kill()
        target.free(area)
        again = target.open_area("rank 3", SIZE)
        again.memory[:] = 201

        assert untouched == [{200}, {200}]
        assert [counts(other.memory) for other in others] == [{200}, {200}]
        assert counts(again.memory) == {201}


def test_a_fence_can_be_waited_for(target: SharedTarget) -> None:
    """The pidfd of the writer is a descriptor like any other."""
    area = target.open_area("rank 0", SIZE)
    with peer_process(SCRIBBLER, area.description.hex()) as peer:
        let_in(target, peer)
        target.retire(area)
        pidfd = target.fence_descriptor(area)
        assert pidfd is not None
        alive = wait_readable(pidfd, time.monotonic() + 0.01)

        os.kill(peer.pid, signal.SIGKILL)

        assert not alive
        assert wait_readable(pidfd, time.monotonic() + 60)
        assert target.fence(area) == Fenced()


def test_a_child_of_a_writer_cannot_write(target: SharedTarget) -> None:
    """Or the death of the writer would say nothing. The mapping is not there in the child."""
    area = target.open_area("rank 0", 1000)
    with peer_process(PARENT, area.description.hex()) as peer:
        assert wait_readable(target.descriptor, time.monotonic() + 60)
        while area.connection is None:
            target.notices()

        status_of_child = int(peer.hear())

        assert status_of_child == -signal.SIGSEGV
        assert not area.memory.any()


def test_a_writer_whose_target_was_killed_fails_its_writes() -> None:
    with peer_process(TARGET) as peer:
        link = connect_shared(bytes.fromhex(peer.hear()))
        peer.tell("")
        assert peer.hear() == "given"
        link.post([Span(drawn_bytes(1 << 20, 1), 0)], b"first")
        link.post([Span(drawn_bytes(1 << 20, 2), 0)], b"second")
        halfway, _ = link.observe(budget_bytes=1000)

        peer.kill()
        ends, _ = link.observe(budget_bytes=1 << 30)

        assert halfway == []
        assert ends == [WriteFailed(0, "rank 0 hung up"), WriteFailed(1, "rank 0 hung up")]
        assert not link.busy
        link.close()
        with pytest.raises(UnavailableError, match="closed"):
            link.post([], b"")


def test_a_target_that_is_gone_cannot_be_connected_to() -> None:
    target = SharedTarget()
    description = target.open_area("rank 0", 100).description
    target.close()

    with pytest.raises(UnavailableError, match="no way to the area of 'rank 0'"):
        connect_shared(description)


def test_a_target_that_does_not_answer_fails_the_writes_in_time(target: SharedTarget) -> None:
    link = connect_shared(target.open_area("rank 0", 100).description, grant_s=0.0)
    link.post([], b"")

    ends, _ = link.observe(budget_bytes=0)

    assert ends == [WriteFailed(0, "rank 0 has not given its memory in 0.0 s")]
    link.close()


def test_an_area_is_given_to_one_writer_only(target: SharedTarget) -> None:
    """Whoever comes second, with the same description, is refused."""
    area = target.open_area("rank 0", 100)
    first = own_link(target, area)
    second = connect_shared(area.description)
    second.post([], b"")

    target.notices()
    ends, _ = second.observe(budget_bytes=0)

    assert ends == [WriteFailed(0, "rank 0 refused")]
    assert target.refused == {"token": 1}
    first.post([], b"still good")
    assert first.observe(budget_bytes=0)[0] == [WriteDone(0)]
    assert [notice.payload for notice in target.notices()] == [b"still good"]
    first.close()
    second.close()


def described(target: SharedTarget) -> Description:
    return decode_description(target.open_area("rank 0", 100).description)


@pytest.mark.parametrize("token", [b"x", bytes(16), bytes(17), bytes(1000)])
def test_a_wrong_token_is_refused_and_counted(target: SharedTarget, token: bytes) -> None:
    good = described(target)
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.connect(good.address)

    caller.send(token)
    target.notices()

    assert target.refused == {"token": 1}
    assert caller.recv(1) == b""
    caller.close()
    link = connect_shared(encode_description(good))
    target.notices()
    link.observe(budget_bytes=0)
    assert link.connected
    link.close()


def test_callers_that_say_nothing_do_not_keep_others_out(target: SharedTarget) -> None:
    good = described(target)
    silent = []
    for _ in range(2 * CALLERS_MAX):
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.connect(good.address)
        silent.append(caller)
        target.notices()

    link = connect_shared(encode_description(good))
    target.notices()
    link.observe(budget_bytes=0)

    assert link.connected
    assert target.refused["silent"] >= CALLERS_MAX
    link.close()
    for caller in silent:
        caller.close()


@pytest.mark.parametrize(
    "message", [b"\x03garbage", b"\x02" + bytes(NOTICE_BYTES_MAX + 1), b"\x00"]
)
def test_what_is_no_notice_is_refused_and_counted(target: SharedTarget, message: bytes) -> None:
    area = target.open_area("rank 0", 100)
    connection = call(decode_description(area.description))
    target.notices()

    connection.send(message)
    connection.send(b"\x02good")
    found = target.notices()

    assert [notice.payload for notice in found] == [b"good"]
    assert target.refused == {"garbage": 1}
    connection.close()


def test_a_writer_of_garbage_does_not_keep_others_waiting(
    target: SharedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "NOTICES_AT_ONCE", 4)
    connection = call(decode_description(target.open_area("rank 0", 100).description))
    target.notices()

    for _ in range(10):
        connection.send(b"\x03garbage")
    found = target.notices()

    assert found == []
    assert target.refused == {"garbage": 4}
    connection.close()


def test_a_closed_connection_is_no_fence(target: SharedTarget) -> None:
    """The process lives, and may have kept the memory."""
    area = target.open_area("rank 0", 100)
    own_link(target, area).close()

    assert target.notices() == []
    target.retire(area)

    assert isinstance(target.fence(area), NotYet)


def test_an_older_kernel_tells_the_process_by_its_number(
    target: SharedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_SO_PEERPIDFD", 9999)
    area = target.open_area("rank 0", SIZE)
    with peer_process(SCRIBBLER, area.description.hex()) as peer:
        let_in(target, peer)
        target.retire(area)

        alive = target.fence(area)
        peer.kill()

        assert isinstance(alive, NotYet)
        assert target.fence(area) == Fenced()


def test_no_descriptor_is_left_behind() -> None:
    def round_trip() -> None:
        target = SharedTarget()
        area = target.open_area("rank 0", 100)
        target.open_area("rank 1", 100)
        link = own_link(target, area)
        target.retire(area)
        link.close()
        target.close()

    round_trip()
    before = open_descriptors()
    for _ in range(3):
        round_trip()

    assert open_descriptors() <= before


def test_freed_memory_is_kept_within_a_bound(target: SharedTarget) -> None:
    areas = [target.open_area("rank", 100) for _ in range(SPARE_MAX + 3)]

    for area in areas:
        target.retire(area)
        target.free(area)

    assert len(target._arenas._spare) == SPARE_MAX


@given(st.binary(max_size=100))
def test_any_bytes_are_a_description_or_refused(body: bytes) -> None:
    try:
        found = decode_description(b"PENSTOCK\x01" + body)
    except ValueError:
        return
    assert decode_description(encode_description(found)) == found


def test_a_description_of_another_version_is_refused_with_both(target: SharedTarget) -> None:
    encoded = bytearray(target.open_area("rank 0", 100).description)
    encoded[8] = 9

    with pytest.raises(ValueError, match="of version 9, this end knows 1"):
        connect_shared(bytes(encoded))
