"""A process that fails is started again, later and later, and not for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.supervisor.loop import RestartHistory
from penstock.supervisor.messages import Never, OnFailure


def test_the_delay_doubles_up_to_its_limit() -> None:
    history = RestartHistory(OnFailure(limit=5, window_s=1000, delay_s=1, delay_max_s=6))

    planned = [history.plan(now=100.0) for _ in range(6)]

    assert planned == [101.0, 102.0, 104.0, 106.0, 106.0, None]


def test_what_lies_before_the_window_is_forgiven() -> None:
    history = RestartHistory(OnFailure(limit=1, window_s=10, delay_s=1, delay_max_s=1))
    assert history.plan(now=0.0) == 1.0

    assert history.plan(now=10.9) is None
    assert history.plan(now=11.0) == 12.0


def test_a_process_that_is_never_restarted_has_no_plan() -> None:
    assert RestartHistory(Never()).plan(now=5.0) is None


@given(
    limit=st.integers(1, 8),
    window_s=st.floats(0.5, 100),
    delay_s=st.floats(0, 2),
    lives_s=st.lists(st.floats(0, 30), max_size=60),
)
def test_no_window_holds_more_restarts_than_the_limit(
    limit: int, window_s: float, delay_s: float, lives_s: list[float]
) -> None:
    history = RestartHistory(
        OnFailure(limit=limit, window_s=window_s, delay_s=delay_s, delay_max_s=delay_s * 4)
    )
    now, restarts = 0.0, []
    for life_s in lives_s:
        now += life_s
        restart_at = history.plan(now)
        if restart_at is not None:
            assert restart_at >= now
            now = restart_at
            restarts.append(restart_at)

    for last in restarts:
        assert len([each for each in restarts if last - window_s < each <= last]) <= limit


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"limit": 0}, "limit is 0, must be between 1 and 1000"),
        ({"window_s": 0}, r"window_s is 0, must be in \(0, 3600\]"),
        ({"delay_s": 9}, "need 0 <= delay_s <= delay_max_s <= 3600, got 9 and 5.0"),
        ({"delay_s": float("nan")}, "got nan and 5.0"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnFailure(**wrong)
