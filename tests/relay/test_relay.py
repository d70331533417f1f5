"""Relays that stop, go on and die; and what may be written to memory afterwards."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from penstock.errors import UnavailableError
from penstock.relay import process
from penstock.relay.agents import ENVIRONMENT
from penstock.relay.messages import FRAME_BYTES_MAX, NEW_SESSION, READY, OpenSession
from penstock.relay.sides import NixlTarget, NixlWriter
from penstock.supervisor.client import Supervisor
from penstock.supervisor.messages import ProcessExited, ProcessSpec, ProcessStarted
from penstock.tiers.arena import Arena
from penstock.transport.remote import Fenced, NotYet, Span, WriteDone, WriteFailed
from penstock.transport.shared_memory import listen
from penstock.transport.unix_sockets import channel_pair, send_packet
from penstock.transport.waiting import wait_readable
from tests.descriptors import open_descriptors
from tests.relay.relays import (
    WAIT_S,
    apart,
    await_fence,
    needs_nixl,
    open_ready,
    pause,
    pid_of,
    received_bytes,
    settle,
    until,
)
from tests.stopped import stop_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.relay.sides import NixlArea

pytestmark = needs_nixl
SIZE = 64 << 20


@pytest.fixture(name="target")
def make_target() -> Iterator[NixlTarget]:
    target = apart(NixlTarget)
    yield target
    target.close()


@pytest.fixture(name="writer")
def make_writer() -> Iterator[NixlWriter]:
    writer = apart(NixlWriter)
    yield writer
    writer.close()


def filled(length: int, value: int) -> np.ndarray:
    return np.full(length, value, dtype=np.uint8)


def await_notice(target: NixlTarget, area: NixlArea) -> bytes:
    found: list[bytes] = []

    def has_come() -> bool:
        found.extend(notice.payload for notice in target.notices() if notice.area is area)
        return bool(found)

    until(has_come, target.descriptor, "no notice comes")
    return found[0]


def test_a_writer_stopped_in_mid_transfer_writes_nothing_after_the_fence(
    target: NixlTarget, writer: NixlWriter
) -> None:
    area = open_ready(target, SIZE)
    link = writer.connect(area.description)
    link.post([Span(filled(1, 1), 0)], b"first")
    assert settle(link) == [WriteDone(0)]
    sender, receiver = pid_of(writer.relay), pid_of(target.relay)
    stop_process(receiver)  # What is written now waits in the kernel.
    link.post([Span(filled(SIZE, 7), 0)], b"second")
    while link.observe(budget_bytes=SIZE)[1]:
        pass
    until(lambda: received_bytes(receiver) > 100_000, 0, "nothing is under way")
    stop_process(sender)
    os.kill(receiver, signal.SIGCONT)
    until(lambda: bool(area.memory[1000:].any()), target.descriptor, "nothing lands")

    target.retire(area)
    await_fence(target, area)
    landed = int((area.memory == 7).sum())
    target.free(area)
    again = open_ready(target, SIZE, "rank 1")
    again.memory[:] = 77
    os.kill(sender, signal.SIGCONT)
    ended = settle(link)

    assert 0 < landed < SIZE
    assert again.arena is area.arena
    assert [type(end) for end in ended] == [WriteFailed]
    assert (again.memory == 77).all()


def test_what_is_packed_into_a_window_travels_with_its_notice(
    target: NixlTarget, writer: NixlWriter
) -> None:
    area = open_ready(target, 10_000)
    link = writer.connect(area.description)

    link.window(1000, 500)[:] = 9
    link.window(3000, 500)[:] = 8
    link.post((), b"part", packed=[(1000, 500)])
    ended = settle(link)

    assert ended == [WriteDone(0)]
    assert await_notice(target, area) == b"part"
    assert (area.memory[1000:1500] == 9).all()
    assert np.count_nonzero(area.memory) == 500
    with pytest.raises(ValueError, match="500 bytes from 9600 on"):
        link.post((), b"part", packed=[(9600, 500)])


def test_a_window_taken_while_a_write_ends_does_not_lose_its_end(
    target: NixlTarget, writer: NixlWriter
) -> None:
    area = open_ready(target, 10_000)
    link = writer.connect(area.description)
    link.post([Span(filled(10, 1), 0)], b"part")
    link.observe(budget_bytes=100)
    await_notice(target, area)
    until(lambda: wait_readable(link.descriptor or -1, 0.0), link.descriptor or 0, "it goes on")

    for _ in range(10):  # The relay says that it is ready, and then that the write has ended.
        link.window(0, 10)
        pause(0.05)

    assert settle(link) == [WriteDone(0)]


def test_a_target_whose_relay_dies_is_fenced_and_opens_areas_again(
    target: NixlTarget, writer: NixlWriter
) -> None:
    area = open_ready(target, 10_000)
    link = writer.connect(area.description)
    link.post([Span(filled(10_000, 1), 0)], b"")
    settle(link)

    killed = pid_of(target.relay)
    os.kill(killed, signal.SIGKILL)
    until(lambda: target.notices() == [] and bool(area.failure), target.descriptor, "it lives")
    link.post([Span(filled(10_000, 2), 0)], b"")
    ended = settle(link)
    target.retire(area)
    await_fence(target, area)
    target.free(area)
    pid_of(target.relay, after=killed)
    fresh = open_ready(target, 10_000)
    link = writer.connect(fresh.description)
    link.post([Span(filled(10_000, 3), 0)], b"again")

    assert [type(end) for end in ended] == [WriteFailed]
    assert settle(link) == [WriteDone(0)]
    assert await_notice(target, fresh) == b"again"
    assert (fresh.memory == 3).all()


def test_a_link_whose_relay_dies_fails_its_writes_and_another_one_works(
    target: NixlTarget, writer: NixlWriter
) -> None:
    area = open_ready(target, 10_000)
    link = writer.connect(area.description)
    settle(link)

    killed = pid_of(writer.relay)
    os.kill(killed, signal.SIGKILL)
    link.post([Span(filled(10_000, 2), 0)], b"lost")
    link.post([], b"lost, too")
    ended = settle(link)
    with pytest.raises(UnavailableError, match="no way to the area of 'rank 0'"):
        link.window(0, 1)
    link.close()
    pid_of(writer.relay, after=killed)
    link = writer.connect(area.description)
    link.post([Span(filled(10_000, 3), 0)], b"again")

    assert [(type(end), end.number) for end in ended] == [(WriteFailed, 0), (WriteFailed, 1)]
    assert settle(link) == [WriteDone(0)]
    assert await_notice(target, area) == b"again"


def test_a_relay_that_does_not_close_an_area_is_killed(
    target: NixlTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "CLOSE_S", 0.2)
    area = open_ready(target, 10_000)
    stopped = pid_of(target.relay)
    stop_process(stopped)

    target.retire(area)
    before = target.fence(area)
    await_fence(target, area)
    target.free(area)

    assert isinstance(before, NotYet)
    assert pid_of(target.relay, after=stopped)


def test_a_link_that_was_closed_does_not_disturb_others(
    target: NixlTarget, writer: NixlWriter
) -> None:
    areas = [open_ready(target, 10_000, f"rank {n}") for n in range(2)]
    links = [writer.connect(area.description) for area in areas]

    links[0].close()
    links[0].close()
    with pytest.raises(UnavailableError, match="link to 'rank 0' was closed"):
        links[0].post([], b"")
    links[1].post([Span(filled(10_000, 5), 0)], b"")

    assert settle(links[1]) == [WriteDone(0)]
    assert (areas[1].memory == 5).all()
    assert links[0].observe(budget_bytes=1) == ([], 0)


def test_memory_for_a_device_is_pinned_once_on_both_sides_and_unpinned_in_the_end() -> None:
    pinned: list[int] = []

    def pin(memory: np.ndarray) -> object:
        pinned.append(len(memory))
        return lambda: pinned.remove(len(memory))

    target = NixlTarget(pin=pin)  # type: ignore[arg-type]
    writer = NixlWriter(pin=pin)  # type: ignore[arg-type]
    area = open_ready(target, 8192)
    link = writer.connect(area.description)
    link.post([Span(filled(10, 1), 0)], b"")
    settle(link)
    while_open = [*pinned]
    writer.close()
    target.close()

    assert while_open == [8192, 8192]
    assert pinned == []


def test_nothing_is_left_of_targets_and_writers_that_were_closed() -> None:
    def use() -> int:
        target, writer = NixlTarget(), NixlWriter()
        area = open_ready(target, 10_000)
        link = writer.connect(area.description)
        link.post([Span(filled(10_000, 1), 0)], b"")
        settle(link)
        relays = [pid_of(target.relay), pid_of(writer.relay)]
        writer.close()
        target.close()
        return sum(os.path.exists(f"/proc/{pid}") for pid in relays)

    first = use()
    before = open_descriptors()
    second = use()

    assert (first, second) == (0, 0)
    assert open_descriptors() == before


def test_targets_and_writers_of_a_process_share_a_relay_that_ends_with_the_last_of_them() -> None:
    first, second = NixlTarget(), NixlWriter()
    pid = pid_of(first.relay)
    area = open_ready(first, 10_000)
    link = second.connect(area.description)

    link.post([Span(filled(10_000, 4), 0)], b"")
    ended = settle(link)
    second.close()
    after_one = os.path.exists(f"/proc/{pid}")
    first.close()

    assert first.relay is second.relay
    assert ended == [WriteDone(0)]
    assert (area.memory == 4).all()
    assert after_one
    assert not os.path.exists(f"/proc/{pid}")


def test_an_area_that_never_had_a_writer_is_fenced(target: NixlTarget) -> None:
    area = target.open_area("rank 0", 100)  # Not ready yet.

    target.retire(area)
    await_fence(target, area)

    assert target.fence(area) == Fenced()


@pytest.mark.parametrize("end", ["its engine closes", "SIGTERM"])
def test_a_relay_that_had_an_agent_ends_with_status_0_and_is_no_crash(end: str) -> None:
    listener, path = listen()
    arena = Arena.create(10_000, name="area", huge_pages=False)
    ours, theirs = channel_pair()
    with Supervisor.start() as supervisor, listener, ours:
        spec = ProcessSpec(
            name="relay", module=process.MODULE, arguments=(str(path),), environment=ENVIRONMENT
        )
        pid = supervisor.start_process(spec)
        assert wait_readable(listener.fileno(), time.monotonic() + WAIT_S)
        connection, _ = listener.accept()
        with connection, theirs:
            send_packet(connection, NEW_SESSION, theirs.fileno())
            send_packet(ours, msgspec.msgpack.encode(OpenSession("target", arena.size)), arena.fd)
            assert wait_readable(ours.fileno(), time.monotonic() + WAIT_S)
            assert ours.recv(FRAME_BYTES_MAX)[:1] == READY  # UCX has its threads and sockets now.
            if end == "SIGTERM":
                supervisor.stop_process("relay")
        started = supervisor.receive(deadline=time.monotonic() + WAIT_S)
        ended = supervisor.receive(deadline=time.monotonic() + WAIT_S)
    arena.close()
    path.unlink()

    assert started == ProcessStarted(name="relay", pid=pid)
    assert ended == ProcessExited(name="relay", pid=pid, code=0)
