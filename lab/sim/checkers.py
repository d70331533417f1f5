"""What must hold in every world, beyond the cache's own audit.

| checker        | promise                                                                    |
|----------------|----------------------------------------------------------------------------|
| `bytes`        | what a request is told to be cached has the right content on every rank      |
| `reuse`        | a slot is written to only when no rank can still touch it for somebody else  |
| `operations`   | every copy ends once, and is called quiet only when it is                    |
| `kv events`    | replayed, they give the snapshot                                             |
| `leaf first`   | a block does not leave a tier before those that follow it                    |
| `pins`         | a pinned block does not leave                                                |
| `refusal`      | what is refused changes nothing                                              |
| `liveness`     | whoever waits is told by the deadline                                        |
| `usefulness`   | a healthy world hits exactly what a simple model knows                       |
| `store`        | what a store was told to keep is there after its process was killed           |
| `drain`        | in the end everything has come back                                          |

They believe what the cache says to the outside and the bytes of the ranks, and look into its
books only to compare them with these. So they find what an audit of the books cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lab.explore.world import Violation
from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Purpose
from penstock.cache.settings import HUB
from penstock.cache.states import LeaseState, SlotState
from penstock.machine import events as ev
from penstock.machine.effects import Copy, DropBlocks, Ended
from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.sim.ranks import Job
    from lab.sim.world import World
    from penstock.cache.tier import Tier
    from penstock.machine.effects import Effect
    from penstock.machine.kv_events import Snapshot
    from penstock.vocabulary.keys import Key

_SNAPSHOT_EVERY = 16
"""A snapshot walks over all blocks, so it is compared only now and then."""

_LOSING_EVENTS = frozenset(
    {
        *(ev.Reset, ev.ChangeWeights, ev.EmptyDevice, ev.RankLost, ev.TierOn, ev.TierOff),
        *(ev.Vanished, ev.TierVoided),
    }
)
"""Blocks that go with these were lost or found corrupt, and did not leave in their turn."""


class Claims:
    """Which copies may still read or write a slot, as far as anybody outside can know."""

    def __init__(self) -> None:
        self._writers: dict[tuple[int, int], Job] = {}
        self._readers: dict[tuple[int, int], list[Job]] = {}

    def enter(self, job: Job, *, managed: bool) -> None:
        """A copy begins: nobody may be writing where it reads, or touching where it writes."""
        for slot in job.sources[0] if managed or job.source else ():
            writer = self._writers.get((job.source, slot))
            if writer is not None and writer.left:
                raise Violation("reuse", f"{job} reads a slot that {writer} may still write")
            self._readers.setdefault((job.source, slot), []).append(job)
        for slot in job.targets[0] if managed or job.target else ():
            self.check_quiet(job.target, slot, str(job))
            self._writers[job.target, slot] = job

    def check_drop(self, tier: int, slots: Sequence[int], keys: Sequence[Key]) -> None:
        """A tier forgets blocks: whoever writes tombstones must not hit what came after them."""
        for slot, key in zip(slots, keys, strict=True):
            writer = self._writers.get((tier, slot))
            if writer is not None and writer.left and key not in writer.keys:
                raise Violation(
                    "reuse", f"slot {slot} of tier {tier} is dropped, but {writer} writes it"
                )

    def check_quiet(
        self, tier: int, slot: int, by: str, *, computing: bool = False, waits: bool = False
    ) -> None:
        """Somebody is about to write to a slot: no copy may still touch it.

        A request may compute more tokens of its unfinished block while a fork copies it: the
        fork reads those that were there before. One that `waits` writes when saves have ended.
        """
        place = (tier, slot)
        writer = self._writers.get(place)
        if writer is not None and writer.left:
            raise Violation(
                "reuse", f"slot {slot} of tier {tier} goes to {by}, but {writer} may still write it"
            )
        readers = self._readers.get(place)
        for reader in readers or ():
            if waits and reader.purpose is Purpose.SAVE:
                continue
            if reader.left and not (computing and reader.purpose is Purpose.DUPLICATE):
                raise Violation(
                    "reuse",
                    f"slot {slot} of tier {tier} goes to {by}, but {reader} may still read it",
                )
        if readers and not computing and not waits:
            del self._readers[place]


class KvReader:
    """A reader of KV events who believes nothing: replays, compares, looks at the bytes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tiers: dict[str, Tier] = {t.name: t for t in world.books.owned_tiers()}
        self._blocks: dict[str, dict[Key, Key | None]] = {name: {} for name in self._tiers}
        self._sequence = 0
        self._epoch = 0
        self._handled = 0
        self.stored_now: set[tuple[str, Key]] = set()
        """Tiers and blocks that the last event made matchable there."""
        self.removed_now: set[str] = set()
        """Tiers that blocks left with the last event."""
        self._targets: set[int] = set()
        """Tiers that it began copies to: blocks may leave for these."""

    def follow(self, event: ev.Event, effects: Sequence[Effect]) -> None:
        """Reads what one event of the cache brought."""
        self._handled += 1
        self._targets = {effect.target for effect in effects if isinstance(effect, Copy)}
        self.stored_now.clear()
        self.removed_now.clear()
        events = self._world.machine.take_kv_events()
        if events:
            if events[0].sequence != self._sequence + 1:
                self._world.note("gap in KV events")
                self._start_over(self._world.machine.kv_snapshot())
                self.removed_now.update(self._tiers)  # Any of them may have lost some.
                return
            self._sequence = events[-1].sequence
            for change in events:
                if isinstance(change, BlocksStored):
                    self._stored(change)
                elif isinstance(change, BlocksRemoved):
                    self._removed(change, event)
                elif isinstance(change, AllCleared):
                    self._cleared(change, event)
        if self._epoch != self._world.era:
            raise Violation("kv events", f"a reset to epoch {self._world.era} was not told")
        if self._handled % _SNAPSHOT_EVERY == 0:
            self.compare()

    def compare(self) -> None:
        """What was replayed must be what the cache says it has."""
        snapshot = self._world.machine.kv_snapshot()
        if snapshot.sequence != self._sequence:
            raise Violation(
                "kv events", f"snapshot {snapshot.sequence} after event {self._sequence}"
            )
        for name, rows in snapshot.blocks.items():
            if dict(rows) != self._blocks[name] or len(rows) != len(self._blocks[name]):
                raise Violation("kv events", f"tier {name}: replay and snapshot differ")

    def _start_over(self, snapshot: Snapshot) -> None:
        self._sequence = snapshot.sequence
        self._epoch = snapshot.epoch
        self._blocks = {name: dict(rows) for name, rows in snapshot.blocks.items()}

    def _cleared(self, change: AllCleared, event: ev.Event) -> None:
        self._epoch = change.epoch
        if isinstance(event, ev.ChangeWeights):
            # What stays in lower tiers cannot be asked for until its weights are back.
            self._blocks = {name: {} for name in self._tiers}
        if any(self._blocks.values()):
            raise Violation("kv events", "blocks outlived a reset")

    def _stored(self, change: BlocksStored) -> None:
        blocks = self._blocks[change.tier]
        tier = self._tiers[change.tier]
        parent = change.parent
        self.stored_now.update((change.tier, key) for key in change.keys)
        for key in change.keys:
            if key in blocks:
                raise Violation("kv events", f"a block was stored in {change.tier} twice")
            library = self._world.library
            if library.weights_of[key] != library.weights:
                raise Violation("kv events", f"{change.tier} has a block of other weights")
            blocks[key] = parent
            parent = key
            node = self._world.books.nodes.ids.get(key)
            slot = NOWHERE if node is None else int(tier.slot_of[node])
            if slot != NOWHERE:
                self._world.ranks.check_block(tier.index, slot, key)

    def _removed(self, change: BlocksRemoved, event: ev.Event) -> None:
        self.removed_now.add(change.tier)
        blocks = self._blocks[change.tier]
        for key in change.keys:
            if key not in blocks:
                raise Violation("kv events", f"{change.tier} lost a block it did not have")
            del blocks[key]
        makes_room = self._tiers[change.tier].index in self._targets
        if isinstance(event, ev.TierOn) and event.kept and not makes_room:
            raise Violation("usefulness", f"{change.tier} came back whole, but lost blocks")
        if type(event) in _LOSING_EVENTS:
            return
        world = self._world
        for key in change.keys:
            if key in world.ranks.corrupt_now:
                continue
            if key in world.ranks.undemoted_now:
                raise Violation(
                    "usefulness", f"a block left tier {change.tier} that was not written down"
                )
            if key in world.engine.pinned:
                raise Violation("pins", f"a pinned block left tier {change.tier}")
            self._check_leaf(self._tiers[change.tier], key)

    def _check_leaf(self, tier: Tier, key: Key) -> None:
        nodes = self._world.books.nodes
        node = nodes.ids.get(key)
        if node is None or tier.slot_of[node] != NOWHERE:
            return
        if tier.above is not None and tier.above.slot_of[node] != NOWHERE:
            return  # Its followers here find it there.
        followers = np.flatnonzero((nodes.parent == node) & (tier.slot_of != NOWHERE))
        states = tier.pool.state[tier.slot_of[followers]]
        if (states != SlotState.LEAVING).any():
            raise Violation("leaf first", f"a block left {tier.name} before its followers")


class Model:
    """What a healthy world with ample room knows: every block that was ever published."""

    def __init__(self) -> None:
        self.known: set[Key] = set()
        self.arriving: set[Key] = set()
        """Being saved by an engine that offloads: found, but not ready."""

    def save(self, keys: Sequence[Key]) -> None:
        """Blocks are being saved."""
        self.arriving.update(keys)

    def saved(self, keys: Sequence[Key]) -> None:
        """Blocks were saved."""
        self.arriving.difference_update(keys)
        self.known.update(keys)

    def discover(self, keys: Sequence[Key]) -> None:
        """Blocks were found; those being saved at the time are ready only when they are."""
        self.known.update(key for key in keys if key not in self.arriving)

    def known_prefix(self, keys: list[Key]) -> int:
        """How many leading blocks are known."""
        return self._prefix(keys, self.known)

    def coming_prefix(self, keys: list[Key]) -> int:
        """How many leading blocks are known or being saved."""
        return self._prefix(keys, self.known | self.arriving)

    @staticmethod
    def _prefix(keys: list[Key], known: set[Key]) -> int:
        return next((i for i, key in enumerate(keys) if key not in known), len(keys))


def check_drained(world: World) -> None:
    """Nobody holds or does anything any more: every slot is free, or ready and unheld."""
    books = world.books
    if world.ranks.open:
        raise Violation("drain", f"copies are still open: {list(world.ranks.open)}")
    if books.ledger.operations:
        raise Violation("drain", f"operations stay: {list(books.ledger.operations)}")
    if books.leases or books.pins or books.pinned or books.frontiers:
        raise Violation("drain", "leases, pins or aims stay")
    for tier in books.owned_tiers():
        pool = tier.pool
        if pool.holders.any():
            raise Violation("drain", f"tier {tier.name}: slots are held by nobody")
        quiet = (pool.state == SlotState.FREE) | (pool.state == SlotState.READY)
        if not quiet.all():
            slot = int(np.flatnonzero(~quiet)[0])
            state = SlotState(int(pool.state[slot])).name
            raise Violation("drain", f"tier {tier.name}: slot {slot} stays {state}")
        for slot in np.flatnonzero(pool.state == SlotState.READY).tolist():
            world.ranks.check_block(tier.index, slot, books.nodes.key_of(int(pool.node[slot])))
    for index, backlog in books.backlogs.items():
        if backlog.due and books.tier(index).on and books.tier(HUB).on and books.healthy:
            name = books.tier(index).name
            raise Violation("liveness", f"tier {name} is on, and is not given what it missed")
    _check_accounts(world)


def _check_accounts(world: World) -> None:
    """The cache's own counts agree with what was seen from outside."""
    statistics = world.machine.statistics()
    if sum(statistics.operations_ended.values()) != statistics.operations_started:
        raise Violation("drain", f"operations do not add up: {statistics.operations_ended}")
    if statistics.operations_started != world.ranks.started:
        raise Violation("drain", "more operations were counted than copies asked for")
    if statistics.reports_late != world.ranks.late_reports:
        raise Violation("drain", f"{statistics.reports_late} late reports were counted")
    if world.conditions.managed and sum(statistics.misses.values()) != statistics.requests:
        raise Violation("drain", f"misses do not add up: {statistics.misses}")
    for tier in statistics.tiers:
        if tier.free + tier.filling + tier.ready + tier.leaving + tier.doomed != tier.slots:
            raise Violation("drain", f"slots of tier {tier.name} do not add up")
    world.machine.story(world.engine.last_request)
    for key in world.engine.last_keys[:1]:
        world.machine.story(key)
    world.kv.compare()


def check_watermarks(world: World, effects: Sequence[Effect]) -> None:
    """After a tick, blocks have left every tier that runs low, as far as they may."""
    if any(isinstance(effect, Ended) for effect in effects):
        return  # Requests may have taken slots since, for what did not arrive.
    # Blocks of other weights leave without a KV event; and what is saved ahead takes slots last.
    copied = [effect for effect in effects if isinstance(effect, Copy)]
    left = {effect.source for effect in copied} | {effect.target for effect in copied}
    left |= {effect.tier for effect in effects if isinstance(effect, DropBlocks)}
    for tier in world.books.owned_tiers():
        soon_free = tier.pool.free_count + tier.pool.count(SlotState.LEAVING)
        if not tier.on or soon_free >= tier.settings.low_slots or tier.index in left:
            continue
        if tier.name not in world.kv.removed_now and tier.policy.candidates():
            raise Violation("usefulness", f"tier {tier.name} is full, and nothing leaves it")


def check_waiting(world: World) -> None:
    """After a tick, nobody waits beyond the deadline."""
    for request in world.engine.waiting():
        if request.state is LeaseState.LOADING and request.bound <= world.now:
            raise Violation(
                "liveness", f"{request.name} waits since its deadline {request.bound:.3f}"
            )
    deadline = world.machine.next_deadline()
    if deadline is not None and deadline <= world.now:
        raise Violation("liveness", f"the deadline {deadline:.3f} outlives its tick")
