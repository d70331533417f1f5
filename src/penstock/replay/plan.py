"""A plan: one trace, replayed with many sizes of tiers, policies and ways to write; as values.

| step      | takes                              | says                                            |
|-----------|------------------------------------|-------------------------------------------------|
| one pass  | as long as to read the trace       | what LRU finds in every size: the first answer  |
| the bound | seconds                            | what any policy could find                      |
| replays   | most of the time, on several cores | what each configuration finds                   |

The pass is right to the token for LRU with `write_through`, where nothing takes time: a host tier
has all that the device has, so that together they are one LRU of the host's size. These are not
replayed. Tests compare the pass with the replay.

With `exclusive`, one LRU over both rooms finds about as much. Where another configuration of the
same sizes finds clearly more than that, this says enough: it is not replayed, and its row says so.

Every replay is a process' work of its own: it reads the trace again, so that the memory of a plan
does not grow with its trace.
"""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from penstock.cache.eviction import POLICIES
from penstock.cache.settings import (
    BLOCKS_MAX,
    CacheSettings,
    TierSettings,
    WriteKind,
    WritePolicy,
)
from penstock.config import parse_config
from penstock.errors import ConfigError, UnavailableError
from penstock.replay.advice import (
    CachePlan,
    CellFound,
    PlanCell,
    PlanRow,
    notes_on,
    recommend,
    sentence_on_the_gap,
)
from penstock.replay.curve import LruCurve
from penstock.replay.report import report_on
from penstock.replay.simulation import GIB, BestPossible, Replay, Speeds, useful_blocks
from penstock.replay.trace import TraceReader, natural_block_tokens
from penstock.vocabulary.hints import NO_HINTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.replay.trace import TraceRequest


LRU = next(iter(POLICIES))
ADAPTIVE = next(reversed(POLICIES))
"""The built-in policies begin with LRU and end with the one that adapts itself to the traffic."""
WRITES = (WriteKind.WRITE_THROUGH.value, WriteKind.EXCLUSIVE.value)
"""Ways to write into a host tier that a plan knows; the others need settings of their own."""
HOST_SIZES = 3
"""How many sizes of a host tier are tried if none are given, each twice as large as the last."""
STRETCHES = (0.5, 1.0, 2.0)
"""How much longer the trace lasts: half the time is twice the load."""
ASK_S = 10.0
"""How long nothing ends in a pool before it is asked whether its processes live."""
KILL_S = 10.0
"""How long a process that was killed is waited for."""
CURVE_POINTS = 24
"""Of the curves of LRU and the bound, evenly spread over the sizes' logarithms."""
CLEARLY = 0.005
"""By how much another one has to find more than an estimate. On the shipped traces, `exclusive`
found up to 0.0001 more than estimated, and 0.012 less."""
READ_EVERY = 256
"""Requests between two reports of how far the first pass is."""


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked."""

    trace: str
    token_bytes: int
    device_gib: float
    id_tokens: int | None = None
    """Of the trace's `hash_ids`."""
    copies: dict[str, str] = {}
    """Where the content of a pipe lies."""
    host_gib: tuple[float, ...] = ()
    """`default_sizes` if empty."""
    disk_gib: tuple[float, ...] = (0.0,)
    policies: tuple[str, ...] = (LRU, ADAPTIVE)
    writes: tuple[str, ...] = WRITES
    """Into the host tier."""
    speeds: Speeds = Speeds()
    """With the rates of `host` and `disk`, where they are given."""


class _Work(NamedTuple):
    """What a process does: a replay, or the bound for some numbers of blocks."""

    settings: PlanSettings
    block_tokens: int
    cell: PlanCell | None
    capacities: tuple[int, ...] = ()


class Watch(Protocol):
    """Is told how far a plan is."""

    def reading(self, found: FirstPass, *, ended: bool) -> None:
        """So much of the trace was read."""

    def ended(self, found: tuple[PlanCell, CellFound] | None, done: int, total: int) -> None:
        """One more piece of work has ended: a replay with what it found, or the bound."""


def default_sizes(device_gib: float) -> tuple[float, ...]:
    """No host tier, and powers of two that are more than the device.

    Smaller ones would only have, with `write_through`, what the device has.
    """
    size = 2.0**-20
    while size <= device_gib:
        size *= 2
    return (0.0, *(size * 2**step for step in range(HOST_SIZES)))


def cells_of(settings: PlanSettings) -> list[PlanCell]:
    """The configurations of a plan, small ones first.

    Raises `ConfigError`: there is none: a disk needs a host tier above it.
    """
    cells = [
        PlanCell(policy=policy, write=write, host_gib=host, disk_gib=disk)
        for policy in dict.fromkeys(settings.policies)
        for disk in sorted(set(settings.disk_gib))
        for host in sorted(set(settings.host_gib or default_sizes(settings.device_gib)))
        for write in (dict.fromkeys(settings.writes) if host else ("",))
        if host or not disk
    ]
    if not cells:
        raise ConfigError("--host-gib", "is 0, must be more with a disk, which needs a host tier")
    return cells


class FirstPass:
    """What one reading of the trace says: its size, and what LRU finds in every room."""

    def __init__(self, settings: PlanSettings, block_tokens: int) -> None:
        self.settings = settings
        self.block_tokens = block_tokens
        self.curve = LruCurve()
        self.requests = self.refused = self.tokens = 0
        self._room = _blocks(settings, settings.device_gib, block_tokens)
        self._hinted = False

    def add(self, request: TraceRequest) -> None:
        """One more request."""
        if -(-request.token_count // self.block_tokens) > self._room:
            # Left out everywhere, also of replays and of the bound.
            self.refused += 1
            return
        self.requests += 1
        self.tokens += request.token_count
        self._hinted |= request.hints.given != NO_HINTS.given
        self.curve.add(request.keys, useful_blocks(request, self.block_tokens))

    def rate(self, gib: float) -> float:
        """The share of tokens that LRU finds in a room."""
        return self._rate_of(self.curve.found(_blocks(self.settings, gib, self.block_tokens)))

    def most(self) -> float:
        """The share that would be found if nothing ever left."""
        return self._rate_of(self.curve.most_found())

    def _rate_of(self, blocks: int) -> float:
        return blocks * self.block_tokens / (self.tokens or 1)

    def knows(self, cell: PlanCell) -> bool:
        """Whether a replay would find the same to the token."""
        return cell.write == WRITES[0] and self._follows(cell)

    def comes_close(self, cell: PlanCell) -> bool:
        """Whether a replay would find about what is estimated."""
        return cell.write == WRITES[1] and self._follows(cell)

    def _follows(self, cell: PlanCell) -> bool:
        settings = self.settings
        exact = settings.speeds.instant and self.curve.one_of == 1 and not self._hinted
        two_tiers = cell.host_gib >= settings.device_gib and not cell.disk_gib
        return exact and two_tiers and cell.policy == LRU

    def estimate(self, cell: PlanCell) -> float:
        """About what LRU finds with these sizes: rooms add up, or the largest has all."""
        sizes = (self.settings.device_gib, cell.host_gib, cell.disk_gib)
        return self.rate(sum(sizes) if cell.write == WRITES[1] else max(sizes))


class Planner:
    """Replays a trace with every configuration that is asked for.

    Args:
        settings: what is asked.
        jobs: how many processes work at a time; 1: this one alone.
        watch: is told how far it is.
    """

    def __init__(self, settings: PlanSettings, *, jobs: int, watch: Watch) -> None:
        self._settings = settings
        self._jobs = jobs
        self._watch = watch
        self._done = self._total = 0
        self._block_tokens = natural_block_tokens(
            settings.trace, id_tokens=settings.id_tokens, copies=settings.copies
        )
        self._cells = cells_of(settings)
        for cell in self._cells:
            # Refuses what cannot be, before anything runs.
            _cache_of(settings, cell, self._block_tokens)

    def run(self) -> CachePlan:
        """Does all the work.

        Raises `ConfigError`: the trace cannot be read, or none of its requests fits on the device;
        `UnavailableError`: a process was killed.
        """
        settings = self._settings
        first = self._read()
        sizes = self._curve_sizes()
        rooms = tuple(_blocks(settings, gib, self._block_tokens) for gib in sizes)
        device = PlanCell(policy=LRU, write="", host_gib=0.0, disk_gib=0.0)
        passed = self._cells if device in self._cells else []
        known = [cell for cell in passed if first.knows(cell)]
        close = [cell for cell in passed if first.comes_close(cell)]
        # What takes longest comes first, and that is also what the pass says least about.
        replayed = [cell for cell in reversed(self._cells) if cell not in (*known, *close)]
        stretched = 0 if settings.speeds.instant else len(STRETCHES) - 1
        self._total = 1 + len(replayed) + len(close) + stretched
        bound, *found = self._do([self._work(None, rooms), *map(self._work, replayed)])
        outcomes = _outcomes(replayed, found)
        for cell in known:
            outcomes[cell] = _found_by_the_pass(first, cell, outcomes[device])
        beaten = {cell: _estimated(first, cell, outcomes[device]) for cell in close}
        beaten = {cell: rough for cell, rough in beaten.items() if _beats(outcomes, cell, rough)}
        left = [cell for cell in close if cell not in beaten]
        self._total -= len(beaten)
        outcomes |= beaten | _outcomes(left, self._do(list(map(self._work, left))))
        blocks = msgspec.convert(bound, list[int])
        shares = (each * self._block_tokens / first.tokens for each in blocks)
        rates = dict(zip(sizes, shares, strict=True))
        rows = _rows(settings, {cell: outcomes[cell] for cell in self._cells}, rates)
        recommended = recommend(rows)
        return CachePlan(
            trace=settings.trace,
            block_tokens=self._block_tokens,
            token_bytes=settings.token_bytes,
            device_gib=settings.device_gib,
            rows=rows,
            bound=sorted(rates.items()),
            lru=[(gib, first.rate(gib)) for gib in sizes],
            most=first.most(),
            recommended=recommended,
            gap=sentence_on_the_gap(rows, recommended.cell),
            notes=notes_on(rows, settings.device_gib),
            loads=[] if stretched == 0 else self._loads(recommended.cell, rows, rates),
        )

    def _read(self) -> FirstPass:
        settings = self._settings
        first = FirstPass(settings, self._block_tokens)
        for number, request in enumerate(_requests_of(settings, self._block_tokens), start=1):
            first.add(request)
            if number % READ_EVERY == 0:
                self._watch.reading(first, ended=False)
        if not first.requests:
            raise ConfigError(
                "--device-gib",
                f"is {settings.device_gib:g}, must have room for the blocks of a request: no "
                "request of the trace has it",
            )
        self._watch.reading(first, ended=True)
        return first

    def _work(self, cell: PlanCell | None, capacities: tuple[int, ...] = ()) -> _Work:
        return _Work(self._settings, self._block_tokens, cell, capacities)

    def _do(self, works: Sequence[_Work]) -> list[object]:
        results: dict[int, object] = {}
        for number, result in self._ended(list(enumerate(works))):
            results[number] = result
            self._done += 1
            cell = works[number].cell
            found = None if cell is None else (cell, msgspec.convert(result, CellFound))
            self._watch.ended(found, self._done, self._total)
        return [results[number] for number in range(len(works))]

    def _ended(self, works: list[tuple[int, _Work]]) -> Iterator[tuple[int, object]]:
        if self._jobs == 1 or len(works) <= 1:
            yield from map(_run_work, works)
            return
        # A fresh interpreter: a forked one would have this one's open files and locks.
        context = multiprocessing.get_context("spawn")
        before = multiprocessing.active_children()
        with ProcessPoolExecutor(min(self._jobs, len(works)), context) as pool:
            try:
                with _interrupts_left_to_this_process():
                    left = {pool.submit(_run_work, work) for work in works}
                while left:
                    ended, left = wait(left, ASK_S, FIRST_COMPLETED)
                    if not ended:
                        # The pool watches the processes that it had when it got work last, not
                        # one that it started for this work: further work has it look again.
                        with _interrupts_left_to_this_process():
                            pool.submit(_do_nothing).cancel()
                    for future in ended:
                        yield future.result()
            except BrokenProcessPool as error:
                raise UnavailableError(
                    "a process of the plan was killed, perhaps for want of memory: try fewer --jobs"
                ) from error
            finally:
                # After an error or Ctrl-C nobody waits for the replays that are under way, but for
                # the pool's thread: it would close what Python writes to at its own end.
                for process in set(multiprocessing.active_children()) - set(before):
                    process.kill()
                    process.join(KILL_S)
                pool.shutdown(cancel_futures=True)

    def _loads(
        self, cell: PlanCell, rows: list[PlanRow], rates: dict[float, float]
    ) -> list[PlanRow]:
        """The recommended configuration under more and less load."""
        cells = [msgspec.structs.replace(cell, stretch=factor) for factor in STRETCHES]
        same = next(row.found for row in rows if row.cell == cell)
        others = self._do([self._work(each) for each in cells if each != cell])
        found = [msgspec.convert(each, CellFound) for each in others]
        found.insert(STRETCHES.index(1.0), same)
        return _rows(self._settings, dict(zip(cells, found, strict=True)), rates)

    def _curve_sizes(self) -> list[float]:
        """The sizes of all configurations, and some between them for smooth curves."""
        sizes = {_total_gib(self._settings, cell) for cell in self._cells}
        least, most = min(sizes), max(sizes)
        ratio = (most / least) ** (1 / (CURVE_POINTS - 1))
        return sorted(sizes | {least * ratio**step for step in range(CURVE_POINTS - 1)})


def _outcomes(cells: list[PlanCell], found: list[object]) -> dict[PlanCell, CellFound]:
    return dict(zip(cells, (msgspec.convert(each, CellFound) for each in found), strict=True))


def _found_by_the_pass(first: FirstPass, cell: PlanCell, device: CellFound) -> CellFound:
    rate = first.estimate(cell)
    above = device.tier_rates[0]
    return msgspec.structs.replace(device, token_rate=rate, tier_rates=[above, rate - above])


def _estimated(first: FirstPass, cell: PlanCell, device: CellFound) -> CellFound:
    return msgspec.structs.replace(_found_by_the_pass(first, cell, device), estimated=True)


def _beats(outcomes: dict[PlanCell, CellFound], cell: PlanCell, rough: CellFound) -> bool:
    """Whether another configuration of the same sizes finds clearly more than an estimate."""
    return any(
        found.token_rate > rough.token_rate + CLEARLY
        for other, found in outcomes.items()
        if (other.host_gib, other.disk_gib) == (cell.host_gib, cell.disk_gib)
    )


def _rows(
    settings: PlanSettings, found: dict[PlanCell, CellFound], rates: dict[float, float]
) -> list[PlanRow]:
    return [
        PlanRow(
            cell=cell,
            total_gib=_total_gib(settings, cell),
            found=outcome,
            best_rate=rates[_total_gib(settings, cell)],
            tokens_per_gib=_gain(cell, found),
        )
        for cell, outcome in found.items()
    ]


def _gain(cell: PlanCell, found: dict[PlanCell, CellFound]) -> float | None:
    """What the last step in size of the host tier brought."""
    smaller = [
        other
        for other in found
        if (other.policy, other.disk_gib) == (cell.policy, cell.disk_gib)
        and other.write in {"", cell.write}
        and other.host_gib < cell.host_gib
    ]
    if not smaller:
        return None
    before = max(smaller, key=lambda other: other.host_gib)
    saved = (found[cell].token_rate - found[before].token_rate) * found[cell].tokens
    return saved / (cell.host_gib - before.host_gib)


def _total_gib(settings: PlanSettings, cell: PlanCell) -> float:
    return settings.device_gib + cell.host_gib + cell.disk_gib


def _blocks(settings: PlanSettings, gib: float, block_tokens: int) -> int:
    return int(gib * GIB) // (settings.token_bytes * block_tokens)


def _cache_of(settings: PlanSettings, cell: PlanCell, block_tokens: int) -> CacheSettings:
    sizes = {"device": settings.device_gib, "host": cell.host_gib, "disk": cell.disk_gib}
    tiers: list[TierSettings] = []
    for name, gib in sizes.items():
        blocks = _blocks(settings, gib, block_tokens)
        if gib and not 1 <= blocks <= BLOCKS_MAX:
            raise ConfigError(
                f"--{name}-gib",
                f"is {gib:g}, must {'be 0 or ' if tiers else ''}have room for 1 to {BLOCKS_MAX} "
                f"blocks of {settings.token_bytes * block_tokens} bytes",
            )
        if blocks:
            stored = name == "disk"
            write = WriteKind(cell.write) if name == "host" else WriteKind.WRITE_THROUGH
            tiers.append(
                TierSettings(
                    name=name,
                    slot_count=blocks,
                    eviction=cell.policy,
                    stored=stored,
                    write=WritePolicy(kind=write),
                )
            )
    return CacheSettings(
        device=tiers[0],
        tiers=tuple(tiers[1:]),
        block_tokens=block_tokens,
        block_bytes=settings.token_bytes * block_tokens,
    )


@contextmanager
def _interrupts_left_to_this_process() -> Iterator[None]:
    """Processes that are started meanwhile do not hear Ctrl-C: this one hears it, and ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _requests_of(settings: PlanSettings, block_tokens: int) -> Iterator[TraceRequest]:
    config = parse_config(
        f'version = 1\nmodel.name = "plan"\ncache = {{ block_tokens = {block_tokens}, blocks = 1 }}'
    )
    reader = TraceReader(config, id_tokens=settings.id_tokens, copies=settings.copies)
    return reader.read_all([settings.trace])


def _do_nothing() -> None:
    """Work for a pool that is to look at its processes."""


def _run_work(numbered: tuple[int, _Work]) -> tuple[int, object]:
    """What one process does; the result is made of plain values."""
    number, work = numbered
    settings, block_tokens = work.settings, work.block_tokens
    requests = _requests_of(settings, block_tokens)
    if work.cell is None:
        bound = BestPossible()
        room = _blocks(settings, settings.device_gib, block_tokens)
        for request in requests:
            # Those with more blocks than the device are left out, as in the replays.
            if -(-request.token_count // block_tokens) <= room:
                bound.add(request.keys, useful_blocks(request, block_tokens))
        return number, [bound.found(capacity) for capacity in work.capacities]
    cache = _cache_of(settings, work.cell, block_tokens)
    names = {tier.name for tier in cache.tiers}
    rates = {name: rate for name, rate in settings.speeds.tier_bytes_per_s.items() if name in names}
    replay = Replay(cache, replace(settings.speeds, tier_bytes_per_s=rates))
    replay.run(_stretched(requests, work.cell.stretch))
    report = report_on(replay, traces=[settings.trace])
    found = CellFound(
        requests=report.requests,
        refused=report.refused,
        tokens=report.tokens,
        token_rate=report.token_rate,
        tier_rates=[tier.token_rate for tier in report.tiers],
        first_token=report.first_token,
    )
    return number, msgspec.to_builtins(found)


def _stretched(requests: Iterator[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    if factor == 1.0:
        return requests
    return (request._replace(at_s=request.at_s * factor) for request in requests)
