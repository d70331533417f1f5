"""The two engines of a simulated handoff: prompts are computed, claimed, cancelled, claimed again.

What must not break: what an engine asks of a machine is what a sound engine would ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.worlds import actions as do
from lab.worlds.promises import check_blocks, check_slots, knows_life
from lab.worlds.scene import DECODE, PREFILL
from penstock.handoff.protocol.states import HandoffOutcome

if TYPE_CHECKING:
    from lab.sim.handoff import HandoffWorld
    from penstock.handoff.protocol import effects as ef

EPOCH_MAX = 5
"""An engine that claimed a prompt so often in vain computes it itself."""


class Engines:
    """What both engines do with their prompts."""

    def __init__(self, world: HandoffWorld) -> None:
        self._world = world
        self._rng = world.rng
        self._conditions = world.conditions

    def begin(self) -> None:
        """The router sends every prompt to both engines, some time or other."""
        at = 0.0
        for handoff in self._conditions.scene.prompts:
            at += self._while()
            if self._arrives():
                self._world.after(at + self._while(), self.prefill, handoff)
            if self._arrives():
                self._world.after(at + self._while(), self.claim, handoff, 1)

    def _arrives(self) -> bool:
        """Whether the router's message reaches an engine."""
        if self._rng.random() >= self._conditions.misrouting:
            return True
        self._world.note("request lost")
        return False

    def _while(self) -> float:
        return self._conditions.gap_s * self._rng.expovariate(1.0)

    # ---------------------------------------------------------------- prefill

    def prefill(self, handoff: str) -> None:
        """The prefill engine begins with a prompt, as soon as it can."""
        world = self._world
        scheduler = world.prefill_scheduler.machine
        ready = world.is_up(PREFILL) and all(
            world.is_up(rank)
            and scheduler.is_open(rank)
            and scheduler.life_of(rank) == world.actors[rank].identity.life
            for rank in world.scene.prefill_ranks
        )
        if not ready:
            world.after(0.5, self.prefill, handoff)
            return
        life = self._world.prefill_scheduler.identity.life
        action = do.Prefill(handoff, life.incarnation)
        world.give(PREFILL, action)
        for rank in world.scene.prefill_ranks:
            world.give(rank, action)
            self._compute(rank, handoff)
        if self._rng.random() < self._conditions.cancel:
            world.after(self._rng.uniform(0.0, 2.0), self._cancel, PREFILL, handoff, 0)
        if self._conditions.preempt and self._rng.random() < self._conditions.preempt:
            world.after(self._rng.uniform(0.0, 0.5), self._preempt, handoff)

    def _preempt(self, handoff: str) -> None:
        """The prefill engine gives the blocks of a prompt to others, and computes it anew."""
        scheduler = self._world.prefill_scheduler
        if (handoff, 0) not in scheduler.open or handoff in scheduler.tokens:
            return
        self._world.note("preemption")
        for rank in self._world.scene.prefill_ranks:
            actor = self._world.prefill_rank(rank)
            if actor.owners.get(handoff) == scheduler.identity.life.incarnation:
                was_computed = actor.is_computed(handoff)
                self._world.give(rank, do.Restart(handoff))
                if was_computed:
                    self._compute(rank, handoff)

    def _compute(self, rank: str, handoff: str) -> None:
        delay_s = self._conditions.layer_s * self._rng.expovariate(1.0) * self._world.slowness(rank)
        life = self._world.actors[rank].identity.life
        self._world.after(delay_s, self._computed, rank, life.incarnation, handoff)

    def _computed(self, rank: str, incarnation: int, handoff: str) -> None:
        """A rank has computed one layer of one chunk."""
        actor = self._world.prefill_rank(rank)
        progress = actor.next_progress(handoff)
        if actor.identity.life.incarnation != incarnation or progress is None:
            return
        self._world.give(rank, progress)
        if actor.next_progress(handoff) is not None:
            self._compute(rank, handoff)
        elif self._is_computed(handoff):
            self._world.give(PREFILL, do.FirstToken(handoff))

    def _is_computed(self, handoff: str) -> bool:
        scheduler = self._world.prefill_scheduler
        ranks = [self._world.prefill_rank(name) for name in self._world.scene.prefill_ranks]
        ready = all(rank.is_computed(handoff) for rank in ranks)
        return ready and (handoff, 0) in scheduler.open and handoff not in scheduler.tokens

    def prefill_ended(self, ended: ef.HandoffEnded) -> None:
        """The blocks of a prompt are the prefill engine's again."""
        self._world.seen.copies[f"prefill {ended.outcome.value}"] += 1
        for name in self._world.scene.prefill_ranks:
            check_blocks(self._world.prefill_rank(name), ended.handoff)
            self._world.give(name, do.Purge(ended.handoff))

    # ---------------------------------------------------------------- decode

    def claim(self, handoff: str, epoch: int) -> None:
        """The decode engine claims a handoff, as soon as it can."""
        world = self._world
        ranks = world.scene.decode_ranks
        scheduler = world.decode_scheduler.machine
        ready = world.is_up(DECODE) and all(scheduler.is_open(rank) for rank in ranks)
        if not ready or handoff in scheduler.claimed:
            world.after(0.5, self.claim, handoff, epoch)
            return
        world.give(DECODE, do.Claim(handoff, epoch))
        if self._rng.random() < self._conditions.cancel:
            world.after(self._rng.uniform(0.0, 2.0), self._cancel, DECODE, handoff, epoch)
        if self._rng.random() < self._conditions.withdraw and epoch < EPOCH_MAX:
            world.after(self._rng.uniform(0.0, 0.4), self._withdraw, handoff, epoch)

    def _cancel(self, name: str, handoff: str, epoch: int) -> None:
        scheduler = (
            self._world.prefill_scheduler if name == PREFILL else self._world.decode_scheduler
        )
        if (handoff, epoch) in scheduler.open:
            self._world.note(f"cancel by {'prefill' if name == PREFILL else 'decode'}")
            self._world.give(name, do.Cancel(handoff))

    def _withdraw(self, handoff: str, epoch: int) -> None:
        if (handoff, epoch) in self._world.decode_scheduler.open:
            self._world.note("withdrawal")
            self._world.give(DECODE, do.Withdraw(handoff))

    def decode_ended(self, ended: ef.HandoffEnded) -> None:
        """The slots belong to the request, or are the decode engine's again."""
        self._world.seen.copies[f"decode {ended.outcome.value}"] += 1
        for name in self._world.scene.decode_ranks:
            rank = self._world.decode_rank(name)
            if knows_life(self._world.decode_scheduler, rank):
                check_slots(rank, ended.handoff, ended.epoch, ended.outcome)
            self._world.give(name, do.Purge(ended.handoff, ended.epoch))
        if ended.outcome is HandoffOutcome.WITHDRAWN or self._insists(ended):
            self._world.after(self._while(), self.claim, ended.handoff, ended.epoch + 1)

    def _insists(self, ended: ef.HandoffEnded) -> bool:
        """Whether the engine tries once more what has failed, or was cancelled."""
        if ended.outcome is HandoffOutcome.DELIVERED or ended.epoch >= EPOCH_MAX:
            return False
        if self._rng.random() >= self._conditions.insistence:
            return False
        self._world.note("claimed anyway")
        return True
