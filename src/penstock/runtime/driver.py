"""The driver of one engine's cache: it feeds events to the machine and carries effects out.

`handle` gives the machine an event with the time and has the ranks carry out what it asks for;
`step` takes in what they have done. Both return at once; `wait` alone waits.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from penstock.cache.operations import Outcome, Purpose
from penstock.cache.settings import HUB
from penstock.errors import PeerError, UnavailableError
from penstock.machine import effects as ef
from penstock.machine.events import (
    Acquire,
    Cancel,
    ChangeWeights,
    CopyReport,
    Event,
    Prefetch,
    RankBack,
    RankLost,
    Reset,
    Tick,
    TierOff,
    TierOn,
)
from penstock.machine.machine import CacheMachine
from penstock.runtime.access import Access
from penstock.runtime.rank import STEP_BUDGET_BYTES
from penstock.runtime.rank_links import LostRank, MissingReports
from penstock.runtime.status import CopyLog, Drained, HealthLog
from penstock.transport.waiting import wait_any
from penstock.vocabulary.arguments import as_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.cache.operations import Operation
    from penstock.cache.settings import CacheSettings
    from penstock.config import Config
    from penstock.machine.statistics import CacheStatistics, StoreStatistics
    from penstock.runtime.rank_links import RankLinks
    from penstock.runtime.status import Health
    from penstock.runtime.stored_tiers import StoredTiers, StoreStatus
    from penstock.vocabulary.keys import OperationId

logger = logging.getLogger(__name__)

_WRITES = frozenset({Purpose.SAVE, Purpose.DEMOTE})
"""What is worth waiting for at the end: it keeps blocks that would be lost."""
FENCE_S = 1.0
"""How long a close waits for ranks elsewhere to say that they have stopped: a few steps of theirs.
One that has not answered by then fences its own slots before it gives them back."""


QUIET_S = 1.0
"""So often a cache that has nothing to do looks at everything all the same: rates age, and eviction
policies are told the time."""
STORE_CLOSE_S = 15.0
"""How long a store process that this cache has started may take to end."""


def draw_incarnation() -> int:
    """A name for one life of an owner, or of a rank: no two have the same."""
    return secrets.randbits(64)


class Driver:
    """One machine and the ranks that carry out its copies, driven from one thread."""

    def __init__(
        self,
        settings: CacheSettings,
        links: RankLinks,
        *,
        incarnation: int | None = None,
        stored: StoredTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if incarnation is None:
            incarnation = draw_incarnation()
        self.machine = CacheMachine(settings, incarnation=incarnation)
        self.access = Access("the cache")
        """Who may call it now; asked where its engine's calls come in, not here."""
        self.links = links
        self.stored = stored
        """The tiers that the store process serves, if there are any."""
        acknowledgements = links.acknowledgements
        self.missing_reports = (
            None if acknowledgements is None else MissingReports(acknowledgements.received)
        )
        """What ranks are asked when a report of theirs did not come; `None` if none can be lost."""
        self.unusable: dict[int, str] = {}
        """Tiers that somebody cannot use, and why; those that sleep are not among them."""
        self._sleeping: dict[int, str] = {}
        """Tiers whose memory was given back, and why: they are off until the cache wakes."""
        self.ready_s: dict[str, float] = {}
        """How long it took until each tier below the device could be used, by its name."""
        self.copies = CopyLog(self.machine.tier_names)
        self._clock = clock
        # A clock that is not that of the machine may not go yet.
        self._opened_at = clock() if clock is time.monotonic else None
        self._health = HealthLog()
        self._events = 0
        """How many events the machine was given."""
        self._events_at_step = -1
        """How many they were at the end of the last step."""
        self._quiet_until = -math.inf
        """Until then a step has nothing to do, unless the store says something."""
        self._closed: Drained | None = None

    @property
    def busy(self) -> bool:
        return bool(self.machine.operations)

    @property
    def health(self) -> Health:
        """What is lost or off now, and why; a cache that is closed or broken is not well."""
        health = self._health.health
        ended = "the cache is closed" if self.access.closed else self.access.broken
        return health.and_also(ended) if ended else health

    def statistics(self) -> CacheStatistics:
        """Counts and sizes; what the machine cannot know is added."""
        found = self.machine.statistics()
        names = self.machine.tier_names
        stored = {names[tier]: each for tier, each in self._stored_statistics().items()}
        return msgspec.structs.replace(
            found,
            reports_lost=0 if self.missing_reports is None else self.missing_reports.reports_lost,
            tiers=tuple(
                msgspec.structs.replace(
                    tier,
                    why_off=self._health.why(f"tier {tier.name}"),
                    ready_s=self.ready_s.get(tier.name),
                    store=stored.get(tier.name),
                )
                for tier in found.tiers
            ),
        )

    def _stored_statistics(self) -> Mapping[int, StoreStatistics]:
        return {} if self.stored is None else self.stored.statistics()

    def deadline(self, timeout_s: float | None) -> float | None:
        """The time `timeout_s` from now, on the machine's clock."""
        return None if timeout_s is None else self._clock() + timeout_s

    def as_time(self, name: str, value: object) -> float:
        """A time on the machine's clock that a caller has given.

        Raises `ValueError`: it is none, or is from long before the cache was opened.
        """
        now = self._clock()
        if self._opened_at is None:
            self._opened_at = now
        return as_time(name, value, opened_at=self._opened_at, now=now)

    def handle(self, event: Event) -> list[ef.Effect]:
        """Gives the machine an event; returns the effects that are for the engine."""
        if self._closed is not None:
            raise UnavailableError("the cache is closed")
        effects: list[ef.Effect] = []
        now = self._clock()
        self._events += 1
        self._quiet_until = -math.inf
        for effect in self.machine.handle(event, now):
            match effect:
                case ef.Copy():
                    self.copies.begin(effect, now)
                    self._order(effect)
                case ef.Abandon():
                    self._order(effect)
                case ef.DropBlocks():
                    pass  # Tiers in memory keep no headers that would have to be struck out.
                case _:
                    effects.append(effect)
        if self.copies.has_running:
            self.copies.end_all_but(self.machine.operations, now)
        return effects

    def _order(self, effect: ef.Copy | ef.Abandon) -> None:
        if self.stored is not None and self.stored.serves(effect):
            self.stored.order(effect)
        else:
            self.links.order(effect)

    def step(
        self, *, budget_bytes: int = STEP_BUDGET_BYTES, again: bool = False
    ) -> list[ef.Effect]:
        """Lets local copies advance by at most `budget_bytes`, and takes what ranks report.

        Each call counts as a step of the engine, but for a second one in the same step (`again`).
        Returns the effects for the engine.
        """
        untouched = self._events == self._events_at_step
        effects = [] if again else self.handle(Tick())
        self._ask()
        effects += self._exchange(budget_bytes)
        if untouched and self._events <= self._events_at_step + 1:
            self._quiet_until = self._next_work()
        self._events_at_step = self._events
        return effects

    @property
    def is_quiet(self) -> bool:
        """Whether a step has nothing to do: most of an engine's steps copy nothing."""
        if self._clock() >= self._quiet_until:
            return False
        return self.stored is None or not self.stored.has_news()

    def _next_work(self) -> float:
        """Until when a step that follows one without any event has nothing to do."""
        stored = self.stored
        # Ranks elsewhere are heard by looking.
        if self.machine.operations or self.missing_reports is not None:
            return -math.inf
        if stored is not None and stored.unconfirmed_resets:
            return -math.inf
        return min(self.next_due(), self._clock() + QUIET_S)

    def reset(self, why: str) -> list[ef.Effect]:
        """Voids everything cached, here and in the store."""
        effects = self.handle(Reset(why=why))
        if self.stored is not None:
            self.stored.void()
            self.stored.dispatch()
            self._check_resets(self.stored)
        return effects

    def change_weights(self, config: Config, *, before: str) -> list[ef.Effect]:
        """From now on blocks of other weights are meant, here and in the store."""
        # What eviction policies have learned is kept: it is of the traffic, which goes on.
        effects = self.handle(ChangeWeights(before=before, after=config.model.weights_version))
        if self.stored is not None:
            self.stored.enter_space_of(config)
            self.stored.dispatch()
        return effects

    def prefetch(self, event: Prefetch) -> list[ef.Effect]:
        """Brings blocks up to the hub; what nobody here knows of, the store is asked for."""
        effects = self.handle(event)
        if self.stored is not None:
            self.stored.prefetch(event, self.machine.known(event.keys))
            self.stored.dispatch()
        return effects

    def search_end(self, search_s: float | None, block_count: int) -> float | None:
        """Until when a prompt of so many blocks is looked for in the store; `None`: it is not."""
        if self.stored is None:
            return None
        wait_s = self.stored.search_s(search_s, block_count)
        return self._clock() + wait_s if wait_s else None

    def acquire(self, event: Acquire) -> list[ef.Effect]:
        """Grants a lease; what nobody here knows of, the store is asked for, if it is wanted."""
        effects = self.handle(event)
        if self.stored is not None and event.search_until is not None:
            granted = ef.answer(effects, ef.Granted)
            if granted.searching:
                self.stored.search(event, granted.lease, self.machine.known(event.keys))
                self.stored.dispatch()
        return effects

    def store_status(self, cause: str) -> StoreStatus | None:
        """The store process as it is now, if there is one."""
        if self.stored is None:
            return None
        status = self.stored.status(cause, self._clock())
        missed = self.machine.saves_dropped
        return status._replace(saves_dropped=status.saves_dropped + missed)

    @property
    def awaits_tiers(self) -> bool:
        """Whether a stored tier may come on in a later step, or list more of what it has."""
        return self.stored is not None and not self.stored.is_complete

    @property
    def has_all_tiers(self) -> bool:
        """Whether every tier below the device can be used."""
        return all(map(self.machine.is_tier_on, range(HUB, len(self.machine.tier_names))))

    def take_reports(self, reports: Sequence[CopyReport | LostRank]) -> list[ef.Effect]:
        """Takes what a rank has reported.

        Raises `PeerError`: it names blocks that an operation does not have; nothing was changed.
        """
        for each in reports:
            if isinstance(each, CopyReport):
                self._require_sense(each)
        effects: list[ef.Effect] = []
        for each in reports:
            if isinstance(each, LostRank):
                effects += self.lose_rank(each.rank, each.why)
            else:
                effects += self.handle(each)
        return effects

    def wait(self, deadline: float, *, descriptors: Sequence[int] = ()) -> bool:
        """Waits until there is something to do, or until `deadline`: then False.

        Raises `UnavailableError`: the device does not end its copies; `health` says so from now on.
        """
        if self.stored is not None:
            self.stored.dispatch()  # What was ordered since the last step is waited for, too.
        due = self.next_due()
        if self.stored is not None:
            descriptors = (*descriptors, *self.stored.descriptors)
        found = self._wait_for_ranks(min(deadline, due), descriptors)
        return found or self._clock() >= due

    def _wait_for_ranks(self, deadline: float, descriptors: Sequence[int]) -> bool:
        try:
            return self.links.wait(deadline, descriptors=descriptors)
        except UnavailableError as error:
            self._note_stuck(error)
            raise

    def _note_stuck(self, error: UnavailableError) -> None:
        self._health.fail("the device", "is stuck", str(error))

    def lose_rank(self, rank: int, why: str) -> list[ef.Effect]:
        """A rank is dead: what it had to do has failed, and device blocks are gone."""
        effects = self.handle(RankLost(rank=rank))
        self._health.fail(f"rank {rank}", "is lost", why)
        return effects

    def regain_rank(self, rank: int) -> list[ef.Effect]:
        """A rank is there again, with empty device memory."""
        effects = self.handle(RankBack(rank=rank))
        self._health.mend(f"rank {rank}", "is back")
        return effects

    def switch_tier_off(self, tier: int, why: str) -> list[ef.Effect]:
        """A tier cannot be used; what ranks still copy there keeps its slots until they report."""
        self.unusable[tier] = why
        return self._switch_off(tier, why)

    def switch_tier_on(self, tier: int, *, kept: bool) -> list[ef.Effect]:
        """A tier can be used again, with its bytes or without; one that sleeps, when it wakes."""
        return self._switch_on(TierOn(tier=tier, kept=kept))

    def _switch_on(self, event: TierOn) -> list[ef.Effect]:
        self.unusable.pop(event.tier, None)
        if event.tier in self._sleeping:
            return self._switch_off(event.tier, self._sleeping[event.tier])
        effects = self.handle(event)
        self._health.mend(f"tier {self._name(event.tier)}", "is on")
        return effects

    def let_tier_sleep(self, tier: int, why: str) -> list[ef.Effect]:
        """The memory of a tier is about to be given back: it is off until `wake_tier`."""
        self._sleeping[tier] = why
        return self._switch_off(tier, why)

    def wake_tier(self, tier: int) -> list[ef.Effect]:
        """A tier that slept can be used again, and is empty; one that is unusable stays off."""
        self._sleeping.pop(tier, None)
        why = self.unusable.get(tier)
        if why is None:
            return self.switch_tier_on(tier, kept=False)
        # It is empty when it comes on: whoever lacked its memory has none of its blocks.
        return self._switch_off(tier, why)

    def _switch_off(self, tier: int, why: str) -> list[ef.Effect]:
        effects = self.handle(TierOff(tier=tier, fenced=False, why=why))
        starts = self.stored is not None and tier in self.stored.starting
        note = self._health.start if starts else self._health.fail
        note(f"tier {self._name(tier)}", "is off", why)
        return effects

    def drain(self) -> list[ef.Effect]:
        """Cancels all copies but those that write blocks down."""
        if self.stored is not None:
            self.stored.forget_prefetches()
        return self._cancel(lambda purpose: purpose not in _WRITES)

    def close(self, timeout_s: float, *, deliver: Callable[[list[ef.Effect]], None]) -> Drained:
        """Drains, fences, releases; `deliver` gets the effects for the engine on the way.

        A second call changes nothing and returns the same. Where the books cannot be relied on
        the copies are cut short, and memory is given back all the same.
        """
        if self._closed is not None:
            return self._closed
        if self.access.broken or self.access.closed:
            # A call was interrupted, perhaps this one.
            copies = len(self.machine.operations)
            drained = Drained(finished=0, cancelled=copies, unsettled=0)
        else:
            deadline = self._clock() + timeout_s
            with self.access:
                drained = self._drain(timeout_s, deliver)
                self._await_resets(max(deadline, self._clock() + FENCE_S), deliver)
                # Copies may have settled meanwhile.
                left = len(self.machine.operations)
                drained = msgspec.structs.replace(drained, unsettled=left)
        self.access.close()
        if self.stored is not None:
            self.stored.close(self._clock() + max(timeout_s, STORE_CLOSE_S))
        try:
            self.links.release()
        except UnavailableError as error:
            # Its memory stays: the device may still write to it.
            self._note_stuck(error)
        self._closed = drained
        return drained

    def _drain(self, timeout_s: float, deliver: Callable[[list[ef.Effect]], None]) -> Drained:
        """Lets copies end until the deadline, cuts the rest short, and says how many."""
        before = self.machine.operations_ended
        deadline = self._clock() + timeout_s
        deliver(self.drain())
        self._run_until(deadline, deliver)
        cut_short = sum(
            operation.purpose in _WRITES for operation in self.machine.running_operations()
        )
        deliver(self._cancel(lambda _: True))
        # What was cancelled settles when its ranks say so: a message each way.
        self._fence(max(deadline, self._clock() + FENCE_S), deliver)
        after = self.machine.operations_ended
        ended = {outcome: after[outcome] - before[outcome] for outcome in Outcome}
        failed = ended[Outcome.FAILED] + ended[Outcome.EXPIRED]
        return Drained(
            finished=ended[Outcome.DONE],
            cancelled=cut_short + failed,
            unsettled=len(self.machine.operations),
        )

    def _await_resets(self, deadline: float, deliver: Callable[[list[ef.Effect]], None]) -> None:
        """Gives the store until the deadline to keep a reset, which would be lost otherwise."""
        stored = self.stored
        if stored is None:
            return
        while stored.unconfirmed_resets and self._clock() < deadline:
            deliver(self._exchange_with_store(stored))
            if stored.unconfirmed_resets:
                wait_any((), stored.descriptors, deadline=min(deadline, stored.next_due))
        for tier in stored.unconfirmed_resets:
            logger.warning("reset is lost: tier=%s cause=its store is away", self._name(tier))

    def next_due(self) -> float:
        """When time alone gives us something to do."""
        due = self.machine.next_deadline()
        asks_at = math.inf
        if self.missing_reports is not None:
            asks_at = self.missing_reports.next_due(self._of_ranks())
        if self.stored is not None:
            asks_at = min(asks_at, self.stored.next_due)
        return asks_at if due is None else min(due, asks_at)

    def _of_ranks(self) -> Mapping[OperationId, Operation]:
        """The operations that ranks report on."""
        operations = self.machine.operations
        if self.stored is None:
            return operations
        ours = self.stored.tiers
        return {
            name: each
            for name, each in operations.items()
            if each.source not in ours and each.target not in ours
        }

    def _ask(self) -> None:
        """Asks ranks about what they should have reported on by now."""
        if self.missing_reports is not None:
            for operation in self.missing_reports.due(self._of_ranks(), self._clock()):
                self.links.ask(operation)

    def _exchange(self, budget_bytes: int) -> list[ef.Effect]:
        """Takes what ranks and the store report."""
        effects: list[ef.Effect] = []
        for report in self.links.collect(budget_bytes=budget_bytes):
            self._health.mend("the device", "answers again")
            effects += self.handle(report)
        if self.stored is not None:
            effects += self._exchange_with_store(self.stored)
        return effects

    def _exchange_with_store(self, stored: StoredTiers) -> list[ef.Effect]:
        effects: list[ef.Effect] = []
        for event in stored.collect():
            match event:
                case CopyReport():
                    effects += self.handle(event)
                case TierOff(tier=tier, why=why) if not stored.is_on(tier):
                    effects += self.switch_tier_off(tier, why)
                case TierOn():
                    effects += self._switch_on(event)
                case _:
                    # The answer to a prefetch of its own is for nobody.
                    answers = (ef.Started, ef.Found)
                    effects += [
                        each for each in self.handle(event) if not isinstance(each, answers)
                    ]
        stored.forget_all_but(self.machine.operations)
        stored.lend(self.machine)
        stored.dispatch()
        self._check_resets(stored)
        return effects

    def _check_resets(self, stored: StoredTiers) -> None:
        """Says which resets may be lost, because a store is away or a replica of it is behind."""
        unconfirmed = stored.unconfirmed_resets
        for tier in stored.tiers:
            thing = f"reset of tier {self._name(tier)}"
            if tier not in unconfirmed:
                self._health.mend(thing, "is kept")
            elif why := stored.unkept_resets.get(tier):
                self._health.fail(thing, "is not kept yet", why)
            elif not stored.is_on(tier):
                why = "its blocks are found again if this process ends now"
                self._health.fail(thing, "is not kept yet", why)

    def _require_sense(self, report: CopyReport) -> None:
        operation = self.machine.operations.get(report.operation)
        if operation is None:
            return
        for position, _ in report.faults:
            if position >= len(operation.keys):
                raise PeerError(
                    f"rank {report.rank} reports a fault at position {position} of operation "
                    f"{operation.id}, which has {len(operation.keys)} blocks"
                )

    def _cancel(self, wanted: Callable[[Purpose], bool]) -> list[ef.Effect]:
        effects: list[ef.Effect] = []
        for operation in self.machine.running_operations():
            if wanted(operation.purpose):
                effects += self.handle(Cancel(operation=operation.id))
        return effects

    def _run_until(self, deadline: float, deliver: Callable[[list[ef.Effect]], None]) -> None:
        """Steps for as long as copies are under way and end by our steps alone."""
        with suppress(UnavailableError):  # The device is stuck: `health` says so.
            while self._self_driven and self.busy and self._clock() < deadline:
                deliver(self.step())
                if self.busy:
                    self.wait(deadline)

    def _fence(self, deadline: float, deliver: Callable[[list[ef.Effect]], None]) -> None:
        """Takes reports until no rank has anything in hand.

        The time does not go on for the machine: with a tick it would have more blocks written
        down to keep free slots, and no rank would be left to report how that ended.
        """
        with suppress(UnavailableError):  # The device is stuck: `health` says so.
            while self._self_driven and self.busy and self._clock() < deadline:
                deliver(self._exchange(STEP_BUDGET_BYTES))
                if self.busy:
                    store = () if self.stored is None else self.stored.descriptors
                    self._wait_for_ranks(deadline, store)

    @property
    def _self_driven(self) -> bool:
        """Whether what is under way ends by our calls, without the engine's messages."""
        return self.links.acknowledgements is None or not self._of_ranks()

    def _name(self, tier: int) -> str:
        return self.machine.tier_names[tier]
