"""What all tests share: Hypothesis draws the same examples every time, however slow the day."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("penstock", deadline=None, derandomize=True)
settings.load_profile("penstock")
