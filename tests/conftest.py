"""What all tests share: Hypothesis draws the same examples every time, however slow the day."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "penstock",
    deadline=None,
    derandomize=True,
    # How long examples take to draw says something about the machine, and nothing about the code.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("penstock")
