"""The one door to the cache of an engine: events and the time go in, effects come out.

    effects = machine.handle(event, now)

A wrong event raises before anything has changed. The books are private: the driver asks
the questions here. Nothing waits, reads a clock or does I/O: the same events in
the same order give the same effects.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

from penstock.cache.operations import Purpose
from penstock.cache.settings import HUB
from penstock.cache.states import OperationMove, OperationState
from penstock.errors import InvariantViolation, PenstockError
from penstock.machine import acquire, copies, faults, gate, leases, offload, writes
from penstock.machine import events as ev
from penstock.machine.audit import audit
from penstock.machine.books import Books
from penstock.machine.matching import find
from penstock.machine.statistics import CacheStatistics, HubCounts, count_hub, gather
from penstock.machine.stored import count_sinking
from penstock.vocabulary.checksums import life_salt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

    from penstock.cache.operations import Operation, Outcome
    from penstock.cache.settings import CacheSettings
    from penstock.machine.effects import Effect
    from penstock.machine.hub_log import HubChanges
    from penstock.machine.kv_events import KvEvent, Snapshot
    from penstock.vocabulary.keys import Key, LeaseId, OperationId


class CacheMachine:
    """The owner of all block metadata of one engine."""

    def __init__(self, settings: CacheSettings, *, incarnation: int) -> None:
        self._books = Books(settings, incarnation)
        self._zones = writes.zones_of(self._books)
        self._suspect = ""
        """The event that is being taken in; if it was neither taken in nor refused, the books may
        be wrong."""

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Takes one event in and returns what is to be done about it.

        Raises:
            CapacityError: there is no room for a request; nothing was changed.
            LeaseError: the lease does not allow it; nothing was changed.
            UnavailableError: a rank is lost; nothing was changed.
            ValueError: the event does not make sense; nothing was changed.
            InvariantViolation: Penstock's own books do not add up, or an earlier event was broken
                off half-way, by an interrupt for instance: from then on every event is refused.
        """
        if self._suspect:
            raise InvariantViolation(
                f"{self._suspect} was broken off half-way: the books may be wrong"
            )
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise ValueError(f"event is {reprlib.repr(event)}, must be one of machine.events")
        books = self._books
        books.tick += 1
        books.now = now
        books.effects = []
        self._suspect = type(event).__name__
        try:
            handler(books, event, now)
            self._follow_up(now)
            if self._zones and handler is not faults.rank_back:
                # Which tiers a rank has that came back, it says right after that.
                writes.save_leaving(books, self._zones, now)
        except InvariantViolation as violation:
            if violation.story:
                raise
            story = books.story_of_node(violation.node)
            raise InvariantViolation(violation.problem, story=story) from violation
        except (ValueError, PenstockError):
            self._suspect = ""  # A refusal: nothing was changed.
            raise
        self._suspect = ""
        return books.effects

    def handle_timer(self, now: float) -> list[Effect]:
        """Deals with deadlines that have passed."""
        return self.handle(ev.Tick(), now)

    def next_deadline(self) -> float | None:
        """When `handle_timer` should be called at the latest."""
        if writes.is_overdue(self._books):
            return self._books.now
        times = (
            self._books.ledger.next_deadline(),
            self._books.next_expiry(),
            acquire.next_end(self._books),
        )
        return min((time for time in times if time is not None), default=None)

    @property
    def incarnation(self) -> int:
        """The number of this life of the cache, which the names of its operations begin with."""
        return self._books.ledger.incarnation

    @property
    def operations(self) -> Mapping[OperationId, Operation]:
        """The copies that ranks have not ended yet. Not a copy of it: read it, change nothing."""
        return self._books.ledger.operations

    def running_operations(self) -> list[Operation]:
        """Those whose outcome is open; the others were given up, but are still under way."""
        return list(self._books.ledger.running())

    @property
    def operations_ended(self) -> dict[Outcome, int]:
        """How many copies ended with each outcome."""
        return dict(self._books.ledger.ended)

    def loads_of(self, lease: LeaseId) -> tuple[OperationId, ...]:
        """The loads onto the device that a lease waits for, if it waits for nothing else."""
        found = self._books.leases.get(lease)
        if found is None or lease in self._books.searches:
            return ()
        waiting = found.waiting
        purposes = {self.operations[operation].purpose for operation in waiting}
        return tuple(sorted(waiting)) if purposes <= {Purpose.LOAD} else ()

    def known(self, keys: Sequence[Key]) -> int:
        """How many leading blocks of a chain lie in some tier that can be used."""
        return len(find(self._books, keys, deepest=len(self._books.lower_tiers())).nodes)

    def sinking(self, keys: Sequence[Key]) -> int:
        """How many of these blocks are on their way into a tier that outlives the process."""
        return count_sinking(self._books, keys)

    def open_requests(self) -> list[str]:
        return [lease.request for lease in self._books.leases.values()]

    @property
    def pin_count(self) -> int:
        return len(self._books.pins)

    @property
    def losses(self) -> int:
        """How often blocks below the device became unreadable."""
        return self._books.losses

    @property
    def saves_dropped(self) -> int:
        """Blocks that left the hub before a stored tier came on that should have had them."""
        return sum(backlog.dropped for backlog in self._books.backlogs.values())

    @property
    def lost_ranks(self) -> Set[int]:
        """The ranks that are lost now."""
        return frozenset(self._books.lost_ranks)

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The name of each tier, device first."""
        # Where an engine manages its own device blocks, the first tier is `None`.
        return tuple("device" if tier is None else tier.name for tier in self._books.tiers)

    def tier_sizes(self) -> dict[str, int]:
        """How many slots each tier has, without device slots that the engine manages."""
        return {tier.name: tier.pool.slot_count for tier in self._books.owned_tiers()}

    @property
    def settings(self) -> CacheSettings:
        """The settings in effect."""
        return self._books.settings

    @property
    def manages_device(self) -> bool:
        """Whether the device's blocks are managed here, and not by the engine."""
        return self._books.tiers[0] is not None

    def is_tier_on(self, tier: int) -> bool:
        """Whether a tier, by its index, can be used now."""
        return self._books.tier(tier).on

    def hub_counts(self) -> HubCounts:
        """The first tier below the device in numbers; costs far less than `statistics`."""
        return count_hub(self._books)

    def audit(self) -> None:
        """Checks every invariant of the whole state; raises `InvariantViolation`."""
        audit(self._books)

    def statistics(self) -> CacheStatistics:
        """Counts and sizes, as a frozen value."""
        return gather(self._books)

    def story(self, of: Key | str) -> tuple[str, ...]:
        """What last happened to a block (by key) or a request (by name), oldest first."""
        history = self._books.history
        return history.of_request(of) if isinstance(of, str) else history.of_key(of)

    def take_kv_events(self) -> list[KvEvent]:
        """KV events since the last call; a gap in their numbers calls for a snapshot."""
        return self._books.kv_events.take()

    def kv_snapshot(self) -> Snapshot:
        """All that can be matched now, tier by tier."""
        return self._books.kv_events.snapshot(self._books.nodes, self._books.owned_tiers())

    def follow_hub(self, *, follow: bool) -> None:
        """From now on notes what comes to the hub and leaves it, beginning with all; or does not.

        Who follows takes the changes in every step.
        """
        if follow:
            self._books.hub_log.follow(self._books.nodes, self._books.tier(HUB))
        else:
            self._books.hub_log.leave()

    def take_hub_changes(self, lent_in: int, limit: int) -> tuple[HubChanges, int]:
        """What has changed in the hub, of blocks that may go to the tier `lent_in`.

        And the salt of the sums there.
        """
        books = self._books
        changes = books.hub_log.take(books.nodes, books.tier(HUB), lent_in, limit)
        return changes, life_salt(books.ledger.incarnation, books.ledger.epoch)

    @property
    def has_hub_changes(self) -> bool:
        """Whether `take_hub_changes` has something to give."""
        return self._books.hub_log.has_more

    def _follow_up(self, now: float) -> None:
        """Deals with operations that ended within this event."""
        books = self._books
        while books.agenda:
            operation, bad_slots = books.agenda.pop(0)
            leases.after_operation(books, operation, bad_slots, now)
            writes.after_operation(books, operation, now)
            writes.write_missed_after_operation(books, operation, now)


def _tick(books: Books, _event: ev.Tick, now: float) -> None:
    copies.expire(books, now)
    acquire.expire(books, now)
    books.rates.tick(now)
    books.expire_blocks(now)
    # First what takes slots, then what makes room.
    writes.go_on_everywhere(books, now)
    for tier in books.owned_tiers():
        writes.keep_watermark(books, tier, now)


def _cancel(books: Books, event: ev.Cancel, now: float) -> None:
    operation = books.ledger.operations.get(event.operation)
    if operation is not None and operation.state is OperationState.RUNNING:
        copies.decide(books, operation, OperationMove.CANCEL, now, failure="cancelled")


def _release(books: Books, event: ev.ReleaseLease, now: float) -> None:
    leases.release(books, event.lease, now, returning=False)


def _preempt(books: Books, event: ev.Preempt, now: float) -> None:
    leases.release(books, event.lease, now, returning=True)


_HANDLERS: dict[type[ev.Event], Callable[..., None]] = {
    ev.Acquire: acquire.acquire,
    ev.Searched: acquire.searched,
    ev.Grow: leases.grow,
    ev.Commit: leases.commit,
    ev.Fork: leases.fork,
    ev.ReleaseLease: _release,
    ev.Preempt: _preempt,
    ev.PinBlocks: leases.pin,
    ev.UnpinBlocks: leases.unpin,
    ev.Lookup: offload.lookup,
    ev.Load: offload.load,
    ev.Save: offload.save,
    ev.LetGo: offload.let_go,
    ev.Prefetch: offload.prefetch,
    ev.Cancel: _cancel,
    ev.CopyReport: copies.report,
    ev.Computed: gate.computed,
    ev.RankLost: faults.rank_lost,
    ev.RankBack: faults.rank_back,
    ev.TierOff: faults.tier_off,
    ev.TierOn: faults.tier_on,
    ev.TierVoided: faults.tier_voided,
    ev.Discovered: faults.discovered,
    ev.Vanished: faults.vanished,
    ev.Tick: _tick,
    ev.EmptyDevice: faults.empty_device,
    ev.Reset: faults.reset,
    ev.ChangeWeights: faults.change_weights,
}
