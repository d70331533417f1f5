"""Several engines that come and go: each prefill and decode engine that work together are a pair.

A pair is a small world of its own, with parties and connections of its own (decision 13). What
joins the pairs of an engine are its memory and the router, which opens and closes pairs and sends
requests to engines. This world has all of it:

| move             | what happens                                                              |
|------------------|---------------------------------------------------------------------------|
| in a pair        | as in `world`, where its sides are open                                   |
| route            | the router sends a request to the engines of a pair, which it opens first |
| take an order    | an engine opens or closes its side, or gets a request; in their order     |
| die              | a fault: an engine, with its sides of all pairs                           |
| notice           | the router sees that; it sends requests elsewhere, then closes the pairs  |
| join             | an engine that died is there again                                        |
| drain, leave     | an engine gets no more requests; then its pairs are closed, and it is     |
|                  | gone, or has the other role                                               |
| close when idle  | the router closes a pair that no request uses                             |

A side that is opened is a new life of its parties. The slots of a request are the same in every
pair of its decode engine.

What must not break: a pair writes to a request's slots only while the decode engine waits for that
pair.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from lab.explore.world import Violation
from lab.worlds import actions as do
from lab.worlds.faults import Budget
from lab.worlds.moves import Move, MoveKind
from lab.worlds.scene import DECODE, PREFILL
from lab.worlds.schedulers import SchedulerActor
from lab.worlds.world import HandoffWorld
from penstock.handoff.protocol.states import HandoffOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lab.worlds.carrying import State
    from lab.worlds.scene import Scene

NOWHERE = -1
EPOCH = 1
"""A request is claimed once in each pair."""


class FleetFault(IntEnum):
    """What may go wrong, or be asked for; the value is its place among the budgets."""

    DEATH = 0
    LEAVE = 1
    IDLE = 2


class OrderKind(IntEnum):
    """What the router tells an engine."""

    OPEN = 0
    CLOSE = 1
    PREFILL = 2
    DECODE = 3
    CHANGE = 4
    """The request is claimed in another pair instead."""
    COMPUTE = 5
    """The decode engine computes the prompt itself."""


class Order(NamedTuple):
    """What the router tells an engine; orders arrive as they were sent."""

    kind: OrderKind
    pair: int
    request: int = NOWHERE


class FleetRequest(NamedTuple):
    """A request, as the router and its decode engine know it."""

    routed: int = NOWHERE
    """The pair that the router chose."""
    at: int = NOWHERE
    """The pair in which the decode engine claims it."""
    following: int = NOWHERE
    """Where it is claimed when that claim has ended."""
    tried: int = 0
    """Pairs that it was routed to, a bit for each: it has one name, so it goes to each once."""
    done: bool = False


class FleetState(NamedTuple):
    """Everything."""

    pairs: tuple[State, ...]
    sides: int
    """Which are open: two bits for each pair, that of the prefill engine first."""
    offered: int
    """A bit for each request in each pair that its prefill engine has got."""
    roles: tuple[str, ...]
    """Of the engines, as the router knows them; empty for one that is gone."""
    dead: int
    """Engines that have died, a bit for each."""
    draining: int
    orders: tuple[tuple[Order, ...], ...]
    """On their way to each engine."""
    known: int
    """Pairs that the router has opened, a bit for each."""
    requests: tuple[FleetRequest, ...]
    left: tuple[int, ...]
    """How often each fault may still happen."""


class FleetKind(IntEnum):
    """What happens."""

    INSIDE = 0
    TAKE = 1
    NOTICE = 2
    JOIN = 3
    LEAVE = 4
    ROUTE = 5
    DIE = 6
    DRAIN = 7
    IDLE = 8


class FleetMove(NamedTuple):
    """Something that can happen."""

    kind: FleetKind
    place: int
    """A pair or an engine."""
    request: int = NOWHERE
    inside: Move | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines, and the pairs that the router may make of them."""

    engines: tuple[tuple[str, str], ...]
    """Names and roles, `PREFILL` or `DECODE`."""
    pairs: tuple[tuple[str, str], ...]
    """The prefill engine and the decode engine of each."""
    scene: Scene
    """Of each pair."""
    mortal: tuple[str, ...] = ()
    """Engines that may die."""
    leaving: tuple[str, ...] = ()
    """Engines that may be asked to leave."""
    deaths: int = 0
    leaves: int = 0
    idles: int = 0
    rejoins: bool = False
    """Whether an engine that died comes back."""
    changes_role: bool = False
    """Whether an engine that leaves comes back in the other role."""


class FleetWorld:
    """A fleet, and everything that can happen to it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.inside = HandoffWorld(fleet.scene, Budget())
        """The world of every pair: equal states have equal numbers in all of them."""
        self._names = [name for name, _ in fleet.engines]
        self._pairs = [tuple(self._names.index(name) for name in pair) for pair in fleet.pairs]
        self._handoffs = [*fleet.scene.prompts]
        scene, parties = fleet.scene, self.inside.parties
        self._parties = ((PREFILL, *scene.prefill_ranks), (DECODE, *scene.decode_ranks))
        """Of the two sides of a pair."""
        self._side_of = [int(not name.startswith(PREFILL)) for name in parties.names]
        self._across = [
            (one, other)
            for one, other in parties.routes
            if one.startswith(PREFILL) and not other.startswith(PREFILL)
        ]
        self._packing = struct.Struct(f"<{len(self.inside.begin())}I").pack

    # ---------------------------------------------------------------- what the explorer asks

    def begin(self) -> FleetState:
        """All engines are there, and no pair is open."""
        fleet = self.fleet
        closed = self.inside.begin()
        for side in (0, 1):
            closed = self._ended(closed, side)
        return FleetState(
            pairs=(closed,) * len(fleet.pairs),
            sides=0,
            offered=0,
            roles=tuple(role for _, role in fleet.engines),
            dead=0,
            draining=0,
            orders=((),) * len(fleet.engines),
            known=0,
            requests=(FleetRequest(),) * len(self._handoffs),
            left=(fleet.deaths, fleet.leaves, fleet.idles),
        )

    def moves(self, state: FleetState) -> Sequence[FleetMove]:
        """What can happen; timers when nothing else can."""
        found = [*self._usual(state)]
        if not found:
            for pair, inner in enumerate(state.pairs):
                found += [
                    FleetMove(FleetKind.INSIDE, pair, inside=move)
                    for move in self.inside.timers(inner)
                    if self._is_open(state, pair, self._side_of[move.place])
                ]
        return [*found, *self._faults(state)]

    def step(self, state: FleetState, move: FleetMove) -> FleetState:
        """The state after a move."""
        match move.kind:
            case FleetKind.INSIDE:
                assert move.inside is not None
                return self._give(state, move.place, move.inside)
            case FleetKind.TAKE:
                return self._take(state, move.place)
            case FleetKind.ROUTE:
                return self._route(state, move.request, move.place)
            case FleetKind.NOTICE:
                return self._notice(state, move.place)
            case FleetKind.IDLE:
                return self._close(_paid(state, FleetFault.IDLE), move.place)
            case _:
                return self._come_or_go(state, move)

    def check(self, state: FleetState) -> None:
        """A pair writes to the slots of a request only while its decode engine waits for it."""
        for pair, inner in enumerate(state.pairs):
            self.inside.check(inner)
            for handoff, _ in self.inside.touched(inner):
                request = state.requests[self._handoffs.index(handoff)]
                if request.done or request.at != pair:
                    names = ">".join(self.fleet.pairs[pair])
                    raise Violation(
                        "given back", f"{names} writes to the slots of {handoff}, claimed elsewhere"
                    )

    def finished(self, state: FleetState) -> bool:
        """Nothing is under way, every request was answered, and no handoff is left open."""
        if not all(request.done for request in state.requests) or any(self._usual(state)):
            return False
        return not any(
            self._scheduler(state, pair, side).open or self.inside.fencing(inner)
            for pair, inner in enumerate(state.pairs)
            for side in (0, 1)
            if self._is_open(state, pair, side)
        )

    def pack(self, state: FleetState) -> bytes:
        """The numbers of the pairs, and the rest as text."""
        inside = b"".join(self._packing(*inner) for inner in state.pairs)
        return inside + repr(state[1:]).encode()

    def is_fault(self, move: FleetMove) -> bool:
        """Whether it comes any time and costs no delay: a fault, or what the router chooses."""
        return move.kind >= FleetKind.ROUTE

    def tell(self, state: FleetState, move: FleetMove) -> str:
        """The move in words."""
        if move.inside is not None:
            names = ">".join(self.fleet.pairs[move.place])
            return f"{names}: {self.inside.tell(state.pairs[move.place], move.inside)}"
        if move.kind is FleetKind.TAKE:
            order = state.orders[move.place][0]
            what = "" if order.request == NOWHERE else f" {self._handoffs[order.request]}"
            names = ">".join(self.fleet.pairs[order.pair])
            return f"{self._names[move.place]} is told: {order.kind.name.lower()}{what} {names}"
        if move.kind in (FleetKind.ROUTE, FleetKind.IDLE):
            what = self._handoffs[move.request] if move.request != NOWHERE else "nobody"
            names = ">".join(self.fleet.pairs[move.place])
            said = "routes" if move.kind is FleetKind.ROUTE else "FAULT idle: closes, used by"
            return f"router {said} {what} {names}"
        fault = "FAULT " if move.kind >= FleetKind.DIE else ""
        return f"{fault}{move.kind.name.lower()} {self._names[move.place]}"

    def conclude(self) -> None:
        """Checks that the states of the parties say everything."""
        self.inside.conclude()

    # ---------------------------------------------------------------- which moves there are

    def _usual(self, state: FleetState) -> Iterator[FleetMove]:
        for engine, orders in enumerate(state.orders):
            if orders:
                yield FleetMove(FleetKind.TAKE, engine)
        for pair, inner in enumerate(state.pairs):
            for move in self.inside.usual_moves(inner):
                if self._may(state, pair, move):
                    yield FleetMove(FleetKind.INSIDE, pair, inside=move)
        yield from self._routes(state)

    def _routes(self, state: FleetState) -> Iterator[FleetMove]:
        """What the router can do; it takes requests as they come."""
        waiting = [
            number
            for number, request in enumerate(state.requests)
            if request.routed == NOWHERE and not request.done
        ]
        for number in waiting[:1]:
            for pair in self._untried(state, number):
                yield FleetMove(FleetKind.ROUTE, pair, number)
        for engine, role in enumerate(state.roles):
            is_dead = bool(state.dead >> engine & 1)
            if is_dead and role:
                yield FleetMove(FleetKind.NOTICE, engine)
            elif is_dead and self.fleet.rejoins:
                yield FleetMove(FleetKind.JOIN, engine)
            elif state.draining >> engine & 1 and not self._used(state, engine):
                yield FleetMove(FleetKind.LEAVE, engine)

    def _faults(self, state: FleetState) -> Iterator[FleetMove]:
        present = [
            name
            for engine, name in enumerate(self._names)
            if state.roles[engine] and not state.dead >> engine & 1
        ]
        if state.left[FleetFault.DEATH]:
            for name in self.fleet.mortal:
                if name in present:
                    yield FleetMove(FleetKind.DIE, self._names.index(name))
        if state.left[FleetFault.LEAVE]:
            for name in self.fleet.leaving:
                if name in present and not state.draining >> self._names.index(name) & 1:
                    yield FleetMove(FleetKind.DRAIN, self._names.index(name))
        if state.left[FleetFault.IDLE]:
            for pair in range(len(self._pairs)):
                if state.known >> pair & 1 and not self._has_requests(state, pair):
                    yield FleetMove(FleetKind.IDLE, pair)

    def _may(self, state: FleetState, pair: int, move: Move) -> bool:
        """Whether a move of a pair can happen: its side is open, and its engine has the request."""
        if move.kind in (MoveKind.DELIVER, MoveKind.HAUNT):
            return True  # There are no messages for a side that is closed; ghosts always land.
        action = self.inside.parties.actions[move.action]
        if isinstance(action, do.Fade):
            return True
        if not self._is_open(state, pair, self._side_of[move.place]):
            return False
        if isinstance(action, do.Prefill):
            return bool(state.offered >> self._bit(pair, self._handoffs.index(action.handoff)) & 1)
        if isinstance(action, do.Claim):
            request = state.requests[self._handoffs.index(action.handoff)]
            return request.at == pair and not request.done
        return True

    def _is_open(self, state: FleetState, pair: int, side: int) -> bool:
        return bool(state.sides >> 2 * pair + side & 1)

    def _bit(self, pair: int, request: int) -> int:
        return pair * len(self._handoffs) + request

    def _usable(self, state: FleetState) -> list[int]:
        """The pairs that the router may send a request to, as far as it knows."""
        return [
            pair
            for pair, engines in enumerate(self._pairs)
            if [state.roles[engine] for engine in engines] == [PREFILL, DECODE]
            and not any(state.draining >> engine & 1 for engine in engines)
        ]

    def _untried(self, state: FleetState, request: int) -> list[int]:
        """The pairs that the router may send this request to."""
        tried = state.requests[request].tried
        return [pair for pair in self._usable(state) if not tried >> pair & 1]

    def _has_requests(self, state: FleetState, pair: int) -> bool:
        return any(request.routed == pair and not request.done for request in state.requests)

    def _used(self, state: FleetState, engine: int) -> bool:
        pairs = [pair for pair, engines in enumerate(self._pairs) if engine in engines]
        return any(self._has_requests(state, pair) for pair in pairs)

    def _scheduler(self, state: FleetState, pair: int, side: int) -> SchedulerActor[object]:  # type: ignore[type-var]
        place = self.inside.parties.place[self._parties[side][0]]
        actor = self.inside.parties.actor(place, state.pairs[pair][place])
        assert isinstance(actor, SchedulerActor)
        return actor

    # ---------------------------------------------------------------- the router

    def _send(self, state: FleetState, engine: int, *orders: Order) -> FleetState:
        """Tells an engine something; one that has died never hears it."""
        if state.dead >> engine & 1:
            return state
        return state._replace(orders=_with(state.orders, engine, (*state.orders[engine], *orders)))

    def _route(self, state: FleetState, request: int, pair: int) -> FleetState:
        """Sends a request to both engines of a pair, which it opens if it is not open."""
        state = self._offer(state, request, pair)
        return self._send(state, self._pairs[pair][1], Order(OrderKind.DECODE, pair, request))

    def _offer(self, state: FleetState, request: int, pair: int) -> FleetState:
        """Opens the pair, if need be, and sends the prompt to its prefill engine."""
        prefill, decode = self._pairs[pair]
        if not state.known >> pair & 1:
            for engine in (prefill, decode):
                state = self._send(state, engine, Order(OrderKind.OPEN, pair))
            state = state._replace(known=state.known | 1 << pair)
        state = self._send(state, prefill, Order(OrderKind.PREFILL, pair, request))
        routed = state.requests[request]
        routed = routed._replace(routed=pair, tried=routed.tried | 1 << pair)
        return state._replace(requests=_with(state.requests, request, routed))

    def _notice(self, state: FleetState, engine: int) -> FleetState:
        """An engine is gone: its requests go elsewhere, before its pairs are closed."""
        state = state._replace(
            roles=_with(state.roles, engine, ""), draining=state.draining & ~(1 << engine)
        )
        pairs = [pair for pair, engines in enumerate(self._pairs) if engine in engines]
        for number, request in enumerate(state.requests):
            if request.routed in pairs and not request.done:
                state = self._reroute(state, number, self._pairs[request.routed][1])
        for pair in pairs:
            if state.known >> pair & 1:
                state = self._close(state, pair)
        return state

    def _reroute(self, state: FleetState, request: int, decode: int) -> FleetState:
        """A request whose engine is gone: another one computes the prompt, or answers it."""
        if state.dead >> decode & 1:
            # Its client gets an error where nobody is left to answer it.
            done = not self._untried(state, request)
            lost = FleetRequest(done=done, tried=state.requests[request].tried)
            return state._replace(requests=_with(state.requests, request, lost))
        others = [pair for pair in self._untried(state, request) if self._pairs[pair][1] == decode]
        if not others:
            pair = state.requests[request].routed
            return self._send(state, decode, Order(OrderKind.COMPUTE, pair, request))
        state = self._offer(state, request, others[0])
        return self._send(state, decode, Order(OrderKind.CHANGE, others[0], request))

    def _close(self, state: FleetState, pair: int) -> FleetState:
        """Both engines close their sides."""
        for engine in self._pairs[pair]:
            state = self._send(state, engine, Order(OrderKind.CLOSE, pair))
        return state._replace(known=state.known & ~(1 << pair))

    def _leave(self, state: FleetState, engine: int) -> FleetState:
        """An engine without requests: its pairs are closed; it is gone, or has the other role."""
        for pair, engines in enumerate(self._pairs):
            if engine in engines and state.known >> pair & 1:
                state = self._close(state, pair)
        role = ""
        if self.fleet.changes_role:
            role = DECODE if state.roles[engine] == PREFILL else PREFILL
        return state._replace(
            roles=_with(state.roles, engine, role), draining=state.draining & ~(1 << engine)
        )

    # ---------------------------------------------------------------- engines

    def _come_or_go(self, state: FleetState, move: FleetMove) -> FleetState:
        engine = move.place
        match move.kind:
            case FleetKind.DIE:
                return self._die(_paid(state, FleetFault.DEATH), engine)
            case FleetKind.JOIN:
                roles = _with(state.roles, engine, self.fleet.engines[engine][1])
                return state._replace(roles=roles, dead=state.dead & ~(1 << engine))
            case FleetKind.DRAIN:
                paid = _paid(state, FleetFault.LEAVE)
                return paid._replace(draining=state.draining | 1 << engine)
            case _:
                return self._leave(state, engine)

    def _take(self, state: FleetState, engine: int) -> FleetState:
        """An engine does what it was told first."""
        order, *others = state.orders[engine]
        state = state._replace(orders=_with(state.orders, engine, tuple(others)))
        side = self._pairs[order.pair].index(engine)
        match order.kind:
            case OrderKind.OPEN:
                return self._open_side(state, order.pair, side)
            case OrderKind.CLOSE:
                return self._close_side(state, order.pair, side)
            case OrderKind.PREFILL:
                offered = state.offered | 1 << self._bit(order.pair, order.request)
                return state._replace(offered=offered)
            case OrderKind.DECODE:
                request = state.requests[order.request]._replace(at=order.pair)
                return self._resume(state, order.request, request)
            case OrderKind.CHANGE:
                return self._change(state, order.request, order.pair)
            case OrderKind.COMPUTE:
                return self._change(state, order.request, NOWHERE)

    def _open_side(self, state: FleetState, pair: int, side: int) -> FleetState:
        """New lives of the parties of a side; connections are opened where both sides are there."""
        if self._is_open(state, pair, side):
            state = self._close_side(state, pair, side)
        state = state._replace(sides=state.sides | 1 << 2 * pair + side)
        if self._is_open(state, pair, 1 - side):
            inner = state.pairs[pair]
            for one, other in self._across:
                inner = self.inside.reconnected(inner, one, other)
            state = state._replace(pairs=_with(state.pairs, pair, inner))
        return state

    def _close_side(self, state: FleetState, pair: int, side: int) -> FleetState:
        """The parties of a side end; what the decode engine waited for there has ended, too."""
        if not self._is_open(state, pair, side):
            return state
        offered = state.offered
        for number in range(len(self._handoffs)):
            offered &= ~(1 << self._bit(pair, number)) if not side else -1
        state = state._replace(
            pairs=_with(state.pairs, pair, self._ended(state.pairs[pair], side)),
            sides=state.sides & ~(1 << 2 * pair + side),
            offered=offered,
        )
        for number, request in enumerate(state.requests if side else ()):
            if request.at == pair and not request.done:
                state = self._go_on(state, number)
        return state

    def _ended(self, inner: State, side: int) -> State:
        """A pair after the parties of a side have ended; the next lives know each other only."""
        return self.inside.reborn(inner, self._parties[side])

    def _die(self, state: FleetState, engine: int) -> FleetState:
        state = state._replace(
            dead=state.dead | 1 << engine, orders=_with(state.orders, engine, ())
        )
        for pair, engines in enumerate(self._pairs):
            if engine in engines:
                side = engines.index(engine)
                if self._is_open(state, pair, side):
                    inner = self._ended(state.pairs[pair], side)
                    state = state._replace(
                        pairs=_with(state.pairs, pair, inner),
                        sides=state.sides & ~(1 << 2 * pair + side),
                    )
        return state

    def _give(self, state: FleetState, pair: int, move: Move) -> FleetState:
        """Something happens in a pair; where a claim ends, the decode engine goes on."""
        inner = self.inside.step(state.pairs[pair], move)
        sides = [side for side in (0, 1) if not self._is_open(state, pair, side)]
        for side in sides:
            inner = self.inside.cut_off(inner, self._parties[side])
        state = state._replace(pairs=_with(state.pairs, pair, inner))
        ended = self._scheduler(state, pair, 1).ended
        for number, request in enumerate(state.requests):
            outcome = ended.get((self._handoffs[number], EPOCH))
            if request.at == pair and not request.done and outcome is not None:
                delivered = outcome is HandoffOutcome.DELIVERED
                state = self._go_on(state, number, delivered=delivered)
        return state

    def _go_on(self, state: FleetState, number: int, *, delivered: bool = False) -> FleetState:
        """A claim has ended: the prompt is there, is claimed elsewhere, or is computed here."""
        request = state.requests[number]
        if delivered or request.following == NOWHERE:
            request = request._replace(done=True, following=NOWHERE)
            return state._replace(requests=_with(state.requests, number, request))
        request = request._replace(at=request.following, following=NOWHERE)
        return self._resume(state, number, request)

    def _resume(self, state: FleetState, number: int, request: FleetRequest) -> FleetState:
        """The decode engine claims a prompt in a pair, if that is open; if not, it computes it."""
        done = request.done or not self._is_open(state, request.at, 1)
        request = request._replace(done=done)
        return state._replace(requests=_with(state.requests, number, request))

    def _change(self, state: FleetState, number: int, pair: int) -> FleetState:
        """When its claim has ended, a prompt is claimed in another pair, or computed here."""
        request = state.requests[number]
        if request.done or request.at == NOWHERE:
            return state
        scheduler = self._scheduler(state, request.at, 1)
        if (self._handoffs[number], EPOCH) in scheduler.open:
            changed = request._replace(following=pair)
            state = state._replace(requests=_with(state.requests, number, changed))
            place = self.inside.parties.place[DECODE]
            action = self.inside.parties.actions.of(do.Cancel(self._handoffs[number]))
            return self._give(state, request.at, Move(MoveKind.DO, place, action))
        return self._go_on(
            state._replace(
                requests=_with(state.requests, number, request._replace(following=pair))
            ),
            number,
        )


def _with(values: tuple, place: int, value: object) -> tuple:  # type: ignore[type-arg]
    """The values with another one at a place."""
    return (*values[:place], value, *values[place + 1 :])


def _paid(state: FleetState, fault: FleetFault) -> FleetState:
    return state._replace(left=_with(state.left, fault, state.left[fault] - 1))
