"""A replay: the production cache machine driven by a trace, and the best any policy could do.

With `capacity` blocks and the whole future known, the block that is needed farthest ahead leaves
first, and a block that is needed later than all others is not kept at all. Requests need prefixes,
so a block is needed no later than the blocks after it: what leaves is always the end of a chain,
and the rule is the best that there is for prefixes, too.

The cache need not be simulated. All blocks whose next use is request `q` are found there together,
so it is enough to count, for each later request, how many blocks are kept for it.

Which request needs a block next is known at the end of a trace only. So that memory does not grow
with its blocks, the uses of each are brought together in a temporary file.

    arrive → acquire → loads over links → prefill → commit → decode → release
                 └── waits while there is no room

Requests are admitted in the order in which they arrive, and computed one at a time, in the order in
which their loads end. Each hop between two tiers is a link of its own, on which copies follow each
other. A rate that is not given is infinite: without any, each request has ended before the next one
comes, and the replay shows what the cache does and nothing of time.

The answer of a request takes room while it is decoded, if that takes time. Its blocks are not
published: a trace does not say their keys.
"""

from __future__ import annotations

import gc
import math
import tempfile
import weakref
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.cache.settings import BLOCKS_MAX, TierSettings
from penstock.cache.states import LeaseState
from penstock.config.values import DEVICE_NAME, UNSIZED_BLOCKS
from penstock.errors import CapacityError, ConfigError, NeverFitsError, UnavailableError
from penstock.machine.effects import Copy, Granted, LeaseChanged, answer
from penstock.machine.events import Acquire, Commit, Computed, CopyReport, Grow, ReleaseLease, Tick
from penstock.machine.machine import CacheMachine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import IO

    from numpy.typing import NDArray

    from penstock.cache.settings import CacheSettings
    from penstock.config import Config, TierKind
    from penstock.machine.effects import Effect
    from penstock.replay.trace import TraceRequest
    from penstock.vocabulary.keys import Key, LeaseId, OperationId


ROWS_IN_MEMORY = 1 << 20
"""Uses of blocks, of 16 bytes, before any are written: the shipped traces need no file."""
_PART_COUNT = 256
"""The file is read in so many parts: of a billion uses, 64 MB at a time."""
_PIECES_AT_ONCE = 1 << 16
_STALE_MIN = 64


class BestPossible:
    """Takes the requests of a trace in, then says what could have been found in a given room.

    A block is known by 64 bits of its key: among 30 million, two are the same one in 40,000 times.
    What is kept in memory are some 12 bytes for each pair of requests that have blocks in common.

    Args:
        rows_in_memory: uses of blocks that are kept before any are written to a file.
    """

    def __init__(self, *, rows_in_memory: int = ROWS_IN_MEMORY) -> None:
        self._count = 0
        self._rows_in_memory = rows_in_memory
        self._uses = _Shelf(2, rows_in_memory, lambda rows: rows[:, 0] >> np.uint64(56))
        """Rows of a block and a request that has it, times two; plus one if it may be found."""
        self._pieces: tuple[NDArray[np.uint64], NDArray[np.uint32]] | None = None

    def add(self, keys: Sequence[Key], useful: int) -> None:
        """One more request; only the first `useful` of its blocks may be found."""
        rows = np.empty((len(keys), 2), dtype=np.uint64)
        rows[:, 0] = np.fromiter(map(xxh3_64_intdigest, keys), dtype=np.uint64, count=len(keys))
        rows[:, 1] = 2 * self._count
        rows[:useful, 1] += np.uint64(1)
        self._uses.add(rows)
        self._count += 1

    def found(self, capacity: int) -> int:
        """How many blocks could have been found by all requests together."""
        pieces = self._in_order()
        found = size = 0
        kept: dict[int, int] = {}
        farthest: list[int] = []
        piece = next(pieces, None)
        for number in range(self._count):
            ready = kept.pop(number, 0)
            found += ready
            size -= ready
            while piece is not None and piece[0] == number:
                _, later, blocks = piece
                if later not in kept:
                    heappush(farthest, -later)
                kept[later] = kept.get(later, 0) + blocks
                size += blocks
                piece = next(pieces, None)
            while size > capacity:
                later = -farthest[0]
                gone = min(size - capacity, kept.get(later, 0))
                size -= gone
                if gone < kept.get(later, 0):
                    kept[later] -= gone
                else:
                    kept.pop(later, None)
                    heappop(farthest)
            if len(farthest) > 2 * len(kept) + _STALE_MIN:
                farthest = [-later for later in kept]
                heapify(farthest)
        return found

    def _in_order(self) -> Iterator[tuple[int, int, int]]:
        """Of the blocks that one request had last, how many another one needs next."""
        if self._pieces is None:
            self._pieces = self._gather()
        pairs, blocks = self._pieces
        for first in range(0, len(pairs), _PIECES_AT_ONCE):
            part = pairs[first : first + _PIECES_AT_ONCE]
            yield from zip(
                (part >> np.uint64(32)).tolist(),
                (part & np.uint64(0xFFFFFFFF)).tolist(),
                blocks[first : first + _PIECES_AT_ONCE].tolist(),
                strict=True,
            )

    def _gather(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Pairs of requests, the earlier one first and in order, and their numbers of blocks."""
        share = np.uint64(self._count // _PART_COUNT + 1)
        nexts = _Shelf(1, self._rows_in_memory, lambda rows: (rows[:, 0] >> np.uint64(32)) // share)
        for rows in self._uses.parts():
            order = np.argsort(rows[:, 0], kind="stable")
            names, uses = rows[order, 0], rows[order, 1]
            again = (names[1:] == names[:-1]) & (uses[1:] & np.uint64(1) == 1)
            # A key that occurs twice in a request is no later use.
            again &= uses[1:] >> np.uint64(1) != uses[:-1] >> np.uint64(1)
            before, after = uses[:-1][again] >> np.uint64(1), uses[1:][again] >> np.uint64(1)
            nexts.add((before << np.uint64(32) | after).reshape(-1, 1))
        self._uses.clear()
        counted = [np.unique(rows[:, 0], return_counts=True) for rows in nexts.parts()]
        nexts.clear()
        pairs = np.concatenate([each for each, _ in counted])
        return pairs, np.concatenate([count for _, count in counted]).astype(np.uint32)


class _Shelf:
    """Rows of numbers, in memory while they are few, then in parts of a temporary file."""

    def __init__(
        self,
        width: int,
        rows_in_memory: int,
        part_of: Callable[[NDArray[np.uint64]], NDArray[np.uint64]],
    ) -> None:
        self._width = width
        self._rows_in_memory = rows_in_memory
        self._part_of = part_of
        """The part that each of some rows belongs to."""
        self._rows: list[NDArray[np.uint64]] = []
        self._row_count = 0
        self._file: IO[bytes] | None = None
        self._written: list[tuple[int, list[int]]] = []
        """What was written together: where, and the rows before each part's."""

    def add(self, rows: NDArray[np.uint64]) -> None:
        """More rows; each part has its rows in the order in which they came."""
        self._rows.append(rows)
        self._row_count += len(rows)
        if self._row_count >= self._rows_in_memory:
            self._write()

    def parts(self) -> Iterator[NDArray[np.uint64]]:
        """All rows: those of a part together, the parts in their order."""
        if self._file is None:
            yield np.concatenate([np.empty((0, self._width), np.uint64), *self._rows])
            return
        self._write()
        for part in range(_PART_COUNT):
            yield np.concatenate([self._read(at, places, part) for at, places in self._written])

    def clear(self) -> None:
        """Forgets all rows."""
        self._rows, self._row_count, self._written = [], 0, []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        rows = np.concatenate([np.empty((0, self._width), np.uint64), *self._rows])
        self._rows, self._row_count = [], 0
        parts = self._part_of(rows)
        order = np.argsort(parts, kind="stable")
        places = np.searchsorted(parts[order], np.arange(_PART_COUNT + 1, dtype=np.uint64))
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - kept until `clear`
                weakref.finalize(self, self._file.close)
            at = self._file.seek(0, 2)
            self._file.write(rows[order].tobytes())
        except OSError as error:
            raise UnavailableError(
                f"the bound needs {rows.nbytes} bytes more in {tempfile.gettempdir()}: "
                f"{error.strerror or error}; set TMPDIR to a folder with room, or use --no-best"
            ) from error
        self._written.append((at, places.tolist()))

    def _read(self, at: int, places: list[int], part: int) -> NDArray[np.uint64]:
        assert self._file is not None
        row_bytes = 8 * self._width
        self._file.seek(at + places[part] * row_bytes)
        found = self._file.read((places[part + 1] - places[part]) * row_bytes)
        return np.frombuffer(found, dtype=np.uint64).reshape(-1, self._width)


GIB = 1 << 30
STEP_S = 0.02
"""How often the cache is told of a step while copies are under way: what a GPU takes to decode a
batch of an 8B model."""
OBJECTS_PER_COLLECTION = 1 << 20
"""While a trace is played, Python looks for circles of objects after so many more than are freed: a
replay makes next to none, and to look for them every 700 objects takes a fifth of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What the modelled engine and its links do in a second."""

    prefill_tokens_per_s: float = math.inf
    output_tokens_per_s: float = math.inf
    """Of each request; any number of them are decoded at a time."""
    tier_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """By the name of a tier: on one rank, in each direction, to and from the tier above."""

    @property
    def instant(self) -> bool:
        """Whether nothing takes time."""
        rates = (self.prefill_tokens_per_s, self.output_tokens_per_s)
        return not self.tier_bytes_per_s and all(map(math.isinf, rates))


def useful_blocks(request: TraceRequest, block_tokens: int) -> int:
    """How many of its blocks a request may find: at least one token is left to compute."""
    return (request.token_count - 1) // block_tokens


def sized_cache(config: Config, *, token_bytes: int = 0, device_blocks: int = 0) -> CacheSettings:
    """The settings of the cache that a configuration describes, with every tier in blocks.

    Raises `ConfigError`: the size of a tier is not known, or has no room for a block.
    """
    cache = config.cache
    block_bytes = token_bytes * cache.block_tokens
    device = cache.device
    if device_blocks and device is not None:
        device = replace(device, slot_count=device_blocks)
    elif device_blocks:
        device = TierSettings(name=DEVICE_NAME, slot_count=device_blocks)
    elif device is None:
        raise ConfigError(
            "cache.blocks", "is 0, must be given, or --device-blocks: how many the engine has"
        )
    parts = 1 if config.equal_ranks else cache.rank_count
    tiers = tuple(
        _sized_tier(index, tier, kind, block_bytes * (parts if tier.stored else 1))
        for index, (tier, kind) in enumerate(zip(cache.tiers, config.tier_kinds, strict=True))
    )
    # All ranks copy and report alike, so that one stands for all.
    return replace(cache, device=device, tiers=tiers, rank_count=1, block_bytes=block_bytes)


def _sized_tier(index: int, tier: TierSettings, kind: TierKind, block_bytes: int) -> TierSettings:
    if tier.slot_count != UNSIZED_BLOCKS or not kind.gib:
        return tier
    place = f"tiers[{index}].gib"
    if not block_bytes:
        raise ConfigError(place, f"is {kind.gib:g}, must come with --kv-bytes, those of a token")
    slots = int(kind.gib * GIB) // block_bytes
    if not 1 <= slots <= BLOCKS_MAX:
        raise ConfigError(
            place,
            f"is {kind.gib:g}, must have room for 1 to {BLOCKS_MAX} blocks of {block_bytes} bytes",
        )
    return replace(tier, slot_count=slots)


@dataclass(slots=True, eq=False)
class _Running:
    """A request that has a lease."""

    request: TraceRequest
    lease: LeaseId
    cached_tokens: int


@dataclass(slots=True, eq=False)
class LinkUse:
    """What went from one tier to another."""

    blocks: int = 0
    busy_s: float = 0.0
    free_at: float = 0.0


@dataclass(slots=True, eq=False)
class Tally:
    """What requests found, as they were admitted."""

    requests: int = 0
    refused: int = 0
    """Requests that have more blocks than the device."""
    lost: int = 0
    """Requests that lost their room while they waited for a load."""
    blocks: int = 0
    """Full blocks of all prompts: the touches of the trace."""
    tokens: int = 0
    tokens_by_tier: list[int] = field(default_factory=list)
    requests_by_tier: list[int] = field(default_factory=list)
    """Requests that found something in a tier."""
    misses: dict[str, list[int]] = field(default_factory=dict)
    """By reason: requests, and the tokens that these had to compute."""
    answers_without_room: int = 0
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    first_s: float = 0.0
    last_s: float = 0.0


class Replay:
    """Plays requests through a cache of its own.

    Args:
        settings: the cache; every tier has its size in blocks.
        speeds: how long computing and copies take; nothing takes time if not given.
        bound: is told of each request that gets room, for what could have been found at most.
    """

    def __init__(
        self,
        settings: CacheSettings,
        speeds: Speeds | None = None,
        bound: BestPossible | None = None,
    ) -> None:
        self.settings = settings
        self.speeds = speeds or Speeds()
        self.bound = bound
        self.machine = CacheMachine(settings, incarnation=1)
        names = self.machine.tier_names
        unknown = sorted(set(self.speeds.tier_bytes_per_s) - set(names[1:]))
        if unknown:
            known = ", ".join(names[1:]) or "none: there is no tier below the device"
            raise ConfigError("--bandwidth", f"names {unknown[0]!r}, must be one of {known}")
        if self.speeds.tier_bytes_per_s and not settings.block_bytes:
            raise ConfigError("--bandwidth", "must come with --kv-bytes, those of a token")
        self.tally = Tally(tokens_by_tier=[0] * len(names), requests_by_tier=[0] * len(names))
        self.links: dict[tuple[int, int], LinkUse] = {}
        self.compute_busy_s = 0.0
        self._block_s = [
            settings.block_bytes / self.speeds.tier_bytes_per_s.get(name, math.inf)
            for name in names
        ]
        self._compute_free_at = 0.0
        self._now = 0.0
        self._agenda: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._waiting: deque[TraceRequest] = deque()
        self._running: dict[LeaseId, _Running] = {}
        self._copies = 0
        """Copies under way."""
        self._ticking = False
        tiers = (settings.device, *settings.tiers)
        self._keeps_watermarks = any(tier is not None and tier.low_slots for tier in tiers)

    def run(self, requests: Iterable[TraceRequest]) -> None:
        """Plays all requests to their end."""
        usual = gc.get_threshold()
        gc.set_threshold(OBJECTS_PER_COLLECTION)
        try:
            self._play(requests)
        finally:
            gc.set_threshold(*usual)

    def _play(self, requests: Iterable[TraceRequest]) -> None:
        first = True
        for request in requests:
            if first:
                self.tally.first_s = request.at_s
                first = False
            self._advance(request.at_s)
            self._now = request.at_s
            self._waiting.append(request)
            self._admit()
        self._advance(math.inf)
        self.tally.last_s = self._now

    def _advance(self, until: float) -> None:
        """Does everything that is due up to a time."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= until:
            self._now, _, action, subject = heappop(agenda)
            action(subject)

    def _at(self, time: float, action: Callable[[Any], None], subject: object) -> None:
        heappush(self._agenda, (time, next(self._order), action, subject))

    def _admit(self) -> None:
        """Gives leases to requests that wait, in order, until one has to go on waiting."""
        while self._waiting:
            request = self._waiting[0]
            acquire = Acquire(
                request="",
                keys=request.keys,
                token_count=request.token_count,
                tenant=request.tenant,
                priority=request.hints.priority or 0,
                ttl_s=request.hints.ttl_s,
                keep_blocks=request.hints.keep_blocks(self.settings.block_tokens),
            )
            try:
                effects = self.machine.handle(acquire, self._now)
            except NeverFitsError:
                self._waiting.popleft()
                self.tally.refused += 1
                continue
            except CapacityError:
                if self._running or self._copies:
                    return
                # Nobody will make room: a quota, for instance, leaves too little.
                self._waiting.popleft()
                self.tally.refused += 1
                continue
            self._waiting.popleft()
            self._grant(request, answer(effects, Granted), effects)

    def _grant(self, request: TraceRequest, granted: Granted, effects: Sequence[Effect]) -> None:
        tally = self.tally
        tally.requests += 1
        tally.blocks += len(request.keys)
        tally.tokens += request.token_count
        if self.bound is not None:
            self.bound.add(request.keys, useful_blocks(request, self.settings.block_tokens))
        for tier, tokens in enumerate(granted.cached_by_tier):
            if tokens:
                tally.tokens_by_tier[tier] += tokens
                tally.requests_by_tier[tier] += 1
        miss = tally.misses.setdefault(granted.miss.reason.value, [0, 0])
        miss[0] += 1
        miss[1] += request.token_count - granted.cached_tokens
        running = _Running(request, granted.lease, granted.cached_tokens)
        self._running[granted.lease] = running
        self._carry_out(effects)
        if granted.state is LeaseState.READY:
            self._compute(running)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Copy):
                self._copy(effect)
            elif isinstance(effect, LeaseChanged):
                running = self._running[effect.lease]
                running.cached_tokens = effect.cached_tokens
                if effect.state is LeaseState.READY:
                    self._compute(running)
                elif effect.state is LeaseState.LOST:
                    self.tally.lost += 1
                    self._at(self._now, self._release, running)

    def _copy(self, copy: Copy) -> None:
        link = self.links.setdefault((copy.source, copy.target), LinkUse())
        blocks = len(copy.keys)
        seconds = blocks * self._block_s[max(copy.source, copy.target)]
        link.blocks += blocks
        link.busy_s += seconds
        link.free_at = max(self._now, link.free_at) + seconds
        self._copies += 1
        self._at(link.free_at, self._report, copy.operation)
        if seconds and not self._ticking:
            self._ticking = True
            self._at(self._now + STEP_S, self._step, None)

    def _step(self, _nothing: None) -> None:
        """A step of the engine while copies are under way: deadlines, and rates of links."""
        self._carry_out(self.machine.handle(Tick(), self._now))
        self._ticking = self._copies > 0
        if self._ticking:
            self._at(self._now + STEP_S, self._step, None)

    def _report(self, operation: OperationId) -> None:
        self._copies -= 1
        self._carry_out(self.machine.handle(CopyReport(operation=operation, rank=0), self._now))
        self._admit()

    def _compute(self, running: _Running) -> None:
        tokens = running.request.token_count - running.cached_tokens
        seconds = tokens / self.speeds.prefill_tokens_per_s
        self.compute_busy_s += seconds
        self._compute_free_at = max(self._now, self._compute_free_at) + seconds
        self._at(self._compute_free_at, self._computed, (running, tokens, seconds))

    def _computed(self, work: tuple[_Running, int, float]) -> None:
        running, tokens, seconds = work
        request, speeds = running.request, self.speeds
        if seconds:
            self.machine.handle(Computed(token_count=tokens, seconds=seconds), self._now)
        found = running.cached_tokens // self.settings.block_tokens
        commit = Commit(
            lease=running.lease, token_count=request.token_count, keys=request.keys[found:]
        )
        self._carry_out(self.machine.handle(commit, self._now))
        if not speeds.instant:
            self.tally.first_token_s.append(self._now - request.at_s)
        answer_s = request.output_tokens / speeds.output_tokens_per_s
        if answer_s:
            grow = Grow(
                lease=running.lease, token_count=request.token_count + request.output_tokens
            )
            try:
                self._carry_out(self.machine.handle(grow, self._now))
            except CapacityError:
                self.tally.answers_without_room += 1
        self._at(self._now + answer_s, self._release, running)

    def _release(self, running: _Running) -> None:
        del self._running[running.lease]
        self._carry_out(self.machine.handle(ReleaseLease(lease=running.lease), self._now))
        if self._keeps_watermarks:
            self._carry_out(self.machine.handle(Tick(), self._now))
        self._admit()
