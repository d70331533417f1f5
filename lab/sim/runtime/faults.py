"""What befalls the processes of a runtime and the ways between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.sim.conditions import branch
from lab.sim.faults import FaultInjector
from lab.sim.runtime.conditions import Way
from lab.sim.runtime.neighbour import Neighbour
from penstock.cache.operations import BlockFault
from penstock.cache.settings import HUB
from penstock.errors import PeerError
from penstock.movers.base import Moved
from penstock.runtime.messages import RankReport, encode_report

if TYPE_CHECKING:
    from lab.sim.runtime.stores import Stores
    from lab.sim.runtime.world import RuntimeWorld
    from penstock.vocabulary.keys import Key


class RuntimeFaultInjector(FaultInjector):
    """Deaths, lost messages and nonsense, beside what befalls every cache."""

    def __init__(self, world: RuntimeWorld) -> None:
        super().__init__(world)
        self._runtime = world
        self._beyond = branch(self._rng)
        dangers = [(world.ways.garble, self._garble)]
        if world.ways.way is Way.MESSAGES:
            dangers.append((world.ways.cut, self._cut))
        if world.conditions.store is not None:
            dangers.append((world.conditions.store.hang / 8, self._store_stops))
            dangers.append((world.conditions.store.death / 2, self._store_doomed))
            dangers.append((world.conditions.store.repeat / 8, self._session_lost))
            dangers.append((world.conditions.store.neighbour / 8, self._neighbour_dies))
        self._dangers += [danger for danger in dangers if danger[0]]

    def mend(self) -> None:
        """All ranks are there again, and nothing goes wrong from now on."""
        world = self._runtime
        world.ranks.recover()
        if world.stores is not None:
            world.stores.mend()
        for process in list(world.ranks.processes):
            if process.misses_a_plan:
                process.kill("a plan to it was lost")
            if process.lacking:
                process.kill("it lacks a tier")
            if not process.alive or process.number in world.ranks.lost:
                self._notice_death(process.number)
                self._come_back(process.number)

    # ---------------------------------------------------------------- memory

    def _empty_device(self) -> None:
        """As an engine that sleeps: with the tier below, or without."""
        world = self._runtime
        host = bool(world.conditions.settings.tiers) and self._rng.random() < 0.5
        world.facade.sleep(host=host)
        self._give_back("")
        if host:
            self._give_back(world.conditions.settings.tiers[0].name)
            for rank in sorted(world.ranks.lost):
                self._come_back(rank)
            if world.machine.is_tier_on(HUB):
                raise Violation("reuse", "a tier came on whose memory was given back")
        world.facade.wake()
        world.call_owner()

    def _give_back(self, tier: str) -> None:
        """Ranks in other processes return what the owner says holds nothing."""
        world = self._runtime
        if world.ways.way is not Way.HERE:
            for process in world.ranks.processes:
                if process.alive and not process.executor.busy and not process.lacking:
                    process.rank.give_back(tier)

    # ---------------------------------------------------------------- ranks

    def _die(self) -> None:
        alive = [process for process in self._runtime.ranks.processes if process.alive]
        if not alive:
            return
        process = self._rng.choice(alive)
        self._world.note("rank dies")
        process.kill("it was killed")
        if self._rng.random() < 0.2:
            self._world.note("rank is back before it was missed")
            self._revive(process.number)

    def gone(self, rank: int) -> None:
        """A process has ended: the engine will see it."""
        self._world.after(self._a_while(), self._notice_death, rank)

    def _notice_death(self, rank: int) -> None:
        world = self._runtime
        if rank in world.ranks.lost or world.closing or world.ranks.processes[rank].alive:
            return
        world.facade.ranks.lose(rank, "its process is seen dead")

    def bury(self, rank: int) -> None:
        """The owner knows of a loss: a new process comes in a while."""
        pause = self._a_while() * self._rng.choice((0.02, 1.0))
        self._world.after(pause, self._come_back, rank)

    def _come_back(self, rank: int) -> None:
        world = self._runtime
        if rank in world.ranks.lost and not world.closing:
            world.note("rank comes back")
            self._revive(rank)

    def _revive(self, rank: int) -> None:
        world = self._runtime
        old = world.ranks.processes[rank]
        process = world.ranks.revive(rank)
        world.facade.ranks.rejoin(process.facts)
        if process.lacking:
            world.after(self._a_while(), process.kill, "it lacks a tier")
        if world.ways.way is Way.MESSAGES and old.last_report is not None:
            # What the earlier life said last turns up once more.
            world.after(self._a_while() * 0.1, world.hear, old.last_report)

    # ---------------------------------------------------------------- the store

    def begin(self) -> None:
        """Mostly the store has blocks of another engine, and is there for the first request."""
        world = self._runtime
        stored, neighbour = world.driver.stored, world.neighbour
        if stored is None or neighbour is None:
            super().begin()
            return
        world.live_until(lambda: neighbour.link.is_up, world.now + 2.0)
        super().begin()
        world.live_until(lambda: not neighbour.busy, world.now + 2.0)
        world.call_owner()
        if self._rng.random() < 0.8:
            world.live_until(lambda: all(map(stored.is_on, stored.tiers)), world.now + 5.0)

    @property
    def _stores(self) -> Stores:
        assert self._runtime.stores is not None
        return self._runtime.stores

    def _store_dies(self) -> None:
        assert self._world.conditions.store is not None
        self._stores.die(power=self._rng.random() < self._world.conditions.store.power)

    def _store_doomed(self) -> None:
        self._stores.doom()

    def _store_stops(self) -> None:
        self._stores.stop()

    def _session_lost(self) -> None:
        self._stores.end_a_session()

    def _neighbour_dies(self) -> None:
        world = self._runtime
        if world.neighbour is not None:
            world.note("another engine is killed")
            world.neighbour.close()
            world.neighbour = Neighbour(world)

    def _store_full(self) -> None:
        self._stores.fill_up()

    def _neighbour(self) -> None:
        world, rng = self._runtime, self._rng
        neighbour = world.neighbour
        assert neighbour is not None
        tier = rng.choice(list(self._stores.tier_names))
        what = rng.random()
        if what < 0.1:
            world.note("another engine voids a store")
            neighbour.void(tier)
            return
        keys = world.library.all_keys(world.library.next_text())
        if what < 0.5:
            neighbour.load(tier, keys)
            return
        world.note("blocks of another engine in a store")
        neighbour.save(tier, keys, None)

    def _rot(self) -> None:
        if self._runtime.stores is None or self._rng.random() < 0.5:
            super()._rot()
        elif self._stores.rot():
            self._world.note("bytes rot in a store")

    def _find(self, keys: list[Key], before: Key | None = None, *, foreign: bool) -> None:
        world = self._runtime
        if world.stores is None or world.neighbour is None:
            super()._find(keys, before, foreign=foreign)
        else:
            # What lies in the memory of ranks was written there by them.
            world.note("blocks of another engine in a store")
            tier = self._rng.choice(list(self._stores.tier_names))
            world.neighbour.save(tier, keys, before)

    def _reset(self) -> None:
        if self._runtime.stores is not None:
            self._runtime.stores.note_reset()
        super()._reset()
        stored = self._runtime.driver.stored
        if stored is not None:
            stored.void()
            stored.dispatch()

    # ---------------------------------------------------------------- ways

    def _cut(self) -> None:
        """The engine takes a process for dead that lives on, for a while."""
        world = self._runtime
        known = [p for p in world.ranks.processes if p.alive and p.number not in world.ranks.lost]
        if known:
            process = self._rng.choice(known)
            world.note("rank taken for dead")
            world.facade.ranks.lose(process.number, "it does not answer")
            world.after(self._a_while() * 0.1, process.kill, "its engine has given it up")

    def _garble(self) -> None:
        """Something that is no report of a rank of ours changes nothing, but is not believed."""
        world = self._runtime
        if world.ways.way is not Way.MESSAGES:
            return
        world.note("nonsense arrives")
        world.watch()
        nonsense = self._draw_nonsense()
        try:
            world.facade.ranks.receive(nonsense)
        except PeerError:
            world.check_unchanged()
        else:
            raise Violation("refusal", f"nonsense was taken for a report: {nonsense!r}")

    def _draw_nonsense(self) -> bytes:
        """Bytes that are no report, or a fault of a block that an operation does not have."""
        world = self._runtime
        operations = list(world.machine.operations.values())
        nonsense = self._rng.choice(
            (b"", b"R", b"R\x01\xff", b"P\x01\x90", self._rng.randbytes(40))
        )
        if not operations or self._beyond.random() < 0.5:
            return nonsense
        operation = self._beyond.choice(operations)
        process = self._beyond.choice(world.ranks.processes)
        beyond = ((len(operation.keys), BlockFault.CORRUPT),)
        moved = [Moved(operation.id, beyond)]
        return encode_report(
            RankReport(process.number, process.facts.life, world.incarnation, 1, moved)
        )
