"""The pairs that a process of an instance has open: one for each instance that it hands over with.

A router introduces two instances: it sends both the same `PairSpec`, and each opens its side. In a
pair, an instance is named after both and the pair's number (`prefill-0>decode-1.7`,
`decode-1<prefill-0.7`), so all pairs of a process share one listener, and two instances may be a
pair in each direction. A pair is closed when the router says so, or when it is introduced anew;
then a caller from the new one does not meet the side of the old one that is about to be closed.

A pair that nobody has used for `REST_S` rests: all resting pairs together cost one look at an epoll
descriptor a step, however many they are, and one of them is stepped only when something came for it
or its deadline is due.

The rule: when a pair is closed, nothing reads or writes blocks for it any more, here or in a rank
that was told so before its next step.
"""

from __future__ import annotations

import math
import select
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import (
    DecodeHandoff,
    DecodeHandoffRank,
    DType,
    HandoffEngine,
    HandoffPair,
    HeadRange,
    Layout,
    LocalPrefillHandoff,
    PrefillHandoff,
    PrefillHandoffRank,
    SharedListener,
    open_decode,
    open_prefill,
)
from penstock.config import AUTO, NIXL, HandoffTable, port_range
from penstock.errors import CapacityError
from penstock.toolkit import (
    IPC,
    ChannelSettings,
    HandoffAddresses,
    ListenerShare,
    hold_relay,
    is_installed,
    is_local,
    socket_path,
)
from penstock_serve.engine.architecture import share_of
from penstock_serve.engine.defaults import handoff_settings
from penstock_serve.engine.spec import EngineSpec
from penstock_serve.engine.steps import HandedCounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock import HandoffBounds, HandoffResult, HandoffSettings
    from penstock.tensors import TensorTier
    from penstock.toolkit import Waitable
    from penstock_serve.engine.architecture import Architecture
    from penstock_serve.engine.spec import InstanceSpec, PairSpec
    from penstock_serve.engine.steps import Step

REST_S = 1.0
"""A pair that was used a moment ago may have more to send than its descriptors show."""
CALLED_MAX = 64
"""Descriptors that one look finds; the next one finds the others."""
OPEN_S = 10.0
"""How long a scheduler waits for its own ranks when it opens a pair."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

PairDoor = PrefillHandoff | PrefillHandoffRank | DecodeHandoff | DecodeHandoffRank
PairNames = tuple[str, str]
"""The prefill instance and the decode instance."""


@dataclass(slots=True, eq=False)
class _Pair:
    """A pair that is open in this process."""

    door: PairDoor
    landing_bytes: int
    """Landing memory that it may take here, on the decode side."""
    used_at: float
    rests: bool = False
    """Whether it is stepped only when something comes for it."""
    descriptors: list[int] = field(default_factory=list)
    """What it waits for while it rests."""
    until: float = math.inf
    """When it is stepped although nothing came."""


class Peers:
    """The open pairs of one process: a scheduler, with or without its one rank, or a rank."""

    def __init__(
        self,
        spec: InstanceSpec,
        architecture: Architecture,
        *,
        tier: TensorTier | None,
        rank: int | None = None,
    ) -> None:
        """Listens for other instances from now on.

        Raises `UnavailableError`: there is no free address, or NIXL cannot be used.
        """
        self.spec = spec
        self._architecture = architecture
        self._tier = tier
        self._rank = rank
        self._table = spec.config.handoff or HandoffTable()
        self._pairs: dict[PairNames, _Pair] = {}
        self._watchers: dict[int, list[_Pair]] = {}
        """The resting pairs that wait for a descriptor; several may wait for the same one."""
        self._rest_until = math.inf
        """When the first of the resting pairs is due."""
        self._closed_counts = HandedCounts()
        self._listener = SharedListener(
            spec.name,
            _addresses(spec),
            secret=spec.handoff_secret,
            settings=ChannelSettings(ports=port_range(spec.ports)),
        )
        # Not a poll over all of them: that takes longer with every pair, at each step.
        self._watched = select.epoll()
        self._watched.register(self._listener.descriptor, select.EPOLLIN)
        # NIXL takes seconds to load: not while a request waits for its pair.
        self._relay = None
        if tier is not None and self._may_use_nixl():
            self._relay = hold_relay(HandoffAddresses(own=[self.address]))

    @property
    def address(self) -> str:
        """Where this process listens."""
        return self._listener.address

    def place(self, rank_addresses: list[str] | None = None) -> EngineSpec:
        """The instance as others reach it, for the router."""
        return EngineSpec(
            name=self.spec.name,
            ranks=self.spec.ranks,
            address=self.address,
            rank_addresses=[self.address] if rank_addresses is None else rank_addresses,
            machine=BOOT_ID.read_text().strip(),
        )

    @property
    def open_pairs(self) -> list[PairNames]:
        """The pairs that are open."""
        return list(self._pairs)

    def door(self, prefill: str, decode: str) -> PairDoor | None:
        """The open pair of two instances, of which this one is one; it is about to be used."""
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            return None
        pair.used_at = time.monotonic()
        self._wake(pair)
        return pair.door

    def open(self, pair: PairSpec, *, weights: str) -> None:
        """Opens this process's part of a pair; one of the same names is closed before.

        Raises `ValueError`, `UnavailableError` or `CapacityError`.
        """
        names = pair.prefill.name, pair.decode.name
        if self.spec.name not in names:
            raise ValueError(f"pair is {names}, must name {self.spec.name!r}")
        self.close_pair(*names)
        if len(self._pairs) >= self._table.peers_max:
            raise CapacityError(tier="pairs", wanted=1, available=0)
        decodes = pair.decode.name == self.spec.name
        settings = self._settings(pair)
        landing = settings.bounds.landing_bytes_max if decodes else 0
        taken = sum(each.landing_bytes for each in self._pairs.values())
        left = self._table.landing_bytes_max - taken
        if landing > left:
            raise CapacityError(tier="landing areas", wanted=landing, available=max(0, left))
        both = pair_of(self.spec, pair, self._architecture, weights=weights)
        door = self._open_side(both, settings, decodes=decodes)
        self._pairs[names] = _Pair(door, landing, time.monotonic())

    def close_pair(self, prefill: str, decode: str) -> None:
        """Closes a pair if it is open; its handoffs end without a result."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None:
            self._wake(pair)
            del self._pairs[prefill, decode]
            counts = _counts_of(pair.door)
            # Its memory goes with it.
            self._closed_counts += HandedCounts(counts.parts_verified, counts.bytes_moved)
            pair.door.close()

    def step(self) -> list[HandoffResult]:
        """Sends and receives what there is; returns the handoffs that ended."""
        now = time.monotonic()
        self._wake_called(now)
        results: list[HandoffResult] = []
        for pair in self._awake:
            results += pair.door.step()
            self._let_rest(pair, now)
        return results

    def begin(self, step: Step, stream: int) -> Callable[[int], None] | None:
        """A step is about to be computed; returns what is called after each layer of it."""
        for each in step.offers:
            door = self._sending(each.decode)
            if isinstance(door, PrefillHandoffRank):
                door.admit(each.offer)
                door.step()
        tokens: dict[str, dict[str, int]] = {}
        for span in step.handed:
            tokens.setdefault(span.decode, {})[span.handoff] = step.spans[span.span].stop
        doors = [(found, tokens[name]) for name in tokens if (found := self._sending(name))]
        if not doors:
            return None

        def computed(layer: int) -> None:
            """The KV of the step goes out layer by layer, while the next ones are computed."""
            for door, spans in doors:
                door.computed(spans, layer=layer, stream=stream or None)

        return computed

    def drive(self, seconds: float) -> None:
        """Sends and receives while a step is computed."""
        for pair in self._awake:
            pair.door.drive(time.monotonic() + seconds)

    @property
    def has_rank(self) -> bool:
        """Whether a rank computes in this process."""
        return self._tier is not None

    @property
    def counts(self) -> HandedCounts:
        """What this process has handed over and taken in, in all pairs so far."""
        return sum((_counts_of(each.door) for each in self._pairs.values()), self._closed_counts)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do at once."""
        return any(pair.door.has_work for pair in self._awake)

    @property
    def waitables(self) -> list[Waitable]:
        """Connections to wait for."""
        return [each for pair in self._awake for each in pair.door.waitables]

    @property
    def descriptors(self) -> list[int]:
        """File descriptors to wait for beside them."""
        found = [each for pair in self._awake for each in pair.door.descriptors]
        return [*found, self._watched.fileno()]

    def next_deadline(self) -> float | None:
        """When to call `step` at the latest, on the monotonic clock."""
        dues = [pair.door.next_deadline() for pair in self._awake]
        dues += [self._rest_until, self._listener.alarm]
        first = min(due for due in dues if due is not None)
        return None if first == math.inf else first

    def close_pairs(self) -> None:
        """Closes all pairs: the router that introduced them is gone."""
        for names in list(self._pairs):
            self.close_pair(*names)

    def close(self) -> None:
        """Closes all pairs and listens no more; may be called twice."""
        self.close_pairs()
        self._watched.close()
        self._listener.close()
        if self._relay is not None:
            self._relay.release()
            self._relay = None

    def _sending(self, decode: str) -> LocalPrefillHandoff | PrefillHandoffRank | None:
        """The pair in which this rank sends to a decode instance, unless it was closed."""
        door = self.door(self.spec.name, decode)
        return door if isinstance(door, LocalPrefillHandoff | PrefillHandoffRank) else None

    def _may_use_nixl(self) -> bool:
        if self._table.transport == AUTO:
            return is_installed() and not is_local(self.address)
        return self._table.transport == NIXL

    @property
    def _awake(self) -> list[_Pair]:
        return [pair for pair in self._pairs.values() if not pair.rests]

    @property
    def _resting(self) -> list[_Pair]:
        return [pair for pair in self._pairs.values() if pair.rests]

    def _wake(self, pair: _Pair) -> None:
        if not pair.rests:
            return
        pair.rests = False
        for fd in pair.descriptors:
            self._watchers[fd].remove(pair)
            if not self._watchers[fd]:
                del self._watchers[fd]
                self._watched.unregister(fd)
        self._rest_until = min((each.until for each in self._resting), default=math.inf)

    def _wake_called(self, now: float) -> None:
        """Wakes the resting pairs that have something to do."""
        called = self._watched.poll(0, CALLED_MAX)
        alarm = self._listener.alarm
        if not called and now < self._rest_until and (alarm is None or now < alarm):
            return
        woken = [pair for fd, _ in called for pair in self._watchers.get(fd, ())]
        woken += [pair for pair in self._resting if pair.until <= now]
        listener = self._listener.descriptor
        if any(fd == listener for fd, _ in called) or (alarm is not None and alarm <= now):
            # Also a caller whose pair is not open: otherwise the descriptor stays readable.
            self._listener.look(frozenset())
            woken += self._resting
        for pair in woken:
            self._wake(pair)

    def _let_rest(self, pair: _Pair, now: float) -> None:
        """Lets a pair rest if it was not used lately, and waits for descriptors only."""
        if now < pair.used_at + REST_S or pair.door.has_work:
            return
        lines = [each for each in pair.door.waitables if not isinstance(each, ListenerShare)]
        if lines or pair.door.statistics().under_way:
            return
        due = pair.door.next_deadline()
        pair.rests, pair.until = True, math.inf if due is None else due
        # That of the listener, which all pairs share, is always watched; a call wakes them all.
        pair.descriptors = list({*pair.door.descriptors} - {self._listener.descriptor})
        for fd in pair.descriptors:
            if fd not in self._watchers:
                self._watched.register(fd, select.EPOLLIN)
            self._watchers.setdefault(fd, []).append(pair)
        self._rest_until = min(self._rest_until, pair.until)

    def _settings(self, pair: PairSpec) -> HandoffSettings:
        """The settings with the share of the landing memory that one pair gets."""
        settings = handoff_settings(self.spec.config, self.spec.engine.device)
        ranks, peers_max = pair.prefill.ranks, self._table.peers_max
        bounds = bounds_of_pair(settings.bounds, prefill_ranks=ranks, peers_max=peers_max)
        return replace(settings, bounds=bounds)

    def _open_side(
        self, pair: HandoffPair, settings: HandoffSettings, *, decodes: bool
    ) -> PairDoor:
        """The part of a rank, of an engine whose one rank is here, or of a scheduler alone."""
        options: dict[str, Any] = {"kv": self._tier, "rank": self._rank, "settings": settings}
        options |= {"timeout_s": OPEN_S, "listener": self._listener}
        door: PairDoor
        if decodes:
            folder = Path(self.spec.folder) if self.spec.folder else None
            door = open_decode(pair, folder=folder, **options)
        else:
            door = open_prefill(pair, **options)
        return door


def peers_of(
    spec: InstanceSpec,
    architecture: Architecture,
    *,
    tier: TensorTier | None,
    rank: int | None = None,
) -> Peers | None:
    """The pairs of a process, if its instance takes part in handoffs.

    Raises `UnavailableError`: there is no free address.
    """
    if not spec.hands_over:
        return None
    return Peers(spec, architecture, tier=tier, rank=rank)


def bounds_of_pair(bounds: HandoffBounds, *, prefill_ranks: int, peers_max: int) -> HandoffBounds:
    """What one pair gets of the memory of all: each prefill rank needs an area at least."""
    share = max(bounds.landing_bytes_max // peers_max, bounds.area_bytes * prefill_ranks)
    retired = max(bounds.area_bytes, min(bounds.retired_bytes_max, share))
    return replace(bounds, landing_bytes_max=share, retired_bytes_max=retired)


def pair_of(
    spec: InstanceSpec, pair: PairSpec, architecture: Architecture, *, weights: str
) -> HandoffPair:
    """A pair for the handoff: both instances, and all their ranks, compute the same."""
    return HandoffPair(
        prefill=_engine(spec, pair.prefill, f">{pair.decode.name}.{pair.number}", architecture),
        decode=_engine(spec, pair.decode, f"<{pair.prefill.name}.{pair.number}", architecture),
        model=spec.config.model.name,
        weights=f"{weights} {spec.config.model.kv_dtype}",
        checksum="xxh3" if spec.engine.device == "cpu" else "mix64",
        secret=spec.handoff_secret,
        transport=(spec.config.handoff or HandoffTable()).transport,
    )


def _engine(
    spec: InstanceSpec, engine: EngineSpec, direction: str, architecture: Architecture
) -> HandoffEngine:
    layouts = []
    for rank in range(engine.ranks):
        heads = share_of(architecture, rank=rank, ranks=engine.ranks).kv_heads
        layouts.append(
            Layout.split(
                layers=range(architecture.layers),
                heads=HeadRange(first=heads.start, count=len(heads), total=architecture.kv_heads),
                channels=architecture.head_dim,
                dtype=DType.parse(spec.engine.dtype),
                block_tokens=spec.config.cache.block_tokens,
                block_count=1,  # The other side need not know how many there are.
            )
        )
    return HandoffEngine(
        name=f"{engine.name}{direction}",
        address=engine.address,
        rank_addresses=tuple(engine.rank_addresses),
        layouts=tuple(layouts),
        listener=engine.name,
    )


def _counts_of(door: PairDoor) -> HandedCounts:
    found = door.statistics()
    sends = isinstance(door, PrefillHandoff | PrefillHandoffRank)
    return HandedCounts(0 if sends else found.parts, found.bytes, found.landing_bytes)


def _addresses(spec: InstanceSpec) -> list[str]:
    """Where a process may listen: a socket of this machine, or a port of `serve.ports`."""
    host = spec.engine.handoff_host
    if not host:
        return [f"ipc://{socket_path(Path(spec.folder))}"] if spec.folder else [IPC]
    return [f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"]
