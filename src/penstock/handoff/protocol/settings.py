"""How long the parties of a handoff wait, and how much they hold.

Every wait has a time here (P7), and everything that can grow has a bound (P23).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.handoff.protocol.messages import ATTEMPT_COUNT_MAX, BERTH_COUNT_MAX
from penstock.vocabulary.arguments import as_int, as_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.config import HandoffTable

BERTH_BYTES, GPU_BERTH_BYTES = 4 << 20, 16 << 20
"""Pieces of 4 MiB reach a link's full speed. A part costs each side a tenth of a millisecond of
Python and more, whatever its size: within a GPU 16 MiB travel in less."""
GPU_AREA_BYTES = 128 << 20
"""Parts that wait on a GPU, where an engine takes them between its steps."""
BERTHS, BERTHS_MAX = 8, 32
RESEND_GROWTH_MIN = 8
"""A resend must be able to wait this many times longer than the first: peers may be slow."""


def _check_fields(
    settings: HandoffTimes | HandoffBounds, check: Callable[[str, object], float]
) -> None:
    """Replaces each field by the plain number that it stands for."""
    for each in fields(settings):
        try:
            number = check(each.name, getattr(settings, each.name))
        except ValueError as error:
            raise ConfigError(each.name, str(error).removeprefix(f"{each.name} ")) from None
        object.__setattr__(settings, each.name, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTimes:
    """How long the parties wait."""

    resend_s: float = 0.25
    """A message without an answer is sent again after this, then after twice as long, …"""
    resend_cap_s: float = 4.0
    """… but at least this often. A lease is renewed by resends, so it must last longer."""
    resend_limit_s: float = 30.0
    """A peer that takes longer than that to answer is asked no sooner than it answers, but at least
    this often."""
    handoff_s: float = 60.0
    """Decode gives a handoff up after this, if it was submitted without a patience of its own."""
    lease_s: float = 120.0
    """Prefill keeps a prompt's blocks this long after decode last asked for it."""
    park_s: float = 60.0
    """A claim for a handoff that never came is forgotten after this."""
    ping_s: float = 1.0
    """A peer that was silent this long gets a `Ping`."""
    suspect_s: float = 5.0
    """A peer that was silent this long is suspected."""

    def __post_init__(self) -> None:
        _check_fields(self, as_seconds)
        if self.resend_cap_s < RESEND_GROWTH_MIN * self.resend_s:
            raise ConfigError(
                "resend_cap_s",
                f"is {self.resend_cap_s}, must be at least {RESEND_GROWTH_MIN} times resend_s "
                f"{self.resend_s}, so that waits can grow",
            )
        if self.resend_limit_s < self.resend_cap_s:
            raise ConfigError(
                "resend_limit_s",
                f"is {self.resend_limit_s}, must be at least resend_cap_s {self.resend_cap_s}",
            )
        if self.suspect_s <= self.ping_s:
            raise ConfigError(
                "suspect_s", f"is {self.suspect_s}, must be more than ping_s {self.ping_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffBounds:
    """How much the parties hold, and how often they try."""

    berth_bytes: int = BERTH_BYTES
    """Bytes of a berth: the largest part."""
    berth_count: int = 16
    """Berths of a landing area: `berth_count * berth_bytes` is a peer's credit."""
    landing_bytes_max: int = 4 << 30
    """Landing areas of a rank, open and retired ones together: never exceeded."""
    retired_bytes_max: int = 1 << 30
    """While one more retired area would exceed it, a rank opens none.

    Retired bytes themselves may: areas that are open may all be retired at once.
    """
    retired_count_max: int = 3
    """Retired areas of one peer: one that falls silent again and again costs others nothing."""
    attempt_count_max: int = 3
    """How often a part is written at most, when it was not intact."""
    poison_count_max: int = 2
    """Areas that may fail under one handoff before it is given up."""
    close_count_max: int = 8
    """How often a `Close` without an answer is sent; then the prefill side's lease ends."""
    handoff_count_max: int = 4096
    """Handoffs of one party at a time."""
    peer_count_max: int = 4096
    """Parties known by name; one more is refused."""
    parked_count_max: int = 4096
    """Claims and questions for handoffs that have not come yet."""
    remembered_count: int = 4096
    """Ended handoffs whose end is remembered."""

    def __post_init__(self) -> None:
        _check_fields(self, lambda name, value: as_int(name, value, 1))
        for name, most in (
            ("attempt_count_max", ATTEMPT_COUNT_MAX),
            ("berth_count", BERTH_COUNT_MAX),
        ):
            if getattr(self, name) > most:
                raise ConfigError(name, f"is {getattr(self, name)}, must be at most {most}")
        for name in ("landing_bytes_max", "retired_bytes_max"):
            if self.area_bytes > getattr(self, name):
                raise ConfigError(
                    name,
                    f"is {getattr(self, name)}, must hold at least one area of "
                    f"{self.berth_count} berths of {self.berth_bytes} bytes",
                )

    @property
    def area_bytes(self) -> int:
        """Bytes of one landing area: the credit of one peer."""
        return self.berth_count * self.berth_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """Times and bounds of all parties of a handoff."""

    times: HandoffTimes = HandoffTimes()
    bounds: HandoffBounds = HandoffBounds()

    def __post_init__(self) -> None:
        for name, kind in (("times", HandoffTimes), ("bounds", HandoffBounds)):
            found = getattr(self, name)
            if not isinstance(found, kind):
                raise ConfigError(name, f"is a {type(found).__name__}, must be {kind.__name__}")

    @classmethod
    def of_table(
        cls, table: HandoffTable, *, on_gpu: bool, berths_on_cpu: int = BERTHS
    ) -> HandoffSettings:
        """Those of a `[handoff]` table; where it leaves the berths open, what fits the device.

        Raises `ConfigError`: they do not fit each other; it names the key.
        """
        berth_bytes, berths = _berths_on_gpu(table) if on_gpu else (BERTH_BYTES, berths_on_cpu)
        try:
            return cls(
                times=HandoffTimes(
                    **{each.name: getattr(table, each.name) for each in fields(HandoffTimes)}
                ),
                bounds=HandoffBounds(
                    berth_bytes=table.berth_bytes or berth_bytes,
                    berth_count=table.berth_count or berths,
                    landing_bytes_max=table.landing_bytes_max,
                    retired_bytes_max=table.retired_bytes_max,
                ),
            )
        except ConfigError as error:
            raise ConfigError(f"handoff.{error.field}", error.problem) from error


def _berths_on_gpu(table: HandoffTable) -> tuple[int, int]:
    """The bytes of a berth on a GPU and how many there are, where the table leaves them open.

    As many as it says in as much memory as it allows: larger ones where they fit.
    """
    area = min(GPU_AREA_BYTES, table.landing_bytes_max, table.retired_bytes_max)
    fitting = area // (table.berth_count or BERTHS)
    size = table.berth_bytes or max(BERTH_BYTES, min(GPU_BERTH_BYTES, fitting))
    return size, max(BERTHS, min(BERTHS_MAX, area // size))
