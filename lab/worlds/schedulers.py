"""The two schedulers with what their engines were told.

What must not break: every handoff that was submitted ends exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.worlds import actions as do
from lab.worlds.actor import Actor, Effects, M
from lab.worlds.scene import PREFILL
from penstock.handoff.protocol import effects as ef
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.decode_scheduler import DecodeScheduler
from penstock.handoff.protocol.prefill_scheduler import PrefillScheduler

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Self

    from lab.worlds.scene import Scene
    from penstock.handoff.protocol.identity import Identity, Life
    from penstock.handoff.protocol.states import HandoffOutcome

Place = tuple[str, int]
"""A handoff and its epoch; on the prefill side the epoch is 0."""


class SchedulerActor(Actor[M]):
    """What the two have in common."""

    open: set[Place]
    """Submitted in this life, and not ended."""
    ended: dict[Place, HandoffOutcome]
    """In this or an earlier life of the party."""
    died: set[Place]
    """Open when an earlier life ended."""
    tokens: set[str]
    """Handoffs whose first token is known on the prefill side."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.open, self.ended, self.died, self.tokens = set(), {}, set(), set()
        super().__init__(scene, name)

    def _die(self, life: Life) -> None:
        # The requests of a dead engine end with it: their clients hear of it another way.
        del life
        self.died |= self.open
        self.open = set()

    def knows(self, place: Place) -> bool:
        """Whether it was ever submitted."""
        return place in self.open or place in self.ended or place in self.died

    def _submit(self, place: Place) -> None:
        self.open.add(place)

    def _end(self, place: Place, outcome: HandoffOutcome) -> None:
        if place not in self.open:
            raise Violation(
                "once", f"{self.name}: {place} ends as {outcome.value}, but is not open"
            )
        self.open.remove(place)
        self.ended[place] = outcome

    def _clone_own(self, twin: Self) -> None:
        twin.open, twin.ended = set(self.open), dict(self.ended)
        twin.died, twin.tokens = set(self.died), set(self.tokens)

    def _freeze_own(self) -> Hashable:
        return (
            tuple(sorted(self.open)),
            tuple(sorted((place, outcome.value) for place, outcome in self.ended.items())),
            tuple(sorted(self.died)),
            tuple(sorted(self.tokens)),
        )


class PrefillSchedulerActor(SchedulerActor[PrefillScheduler]):
    """The prefill scheduler."""

    def _new_machine(self, identity: Identity) -> PrefillScheduler:
        return PrefillScheduler(identity, self.scene.settings, ranks=self.scene.prefill_ranks)

    def _effects_of_own(self, action: do.Action, now: float) -> Effects:
        match action:
            case do.Prefill(handoff=handoff):
                self._submit((handoff, 0))
                lease_s = self.scene.prompts[handoff].lease_s
                return self.machine.submit(handoff, now, lease_s=lease_s)
            case do.FirstToken(handoff=handoff):
                self.tokens.add(handoff)
                tokens = self.scene.prompts[handoff].tokens
                return self.machine.first_token(handoff, now, tokens=tokens)
            case do.Cancel(handoff=handoff):
                return self.machine.cancel(handoff, now)
            case _:
                raise TypeError(f"a prefill scheduler cannot {action!r}")

    def _later(self, message: msg.AnyMessage) -> Hashable | None:
        if not isinstance(message, msg.Await | msg.Close):
            return None
        prefill = self.machine.prefills.get(message.handoff)
        if prefill is None or prefill.epoch <= message.epoch:
            return None
        return (prefill.epoch, prefill.state, prefill.outcome)

    def _carry_out_own(self, effect: ef.AnyEffect) -> None:
        if not isinstance(effect, ef.HandoffEnded):
            raise TypeError(f"a prefill scheduler does not ask for {effect!r}")
        self._end((effect.handoff, 0), effect.outcome)


class DecodeSchedulerActor(SchedulerActor[DecodeScheduler]):
    """The decode scheduler."""

    def _new_machine(self, identity: Identity) -> DecodeScheduler:
        return DecodeScheduler(identity, self.scene.settings, ranks=self.scene.decode_ranks)

    def _effects_of_own(self, action: do.Action, now: float) -> Effects:
        match action:
            case do.Claim(handoff=handoff, epoch=epoch):
                self._submit((handoff, epoch))
                prompt = self.scene.prompts[handoff]
                return self.machine.submit(
                    handoff,
                    now,
                    epoch=epoch,
                    prefill=PREFILL,
                    wanted=prompt.wanted,
                    patience_s=prompt.patience_s,
                )
            case do.Cancel(handoff=handoff):
                return self.machine.cancel(handoff, now)
            case do.Withdraw(handoff=handoff):
                return self.machine.withdraw(handoff, now)
            case _:
                raise TypeError(f"a decode scheduler cannot {action!r}")

    def _carry_out_own(self, effect: ef.AnyEffect) -> None:
        if not isinstance(effect, ef.HandoffEnded):
            raise TypeError(f"a decode scheduler does not ask for {effect!r}")
        if effect.outcome.value == "delivered":
            right = self.scene.prompts[effect.handoff].tokens
            if effect.tokens != right:
                raise Violation("content", f"first token {effect.tokens}, {right} is right")
        self._end((effect.handoff, effect.epoch), effect.outcome)
