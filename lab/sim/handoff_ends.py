"""What must hold when a simulated handoff world has come to rest.

| checker      | promise                                                                     |
|--------------|-----------------------------------------------------------------------------|
| `liveness`   | every handoff ended, on both sides                                          |
| `drain`      | nothing is posted, taken, wanted or held any more                           |
| `usefulness` | in a calm world, every handoff was delivered, however bad the network        |
| `messages`   | in a calm world, their number is in proportion to what travelled, however slow |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.fixtures.handoff_machines import sizes
from penstock.handoff.protocol.states import HandoffOutcome

if TYPE_CHECKING:
    from lab.sim.handoff import HandoffWorld

MESSAGES_A_THING = 25
"""Sent for each part, route and rank of a prompt, at most: found were 4 in the median of 1,500 calm
worlds and 14 in the worst, with a third of all messages lost or doubled, and answers that take
forty times as long as the first resend waits; 12 in the worst of those with a slow link."""
MESSAGES_SPARE = 100
"""For worlds so small that a few losses in a row count."""


def check_at_rest(world: HandoffWorld) -> None:
    """Looks at a world in which nothing will happen any more.

    Raises:
        Violation: something was left behind, or nothing came of it.
    """
    for scheduler in (world.prefill_scheduler, world.decode_scheduler):
        if scheduler.open:
            raise Violation("liveness", f"{scheduler.name}: {min(scheduler.open)} has not ended")
    check_drained(world)
    if world.conditions.calm:
        _check_useful(world)
        check_sparing(world)


def check_drained(world: HandoffWorld) -> None:
    """Nobody has anything to do, or holds anything but landing areas that are open.

    Raises:
        Violation: somebody does.
    """
    for name in world.scene.prefill_ranks:
        rank = world.prefill_rank(name)
        held = sizes(rank.machine)
        if rank.writes or rank.ghosts:
            raise Violation("drain", f"{name} has writes left: {[*rank.writes]}")
        if held["prompts"] or held["wants"] or held["writes under way"]:
            raise Violation("drain", f"{name} has something left: {held}")
    for name in world.scene.decode_ranks:
        target = world.decode_rank(name)
        if target.takes or target.machine.collections:
            found = sizes(target.machine)
            raise Violation("drain", f"{name} has something left: {found}")
        if target.fences and not world.conditions.fence_on_death:
            raise Violation("drain", f"{name} waits for fences: {target.fences}")


def _check_useful(world: HandoffWorld) -> None:
    for handoff in world.scene.prompts:
        outcome = world.decode_scheduler.ended.get((handoff, 1))
        if outcome is not HandoffOutcome.DELIVERED:
            raise Violation(
                "usefulness", f"{handoff} was not delivered, though nothing was in the way"
            )


def check_sparing(world: HandoffWorld, *, opened_count: int = 1) -> None:
    """Whoever waits must not ask more and more: see PROTOCOL.md, section 6.

    Args:
        world: A calm one.
        opened_count: How often the two engines met.

    Raises:
        Violation: too many messages were sent.
    """
    scene, prompts = world.scene, world.scene.prompts.values()
    grids = [
        grid for prompt in prompts for sources in prompt.wanted.values() for _, grid in sources
    ]
    ranks = len(prompts) * (scene.prefill_count + scene.decode_count)
    things = sum(grid.part_count for grid in grids) + len(grids) + ranks
    most = MESSAGES_SPARE * opened_count + MESSAGES_A_THING * things
    if world.network.sent_count > most:
        raise Violation(
            "messages",
            f"{world.network.sent_count} were sent, at most {most} should be for {things} parts, "
            "routes and ranks",
        )
