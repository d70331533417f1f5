"""Greetings and frames as bytes: what was written is read, and anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.transport.zmq_link import (
    ChannelHello,
    ChannelRefusal,
    ChannelWelcome,
    Frame,
    Kind,
    RefusalReason,
    Window,
    WireError,
    decode_credit,
    decode_frame,
    decode_greeting,
    encode_credit,
    encode_frame,
    encode_greeting,
)

WINDOW = Window(1, 1)
U64 = st.integers(0, 2**64 - 1)


@given(incarnation=U64, name=st.text(min_size=1, max_size=100))
def test_a_hello_is_read_as_it_was_written(incarnation: int, name: str) -> None:
    hello = ChannelHello(name=name, incarnation=incarnation, window=WINDOW)

    assert decode_greeting(encode_greeting(hello)) == hello


@pytest.mark.parametrize(
    "greeting",
    [
        ChannelWelcome(
            name="engine",
            incarnation=1,
            window=WINDOW,
            link="ipc:///run/a",
            pulse="ipc:///run/b",
            key="k" * 40,
        ),
        ChannelRefusal(cause="because"),
    ],
)
def test_an_answer_is_read_as_it_was_written(greeting: ChannelWelcome | ChannelRefusal) -> None:
    assert decode_greeting(encode_greeting(greeting)) == greeting


@given(incarnation=U64, sequence=U64, payload=st.binary(max_size=100))
def test_a_frame_is_read_as_it_was_written(incarnation: int, sequence: int, payload: bytes) -> None:
    written = encode_frame(Kind.FRAME, incarnation, sequence, payload)

    assert decode_frame(written) == Frame(Kind.FRAME, incarnation, sequence, payload)


@given(frames=U64, frame_bytes=U64)
def test_credit_is_read_as_it_was_written(frames: int, frame_bytes: int) -> None:
    assert decode_credit(encode_credit(frames, frame_bytes)) == (frames, frame_bytes)


@given(st.binary(max_size=2000))
def test_any_bytes_are_a_greeting_or_refused(message: bytes) -> None:
    with pytest.raises(WireError) as refusal:
        decode_greeting(message)

    assert refusal.value.reason in {RefusalReason.GARBAGE, RefusalReason.VERSION}


@given(st.binary(max_size=200))
def test_any_bytes_behind_the_magic_are_a_greeting_or_refused(body: bytes) -> None:
    try:
        greeting = decode_greeting(b"PENSTOCK\x01" + body)
    except WireError:
        return
    assert decode_greeting(encode_greeting(greeting)) == greeting


@given(st.binary(max_size=60))
def test_any_bytes_are_a_frame_or_refused(message: bytes) -> None:
    try:
        frame = decode_frame(message)
    except WireError:
        return
    assert encode_frame(*frame) == message
