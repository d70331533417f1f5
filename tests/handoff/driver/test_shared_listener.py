"""One listener of a process for the lines of several pairs."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from penstock.errors import UnavailableError
from penstock.handoff.driver import lines
from penstock.handoff.driver.lines import SharedListener
from penstock.transport.waiting import wait_any
from penstock.transport.zeromq import dial
from tests.ports import free_ports

if TYPE_CHECKING:
    from penstock.handoff.driver.lines import ListenerShare
    from penstock.transport.zmq_channel import ZmqChannel

SOON_S = 600.0


def arrived(listener: SharedListener, share: ListenerShare, caller: ZmqChannel) -> ZmqChannel:
    """The channel of a caller at its share, once it has come."""
    deadline = time.monotonic() + SOON_S
    while (channel := share.accept()) is None:
        assert time.monotonic() < deadline
        wait_any([share, caller], deadline=time.monotonic() + 0.1)
        assert caller.is_open or not caller.was_open
    assert listener.address == share.address
    return channel


def test_each_share_gets_its_own_callers() -> None:
    with closing(SharedListener("prefill-0")) as listener:
        one, two = (listener.share([name]) for name in ("decode-1<prefill-0", "decode-2<prefill-0"))
        callers = [
            dial(listener.address, name=name)
            for name in ("decode-2<prefill-0", "decode-1<prefill-0")
        ]

        first, second = arrived(listener, one, callers[1]), arrived(listener, two, callers[0])

        assert (first.name, second.name) == ("decode-1<prefill-0", "decode-2<prefill-0")
        assert {caller.name for caller in callers} == {"prefill-0"}
        for channel in (first, second, *callers):
            channel.close()


def test_a_caller_that_comes_before_its_pair_is_open_is_kept() -> None:
    with closing(SharedListener("prefill-0")) as listener:
        caller = dial(listener.address, name="early")
        other = listener.share(["another"])
        deadline = time.monotonic() + SOON_S
        while not caller.is_open:
            assert time.monotonic() < deadline
            assert not other.ready
            wait_any([caller, other], deadline=time.monotonic() + 0.1)

        channel = arrived(listener, listener.share(["early"]), caller)

        assert channel.name == "early"
        channel.close()
        caller.close()


def test_a_caller_whom_nobody_expects_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "UNCLAIMED_S", 0.0)
    with closing(SharedListener("prefill-0")) as listener:
        share = listener.share(["expected"])
        caller = dial(listener.address, name="stranger")
        deadline = time.monotonic() + SOON_S
        while not (caller.was_open and not caller.is_open):
            assert time.monotonic() < deadline
            assert share.accept() is None
            caller.receive()

        assert not share.ready
        caller.close()


def test_a_share_that_is_closed_accepts_nobody_and_the_others_go_on() -> None:
    with closing(SharedListener("prefill-0")) as listener:
        one, two = listener.share(["one"]), listener.share(["two"])
        one.close()
        caller = dial(listener.address, name="two")

        channel = arrived(listener, two, caller)

        assert not one.ready
        channel.close()
        caller.close()


def test_the_first_free_port_of_a_range_is_taken() -> None:
    ports = free_ports(2)
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    with (
        closing(SharedListener("one", addresses)) as one,
        closing(SharedListener("two", addresses)) as two,
    ):
        assert [one.address, two.address] == addresses
        with pytest.raises(UnavailableError, match=f"cannot listen on {addresses[1]}"):
            SharedListener("three", addresses)
