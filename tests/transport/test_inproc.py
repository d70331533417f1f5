"""What in-process channels do beyond what every channel does."""

from __future__ import annotations

from lab.fixtures.inproc import InprocChannel, channel_pair
from penstock.transport.base import ChannelFailed, Empty, ReceivedFrame
from tests.descriptors import open_descriptors


def test_an_end_is_called_what_the_other_one_is() -> None:
    near, far = channel_pair("engine", "rank 0")

    assert (near.name, far.name) == ("rank 0", "engine")


def test_no_descriptor_is_made_unless_somebody_waits() -> None:
    before = open_descriptors()
    pairs = [channel_pair() for _ in range(100)]
    for near, far in pairs:
        near.send(b"x")
        assert far.receive() == ReceivedFrame(b"x")
        assert far.receive() == Empty()

    assert open_descriptors() <= before


def test_both_ends_of_a_failed_channel_know_the_cause() -> None:
    near, far = channel_pair()
    near.send(b"before")

    near.fail("rank 0 was killed")

    assert far.receive() == ReceivedFrame(b"before")
    assert near.receive() == far.receive() == ChannelFailed("rank 0 was killed")


def test_a_closed_end_gives_its_descriptor_back() -> None:
    before = open_descriptors()
    near, far = channel_pair()

    descriptors = {end.descriptor for end in (near, far)}
    near.close()
    far.close()

    assert len(descriptors) == 2
    assert open_descriptors() <= before
    assert isinstance(near, InprocChannel)
