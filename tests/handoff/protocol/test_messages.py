"""Bytes and messages: P22."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PeerError
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.identity import Life
from penstock.handoff.protocol.messages import MESSAGE_BYTES_MAX, decode, encode

WHO = {"sender": Life("d0", 2**64 - 1), "target": Life("p0", 7)}
CLAIM = {**WHO, "handoff": "h", "epoch": 3}
ONE_OF_EACH: list[msg.AnyMessage] = [
    msg.Hello(**WHO, role="decode rank", facts=(("model", "toy"),), known=2**64 - 1),
    msg.Welcome(**WHO, role="decode rank", known=7),
    msg.Refused(**WHO, fact="model", ours="a", theirs="b"),
    msg.Ping(**WHO),
    msg.Pong(**WHO),
    msg.Expect(**CLAIM, sources=(("p0", Grid(0, 1, 2, 3)),), slots=(1, 2)),
    msg.DropHandoff(**CLAIM),
    msg.HandoffReport(**CLAIM, report=msg.ReportStatus.FAILED, why="w"),
    msg.Claim(
        **CLAIM,
        generation=1,
        berth_count=2,
        berth_bytes=3,
        grid=Grid(0, 1, 2, 3),
        have=b"\x05",
        spoiled=(b"\x01",),
    ),
    msg.Stop(**CLAIM),
    msg.Landed(**CLAIM, generation=1, parts=(msg.LandedPart(0, 2, 0, b"sums"),)),
    msg.Stopped(**CLAIM, generation=1, poisoned=True),
    msg.Poisoned(**WHO, generation=1),
    msg.Await(**CLAIM),
    msg.Finished(**CLAIM, tokens=(1,), drafts=(2, 3)),
    msg.Gone(**CLAIM, why="w"),
    msg.Close(**CLAIM, outcome=msg.HandoffOutcome.DELIVERED),
    msg.CloseConfirmed(**CLAIM),
    msg.ReleaseBlocks(**WHO, handoff="h"),
    msg.Released(**WHO, handoff="h"),
]


def raw(frame: bytes) -> dict[str, object]:
    return msgspec.msgpack.decode(frame[1:])


def framed(fields: dict[str, object]) -> bytes:
    return b"\x02" + msgspec.msgpack.encode(fields)


def test_there_is_one_of_each_kind() -> None:
    assert {type(message) for message in ONE_OF_EACH} == set(msg.AnyMessage.__args__)


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda m: type(m).__name__)
def test_p22_a_message_survives_the_way(message: msg.AnyMessage) -> None:
    assert decode(encode(message)) == message
    assert hash(decode(encode(message))) == hash(message)


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda m: type(m).__name__)
def test_p22_a_field_too_many_or_too_few_is_refused(message: msg.AnyMessage) -> None:
    fields = raw(encode(message))

    with pytest.raises(PeerError):
        decode(framed({**fields, "extra": 1}))
    with pytest.raises(PeerError):
        decode(framed({name: value for name, value in fields.items() if name != "sender"}))


@pytest.mark.parametrize(
    "change",
    [
        {"type": "Gossip"},
        {"epoch": 0},
        {"epoch": "3"},
        {"handoff": ""},
        {"handoff": "x" * 129},
        {"sender": ["d0", -1]},
        {"sender": ["d0"]},
        {"generation": -1},
        {"berth_count": 1 << 17},
        {"berth_count": 0},
        {"grid": [0, 1, 2]},
        {"grid": [0, 1, 2, -3, 1, 1, 1, 1]},
        {"have": b"\x00" * (1 << 18)},
        {"spoiled": [b""] * 65},
    ],
)
def test_p22_a_field_out_of_its_bounds_is_refused(change: dict[str, object]) -> None:
    claim = next(message for message in ONE_OF_EACH if isinstance(message, msg.Claim))

    with pytest.raises(PeerError):
        decode(framed({**raw(encode(claim)), **change}))


def test_p22_another_version_is_refused_with_both_named() -> None:
    with pytest.raises(PeerError, match="has version 3, must have version 2"):
        decode(b"\x03" + encode(ONE_OF_EACH[0])[1:])


def test_p22_a_frame_that_is_too_long_is_neither_sent_nor_read() -> None:
    part = msg.LandedPart(0, 0, 0, bytes(MESSAGE_BYTES_MAX))
    big = msg.Landed(**CLAIM, generation=1, parts=(part,))

    with pytest.raises(ValueError, match="Landed has"):
        encode(big)
    with pytest.raises(PeerError, match="must have at most"):
        decode(bytes(MESSAGE_BYTES_MAX + 1))


@given(st.binary(max_size=200))
def test_p22_garbage_is_refused(frame: bytes) -> None:
    for each in (frame, b"\x02" + frame):
        with pytest.raises(PeerError):
            decode(each)


@given(st.sampled_from(ONE_OF_EACH), st.integers(0, 400))
def test_p22_a_truncated_frame_is_refused(message: msg.AnyMessage, length: int) -> None:
    frame = encode(message)

    with pytest.raises(PeerError):
        decode(frame[: min(length, len(frame) - 1)])


@given(st.sampled_from(ONE_OF_EACH), st.integers(0, 400), st.integers(1, 255))
def test_p22_a_changed_byte_is_refused_or_makes_another_message(
    message: msg.AnyMessage, position: int, change: int
) -> None:
    frame = bytearray(encode(message))
    frame[position % len(frame)] ^= change

    try:
        changed = decode(bytes(frame))
    except PeerError:
        return

    assert decode(encode(changed)) == changed
