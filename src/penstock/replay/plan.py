"""A plan: one trace, replayed with many sizes of tiers and policies.

Every replay of a plan is a process' work of its own: it reads the trace again, so that the memory
of a plan does not grow with its trace. The bound is one more such work, for all sizes at once.

What is recommended is the cheapest of what comes close: of all configurations that find at least
`ENOUGH` of what the best of them finds, the one with the least disk and memory. Memory counts
first: a GiB of it costs more than one of a disk.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.cache.settings import CacheSettings, TierSettings
from penstock.config import parse_config
from penstock.config.values import BLOCKS_MAX
from penstock.errors import ConfigError, UnavailableError
from penstock.replay.best import BestPossible
from penstock.replay.report import ReplayReport, report_on
from penstock.replay.simulation import GIB, Replay, Speeds, useful_blocks
from penstock.replay.trace import TraceReader, natural_block_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.replay.trace import TraceRequest

ENOUGH = 0.9
STRETCHES = (0.5, 1.0, 2.0)
"""How much longer the trace lasts: half the time is twice the load."""
KILL_S = 10.0
"""How long a process that was killed is waited for."""
BOUND_POINTS = 24
"""Of the curve of the bound, evenly spread over the sizes' logarithms."""


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked."""

    trace: str
    token_bytes: int
    device_gib: float
    host_gib: tuple[float, ...]
    disk_gib: tuple[float, ...] = (0.0,)
    policies: tuple[str, ...] = ("lru",)
    prefill_tokens_per_s: float = math.inf
    output_tokens_per_s: float = math.inf
    tier_bytes_per_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Of `host` and `disk`, where it is given."""

    @property
    def timed(self) -> bool:
        """Whether anything takes time."""
        rates = (self.prefill_tokens_per_s, self.output_tokens_per_s)
        return bool(self.tier_bytes_per_s) or not all(map(math.isinf, rates))


class PlanCell(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration to replay."""

    policy: str
    host_gib: float
    disk_gib: float
    stretch: float = 1.0


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one configuration finds."""

    cell: PlanCell
    total_gib: float
    """Of device, host and disk."""
    report: ReplayReport
    best_rate: float
    """What any policy could find in the same room."""
    tokens_per_gib: float | None
    """Tokens more than with the next smaller size of the tier, for each GiB more."""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration to take, and why."""

    cell: PlanCell
    reason: str


class CachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result; `--json` writes it."""

    trace: str
    block_tokens: int
    token_bytes: int
    device_gib: float
    rows: list[PlanRow]
    bound: list[tuple[float, float]]
    """Total GiB, and the share of prompt tokens that any policy could find."""
    recommended: Recommendation
    loads: list[PlanRow]
    """The recommended configuration with the trace stretched; empty where nothing takes time."""


class _Work(NamedTuple):
    """What a process does: a replay, or the bound for some numbers of blocks."""

    settings: PlanSettings
    block_tokens: int
    cell: PlanCell | None
    capacities: tuple[int, ...] = ()


def cells_of(settings: PlanSettings) -> list[PlanCell]:
    """The configurations of a plan, small ones first.

    Raises `ConfigError`: there is none: a disk needs a host tier above it.
    """
    cells = [
        PlanCell(policy=policy, host_gib=host, disk_gib=disk)
        for policy in dict.fromkeys(settings.policies)
        for disk in sorted(set(settings.disk_gib))
        for host in sorted(set(settings.host_gib))
        if host or not disk
    ]
    if not cells:
        raise ConfigError("--host-gib", "is 0, must be more with a disk, which needs a host tier")
    return cells


class Planner:
    """Replays a trace with every configuration that is asked for.

    Args:
        settings: what is asked.
        jobs: how many processes work at a time; 1: this one alone.
        progress: is told how many pieces of work have ended, and of how many.
    """

    def __init__(
        self, settings: PlanSettings, *, jobs: int, progress: Callable[[int, int], None]
    ) -> None:
        self._settings = settings
        self._jobs = jobs
        self._progress = progress
        self._done = 0
        self._block_tokens = natural_block_tokens(settings.trace)
        self._cells = cells_of(settings)
        for cell in self._cells:
            # Refuses what cannot be, before anything runs.
            _cache_of(settings, cell, self._block_tokens)
        self._total = 1 + len(self._cells) + (len(STRETCHES) - 1 if settings.timed else 0)

    def run(self) -> CachePlan:
        """Does all the work.

        Raises `ConfigError`: the trace cannot be read, or none of its requests fits on the device;
        `UnavailableError`: a process was killed.
        """
        settings = self._settings
        sizes = self._bound_sizes()
        rooms = tuple(_blocks(settings, gib, self._block_tokens) for gib in sizes)
        bound, *found = self._do([self._work(None, rooms), *map(self._work, self._cells)])
        reports = [msgspec.convert(each, ReplayReport) for each in found]
        tokens = reports[0].tokens
        if not tokens:
            raise ConfigError(
                "--device-gib",
                f"is {settings.device_gib:g}, must have room for the blocks of a request: no "
                "request of the trace has it",
            )
        shares = (blocks * self._block_tokens / tokens for blocks in msgspec.convert(bound, list))
        rates = dict(zip(sizes, shares, strict=True))
        rows = _rows(settings, self._cells, reports, rates)
        recommended = recommend(rows)
        return CachePlan(
            trace=settings.trace,
            block_tokens=self._block_tokens,
            token_bytes=settings.token_bytes,
            device_gib=settings.device_gib,
            rows=rows,
            bound=sorted(rates.items()),
            recommended=recommended,
            loads=self._loads(recommended.cell, rows, rates) if settings.timed else [],
        )

    def _work(self, cell: PlanCell | None, capacities: tuple[int, ...] = ()) -> _Work:
        return _Work(self._settings, self._block_tokens, cell, capacities)

    def _do(self, works: Sequence[_Work]) -> list[object]:
        results: dict[int, object] = {}
        for number, result in self._ended(list(enumerate(works))):
            results[number] = result
            self._done += 1
            self._progress(self._done, self._total)
        return [results[number] for number in range(len(works))]

    def _ended(self, works: list[tuple[int, _Work]]) -> Iterator[tuple[int, object]]:
        if self._jobs == 1 or len(works) == 1:
            yield from map(_run_work, works)
            return
        # A fresh interpreter: a forked one would have this one's open files and locks.
        context = multiprocessing.get_context("spawn")
        before = multiprocessing.active_children()
        with ProcessPoolExecutor(min(self._jobs, len(works)), context) as pool:
            try:
                with _interrupts_left_to_this_process():
                    futures = [pool.submit(_run_work, work) for work in works]
                for future in as_completed(futures):
                    yield future.result()
            except BrokenProcessPool as error:
                raise UnavailableError(
                    "a process of the plan was killed, perhaps for want of memory: try fewer --jobs"
                ) from error
            finally:
                # After an error or Ctrl-C nobody waits for the replays that are under way.
                pool.shutdown(wait=False, cancel_futures=True)
                for process in set(multiprocessing.active_children()) - set(before):
                    process.kill()
                    process.join(KILL_S)

    def _loads(
        self, cell: PlanCell, rows: list[PlanRow], rates: dict[float, float]
    ) -> list[PlanRow]:
        """The recommended configuration under more and less load."""
        cells = [msgspec.structs.replace(cell, stretch=factor) for factor in STRETCHES]
        same = next(row.report for row in rows if row.cell == cell)
        others = self._do([self._work(each) for each in cells if each != cell])
        reports = [msgspec.convert(each, ReplayReport) for each in others]
        reports.insert(STRETCHES.index(1.0), same)
        return _rows(self._settings, cells, reports, rates)

    def _bound_sizes(self) -> list[float]:
        """The sizes of all configurations, and some between them for a smooth curve."""
        sizes = {_total_gib(self._settings, cell) for cell in self._cells}
        least, most = min(sizes), max(sizes)
        ratio = (most / least) ** (1 / (BOUND_POINTS - 1))
        return sorted(sizes | {least * ratio**step for step in range(BOUND_POINTS - 1)})


def recommend(rows: Sequence[PlanRow]) -> Recommendation:
    """The configuration with the least memory, and then disk, that finds nearly the most."""
    most = max(row.report.token_rate for row in rows)
    enough = [row for row in rows if row.report.token_rate >= ENOUGH * most]
    chosen = min(
        enough, key=lambda row: (row.cell.host_gib, row.cell.disk_gib, -row.report.token_rate)
    )
    largest = max(row.total_gib for row in rows)
    # Where more still brings much, what is best was not among them.
    advice = (
        " It is the largest that was tried: try larger ones."
        if (len(rows) > 1 and chosen.total_gib == largest)
        else ""
    )
    best = f"the {most:.2%} that the best configuration here finds, of up to {largest:g} GiB"
    why = f"No smaller host tier finds {ENOUGH:.0%} of {best}.{advice}"
    if not chosen.cell.host_gib:
        why = f"That is at least {ENOUGH:.0%} of {best}, so host memory adds little."
    if not any(row.cell.host_gib for row in rows):
        why = "No host tier was tried."
    elif not most:
        why = "No configuration here finds anything: no prompt comes back while it is kept."
    return Recommendation(
        cell=chosen.cell,
        reason=(
            f"It finds {chosen.report.token_rate:.2%} of prompt tokens with "
            f"{chosen.total_gib:g} GiB in all. {why}"
        ),
    )


def _rows(
    settings: PlanSettings,
    cells: Sequence[PlanCell],
    reports: Sequence[ReplayReport],
    rates: dict[float, float],
) -> list[PlanRow]:
    found = dict(zip(cells, reports, strict=True))
    return [
        PlanRow(
            cell=cell,
            total_gib=_total_gib(settings, cell),
            report=report,
            best_rate=rates[_total_gib(settings, cell)],
            tokens_per_gib=_gain(cell, found),
        )
        for cell, report in found.items()
    ]


def _gain(cell: PlanCell, found: dict[PlanCell, ReplayReport]) -> float | None:
    """What the last step in size brought: of the host tier, or else of the disk."""
    smaller = [
        other
        for other in found
        if (other.policy, other.disk_gib) == (cell.policy, cell.disk_gib)
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
            tiers.append(
                TierSettings(name=name, slot_count=blocks, eviction=cell.policy, stored=stored)
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


def _run_work(numbered: tuple[int, _Work]) -> tuple[int, object]:
    """What one process does; the result is made of plain values."""
    number, work = numbered
    settings, block_tokens = work.settings, work.block_tokens
    config = parse_config(
        f'version = 1\nmodel.name = "plan"\ncache = {{ block_tokens = {block_tokens}, blocks = 1 }}'
    )
    requests = TraceReader(config).read_all([settings.trace])
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
    speeds = Speeds(
        prefill_tokens_per_s=settings.prefill_tokens_per_s,
        output_tokens_per_s=settings.output_tokens_per_s,
        tier_bytes_per_s={
            name: rate for name, rate in settings.tier_bytes_per_s.items() if name in names
        },
    )
    replay = Replay(cache, speeds)
    replay.run(_stretched(requests, work.cell.stretch))
    return number, msgspec.to_builtins(report_on(replay, traces=[settings.trace]))


def _stretched(requests: Iterator[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    if factor == 1.0:
        return requests
    return (request._replace(at_s=request.at_s * factor) for request in requests)
