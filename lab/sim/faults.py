"""What befalls a world: deaths, tiers that go off, resets, rot, reports from nowhere.

Each step of the engine may bring any of it, at the rates of the conditions. The end of each
trouble is put on the agenda when it begins; `mend` brings the rest to an end.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np

from lab.explore.world import Violation
from lab.sim.conditions import AMPLE_SLOTS
from lab.sim.descriptions import describe
from lab.sim.workload import WEIGHTS
from penstock.cache.operations import BlockFault
from penstock.cache.settings import DEVICE
from penstock.cache.states import LeaseState, SlotState
from penstock.errors import LeaseError, UnavailableError
from penstock.machine import events as ev
from penstock.vocabulary.keys import LeaseId, OperationId, PinId

if TYPE_CHECKING:
    from lab.sim.world import World
    from penstock.vocabulary.keys import Key

_NO_LEASE = LeaseId(10_000)


class FaultInjector:
    """Everything that happens to the cache without the engine's doing."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._weights = Random(f"weights of {world.seed}")
        """Draws of its own: worlds of old seeds stay what they were without them."""
        conditions = world.conditions
        self._tier_count = 1 + len(conditions.settings.tiers)
        self._dangers = [
            (rate, strike)
            for rate, strike in (
                (conditions.stray, self._stray_report),
                (conditions.rot, self._rot),
                (conditions.death, self._die),
                (conditions.tier_trouble, self._tier_off),
                (conditions.reset, self._reset),
                (conditions.misuse, self._misuse),
                (conditions.discover, self._discover),
                (conditions.sleep, self._sleep),
                (conditions.weights, self._change_weights),
                (0.0 if conditions.store is None else conditions.store.death, self._store_dies),
                (0.0 if conditions.store is None else conditions.store.full, self._store_full),
                (0.0 if conditions.store is None else conditions.store.neighbour, self._neighbour),
            )
            if rate
        ]

    def strike(self) -> None:
        """One step of the engine's time passes."""
        for rate, strike in self._dangers:
            if self._rng.random() < rate:
                strike()

    def begin(self) -> None:
        """A world may begin with tiers that an earlier life of the engine has filled."""
        world = self._world
        if world.conditions.warm:
            for _ in range(self._rng.randint(1, 3)):
                text = world.library.next_text()
                world.library.remember(text)
                self._find(world.library.all_keys(text), foreign=False)

    def mend(self) -> None:
        """The sky clears: all ranks and tiers are there again, and well."""
        ranks = self._world.ranks
        for rank in sorted(ranks.dead - ranks.lost):
            self._notice_death(rank)
        for rank in sorted(ranks.dead):
            self._come_back(rank)
        for tier, store in ranks.stores.items():
            store.well, store.full = True, False
            if not store.alive:
                ranks.off.add(tier)
        for tier in sorted(ranks.off):
            self._tier_on(tier)
        ranks.recover()

    # ---------------------------------------------------------------- ranks

    def _die(self) -> None:
        ranks = self._world.ranks
        alive = [rank for rank in range(ranks.rank_count) if rank not in ranks.dead]
        if not alive:
            return
        rank = self._rng.choice(alive)
        ranks.dead.add(rank)
        ranks.wipe(rank, DEVICE)
        self._world.note("rank dies")
        self._world.tell("rank %d dies", rank)
        self._world.after(self._a_while(), self._notice_death, rank)

    def _notice_death(self, rank: int) -> None:
        world = self._world
        if rank in world.ranks.lost or rank not in world.ranks.dead:
            return
        world.ranks.lost.add(rank)
        world.ranks.silence(rank)
        world.engine.rank_died()
        world.send(ev.RankLost(rank=rank))
        if self._rng.random() < 0.1:
            world.send(ev.RankLost(rank=rank))  # Two observers saw the same death.
        # Some are restarted at once, while copies from before the death are still under way.
        pause = self._a_while() * self._rng.choice((0.02, 1.0))
        world.after(pause, self._come_back, rank)

    def _come_back(self, rank: int) -> None:
        world = self._world
        if rank not in world.ranks.lost:
            return
        world.ranks.lost.discard(rank)
        world.ranks.dead.discard(rank)
        world.note("rank comes back")
        world.send(ev.RankBack(rank=rank))

    # ---------------------------------------------------------------- memory

    def _sleep(self) -> None:
        """The device's memory goes back to the system, when nobody uses it: its bytes are gone."""
        world = self._world
        if world.books.leases or world.machine.operations or not world.conditions.managed:
            return
        world.note("device emptied")
        self._empty_device()
        device = world.books.tier(DEVICE).pool
        if np.count_nonzero(device.state == SlotState.READY):
            raise Violation("drain", "blocks are left on a device that was emptied")

    def _empty_device(self) -> None:
        self._world.send(ev.EmptyDevice(why="sleep"))
        for rank in range(self._world.ranks.rank_count):
            self._world.ranks.wipe(rank, DEVICE)

    # ---------------------------------------------------------------- tiers

    def _tier_off(self) -> None:
        if self._tier_count == 1:
            return
        tier = self._rng.randrange(1, self._tier_count)
        if self._rng.random() < 0.1 and tier not in self._world.ranks.off:
            # It came back before anybody noticed that it was gone.
            self._world.ranks.off.add(tier)
            self._tier_on(tier)
        else:
            self._switch_off(tier, fenced=self._rng.random() < 0.5)

    def _switch_off(self, tier: int, *, fenced: bool) -> None:
        world = self._world
        if fenced:
            if tier in world.ranks.stores:
                world.ranks.stores[tier].die(power=False)
            world.ranks.fence(tier)
        world.ranks.off.add(tier)
        world.note("tier off, fenced" if fenced else "tier off, not fenced")
        world.send(ev.TierOff(tier=tier, fenced=fenced, why="conditions"))
        if not fenced and self._rng.random() < 0.3:
            world.after(self._a_while(), self._fence_later, tier)
        world.after(self._a_while(), self._tier_on, tier)

    def _fence_later(self, tier: int) -> None:
        if tier in self._world.ranks.off:
            self._switch_off(tier, fenced=True)

    def _tier_on(self, tier: int) -> None:
        world = self._world
        if tier not in world.ranks.off:
            return
        store = world.ranks.stores.get(tier)
        if store is not None and not store.alive:
            # The process is seen to be a new one: the old one touches nothing any more.
            world.ranks.fence(tier)
            world.send(ev.TierOff(tier=tier, fenced=True, why="the store process is new"))
            store.restart()
        world.ranks.off.discard(tier)
        kept = self._rng.random() < 0.5
        if not kept and store is None:
            for rank in range(world.ranks.rank_count):
                world.ranks.wipe(rank, tier)
        if not kept and store is not None:
            world.send(ev.TierVoided(tier=tier, own=self._rng.random() < 0.5))
        world.note("tier back with its bytes" if kept else "tier back empty")
        world.send(ev.TierOn(tier=tier, kept=kept))
        if store is not None:
            store.tell_pages()

    def _store_dies(self) -> None:
        world = self._world
        living = [store for store in world.ranks.stores.values() if store.alive]
        if not living:
            return
        store = self._rng.choice(living)
        assert world.conditions.store is not None
        power = self._rng.random() < world.conditions.store.power
        world.note("store loses power" if power else "store is killed")
        world.tell("the store of tier %d dies", store.tier)
        store.die(power=power)
        world.after(self._a_while(), self._notice_store, store.tier, store.life)

    def _notice_store(self, tier: int, life: int) -> None:
        store = self._world.ranks.stores[tier]
        if not store.alive and store.life == life:
            self._switch_off(tier, fenced=True)

    def _neighbour(self) -> None:
        world, rng = self._world, self._rng
        store = rng.choice(list(world.ranks.stores.values()))
        if rng.random() < 0.5:
            store.read_for_neighbour()
            return
        world.note("blocks of another engine in a store")
        store.take_in(world.library.all_keys(world.library.next_text()), None)

    def _store_full(self) -> None:
        store = self._rng.choice(list(self._world.ranks.stores.values()))
        store.full = not store.full

    def _rot(self) -> None:
        world = self._world
        if self._tier_count == 1:
            return
        tier = self._rng.randrange(1, self._tier_count)
        rank = self._rng.randrange(world.ranks.rank_count)
        if tier in world.ranks.stores:
            if world.ranks.stores[tier].rot(rank):
                world.note("bytes rot in a store")
            return
        memory = world.ranks.memory[rank][tier]
        used = [slot for slot, content in enumerate(memory) if content is not None]
        if used:
            slot = self._rng.choice(used)
            world.note("bytes rot")
            world.tell("slot %d of tier %d rots on rank %d", slot, tier, rank)
            world.ranks.rot(rank, tier, slot)

    def _discover(self) -> None:
        """Blocks from the middle of some text turn up."""
        keys = self._world.library.all_keys(self._world.library.next_text())
        first = self._rng.randint(0, len(keys))
        before = keys[first - 1] if first else None
        self._find(keys[first : first + 3], before, foreign=self._rng.random() < 0.3)

    def _find(self, keys: list[Key], before: Key | None = None, *, foreign: bool) -> None:
        """Blocks lie in free slots of some tier, though nobody here has written them."""
        world, rng = self._world, self._rng
        tiers = [
            tier
            for tier in world.books.lower_tiers()
            if tier.index not in world.ranks.off
            and (not world.conditions.healthy or tier.pool.slot_count == AMPLE_SLOTS)
        ]
        if not tiers:
            return
        # Mostly in the last one, so that blocks have a long way to go.
        tier = tiers[-1] if rng.random() < 0.6 else rng.choice(tiers)
        if tier.index in world.ranks.stores and not foreign:
            world.note("blocks of another engine in a store")
            world.ranks.stores[tier.index].take_in(keys, before)
            return
        free = np.flatnonzero(tier.pool.state == SlotState.FREE).tolist()
        keys = keys[: len(free)]
        if not keys:
            return
        slots = rng.sample(free, len(keys))
        if foreign:
            world.note("foreign blocks found")
        else:
            world.ranks.discover(tier.index, slots, keys)
            world.model.discover(keys)
        world.send(
            ev.Discovered(
                tier=tier.index,
                keys=keys,
                parents=[before, *keys[:-1]],
                slots=np.array(slots, dtype=np.int32),
                foreign=foreign,
            )
        )

    # ---------------------------------------------------------------- the whole

    def _reset(self) -> None:
        world = self._world
        world.note("reset")
        world.epoch += 1
        world.era += 1
        world.model.known.clear()
        world.model.arriving.clear()
        world.send(ev.Reset(why="conditions"))
        self._begin_era()

    def _change_weights(self) -> None:
        """New requests have other keys; blocks in memory below the device keep theirs."""
        world, library = self._world, self._world.library
        before, after = library.weights, self._weights.choice(WEIGHTS)
        world.note("weights change")
        world.era += 1
        if not before or before == after:
            world.epoch += 1
        library.weights = after
        world.send(ev.ChangeWeights(before=before, after=after))
        # What stores keep of other weights lies apart, and of these there is nothing.
        self._begin_era()

    def _begin_era(self) -> None:
        world = self._world
        for store in world.ranks.stores.values():
            store.void()
        for request in world.engine.waiting():
            if request.state is LeaseState.LOADING:
                raise Violation("liveness", f"{request.name} still waits after a reset")

    def _stray_report(self) -> None:
        """A report that belongs to no operation of this life changes nothing."""
        world, rng = self._world, self._rng
        name = rng.choice(list(world.ranks.open) or [OperationId(0, 0, 1)])
        if rng.random() < 0.5:
            world.note("report of an unknown operation")
            name = name._replace(incarnation=world.incarnation, sequence=name.sequence + 10_000)
        else:
            world.note("report from an earlier life")
            name = name._replace(incarnation=world.incarnation ^ 1)
        world.watch()
        world.ranks.late_reports += 1
        world.send(ev.CopyReport(operation=name, rank=rng.randrange(world.ranks.rank_count)))
        world.check_unchanged()

    def _misuse(self) -> None:
        """Events that make no sense are refused, and nothing has changed."""
        world = self._world
        world.watch(always=True)
        for event in self._rng.sample(self._nonsense(), 3):
            world.note("event refused")
            try:
                world.send(event)
            except (LeaseError, UnavailableError, ValueError):
                world.check_unchanged()
            else:
                raise Violation("refusal", f"nonsense was accepted: {describe(event)}")

    def _nonsense(self) -> list[ev.Event]:
        world = self._world
        keys = world.library.all_keys(world.library.fresh_text("nonsense", 99))[:2]
        groups = world.conditions.settings.group_count
        slots = np.zeros((groups, 2), dtype=np.int32)
        events: list[ev.Event] = [
            ev.Grow(lease=_NO_LEASE, token_count=1),
            ev.Commit(lease=_NO_LEASE, token_count=1, keys=[]),
            ev.Fork(lease=_NO_LEASE, request="nobody"),
            ev.ReleaseLease(lease=_NO_LEASE),
            ev.Preempt(lease=_NO_LEASE),
            ev.UnpinBlocks(pin=PinId(10_000)),
            ev.PinBlocks(keys=[keys[0], keys[0]]),
            ev.Acquire(request="nobody", keys=[], token_count=0),
            ev.Acquire(request="nobody", keys=keys, token_count=1_000_000),
            ev.Load(keys=keys, slots=slots[:, :1], cause="nobody"),
            ev.Load(keys=[keys[0], keys[0]], slots=slots, cause="nobody"),
            ev.Save(keys=keys, slots=slots - 1, cause="nobody"),
            ev.RankLost(rank=world.ranks.rank_count),
            ev.RankBack(rank=-1),
            ev.TierOff(tier=DEVICE, fenced=True),
            ev.TierOn(tier=self._tier_count, kept=True),
        ]
        if self._tier_count > 1:
            events.append(ev.Discovered(tier=1, keys=keys, parents=[None], slots=slots[0]))
            events.append(ev.Vanished(tier=1, keys=keys))
        events += [
            ev.Discovered(tier=tier, keys=keys, parents=[None, None], slots=slots[0])
            for tier in world.ranks.stores
        ]
        for job in world.ranks.open.values():
            beyond = [(len(job.keys), BlockFault.CORRUPT)]
            events += [
                ev.CopyReport(operation=job.id, rank=rank, faults=beyond)
                for rank in sorted(job.left)
            ]
        return events + self._nonsense_about_leases()

    def _nonsense_about_leases(self) -> list[ev.Event]:
        events: list[ev.Event] = []
        size = self._world.library.block_tokens
        requests = list(self._world.engine.waiting())
        for request in requests:
            lease, count = request.lease, request.computed
            beyond = (len(request.table) + 1) * size
            events.append(ev.Commit(lease=lease, token_count=beyond, keys=[]))
            if request.state is not LeaseState.READY:
                events.append(ev.Commit(lease=lease, token_count=count, keys=[]))
                events.append(ev.Grow(lease=lease, token_count=beyond))
                events.append(ev.Fork(lease=lease, request="nobody"))
                continue
            if request.store and request.era == self._world.era:
                one_too_many = [request.text.namespace.digest]
                events.append(ev.Commit(lease=lease, token_count=count, keys=one_too_many))
            tail = request.table[count // size] if count % size else None
            # Of a lease that is lost, blocks may be another's by now.
            others = [each for each in requests if each.state is not LeaseState.LOST]
            if any(other is not request and tail in other.table for other in others):
                # Neither may write to a block that both have.
                events.append(ev.Commit(lease=lease, token_count=count + 1, keys=[]))
        return events

    def _a_while(self) -> float:
        return self._rng.uniform(0.0, 1.0) * self._world.conditions.settings.operation_timeout_s
