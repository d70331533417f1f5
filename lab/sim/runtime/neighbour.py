"""Another engine of the machine, with a link of its own to the same store.

It saves blocks with the right bytes, loads them again and compares, and begins new generations.
Its ranks have arenas of their own, and hold the same parts as those of the world's engine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from lab.explore.world import Violation
from lab.sim.runtime.memory import ALGORITHM, TierSlots
from lab.sim.runtime.stores import SimLink, SimOffer
from penstock.cache.operations import Purpose
from penstock.cache.settings import HUB
from penstock.machine.effects import Copy
from penstock.machine.events import CopyReport
from penstock.store.process.messages import arena_name
from penstock.tiers.host import HostTier
from penstock.vocabulary.checksums import life_salt
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import OperationId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.sim.runtime.world import RuntimeWorld
    from penstock.vocabulary.keys import Key

SLOTS = 8


class Neighbour:
    """One engine, without a cache: it is told what to save and what to load."""

    def __init__(self, world: RuntimeWorld) -> None:
        assert world.stores is not None
        self._world = world
        self._stores = world.stores
        self._life = world.rng.getrandbits(64)
        salt = life_salt(self._life, 0)
        layout = world.ranks.memories[0].layout
        groups = world.conditions.settings.group_count
        self._hosts = [
            HostTier.create(layout, SLOTS, huge_pages=False) for _ in range(world.ranks.rank_count)
        ]
        self._views = [TierSlots(host, groups, lambda: salt) for host in self._hosts]
        form = Form(layout=self._hosts[0].layout, checksum=ALGORITHM)
        self._offers = [
            SimOffer(
                world.stores, host, form=form, part=world.ranks.parts[rank], arrived=self._call
            )
            for rank, host in enumerate(self._hosts)
        ]
        self.link = SimLink(
            world.stores,
            life=self._life,
            arenas=[arena_name(host.arena.fd) for host in self._hosts],
            arrived=self._call,
        )
        world.stores.links[self._life] = self.link
        self._sequence = 0
        self._copies: dict[OperationId, tuple[Copy, set[int], set[int]]] = {}
        """Copies under way, with the ranks that have not reported and positions with faults."""
        self._called = self._dead = False
        self._alarm_at = math.inf
        self._call()

    @property
    def busy(self) -> bool:
        """Whether copies of it are under way."""
        return bool(self._copies)

    def save(self, tier: int, keys: Sequence[Key], before: Key | None) -> None:
        """Saves a chain of blocks, as far as it has slots."""
        slots = self._free_slots()[: len(keys)]
        keys = keys[: len(slots)]
        if not keys:
            return
        for view in self._views:
            for key, slot in zip(keys, slots, strict=True):
                view.write(slot, self._world.library.right[key])
        self._order(Purpose.SAVE, HUB, tier, keys, slots, (before, *keys[:-1]))

    def load(self, tier: int, keys: Sequence[Key]) -> None:
        """Loads blocks and looks at them."""
        slots = self._free_slots()[: len(keys)]
        if slots:
            self._order(Purpose.LOAD, tier, HUB, keys[: len(slots)], slots, ())

    def void(self, tier: int) -> None:
        """Begins a new generation, for all engines."""
        self.link.void(tier)
        self._call()

    def _free_slots(self) -> list[int]:
        held = {
            slot
            for copy, _, _ in self._copies.values()
            for slot in (copy.source_slots if copy.source == HUB else copy.target_slots).tolist()
        }
        return [slot for slot in range(SLOTS) if slot not in held]

    def _order(
        self,
        purpose: Purpose,
        source: int,
        target: int,
        keys: Sequence[Key],
        slots: Sequence[int],
        parents: Sequence[Key | None],
    ) -> None:
        self._sequence += 1
        places = np.array(slots, dtype=np.int32)
        timeout_s = self._world.conditions.settings.operation_timeout_s
        copy = Copy(
            operation=OperationId(self._life, 0, self._sequence),
            purpose=purpose,
            source=source,
            target=target,
            keys=list(keys),
            source_slots=places,
            target_slots=places,
            deadline=self._world.now + timeout_s,
            cause="neighbour",
            parents=parents,
        )
        self._copies[copy.operation] = (copy, set(range(len(self._hosts))), set())
        self.link.order(copy)
        self._call()

    # ---------------------------------------------------------------- its turns

    def _call(self) -> None:
        if not self._called:
            self._called = True
            pause = self._world.rng.random() * self._world.ways.owner_s
            self._world.after(pause, self._turn)

    def _turn(self) -> None:
        self._called = False
        if self._dead:
            return
        for offer in self._offers:
            offer.poll()
        for result in self.link.collect():
            if isinstance(result, CopyReport):
                self._take_report(result)
        self.link.dispatch()
        drawn = [self.link.alarm, *(offer.alarm for offer in self._offers)]
        alarm = min((each for each in drawn if each is not None), default=math.inf)
        if alarm < self._alarm_at:
            self._alarm_at = alarm
            self._world.after(max(0.0, self._alarm_at - self._world.now), self._ring)

    def _ring(self) -> None:
        self._alarm_at = math.inf
        self._call()

    def _take_report(self, report: CopyReport) -> None:
        copy, left, faulty = self._copies[report.operation]
        self._stores.job_reported(self.link, report.operation, report.rank)
        left.discard(report.rank)
        faulty |= {position for position, _ in report.faults}
        if report.failure:
            faulty |= set(range(len(copy.keys)))
        elif copy.purpose is Purpose.LOAD:
            self._check(copy, report)
        if not left:
            del self._copies[report.operation]

    def _check(self, copy: Copy, report: CopyReport) -> None:
        bad = {position for position, _ in report.faults}
        for position, slot in enumerate(copy.target_slots.tolist()):
            right = self._world.library.right[copy.keys[position]]
            if position not in bad and self._views[report.rank].read(slot) != right:
                raise Violation("bytes", "a neighbour loads wrong bytes")

    def close(self) -> None:
        """The world is over, or this engine is killed: its memory is gone."""
        self._dead = True
        self.link.close(0.0)
        for offer in self._offers:
            offer.close()
        for host in self._hosts:
            host.close()
