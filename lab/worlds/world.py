"""A small world of shipped machines, in which everything happens in every order.

Its state is a tuple of small numbers: for every party the number of its local state, for every
pair of parties that of the messages on their way from one to the other, then how often each
fault may still occur, who has yet to hear of whose new life, and who to greet whom. What a action
does to a local state is worked out once (`memo`).

| move                     | when                                                             |
|--------------------------|------------------------------------------------------------------|
| deliver                  | the oldest message between two parties                           |
| post, land, observe      | of a write, each on its own                                      |
| finish                   | of a take: verified and moved                                    |
| fence                    | when the transport says so; over shared memory, when nothing     |
|                          | that life posted to the area can land any more                   |
| prefill, progress, token | each layer of each rank on its own; the token when all is there   |
| claim                    | once for every epoch                                             |
| hear of a new life       | after a crash; or suspect the old one first                      |
| greet                    | when a new connection is open                                    |
| a timer expires          | when nothing else can happen; or as a fault                      |
| a fault                  | while its budget lasts                                           |

What must not break: whatever a real driver, network or engine may do within these terms is a
move here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.worlds import actions as do
from lab.worlds.carrying import TOTAL, Carrying, State
from lab.worlds.descriptions import describe
from lab.worlds.faults import Budget, Fault
from lab.worlds.moves import NO_FAULT, Move, MoveKind, local_moves
from lab.worlds.parties import EMPTY
from lab.worlds.scene import PREFILL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lab.worlds.moves import LocalMoves
    from lab.worlds.scene import Scene
    from lab.worlds.schedulers import Place


class HandoffWorld(Carrying):
    """Two engines, their ranks, the network between them, and what may go wrong."""

    def __init__(
        self,
        scene: Scene,
        budget: Budget,
        *,
        crashing: Sequence[str] = (),
        suspicious: bool = True,
    ) -> None:
        super().__init__(scene)
        self.budget = budget
        self._suspicious = suspicious
        """Whether a death may be noticed before the new life is heard of."""
        self._crashing = [self.parties.place[name] for name in crashing]
        self._locals: list[dict[int, LocalMoves]] = [{} for _ in self.parties.names]
        self._touched: list[dict[int, frozenset[Place]]] = [{} for _ in self.parties.names]
        """Handoffs and epochs whose slots a decode rank writes to, by its local state."""
        self._deliveries = [Move(MoveKind.DELIVER, channel) for channel in self._channels]
        self._across = [
            (name, peer)
            for name, peer in self.parties.routes
            if name.startswith(PREFILL) != peer.startswith(PREFILL)
        ]
        self._links = [
            channel
            for channel, (name, peer) in zip(self._channels, self.parties.routes, strict=True)
            if self.parties.place[name] < self.parties.place[peer]
        ]
        """One channel of each connection."""
        self._packing = struct.Struct(f"<{self._greetings + 1}I").pack

    # ---------------------------------------------------------------- what the explorer asks

    def begin(self) -> State:
        """Everybody knows everybody, and nothing has happened."""
        parties = (0,) * self._party_count
        queues = (EMPTY,) * len(self._channels)
        return (*parties, *queues, self._budgets.of(self.budget.counts()), 0, 0)

    def moves(self, state: State) -> Sequence[Move]:
        """What can happen."""
        local = self._all_local(state)
        usual = self._usual(state, local)
        quiet = not usual
        if quiet:
            for mine in local:
                usual += mine.timers
        left = self._budgets[state[self._purse]]
        if left[TOTAL]:
            usual += self._faults(state, local, left, quiet=quiet)
        return usual

    def usual_moves(self, state: State) -> list[Move]:
        """What can happen without timers and faults."""
        return self._usual(state, self._all_local(state))

    def timers(self, state: State) -> list[Move]:
        """The timers that run."""
        return [move for mine in self._all_local(state) for move in mine.timers]

    def check(self, state: State) -> None:
        """Nobody begins to write to slots after their engine was told that it is over.

        Everything else is checked by the moves that could break it.
        """
        ended = None
        for place in self._decode_ranks:
            touched = self._touched[place].get(state[place])
            if touched is None:
                actor = self._target(state, self.parties.names[place])
                touched = self._touched[place][state[place]] = actor.touches()
            if touched:
                ended = ended or self._scheduler(self._decode_place, state[self._decode_place])
                over = sorted(at for at in touched if at in ended.ended)
                if over:
                    name = self.parties.names[place]
                    raise Violation("given back", f"{name} writes to the slots of {over[0]}")

    def finished(self, state: State) -> bool:
        """Nothing is under way, and every request has ended on both sides."""
        if any(state[self._party_count : self._purse]):
            return False
        for place in range(self._party_count):
            mine = self._local(place, state[place])
            if mine.usual or mine.conditional:
                return False
        if state[self._greetings] or (state[self._news] and any(self._hearings(state))):
            return False
        return all(not self._scheduler(place, state[place]).open for place in self._schedulers)

    def pack(self, state: State) -> bytes:
        """The numbers, four bytes each."""
        return self._packing(*state)

    def is_fault(self, move: Move) -> bool:
        """Whether it is paid from a budget."""
        return move.fault != NO_FAULT

    def tell(self, state: State, move: Move) -> str:
        """The move in words."""
        return describe(self, state, move)

    def conclude(self) -> None:
        """Checks that the states say everything.

        Raises:
            Violation: something may have been missed.
        """
        for memo in self.parties.memos:
            memo.check_completeness()

    # ---------------------------------------------------------------- which moves there are

    def _all_local(self, state: State) -> list[LocalMoves]:
        return [
            known.get(number) or self._local(place, number)
            for place, (known, number) in enumerate(zip(self._locals, state, strict=False))
        ]

    def _usual(self, state: State, local: Sequence[LocalMoves]) -> list[Move]:
        """What can happen without timers and faults."""
        usual = [
            move
            for move, queue in zip(self._deliveries, state[self._party_count :], strict=False)
            if queue
        ]
        for mine in local:
            if mine.usual:
                usual += mine.usual
            if mine.conditional:
                usual += [move for move in mine.conditional if self._is_possible(state, move)]
        if state[self._news]:
            usual += self._hearings(state)
        if state[self._greetings]:
            due = self._dues[state[self._greetings]]
            routes = range(len(self.parties.routes))
            usual += [self._greeting(route) for route in routes if due >> route & 1]
        return usual

    def _local(self, place: int, local: int) -> LocalMoves:
        known = self._locals[place].get(local)
        if known is None:
            actor = self.parties.actor(place, local)
            known = self._locals[place][local] = local_moves(self.parties, place, actor)
        return known

    def _is_possible(self, state: State, move: Move) -> bool:
        """Whether the other parties allow it."""
        match move.kind:
            case MoveKind.FENCE:
                return self._can_fence(state, move)
            case MoveKind.TOKEN:
                return self._is_computed(state, move)
            case _:
                return self._can_start(state)

    def _can_fence(self, state: State, move: Move) -> bool:
        """Whether what the transport's fence waits for has ended."""
        fenced = self.parties.actions[move.action]
        assert isinstance(fenced, do.Fenced)
        target = self.parties.actor(move.place, state[move.place]).identity.life
        source = self.parties.place[fenced.peer.name]
        writer = self._rank(state, source)
        transport = self.scene.transport
        return not writer.in_flight(
            fenced.peer,
            target,
            fenced.generation,
            posted=transport.waits_for_posted,
            ghosts=transport.waits_for_ghosts,
        )

    def _can_start(self, state: State) -> bool:
        """Whether the prefill engine knows all its ranks' lives: it gives no work to the dead."""
        scheduler = self.parties.actor(self._prefill_place, state[self._prefill_place])
        return all(
            scheduler.machine.life_of(rank.name) == rank.identity.life
            for rank in (self._rank(state, place) for place in self._prefill_ranks)
        )

    def _is_computed(self, state: State, move: Move) -> bool:
        """Whether every rank has computed the prompt whose token it is."""
        action = self.parties.actions[move.action]
        tokens = action.actions if isinstance(action, do.Many) else (action,)
        return all(
            self._rank(state, place).is_computed(token.handoff)
            for place in self._prefill_ranks
            for token in tokens
            if isinstance(token, do.FirstToken)
        )

    def _greeting(self, route: int) -> Move:
        name, peer = self.parties.routes[route]
        action = self.parties.actions.of(do.Greet(peer))
        return Move(MoveKind.GREET, self.parties.place[name], action)

    def _hearings(self, state: State) -> Iterator[Move]:
        """Who has yet to hear of a new life, and may do so now."""
        for route in range(len(self.parties.routes)):
            yield from self._hearings_on(state, route)

    def _hearings_on(self, state: State, route: int) -> Iterator[Move]:
        news = self._tidings[state[self._news]] >> 2 * route
        if not news & 1:
            return
        name, peer = self.parties.routes[route]
        place, source = self.parties.place[peer], self.parties.place[name]
        reborn = self.parties.actor(source, state[source]).identity
        if self.parties.actor(place, state[place]).machine.life_of(name) == reborn.life:
            return  # It was told by the new life itself.
        yield Move(MoveKind.HEAR, place, self.parties.actions.of(do.Introduce(reborn)))
        if self._suspicious and not news & 2:
            yield Move(MoveKind.HEAR, place, self.parties.actions.of(do.Suspect(name)))

    def _faults(
        self, state: State, local: Sequence[LocalMoves], left: tuple[int, ...], *, quiet: bool
    ) -> Iterator[Move]:
        for mine in local:
            yield from (move for move in mine.faults if left[move.fault])
        if left[Fault.TIMER] and not quiet:
            for mine in local:
                yield from mine.early
        yield from self._network_faults(state, left)
        if left[Fault.CRASH]:
            yield from (Move(MoveKind.CRASH, place, 0, Fault.CRASH) for place in self._crashing)
        if left[Fault.SUSPECT]:
            # Only across: the death of a colleague is seen, not suspected.
            for name, peer in self._across:
                action = self.parties.actions.of(do.Suspect(peer))
                yield Move(MoveKind.DO, self.parties.place[name], action, Fault.SUSPECT)

    def _network_faults(self, state: State, left: tuple[int, ...]) -> Iterator[Move]:
        for fault, kind in DISTURBANCES:
            if left[fault]:
                yield from (Move(kind, c, 0, fault) for c in self._channels if state[c])
        if left[Fault.RECONNECT]:
            for channel in self._links:
                yield Move(MoveKind.RECONNECT, channel, 0, Fault.RECONNECT)


DISTURBANCES = (
    (Fault.LOSS, MoveKind.LOSE),
    (Fault.DUPLICATE, MoveKind.REPEAT),
    (Fault.OVERTAKE, MoveKind.OVERTAKE),
)
