"""What all actors have in common: a machine, its driver, and the memory it answers for.

An actor carries out what its machine asks for, as far as that happens inside one process.
What leaves the process is a message; what comes from outside is a action.

What must not break: `freeze` says everything that decides what an actor will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from lab.explore.world import Violation
from lab.fixtures.handoff_machines import clone, freeze, introduce
from lab.worlds import actions as do
from lab.worlds.scene import identity_of
from penstock.handoff.protocol import effects as ef
from penstock.handoff.protocol.identity import Life
from penstock.handoff.protocol.party import Party

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from typing import Self

    from lab.worlds.scene import Scene
    from penstock.handoff.protocol.identity import Identity
    from penstock.handoff.protocol.messages import AnyMessage

Effects = list[ef.AnyEffect]


M = TypeVar("M", bound=Party)


class Actor(Generic[M]):
    """One party of a handoff."""

    machine: M
    asked: tuple[ef.AnyEffect, ...] = ()
    """What the machine asked for at the last action, beside messages; no part of the state."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.scene = scene
        self.name = name
        self.identity = identity_of(name)
        self._begin(self.identity, [identity_of(peer) for peer in scene.peers_of(name)])

    def act(self, action: do.Action, now: float) -> tuple[AnyMessage, ...]:
        """Lets something happen to this party; returns what it says to others."""
        if isinstance(action, do.Many):
            return tuple(message for each in action.actions for message in self.act(each, now))
        return self._carry_out(self._effects_of(action, now))

    def tick(self, now: float) -> tuple[AnyMessage, ...]:
        """Lets the machine see the time."""
        return self._carry_out(self.machine.handle_timer(now))

    def _effects_of(self, action: do.Action, now: float) -> Effects:
        """What the machine makes of a action."""
        match action:
            case do.Receive(message=message):
                return self._receive(message, now)
            case do.Expire(timer=timer):
                return self.machine.expire(timer, now)
            case do.Introduce(peer=peer):
                return introduce(self.machine, peer, now)
            case do.Suspect(name=name):
                return self.machine.suspect(name, now)
            case do.Greet(name=name):
                return [ef.Send(message=self.machine.hello_to(Life(name, 0)))]
            case do.Rebirth(life=life, peers=peers):
                self._die(self.identity.life)
                self.identity = identity_of(life.name, life.incarnation)
                return self._begin(self.identity, peers)
            case _:
                return self._effects_of_own(action, now)

    def _receive(self, message: AnyMessage, now: float) -> Effects:
        """What the machine makes of a message; an earlier claim changes nothing of a later one."""
        before = self._later(message)
        effects = self.machine.receive(message, now)
        if before is not None and before != self._later(message):
            kind = type(message).__name__
            raise Violation("epoch", f"{self.name}: an earlier {kind} changes a later claim")
        return effects

    def _carry_out(self, effects: Effects) -> tuple[AnyMessage, ...]:
        said, asked = [], []
        for effect in effects:
            if isinstance(effect, ef.Send):
                said.append(effect.message)
            else:
                asked.append(effect)
                self._carry_out_own(effect)
        self.asked = tuple(asked)
        return tuple(said)

    def _begin(self, identity: Identity, peers: Iterable[Identity]) -> Effects:
        """A new life: its machine, which knows its peers."""
        self.machine = self._new_machine(identity)
        effects: Effects = []
        for peer in peers:
            effects += introduce(self.machine, peer, 0.0)
        return effects

    def clone(self) -> Self:
        """A copy that shares nothing that can change."""
        twin = object.__new__(type(self))
        twin.scene, twin.name, twin.identity = self.scene, self.name, self.identity
        twin.machine = clone(self.machine)
        self._clone_own(twin)
        return twin

    def freeze(self) -> Hashable:
        """Everything that decides what this actor will do."""
        return (self.identity.life.incarnation, freeze(self.machine), self._freeze_own())

    # ---------------------------------------------------------------- of each kind

    def _new_machine(self, identity: Identity) -> M:
        raise NotImplementedError

    def _later(self, message: AnyMessage) -> Hashable | None:
        """What it knows of a later claim than the one a message is about; `None` if nothing."""
        del message
        return None

    def _die(self, life: Life) -> None:
        """The process of that life dies, with all its memory."""
        raise NotImplementedError

    def _effects_of_own(self, action: do.Action, now: float) -> Effects:
        raise NotImplementedError

    def _carry_out_own(self, effect: ef.AnyEffect) -> None:
        raise NotImplementedError

    def _clone_own(self, twin: Self) -> None:
        raise NotImplementedError

    def _freeze_own(self) -> Hashable:
        raise NotImplementedError
