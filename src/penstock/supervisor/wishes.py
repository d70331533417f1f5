"""The supervisor's side of `keeping`: a process asks to have a descriptor kept.

The one rule: every wish that can be answered is answered, and a descriptor that is not kept is
closed at once.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from penstock.supervisor.descriptors import close_all
from penstock.supervisor.messages import (
    PROBLEM_CHARACTERS_MAX,
    Done,
    Hold,
    MessageError,
    Refused,
    decode_request,
    encode,
)
from penstock.supervisor.refusing import RefusedError
from penstock.supervisor.wire import Packet, receive_packet, send_packet
from penstock.transport.base import Closed, Failed

if TYPE_CHECKING:
    import socket

    from penstock.supervisor.holdings import Holdings


class Heard(enum.Enum):
    """What there was to hear."""

    WISH = "wish"
    NOTHING = "nothing"
    END = "end"


def hear_wish(channel: socket.socket, holdings: Holdings, process: str) -> Heard:
    """Takes in one wish of a process, if there is one."""
    packet = receive_packet(channel)
    if isinstance(packet, Closed | Failed):
        return Heard.END
    if not isinstance(packet, Packet):
        return Heard.NOTHING
    answer = _answer(packet, holdings, process)
    try:
        # A process that takes no answers has no room for this one: that is its own affair.
        send_packet(channel, encode(answer))
    except OSError:
        return Heard.END
    return Heard.WISH


def _answer(packet: Packet, holdings: Holdings, process: str) -> Done | Refused:
    request = 0
    try:
        wish = _wish_in(packet)
        request = wish.request
        holdings.keep(process, wish.name, packet.descriptors[0])
    except MessageError as error:
        problem, request = str(error), error.request
    except RefusedError as error:
        problem = error.problem
    else:
        return Done(request=request)
    close_all(packet.descriptors)
    return Refused(request=request, blame="world", problem=problem[:PROBLEM_CHARACTERS_MAX])


def _wish_in(packet: Packet) -> Hold:
    wish = decode_request(packet.frame)
    if packet.problem:
        raise MessageError(packet.problem, request=wish.request)
    if not isinstance(wish, Hold) or len(packet.descriptors) != 1:
        problem = f"{type(wish).__name__} came with {len(packet.descriptors)} descriptors"
        raise MessageError(f"{problem}, must be Hold with one", request=wish.request)
    return wish
