"""A small world with its ranks in each other's places.

Where ranks differ in their names only, a state and its mirror image lead to the same, names
apart; it is enough to follow one of the two. The image of a local state is what a party comes to
when everything that happened to it happens with the names exchanged. So nothing has to be known of
how machines keep what they know; and that they treat all ranks alike is checked: whatever was
given to a party, its image does the same with the image of it.

What must not break: who may die, and which prompts an engine may give up, is the same in both.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from lab.explore.world import Violation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lab.worlds.carrying import Carrying
    from lab.worlds.parties import Said
    from lab.worlds.scene import Scene

V = TypeVar("V")


class Mirror:
    """The images of the values of all columns."""

    def __init__(self, world: Carrying, names: Mapping[str, str]) -> None:
        self._parties = parties = world.parties
        self._names = re.compile("|".join(rf"\b{name}\b" for name in names))
        self._other = names
        self._channels, self._tidings = world.channels, world.tidings
        self._dues = world.dues
        self._news, self._greetings = self._channels.stop + 1, self._channels.stop + 2
        self._party_of = [parties.place[names.get(name, name)] for name in parties.names]
        routes = [(names.get(a, a), names.get(b, b)) for a, b in parties.routes]
        self._route_of = [parties.routes.index(route) for route in routes]
        self._locals: list[dict[int, int]] = [{0: 0} for _ in parties.names]
        self._actions: dict[int, int] = {}
        self._messages: dict[int, int] = {}
        self._queues: dict[int, int] = {}

    def column(self, column: int) -> int:
        """Where the image of a column is."""
        if column < len(self._party_of):
            return self._party_of[column]
        if column in self._channels:
            return self._channels[self._route_of[column - self._channels.start]]
        return column

    def value(self, column: int, value: int) -> int:
        """The image of what is in a column."""
        if column < len(self._party_of):
            return self.local(column, value)
        if column in self._channels:
            return self._queue(value)
        if column == self._greetings:
            return self._due(value)
        return self._heard(value) if column == self._news else value

    def local(self, place: int, local: int) -> int:
        """The image of a local state."""
        known, memo = self._locals[place], self._parties.memos[place]
        image = self._parties.memos[self._party_of[place]]
        way = []
        while local not in known:
            way.append(local)
            local = memo.origin(local)[0]
        for after in reversed(way):
            before, action = memo.origin(after)
            known[after] = image.after(known[before], self.action(action))[0]
        return known[way[0] if way else local]

    def action(self, action: int) -> int:
        """The image of something that happens to a party."""
        known = self._actions.get(action)
        if known is None:
            actions = self._parties.actions
            known = self._actions[action] = actions.of(self._renamed(actions[action]))
        return known

    def check(self, place: int, local: int, action: int) -> None:
        """The image of a party does the same, names apart.

        Raises:
            Violation: it does not; the two are no images of each other.
        """
        after, said = self._parties.memos[place].after(local, action)
        memo = self._parties.memos[self._party_of[place]]
        image, image_said = memo.after(self.local(place, local), self.action(action))
        if image != self.local(place, after) or _heard(self._said(said)) != _heard(image_said):
            name = self._parties.names[place]
            raise Violation(
                "mirror", f"{name} and its image differ after {self._parties.actions[action]}"
            )

    def _said(self, said: Said) -> Said:
        return tuple((self._route_of[route], self._message(message)) for route, message in said)

    def _message(self, message: int) -> int:
        known = self._messages.get(message)
        if known is None:
            messages = self._parties.messages
            known = self._messages[message] = messages.of(self._renamed(messages[message]))
        return known

    def _queue(self, queue: int) -> int:
        known = self._queues.get(queue)
        if known is None:
            queues = self._parties.queues
            image = tuple(self._message(message) for message in queues[queue])
            known = self._queues[queue] = queues.of(image)
        return known

    def _heard(self, news: int) -> int:
        """Two bits for each route."""
        bits = self._tidings[news]
        return self._tidings.of(
            sum((bits >> 2 * route & 3) << 2 * other for route, other in enumerate(self._route_of))
        )

    def _due(self, greetings: int) -> int:
        """A bit for each route."""
        bits = self._dues[greetings]
        return self._dues.of(
            sum((bits >> route & 1) << other for route, other in enumerate(self._route_of))
        )

    def _renamed(self, value: V) -> V:
        """A value with the names exchanged."""
        image: object = value
        match value:
            case str():
                image = self._names.sub(lambda found: self._other[found[0]], value)
            case tuple():
                parts = [self._renamed(each) for each in value]
                image = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
            case msgspec.Struct():
                fields = {name: getattr(value, name) for name in value.__struct_fields__}
                image = type(value)(**{name: self._renamed(each) for name, each in fields.items()})
            case _:
                pass
        return cast("V", image)


def exchanged(scene: Scene, crashing: Sequence[str]) -> dict[str, str]:
    """Ranks that may be exchanged, two on a side; nothing where the world would be another."""
    names: dict[str, str] = {}
    for ranks in (scene.prefill_ranks, scene.decode_ranks):
        if len(ranks) == 2:
            names |= {ranks[0]: ranks[1], ranks[1]: ranks[0]}
        elif len(ranks) > 2:
            return {}
    same = {names.get(name, name) for name in crashing} == set(crashing)
    return names if same else {}


def _heard(said: Said) -> dict[int, list[int]]:
    """By route; in which order different ones hear something makes no difference."""
    heard: dict[int, list[int]] = {}
    for route, message in said:
        heard.setdefault(route, []).append(message)
    return heard
