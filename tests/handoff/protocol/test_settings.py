"""Settings that make no sense are refused, with what would be right."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings, HandoffTimes


def test_the_defaults_make_sense() -> None:
    settings = HandoffSettings()

    assert settings.bounds.area_bytes == 64 << 20
    assert settings.times.resend_s < settings.times.handoff_s < settings.times.lease_s


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"resend_s": 0.0}, "resend_s: is 0.0, must be a number of seconds above 0"),
        ({"lease_s": float("nan")}, "lease_s: is nan, must be a number of seconds above 0"),
        (
            {"resend_cap_s": 1.0},
            "resend_cap_s: is 1.0, must be at least 8 times resend_s 0.25, so that waits can grow",
        ),
        ({"suspect_s": 1.0}, "suspect_s: is 1.0, must be more than ping_s 1.0"),
    ],
)
def test_times_that_make_no_sense_are_refused(change: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        HandoffTimes(**change)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"berth_count": 0}, "berth_count: is 0, must be an int of at least 1"),
        ({"berth_count": 1 << 17}, "berth_count: is 131072, must be at most 65536"),
        ({"attempt_count_max": 65}, "attempt_count_max: is 65, must be at most 64"),
        ({"landing_bytes_max": 1 << 20}, "landing_bytes_max: is 1048576, must hold at least one"),
        ({"retired_bytes_max": 1}, "retired_bytes_max: is 1, must hold at least one area"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(change: dict[str, int], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        HandoffBounds(**change)
