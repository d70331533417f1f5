"""What `Cache` and `Offload` have in common: steps, waiting, health, statistics, ranks, the end.

Questions change nothing. No call waits but `wait` and `close`.

`cache.ranks` are the ranks that are other processes:

    cache = penstock.open(config, ranks=facts)
    plan = cache.ranks.take_plan()               # once a step, for every rank
    cache.ranks.receive(report)                  # each report of a rank
    cache.ranks.lose(1, "its process exited")
    cache.ranks.rejoin(facts)                    # the rank was opened anew

A rank that is back has nothing of what its earlier life had. Its device memory is empty; a tier
keeps its blocks only if it lies in the same memory as before.
"""

from __future__ import annotations

import reprlib
import time
import warnings
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError, PeerError
from penstock.machine.events import Computed
from penstock.runtime.memory import CacheMemory
from penstock.runtime.messages import RankFacts, require_fit, slowest_ready_s
from penstock.runtime.rank import STEP_BUDGET_BYTES
from penstock.runtime.rank_links import LocalLink
from penstock.vocabulary.arguments import (
    as_bytes,
    as_descriptors,
    as_flag,
    as_int,
    as_key,
    as_seconds,
    as_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from penstock.config import Config
    from penstock.machine.effects import Effect
    from penstock.machine.kv_events import KvEvent, Snapshot
    from penstock.machine.statistics import CacheStatistics
    from penstock.runtime.copy_executor import EngineSteps
    from penstock.runtime.driver import Driver
    from penstock.runtime.messages import Agreement
    from penstock.runtime.status import CopyTimes, Drained, Health
    from penstock.runtime.stored_tiers import StoreStatus
    from penstock.vocabulary.keys import Key

NAMED_MAX = 8
"""How many requests a warning names."""


class Driven(NamedTuple):
    """What a cache is opened on."""

    config: Config
    agreement: Agreement
    driver: Driver
    ranks: Sequence[RankFacts] = ()
    """The ranks in other processes."""


class BaseCache:
    """A cache of either kind, over ranks in this process or in others."""

    def __init__(self, driven: Driven, deliver: Callable[[list[Effect]], None]) -> None:
        self._driver = driven.driver
        self._access = driven.driver.access
        self._deliver = deliver
        """Takes the effects that are meant for the engine."""
        self._ranks = RankRegistry(
            driven.config, driven.agreement, driven.driver, driven.ranks, deliver
        )
        self._memory = CacheMemory(driven.driver, driven.ranks, deliver)

    @property
    def ranks(self) -> RankRegistry:
        """The ranks in other processes: their plans, reports, losses and returns."""
        return self._ranks

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return self._driver.busy

    @property
    def persists(self) -> bool:
        """Whether a store process keeps blocks for it, which outlive this process."""
        return self._driver.stored is not None

    @property
    def resets_kept(self) -> bool:
        """Whether every reset outlives this process; not so while a store has to confirm one."""
        stored = self._driver.stored
        return stored is None or not stored.unconfirmed_resets

    @property
    def steps(self) -> EngineSteps | None:
        """What the engine calls around its steps; `None` where its ranks are other processes.

        Each of those has its own: `Rank.steps`.
        """
        self._access.require()
        links = self._driver.links
        return links.executor.steps if isinstance(links, LocalLink) else None

    def statistics(self) -> CacheStatistics:
        """Counts and sizes, as a frozen value."""
        self._access.require()
        return self._driver.statistics()

    def story(self, of: Key | str) -> tuple[str, ...]:
        """What last happened to a block (by key) or a request (by name).

        Raises:
            ValueError: it is neither.
        """
        of = as_text("of", of) if isinstance(of, str) else as_key("of", of)
        self._access.require()
        return self._driver.machine.story(of)

    def copies(self) -> list[CopyTimes]:
        """The copies that ended last, oldest first, with their times: some thousands."""
        self._access.require()
        return self._driver.copies.ended()

    def take_kv_events(self) -> list[KvEvent]:
        """KV events since the last call, for routers."""
        with self._access:
            return self._driver.machine.take_kv_events()

    def kv_snapshot(self) -> Snapshot:
        """All that can be matched or loaded now, tier by tier."""
        self._access.require()
        return self._driver.machine.kv_snapshot()

    def audit(self) -> None:
        """Checks every invariant of the whole state; raises `InvariantViolation`."""
        self._access.require()
        self._driver.machine.audit()

    def health(self) -> Health:
        """Whether every rank and tier is there; why not.

        A cache that is closed, or whose books cannot be relied on, says so.
        """
        if self._access.closed or self._access.broken:
            return self._driver.health
        self._access.require()
        return self._driver.health

    def adopt_thread(self) -> None:
        """From now on the thread that calls this makes all calls, on leases and pins as well.

        For an engine that opens its cache in one thread and runs it in another. The thread that
        made the calls before makes none any more.

        Raises:
            AccessError: a call is under way in that thread, or this process was forked.
        """
        self._access.adopt()

    def step(self, *, budget_bytes: int = STEP_BUDGET_BYTES, again: bool = False) -> None:
        """Moves blocks and deals with deadlines; call it once per engine iteration.

        Args:
            budget_bytes: How much is copied in this process at most, but one block by each mover.
            again: This is a second call in the same iteration. It begins the copies that were
                requested since the first one, and does not count as a step of the engine.

        Raises:
            ValueError: the budget is not a number of bytes.
        """
        budget_bytes = as_int("budget_bytes", budget_bytes)
        again = as_flag("again", again)
        with self._access:
            if self._driver.is_quiet:
                return
            self._deliver(self._driver.step(budget_bytes=budget_bytes, again=again))

    def store_status(self, cause: str = "") -> StoreStatus | None:
        """The store process as it is now; `None` where nothing outlives this process.

        Args:
            cause: That of the prefetches which `StoreStatus.searching` is about.
        """
        cause = as_text("cause", cause)
        self._access.require()
        return self._driver.store_status(cause)

    @property
    def asleep(self) -> bool:
        """Whether it has given its memory back: see `sleep`."""
        return self._memory.asleep

    def sleep(self, *, host: bool = False) -> None:
        """Forgets the device's blocks and gives their memory back to the system, until `wake`.

        What lies in host memory stays, unless `host` is true; what lies on a disk stays. Meanwhile
        `acquire`, `prefetch` and `pin` raise `UnavailableError`. `drain` before, and step until
        the cache is not busy. A second call changes nothing, or gives host memory back as well.

        Args:
            host: Whether the first tier below the device is given back, too.

        Raises:
            UnavailableError: the KV is in memory of a GPU, and the engine cannot give it back.
            ValueError: leases are open, or copies are under way.
        """
        host = as_flag("host", host)
        with self._access:
            self._memory.sleep(host=host)

    def wake(self) -> None:
        """Ends `sleep`: the cache can be used again. May be called twice.

        Raises:
            UnavailableError: there is no memory for the host tier, or on the GPU.
        """
        with self._access:
            self._memory.wake()

    def computed(self, token_count: int, seconds: float) -> None:
        """Reports that the engine computed the KV of `token_count` tokens in `seconds`.

        Decides, with the measured speed of copies, whether blocks below the device are loaded
        or computed again. For steps that mostly prefill: a decode step says nothing about it.

        Raises:
            ValueError: there were no tokens, or it took no time.
        """
        token_count = as_int("token_count", token_count, low=1)
        seconds = as_seconds("seconds", seconds)
        with self._access:
            self._deliver(self._driver.handle(Computed(token_count=token_count, seconds=seconds)))

    def wait(self, deadline: float, *, descriptors: Sequence[int] = ()) -> bool:
        """Waits until there is something to do, or `deadline` on the monotonic clock.

        For an engine with no request that can run: it uses no CPU meanwhile.

        Args:
            deadline: After it, False is returned.
            descriptors: What can be read there is something to do, too: the engine's own
                sockets, or a `StopSignal`.

        Raises:
            UnavailableError: the device does not end its copies.
            ValueError: the deadline is not a time on that clock, but a number of seconds, say.
        """
        self._access.require()
        deadline = self._driver.as_time("deadline", deadline)
        watched = as_descriptors("descriptors", descriptors)
        return self._driver.wait(deadline, descriptors=watched)

    def wait_for_tiers(self, timeout_s: float) -> bool:
        """Waits until all tiers can be used, and all is known that a disk has; steps meanwhile.

        A cache is open before its store process has started. What is computed until then is written
        later, but nothing is found there. Ranks in other processes have to step meanwhile, too:
        the store process waits for their host memory.

        Returns:
            Whether it is so. If not, the time is over; `health` says why, and the tiers are used
            as soon as they can be.

        Raises:
            ValueError: it is not a number of seconds.
        """
        driver = self._driver
        deadline = time.monotonic() + as_seconds("timeout_s", timeout_s, zero=True)
        self._access.require()
        while driver.awaits_tiers and time.monotonic() < deadline:
            self.step()
            if driver.awaits_tiers:
                self.wait(deadline)
        return driver.has_all_tiers and not driver.awaits_tiers

    def drain(self) -> None:
        """Cancels every copy but those that write blocks down; those go on with each step.

        For an engine whose messages carry the plans: it steps on until nothing is `busy`, and
        then closes. `close` does both where it can.
        """
        with self._access:
            self._deliver(self._driver.drain())

    def close(self, timeout_s: float = 0.0) -> Drained:
        """Drains, fences, releases, in this order; a second call changes nothing.

        Copies that write blocks down may end for `timeout_s`; all others are cancelled at
        once. After it nothing touches the engine's blocks on this rank any more, the memory of
        the tiers is given back. Leases that are still open are named in
        a `ResourceWarning`. A cache whose books cannot be relied on is closed as well.
        """
        timeout_s = as_seconds("timeout_s", timeout_s, zero=True)
        open_leases = self._open_leases()
        drained = self._driver.close(timeout_s, deliver=self._deliver)
        if open_leases:
            # Afterwards: where warnings are errors, the cache is closed all the same.
            warnings.warn(
                f"the cache was closed with open leases: {open_leases}",
                ResourceWarning,
                stacklevel=2,
            )
        return drained

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A forked child has nothing to close: all of it belongs to its parent.
        if not self._access.forked:
            self.close()

    def _open_leases(self) -> str:
        """The requests that still hold blocks, unless the cache is closed already."""
        if not self._access.usable:
            return ""
        requests = [repr(request) for request in self._driver.machine.open_requests()]
        more = f" and {len(requests) - NAMED_MAX} more" if len(requests) > NAMED_MAX else ""
        return ", ".join(requests[:NAMED_MAX]) + more

    def _describe_tiers(self) -> str:
        sizes = self._driver.machine.tier_sizes()
        tiers = ", ".join(f"{name} {slot_count}" for name, slot_count in sizes.items())
        return f"blocks: {tiers}; {self._access.state}"


class RankRegistry:
    """The ranks of a cache in other processes; none where its one rank is in this process."""

    def __init__(
        self,
        config: Config,
        agreement: Agreement,
        driver: Driver,
        ranks: Sequence[RankFacts],
        deliver: Callable[[list[Effect]], None],
    ) -> None:
        self._config = config
        self._agreement = agreement
        self._driver = driver
        self._facts = {facts.rank: facts for facts in ranks}
        self._deliver = deliver

    def __len__(self) -> int:
        return len(self._facts)

    def take_plan(self) -> bytes | None:
        """The next plan that the engine's messages have to carry to every rank.

        `None` if there is nothing to do, and always where the one rank is this process.
        """
        with self._driver.access:
            return self._driver.links.take_plan()

    def receive(self, report: bytes) -> None:
        """Takes the report of a rank; reports may come late, repeatedly and in any order.

        Raises:
            PeerError: it is not a report of one of these ranks; nothing was changed.
            ValueError: it is not bytes.
        """
        report = as_bytes("report", report)
        with self._driver.access:
            acknowledgements = self._driver.links.acknowledgements
            if acknowledgements is None:
                raise PeerError("a report came, but the one rank of this cache is this process")
            self._deliver(self._driver.take_reports(acknowledgements.read(report)))

    def lose(self, rank: int, why: str) -> None:
        """A rank's process is seen dead: what it had to do has failed.

        Raises:
            ValueError: there is no such rank in another process.
        """
        rank, why = as_int("rank", rank), as_text("why", why)
        with self._driver.access:
            self._require_known(rank)
            self._deliver(self._driver.lose_rank(rank, why))

    def rejoin(self, facts: RankFacts) -> None:
        """A rank was opened anew, with empty device memory.

        Args:
            facts: What it has now.

        Raises:
            ConfigError: it does not fit the cache as it was opened.
            PeerError: it is the life that was lost, and not a new one.
            ValueError: there is no such rank in another process.
        """
        if not isinstance(facts, RankFacts):
            raise ValueError(f"facts is {reprlib.repr(facts)}, must be the RankFacts of the rank")  # noqa: TRY004
        with self._driver.access:
            self._deliver(self._rejoin(facts))

    def _rejoin(self, facts: RankFacts) -> list[Effect]:
        self._require_known(facts.rank)
        require_fit(self._config, facts, self._present(facts))
        self._require_room(facts)
        acknowledgements = self._driver.links.acknowledgements
        assert acknowledgements is not None
        acknowledgements.begin_life(facts)
        # It may be back before anybody noticed that it was gone.
        effects = self._driver.lose_rank(facts.rank, "it started anew")
        before, self._facts[facts.rank] = self._facts[facts.rank], facts
        self._driver.ready_s = slowest_ready_s(self._facts.values())
        effects += self._driver.regain_rank(facts.rank)
        stored = self._driver.stored
        for index, (old, new) in enumerate(zip(before.tiers, facts.tiers, strict=True)):
            if stored is None or index + 1 not in stored.tiers:
                effects += self._switch_tier(index, kept=old.memory == new.memory)
        if stored is not None:
            in_order = [self._facts[rank] for rank in sorted(self._facts)]
            stored.link.name_arenas([each.tiers[0].memory for each in in_order])
        return effects

    def _switch_tier(self, index: int, *, kept: bool) -> list[Effect]:
        """Switches a tier on or off, now that one of its ranks is another."""
        tier = index + 1
        reasons = [
            f"rank {facts.rank}: {facts.tiers[index].off}"
            for facts in self._facts.values()
            if facts.tiers[index].off
        ]
        if reasons:
            return self._driver.switch_tier_off(tier, reasons[0])
        was_on = self._driver.machine.is_tier_on(tier)
        return [] if kept and was_on else self._driver.switch_tier_on(tier, kept=kept)

    def _present(self, facts: RankFacts) -> RankFacts:
        """Another rank that is there, to compare with; the rank itself if there is none."""
        lost = self._driver.machine.lost_ranks
        others = (each for each in self._facts.values() if each.rank not in {facts.rank, *lost})
        return next(others, facts)

    def _require_known(self, rank: int) -> None:
        if not self._facts:
            raise ValueError(f"rank is {rank}, but the one rank of this cache is this process")
        if rank not in self._facts:
            raise ValueError(f"rank is {rank}, must be from 0 to {len(self._facts) - 1}")

    def _require_room(self, facts: RankFacts) -> None:
        """Refuses a rank with fewer slots than the cache was opened with."""
        for index, tier in enumerate(self._agreement.settings.tiers):
            found = facts.tiers[index].slot_count
            if found < tier.slot_count:
                raise ConfigError(
                    f"tiers[{index}]",
                    f"has {found} slots on rank {facts.rank}, must have {tier.slot_count}, as "
                    "when the cache was opened",
                )
        for group, wanted in enumerate(self._agreement.device_slots):
            if facts.device_slots[group] < wanted:
                raise ConfigError(
                    "kv",
                    f"has {facts.device_slots[group]} blocks in KV group {group} on rank "
                    f"{facts.rank}, must have {wanted}, as when the cache was opened",
                )
