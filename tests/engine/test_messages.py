"""Messages between processes are decoded as they were encoded, and garbage is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import STARTER_TOML, parse_config
from penstock.errors import PeerError
from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored
from penstock_serve.engine import messages as ms
from penstock_serve.engine import remote_workers
from penstock_serve.engine.batch import TokenSpan
from penstock_serve.engine.requests import Output, Request
from penstock_serve.engine.sampling_options import Sampled, Sampling, TokenSampling
from penstock_serve.engine.steps import Draw, Step, StepResult

TO_INSTANCE: list[Any] = [
    Request(id="r", prompt=(1, 2), max_tokens=3, sampling=Sampling(seed=-(2**63))),
    ms.Abort(id="r"),
    ms.StopAnswer(id="r", answer=2),
    ms.ResetCache(number=1, why="so", weights_version="v"),
    ms.Ask(id=1, what="story", of="r"),
]
FROM_INSTANCE: list[Any] = [
    ms.LoadProgress(rank=1, layers=2, of=3),
    ms.InstanceReady(
        model="m", positions=8, stop_tokens=[1], config=parse_config(STARTER_TOML), tiers=["device"]
    ),
    Output(request="r", answer=0, sampled=Sampled(5, 0.0, [(5, -0.1)]), cached_by_tier=(8, 0)),
    ms.SubmitRefused(id="r", kind="busy", problem="full"),
    ms.CacheChanged(
        events=[
            BlocksStored(sequence=1, epoch=0, tier="device", keys=[b"k"], parent=None),
            BlocksRemoved(sequence=2, epoch=0, tier="device", keys=[b"k"]),
            AllCleared(sequence=3, epoch=1),
        ]
    ),
    ms.ResetKept(number=1),
    ms.AskAnswer(id=1, json=b"{}"),
]
FROM_RANK: list[Any] = [
    remote_workers.RankCame(1),
    remote_workers.RankLoading(1, 2, 3),
    remote_workers.RankLoaded(b"facts"),
    StepResult(3, [Sampled(1, -0.5, [(1, -0.5)])], [b"report"]),
]
TO_RANK: list[Any] = [
    remote_workers.MeetAt("/proc/1/fd/3"),
    Step(
        3,
        [TokenSpan(1, 0, [1, 2], [0])],
        [Draw(0, 1, TokenSampling(0.0, 1.0, 2**63 - 1, 0))],
        b"plan",
    ),
    remote_workers.End(),
]


@pytest.mark.parametrize("message", TO_INSTANCE, ids=lambda message: type(message).__name__)
def test_what_a_server_says_comes_back_equal(message: Any) -> None:
    assert ms.read_by_instance(ms.encode(message)) == message


@pytest.mark.parametrize("message", FROM_INSTANCE, ids=lambda message: type(message).__name__)
def test_what_an_instance_says_comes_back_equal(message: Any) -> None:
    assert ms.read_by_server(ms.encode(message)) == message


@pytest.mark.parametrize("message", FROM_RANK, ids=lambda message: type(message).__name__)
def test_what_a_rank_says_comes_back_equal(message: Any) -> None:
    assert remote_workers.read_by_scheduler(remote_workers.encode(message)) == message


@pytest.mark.parametrize("message", TO_RANK, ids=lambda message: type(message).__name__)
def test_what_a_scheduler_says_comes_back_equal(message: Any) -> None:
    assert remote_workers.read_by_rank(remote_workers.encode(message)) == message


READERS = [
    ms.read_by_instance,
    ms.read_by_server,
    remote_workers.read_by_rank,
    remote_workers.read_by_scheduler,
]
FRAMES = [ms.encode(message) for message in (*TO_INSTANCE, *FROM_INSTANCE)] + [
    remote_workers.encode(message) for message in (*TO_RANK, *FROM_RANK)
]


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    st.sampled_from(READERS),
    st.binary(max_size=60)
    | st.builds(
        lambda frame, at, byte: frame[: at % len(frame)] + byte + frame[at % len(frame) + 1 :],
        st.sampled_from(FRAMES),
        st.integers(0, 500),
        st.binary(max_size=2),
    ),
)
def test_garbage_is_refused_or_read_and_nothing_else_happens(reader: Any, frame: bytes) -> None:
    try:
        reader(frame)
    except PeerError as error:
        assert "frame" in str(error)  # noqa: PT017 - either outcome is right


def test_a_message_of_the_other_side_is_refused() -> None:
    with pytest.raises(PeerError, match="cannot be read"):
        ms.read_by_instance(ms.encode(FROM_INSTANCE[1]))
    with pytest.raises(PeerError, match="has version 3, must have version 2"):
        ms.read_by_server(b"\x03")
