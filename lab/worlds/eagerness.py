"""Which moves of a party may happen as soon as they can, alone: found out, not believed.

A move `m` of a party (a message it hears, something it does by itself) may happen at once when
nothing is lost by never letting anything else happen before it. That is so when, in the local
state where it is possible and in all those that other inputs `a` lead to from there,

    l ──a──→ l'      1. both orders lead to the same local state, and everybody hears the same
    │        │          in the same order;
    m        m       2. m is not undone by a, and takes no other move of the party away;
    ↓        ↓       3. m hides nothing from others: who is alive stays as it is; blocks that were
    k ──a──→ k'         read, or slots written to, still are; what has ended, or is behind a fence,
                        may become more, as promises are broken no less by that.

Then every path on which `m` comes later has a twin on which it comes first, through states that
allow the others as much and break as many promises, with the same end: `m` is a persistent set of
one move. As usual moves use something up, no eager move can keep others waiting for ever.

Which inputs a party can get is not known before. So the search begins by taking for eager what
looks so; when it has seen more, every eager move is compared with *all* inputs that were seen in
local states that can be reached from the one in which it was eager; what fails is banned, and
states in which it was followed alone are looked at anew, until nothing fails. The twin of a
missing path is shorter by one move than the path itself, so by induction no input is missing at
the end.

A handoff that ends gives the memory of others back, too: that is followed in every order, though a
move that may end one later can be eager before. A fence is eager where its writer is dead.

What must not break: when in doubt, a move is not eager.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lab.explore.result import DEFECTS
from lab.worlds import actions as do
from lab.worlds.decode import DecodeRankActor
from lab.worlds.moves import MoveKind
from lab.worlds.prefill import Phase, PrefillRankActor
from lab.worlds.schedulers import (
    DecodeSchedulerActor,
    PrefillSchedulerActor,
    SchedulerActor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from lab.explore.memo import Memo
    from lab.worlds.moves import LocalMoves
    from lab.worlds.parties import AnyActor, Parties, Said

_NODES_MAX = 100
"""Local states that are looked at for one move; with more it is not eager. They are mostly ones
that no search comes to."""


@dataclass(slots=True)
class _Pairs:
    """A move in a local state, with other inputs before or after it; inputs are bits."""

    unseen: bool
    """Whether the move, there, hides nothing and takes nothing away."""
    looked_at: int = 0
    broken: int = 0
    """Inputs with which the order makes a difference."""
    leads: list[tuple[int, int]] = field(default_factory=list)
    """Inputs, and where they lead, before the move."""


class Eagerness:
    """What is taken for eager, and why not."""

    def __init__(
        self,
        parties: Parties,
        local: Callable[[int, int], LocalMoves],
        *,
        budget: Sequence[int],
        fenced: bool,
    ) -> None:
        """Takes what it has to know of a world.

        Args:
            parties: the parties.
            local: what a party can do in a local state.
            budget: how often each fault may happen.
            fenced: whether there can be fences; then others look at which writes are posted.
        """
        self._parties, self._local, self._fenced = parties, local, fenced
        self._budget = budget
        self.kinds = (MoveKind.DO,) if fenced else (MoveKind.DO, MoveKind.POST)
        """Moves that concern nobody but their party."""
        self._banned: set[tuple[int, int, int]] = set()
        self._known: dict[tuple[int, int, int], bool] = {}
        self._pairs: dict[tuple[int, int, int], _Pairs] = {}
        """What comes of a move in a local state, with each input that was looked at."""
        self._fine: dict[tuple[int, int], tuple[int, int]] = {}
        """For a party and a move: how many local states and inputs were all right with it."""
        self._looks: list[dict[int, Looks]] = [{} for _ in parties.names]
        self.used: list[dict[int, dict[int, int]]] = [defaultdict(dict) for _ in parties.names]
        """For each party: local states, what was given to it there, and where that led."""
        self._followed: set[tuple[int, int, int]] = set()

    def is_eager(self, place: int, local: int, action: int) -> bool:
        """Whether this may happen at once, as far as is known."""
        key = (place, local, action)
        known = self._known.get(key)
        if known is None:
            known = key not in self._banned and self._is_unseen(*key) and not self._ends(*key)
            self._known[key] = known
        if known:
            self._followed.add(key)
        return known

    # ---------------------------------------------------------------- looking back

    def review(self) -> set[tuple[int, int]]:
        """Parties and local states in which a move was taken for eager that is not.

        By all that was seen until now. It is banned there from now on.
        """
        failed: set[tuple[int, int, int]] = set()
        roots: dict[tuple[int, int], set[int]] = defaultdict(set)
        for place, local, action in self._followed:
            roots[place, action].add(local)
        for place in range(len(self._parties.names)):
            to_come = inputs_to_come(self.used[place])
            ways = self._by_sender(to_come)
            seen = sum(len(led) for led in self.used[place].values())
            for (at, action), locals_ in roots.items():
                if at == place and self._fine.get((place, action)) != (len(locals_), seen):
                    rivals = ~(1 << action | ways.get(self._sender(action), 0))
                    bad = self._failing(place, action, locals_, to_come, rivals)
                    failed |= {(place, local, action) for local in bad}
                    if not bad:
                        self._fine[place, action] = (len(locals_), seen)
        self._banned |= failed
        self._followed -= failed
        for key in failed:
            self._known[key] = False
        return {(place, local) for place, local, _ in failed}

    def _by_sender(self, to_come: dict[int, int]) -> dict[str, int]:
        """The messages among all inputs, by who says them: of these one comes after the other."""
        inputs = 0
        for mine in to_come.values():
            inputs |= mine
        ways: dict[str, int] = defaultdict(int)
        for given in ones(inputs):
            ways[self._sender(given)] |= 1 << given
        ways.pop("", None)
        return ways

    def _sender(self, action: int) -> str:
        """Who says a message; nobody, if it is none."""
        given = self._parties.actions[action]
        return given.message.sender.name if isinstance(given, do.Receive) else ""

    def _failing(
        self, place: int, action: int, roots: set[int], to_come: dict[int, int], rivals: int
    ) -> set[int]:
        """Those of the local states in which a move is not eager after all.

        From each of them, it is compared with all that was seen to follow there, in any order and
        number: what is left out of a path could come first on another.
        """
        fine: dict[int, set[int]] = defaultdict(set)
        bad: dict[int, set[int]] = defaultdict(set)
        for local in sorted(roots):
            inputs = to_come.get(local, 0) & rivals
            reached = self._reached(place, action, local, inputs, fine[inputs], bad[inputs])
            if reached is None:
                bad[inputs].add(local)
            else:
                fine[inputs] |= reached
        return set().union(*bad.values())

    def _reached(
        self, place: int, action: int, root: int, inputs: int, fine: set[int], bad: set[int]
    ) -> set[int] | None:
        """Where inputs lead before a move, if it is eager in all these; nothing if it is not.

        Args:
            place: the party.
            action: the move.
            root: where it is followed alone.
            inputs: what may come before it, as bits.
            fine: local states that need not be looked at again.
            bad: and those in which it is not eager.
        """
        reached, pending = {root}, deque([root])
        while pending:
            local = pending.popleft()
            pairs = self._looked_at(place, local, action)
            if not pairs.unseen or local in bad or len(reached) > _NODES_MAX:
                return None
            self._compare(pairs, place, local, action, inputs)
            if pairs.broken & inputs:
                return None
            for given, other in pairs.leads:
                if inputs >> given & 1 and other not in reached and other not in fine:
                    reached.add(other)
                    pending.append(other)
        return reached

    def _looked_at(self, place: int, local: int, action: int) -> _Pairs:
        key = (place, local, action)
        known = self._pairs.get(key)
        if known is None:
            known = self._pairs[key] = _Pairs(unseen=self._is_unseen(*key))
        return known

    def _compare(self, pairs: _Pairs, place: int, local: int, action: int, inputs: int) -> None:
        """Looks at a move with each of the inputs, once, and until one breaks it."""
        for given in ones(inputs & ~pairs.looked_at):
            if pairs.broken & inputs:
                return
            pairs.looked_at |= 1 << given
            if self._applies(place, local, given):
                self._compare_one(pairs, place, local, action, given)

    def _compare_one(self, pairs: _Pairs, place: int, local: int, action: int, given: int) -> None:
        """Both orders of a move and an input."""
        memo: Memo[AnyActor, int, Said] = self._parties.memos[place]
        after, said = memo.after(local, action)
        try:
            end, then_said = memo.after(after, given)
        except DEFECTS:
            return  # The search comes to this, if it can happen at all.
        try:
            other, other_said = memo.after(local, given)
            other_end, other_then = memo.after(other, action)
        except DEFECTS:
            pairs.broken |= 1 << given
            return
        alike = _by_target(said, then_said) == _by_target(other_said, other_then)
        if end != other_end or not alike:
            pairs.broken |= 1 << given
        elif other != local:
            pairs.leads.append((given, other))

    def _applies(self, place: int, local: int, given: int) -> bool:
        """Whether an input is possible in a local state, as far as the party itself knows."""
        action = self._parties.actions[given]
        actor = self._parties.actor(place, local)
        match action:
            case do.Receive() | do.Land() | do.Introduce() | do.Suspect():
                return True
            case do.Purge(handoff=handoff, epoch=epoch):
                # With memory in use a promise is broken, whatever comes first.
                return not _is_in_use(actor, handoff, epoch)
            case do.Expire():
                return False  # Timers wait until nothing else can happen.
            case do.Rebirth(life=life):
                return life.incarnation == actor.identity.life.incarnation + 1
            case do.Bounce(write=write):
                return isinstance(actor, PrefillRankActor) and write in actor.writes
            case _:
                if isinstance(actor, PrefillRankActor) and _begins(action):
                    return not any(handoff in actor.computed for handoff in _begins(action))
                return given in self._own_actions(place, local)

    def _own_actions(self, place: int, local: int) -> set[int]:
        """What a party may do there; faults that never happen in this world are not among it."""
        mine = self._local(place, local)
        faults = (move for move in mine.faults if self._budget[move.fault])
        return {move.action for move in (*mine.usual, *mine.conditional, *faults)}

    # ---------------------------------------------------------------- one move in one state

    def _is_unseen(self, place: int, local: int, action: int) -> bool:
        """Whether a move takes no other away, and changes nothing that others look at."""
        if not self._can(place, local, action):
            return False
        try:
            after, _ = self._parties.memos[place].after(local, action)
        except DEFECTS:
            return False
        kept = self._own_actions(place, local) - {action} <= self._own_actions(place, after)
        return kept and self._look(place, local).hides_nothing_in(self._look(place, after))

    def _ends(self, place: int, local: int, action: int) -> bool:
        """Whether a handoff ends: that concerns the memory of others, too."""
        after, _ = self._parties.memos[place].after(local, action)
        before, now = self._parties.actor(place, local), self._parties.actor(place, after)
        if not isinstance(before, SchedulerActor) or not isinstance(now, SchedulerActor):
            return False
        return now.ended != before.ended

    def _can(self, place: int, local: int, action: int) -> bool:
        return isinstance(self._parties.actions[action], do.Receive) or action in self._own_actions(
            place, local
        )

    def _look(self, place: int, local: int) -> Looks:
        known = self._looks[place].get(local)
        if known is None:
            known = self._looks[place][local] = look_of(
                self._parties.actor(place, local), fenced=self._fenced
            )
        return known


class Looks(NamedTuple):
    """What others look at in a party: promises, and what moves of others depend on."""

    fixed: Hashable
    rising: frozenset[Hashable]
    """What allows others more, or breaks more promises, when there is more of it."""

    def hides_nothing_in(self, after: Looks) -> bool:
        """Whether the others see at least as much in another local state."""
        return self.fixed == after.fixed and self.rising <= after.rising


def look_of(actor: AnyActor, *, fenced: bool) -> Looks:
    """What others look at."""
    peers = actor.scene.peers_of(actor.name)
    lives = tuple((actor.machine.life_of(peer), actor.machine.is_open(peer)) for peer in peers)
    fixed: Hashable
    rising: set[Hashable] = set()
    match actor:
        case PrefillRankActor():
            posted = [w for w, posting in actor.writes.items() if posting.phase is Phase.POSTED]
            fixed = (frozenset(posted if fenced else ()), frozenset(actor.ghosts))
            for handoff in actor.scene.prompts:
                rising |= {("reads", handoff)} if actor.reads(handoff) else set()
                rising |= {("computed", handoff)} if actor.is_computed(handoff) else set()
        case DecodeRankActor():
            fixed = frozenset(actor.slots.items())
            rising |= actor.touches() | actor.revoked
        case DecodeSchedulerActor():
            fixed = frozenset(actor.died)
            rising |= actor.ended.items()
        case PrefillSchedulerActor():
            fixed = (frozenset(actor.ended.items()), frozenset(actor.died))
        case _:
            raise TypeError(f"{actor!r} is no party of a handoff")
    return Looks((actor.identity.life, lives, fixed), frozenset(rising))


def _is_in_use(actor: AnyActor, handoff: str, epoch: int) -> bool:
    """Whether a rank reads the blocks of a prompt, or writes to its slots."""
    if isinstance(actor, PrefillRankActor):
        return actor.reads(handoff)
    return isinstance(actor, DecodeRankActor) and (handoff, epoch) in actor.touches()


def _begins(action: do.Action) -> list[str]:
    """The prompts that a rank begins with."""
    actions = action.actions if isinstance(action, do.Many) else (action,)
    return [each.handoff for each in actions if isinstance(each, do.Prefill)]


def _by_target(first: Said, second: Said) -> dict[int, list[int]]:
    heard: dict[int, list[int]] = {}
    for target, message in (*first, *second):
        heard.setdefault(target, []).append(message)
    return heard


def inputs_to_come(used: dict[int, dict[int, int]]) -> dict[int, int]:
    """For each local state, what was given to the party there and in all that follow, as bits.

    Args:
        used: local states, what was given to the party there, and where that led.
    """
    inputs = {local: sum(1 << given for given in led) for local, led in used.items()}
    before: dict[int, set[int]] = defaultdict(set)
    for local, led in used.items():
        for after in led.values():
            if after != local:
                before[after].add(local)
    # Usual moves use something up, so there are few ways round, and this soon ends.
    pending = deque(sorted(inputs, reverse=True))
    waiting = set(pending)
    while pending:
        local = pending.popleft()
        waiting.discard(local)
        mine = inputs.get(local, 0)
        for earlier in before[local]:
            if mine & ~inputs[earlier]:
                inputs[earlier] |= mine
                if earlier not in waiting:
                    waiting.add(earlier)
                    pending.append(earlier)
    return inputs


def ones(bits: int) -> Iterator[int]:
    """The places of the bits that are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
