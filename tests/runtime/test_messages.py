"""Plans and reports as bytes: read as they were meant, or refused."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.operations import BlockFault, Purpose
from penstock.errors import PeerError
from penstock.machine.effects import Copy
from penstock.movers.base import Moved
from penstock.runtime.messages import (
    MESSAGE_BYTES_MAX,
    VERSION,
    Plan,
    RankReport,
    copy_bytes,
    decode_plan,
    decode_report,
    encode_plan,
    encode_report,
)
from penstock.vocabulary.frames import TEXT_MAX
from penstock.vocabulary.keys import OperationId

if TYPE_CHECKING:
    from collections.abc import Callable

BITS_64 = st.integers(0, 2**64 - 1)
NUMBERS = st.integers(0, 2**53)
TEXTS = st.text(max_size=40)


@st.composite
def copies(draw: st.DrawFn, incarnation: int = 1) -> Copy:
    count = draw(st.integers(1, 12))
    keys = [draw(st.binary(min_size=16, max_size=16)) for _ in range(count)]

    def slots() -> np.ndarray:
        rows = draw(st.integers(0, 3))
        drawn = draw(
            st.lists(
                st.integers(-1, 2**31 - 1),
                min_size=count * max(1, rows),
                max_size=count * max(1, rows),
            )
        )
        array = np.array(drawn, dtype=np.int32)
        return array.reshape(rows, count) if rows else array

    return Copy(
        operation=OperationId(incarnation, draw(NUMBERS), draw(NUMBERS)),
        purpose=draw(st.sampled_from(Purpose)),
        source=draw(st.integers(0, 5)),
        target=draw(st.integers(0, 5)),
        keys=keys,
        source_slots=slots(),
        target_slots=slots(),
        deadline=1.0,
        cause=draw(TEXTS),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    incarnation = draw(BITS_64)
    abandoned = draw(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4))
    return Plan(
        incarnation,
        draw(st.integers(1, 2**53)),
        draw(st.lists(copies(incarnation), max_size=4)),
        [OperationId(incarnation, epoch, sequence) for epoch, sequence in abandoned],
        draw(st.lists(BITS_64, max_size=2)),
        [OperationId(incarnation, epoch, sequence) for epoch, sequence in reversed(abandoned)],
    )


@st.composite
def reports(draw: st.DrawFn) -> RankReport:
    incarnation = draw(BITS_64)
    fault = st.tuples(st.integers(0, 70_000), st.sampled_from(BlockFault))
    moved = [
        Moved(
            OperationId(incarnation, draw(NUMBERS), draw(NUMBERS)),
            tuple(draw(st.lists(fault, max_size=4))),
            draw(TEXTS),
        )
        for _ in range(draw(st.integers(0, 4)))
    ]
    return RankReport(
        draw(st.integers(0, 4095)), draw(BITS_64), incarnation, draw(st.integers(1, 2**40)), moved
    )


def facts_of(copy: Copy) -> tuple[object, ...]:
    """All that must arrive of a copy; deadlines stay where the clock is."""
    return (
        copy.operation,
        copy.purpose,
        copy.source,
        copy.target,
        list(copy.keys),
        copy.source_slots.tolist(),
        copy.target_slots.tolist(),
        copy.cause,
    )


@settings(derandomize=True, deadline=None)
@given(plan=plans())
def test_a_plan_is_read_as_it_was_written(plan: Plan) -> None:
    read = decode_plan(encode_plan(plan))

    assert read[:2] == plan[:2]
    assert list(map(facts_of, read.copies)) == list(map(facts_of, plan.copies))
    assert read.abandoned == plan.abandoned
    assert all(copy.deadline == math.inf for copy in read.copies)


@settings(derandomize=True, deadline=None)
@given(report=reports())
def test_a_report_is_read_as_it_was_written(report: RankReport) -> None:
    assert decode_report(encode_report(report)) == report


@settings(derandomize=True, deadline=None, max_examples=120)
@given(message=st.binary(max_size=200))
def test_garbage_is_refused_by_one_kind_of_error(message: bytes) -> None:
    for read in (decode_plan, decode_report):
        for head in (b"", b"P" + bytes([VERSION]), b"R" + bytes([VERSION])):
            try:
                read(head + message)
            except PeerError:
                continue


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x96\x01\x01\xdd\xff\xff\xff\xff",
        b"\x96\x01\x01\x90\xdd\xff\xff\xff\xff\x92\x01\x01",
        b"\x96\x01\x01\x91\x9b\x00\x01\xa4load\x01\x00\xc6\xff\xff\xff\xff",
    ],
    ids=["message", "copies", "abandoned", "keys"],
)
def test_a_message_that_promises_billions_is_refused_without_making_room(body: bytes) -> None:
    with pytest.raises(PeerError, match="truncated"):
        decode_plan(b"P" + bytes([VERSION]) + body)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(plan=plans(), data=st.data())
def test_a_damaged_plan_is_refused_or_still_makes_sense(plan: Plan, data: st.DataObject) -> None:
    message = bytearray(encode_plan(plan))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))

    try:
        read = decode_plan(bytes(message))
    except PeerError:
        return

    for copy in read.copies:
        assert copy.source_slots.shape[-1] == copy.target_slots.shape[-1] == len(copy.keys) > 0
        assert {len(key) for key in copy.keys} == {16}


@settings(derandomize=True, deadline=None)
@given(plan=plans(), data=st.data())
def test_a_plan_that_was_cut_or_has_more_behind_it_is_refused(
    plan: Plan, data: st.DataObject
) -> None:
    message = encode_plan(plan)
    end = data.draw(st.integers(0, len(message) - 1))

    with pytest.raises(PeerError):
        decode_plan(message[:end])
    with pytest.raises(PeerError):
        decode_plan(message + b"\x00")


@pytest.mark.parametrize(
    ("read", "message", "problem"),
    [
        (decode_plan, b"", "a plan begins with b'', must begin with b'P'"),
        (decode_plan, b"R\x01", "a plan begins with b'R', must begin with b'P'"),
        (decode_report, b"P" + bytes([VERSION]), "a report begins with b'P', must begin with b'R'"),
        (decode_plan, b"P", "a plan has no version, must have version 2"),
        (decode_plan, b"P\x01\x90", "a plan has version 1, must have version 2: both sides"),
        (decode_plan, b"P" * (MESSAGE_BYTES_MAX + 1), "a plan has 16777217 bytes, must have at"),
        (decode_plan, b"P" + bytes([VERSION]) + b"\x90", "a plan cannot be read"),
    ],
)
def test_what_is_wrong_with_a_message_is_said(
    read: Callable[[bytes], object], message: bytes, problem: str
) -> None:
    with pytest.raises(PeerError) as refusal:
        read(message)

    assert problem in str(refusal.value)


def wire(*fields: object) -> bytes:
    return b"P" + bytes([VERSION]) + msgspec.msgpack.encode(list(fields))


ROW = [0, 1, "load", 1, 0, bytes(32), 0, bytes(8), 0, bytes(8), "r"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ((1, 1, [], [], [], [], "more"), "at most length 6"),
        ((1, 1, [], [], []), "at least length 6"),
        ((1, 0, [], [], [], []), ">= 1"),
        ((-1, 1, [], [], [], []), ">= 0"),
        ((1, 1, [[*ROW, 0]], [], [], []), "at most length 11"),
        ((1, 1, [[0, 1, "steal", *ROW[3:]]], [], [], []), "Invalid enum value 'steal'"),
        (
            (1, 1, [[*ROW[:5], b"", *ROW[6:]]], [], [], []),
            "has 0 bytes of keys, must have 16 for each",
        ),
        ((1, 1, [[*ROW[:5], bytes(31), *ROW[6:]]], [], [], []), "has 31 bytes of keys"),
        (
            (1, 1, [[*ROW[:7], bytes(4), *ROW[8:]]], [], [], []),
            "has 4 bytes of slots, must have 4 for",
        ),
        ((1, 1, [[*ROW[:6], 3, *ROW[7:]]], [], [], []), "each of 2 blocks in 3 rows"),
        ((1, 1, [[*ROW[:10], "r" * (TEXT_MAX + 1)]], [], [], []), f"length <= {TEXT_MAX}"),
    ],
)
def test_a_plan_with_something_wrong_in_it_is_refused(
    fields: tuple[object, ...], problem: str
) -> None:
    decode_plan(wire(1, 1, [ROW], [], [], []))

    with pytest.raises(PeerError) as refusal:
        decode_plan(wire(*fields))

    assert problem in str(refusal.value)


def small_plan(*, blocks: int = 8, cause: str = "request-7") -> Plan:
    slots = np.arange(blocks, dtype=np.int32)
    copy = Copy(
        operation=OperationId(2**63, 3, 4),
        purpose=Purpose.SAVE,
        source=0,
        target=1,
        keys=[bytes([at % 256]) * 16 for at in range(blocks)],
        source_slots=slots[np.newaxis],
        target_slots=slots,
        deadline=1.0,
        cause=cause,
    )
    return Plan(2**63, 1, [copy], [])


def test_texts_of_any_length_and_kind_travel() -> None:
    plan = small_plan(cause="x" * 5000 + "\ud800")

    (read,) = decode_plan(encode_plan(plan)).copies
    (lone,) = decode_plan(encode_plan(small_plan(cause="\ud800"))).copies

    assert read.cause == "x" * TEXT_MAX
    assert lone.cause == "?"


@pytest.mark.parametrize("blocks", [1, 100, 50_000])
def test_a_copy_takes_no_more_bytes_than_it_was_counted_for(blocks: int) -> None:
    plan = small_plan(blocks=blocks, cause="\U0001f600" * 2000)

    assert len(encode_plan(plan)) <= copy_bytes(plan.copies[0])


def test_a_message_that_fits_no_frame_is_not_made() -> None:
    plan = small_plan(blocks=MESSAGE_BYTES_MAX // 16)

    with pytest.raises(ValueError, match="must have at most 16777216"):
        encode_plan(plan)


def test_a_small_plan_is_cheap_to_write_and_to_read() -> None:
    plan = small_plan()
    message = encode_plan(plan)

    def best_us(call: Callable[[], object]) -> float:
        times = []
        for _ in range(200):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return min(times) * 1e6

    # It rides on every step's message. A thousand additions take this machine four times as long
    # as the one, and as long as the other; the limits are ten times that.
    additions_us = best_us(lambda: sum(range(1000)))
    assert best_us(lambda: encode_plan(plan)) < 3 * additions_us
    assert best_us(lambda: decode_plan(message)) < 10 * additions_us
