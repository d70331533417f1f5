"""The worlds of several engines that `lab explore handoff` looks at, and all its worlds together.

A pair of engines that meet, hand over one request and part has more orders than can be visited one
state at a time, so these are looked at with a few delays. Which pair the router chooses, and when,
costs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from lab.explore import explore
from lab.worlds.fleet import Fleet, FleetWorld
from lab.worlds.scene import DECODE, PREFILL
from lab.worlds.worlds import WORLDS, Small

if TYPE_CHECKING:
    from lab.explore import Bounds, Result

_TWO_BY_TWO = (("A", PREFILL), ("B", PREFILL), ("X", DECODE), ("Y", DECODE))
_FOUR_PAIRS = (("A", "X"), ("B", "X"), ("A", "Y"), ("B", "Y"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFleet:
    """A world of several engines, and how it is looked at."""

    name: str
    engines: tuple[tuple[str, str], ...] = _TWO_BY_TWO
    pairs: tuple[tuple[str, str], ...] = _FOUR_PAIRS
    request_count: int = 1
    mortal: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    idles: int = 0
    rejoins: bool = False
    changes_role: bool = False
    delays: int | None = 1
    large: bool = False

    @property
    def says(self) -> str:
        """The world in one line."""
        prefill = sum(role == PREFILL for _, role in self.engines)
        mortal, leaving = " or ".join(self.mortal), " or ".join(self.leaving)
        events = [
            f"{mortal} dies{' and joins again' * self.rejoins}" * bool(mortal),
            f"{leaving} {'changes its role' if self.changes_role else 'leaves'}" * bool(leaving),
            "a pair is closed when idle" * bool(self.idles),
        ]
        return (
            f"{self.request_count} request{'s' * (self.request_count > 1)}, "
            f"{prefill} prefill and {len(self.engines) - prefill} decode engines, "
            f"{len(self.pairs)} pair{'s' * (len(self.pairs) > 1)} of 1×1 ranks; "
            f"{', '.join(filter(None, events)) or 'nobody leaves'}"
        )

    @property
    def fleet(self) -> Fleet:
        """The engines, and what may happen to them."""
        small = Small(
            name=self.name,
            prefill_count=1,
            decode_count=1,
            request_count=self.request_count,
            room=self.request_count,
            berth_count=1,
            batched=False,
        )
        return Fleet(
            engines=self.engines,
            pairs=self.pairs,
            scene=small.scene,
            mortal=self.mortal,
            leaving=self.leaving,
            deaths=bool(self.mortal),
            leaves=bool(self.leaving),
            idles=self.idles,
            rejoins=self.rejoins,
            changes_role=self.changes_role,
        )

    def make(self) -> FleetWorld:
        """The world at its beginning."""
        return FleetWorld(self.fleet)

    def look(self, bounds: Bounds | None = None) -> Result:
        """Explores the world."""
        return explore(self.make(), bounds=bounds, delays=self.delays)


FLEETS: tuple[SmallFleet, ...] = (
    SmallFleet(
        name="fleet-retry",
        engines=_TWO_BY_TWO[:3],
        pairs=_FOUR_PAIRS[:2],
        mortal=("A",),
        delays=2,
    ),
    SmallFleet(name="fleet-death", mortal=("A", "X"), rejoins=True),
    SmallFleet(name="fleet-two-requests", request_count=2, mortal=("A",), delays=0),
    SmallFleet(
        name="fleet-idle",
        engines=(_TWO_BY_TWO[0], _TWO_BY_TWO[2]),
        pairs=_FOUR_PAIRS[:1],
        request_count=2,
        idles=1,
    ),
    SmallFleet(name="fleet-leave", request_count=2, leaving=("A", "X"), delays=0),
    SmallFleet(
        name="fleet-role",
        engines=_TWO_BY_TWO[:3],
        pairs=(("A", "X"), ("B", "X"), ("A", "B")),
        request_count=2,
        leaving=("B",),
        changes_role=True,
    ),
)

AnyWorld: TypeAlias = Small | SmallFleet

EXPLORED: tuple[AnyWorld, ...] = (
    *(world for world in WORLDS if not world.large),
    *FLEETS,
    *(world for world in WORLDS if world.large),
)
"""All of them, large ones last: they share the time that is left."""
