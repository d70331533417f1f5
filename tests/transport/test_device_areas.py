"""Areas in memory of a device: who has it, who cannot map it, and what a late write can reach."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.file_device import PROGRAM, FileDevice
from penstock.testing.writer_process import ProcessWriter, peer_process
from penstock.transport.remote import Fenced, NotYet, Span, WriteDone, WriteFailed
from penstock.transport.shared_memory import (
    DECLINE,
    GRANT_DEVICE,
    NOTICE,
    SharedTarget,
    call,
    connect_shared,
    decode_description,
)
from penstock.transport.waiting import wait_readable
from tests.descriptors import open_descriptors
from tests.transport.test_shared_memory import SCRIBBLER, let_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.transport.shared_memory import SharedArea, SharedLink

SIZE = 1 << 20


@pytest.fixture(name="device")
def make_device() -> FileDevice:
    return FileDevice()


@pytest.fixture(name="target")
def make_target(device: FileDevice) -> Iterator[SharedTarget]:
    target = SharedTarget(device=device)
    yield target
    target.close()


def own_link(target: SharedTarget, area: SharedArea, device: FileDevice | None) -> SharedLink:
    """A link of this very process that has its memory."""
    link = connect_shared(area.description, device=device)
    for _ in range(2):
        target.notices()
        link.observe(budget_bytes=0)
    assert link.connected
    return link


def send(link: SharedLink, value: int) -> list[object]:
    link.post([Span(np.full(SIZE, value, dtype=np.uint8), 0)], b"part")
    return [*link.observe(budget_bytes=2 * SIZE)[0]]


def test_parts_land_in_memory_of_the_device_where_both_sides_map_it(
    target: SharedTarget, device: FileDevice
) -> None:
    there = FileDevice()
    area = target.open_area("rank 0", SIZE)
    link = own_link(target, area, there)

    ends = send(link, 7)
    (notice,) = target.notices()

    assert ends == [WriteDone(0)]
    assert notice.area is area
    assert area.on_device
    assert len(there.ranges) == len(device.ranges) == 1
    assert (device.ranges[0].bytes == 7).all()
    link.close()


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (None, "the KV of the writer is not on a GPU"),
        (FileDevice(maps="no peer of it"), "no peer of it"),
    ],
)
def test_a_writer_that_cannot_map_the_device_gets_memory_of_the_host(
    target: SharedTarget,
    device: FileDevice,
    there: FileDevice | None,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    area = target.open_area("rank 0", SIZE)
    link = connect_shared(area.description, device=there)

    with caplog.at_level(logging.WARNING):
        target.notices()
        early = link.window(0, SIZE)
        target.notices()
    ends = send(link, 9)
    (notice,) = target.notices()

    assert early is None
    assert ends == [WriteDone(0)]
    assert (np.asarray(notice.area.memory) == 9).all()
    assert not area.on_device
    assert device.ranges == []
    assert [record.getMessage() for record in caplog.records] == [
        f"landing area is in host memory: peer=rank 0 cause={why}"
    ]
    link.close()


def test_a_device_without_room_leaves_the_area_in_memory_of_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = SharedTarget(device=FileDevice(makes="2 MiB are free"))

    with caplog.at_level(logging.WARNING):
        area = target.open_area("rank 0", SIZE)
    link = own_link(target, area, FileDevice())

    assert not area.on_device
    assert "cause=2 MiB are free" in caplog.text
    assert send(link, 3) == [WriteDone(0)]
    link.close()
    target.close()


def test_an_area_for_which_there_is_no_memory_at_all_says_so(
    target: SharedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    area = target.open_area("rank 0", SIZE)
    link = connect_shared(area.description)
    target.notices()
    link.window(0, 1)

    def fails(_size: int) -> None:
        raise OSError("no room")

    monkeypatch.setattr(target._arenas, "take", fails)
    target.notices()

    assert area.failure == (
        "the KV of the writer is not on a GPU; and no memory of the host: no room"
    )
    link.close()


def test_who_has_written_cannot_have_its_memory_moved(target: SharedTarget) -> None:
    """We may be reading it."""
    area = target.open_area("rank 0", SIZE)
    connection = call(decode_description(area.description))
    target.notices()
    message, fds, _, _ = socket.recv_fds(connection, 1, 1)
    connection.send(NOTICE + b"part")

    connection.send(DECLINE + b"after all I cannot")
    found = target.notices()

    assert message == GRANT_DEVICE
    assert [notice.payload for notice in found] == [b"part"]
    assert area.on_device
    assert target.refused == {"garbage": 1}
    os.close(fds[0])
    connection.close()


def test_a_target_that_offers_its_device_twice_is_refused() -> None:
    device = FileDevice()
    with SharedTargetOf(device) as target:
        area = target.open_area("rank 0", SIZE)
        link = connect_shared(area.description, device=FileDevice(maps="no"))
        target.notices()
        link.window(0, 1)
        assert area.connection is not None
        socket.send_fds(area.connection, [GRANT_DEVICE], [area.arena.fd])
        link.post([], b"")

        ends, _ = link.observe(budget_bytes=0)

        assert ends == [WriteFailed(0, "rank 0 refused")]
        link.close()


class SharedTargetOf:
    """A target that is closed at the end of a `with`."""

    def __init__(self, device: FileDevice) -> None:
        self._target = SharedTarget(device=device)

    def __enter__(self) -> SharedTarget:
        return self._target

    def __exit__(self, *_: object) -> None:
        self._target.close()


def test_a_retired_area_is_counted_until_its_writer_has_left_it(
    target: SharedTarget, device: FileDevice
) -> None:
    """The writer lives on: of memory that is never used again, nothing more is needed."""
    area = target.open_area("rank 0", SIZE)
    link = own_link(target, area, FileDevice())
    target.retire(area)
    fd = target.fence_descriptor(area)
    assert fd is not None
    held = (target.fence(area), target.retired_bytes, wait_readable(fd, time.monotonic()))

    ends = send(link, 5)
    idle = target.fence(area)
    link.close()
    left = wait_readable(fd, time.monotonic() + 60)

    assert held == (NotYet("the process of 'rank 0' is alive"), SIZE, False)
    assert ends == [WriteFailed(0, "rank 0 hung up")]
    assert isinstance(idle, NotYet)
    assert left
    assert target.fence(area) == Fenced()
    target.free(area)
    assert target.retired_bytes == 0
    assert device.ranges == []


def test_notices_into_a_retired_area_wake_nobody(target: SharedTarget) -> None:
    area = target.open_area("rank 0", SIZE)
    connection = call(decode_description(area.description))
    target.notices()
    target.retire(area)
    fd = target.fence_descriptor(area)
    assert fd is not None

    connection.send(NOTICE + b"late")

    assert not wait_readable(target.descriptor, time.monotonic())
    assert not wait_readable(fd, time.monotonic())
    assert target.notices() == []
    connection.close()


def test_memory_of_an_area_is_never_that_of_another(
    target: SharedTarget, device: FileDevice
) -> None:
    inodes = set()
    for number in range(4):
        area = target.open_area(f"rank {number}", SIZE)
        inodes.add(os.fstat(area.arena.fd).st_ino)
        target.retire(area)
        target.free(area)

    assert len(inodes) == 4
    assert device.ranges == []


def test_a_writer_that_says_it_has_left_and_goes_on_reaches_nothing_in_use(
    target: SharedTarget,
) -> None:
    """It has closed its connection, and kept the memory: it scribbles over nobody's bytes."""
    area = target.open_area("rank 0", SIZE)
    with peer_process(SCRIBBLER, area.description.hex()) as peer:
        let_in(target, peer)
        assert area.connection is not None
        area.hang_up()  # As if the writer had.
        target.retire(area)
        assert target.fence(area) == Fenced()
        old = area.memory
        target.free(area)
        others = [target.open_area(f"rank {number}", SIZE) for number in (1, 2)]
        for other in others:
            other.memory[:] = 200
        before = np.array(old)
        deadline = time.monotonic() + 60
        while (np.asarray(old) == before).all():
            assert time.monotonic() < deadline, "the writer did not go on"

        assert all((np.asarray(other.memory) == 200).all() for other in others)


def test_a_killed_writer_has_left(target: SharedTarget) -> None:
    area = target.open_area("rank 0", SIZE)
    writer = ProcessWriter(program=PROGRAM)
    writer.connect(area.description)
    target.notices()
    writer.observe(0)
    writer.post([(0, SIZE, 1)], b"")
    writer.observe(1000)
    target.retire(area)
    alive = target.fence(area)

    writer.end()

    assert isinstance(alive, NotYet)
    assert target.fence(area) == Fenced()


def test_no_descriptor_and_no_memory_is_left_behind() -> None:
    device = FileDevice()

    def round_trip(*, moved: bool) -> None:
        target = SharedTarget(device=device)
        area = target.open_area("rank 0", 100)
        target.open_area("rank 1", 100)
        link = own_link(target, area, None if moved else device)
        target.retire(area)
        link.close()
        target.close()

    round_trip(moved=False)
    gc.collect()
    before = open_descriptors()
    for moved in (False, True, False, True):
        round_trip(moved=moved)
    gc.collect()

    assert open_descriptors() <= before
    assert device.ranges == []
