"""The moves of a small world in families, each with the columns that matter to it.

What must not break: a family names every column that its moves look at or change. `rules` of
the explorer refuses changes elsewhere, and `bulk` compares samples with the world's own moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.explore.rules import Look, Phase, Rule
from lab.worlds import actions as do
from lab.worlds.carrying import TOTAL, State
from lab.worlds.eagerness import Eagerness
from lab.worlds.faults import Fault
from lab.worlds.mirror import Mirror, exchanged
from lab.worlds.moves import Move, MoveKind
from lab.worlds.prefill import PrefillRankActor
from lab.worlds.world import DISTURBANCES, HandoffWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lab.worlds.faults import Budget
    from lab.worlds.moves import LocalMoves
    from lab.worlds.scene import Scene

_TO_A_TARGET = (MoveKind.POST, MoveKind.LAND, MoveKind.HAUNT, MoveKind.SPOIL)


class RuledWorld(HandoffWorld):
    """A world of a handoff that can be looked at in bulk."""

    def __init__(
        self,
        scene: Scene,
        budget: Budget,
        *,
        crashing: Sequence[str] = (),
        suspicious: bool = True,
        reduced: bool = True,
        mirrored: bool = False,
    ) -> None:
        super().__init__(scene, budget, crashing=crashing, suspicious=suspicious)
        names = exchanged(scene, crashing) if mirrored else {}
        self._mirror = Mirror(self, names) if names else None
        self._happened: list[set[tuple[int, int]]] = [set() for _ in self.parties.names]
        """For each party, what happened to it in which local state."""
        fenced = bool(budget.crash or budget.suspect or budget.write or budget.relay)
        self._eagerness = (
            Eagerness(self.parties, self._local, budget=budget.counts(), fenced=fenced)
            if reduced
            else None
        )
        disturbed = budget.loss or budget.duplicate or budget.overtake or budget.reconnect
        self._patient = bool(disturbed or budget.timer)
        """Whether nothing is eager while a fault may come first."""
        self._spent = Look(self._purse, lambda purse: int(not self._budgets[purse][TOTAL]))
        self._eager_rules = [rule for rule in self.rules() if rule.eager is not None]

    def moves(self, state: State) -> Sequence[Move]:
        """What can happen; an eager move alone."""
        left = self._budgets[state[self._purse]]
        if self._eagerness is not None and not (self._patient and left[TOTAL]):
            for rule in self._eager_rules:
                moves = rule.moves(state) if all(look.of(state) for look in rule.only) else ()
                place = self._eager_of(state, moves)
                if place is not None:
                    return [moves[place]]
        return super().moves(state)

    def review(self) -> set[tuple[int, int]]:
        """Parties and local states in which a move was taken for eager, but is not."""
        return set() if self._eagerness is None else self._eagerness.review()

    def _do(self, after: list[int], place: int, action: int) -> None:
        local = after[place]
        super()._do(after, place, action)
        if self._eagerness is not None:
            self._use(place, local, action)
        if self._mirror is not None and (local, action) not in self._happened[place]:
            self._happened[place].add((local, action))
            self._mirror.check(place, local, action)
            if self._eagerness is not None:
                # What happens to a party may happen to its image, which nobody looks at.
                image = self._mirror.column(place), self._mirror.local(place, local)
                self._use(*image, self._mirror.action(action))

    def _use(self, place: int, local: int, action: int) -> None:
        assert self._eagerness is not None
        after, _ = self.parties.memos[place].after(local, action)
        self._eagerness.used[place][local][action] = after

    def mirror(self) -> Mirror | None:
        """How the world looks with its ranks exchanged."""
        return self._mirror

    def eager_where(self) -> Look | None:
        """Nothing is eager while a fault may come first."""
        return self._spent if self._patient else None

    def _eager_of(self, state: State, moves: Sequence[Move]) -> int | None:
        """The first of some moves of a party that may happen alone."""
        assert self._eagerness is not None
        for number, move in enumerate(moves):
            place, action = move.place, move.action
            if move.kind is MoveKind.DELIVER:
                place = self._hearers[move.place]
                action, _ = self.parties.parted(state[move.place])
            elif move.kind is MoveKind.FENCE:
                if not self._is_against_the_dead(state, place, action):
                    continue
            elif move.kind not in self._eagerness.kinds:
                continue
            if self._eagerness.is_eager(place, state[place], action):
                return number
        return None

    def _is_against_the_dead(self, state: State, place: int, action: int) -> bool:
        """Whether the writer that a fence keeps out has died, and all that it had posted ended."""
        fenced = self.parties.actions[action]
        assert isinstance(fenced, do.Fenced)
        source = self._rank(state, self.parties.place[fenced.peer.name])
        target = self.parties.actor(place, state[place]).identity.life
        in_flight = source.in_flight(fenced.peer, target, fenced.generation)
        return source.identity.life != fenced.peer and not in_flight

    def joined(self, queue: int, more: int) -> int:
        """A queue with another behind it."""
        queues = self.parties.queues
        return queues.of((*queues[queue], *queues[more]))

    def tail(self, queue: int, longer: int) -> int:
        """What was appended to a queue."""
        queues = self.parties.queues
        return queues.of(queues[longer][len(queues[queue]) :])

    def checks(self) -> list[tuple[int, ...]]:
        """Each decode rank with its scheduler."""
        return [(self._decode_place, rank) for rank in self._decode_ranks]

    def rules(self) -> list[Rule[Move]]:
        """All moves, in families."""
        rules = [*self._deliveries_by_rule()]
        for place in range(self._party_count):
            rules += self._own(place)
        for rank in self._prefill_ranks:
            for target in self._decode_ranks:
                rules += self._writes(rank, target)
                rules.append(self._fences(rank, target))
        rules += [self._starts(), self._first_tokens()]
        if self.budget.crash:
            rules += [self._crashes(place) for place in self._crashing]
            rules += [self._hears(route) for route in range(len(self.parties.routes))]
        if self.budget.reconnect:
            rules += [self._reconnects(channel) for channel in self._links]
            rules += [self._greets_on(route) for route in range(len(self.parties.routes))]
        rules += [*self._disturbances(), *self._suspicions()]
        return rules

    # ---------------------------------------------------------------- what all rules need

    def _rule(
        self,
        name: str,
        phase: Phase,
        place: int,
        moves: Callable[[State], Sequence[Move]],
        *,
        only: tuple[Look, ...],
        reads: tuple[int, ...],
        views: tuple[Look, ...] = (),
        also_say: Sequence[int] = (),
    ) -> Rule[Move]:
        """A rule about what happens to one party, which may say something."""
        ranks: tuple[int, ...] = ()
        if place == self._prefill_place:
            ranks = tuple(self._prefill_ranks)
        elif place == self._decode_place:
            ranks = tuple(self._decode_ranks)
        return Rule(
            name=f"{name} of {self.parties.names[place]}",
            phase=phase,
            moves=moves,
            reads=reads,
            appends=tuple(channel for at in (place, *also_say) for channel in self._says(at)),
            only=only,
            views=views,
            wider=tuple(rank for rank in ranks if rank not in reads),
            # When an engine hears that a handoff is over, its ranks' memory is looked at.
            eager=self._eager_of if self._eagerness and phase is Phase.USUAL else None,
            is_wide=lambda before, after: bool(
                self._ends.get((place, before[place], after[place]))
            ),
        )

    def _says(self, place: int) -> tuple[int, ...]:
        name = self.parties.names[place]
        routes = zip(self._channels, self.parties.routes, strict=True)
        return tuple(channel for channel, (sender, _) in routes if sender == name)

    def _has(self, place: int, see: Callable[[LocalMoves], object]) -> Look:
        return Look(place, lambda local: int(bool(see(self._local(place, local)))))

    def _life(self, place: int) -> Look:
        return Look(place, lambda local: self.parties.actor(place, local).identity.life.incarnation)

    def _left(self, fault: int) -> Look:
        return Look(
            self._purse, lambda purse: min(self._budgets[purse][fault], self._budgets[purse][TOTAL])
        )

    # ---------------------------------------------------------------- families

    def _deliveries_by_rule(self) -> Iterator[Rule[Move]]:
        for move in self._deliveries:
            yield self._rule(
                "deliveries",
                Phase.USUAL,
                self._hearers[move.place],
                lambda _state, move=move: [move],  # type: ignore[misc]
                only=(_is_not_zero(move.place),),
                reads=(self._hearers[move.place], move.place),
            )

    def _own(self, place: int) -> Iterator[Rule[Move]]:
        """What a party does by itself."""

        def done(moves: Sequence[Move]) -> list[Move]:
            return [move for move in moves if move.kind is MoveKind.DO]

        def faults(state: State) -> list[Move]:
            left = self._budgets[state[self._purse]]
            return [
                move for move in done(self._local(place, state[place]).faults) if left[move.fault]
            ]

        yield self._rule(
            "moves",
            Phase.USUAL,
            place,
            lambda state: done(self._local(place, state[place]).usual),
            only=(self._has(place, lambda mine: done(mine.usual)),),
            reads=(place,),
        )
        yield self._rule(
            "timers",
            Phase.QUIET,
            place,
            lambda state: self._local(place, state[place]).timers,
            only=(self._has(place, lambda mine: mine.timers),),
            reads=(place,),
        )
        yield self._rule(
            "faults",
            Phase.FAULT,
            place,
            faults,
            only=(self._left(TOTAL), self._has(place, lambda mine: done(mine.faults))),
            reads=(place, self._purse),
        )
        yield self._rule(
            "early timers",
            Phase.EARLY,
            place,
            lambda state: self._local(place, state[place]).early,
            only=(self._left(Fault.TIMER), self._has(place, lambda mine: mine.early)),
            reads=(place, self._purse),
        )

    def _writes(self, rank: int, target: int) -> Iterator[Rule[Move]]:
        """What becomes of the writes of a rank to another."""
        name = self.parties.names[target]

        def there(moves: Sequence[Move]) -> list[Move]:
            return [move for move in moves if self._is_write_to(name, move)]

        def faults(state: State) -> list[Move]:
            left = self._budgets[state[self._purse]]
            return [
                move for move in there(self._local(rank, state[rank]).faults) if left[move.fault]
            ]

        yield self._rule(
            f"writes to {name}",
            Phase.USUAL,
            rank,
            lambda state: there(self._local(rank, state[rank]).usual),
            only=(self._has(rank, lambda mine: there(mine.usual)),),
            reads=(rank, target),
        )
        yield self._rule(
            f"spoiled writes to {name}",
            Phase.FAULT,
            rank,
            faults,
            only=(self._left(TOTAL), self._has(rank, lambda mine: there(mine.faults))),
            reads=(rank, target, self._purse),
        )

    def _is_write_to(self, name: str, move: Move) -> bool:
        if move.kind not in _TO_A_TARGET:
            return False
        action = self.parties.actions[move.action]
        assert isinstance(action, do.Submit | do.Leave | do.Fade)
        return action.write.target.name == name

    def _fences(self, rank: int, target: int) -> Rule[Move]:
        """What a target wants to be fenced from a source."""
        name = self.parties.names[rank]

        def against(moves: Sequence[Move]) -> list[Move]:
            return [move for move in moves if self._is_fence_against(name, move)]

        return self._rule(
            f"fences against {name}",
            Phase.USUAL,
            target,
            lambda state: [
                move
                for move in against(self._local(target, state[target]).conditional)
                if self._is_possible(state, move)
            ],
            only=(self._has(target, lambda mine: against(mine.conditional)),),
            reads=(target, rank),
        )

    def _is_fence_against(self, name: str, move: Move) -> bool:
        action = self.parties.actions[move.action]
        return isinstance(action, do.Fenced) and action.peer.name == name

    def _starts(self) -> Rule[Move]:
        """The prefill engine begins with prompts, on all its ranks."""
        ranks = self._prefill_ranks
        return self._conditional(
            MoveKind.PREFILL, reads=(self._prefill_place, *ranks), also_say=ranks
        )

    def _first_tokens(self) -> Rule[Move]:
        """The first token is there when all ranks have computed all of a prompt."""
        return self._conditional(
            MoveKind.TOKEN,
            reads=(self._prefill_place,),
            views=tuple(self._computed(rank) for rank in self._prefill_ranks),
        )

    def _conditional(
        self,
        kind: MoveKind,
        *,
        reads: tuple[int, ...],
        views: tuple[Look, ...] = (),
        also_say: Sequence[int] = (),
    ) -> Rule[Move]:
        place = self._prefill_place

        def such(moves: Sequence[Move]) -> list[Move]:
            return [move for move in moves if move.kind is kind]

        return self._rule(
            kind.name.lower(),
            Phase.USUAL,
            place,
            lambda state: [
                move
                for move in such(self._local(place, state[place]).conditional)
                if self._is_possible(state, move)
            ],
            only=(self._has(place, lambda mine: such(mine.conditional)),),
            reads=reads,
            views=views,
            also_say=also_say,
        )

    def _computed(self, rank: int) -> Look:
        """Which prompts a rank has computed, a bit for each."""

        def see(local: int) -> int:
            actor = self.parties.actor(rank, local)
            assert isinstance(actor, PrefillRankActor)
            return sum(actor.is_computed(h) << bit for bit, h in enumerate(self.scene.prompts))

        return Look(rank, see)

    def _crashes(self, place: int) -> Rule[Move]:
        peers = [
            self.parties.place[peer] for peer in self.scene.peers_of(self.parties.names[place])
        ]
        return self._rule(
            "crash",
            Phase.FAULT,
            place,
            lambda _state: [Move(MoveKind.CRASH, place, 0, Fault.CRASH)],
            only=(self._left(Fault.CRASH),),
            reads=(place, self._purse, self._news),
            views=tuple(self._life(peer) for peer in peers),
        )

    def _hears(self, route: int) -> Rule[Move]:
        """A party hears of another's new life."""
        name, peer = self.parties.routes[route]
        return self._rule(
            f"hearing of {name}",
            Phase.USUAL,
            self.parties.place[peer],
            lambda state: [*self._hearings_on(state, route)],
            only=(Look(self._news, lambda news: self._tidings[news] >> 2 * route & 1),),
            reads=(self.parties.place[peer], self._news),
            views=(self._life(self.parties.place[name]),),
        )

    def _reconnects(self, channel: int) -> Rule[Move]:
        move = Move(MoveKind.RECONNECT, channel, 0, Fault.RECONNECT)
        one, other = self.link_of(channel)
        return Rule(
            name=f"reconnection of {one} and {other}",
            phase=Phase.FAULT,
            only=(self._left(Fault.RECONNECT),),
            reads=(channel, self._way_back(channel), self._purse, self._greetings),
            moves=lambda _state: [move],
        )

    def _greets_on(self, route: int) -> Rule[Move]:
        """A party greets another over a new connection."""
        move = self._greeting(route)
        return self._rule(
            f"greeting of {self.parties.routes[route][1]}",
            Phase.USUAL,
            move.place,
            lambda _state: [move],
            only=(Look(self._greetings, lambda due: self._dues[due] >> route & 1),),
            reads=(move.place, self._greetings),
        )

    def _disturbances(self) -> Iterator[Rule[Move]]:
        for fault, kind in DISTURBANCES:
            if not self.budget.counts()[fault]:
                continue
            for channel in self._channels:
                yield Rule(
                    name=f"{kind.name.lower()} on {channel}",
                    phase=Phase.FAULT,
                    only=(self._left(fault), _is_not_zero(channel)),
                    reads=(channel, self._purse),
                    moves=lambda _state, kind=kind, channel=channel, fault=fault: [  # type: ignore[misc]
                        Move(kind, channel, 0, fault)
                    ],
                )

    def _suspicions(self) -> Iterator[Rule[Move]]:
        for name, peer in self._across if self.budget.suspect else ():
            place, action = self.parties.place[name], self.parties.actions.of(do.Suspect(peer))
            move = Move(MoveKind.DO, place, action, Fault.SUSPECT)
            yield self._rule(
                f"suspicion of {peer}",
                Phase.FAULT,
                place,
                lambda _state, move=move: [move],  # type: ignore[misc]
                only=(self._left(Fault.SUSPECT),),
                reads=(place, self._purse),
            )


def _is_not_zero(column: int) -> Look:
    return Look(column, lambda value: int(value != 0))
