"""Counts and sizes of the four machines, as frozen values: for CLI, metrics and tests.

`counts` holds what happened so often since the start, by name; refused messages are counted
under `refused: …`, one name for each reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class PartyStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What all four have in common."""

    counts: Mapping[str, int]


class PrefillRankStatistics(PartyStatistics, frozen=True, kw_only=True):
    """A prefill rank."""

    prompts: int
    wants: int
    """Claims that are open or parked."""
    writes_under_way: int
    """Posted, and not observed to end."""
    berths_with_target: int
    """Written, and not given back by the target: the part of the credit that is in use."""
    areas_poisoned: int


class DecodeRankStatistics(PartyStatistics, frozen=True, kw_only=True):
    """A decode rank."""

    collecting: int
    complete: int
    ending: int
    takes_under_way: int
    landing_bytes: int
    """Of areas in use."""
    retired_bytes: int
    """Of areas that wait for a fence: memory that nobody can use."""
    retired_bytes_max: int


class DecodeSchedulerStatistics(PartyStatistics, frozen=True, kw_only=True):
    """A decode scheduler."""

    claiming: int
    ending: int
    closing: int
    outcomes: Mapping[str, int]
    """Ended handoffs by outcome."""


class PrefillSchedulerStatistics(PartyStatistics, frozen=True, kw_only=True):
    """A prefill scheduler."""

    awaited: int
    computing: int
    ready: int
    releasing: int
    outcomes: Mapping[str, int]
    """Ended handoffs by outcome."""
