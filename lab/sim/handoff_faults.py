"""What befalls the parties of a simulated handoff: deaths, partitions, false suspicions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.worlds import actions as do
from lab.worlds.scene import DECODE, PREFILL
from penstock.handoff.protocol.identity import Life

if TYPE_CHECKING:
    from lab.sim.handoff import HandoffWorld

_DETECTION_S = 1.0
"""A peer that is silent is suspected within this, on average."""
_SEEN_S = 0.1
"""The death of a colleague is seen within this."""


class HandoffFaultInjector:
    """Where the conditions strikes."""

    def __init__(self, world: HandoffWorld) -> None:
        self._world = world
        self._rng = world.rng

    def begin(self) -> None:
        """Puts everything that will befall the world on its agenda."""
        conditions = self._world.conditions
        span_s = 2.0 + conditions.gap_s * len(conditions.scene.prompts)
        for count, strike in (
            (conditions.crash_count, self._crash),
            (conditions.partition_count, self.part),
            (conditions.suspicion_count, self.suspect),
        ):
            for _ in range(count):
                self._world.after(self._rng.uniform(0.0, span_s), strike)

    def _crash(self) -> None:
        """A process dies; another takes its place after a while."""
        world = self._world
        name = self._rng.choice(world.scene.names)
        if not world.is_up(name):
            return
        world.note("scheduler dies" if name in {PREFILL, DECODE} else "rank dies")
        ghosts = []
        if name in world.scene.prefill_ranks:
            rank = world.prefill_rank(name)
            ghosts = rank.posted()
        life = world.actors[name].identity.life
        reborn = Life(name, life.incarnation + 1)
        peers = tuple(world.actors[peer].identity for peer in world.scene.peers_of(name))
        world.fall(name)
        world.give(name, do.Rebirth(reborn, peers))
        for write in ghosts:
            world.drivers.haunt(life, write)
        down_s = self._rng.expovariate(1.0)
        for peer in world.scene.peers_of(name):
            if self._rng.random() < 0.7:
                colleagues = peer.startswith(PREFILL) == name.startswith(PREFILL)
                detection_s = self._rng.uniform(0.0, _SEEN_S if colleagues else _DETECTION_S)
                world.after(detection_s, self._lose, peer, name, life.incarnation)
            world.after(down_s + self._rng.uniform(0.0, _DETECTION_S), self._hear, peer, name)
        world.after(down_s, world.rise, name)

    def _lose(self, observer: str, name: str, incarnation: int) -> None:
        """A party finds that another is gone, unless it has heard of its new life already."""
        known = self._world.actors[observer].machine.life_of(name).incarnation
        if self._world.is_up(observer) and known == incarnation:
            self._world.give(observer, do.Suspect(name))

    def _hear(self, observer: str, name: str) -> None:
        """A party hears of another's new life, if it has not yet; when it is up itself."""
        identity = self._world.actors[name].identity
        machine = self._world.actors[observer].machine
        if not self._world.is_up(observer):
            self._world.after(self._rng.uniform(0.0, _DETECTION_S), self._hear, observer, name)
        elif machine.life_of(name) != identity.life:
            self._world.give(observer, do.Introduce(identity))

    def part(self) -> None:
        """The two engines do not hear each other for a while, and may suspect each other."""
        world = self._world
        duration_s = self._rng.expovariate(1.0)
        if world.conditions.long_cut:
            world.note("long cut")
            duration_s = 10.0 + min(20.0, 10.0 * duration_s)
        world.network.cut(duration_s)
        for name in world.scene.names:
            for peer in world.scene.peers_of(name):
                if world.network.is_cut(name, peer) and self._rng.random() < 0.5:
                    life = world.actors[peer].identity.life
                    detection_s = self._rng.uniform(0.0, _DETECTION_S)
                    world.after(detection_s, self._lose, name, peer, life.incarnation)

    def suspect(self) -> None:
        """A party thinks that a peer of the other engine is gone, which it is not."""
        world = self._world
        name = self._rng.choice(world.scene.names)
        across = [
            peer
            for peer in world.scene.peers_of(name)
            if peer.startswith(PREFILL) != name.startswith(PREFILL)
        ]
        peer = self._rng.choice(across)
        world.note("false suspicion")
        self._lose(name, peer, world.actors[peer].identity.life.incarnation)
