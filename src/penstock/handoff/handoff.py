"""What an engine or a rank of it calls in a handoff, whichever side it is on.

    results = handoff.step()      # once an iteration: bounded work, never waits
    handoff.wait(deadline)        # when the engine has nothing else to do

All calls come from one thread, as for a cache (`penstock.runtime.access`). The one rule: a
handoff that was offered or claimed ends with exactly one `HandoffResult`, and the engine's blocks
are not touched for it afterwards.
"""

from __future__ import annotations

import reprlib
import secrets
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict, TypeVar

from penstock.errors import UnavailableError, counted
from penstock.handoff.driver.lines import SharedListener, zmq_lines

# Not for type checkers alone: tools look up the types of the exported classes.
from penstock.handoff.driver.schedulers import (  # noqa: TC001
    DecodeSchedulerDriver,
    PrefillSchedulerDriver,
)
from penstock.handoff.pair import HandoffPair, directory_of, rank_name, transport_named
from penstock.handoff.protocol.messages import INDEX_MAX
from penstock.handoff.protocol.settings import HandoffSettings
from penstock.handoff.protocol.states import HandoffOutcome
from penstock.runtime.access import Access
from penstock.runtime.tiers import ALGORITHMS, memory_tier
from penstock.transport.remote import HandoffAddresses
from penstock.transport.waiting import wait_any
from penstock.vocabulary.arguments import (
    as_descriptors,
    as_int,
    as_seconds,
    as_text,
    as_time,
    as_tuple,
)
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import as_token_array
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.extensions import DataTransport
    from penstock.handoff.driver.lines import ZmqLines
    from penstock.handoff.driver.party_driver import PartyDriver
    from penstock.handoff.protocol.effects import HandoffEnded
    from penstock.runtime.tiers import Kv
    from penstock.tiers.base import SlotStore
    from penstock.transport.base import Waitable
    from penstock.transport.remote import DeviceMemory
    from penstock.vocabulary.keys import Tokens

ClosableT = TypeVar("ClosableT", bound=Any)
SUBMITTING_S = 0.002
"""How often to advance beside a thread that submits a step. A look takes 0.3 ms and a part as much
again, in a thread that needs 0.4 ms to submit a layer."""


class HandoffResult(NamedTuple):
    """How a handoff ended on this side."""

    handoff: str
    outcome: HandoffOutcome
    why: str = ""
    """Why it failed; empty if it was delivered."""
    tokens: tuple[int, ...] = ()
    """On the decode side: the first token of a prompt that was delivered."""
    drafts: tuple[int, ...] = ()
    """On the decode side: the drafts that came with it."""
    token_count: int = 0
    """Tokens of the prompt whose KV was to be handed over."""
    began: float = 0.0
    """When it was offered or claimed, on the monotonic clock."""
    ended: float = 0.0

    @property
    def delivered(self) -> bool:
        """Whether all KV arrived, and was found intact."""
        return self.outcome is HandoffOutcome.DELIVERED


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStatistics:
    """Counts of one engine or rank since it was opened."""

    under_way: int
    """Handoffs that have not ended on this side."""
    parts: int
    """Parts that this process wrote and the other side received; on the decode side, parts that
    were verified and moved into their blocks."""
    bytes: int
    """Bytes of parts."""
    landing_bytes: int
    """Memory that other processes can write to; only decode ranks have it."""
    refused: dict[str, int]
    """Messages that made no sense, by reason."""


class Handoff:
    """One engine, or one rank of it, with its connections."""

    def __init__(self, name: str, drivers: Sequence[PartyDriver[Any]], opening: Opening) -> None:
        self._name = name
        self._drivers = tuple(drivers)
        self._directory = opening.directory
        self._undo = opening.undo.pop_all()
        self._access = Access(f"the handoff of {name!r}")
        self._opened_at = time.monotonic()
        self._open: dict[str, tuple[int, float]] = {}
        """Handoffs that were offered or claimed here and have not ended: their tokens, and since
        when."""
        self._results: list[HandoffResult] = []
        self._advanced_at = self._opened_at

    @property
    def name(self) -> str:
        """The engine's name, or the rank's."""
        return self._name

    @property
    def connected(self) -> bool:
        """Whether all parties that this one talks to are connected and not suspected."""
        self._access.require()
        return all(
            driver.machine.is_open(peer)
            for driver in self._drivers
            for peer in self._directory.peers_of(driver.life.name)
        )

    def step(self) -> list[HandoffResult]:
        """Sends and receives what there is, a bounded amount; never waits.

        Returns the handoffs that ended since the last call; those of a rank end at its engine.
        """
        with self._access:
            self._advance()
            results, self._results = self._results, []
            return results

    def wait(self, deadline: float, *, descriptors: Sequence[int] = ()) -> bool:
        """Waits until `step` has something to do, or `deadline` on the monotonic clock.

        Args:
            deadline: After it, False is returned.
            descriptors: The engine's own: it wakes up when one of them can be read.
        """
        self._access.require()
        deadline = self._deadline(deadline)
        watched = as_descriptors("descriptors", descriptors)
        if self.has_work:
            return True
        due = self.next_deadline()
        until = deadline if due is None else min(due, deadline)
        ready = wait_any(self.waitables, [*self.descriptors, *watched], deadline=until)
        return bool(ready.channels or ready.descriptors) or until < deadline

    def drive(self, deadline: float) -> None:
        """Sends and receives while the engine waits for its device; results stay for `step`.

        A prefill rank looks at its device until all that was reported with a `stream` is
        computed and packed, or `deadline` on the monotonic clock has come; otherwise it returns at
        once.
        """
        until = self._deadline(deadline)
        with self._access:
            for driver in self._drivers:
                driver.drive(until)
            self._advance()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do at once."""
        return bool(self._results) or any(driver.has_work for driver in self._drivers)

    @property
    def waitables(self) -> list[Waitable]:
        """Connections, for an engine that waits for other things too: `Rank.wait(channels=…)`."""
        return [each for driver in self._drivers for each in driver.lines.waitables]

    @property
    def descriptors(self) -> list[int]:
        """File descriptors to wait for beside `waitables`."""
        return [each for driver in self._drivers for each in driver.descriptors]

    def next_deadline(self) -> float | None:
        """When to call `step` at the latest, on the monotonic clock."""
        dues = [driver.next_deadline() for driver in self._drivers]
        return min((due for due in dues if due is not None), default=None)

    def statistics(self) -> HandoffStatistics:
        """Counts since it was opened."""
        self._access.require()
        refused: Counter[str] = Counter()
        for driver in self._drivers:
            refused.update(driver.refused)
        return HandoffStatistics(
            under_way=len(self._open),
            parts=sum(driver.parts_moved for driver in self._drivers),
            bytes=sum(driver.bytes_moved for driver in self._drivers),
            landing_bytes=sum(driver.landing_bytes for driver in self._drivers),
            refused=dict(refused),
        )

    def adopt_thread(self) -> None:
        """From now on the thread that calls this makes all calls."""
        self._access.adopt()

    def close(self) -> None:
        """Closes all connections and gives the memory back; a second call changes nothing.

        After it nothing reads or writes the engine's blocks. Handoffs that are under way end
        without a result here, and as failed on the other side.
        """
        if self._access.closed or self._access.forked:
            return
        if not self._access.broken:
            self._access.require()
        self._access.close()
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}: {self._access.state}>"

    def _deadline(self, deadline: float) -> float:
        now = time.monotonic()
        return as_time("deadline", deadline, opened_at=self._opened_at, now=now)

    def _advance(self) -> None:
        for driver in self._drivers:
            self._collect(driver.step())
        self._advanced_at = time.monotonic()

    def _advance_beside(self, stream: object) -> None:
        """Advances; now and then only, while the thread submits kernels to a stream.

        Kernels that are submitted late let the device idle, and a layer has about ten of them.
        """
        if stream is None or time.monotonic() - self._advanced_at >= SUBMITTING_S:
            self._advance()

    def _collect(self, ended: Sequence[HandoffEnded]) -> None:
        for each in ended:
            token_count, began = self._open.pop(each.handoff)
            delivered = each.outcome is HandoffOutcome.DELIVERED
            self._results.append(
                HandoffResult(
                    each.handoff,
                    each.outcome,
                    "" if delivered else each.why,
                    each.tokens,
                    each.drafts,
                    token_count,
                    began,
                    time.monotonic(),
                )
            )

    def _begin(self, handoff: str, token_count: int) -> None:
        self._open[handoff] = token_count, time.monotonic()

    def _connect(self, ranks: Sequence[str], timeout_s: float) -> None:
        """Waits until all ranks of an engine have connected; its own driver is the last.

        Raises:
            UnavailableError: some did not in time.
        """
        machine = self._drivers[-1].machine
        deadline = time.monotonic() + timeout_s
        while missing := [name for name in ranks if not machine.is_open(name)]:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"ranks {', '.join(missing)} did not connect within {timeout_s:g} s"
                )
            self.wait(deadline)
            self._advance()


class EngineHandoff(Handoff):
    """An engine; its own driver is the last, after those of ranks in this process."""

    _engine: PrefillSchedulerDriver | DecodeSchedulerDriver

    def cancel(self, handoff: str, why: str = "cancelled") -> None:
        """The request was aborted; its `HandoffResult` follows. One that has ended is left alone.

        Raises:
            ValueError: an argument is wrong.
        """
        name, reason = as_text("handoff", handoff), as_text("why", why)
        with self._access:
            if name in self._open:
                self._engine.cancel(name, why=reason)
                self._collect(self._engine.take_ended())

    def rank_died(self, rank: int) -> None:
        """The process of a rank was seen dead: what needs it fails at once."""
        number = as_int("rank", rank, 0, len(self._engine.machine.ranks) - 1)
        with self._access:
            self._engine.colleague_died(rank_name(self._name, number))
            self._collect(self._engine.take_ended())


class HandoffRank(Handoff):
    """One of several ranks of an engine, in a process of its own."""

    def __init__(self, opening: Opening, rank: PartyDriver[Any]) -> None:
        super().__init__(rank.life.name, [rank], opening)
        self._scheduler = opening.engine.name

    def engine_died(self) -> None:
        """The process of the engine was seen dead: its offers and claims are dropped here."""
        with self._access:
            self._drivers[0].colleague_died(self._scheduler)


class OpeningOptions(TypedDict, total=False):
    """Arguments that `open_prefill` and `open_decode` share, for their overloads."""

    layout: Layout | None
    block_tokens: int
    settings: HandoffSettings | None
    timeout_s: float
    listener: SharedListener | None


class Opening:
    """One side of a pair while it is being opened: who it is, and what to close on failure."""

    def __init__(
        self,
        pair: HandoffPair,
        role: str,
        kv: Kv | None,
        *,
        layout: Layout | None,
        block_tokens: int,
        settings: HandoffSettings | None,
        timeout_s: float,
        listener: SharedListener | None,
    ) -> None:
        if not isinstance(pair, HandoffPair):
            raise ValueError(f"pair is a {type(pair).__name__}, must be a HandoffPair")  # noqa: TRY004
        if settings is not None and not isinstance(settings, HandoffSettings):
            raise ValueError(
                f"settings is a {type(settings).__name__}, must be HandoffSettings or None"
            )
        self.timeout_s = as_seconds("timeout_s", timeout_s)
        if not isinstance(listener, SharedListener | None):
            raise ValueError(f"listener is {reprlib.repr(listener)}, must be a SharedListener")  # noqa: TRY004
        self._listener = listener
        self.pair = pair
        self.engine = pair.prefill if role == "prefill" else pair.decode
        self.settings = settings or HandoffSettings()
        self.tier: SlotStore | None = None
        if kv is not None:
            self.tier = _tier(kv, layout, block_tokens)
            if self.on_gpu and pair.checksum != ALGORITHMS["cuda"].value:
                raise ValueError(
                    f"checksum of the pair is {pair.checksum!r}, must be "
                    f"{ALGORITHMS['cuda'].value!r}: kv lies on a GPU, which sums it there"
                )
            if self.on_gpu and not self.transport.pins:
                raise ValueError(
                    f"transport of the pair is {pair.transport!r}, must be one that pins its "
                    "memory for a GPU, where kv lies"
                )
        elif layout is not None or block_tokens:
            raise ValueError("layout and block_tokens are given, must be left out without kv")
        own = None if self.tier is None else self.tier.layout
        self.directory = directory_of(pair, own)
        self.undo = ExitStack()

    @property
    def on_gpu(self) -> bool:
        """Whether the KV of the rank lies on a GPU."""
        return self.tier is not None and self.tier.medium == "cuda"

    @property
    def transport(self) -> DataTransport:
        """How KV gets from a prefill rank to a decode rank."""
        return transport_named(self.pair.data_transport)

    def device_memory(self) -> DeviceMemory | None:
        """Makes and maps landing areas on the GPU of the KV, where the transport has such."""
        if not self.on_gpu or not self.transport.device_areas:
            return None
        from penstock.movers.cuda.landing import LandingMemory  # noqa: PLC0415 - needs CUDA

        tensors: Any = self.tier
        return LandingMemory(tensors.device.index)

    @property
    def checksum(self) -> Algorithm:
        """How both sides sum bytes."""
        return Algorithm(self.pair.checksum)

    @property
    def slot_count(self) -> int:
        """Blocks that a rank has; where the ranks are elsewhere, as many as can be named."""
        return INDEX_MAX + 1 if self.tier is None else self.tier.slot_count

    def rank(self, rank: int | None) -> str:
        """The name of the rank whose KV was given."""
        count = self.engine.rank_count
        if rank is None and count > 1:
            raise ValueError(
                f"rank is None, must be from 0 to {count - 1}: the engine has {count} ranks"
            )
        number = 0 if rank is None else as_int("rank", rank, 0, count - 1)
        name = rank_name(self.engine.name, number)
        assert self.tier is not None
        form = Form(layout=self.tier.layout, checksum=self.checksum)
        said = self.directory.place_of(name).form
        if difference := form.difference(said):
            raise ValueError(f"kv of rank {number} does not fit layouts[{number}]: {difference}")
        return name

    def addresses(self, name: str) -> HandoffAddresses:
        """Where a rank is, and the engine that it exchanges KV with."""
        places = {True: self.directory.prefill, False: self.directory.decode}
        is_prefill = name in self.directory.prefill.rank_names
        own, other = places[is_prefill], places[not is_prefill]
        return HandoffAddresses(
            own=[each for each in (self.directory.place_of(name).address, own.address) if each],
            peers=[
                each for each in (other.address, *(rank.address for rank in other.ranks)) if each
            ],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo.close()

    def lines(self, name: str) -> ZmqLines:
        """The connections of one party."""
        secret, listener = self.pair.secret, self._listener
        return self.keep(zmq_lines(self.directory, name, secret=secret, listener=listener))

    def keep(self, opened: ClosableT) -> ClosableT:
        """Closes it if opening fails, and with the handoff; what was opened last, first."""
        return self.undo.enter_context(closing(opened))


HandoffT = TypeVar("HandoffT", bound=Handoff)


def connected(handoff: HandoffT, ranks: Sequence[str], timeout_s: float) -> HandoffT:
    """The engine, once its ranks have connected; it is closed if they do not."""
    with ExitStack() as undo:
        undo.callback(handoff.close)
        handoff._connect(ranks, timeout_s)  # noqa: SLF001 - a part of opening
        undo.pop_all()
    return handoff


def draw_incarnation() -> int:
    """The number of a party's life."""
    return secrets.randbits(63) + 1


def as_prompt(tokens: Tokens) -> NDArray[np.uint32]:
    """The prompt of a handoff."""
    words = as_token_array(tokens)
    if not len(words):
        raise ValueError("tokens are empty, must be at least one")
    return words


def as_slots(slots: Sequence[int], *, count: int, slot_count: int) -> tuple[int, ...]:
    """One of the engine's blocks for each block of a prompt."""
    given = as_tuple("slots", slots)
    found = tuple(as_int(f"slots[{n}]", each, 0, slot_count - 1) for n, each in enumerate(given))
    if len(found) != count or len(set(found)) < count:
        raise ValueError(
            f"slots are {len(found)}, {len(set(found))} of them different, must be {count} "
            "different ones, one for each block"
        )
    return found


def as_rank_slots(
    slots: Sequence[Sequence[int]], *, ranks: int, count: int, slot_count: int
) -> list[tuple[int, ...]]:
    """For each rank, one of its blocks for each of the last blocks of a prompt."""
    given = as_tuple("slots", slots)
    if len(given) != ranks:
        raise ValueError(f"slots are for {counted(len(given), 'rank')}, must be for {ranks}")
    found: list[tuple[int, ...]] = []
    for rank, each in enumerate(given):
        size = len(as_tuple(f"slots[{rank}]", each))
        if size > count:
            raise ValueError(f"slots[{rank}] are {size}, must be at most {count}, one a block")
        found.append(as_slots(each, count=size, slot_count=slot_count))
    return found


def _tier(kv: Kv, layout: Layout | None, block_tokens: int) -> SlotStore:
    tokens = as_int("block_tokens", block_tokens)
    if not isinstance(layout, Layout | None):
        raise ValueError(f"layout is a {type(layout).__name__}, must be a Layout or None")  # noqa: TRY004
    if layout is not None:
        tokens = layout.block_tokens
    elif not tokens and not hasattr(kv, "layout"):
        raise ValueError("block_tokens is 0, must be the tokens of a block where kv is arrays")
    tier = memory_tier(kv, layout, block_tokens=tokens)
    if tier.medium == "cuda":
        # Parts are packed out of the tensors; what else a device tier does is the cache's.
        tensors: SlotStore = tier.tensors if hasattr(tier, "tensors") else tier
        return tensors
    if tier.medium != "arrays":
        raise ValueError(
            f"kv lies on {tier.medium}, must lie in the memory of the CPU or on a CUDA device"
        )
    return tier
