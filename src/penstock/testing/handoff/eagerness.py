"""Which moves of a party may happen as soon as they can, alone: found out, not believed.

A move `m` of a party (a message it hears, something it does by itself) may happen at once when
nothing is lost by never letting anything else happen before it. That is so when, in the local
state where it is possible and in all those that other inputs `a` lead to from there,

    l ──a──→ l'      1. both orders lead to the same local state, and everybody hears the same
    │        │          in the same order;
    m        m       2. m is not undone by a, and takes no other move of the party away;
    ↓        ↓       3. m hides nothing from others: what has ended and who is alive stays as it
    k ──a──→ k'         is, and blocks that were read, or slots written to, still are.

Then every path on which `m` comes later has a twin on which it comes first, through states that
allow the others as much and break as many promises, with the same end: `m` is a persistent set of
one move. As usual moves use something up, no eager move can keep others waiting for ever.

Which inputs a party can get is not known before. So the search begins by taking for eager what
looks so; when it has seen more, every eager move is compared with *all* inputs that were seen in
local states that can be reached from its own; what fails is banned, and states in which it was
followed alone are looked at anew, until nothing fails. The twin of a missing path is shorter by
one move than the path itself, so by induction no input is missing at the end.

What must not break: when in doubt, a move is not eager.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from penstock.testing.explore.result import DEFECTS
from penstock.testing.handoff import deeds as do
from penstock.testing.handoff.decode import DecodeRankActor
from penstock.testing.handoff.moves import MoveKind
from penstock.testing.handoff.prefill import Phase, PrefillRankActor
from penstock.testing.handoff.schedulers import SchedulerActor

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from penstock.testing.explore.eager import Said
    from penstock.testing.explore.memo import Memo
    from penstock.testing.handoff.casting import AnyActor, Casting
    from penstock.testing.handoff.moves import LocalMoves

_NODES_MAX = 1_000
"""Local states that are looked at for one move; with more it is not eager. They are mostly ones
that no search comes to."""


class _Checked(NamedTuple):
    """A move that was eager in a local state, as far as some inputs go."""

    inputs: frozenset[int]
    reached: list[int]
    """Where they lead, before the move."""


class Eagerness:
    """What is taken for eager, and why not."""

    def __init__(
        self,
        casting: Casting,
        local: Callable[[int, int], LocalMoves],
        *,
        fenced: bool,
    ) -> None:
        """Takes what it has to know of a world.

        Args:
            casting: the parties.
            local: what a party can do in a local state.
            fenced: whether there can be fences; then others look at which writes are posted.
        """
        self._casting, self._local, self._fenced = casting, local, fenced
        self.kinds = (MoveKind.DO,) if fenced else (MoveKind.DO, MoveKind.POST)
        """Moves that concern nobody but their party."""
        self._banned: set[tuple[int, int, int]] = set()
        self._known: dict[tuple[int, int, int], bool] = {}
        self._broken: set[tuple[int, int, int]] = set()
        """Local states in which a move is not eager, whatever else will be seen."""
        self._checked: dict[tuple[int, int, int], _Checked] = {}
        self._fine: dict[tuple[int, int], tuple[set[int], frozenset[int]]] = {}
        """For a party and a move: local states and inputs with which it was seen to be eager."""
        self._looks: list[dict[int, Looks]] = [{} for _ in casting.names]
        self.used: list[dict[int, dict[int, int]]] = [defaultdict(dict) for _ in casting.names]
        """For each party: local states, what was given to it there, and where that led."""
        self._followed: set[tuple[int, int, int]] = set()

    def is_eager(self, place: int, local: int, deed: int) -> bool:
        """Whether this may happen at once, as far as is known."""
        key = (place, local, deed)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = key not in self._banned and self._is_unseen(*key)
        if known:
            self._followed.add(key)
        return known

    # ---------------------------------------------------------------- looking back

    def review(self) -> set[tuple[int, int]]:
        """Parties and local states in which a move was taken for eager that is not.

        By all that was seen until now. It is banned there from now on.
        """
        failed: set[tuple[int, int, int]] = set()
        for place in range(len(self._casting.names)):
            roots: dict[int, set[int]] = defaultdict(set)
            for at, local, deed in self._followed:
                if at == place:
                    roots[deed].add(local)
            for deed, locals_ in roots.items():
                bad = self._failing(place, deed, locals_)
                failed |= {(place, local, deed) for local in bad}
        self._banned |= failed
        self._followed -= failed
        for key in failed:
            self._known[key] = False
        return {(place, local) for place, local, _ in failed}

    def _failing(self, place: int, deed: int, roots: set[int]) -> set[int]:
        """Those of the local states in which a move is not eager after all."""
        inputs = self._inputs_after(place, deed, roots)
        if self._fine.get((place, deed)) == (roots, inputs):
            return set()
        nodes, pending = set(roots), [*sorted(roots)]
        leads: dict[int, set[int]] = defaultdict(set)
        bad: set[int] = set()
        while pending:
            local = pending.pop()
            reached = self._reached(place, local, deed, inputs)
            if reached is None or len(nodes) > _NODES_MAX:
                bad.add(local)
                continue
            for other in reached:
                leads[other].add(local)
                if other not in nodes:
                    nodes.add(other)
                    pending.append(other)
        pending = [*bad]
        while pending:
            for before in leads[pending.pop()] - bad:
                bad.add(before)
                pending.append(before)
        if not bad & roots:
            self._fine[place, deed] = (roots, inputs)
        return bad & roots

    def _inputs_after(self, place: int, deed: int, roots: set[int]) -> frozenset[int]:
        """Everything that was given to the party in local states that follow these."""
        used = self.used[place]
        seen, pending, inputs = set(roots), [*roots], set()
        while pending:
            for given, after in used.get(pending.pop(), {}).items():
                inputs.add(given)
                if after not in seen:
                    seen.add(after)
                    pending.append(after)
        return frozenset(
            given for given in inputs if given != deed and not self._behind(given, deed)
        )

    def _behind(self, given: int, deed: int) -> bool:
        """Whether one message comes on the same way as another, so that it cannot be first."""
        one, other = self._casting.deeds[given], self._casting.deeds[deed]
        if not isinstance(one, do.Receive) or not isinstance(other, do.Receive):
            return False
        return one.message.sender.name == other.message.sender.name

    def _reached(
        self, place: int, local: int, deed: int, inputs: frozenset[int]
    ) -> list[int] | None:
        """As `_diamonds`, but with each input once: it does not change what comes of it."""
        key = (place, local, deed)
        if key in self._broken:
            return None
        known = self._checked.get(key)
        if known is not None and inputs <= known.inputs:
            return known.reached
        more = self._diamonds(
            place, local, deed, sorted(inputs - known.inputs if known else inputs)
        )
        if more is None:
            self._broken.add(key)
            self._checked.pop(key, None)
            return None
        reached = [*known.reached, *more] if known else more
        # Mostly the same set for many local states: it is not copied for each.
        inputs = inputs if known is None or known.inputs <= inputs else inputs | known.inputs
        self._checked[key] = _Checked(inputs, reached)
        return reached

    def _diamonds(
        self, place: int, local: int, deed: int, inputs: Iterable[int]
    ) -> list[int] | None:
        """Where other inputs lead before the move; nothing when it is not eager here."""
        memo: Memo[AnyActor, int, Said] = self._casting.memos[place]
        if not self._is_unseen(place, local, deed):
            return None
        after, said = memo.after(local, deed)
        reached = []
        for given in inputs:
            if not self._applies(place, local, given):
                continue
            try:
                end, then_said = memo.after(after, given)
            except DEFECTS:
                continue  # The search comes to this, if it can happen at all.
            try:
                other, other_said = memo.after(local, given)
                other_end, other_then = memo.after(other, deed)
            except DEFECTS:
                return None
            alike = _by_target(said, then_said) == _by_target(other_said, other_then)
            if end != other_end or not alike:
                return None
            if other != local:
                reached.append(other)
        return reached

    def _applies(self, place: int, local: int, given: int) -> bool:
        """Whether an input is possible in a local state, as far as the party itself knows."""
        deed = self._casting.deeds[given]
        actor = self._casting.actor(place, local)
        match deed:
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
                if isinstance(actor, PrefillRankActor) and _begins(deed):
                    return not any(handoff in actor.computed for handoff in _begins(deed))
                return given in self._own_deeds(place, local)

    def _own_deeds(self, place: int, local: int) -> set[int]:
        mine = self._local(place, local)
        return {move.deed for move in (*mine.usual, *mine.conditional, *mine.faults)}

    # ---------------------------------------------------------------- one move in one state

    def _is_unseen(self, place: int, local: int, deed: int) -> bool:
        """Whether a move takes no other away, and changes nothing that others look at."""
        if not self._can(place, local, deed):
            return False
        try:
            after, _ = self._casting.memos[place].after(local, deed)
        except DEFECTS:
            return False
        kept = self._own_deeds(place, local) - {deed} <= self._own_deeds(place, after)
        return kept and self._look(place, local).hides_nothing_in(self._look(place, after))

    def _can(self, place: int, local: int, deed: int) -> bool:
        return isinstance(self._casting.deeds[deed], do.Receive) or deed in self._own_deeds(
            place, local
        )

    def _look(self, place: int, local: int) -> Looks:
        known = self._looks[place].get(local)
        if known is None:
            known = self._looks[place][local] = look_of(
                self._casting.actor(place, local), fenced=self._fenced
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
            fixed = (frozenset(actor.revoked), frozenset(actor.slots.items()))
            rising |= actor.touches()
        case SchedulerActor():
            fixed = (frozenset(actor.ended.items()), frozenset(actor.died))
        case _:
            raise TypeError(f"{actor!r} is no party of a handoff")
    return Looks((actor.identity.life, lives, fixed), frozenset(rising))


def _is_in_use(actor: AnyActor, handoff: str, epoch: int) -> bool:
    """Whether a rank reads the blocks of a prompt, or writes to its slots."""
    if isinstance(actor, PrefillRankActor):
        return actor.reads(handoff)
    return isinstance(actor, DecodeRankActor) and (handoff, epoch) in actor.touches()


def _begins(deed: do.Deed) -> list[str]:
    """The prompts that a rank begins with."""
    deeds = deed.deeds if isinstance(deed, do.Many) else (deed,)
    return [each.handoff for each in deeds if isinstance(each, do.Prefill)]


def _by_target(first: Said, second: Said) -> dict[int, list[int]]:
    heard: dict[int, list[int]] = {}
    for target, message in (*first, *second):
        heard.setdefault(target, []).append(message)
    return heard
