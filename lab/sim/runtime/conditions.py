"""The ways between an owner and its ranks, and what befalls them, drawn from the seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from lab.sim.conditions import branch, draw_conditions
from penstock.cache.settings import WriteKind, WritePolicy

if TYPE_CHECKING:
    from random import Random

    from lab.sim.conditions import Conditions, StoreConditions


class Way(Enum):
    """How plans and reports travel."""

    HERE = "here"
    """Not at all: the one rank is the owner's own process."""
    MESSAGES = "messages"
    """With the engine's own messages: plans in order, reports in any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """All that is drawn for the runtime, beside the conditions of the cache."""

    way: Way
    delay_s: float
    """Mean time of a message on its way."""
    owner_s: float
    """The owner takes its turns within so long after something happened."""
    step_blocks: int
    """A rank copies at most so many blocks a turn."""
    keep: float
    """The bytes below the device outlive the process that had them."""
    lack: float
    """A rank comes back on a machine that does not give it one of its tiers."""
    cut: float
    """Per step of the engine: it takes a rank for dead that lives on for a while."""
    lose: float
    """A message is lost."""
    repeat: float
    """A message arrives twice."""
    garble: float
    """Per step of the engine: something that is no report arrives."""
    shutdown: bool
    """Whether the world ends with copies under way."""
    drain_s: float
    """How long it then waits for those that write blocks down."""


def _with_a_busy_store(rng: Random, conditions: Conditions, store: StoreConditions) -> Conditions:
    """The same conditions where a store has more to do, and is there more often."""
    through = WritePolicy(kind=WriteKind.WRITE_THROUGH)
    late = branch(rng)
    tiers = tuple(
        replace(tier, write=through) if rng.random() < 0.6 else tier
        for tier in conditions.settings.tiers
    )
    return replace(
        conditions,
        settings=replace(conditions.settings, tiers=tiers),
        # A block needs some steps to go down to a store, and up again.
        event_budget=2 * conditions.event_budget,
        prefetch=max(conditions.prefetch, rng.choice((0.0, 0.5, 0.9))),
        alphabet=rng.choice((1, 2, 3)),
        store=replace(
            store,
            death=store.death / 3,
            full=store.full / 8,
            late_s=late.choice((0.0, 0.0, 0.5, 4.0)) * conditions.settings.operation_timeout_s,
        ),
    )


def draw_runtime_conditions(rng: Random) -> tuple[Conditions, Ways]:
    """The conditions of one seed.

    Tiers do not go off by themselves here, and copies do not fail without a cause: the movers
    are the real ones.
    """
    conditions = replace(draw_conditions(rng), stray=0.0, tier_trouble=0.0, weights=0.0)
    if conditions.store is not None:
        conditions = _with_a_busy_store(rng, conditions, conditions.store)

    def fault(chance: float, most: float) -> float:
        drawn = rng.uniform(0.0, most) if rng.random() < chance else 0.0
        return 0.0 if conditions.healthy else drawn

    one = conditions.settings.rank_count == 1
    # Drawn as when there was a third way, also below: old seeds are the worlds that they were.
    # Where it was, an engine is mistaken now.
    drawn = rng.choice(("here", "mistaken", "messages") if one else ("mistaken", "messages"))
    way = Way.HERE if drawn == "here" else Way.MESSAGES
    timeout_s = conditions.settings.operation_timeout_s
    delay_s = rng.choice((0.1, 1.0)) * timeout_s / 80
    owner_s = timeout_s / (40 if conditions.healthy else rng.choice((40, 40, 8)))
    rng.choice((1, 2, 64))
    ways = Ways(
        way=way,
        delay_s=delay_s,
        owner_s=owner_s,
        step_blocks=64 if conditions.healthy else rng.choice((1, 2, 64)),
        keep=rng.choice((0.0, 0.5, 1.0)),
        lack=fault(0.3, 0.5),
        cut=fault(0.4, 0.05),
        lose=fault(0.4, 0.08),
        repeat=fault(0.4, 0.4),
        garble=fault(0.3, 0.05),
        shutdown=not conditions.healthy and rng.random() < 0.3,
        drain_s=rng.choice((0.0, 0.1, 2.0)) * timeout_s,
    )
    if drawn != "mistaken":
        ways = replace(ways, cut=0.0)
    if way is Way.HERE:
        # The one rank cannot die without the owner.
        conditions = replace(conditions, death=0.0)
    return conditions, ways
