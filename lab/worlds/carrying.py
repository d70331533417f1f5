"""What moves do to the state of a small world, and what must hold when they do it.

A state is a tuple of small numbers: the local states of the parties, the queues of messages
between them, what is left of the budgets for faults, who has yet to hear of a new life, and who
has yet to greet whom over a new connection.

What must not break: what a move does depends on the state alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lab.worlds import actions as do
from lab.worlds.decode import DecodeRankActor
from lab.worlds.faults import Fault
from lab.worlds.moves import NO_FAULT, Move, MoveKind
from lab.worlds.parties import EMPTY, Numbers, Parties
from lab.worlds.prefill import PrefillRankActor
from lab.worlds.promises import check_blocks, check_slots, knows_life
from lab.worlds.scene import DECODE, PREFILL, identity_of
from lab.worlds.schedulers import SchedulerActor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab.worlds.scene import Scene
    from lab.worlds.schedulers import Place
    from penstock.handoff.protocol.states import HandoffOutcome

State = tuple[int, ...]

TOTAL = len(Fault)
"""The place of the number of all faults among the budgets."""


class Carrying:
    """Where everything lies in a state, and how moves are carried out."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.parties = Parties(scene)
        place = self.parties.place
        self._party_count = len(self.parties.names)
        self._channels = range(self._party_count, self._party_count + len(self.parties.routes))
        self._purse = self._channels.stop
        self._news = self._purse + 1
        self._greetings = self._news + 1
        """The last column."""
        self._budgets: Numbers[tuple[int, ...]] = Numbers()
        self._tidings: Numbers[int] = Numbers()
        """Who has yet to hear of a new life: two bits for each channel from the one reborn."""
        self._dues: Numbers[int] = Numbers()
        """Greetings that are due: a bit for each route."""
        assert self._tidings.of(0) == self._dues.of(0) == 0
        self._prefill_place, self._decode_place = place[PREFILL], place[DECODE]
        self._schedulers = (self._prefill_place, self._decode_place)
        self._prefill_ranks = [place[name] for name in scene.prefill_ranks]
        self._decode_ranks = [place[name] for name in scene.decode_ranks]
        self._hearers = {
            channel: place[peer]
            for channel, (_, peer) in zip(self._channels, self.parties.routes, strict=True)
        }
        self._ends: dict[tuple[int, int, int], tuple[tuple[str, int, HandoffOutcome], ...]] = {}
        """What ended when a scheduler went from one local state to another."""
        self._carriers: dict[MoveKind, Callable[[list[int], Move], None]] = {
            MoveKind.POST: self._post,
            MoveKind.LAND: self._land,
            MoveKind.SPOIL: self._land,
            MoveKind.HAUNT: self._land,
            MoveKind.FENCE: self._act,
            MoveKind.PREFILL: self._prefill,
            MoveKind.TOKEN: self._act,
            MoveKind.HEAR: self._hear,
            MoveKind.LOSE: self._disturb,
            MoveKind.REPEAT: self._disturb,
            MoveKind.OVERTAKE: self._disturb,
            MoveKind.CRASH: self._crash,
            MoveKind.RECONNECT: self._reconnect,
            MoveKind.GREET: self._greet,
        }

    @property
    def channels(self) -> range:
        """The columns of the queues."""
        return self._channels

    @property
    def tidings(self) -> Numbers[int]:
        """Who has yet to hear of a new life: two bits for each route."""
        return self._tidings

    @property
    def dues(self) -> Numbers[int]:
        """Greetings that are due: a bit for each route."""
        return self._dues

    def link_of(self, channel: int) -> tuple[str, str]:
        """The two parties whose connection a channel belongs to."""
        return self.parties.routes[channel - self._channels.start]

    def _way_back(self, channel: int) -> int:
        """The channel in the other direction."""
        name, peer = self.link_of(channel)
        return self._channels[self.parties.routes.index((peer, name))]

    def step(self, state: State, move: Move) -> State:
        """The state after a move."""
        after = list(state)
        kind, place, action, fault = move
        if fault != NO_FAULT:
            after[self._purse] = self._paid(after[self._purse], fault)
        if kind is MoveKind.DELIVER:
            action, after[place] = self.parties.parted(after[place])
            self._do(after, self._hearers[place], action)
        elif kind is MoveKind.DO:
            self._do(after, place, action)
        else:
            self._carriers[kind](after, move)
        return tuple(after)

    # ---------------------------------------------------------------- for worlds of several pairs

    def reborn(self, state: State, names: Sequence[str]) -> State:
        """The parties end with their connections; their next lives know each other, and no more."""
        after, parties = list(self.cut_off(state, names)), self.parties
        lives = {}
        for name in names:
            place = parties.place[name]
            incarnation = parties.actor(place, after[place]).identity.life.incarnation + 1
            lives[name] = identity_of(name, incarnation)
        for name in names:
            peers = tuple(lives[peer] for peer in self.scene.peers_of(name) if peer in lives)
            action = parties.actions.of(do.Rebirth(lives[name].life, peers))
            self._do(after, parties.place[name], action)
        return self.cut_off(tuple(after), names)

    def cut_off(self, state: State, names: Sequence[str]) -> State:
        """No message is on its way to these parties or from them, and no greeting is due."""
        after, due = list(state), self._dues[state[self._greetings]]
        for route, (channel, ends) in enumerate(
            zip(self._channels, self.parties.routes, strict=True)
        ):
            if not {*ends}.isdisjoint(names):
                after[channel] = EMPTY
                due &= ~(1 << route)
        after[self._greetings] = self._dues.of(due)
        return tuple(after)

    def reconnected(self, state: State, one: str, other: str) -> State:
        """Two parties have a new connection, and are about to greet each other over it."""
        after = list(state)
        channel = self._channels[self.parties.routes.index((one, other))]
        self._reconnect(after, Move(MoveKind.RECONNECT, channel))
        return tuple(after)

    def touched(self, state: State) -> list[Place]:
        """Handoffs and epochs whose slots decode ranks write to."""
        return sorted(
            {
                place
                for rank in self._decode_ranks
                for place in self._target(state, self.parties.names[rank]).touches()
            }
        )

    def fencing(self, state: State) -> bool:
        """Whether a decode rank waits for a fence."""
        return any(self._target(state, self.parties.names[r]).fences for r in self._decode_ranks)

    # ---------------------------------------------------------------- moves

    def _paid(self, purse: int, fault: int) -> int:
        """The budgets after a fault."""
        left = [*self._budgets[purse]]
        left[fault] -= 1
        left[TOTAL] -= 1
        return self._budgets.of(tuple(left))

    def _do(self, after: list[int], place: int, action: int) -> None:
        """Something happens to a party; what it says is on its way."""
        local = after[place]
        after[place], said = self.parties.memos[place].after(local, action)
        if said:
            first, joined = self._party_count, self.parties.joined
            for channel, message in said:
                after[first + channel] = joined(after[first + channel], message)
        if place in self._schedulers and after[place] != local:
            self._follow_ends(after, place, local)

    def _act(self, after: list[int], move: Move) -> None:
        self._do(after, move.place, move.action)

    def _prefill(self, after: list[int], move: Move) -> None:
        """The scheduler and its ranks begin with a prompt."""
        for place in (move.place, *self._prefill_ranks):
            self._do(after, place, move.action)

    def _disturb(self, after: list[int], move: Move) -> None:
        """The network loses a message, repeats it, or lets others overtake it."""
        oldest, *others = self.parties.queues[after[move.place]]
        match move.kind:
            case MoveKind.LOSE:
                queue = others
            case MoveKind.REPEAT:
                queue = [oldest, *others, oldest]
            case _:
                queue = [*others, oldest]
        after[move.place] = self.parties.queues.of(tuple(queue))

    def _post(self, after: list[int], move: Move) -> None:
        submit = self.parties.actions[move.action]
        assert isinstance(submit, do.Submit)
        action = move.action
        source = self.parties.actor(move.place, after[move.place]).identity.life
        target = self._target(after, submit.write.target.name)
        gone = target.identity.life != submit.write.target
        if gone or target.is_closed((source, submit.write.generation)):
            action = self.parties.actions.of(do.Bounce(submit.write))
        self._do(after, move.place, action)

    def _land(self, after: list[int], move: Move) -> None:
        parties = self.parties
        leaving = parties.actions[move.action]
        assert isinstance(leaving, do.Leave | do.Fade)
        writer = self._rank(after, move.place)
        write = writer.write_of(leaving)
        source = leaving.source if isinstance(leaving, do.Fade) else writer.identity.life
        target = self._target(after, write.write.target.name)
        gone = target.identity.life != write.write.target
        closed = target.is_closed((source, write.write.generation))
        if (gone or closed) and isinstance(leaving, do.Leave):
            # The target's memory is gone, or behind a fence, and the poster is told so.
            self._do(after, move.place, parties.actions.of(do.Bounce(leaving.write)))
            return
        self._do(after, move.place, move.action)
        if closed:
            return
        intact = move.kind is not MoveKind.SPOIL
        landing = parties.actions.of(do.Land(write, source, intact))
        self._do(after, parties.place[target.name], landing)
        for channel, message in parties.numbered((write.notice,)):
            place = self._party_count + channel
            after[place] = parties.joined(after[place], message)

    def _crash(self, after: list[int], move: Move) -> None:
        parties = self.parties
        name = parties.names[move.place]
        life = parties.actor(move.place, after[move.place]).identity.life
        peers = tuple(
            parties.actor(parties.place[peer], after[parties.place[peer]]).identity
            for peer in self.scene.peers_of(name)
        )
        reborn = identity_of(name, life.incarnation + 1)
        self._do(after, move.place, parties.actions.of(do.Rebirth(reborn.life, peers)))
        news = self._tidings[after[self._news]]
        for index, route in enumerate(parties.routes):
            if route[0] == name:
                news = news & ~(3 << 2 * index) | 1 << 2 * index
        after[self._news] = self._tidings.of(news)

    def _reconnect(self, after: list[int], move: Move) -> None:
        """A connection ends with all that is on its way.

        What is sent while there is none is lost: it could as well have been sent, and lost, before.
        So that one side sees the end earlier than the other is no case of its own.
        """
        due = self._dues[after[self._greetings]]
        for channel in (move.place, self._way_back(move.place)):
            after[channel] = EMPTY
            due |= 1 << channel - self._channels.start
        after[self._greetings] = self._dues.of(due)

    def _greet(self, after: list[int], move: Move) -> None:
        action = self.parties.actions[move.action]
        assert isinstance(action, do.Greet)
        route = self.parties.routes.index((self.parties.names[move.place], action.name))
        due = self._dues[after[self._greetings]] & ~(1 << route)
        after[self._greetings] = self._dues.of(due)
        self._do(after, move.place, move.action)

    def _hear(self, after: list[int], move: Move) -> None:
        action = self.parties.actions[move.action]
        peer = self.parties.names[move.place]
        news = self._tidings[after[self._news]]
        if isinstance(action, do.Introduce):
            index = self.parties.routes.index((action.peer.life.name, peer))
            news &= ~(3 << 2 * index)
        else:
            assert isinstance(action, do.Suspect)
            index = self.parties.routes.index((action.name, peer))
            news |= 2 << 2 * index
        after[self._news] = self._tidings.of(news)
        self._do(after, move.place, move.action)

    # ---------------------------------------------------------------- promises

    def _follow_ends(self, after: list[int], place: int, before: int) -> None:
        """When an engine hears that a handoff is over, its memory is its own again."""
        local = after[place]
        known = self._ends.get((place, before, local))
        if known is None:
            ended = self._scheduler(place, local).ended
            earlier = self._scheduler(place, before).ended
            known = tuple((*at, outcome) for at, outcome in ended.items() if at not in earlier)
            self._ends[place, before, local] = known
        for handoff, epoch, outcome in known:
            if place == self._prefill_place:
                self._give_blocks_back(after, handoff)
            else:
                self._give_slots_back(after, handoff, epoch, outcome)

    def _give_blocks_back(self, after: list[int], handoff: str) -> None:
        for rank in self._prefill_ranks:
            check_blocks(self._rank(after, rank), handoff)
            self._do(after, rank, self.parties.actions.of(do.Purge(handoff)))

    def _give_slots_back(
        self, after: list[int], handoff: str, epoch: int, outcome: HandoffOutcome
    ) -> None:
        scheduler = self._scheduler(self._decode_place, after[self._decode_place])
        for rank in self._decode_ranks:
            actor = self._target(after, self.parties.names[rank])
            if knows_life(scheduler, actor):
                check_slots(actor, handoff, epoch, outcome)
            self._do(after, rank, self.parties.actions.of(do.Purge(handoff, epoch)))

    # ---------------------------------------------------------------- parties

    def _rank(self, state: Sequence[int], place: int) -> PrefillRankActor:
        actor = self.parties.actor(place, state[place])
        assert isinstance(actor, PrefillRankActor)
        return actor

    def _target(self, state: Sequence[int], name: str) -> DecodeRankActor:
        place = self.parties.place[name]
        actor = self.parties.actor(place, state[place])
        assert isinstance(actor, DecodeRankActor)
        return actor

    def _scheduler(self, place: int, local: int) -> SchedulerActor[Any]:
        actor = self.parties.actor(place, local)
        assert isinstance(actor, SchedulerActor)
        return actor
