"""All parties of a small world as numbers: local states, actions, messages, queues.

What must not break: equal values have equal numbers, and numbers are given in the order in
which values turn up, so that a search is the same every time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from lab.explore.memo import Memo
from lab.worlds.actions import Receive
from lab.worlds.decode import DecodeRankActor
from lab.worlds.prefill import PrefillRankActor
from lab.worlds.scene import DECODE, PREFILL
from lab.worlds.schedulers import DecodeSchedulerActor, PrefillSchedulerActor

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lab.worlds.actions import Action
    from lab.worlds.actor import Actor
    from lab.worlds.scene import Scene
    from penstock.handoff.protocol.messages import AnyMessage

Said = tuple[tuple[int, int], ...]
"""What a party said: numbers of channels and messages."""
AnyActor: TypeAlias = "Actor[Any]"
V = TypeVar("V", bound="Hashable")

EMPTY = 0
"""The number of a queue without messages."""


class Numbers(Generic[V]):
    """Values, each with a number."""

    def __init__(self) -> None:
        self._values: list[V] = []
        self._numbers: dict[V, int] = {}

    def __getitem__(self, number: int) -> V:
        return self._values[number]

    def of(self, value: V) -> int:
        """The number of a value; a new one gets the next."""
        number = self._numbers.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number


def actor_of(scene: Scene, name: str) -> AnyActor:
    """A party at its beginning."""
    if name == PREFILL:
        return PrefillSchedulerActor(scene, name)
    if name == DECODE:
        return DecodeSchedulerActor(scene, name)
    return (PrefillRankActor if name.startswith(PREFILL) else DecodeRankActor)(scene, name)


class Parties:
    """The parties, the channels between them, and everything that has a number."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.names = scene.names
        self.place = {name: place for place, name in enumerate(self.names)}
        self.routes = [(name, peer) for name in self.names for peer in scene.peers_of(name)]
        self._channel = {route: channel for channel, route in enumerate(self.routes)}
        self.actions: Numbers[Action] = Numbers()
        self.messages: Numbers[AnyMessage] = Numbers()
        self.queues: Numbers[tuple[int, ...]] = Numbers()
        assert self.queues.of(()) == EMPTY
        self._joined: dict[tuple[int, int], int] = {}
        self._parted: dict[int, tuple[int, int]] = {}
        self.memos = [self._memo(name) for name in self.names]

    def _memo(self, name: str) -> Memo[AnyActor, int, Said]:
        return Memo(
            actor_of(self.scene, name),
            freeze=lambda actor: actor.freeze(),
            run=self._run,
            clone=lambda actor: actor.clone(),
        )

    def _run(self, actor: AnyActor, action: int) -> Said:
        return self.numbered(actor.act(self.actions[action], 0.0))

    def numbered(self, messages: tuple[AnyMessage, ...]) -> Said:
        """Messages as channels and numbers."""
        return tuple(
            (self._channel[message.sender.name, message.target.name], self.messages.of(message))
            for message in messages
        )

    def actor(self, place: int, local: int) -> AnyActor:
        """A party in one of its local states, to look at only."""
        return self.memos[place].machine(local)

    def joined(self, queue: int, message: int) -> int:
        """A queue with one message more."""
        known = self._joined.get((queue, message))
        if known is None:
            known = self._joined[queue, message] = self.queues.of((*self.queues[queue], message))
        return known

    def parted(self, queue: int) -> tuple[int, int]:
        """The number of the action of receiving the oldest message, and the queue without it."""
        known = self._parted.get(queue)
        if known is None:
            oldest, *others = self.queues[queue]
            action = self.actions.of(Receive(self.messages[oldest]))
            known = self._parted[queue] = (action, self.queues.of(tuple(others)))
        return known
