"""What `Cache` and `Offload` have in common: steps, waiting, health, statistics, the end.

Questions change nothing. No call waits but `wait` and `close`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.machine.events import Computed
from penstock.runtime.rank import STEP_BUDGET_BYTES
from penstock.runtime.rank_links import LocalLink
from penstock.runtime.rank_registry import RankRegistry
from penstock.vocabulary.arguments import (
    as_descriptors,
    as_int,
    as_key,
    as_seconds,
    as_text,
    require_methods,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from penstock.config import Config
    from penstock.machine.effects import Effect
    from penstock.machine.kv_events import KvEvent, Snapshot
    from penstock.machine.statistics import CacheStatistics
    from penstock.runtime.driver import Driver
    from penstock.runtime.engine_steps import EngineSteps
    from penstock.runtime.rank_facts import Agreement, RankFacts
    from penstock.runtime.status import CopyTimes, Drained, Health
    from penstock.transport.base import ChannelFailed
    from penstock.vocabulary.ids import Key


NAMED_MAX = 8
"""How many requests a warning names."""


class Supervises(Protocol):
    """A supervisor, as far as its loss matters."""

    def look(self) -> ChannelFailed | None:
        """Why it is lost, if it is now."""
        ...


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
        self._supervisor: Supervises | None = None

    @property
    def ranks(self) -> RankRegistry:
        """The ranks in other processes: their plans, reports, losses and returns."""
        return self._ranks

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return self._driver.busy

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
        self._driver.audit()

    def health(self) -> Health:
        """Whether every rank and tier is there, and the supervisor if there is one; why not.

        A cache that is closed, or whose books cannot be relied on, says so.
        """
        if self._access.closed or self._access.broken:
            return self._driver.health
        self._access.require()
        if self._supervisor is not None and (lost := self._supervisor.look()) is not None:
            self._driver.fail_health("the supervisor is lost", lost.cause)
        return self._driver.health

    def supervised_by(self, supervisor: Supervises) -> None:
        """Makes the health of the cache depend on the supervisor of its processes.

        A supervisor that is lost took ranks and store processes along, starts none anew, and
        holds no memory any more: only the engine itself is left, and is to be started again.

        Raises:
            ValueError: it is no supervisor.
        """
        require_methods("supervisor", supervisor, "Supervisor", "look")
        self._access.require()
        self._supervisor = supervisor

    def adopt_thread(self) -> None:
        """From now on the thread that calls this makes all calls, on leases and pins as well.

        For an engine that opens its cache in one thread and runs it in another. The thread that
        made the calls before makes none any more.

        Raises:
            AccessError: a call is under way in that thread, or this process was forked.
        """
        self._access.adopt()

    def step(self, *, budget_bytes: int = STEP_BUDGET_BYTES) -> None:
        """Moves blocks and deals with deadlines; call it once per engine iteration.

        Args:
            budget_bytes: How much is copied in this process at most, but one block by each mover.

        Raises:
            ValueError: the budget is no number of bytes.
        """
        budget_bytes = as_int("budget_bytes", budget_bytes)
        with self._access:
            self._deliver(self._driver.step(budget_bytes=budget_bytes))

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
            ValueError: the deadline is no time on that clock, but a number of seconds, say.
        """
        self._access.require()
        deadline = self._driver.as_time("deadline", deadline)
        watched = as_descriptors("descriptors", descriptors)
        return self._driver.wait(deadline, descriptors=watched)

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
        the tiers is given back, and channels are closed. Leases that are still open are named in
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
