"""What is said is understood, or refused; nothing else happens."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.supervisor import messages as ms
from penstock.supervisor.messages import Never, OnFailure, ProcessSpec

names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
variables = st.text("ABC_", min_size=1, max_size=8)
seconds = st.floats(0, 3600)
specs = st.builds(
    ProcessSpec,
    name=names,
    module=st.from_regex(r"[a-z_]{1,9}(\.[a-z_]{1,9}){0,3}", fullmatch=True),
    arguments=st.lists(texts, max_size=5).map(tuple),
    environment=st.lists(st.tuples(variables, texts), max_size=5).map(tuple),
    descriptors=st.lists(names, max_size=5, unique=True).map(tuple),
    restart=st.just(Never()) | st.builds(OnFailure, limit=st.integers(1, 1000)),
    stop_s=seconds,
)
numbers = st.integers(0, 2**63 - 1)
requests = st.one_of(
    st.builds(ms.Hold, request=numbers, name=names),
    st.builds(ms.Fetch, request=numbers, name=names),
    st.builds(ms.Forget, request=numbers, name=names),
    st.builds(ms.StartProcess, request=numbers, spec=specs),
    st.builds(ms.StopProcess, request=numbers, name=names, stop_s=st.none() | seconds),
    st.builds(ms.StopAll, request=numbers),
)
answers = st.one_of(
    st.builds(ms.SupervisorReady, pid=numbers),
    st.builds(ms.Done, request=numbers, pid=st.none() | numbers),
    st.builds(
        ms.RequestRefused,
        request=numbers,
        blame=st.sampled_from(["caller", "world"]),
        problem=texts,
    ),
    st.builds(ms.ProcessStarted, name=names, pid=numbers),
    st.builds(
        ms.ProcessExited, name=names, pid=st.none() | numbers, restart_at=st.none() | seconds
    ),
    st.builds(ms.RestartsExhausted, name=names, restarts=numbers, window_s=seconds),
    st.builds(ms.EventsLost, count=numbers),
)


@given(requests)
def test_a_request_arrives_as_it_was_sent(request: ms.AnyRequest) -> None:
    assert ms.decode_request(ms.encode(request)) == request


@given(answers)
def test_an_answer_arrives_as_it_was_sent(answer: ms.AnyReply | ms.ProcessEvent) -> None:
    assert ms.decode_answer(ms.encode(answer)) == answer


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_no_message(garbage: bytes, versioned: bool) -> None:  # noqa: FBT001
    frame = bytes((ms.VERSION,)) + garbage if versioned else garbage

    with pytest.raises(ms.MessageError):
        ms.decode_request(frame)


@given(requests, st.integers(0), st.integers(0, 255))
def test_a_damaged_request_is_refused_or_another_request(
    request: ms.AnyRequest, place: int, byte: int
) -> None:
    frame = bytearray(ms.encode(request))
    frame[place % len(frame)] = byte

    try:
        decoded = ms.decode_request(bytes(frame))
    except ms.MessageError:
        return
    assert isinstance(decoded, ms.SupervisorRequest)


def test_another_version_is_refused() -> None:
    frame = bytes((2,)) + ms.encode(ms.StopAll(request=1))[1:]

    with pytest.raises(ms.MessageError, match="frame has version 2, must have version 1"):
        ms.decode_request(frame)


def test_a_field_that_nobody_knows_is_refused_by_its_name() -> None:
    frame = bytes((1,)) + msgspec.msgpack.encode(
        {"type": "Fetch", "request": 9, "name": "arena", "colour": "blue"}
    )

    with pytest.raises(ms.MessageError, match="unknown field `colour`") as refused:
        ms.decode_request(frame)
    assert refused.value.request == 9


def test_a_request_that_is_too_long_is_not_even_sent() -> None:
    spec = ProcessSpec(name="rank-0", module="rank", arguments=("x" * ms.FRAME_BYTES_MAX,))

    with pytest.raises(ValueError, match=r"StartProcess has 65.* bytes, must have at most 65536"):
        ms.encode(ms.StartProcess(request=1, spec=spec))


def test_a_time_to_stop_in_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop_s is -1, must be in \[0, 3600\]"):
        ms.StopProcess(request=1, name="rank", stop_s=-1)


def test_what_is_no_message_is_the_answer_to_no_request() -> None:
    with pytest.raises(ms.MessageError) as caught:
        ms.decode_request(bytes([ms.VERSION]) + b"no message")

    assert caught.value.request == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "Rank 0"}, "name is 'Rank 0', must be 1 to 64 of a-z"),
        ({"name": ""}, "name is '', must be"),
        ({"module": "rank; import os"}, "module is 'rank; import os', must be a dotted name"),
        ({"module": "a" * 300}, r"module is 'a{80}'… \(300 characters\), must be"),
        ({"arguments": ("a\0b",)}, r"arguments\[0\] is 'a\\x00b', must be UTF-8 without NUL"),
        ({"arguments": ("\udcff",)}, r"arguments\[0\] is '\\udcff', must be UTF-8"),
        ({"arguments": ("",) * 257}, "arguments are 257, must be at most 256"),
        ({"environment": (("A=B", "c"),)}, "environment has the name 'A=B', must be"),
        ({"environment": (("A", "\0"),)}, r"environment\['A'\] is '\\x00', must be"),
        ({"environment": (("A", ""),) * 257}, "environment has 257, must have at most 256"),
        ({"descriptors": ("arena", "arena")}, "must be different"),
        ({"descriptors": ("Arena",)}, "descriptors is 'Arena', must be"),
        ({"descriptors": ("a",) * 65}, "descriptors are 65, must be at most 64"),
        ({"stop_s": -1}, r"stop_s is -1, must be in \[0, 3600\]"),
        ({"stop_s": float("nan")}, "stop_s is nan"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(wrong: dict[str, object], message: str) -> None:
    right = {"name": "rank-0", "module": "penstock.rank"}

    with pytest.raises(ValueError, match=message):
        ProcessSpec(**right | wrong)
