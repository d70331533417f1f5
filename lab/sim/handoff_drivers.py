"""The drivers of a simulated handoff: writes, takes and fences, each in its time.

What must not break: every effect that starts work ends with exactly one of its inputs, unless
its process died; and a fence is said to hold only when it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.worlds import actions as do
from lab.worlds.prefill import Phase
from penstock.handoff.protocol import effects as ef

if TYPE_CHECKING:
    from lab.sim.handoff import HandoffWorld
    from lab.worlds.parties import AnyActor
    from penstock.handoff.protocol.identity import Life, WriteId

_FENCE_LOOK_S = 0.1
"""A fence that does not hold yet is looked at again after this, then after twice as long, …"""
_FENCE_LOOKS_MAX = 10
"""… until every ghost is gone, and everybody who is going to die is dead."""


class Drivers:
    """What carries out effects, but for messages."""

    def __init__(self, world: HandoffWorld) -> None:
        self._world = world
        self._rng = world.rng
        self._conditions = world.conditions

    def carry_out(self, actor: AnyActor, effect: ef.AnyEffect) -> None:
        """Begins with what a machine asked for."""
        life = actor.identity.life
        match effect:
            case ef.Write():
                self._world.after(
                    self._of(self._conditions.write_s, life), self._post, life, effect
                )
            case ef.AbandonWrite(write=write):
                self._world.after(0.0, self._give_up, life, write)
            case ef.Take():
                if (effect.handoff, effect.epoch) in self._world.decode_scheduler.ended:
                    raise Violation(
                        "given back", f"{life.name} writes to the slots of {effect.handoff}"
                    )
                self._world.after(
                    self._of(self._conditions.take_s, life), self._finish, life, effect
                )
            case ef.Fence():
                self._world.after(0.0, self._fence, life, effect, 0)
            case _:
                pass

    def _of(self, mean_s: float, life: Life) -> float:
        return mean_s * self._rng.expovariate(1.0) * self._world.slowness(life.name)

    def _is_over(self, life: Life) -> bool:
        return self._world.actors[life.name].identity.life != life

    def _is_given_up(self, source: Life, write: ef.Write) -> bool:
        """Whether its rank has abandoned a write, before or after it was posted.

        A part of a prompt that is computed anew is asked for again under the same name.
        """
        posting = self._world.prefill_rank(source.name).writes.get(write.write)
        if posting is None or posting.write is not write:
            return True
        return posting.abandoned and posting.phase is Phase.ASKED

    # ---------------------------------------------------------------- writes

    def _post(self, source: Life, write: ef.Write) -> None:
        if self._is_over(source) or self._is_given_up(source, write):
            return
        target = self._world.decode_rank(write.write.target.name)
        gone = target.identity.life != write.write.target
        if gone or target.is_closed((source, write.write.generation)):
            self._world.note("write refused")
            self._world.give(source.name, do.Bounce(write.write))
            return
        self._world.give(source.name, do.Submit(write.write))
        crossing_s = self._world.network.occupy(source.name, target.name, messages=4)
        write_s = self._of(self._conditions.write_s, source) + crossing_s
        self._world.after(write_s, self._land, source, write)

    def _give_up(self, source: Life, write: WriteId) -> None:
        """What was not read in time is over; what was posted may have been read."""
        if self._is_over(source):
            return
        rank = self._world.prefill_rank(source.name)
        posting = rank.writes.get(write)
        if posting is None or posting.phase is Phase.LANDED or not posting.abandoned:
            return
        # Of a prompt that is computed anew, what was posted goes on.
        let_go = write.handoff not in rank.machine.prompts
        if posting.phase is Phase.ASKED or (let_go and self._rng.random() < 0.5):
            self._world.give(source.name, do.GiveUp(write))
            if posting.phase is Phase.POSTED and not self._world.scene.transport.recalls:
                self.haunt(source, posting.write)

    def _land(self, source: Life, write: ef.Write) -> None:
        """A posted write lands, fails, or finds its poster or its target dead."""
        if self._is_over(source) or self._is_given_up(source, write):
            return  # It is a ghost now, or nobody writes it any more.
        name = write.write
        target = self._world.decode_rank(name.target.name)
        if target.identity.life != name.target:
            self._world.note("write to the dead")
            self._world.give(source.name, do.Bounce(name))
            return
        cut = self._world.network.is_cut(source.name, target.name)
        if cut or self._rng.random() < self._conditions.write_failure:
            self._world.note("write fails")
            self._world.give(source.name, do.Fail(name))
            self.haunt(source, write)
            return
        intact = self._rng.random() >= self._conditions.spoil
        if not intact:
            self._world.note("part corrupt")
        self._world.give(source.name, do.Leave(name))
        self._arrive(source, write, intact=intact)
        own = self._world.scene.transport.own_memory
        if own and self._rng.random() < self._conditions.stray:
            mean_s = 2.0 * (self._conditions.write_s + self._conditions.take_s)
            # Soon, when the berth is in use again; or when its area may have been given back.
            late = self._rng.random() < 0.3
            late_s = self._rng.uniform(0.0, 5.0) if late else mean_s * self._rng.expovariate(1.0)
            self._world.after(late_s, self._stray, source, write)
        self._world.after(
            self._of(self._conditions.write_s, source) / 4, self._observe, source, name
        )

    def _arrive(self, source: Life, write: ef.Write, *, intact: bool) -> None:
        self._world.give(write.write.target.name, do.Land(write, source, intact))
        self._world.network.send(write.notice)

    def _observe(self, source: Life, write: WriteId) -> None:
        if not self._is_over(source):
            self._world.give(source.name, do.Observe(write))

    def haunt(self, source: Life, write: ef.Write) -> None:
        """Nobody waits for this write any more, but it may land yet."""
        self._world.after(self._rng.uniform(0.0, 3.0), self._fade, source, write)

    def _fade(self, source: Life, write: ef.Write) -> None:
        self._world.give(source.name, do.Fade(source, write.write))
        if self._rng.random() < 0.5:
            self._world.note("ghost lands")
            self._arrive(source, write, intact=True)

    def _stray(self, source: Life, write: ef.Write) -> None:
        """A kernel of the writer writes once more, into what may be in use for another part."""
        name = write.write
        target = self._world.decode_rank(name.target.name)
        if target.identity.life != name.target:
            return
        here = (source, name.generation, name.berth)
        if (source, name.generation) not in target.berths:
            self._world.note("late write into memory given back")
        elif any((take.source, take.generation, take.berth) == here for take in target.takes):
            self._world.note("late write into a berth that is read")
        self._world.give(target.name, do.Land(write, source, intact=True))

    # ---------------------------------------------------------------- takes and fences

    def _finish(self, life: Life, take: ef.Take) -> None:
        if not self._is_over(life):
            self._world.give(life.name, do.Finish(take))

    def _fence(self, life: Life, fence: ef.Fence, looks: int) -> None:
        """Says that a fence holds when it does; looks again later when it does not."""
        if self._is_over(life):
            return
        writer = self._world.prefill_rank(fence.peer.name)
        dead = writer.identity.life != fence.peer
        transport = self._world.scene.transport
        in_flight = writer.in_flight(
            fence.peer,
            life,
            fence.generation,
            posted=transport.waits_for_posted,
            ghosts=transport.waits_for_ghosts,
        )
        if in_flight or (self._conditions.fence_on_death and not dead):
            self._world.note("fence does not hold yet")
            if looks < _FENCE_LOOKS_MAX:
                self._world.after(_FENCE_LOOK_S * 2**looks, self._fence, life, fence, looks + 1)
            return
        self._world.give(life.name, do.Fenced(fence.peer, fence.generation))
