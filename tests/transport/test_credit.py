"""The window of a ZeroMQ channel: whole in the beginning, and whole again after each credit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.fixtures.channel_suite import receive_frame, send_soon, send_until_full, soon
from penstock.transport.zeromq import Listener, dial
from penstock.transport.zmq_link import ChannelSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.transport.zmq_channel import ZmqChannel

    Ends = tuple[ZmqChannel, ZmqChannel]

SETTINGS = ChannelSettings(window_frames=8, silence_s=600.0, open_s=60.0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with Listener("engine", settings=SETTINGS) as listener:
        near = dial(listener.address, name="rank 0", settings=SETTINGS)
        while not near.is_open:
            listener.accept(deadline=0.0)
            near.wait_open(deadline=0.0)
        far = listener.accept(deadline=soon())
    assert far is not None
    yield near, far
    near.close()
    far.close()


def takes_now(channel: ZmqChannel, frame: bytes) -> int:
    """How many frames a channel takes once word has come that there is room."""
    send_soon(channel, frame)
    return 1 + send_until_full(channel, frame)


def test_after_a_credit_a_channel_takes_as_many_frames_as_were_taken(ends: Ends) -> None:
    near, far = ends

    counts = [send_until_full(near, b"x")]
    for _ in range(2):
        for _ in range(4):
            receive_frame(far)
        counts.append(takes_now(near, b"x"))
    assert far.failure is None

    assert counts == [8, 4, 4]


def test_a_window_stays_whole_however_often_it_was_used_up(ends: Ends) -> None:
    near, far = ends
    assert send_until_full(near, b"x") == 8

    for _ in range(40):
        for _ in range(4):
            receive_frame(far)
        assert takes_now(near, b"x") == 4
