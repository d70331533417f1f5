"""What every cache can be asked and told by its engine, whichever way the engine uses it.

Questions change nothing. The rest is about the ranks that carry out its copies: where they are
elsewhere, plans go out and reports come in; where the cache comes to its end, so do they.
"""

from __future__ import annotations

import reprlib
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from penstock.machine.events import Computed
from penstock.runtime.crew import LocalCrew, RemoteCrew
from penstock.runtime.facts import RankFacts
from penstock.runtime.links import LinkedCrew
from penstock.vocabulary.arguments import (
    as_bytes,
    as_descriptors,
    as_int,
    as_key,
    as_seconds,
    as_text,
    require_methods,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from penstock.machine import effects as ef
    from penstock.machine.kv_events import KvEvent, Snapshot
    from penstock.machine.statistics import CacheStatistics
    from penstock.runtime.copy_log import CopyTimes
    from penstock.runtime.driver import Driver
    from penstock.runtime.engine_steps import EngineSteps
    from penstock.runtime.health import Health
    from penstock.runtime.returning import Muster
    from penstock.runtime.shutdown import Drained
    from penstock.transport.base import Channel, Failed
    from penstock.vocabulary.ids import Key


NAMED_MAX = 8
"""So many requests are named in a warning."""


class Supervises(Protocol):
    """A supervisor, as far as its loss matters."""

    def look(self) -> Failed | None:
        """Why it is lost, if it is now."""
        ...


class Watched(ABC):
    """A cache that tells what it does, and whose ranks may be elsewhere."""

    def __init__(self, driver: Driver, muster: Muster | None = None) -> None:
        self._driver = driver
        self._access = driver.access
        self._muster = muster
        self._supervisor: Supervises | None = None

    @abstractmethod
    def _hear(self, told: list[ef.Effect]) -> None:
        """Takes in what is meant for the engine."""

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return self._driver.busy

    @property
    def steps(self) -> EngineSteps:
        """What the engine tells and asks around its steps, where its one rank is here.

        Raises:
            ValueError: the ranks are elsewhere, and each has its own `steps`.
        """
        self._access.require()
        crew = self._driver.crew
        if isinstance(crew, LocalCrew):
            return crew.carrier.steps
        raise ValueError("steps are those of a rank, must be asked for where it is: Rank.steps")

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

    def step(self) -> None:
        """Moves blocks and deals with deadlines; call it once per engine iteration."""
        with self._access:
            self._hear(self._driver.step())

    def computed(self, token_count: int, seconds: float) -> None:
        """The engine computed the KV of so many tokens, and it took so long.

        Decides, with the measured speed of copies, whether blocks below the device are loaded
        or computed again. For steps that mostly prefill: a decode step tells nothing of it.

        Raises:
            ValueError: there were no tokens, or it took no time.
        """
        token_count = as_int("token_count", token_count, low=1)
        seconds = as_seconds("seconds", seconds)
        with self._access:
            self._hear(self._driver.handle(Computed(token_count=token_count, seconds=seconds)))

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

    def take_plan(self) -> bytes | None:
        """What ranks elsewhere are to do: once a step, for the message that they all get.

        Raises:
            ValueError: the ranks are not reached by the engine's own messages.
        """
        with self._access:
            return self._remote("take_plan").take_plan()

    def hear(self, report: bytes) -> None:
        """Takes in what a rank elsewhere has done: each of its reports, in whatever order.

        Raises:
            PeerError: it is no report of such a rank; nothing was changed.
            ValueError: the ranks are not reached by the engine's own messages.
        """
        report = as_bytes("report", report)
        with self._access:
            self._hear(self._driver.hear(self._remote("hear").roll.read(report)))

    def rank_lost(self, rank: int, why: str) -> None:
        """A rank's process is seen dead: what it had to do has failed.

        Raises:
            ValueError: there is no such rank elsewhere.
        """
        rank, why = as_int("rank", rank), as_text("why", why)
        with self._access:
            self._hear(self._require_muster("rank_lost").lose(rank, why))

    def rank_back(self, facts: RankFacts, *, channel: Channel | None = None) -> None:
        """A rank was opened anew, with empty device memory.

        Args:
            facts: What it has now.
            channel: The way to it, where ranks are reached over channels.

        Raises:
            ConfigError: it does not fit the cache as it was opened.
            PeerError: it is the life that was lost, and not a new one.
            ValueError: there is no such rank elsewhere.
        """
        muster = self._require_muster("rank_back")
        if not isinstance(facts, RankFacts):
            raise ValueError(f"facts is {reprlib.repr(facts)}, must be the RankFacts of the rank")  # noqa: TRY004
        if channel is not None:
            require_methods("channel", channel, "Channel", "send", "receive")
        with self._access:
            self._hear(muster.welcome(facts, channel))

    def drain(self) -> None:
        """Cancels every copy but those that write blocks down; those go on with each step.

        For an engine whose messages carry the plans: it steps on until nothing is `busy`, and
        then closes. `close` does both where it can.
        """
        with self._access:
            self._hear(self._driver.drain())

    def close(self, timeout_s: float = 0.0) -> Drained:
        """Drains, fences, releases, in this order; a second call changes nothing.

        Copies that write blocks down may end for so many seconds; all others are cancelled at
        once. After it nothing touches the engine's blocks on this rank any more, the memory of
        the tiers is given back, and channels are closed. Leases that are still open are named in
        a `ResourceWarning`. A cache whose books cannot be relied on is closed as well.
        """
        timeout_s = as_seconds("timeout_s", timeout_s, zero=True)
        open_leases = self._open_leases()
        drained = self._driver.close(timeout_s, hear=self._hear)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A forked child has nothing to close: all of it belongs to its parent.
        if not self._access.forked:
            self.close()

    def _open_leases(self) -> str:
        """Who still holds blocks of a cache that is not closed."""
        if not self._access.usable:
            return ""
        requests = [repr(request) for request in self._driver.machine.open_requests()]
        more = f" and {len(requests) - NAMED_MAX} more" if len(requests) > NAMED_MAX else ""
        return ", ".join(requests[:NAMED_MAX]) + more

    def _tell_tiers(self) -> str:
        sizes = self._driver.machine.tier_sizes()
        told = ", ".join(f"{name} {slot_count}" for name, slot_count in sizes.items())
        return f"blocks: {told}; {self._access.state}"

    def _remote(self, call: str) -> RemoteCrew:
        crew = self._driver.crew
        if isinstance(crew, RemoteCrew):
            return crew
        way = "over channels" if isinstance(crew, LinkedCrew) else "in this process"
        raise ValueError(f"{call}: the ranks of this cache are reached {way}, not by messages")

    def _require_muster(self, call: str) -> Muster:
        if self._muster is None:
            raise ValueError(f"{call}: the one rank of this cache is this process")
        return self._muster
