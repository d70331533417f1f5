"""Every control channel says the same sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.fixtures.channel_suite import ChannelSuite, soon
from lab.fixtures.inproc import InprocChannel, channel_pair
from penstock.transport.zeromq import IPC, LOOPBACK, Listener, dial
from penstock.transport.zmq_channel import ZmqChannel
from penstock.transport.zmq_link import ChannelSettings

if TYPE_CHECKING:
    from penstock.transport.base import Channel

PATIENT = ChannelSettings(silence_s=600.0, open_s=60.0)
"""A busy machine may keep either end waiting."""


class TestInproc(ChannelSuite):
    def make_pair(self) -> tuple[Channel, Channel]:
        return channel_pair()

    def lose(self, far: Channel) -> None:
        assert isinstance(far, InprocChannel)
        far.fail("its rank died")


class ZmqSuite(ChannelSuite):
    address: str

    def make_pair(self) -> tuple[Channel, Channel]:
        with Listener("engine", self.address, settings=PATIENT) as listener:
            near = dial(listener.address, name="rank 0", settings=PATIENT)
            assert listener.accept() is None
            while not near.is_open:
                listener.accept(deadline=0.0)
                near.wait_open(deadline=0.0)
            far = listener.accept(deadline=soon())
        assert far is not None
        return near, far

    def lose(self, far: Channel) -> None:
        """Closes its socket without a word: to the other end, no different from a dead process."""
        assert isinstance(far, ZmqChannel)
        far.fail("lost on purpose")


class TestZmqOverIpc(ZmqSuite):
    address = IPC


class TestZmqOverTcp(ZmqSuite):
    address = LOOPBACK


del ZmqSuite
