"""The link to an instance, over a channel that is full."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from penstock.transport.base import BacklogError, Empty, Received, ReceivedFrame
from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import Sampled
from penstock_serve.server.app import ask_instances
from penstock_serve.server.instance_link import InstanceLink, InstanceLost

if TYPE_CHECKING:
    from collections.abc import Iterator

SOON_S = 600.0
TOKEN = Output(request="r", answer=0, sampled=Sampled(7, 0.0), reason=Reason.LENGTH)


class FullChannel:
    """A channel without room. As with ZeroMQ, nothing that a refused `send` takes in, be it room
    or frames, is shown by the descriptor afterwards."""

    name = "instance-0"
    alarm = None

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0)
        self.sent: list[Any] = []
        self.has_room = False
        self.room_follows = False
        self.arrives_with_send: deque[bytes] = deque()
        self._arrived: deque[bytes] = deque()

    def send(self, frame: bytes) -> None:
        self._arrived.extend(self.arrives_with_send)
        self.arrives_with_send.clear()
        if not self.has_room:
            self.has_room = self.room_follows
            raise BacklogError(channel=self.name, frames=1, frame_bytes=len(frame))
        self.sent.append(ms.read_by_instance(frame))

    def receive(self) -> Received:
        return ReceivedFrame(self._arrived.popleft()) if self._arrived else Empty()

    def close(self) -> None:
        os.close(self.descriptor)


@pytest.fixture
def channel() -> Iterator[FullChannel]:
    return FullChannel()


def linked(channel: FullChannel) -> InstanceLink:
    return InstanceLink(channel, on_change=lambda _: None)  # type: ignore[arg-type]


def test_a_message_goes_out_when_there_is_room_though_no_descriptor_says_so(
    channel: FullChannel,
) -> None:
    async def whole() -> None:
        link = linked(channel)
        link.send(ms.Abort(id="r"))
        await asyncio.sleep(0)
        assert not channel.sent

        channel.room_follows = True
        async with asyncio.timeout(SOON_S):
            while not channel.sent:
                await asyncio.sleep(0)
        link.close()

    asyncio.run(whole())

    assert channel.sent == [ms.Abort(id="r")]


def test_what_arrives_while_messages_wait_is_received(channel: FullChannel) -> None:
    async def whole() -> list[Any]:
        link = linked(channel)
        tokens = link.generate(Request(id="r", prompt=(1,), max_tokens=1))
        first = asyncio.create_task(anext(tokens))
        for _ in range(5):
            await asyncio.sleep(0)

        channel.arrives_with_send.append(ms.encode(TOKEN))
        async with asyncio.timeout(SOON_S):
            found = [await first, *[token async for token in tokens]]
        link.close()
        return found

    assert asyncio.run(whole()) == [TOKEN]


class Asked:
    """An instance that answers, or is lost while it is asked."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer

    async def ask(self, _what: str, _of: str = "") -> bytes:
        if self._answer is None:
            raise InstanceLost("instance 'b' is lost")
        return self._answer


def test_an_instance_that_is_lost_while_all_are_asked_is_left_out() -> None:
    links: Any = [Asked(b"1"), Asked(None), Asked(b"3")]

    assert asyncio.run(ask_instances(links, "statistics")) == [1, 3]


def test_an_instance_that_was_asked_for_by_name_must_answer() -> None:
    links: Any = [Asked(None)]

    with pytest.raises(InstanceLost):
        asyncio.run(ask_instances(links, "statistics", required=True))
