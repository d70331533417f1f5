"""Sentences that hold for every control channel.

    class TestMyChannel(ChannelSuite):
        def make_pair(self) -> tuple[Channel, Channel]: ...
        def lose(self, far: Channel) -> None: ...

pytest then runs every sentence on your channel. The one rule they add up to: what was sent
arrives once and in order, or the receiver gets an end that says why not.
"""

from __future__ import annotations

import os
import random
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import pytest

from penstock.errors import CapacityError, UnavailableError
from penstock.testing.seeds import failing_seed
from penstock.transport.base import (
    FRAME_BYTES_MAX,
    ChannelClosed,
    ChannelFailed,
    Empty,
    ReceivedFrame,
)
from penstock.transport.waiting import wait_any, wait_readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.transport.base import Channel, Received

SOON_S = 60.0
"""Longer than anything takes that works, also on a slow machine."""
MOMENT_S = 0.05


def soon() -> float:
    """A deadline that is only met by failures."""
    return time.monotonic() + SOON_S


def receive_frame(channel: Channel) -> bytes:
    """The next frame, which must come."""
    received = channel.receive(deadline=soon())
    assert isinstance(received, ReceivedFrame), received
    return received.frame


def receive_end(channel: Channel) -> Received:
    """How the channel ended, which must be next."""
    received = channel.receive(deadline=soon())
    assert isinstance(received, ChannelClosed | ChannelFailed), received
    return received


def send_soon(channel: Channel, frame: bytes) -> None:
    """Sends a frame to an end that is about to make room for it: word of that may take a while."""
    deadline = soon()
    while True:
        try:
            channel.send(frame)
        except CapacityError:
            assert time.monotonic() < deadline
            wait_readable(channel.descriptor, time.monotonic() + MOMENT_S)
        else:
            return


def send_until_full(channel: Channel, frame: bytes, limit: int = 1_000_000) -> int:
    """How many frames a channel took until it refused one."""
    for count in range(limit):
        try:
            channel.send(frame)
        except CapacityError:
            return count
    raise AssertionError(f"the channel took {limit} frames that nobody received")


class ChannelSuite(ABC):
    """What the two ends of a channel do."""

    @abstractmethod
    def make_pair(self) -> tuple[Channel, Channel]:
        """Two ends of a new channel, both open."""

    @abstractmethod
    def lose(self, far: Channel) -> None:
        """Ends `far` without a word, as if its process had died."""

    @pytest.fixture(name="pair")
    def open_pair(self) -> Iterator[tuple[Channel, Channel]]:
        """Two ends, closed after the test."""
        near, far = self.make_pair()
        yield near, far
        near.close()
        far.close()

    def test_frames_arrive_once_and_in_order(self, pair: tuple[Channel, Channel]) -> None:
        near, far = pair
        frames = [b"", b"x", b"\0" * 1000, os.urandom(100_000), b"last"]

        for frame in frames:
            near.send(frame)

        assert [receive_frame(far) for _ in frames] == frames
        assert far.receive() == Empty()

    def test_the_longest_frame_passes_and_a_longer_one_is_refused(
        self, pair: tuple[Channel, Channel]
    ) -> None:
        near, far = pair
        longest = bytes(FRAME_BYTES_MAX)

        with pytest.raises(ValueError, match=str(FRAME_BYTES_MAX + 1)):
            near.send(longest + b"x")
        near.send(longest)

        assert receive_frame(far) == longest
        assert far.receive() == Empty()

    def test_the_two_directions_do_not_mix(self, pair: tuple[Channel, Channel]) -> None:
        near, far = pair

        near.send(b"to far")
        far.send(b"to near")

        assert receive_frame(near) == b"to near"
        assert receive_frame(far) == b"to far"
        assert near.receive() == Empty()

    def test_an_empty_channel_is_empty_at_once_or_at_the_deadline(
        self, pair: tuple[Channel, Channel]
    ) -> None:
        near, _ = pair
        started = time.monotonic()

        at_once = near.receive()
        before = time.monotonic()
        at_the_deadline = near.receive(deadline=before + MOMENT_S)
        after = time.monotonic()

        assert at_once == at_the_deadline == Empty()
        assert before - started < SOON_S / 2
        assert MOMENT_S <= after - before < SOON_S / 2

    @pytest.mark.parametrize("length", [1, 3_000_000])
    def test_a_backlog_is_bounded_and_comes_through_whole(
        self, pair: tuple[Channel, Channel], length: int
    ) -> None:
        near, far = pair
        frame = bytes(length)

        taken = send_until_full(near, frame)
        refused_again = send_until_full(near, frame)
        for _ in range(taken):
            assert receive_frame(far) == frame
        at_the_end = far.receive()
        send_soon(near, b"after")

        assert taken > 1
        assert refused_again == 0
        assert at_the_end == Empty()
        assert receive_frame(far) == b"after"

    def test_a_full_channel_still_carries_the_other_direction(
        self, pair: tuple[Channel, Channel]
    ) -> None:
        near, far = pair
        near_taken = send_until_full(near, b"near")
        far_taken = send_until_full(far, b"far")

        assert [receive_frame(near) for _ in range(far_taken)] == [b"far"] * far_taken
        assert [receive_frame(far) for _ in range(near_taken)] == [b"near"] * near_taken

    def test_frames_before_the_close_arrive_and_then_it_is_closed_for_good(
        self, pair: tuple[Channel, Channel]
    ) -> None:
        near, far = pair
        near.send(b"one")
        near.send(b"two")

        near.close()

        assert [receive_frame(far), receive_frame(far)] == [b"one", b"two"]
        assert receive_end(far) == ChannelClosed()
        assert far.receive() == far.receive(deadline=soon()) == ChannelClosed()
        with pytest.raises(UnavailableError, match="closed there"):
            far.send(b"too late")

    def test_an_end_that_was_closed_here_says_so(self, pair: tuple[Channel, Channel]) -> None:
        near, far = pair
        far.send(b"never taken")

        near.close()
        near.close()

        assert near.receive() == near.receive(deadline=soon()) == ChannelClosed()
        with pytest.raises(UnavailableError, match="closed here"):
            near.send(b"x")

    def test_both_ends_may_close_at_once(self, pair: tuple[Channel, Channel]) -> None:
        near, far = pair

        near.close()
        far.close()

        assert near.receive() == far.receive() == ChannelClosed()

    def test_a_lost_end_is_a_failure_with_a_cause_after_what_it_sent(
        self, pair: tuple[Channel, Channel]
    ) -> None:
        near, far = pair
        far.send(b"its last frame")
        frame = receive_frame(near)

        self.lose(far)

        assert frame == b"its last frame"
        end = receive_end(near)
        assert isinstance(end, ChannelFailed)
        assert end.cause
        assert near.receive() == near.receive(deadline=soon()) == end
        with pytest.raises(UnavailableError, match="failed"):
            near.send(b"x")

    def test_a_descriptor_wakes_up_for_a_frame(self, pair: tuple[Channel, Channel]) -> None:
        near, far = pair
        while far.ready:
            far.receive()

        while wait_readable(far.descriptor, time.monotonic() + MOMENT_S):
            assert far.receive() == Empty()  # It may wake for nothing, but not for ever.
        near.send(b"x")

        assert wait_readable(far.descriptor, soon())
        assert receive_frame(far) == b"x"

    def test_wait_any_finds_the_channels_that_have_something(
        self, pair: tuple[Channel, Channel]
    ) -> None:
        near, far = pair
        far.send(b"x")

        found = wait_any([near, far], deadline=soon())

        assert found.channels == (near,)
        assert near.ready
        assert not far.ready
        assert receive_frame(near) == b"x"

    def test_wait_any_does_not_sleep_through_what_came_during_a_send(
        self, pair: tuple[Channel, Channel]
    ) -> None:
        near, far = pair
        assert near.receive() == Empty()
        for _ in range(200):
            far.send(b"x")
            near.send(b"y")
            receive_frame(far)

            found = wait_any([near], deadline=soon())

            assert found.channels == (near,)
            assert receive_frame(near) == b"x"

    def test_wait_any_ends_at_its_deadline(self, pair: tuple[Channel, Channel]) -> None:
        before = time.monotonic()

        at_once = wait_any(pair, deadline=None)
        at_the_deadline = wait_any(pair, deadline=before + MOMENT_S)

        assert at_once == at_the_deadline == ((), ())
        assert MOMENT_S <= time.monotonic() - before < SOON_S / 2

    def test_wait_any_watches_plain_descriptors_too(self, pair: tuple[Channel, Channel]) -> None:
        near, far = pair
        readable, writable = os.pipe()
        try:
            os.write(writable, b"x")
            alone = wait_any([near], [readable], deadline=soon())
            far.send(b"x")
            receive_frame(near)
            far.send(b"x")
            together = wait_any([near], [readable], deadline=soon())
        finally:
            os.close(readable)
            os.close(writable)

        assert alone == ((), (readable,))
        assert together.descriptors == (readable,)

    @pytest.mark.parametrize("orderly", [True, False])
    def test_the_end_of_a_channel_wakes_who_waits(
        self, pair: tuple[Channel, Channel], *, orderly: bool
    ) -> None:
        near, far = pair

        if orderly:
            far.close()
        else:
            self.lose(far)
        found = wait_any([near], deadline=soon())

        assert found.channels == (near,)
        assert isinstance(receive_end(near), ChannelClosed if orderly else ChannelFailed)

    def test_a_long_exchange_keeps_its_order(self, pair: tuple[Channel, Channel]) -> None:
        for seed in range(5):
            with failing_seed(seed):
                self.exchange(pair, random.Random(seed))

    def exchange(self, pair: tuple[Channel, Channel], chance: random.Random) -> None:
        """Sends and receives at random, and requires that every frame arrives in its order."""
        sent = [0, 0]
        received = [0, 0]

        for _ in range(6000):
            side = chance.randrange(2)
            # So few are on their way at a time that there is always room before long.
            if chance.random() < 0.55 and sent[side] - received[1 - side] < 400:
                send_soon(pair[side], sent[side].to_bytes(4, "big") * chance.randrange(1, 50))
                sent[side] += 1
            elif isinstance(answer := pair[side].receive(), ReceivedFrame):
                assert int.from_bytes(answer.frame[:4], "big") == received[side]
                received[side] += 1
        for side in (0, 1):
            while received[side] < sent[1 - side]:
                frame = receive_frame(pair[side])
                assert int.from_bytes(frame[:4], "big") == received[side]
                received[side] += 1

        assert received == sent[::-1]
