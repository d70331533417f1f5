"""Lines over ZeroMQ: who is heard, who is not, and what is said when a line ends."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import zmq

from lab.fixtures.channel_suite import soon
from penstock.handoff.driver import lines
from penstock.handoff.driver.lines import LineFrame, ZmqLines
from penstock.transport.waiting import wait_any
from penstock.transport.zeromq import IPC, Listener, dial
from penstock.transport.zmq_link import private_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "penstock.handoff.driver.lines"


@pytest.fixture(name="stack")
def make_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listening(stack: ExitStack, address: str = "") -> ZmqLines:
    listen = address or private_address(IPC)
    return stack.enter_context(
        closing(ZmqLines("scheduler", listen=listen, dials={}, callers=["rank"]))
    )


def dialling(stack: ExitStack, address: str, name: str = "rank") -> ZmqLines:
    return stack.enter_context(closing(ZmqLines(name, dials={"scheduler": address})))


def until(done: Callable[[], bool], *parties: ZmqLines) -> list[LineFrame]:
    """What parties hear until something is so."""
    deadline, heard = soon(), []
    while not done():
        assert time.monotonic() < deadline, "it did not come to pass"
        for party in parties:
            heard += party.receive()
        # Not for long: somebody may have to dial again, or a test to answer.
        waitables = [each for party in parties for each in party.waitables]
        wait_any(waitables, deadline=time.monotonic() + 0.01)
    return heard


def test_a_line_is_open_for_both_and_carries_frames_both_ways(stack: ExitStack) -> None:
    near = listening(stack)
    far = dialling(stack, near.address)
    opened: dict[str, list[str]] = {"near": [], "far": []}

    def both_open() -> bool:
        opened["near"] += near.opened()
        opened["far"] += far.opened()
        return opened == {"near": ["rank"], "far": ["scheduler"]}

    until(both_open, near, far)
    sent = near.send("rank", b"down"), far.send("scheduler", b"up")
    found: list[LineFrame] = []

    def both_heard() -> bool:
        found.extend([*near.receive(), *far.receive()])
        return len(found) == 2

    until(both_heard)

    assert sent == (True, True)
    assert sorted(found) == [LineFrame("rank", b"up"), LineFrame("scheduler", b"down")]
    assert not near.send("nobody", b"lost")


def test_a_line_that_opens_while_it_is_waited_for_wakes_the_waiter(stack: ExitStack) -> None:
    near = listening(stack)
    far = dialling(stack, near.address)

    # One end does nothing but wait; no frame comes, for nobody greets it before it does.
    deadline = soon()
    while not wait_any(far.waitables, deadline=time.monotonic() + 0.01).channels:
        assert time.monotonic() < deadline, "it slept through the opening"
        near.receive()
    far.receive()

    assert far.opened() == ["scheduler"]


def test_a_quiet_listener_is_hardly_asked_and_lets_the_next_caller_in(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = listening(stack)
    far = dialling(stack, near.address)
    until(lambda: near.opened() == ["rank"], near, far)
    asked = 0
    accept = Listener.accept

    def count(listener: Listener) -> object:
        nonlocal asked
        asked += 1
        return accept(listener)

    until(lambda: not near.waitables, near, far)
    monkeypatch.setattr(Listener, "accept", count)
    for _ in range(100):
        near.receive()
    idle = asked
    far.close()
    again = dialling(stack, near.address)
    until(lambda: near.opened() == ["rank"], near, again)

    assert idle < 10  # ZeroMQ may wake it up a few times without need.
    assert asked > 0


def test_a_stranger_is_counted_and_not_heard(stack: ExitStack) -> None:
    near = listening(stack)
    stranger = dial(near.address, name="stranger")
    stack.callback(stranger.close)

    def refused() -> bool:
        stranger.receive()
        return near.refused.total() > 0

    heard = until(refused, near)

    assert near.refused == {"called by a stranger": 1}
    assert heard == []
    assert near.opened() == []


def test_who_answers_under_another_name_is_counted_and_not_heard(stack: ExitStack) -> None:
    other = stack.enter_context(Listener("somebody else"))
    far = dialling(stack, other.address)

    def refused() -> bool:
        other.accept()
        return far.refused.total() > 0

    heard = until(refused, far)

    assert far.refused["answered under another name"] >= 1
    assert heard == []
    assert not far.send("scheduler", b"to whom?")


def test_who_is_dialled_in_vain_is_dialled_less_and_less_often(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(lines, "time", clock)
    other = stack.enter_context(Listener("somebody else"))
    far = dialling(stack, other.address)
    waits: list[float] = []

    def dialled_often() -> bool:
        other.accept()
        if far.refused.total() > len(waits):
            due = far.next_deadline()
            assert due is not None
            waits.append(due - clock.now)
            clock.now = due
        return len(waits) == 4

    until(dialled_often, far)

    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6])


def test_a_line_that_ended_is_told_with_its_cause_and_dialled_again(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=NAME)
    address = private_address(IPC)
    first = listening(stack, address)
    far = dialling(stack, address)
    until(lambda: far.opened() == ["scheduler"], first, far)

    first.close()
    until(lambda: "line lost" in caplog.text, far)
    second = listening(stack, address)
    until(lambda: far.opened() == ["scheduler"], second, far)

    (line,) = [each for each in caplog.messages if each.startswith("line lost")]
    assert line.startswith("line lost party=rank peer=scheduler cause=")


def test_why_there_is_no_line_is_told_once(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=NAME)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    front = context.socket(zmq.ROUTER)
    stack.callback(front.close, linger=0)
    front.bind(private_address(IPC))
    far = dialling(stack, front.getsockopt_string(zmq.LAST_ENDPOINT))
    answers = 0

    def answered_often() -> bool:
        nonlocal answers
        while front.poll(0):
            route, _ = front.recv_multipart()
            front.send_multipart([route, b"PENSTOCK\x01 of another version"])
            answers += 1
        return answers == 4

    until(answered_often, far)

    (line,) = caplog.messages
    assert line.startswith("no line party=rank peer=scheduler cause=")
    assert "refused: greeting has version 1, must have version 2" in line
