"""Frames: what was encoded is decoded, and anything else is a `PeerError`."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PeerError
from penstock.vocabulary.frames import FrameCodec, FrameVersionError


class Note(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    text: str
    count: int = 0


class Sum(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    numbers: list[int]


DECODER: msgspec.msgpack.Decoder[Note | Sum] = msgspec.msgpack.Decoder(Note | Sum)
PLAIN = FrameCodec(DECODER, version=3, bytes_max=200)
MARKED = FrameCodec(DECODER, version=3, bytes_max=200, mark=b"PEN", name="a greeting")
CODECS = pytest.mark.parametrize("frames", [PLAIN, MARKED], ids=["plain", "marked"])
messages = st.builds(Note, st.text(max_size=20), st.integers(-(2**63), 2**64 - 1)) | st.builds(
    Sum, st.lists(st.integers(0, 100), max_size=9)
)


def test_a_frame_is_the_mark_the_version_and_the_message() -> None:
    frame = MARKED.encode(Sum([1]))

    assert frame == b"PEN\x03" + msgspec.msgpack.encode(Sum([1]))


@CODECS
@given(message=messages)
def test_a_message_comes_back_equal(frames: FrameCodec[Note | Sum], message: Note | Sum) -> None:
    assert frames.decode(frames.encode(message)) == message


@CODECS
@given(garbage=st.binary(max_size=250), known=st.booleans())
def test_garbage_is_no_message(
    frames: FrameCodec[Note | Sum],
    garbage: bytes,
    known: bool,  # noqa: FBT001
) -> None:
    head = frames.encode(Sum([]))[: 1 if frames is PLAIN else 4] if known else b""

    with pytest.raises(PeerError):
        frames.decode(head + garbage)


@CODECS
@given(message=messages, place=st.integers(0, 300), byte=st.integers(0, 255))
def test_a_damaged_frame_is_refused_or_another_message(
    frames: FrameCodec[Note | Sum], message: Note | Sum, place: int, byte: int
) -> None:
    frame = bytearray(frames.encode(message))
    frame[place % len(frame)] = byte

    try:
        decoded = frames.decode(bytes(frame))
    except PeerError:
        return
    assert isinstance(decoded, Note | Sum)


DEEP = b"\x82\xa1x" + b"\x91" * 100_000 + b"\x00\xa4type\xa3Sum"
"""An unknown field that is nested deeper than Python recurses, before the tag."""


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (b"", "a greeting begins with b'', must begin with b'PEN'"),
        (b"PEX\x03", "a greeting begins with b'PEX', must begin with b'PEN'"),
        (b"PEN", "a greeting has no version, must have version 3"),
        (b"PEN\x03" + bytes(200), "a greeting has 204 bytes, must have at most 200"),
        (b"PEN\x03", "a greeting cannot be read: Input data was truncated"),
        (b"PEN\x03" + b"\x82\xa4type\xa4Note\xa4text\xa1\xff", "a greeting cannot be read: "),
        (b"PEN\x03" + msgspec.msgpack.encode({"type": "Sum", "numbers": ["x"]}), r"numbers"),
        (b"PEN\x03" + msgspec.msgpack.encode({"type": "Sum", "n": 1}), "unknown field `n`"),
    ],
)
def test_what_is_wrong_with_a_frame_is_said(frame: bytes, problem: str) -> None:
    with pytest.raises(PeerError) as refused:
        MARKED.decode(frame)

    assert problem in str(refused.value)


def test_deep_nesting_is_refused() -> None:
    frames = FrameCodec(DECODER, version=3, bytes_max=1 << 20)

    with pytest.raises(PeerError, match="a frame cannot be read"):
        frames.decode(b"\x03" + DEEP)


def test_another_version_is_named() -> None:
    with pytest.raises(FrameVersionError, match="has version 9, must have version 3") as refused:
        PLAIN.decode(b"\x09" + PLAIN.encode(Sum([]))[1:])

    assert refused.value.theirs == 9


def test_a_message_that_is_too_long_is_not_encoded() -> None:
    with pytest.raises(ValueError, match=r"Note has 2.. bytes, must have at most 200"):
        PLAIN.encode(Note("x" * 200))
