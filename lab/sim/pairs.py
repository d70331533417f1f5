"""A world of the scenario `pairs`: prefill and decode instances that a router introduces.

    PairsSimulation(seed).run()

A pair of instances is a `HandoffWorld`: the parties are the shipped machines, and they are other
lives each time the pair is opened. The router chooses a prefill and a decode instance for each
request; which pairs are open, the shipped `PairTable` of the server says; instances
keep the bounds of `penstock_serve.engine.peers`. Instances join, drain and leave, change their
roles, die and start again.

- `bounds`: an instance has at most `peers_max` pairs open, and the landing areas of a decode rank
  stay within its landing memory, those of all pairs together;
- `drain`: a pair that was idle for long holds nothing; at the end, no pair is open;
- `liveness`: every request ends, and before its deadline if there was an instance for it;
- `usefulness`, `messages`: in a calm world every request is handed over, with messages in
  proportion to what travelled;
- and in each pair, what the scenario `handoff` checks at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.sim.agenda import Agenda
from lab.sim.handoff import STEP_COUNT_MAX, HandoffWorld, Seen
from lab.sim.handoff_ends import check_drained, check_sparing
from lab.sim.pairs_conditions import IDLE_LONG_S, draw_pairs_conditions
from lab.sim.pairs_router import Router
from lab.worlds import actions as do
from lab.worlds.scene import DECODE, PREFILL, identity_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.worlds.scene import Prompt
    from penstock.handoff.protocol.identity import Identity

Couple = tuple[str, str]
"""A prefill instance and a decode instance."""

_MEET_S = 0.2
"""Within this, the lines of a pair are open."""
_RESTART_S = 2.0
_STEP_S = 0.5
"""A step of an engine may take so long, and messages wait for its end."""
_STEP_SHARE = 0.1


@dataclass(slots=True, kw_only=True, eq=False)
class Instance:
    """A process with its ranks."""

    name: str
    ranks: int
    role: str
    life: int = 0
    up: bool = False
    open: set[Couple] = field(default_factory=set)
    """Pairs of which this side is open."""
    heard_at: float = 0.0
    """When the last message of the router comes: its channel keeps the order."""


@dataclass(slots=True, kw_only=True, eq=False)
class Pair:
    """Two instances that were introduced at least once."""

    world: HandoffWorld
    prompts: dict[str, Prompt]
    opened_count: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    """For each side by the name of its instance, the number of the pair that it opened last."""


class PairsSimulation:
    """One seed's world."""

    def __init__(self, seed: int, *, log: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.conditions = draw_pairs_conditions(self.rng)
        self.agenda = Agenda()
        self.seen = Seen()
        self.events, self.faults, self.copies = (
            self.seen.events,
            self.seen.faults,
            self.seen.copies,
        )
        self.log = log
        self.instances: dict[str, Instance] = {}
        self.pairs: dict[Couple, Pair] = {}
        self.router = Router(self)

    def run(self) -> None:
        """Lives the world to its end.

        Raises:
            Violation: a promise was broken.
        """
        conditions = self.conditions
        if self.log is not None:
            self.log(f"{conditions}")
        for role, counts in (
            ("prefill", conditions.prefill_ranks),
            ("decode", conditions.decode_ranks),
        ):
            late = [self.rng.choice((1, 2)) for _ in range(conditions.late_count)]
            for number, ranks in enumerate((*counts, *late)):
                instance = Instance(name=f"{role}{number}", ranks=ranks, role=role)
                self.instances[instance.name] = instance
                wait_s = self.rng.uniform(0.0, conditions.span_s) if number >= len(counts) else 0.0
                self.agenda.after(wait_s, self._join, instance)
        for number, asked in enumerate(conditions.requests):
            self.agenda.after(asked.arrives_s, self.router.arrive, f"r{number}", asked)
        for count, strike in (
            (conditions.death_count, self._die),
            (conditions.leave_count, self.router.leave),
            (conditions.role_change_count, self.router.change_role),
            (conditions.cut_count, self._cut),
            (conditions.suspicion_count, self._suspect),
        ):
            for _ in range(count):
                self.agenda.after(self.rng.uniform(0.0, 1.5 * conditions.span_s), strike)
        self.agenda.run(step_count_max=STEP_COUNT_MAX)
        self._check_at_rest()

    def note(self, fault: str) -> None:
        """Counts something that befell the world."""
        self.seen.faults[fault] += 1

    def tell(self, line: str) -> None:
        """Tells whoever listens about something that no party sees."""
        if self.log is not None:
            self.log(f"{self.agenda.now:9.3f}  · {line}")

    def delay_s(self) -> float:
        """How long a message between the router and an instance takes; some wait for a step."""
        delay_s = self.conditions.base.delay_s * self.rng.expovariate(1.0)
        return delay_s + (_STEP_S if self.rng.random() < _STEP_SHARE else 0.0)

    def send(self, name: str, action: Callable[..., None], *arguments: object) -> None:
        """The router sends an instance something; what it sends arrives in order, or never."""
        instance = self.instances[name]
        instance.heard_at = max(instance.heard_at, self.agenda.now + self.delay_s())
        self.agenda.at(instance.heard_at, self._hear, instance, instance.life, action, arguments)

    def report(self, name: str, action: Callable[..., None], *arguments: object) -> None:
        """An instance sends the router something."""
        instance = self.instances[name]
        self.agenda.after(self.delay_s(), self._hear, instance, instance.life, action, arguments)

    def _hear(
        self,
        instance: Instance,
        life: int,
        action: Callable[..., None],
        arguments: tuple[object, ...],
    ) -> None:
        if instance.up and instance.life == life:
            action(*arguments)

    # ---------------------------------------------------------------- pairs

    def pair_of(self, couple: Couple) -> Pair:
        """A pair, open or not."""
        pair = self.pairs.get(couple)
        if pair is None:
            pair = self.pairs[couple] = self._new_pair(couple)
        return pair

    def _new_pair(self, couple: Couple) -> Pair:
        prefill, decode = (self.instances[name] for name in couple)
        prompts: dict[str, Prompt] = {}
        conditions = self.conditions.pair_conditions(
            self.rng, prefill_ranks=prefill.ranks, decode_ranks=decode.ranks, prompts=prompts
        )
        world = HandoffWorld(
            conditions,
            self.rng,
            self.agenda,
            self.seen,
            log=self.log,
            label=f"{prefill.name}>{decode.name} ",
        )
        world.on_decode_ended = lambda ended: self.report(
            decode.name, self.router.handoff_ended, ended.handoff, ended.outcome
        )
        world.on_area_opened = lambda: self._check_landing(decode)
        for name in world.scene.names:
            world.fall(name)
        return Pair(world=world, prompts=prompts)

    def open_side(self, name: str, couple: Couple, number: int) -> None:
        """An instance opens its side of a pair, if it has room; the router hears if not.

        While the other side is that of an earlier pair, the two do not reach each other: their
        names contain the number of the pair.
        """
        instance = self.instances[name]
        self.close_side(name, couple)
        if not self._has_room_for(instance, couple):
            self.note("pair refused")
            self.report(name, self.router.pair_failed, couple)
            return
        pair = self.pair_of(couple)
        world = pair.world
        pair.opened_count += 1
        pair.numbers[name] = number
        world.network.apart = any(each != number for each in pair.numbers.values())
        instance.open.add(couple)
        if len(instance.open) > self.conditions.peers_max:
            raise Violation("bounds", f"{name} has {len(instance.open)} pairs open")
        names = _side(world, prefill=name == couple[0])
        reborn = {each: _next_life(world, each) for each in names}
        for each, identity in reborn.items():
            colleagues = tuple(
                reborn[peer] for peer in world.scene.peers_of(each) if peer in reborn
            )
            world.give(each, do.Rebirth(identity.life, colleagues))
            world.rise(each)
        if all(couple in self.instances[each].open for each in couple):
            if world.network.apart:
                self.note("earlier pair is still open")
            else:
                self._let_meet(world)

    def _has_room_for(self, instance: Instance, couple: Couple) -> bool:
        """What `Peers.open` asks before it opens a pair."""
        if len(instance.open) >= self.conditions.peers_max:
            return False
        if instance.name == couple[0]:
            return True
        taken = sum(self._share_of(each) for each in instance.open if each[1] == instance.name)
        return taken + self._share_of(couple) <= self.conditions.landing_bytes_max

    def _share_of(self, couple: Couple) -> int:
        ranks = self.instances[couple[0]].ranks
        return self.conditions.bounds_of(ranks).landing_bytes_max

    def _let_meet(self, world: HandoffWorld) -> None:
        """The lines of a pair are opened; where one is late, the parties greet each other."""
        for name in world.scene.names:
            for peer in world.scene.peers_of(name):
                across = peer.startswith(PREFILL) != name.startswith(PREFILL)
                if across and self.rng.random() < 0.7:
                    lives = (world.actors[name].identity, world.actors[peer].identity)
                    self.agenda.after(self.rng.uniform(0.0, _MEET_S), self._meet, world, lives)

    def _meet(self, world: HandoffWorld, lives: tuple[Identity, Identity]) -> None:
        names = [each.life.name for each in lives]
        same = all(world.actors[each.life.name].identity == each for each in lives)
        if same and all(world.is_up(name) for name in names):
            known = world.actors[names[0]].machine.life_of(names[1])
            if known != lives[1].life:
                world.give(names[0], do.Introduce(lives[1]))

    def close_side(self, name: str, couple: Couple) -> None:
        """An instance closes its side of a pair, whatever is under way; or it dies."""
        instance = self.instances[name]
        if couple not in instance.open:
            return
        instance.open.discard(couple)
        world = self.pairs[couple].world
        prefill = name == couple[0]
        unended = [] if prefill else sorted(world.decode_scheduler.open)
        for each in _side(world, prefill=prefill):
            life = world.actors[each].identity.life
            ghosts = world.prefill_rank(each).posted() if each in world.scene.prefill_ranks else []
            world.fall(each)
            world.give(each, do.Rebirth(_next_life(world, each).life, ()))
            for write in ghosts:
                world.drivers.haunt(life, write)
        for handoff, _ in unended:
            self.report(name, self.router.handoff_ended, handoff, None)

    # ---------------------------------------------------------------- what befalls instances

    def _join(self, instance: Instance) -> None:
        self.note("instance joins")
        # Not when it dies: what is sent to a dead one does not reach its next life.
        instance.life += 1
        instance.up = True
        self.report(instance.name, self.router.joined, instance.name)

    def _die(self) -> None:
        living = [each for each in self.instances.values() if each.up]
        if not living:
            return
        instance = self.rng.choice(living)
        self.note("instance dies")
        self.tell(f"{instance.name} dies")
        instance.up = False
        for couple in sorted(instance.open):
            self.close_side(instance.name, couple)
        detection_s = self.rng.uniform(0.0, 1.0)
        self.agenda.after(detection_s, self.router.lost, instance.name, instance.life)
        again_s = detection_s + _RESTART_S * self.rng.expovariate(1.0)
        self.agenda.after(again_s, self._join, instance)

    def _cut(self) -> None:
        """Two instances do not hear each other for a while."""
        pair = self._any_pair()
        if pair is not None:
            pair.world.injector.part()

    def _suspect(self) -> None:
        """A party thinks that a peer is gone, which it is not."""
        pair = self._any_pair()
        if pair is not None:
            pair.world.injector.suspect()

    def _any_pair(self) -> Pair | None:
        """One of which both sides are open."""
        both = [
            couple
            for couple in self.pairs
            if all(couple in self.instances[name].open for name in couple)
        ]
        return self.pairs[self.rng.choice(both)] if both else None

    # ---------------------------------------------------------------- checkers

    def check_idle(self, couple: Couple) -> None:
        """A pair that nobody used for very long holds nothing.

        Raises:
            Violation: one of its parties does.
        """
        if self.conditions.idle_s < IDLE_LONG_S[self.conditions.calm]:
            return
        self.note("idle pair looked at")
        world = self.pairs[couple].world
        check_drained(world)
        for scheduler in (world.prefill_scheduler, world.decode_scheduler):
            if scheduler.open:
                raise Violation("drain", f"{couple}: {min(scheduler.open)} has not ended")

    def _check_landing(self, decode: Instance) -> None:
        area_bytes = self.conditions.base.scene.settings.bounds.area_bytes
        for rank in range(decode.ranks):
            count = sum(
                len(self.pairs[couple].world.decode_rank(f"{DECODE}{rank}").berths)
                for couple in decode.open
                if couple[1] == decode.name
            )
            if count * area_bytes > self.conditions.landing_bytes_max:
                raise Violation(
                    "bounds",
                    f"rank {rank} of {decode.name} has {count} areas in all its pairs, more than "
                    f"{self.conditions.landing_bytes_max} bytes",
                )

    def _check_at_rest(self) -> None:
        self.router.check_at_rest()
        for instance in self.instances.values():
            if instance.open:
                raise Violation("drain", f"{instance.name} has pairs open: {instance.open}")
        for couple, pair in self.pairs.items():
            for rank in pair.world.scene.prefill_ranks:
                actor = pair.world.prefill_rank(rank)
                if actor.writes or actor.ghosts:
                    raise Violation("drain", f"{couple}: {rank} has writes left")
            if self.conditions.calm:
                check_sparing(pair.world, opened_count=pair.opened_count)


def _side(world: HandoffWorld, *, prefill: bool) -> tuple[str, ...]:
    """The parties of one instance in a pair."""
    scene = world.scene
    return (PREFILL, *scene.prefill_ranks) if prefill else (DECODE, *scene.decode_ranks)


def _next_life(world: HandoffWorld, name: str) -> Identity:
    life = world.actors[name].identity.life
    return identity_of(name, life.incarnation + 1)
