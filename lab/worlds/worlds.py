"""The small worlds that `lab explore handoff` looks at.

Settings are as small as they can be without leaving something out: one berth more than a
request needs would multiply the states, and show nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lab.explore import explore, explore_in_bulk
from lab.worlds.faults import Budget
from lab.worlds.rules import RuledWorld
from lab.worlds.scene import (
    GPU_MEMORY,
    NIXL,
    SHARED_MEMORY,
    Prompt,
    Scene,
    Transport,
    shares,
)
from lab.worlds.world import HandoffWorld
from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings, HandoffTimes

if TYPE_CHECKING:
    from lab.explore import Bounds, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A world, and how it is looked at."""

    name: str
    prefill_count: int
    decode_count: int
    request_count: int = 1
    layer_count: int = 1
    budget: Budget = field(default_factory=Budget)
    crashing: tuple[str, ...] = ()
    """The parties that may die, where the budget has a crash."""
    room: int = 1
    """How many requests each engine can have open at a time."""
    suspicious: bool = True
    """Whether a death may be noticed before the new life is heard of."""
    berth_count: int = 2
    delays: int | None = None
    """At most so many delays; all orders when `None`."""
    reduced: bool = True
    """Whether what cannot influence each other is not interleaved: see `eagerness`."""
    mirrored: bool = False
    """Whether of a state and its image, ranks exchanged, one is followed: see `mirror`."""
    bulk: bool = True
    """Whether whole arrays of states are followed at a time (see `explore.bulk`), rather than one
    after the other without a reduction, which is the way for a number of delays."""
    large: bool = False
    """Whether it may have more states than there is time for."""
    batched: bool = True
    """Whether the engines begin with, compute and claim all prompts in the same steps."""
    insistent: bool = False
    """Whether the decode engine claims a second time whatever became of its first claim."""
    transport: Transport = SHARED_MEMORY

    @property
    def says(self) -> str:
        """The world in one line."""
        faults = [
            f"{count} {name}{self._crashing_said if name == 'crash' else ''}"
            for name, count in zip(Budget.__slots__, self.budget.counts(), strict=True)
            if count and name != "total"
        ]
        most = f", at most {self.budget.counts()[-1]} in all" if len(faults) > 1 else ""
        return (
            f"{self.request_count} request{'s' * (self.request_count > 1)}{self._room_said}, "
            f"{self.prefill_count}×{self.decode_count} ranks, "
            f"{self.layer_count} layer{'s' * (self.layer_count > 1)}"
            f"{'' if self.transport is SHARED_MEMORY else f', {self.transport.name}'}"
            f"{', claimed again if it fails' if self.insistent else ''}; "
            f"faults: {', '.join(faults) or 'none'}{most}"
        )

    @property
    def _crashing_said(self) -> str:
        return f" of {' or '.join(self.crashing)}" if self.crashing else ""

    @property
    def _room_said(self) -> str:
        if self.request_count == 1:
            return ""
        return " one after the other" if self.room == 1 else " at once"

    def make(self) -> HandoffWorld:
        """The world at its beginning."""
        return HandoffWorld(
            self.scene,
            self.budget,
            crashing=self.crashing or self.scene.names,
            suspicious=self.suspicious,
        )

    def make_ruled(self) -> RuledWorld:
        """The same world, to be looked at in bulk."""
        return RuledWorld(
            self.scene,
            self.budget,
            crashing=self.crashing or self.scene.names,
            suspicious=self.suspicious,
            reduced=self.reduced,
            mirrored=self.mirrored,
        )

    @property
    def scene(self) -> Scene:
        """Who takes part, and what the prompts are."""
        grid = Grid(
            layer_first=0,
            layer_count=self.layer_count,
            block_first=0,
            block_count=1,
            block_tokens=1,
        )
        prompts = {
            handoff: Prompt(
                handoff=handoff,
                token_count=1,
                layer_count=self.layer_count,
                wanted=shares(self.prefill_count, self.decode_count, grid),
            )
            for handoff in "abcdefgh"[: self.request_count]
        }
        return Scene(
            prefill_count=self.prefill_count,
            decode_count=self.decode_count,
            prompts=prompts,
            settings=_settings(self.berth_count),
            batched=self.batched,
            room=self.room,
            insistent=self.insistent,
            transport=self.transport,
            # Which of several requests an engine gives up makes no difference; the first will do.
            doubtful=("a",),
        )

    def look(self, bounds: Bounds | None = None) -> Result:
        """Explores the world."""
        if self.bulk:
            world = self.make_ruled()
            result = explore_in_bulk(world, bounds=bounds)
            return replace(result, reduced=self.reduced, mirrored=world.mirror() is not None)
        return explore(self.make(), bounds=bounds, delays=self.delays)


def _settings(berth_count: int) -> HandoffSettings:
    return HandoffSettings(
        times=HandoffTimes(),
        bounds=HandoffBounds(
            berth_bytes=1,
            berth_count=berth_count,
            landing_bytes_max=64,
            retired_bytes_max=32,
            attempt_count_max=2,
            poison_count_max=1,
            close_count_max=1,
        ),
    )


CRASHING = ("D", "P", "D0", "P0")
"""One party of each kind; who leaves most to follow comes last."""

_EVERYTHING = Budget(
    loss=1,
    duplicate=1,
    overtake=1,
    timer=1,
    cancel=1,
    withdraw=1,
    crash=1,
    write=1,
    spoil=1,
    suspect=1,
    total=1,
)


def _two_by_two(name: str, budget: Budget, *, reduced: bool = True) -> Small:
    return Small(
        name=f"two-by-two-{name}",
        prefill_count=2,
        decode_count=2,
        layer_count=2,
        berth_count=1,
        budget=budget,
        reduced=reduced,
        mirrored=True,
    )


def _crashes(small: Small, *, late: tuple[str, ...] = ()) -> tuple[Small, ...]:
    """The same world for each party that may die; with one crash, together they are all of it.

    Far more is eager where all others are known to live, so four of these have fewer states than
    one in which anybody may die. Ranks of a side differ in their names only: the first will do.
    The death of those in `late` is noticed when the new life is heard of, and not before.
    """
    return tuple(
        replace(
            small,
            name=f"{small.name}-{party}",
            budget=Budget(crash=1),
            crashing=(party,),
            suspicious=party not in late,
        )
        for party in CRASHING
    )


def _at_once(name: str, ranks: tuple[int, int], layers: int, budget: Budget) -> Small:
    """Two requests at the same time."""
    return Small(
        name=f"at-once-{name}",
        prefill_count=ranks[0],
        decode_count=ranks[1],
        request_count=2,
        layer_count=layers,
        room=2,
        berth_count=1,
        budget=budget,
        large=True,
        mirrored=True,
    )


def _delayed(name: str, ranks: tuple[int, int], layers: int, budget: Budget, delays: int) -> Small:
    """The same, with more room and a few delays instead of all orders."""
    small = _at_once(name, ranks, layers, budget)
    return replace(
        small,
        name=f"delayed-{name}",
        berth_count=layers,
        bulk=False,
        delays=delays,
        reduced=False,
        mirrored=False,
    )


_ONE_BY_TWO = Small(name="crash", prefill_count=1, decode_count=2, berth_count=1, mirrored=True)

_NIXL = (
    Small(
        name="nixl-any-fault",
        prefill_count=1,
        decode_count=1,
        budget=replace(_EVERYTHING, relay=1),
        transport=NIXL,
        reduced=False,
    ),
    Small(
        name="nixl-two-faults",
        prefill_count=1,
        decode_count=1,
        budget=Budget(cancel=1, write=1, suspect=1, relay=1, total=2),
        transport=NIXL,
        reduced=False,
    ),
    Small(
        name="nixl-relay",
        prefill_count=2,
        decode_count=1,
        berth_count=1,
        budget=Budget(relay=1),
        transport=NIXL,
        reduced=False,
    ),
    *(
        Small(
            name=f"nixl-in-turn-crash-{party}",
            prefill_count=1,
            decode_count=1,
            request_count=2,
            berth_count=1,
            budget=Budget(crash=1),
            crashing=(party,),
            transport=NIXL,
        )
        for party in ("P", "P0")
    ),
)
"""Where a posted write may land at any time until the agent of its area is destroyed."""

_GPU = (
    Small(
        name="gpu-any-fault",
        prefill_count=1,
        decode_count=1,
        budget=_EVERYTHING,
        transport=GPU_MEMORY,
        reduced=False,
    ),
    *(
        Small(
            name=f"gpu-in-turn-crash-{party}",
            prefill_count=1,
            decode_count=1,
            request_count=2,
            berth_count=1,
            budget=Budget(crash=1),
            crashing=(party,),
            transport=GPU_MEMORY,
        )
        for party in ("P", "P0")
    ),
)
"""Where a write may land at any time, whatever became of its area and its berth."""

_RECONNECTS = (
    Small(name="reconnect", prefill_count=1, decode_count=1, budget=Budget(reconnect=2)),
    Small(
        name="reconnect-suspect",
        prefill_count=1,
        decode_count=1,
        budget=Budget(reconnect=1, suspect=1, cancel=1, total=2),
    ),
    Small(
        name="reconnect-two-by-two",
        prefill_count=2,
        decode_count=2,
        berth_count=1,
        budget=Budget(reconnect=1),
        mirrored=True,
    ),
    *(
        Small(
            name=f"reconnect-crash-{party}",
            prefill_count=1,
            decode_count=1,
            berth_count=1,
            budget=Budget(reconnect=1, crash=1),
            crashing=(party,),
        )
        for party in CRASHING
    ),
)
"""A connection is lost and opened again, to the same life or to another."""

WORLDS: tuple[Small, ...] = (
    Small(
        name="one-any-fault",
        prefill_count=1,
        decode_count=1,
        budget=_EVERYTHING,
        reduced=False,
    ),
    Small(
        name="one-two-faults",
        prefill_count=1,
        decode_count=1,
        budget=Budget(loss=1, duplicate=1, cancel=1, withdraw=1, write=1, spoil=1, total=2),
        reduced=False,
    ),
    Small(
        name="one-insistent",
        prefill_count=1,
        decode_count=1,
        budget=Budget(cancel=1, timer=1, overtake=1),
        insistent=True,
    ),
    Small(name="two-by-two", prefill_count=2, decode_count=2, layer_count=2),
    _two_by_two("loss", Budget(loss=1, duplicate=1), reduced=False),
    _two_by_two("cancel", Budget(cancel=1)),
    _two_by_two("timer", Budget(timer=1)),
    replace(_at_once("nothing", (2, 2), 1, Budget()), reduced=False, large=False),
    *_crashes(_ONE_BY_TWO),
    *_crashes(replace(_ONE_BY_TWO, name="in-turn-crash", decode_count=1, request_count=2)),
    *_NIXL,
    *_GPU,
    *_RECONNECTS,
    _delayed("layers", (2, 2), 2, Budget(), delays=2),
    _delayed("cancel", (2, 2), 1, Budget(cancel=1), delays=1),
    _delayed("crash", (1, 2), 1, Budget(crash=1), delays=1),
    _delayed("faults", (2, 2), 2, Budget(loss=1, duplicate=1, cancel=1, total=1), delays=1),
    replace(_at_once("in-turn", (2, 2), 1, Budget(cancel=1)), name="in-turn-cancel", room=1),
    _at_once("cancel", (2, 2), 1, Budget(cancel=1)),
    *_crashes(replace(_two_by_two("crash", Budget()), large=True), late=("P0",)),
    _at_once("loss", (2, 2), 1, Budget(loss=1, cancel=1, total=1)),
    *_crashes(_at_once("crash", (1, 2), 1, Budget()), late=CRASHING),
)
"""Large ones last: they share the time that is left, the largest with what others left over."""
