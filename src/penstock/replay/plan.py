"""A plan: one trace, replayed with many sizes of tiers and policies; as values and as a page.

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
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.cache.settings import BLOCKS_MAX, CacheSettings, TierSettings
from penstock.config import parse_config
from penstock.errors import ConfigError, UnavailableError
from penstock.replay.report import LEFT_OUT, ReplayReport, report_on
from penstock.replay.simulation import GIB, BestPossible, Replay, Speeds, useful_blocks
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
    id_tokens: int | None = None
    """Of the trace's `hash_ids`."""
    copies: dict[str, str] = {}
    """Where the content of a pipe lies."""
    host_gib: tuple[float, ...]
    disk_gib: tuple[float, ...] = (0.0,)
    policies: tuple[str, ...] = ("lru",)
    speeds: Speeds = Speeds()
    """With the rates of `host` and `disk`, where they are given."""


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
        self._block_tokens = natural_block_tokens(
            settings.trace, id_tokens=settings.id_tokens, copies=settings.copies
        )
        self._cells = cells_of(settings)
        for cell in self._cells:
            # Refuses what cannot be, before anything runs.
            _cache_of(settings, cell, self._block_tokens)
        self._total = 1 + len(self._cells) + (0 if settings.speeds.instant else len(STRETCHES) - 1)

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
            loads=[] if settings.speeds.instant else self._loads(recommended.cell, rows, rates),
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
    reader = TraceReader(config, id_tokens=settings.id_tokens, copies=settings.copies)
    requests = reader.read_all([settings.trace])
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
    return number, msgspec.to_builtins(report_on(replay, traces=[settings.trace]))


def _stretched(requests: Iterator[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    if factor == 1.0:
        return requests
    return (request._replace(at_s=request.at_s * factor) for request in requests)


WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 360, 56, 40, 16, 150
COLOURS = ("#1b6ca8", "#c44e52", "#4c9f70", "#8b6bb1", "#b07d2b", "#4aa3a2")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  color: #222; background: #fff; overflow-wrap: anywhere; }
.table { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; white-space: nowrap; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
tr.chosen { background: #eef6ee; font-weight: 600; }
svg { width: 100%; height: auto; }
@media (max-width: 600px) {
  table { white-space: normal; font-size: 13px; } th, td { padding: .2rem .35rem; }
  .wraps tr:first-child { display: none; }
  .wraps table, .wraps tbody { display: block; }
  .wraps tr + tr { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 .8rem;
    padding: .4rem 0; border-bottom: 1px solid #8886; }
  .wraps td { display: block; border: 0; padding: 0; text-align: left; }
  .wraps td::before { content: attr(data-name) ": "; opacity: .7; }
}
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #1a1a1a; } th, td { border-color: #444; }
  tr.chosen { background: #23352a; } svg text { fill: #ddd; }
}
"""


STEPS = 5
"""Lines across a chart, about."""
SIZES_MAX = 12
"""Labels below a chart, about: more would touch each other."""


def round_step(least: float) -> float:
    """The first of 1, 2, 2.5 and 5 with zeros that is not less."""
    unit = 10.0 ** math.floor(math.log10(least))
    return next(unit * each for each in (1, 2, 2.5, 5, 10) if unit * each >= least * (1 - 1e-9))


def round_sizes(sizes: Sequence[float]) -> list[float]:
    """Round numbers on a logarithmic scale, from the last one below all sizes to the first above.

    They double: 1, 2, 4, 8 GiB are sizes that people have.
    """
    first = math.floor(math.log2(min(sizes)) + 1e-9)
    last = max(first + 1, math.ceil(math.log2(max(sizes)) - 1e-9))
    every = math.ceil((last - first + 1) / SIZES_MAX)
    numbers = [*range(first, last, every)]
    return [2.0**number for number in (*numbers, numbers[-1] + every)]


class LineChart:
    """Lines over sizes, which are drawn on a logarithmic scale."""

    def __init__(self, sizes: Sequence[float], highest: float) -> None:
        self._least = math.log(min(sizes))
        self._span = (math.log(max(sizes)) - self._least) or 1.0
        self._step = round_step((highest or 1.0) / STEPS)
        self._steps = math.ceil((highest or 1.0) / self._step - 1e-9)
        self._highest = self._step * self._steps
        self._parts: list[str] = []

    def place(self, size: float, value: float) -> tuple[float, float]:
        across = (math.log(size) - self._least) / self._span
        x = LEFT + across * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - value / self._highest * (HEIGHT - BOTTOM - TOP)
        return round(x, 1), round(y, 1)

    def add_axes(self, sizes: Sequence[float], label: str, *, percent: bool) -> None:
        for step in range(self._steps + 1):
            value = self._step * step
            y = self.place(sizes[0], value)[1]
            text = f"{100 * value:.4g}%" if percent else f"{value:,.6g}"
            self._parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#8884"/>'
                f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text}</text>'
            )
        for size in sizes:
            x = self.place(size, 0)[0]
            self._parts.append(
                f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{size:g}</text>'
            )
        self._parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">{escape(label)}</text>')

    def add_line(
        self,
        points: Sequence[tuple[float, float]],
        name: str,
        colour: str,
        row: int,
        dash: str,
        *,
        marks: bool = True,
    ) -> None:
        spots = [self.place(*point) for point in points]
        drawn = " ".join(f"{x},{y}" for x, y in spots)
        circles = (
            ""
            if dash or not marks
            else "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in spots)
        )
        y = TOP + 16 + 20 * row
        self._parts.append(
            f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"'
            f' stroke-dasharray="{dash}"/>{circles}'
            f'<line x1="{WIDTH - RIGHT + 12}" x2="{WIDTH - RIGHT + 32}" y1="{y - 4}" y2="{y - 4}"'
            f' stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            f'<text x="{WIDTH - RIGHT + 38}" y="{y}">{escape(name)}</text>'
        )

    def svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg"'
            f' font-size="12" role="img">{"".join(self._parts)}</svg>'
        )


def _series(plan: CachePlan) -> dict[str, list[PlanRow]]:
    """The rows that one line connects: the same policy and disk."""
    lines: dict[str, list[PlanRow]] = {}
    for row in plan.rows:
        disk = f", disk {row.cell.disk_gib:g} GiB" if row.cell.disk_gib else ""
        lines.setdefault(f"{row.cell.policy}{disk}", []).append(row)
    return lines


def _hit_rates(plan: CachePlan) -> str:
    sizes = round_sizes([row.total_gib for row in plan.rows])
    chart = LineChart(sizes, max(rate for _, rate in plan.bound) * 1.05)
    chart.add_axes(sizes, "GiB of device, host and disk", percent=True)
    for number, (name, rows) in enumerate(_series(plan).items()):
        points = [(row.total_gib, row.report.token_rate) for row in rows]
        chart.add_line(points, name, COLOURS[number % len(COLOURS)], number, "")
    chart.add_line(plan.bound, "best possible", "#888", len(_series(plan)), "5 4")
    return chart.svg()


def _gains(plan: CachePlan) -> str:
    gains = [row for row in plan.rows if row.tokens_per_gib is not None]
    if not gains:
        return ""
    sizes = round_sizes([row.total_gib for row in gains])
    chart = LineChart(sizes, max(1.0, *(row.tokens_per_gib or 0.0 for row in gains)) * 1.05)
    chart.add_axes(sizes, "GiB of device, host and disk", percent=False)
    for number, (name, rows) in enumerate(_series(plan).items()):
        points = [
            (row.total_gib, max(0.0, row.tokens_per_gib))
            for row in rows
            if row.tokens_per_gib is not None
        ]
        if points:
            chart.add_line(points, name, COLOURS[number % len(COLOURS)], number, "")
    return f"<h2>Tokens saved for each GiB more of host memory</h2>{chart.svg()}"


def row_texts(row: PlanRow) -> list[str]:
    """A row of the table, for the page and for the terminal."""
    first = row.report.first_token
    return [
        row.cell.policy,
        f"{row.cell.host_gib:g}",
        f"{row.cell.disk_gib:g}",
        f"{row.report.token_rate:.2%}",
        *(f"{tier.token_rate:.2%}" for tier in row.report.tiers),
        *[""] * (3 - len(row.report.tiers)),
        f"{row.best_rate:.2%}",
        "" if row.tokens_per_gib is None else f"{row.tokens_per_gib:,.0f}",
        "" if first is None else f"{first.p50_s:.2f}",
        "" if first is None else f"{first.p99_s:.2f}",
    ]


HEADS = (
    *("policy", "host GiB", "disk GiB", "found", "device", "host", "disk", "best possible"),
    *("tokens/GiB more", "first token p50 s", "p99 s"),
)


def _table(rows: Sequence[PlanRow], plan: CachePlan, first: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in (*(["load"] if first else []), *HEADS))
    body = []
    for number, row in enumerate(rows):
        chosen = ' class="chosen"' if row.cell == plan.recommended.cell else ""
        texts = [*([first[number]] if first else []), *row_texts(row)]
        names = (*(["load"] if first else []), *HEADS)
        cells = "".join(
            f'<td data-name="{escape(name)}">{escape(text)}</td>'
            for name, text in zip(names, texts, strict=True)
        )
        body.append(f"<tr{chosen}>{cells}</tr>")
    return f'<div class="table wraps"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def page_of(plan: CachePlan) -> str:
    """The page."""
    chosen = plan.recommended
    first = plan.rows[0].report
    left_out = f" {first.refused:,} {LEFT_OUT}." if first.refused else ""
    loads = ""
    if plan.loads:
        names = [f"× {1 / row.cell.stretch:g}" for row in plan.loads]
        loads = f"<h2>The same under other loads</h2>{_table(plan.loads, plan, names)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Plan for {escape(plan.trace)}</title><style>{STYLE}</style></head><body>"
        f"<h1>Plan for {escape(plan.trace)}</h1>"
        f"<p>{first.requests:,} requests, {first.tokens:,} prompt tokens, blocks of "
        f"{plan.block_tokens} tokens, {plan.token_bytes:,} bytes of KV a token, "
        f"{plan.device_gib:g} GiB on the device.{left_out}</p>"
        f"<p><strong>Recommended: {chosen.cell.host_gib:g} GiB of host memory, "
        f"{chosen.cell.disk_gib:g} GiB of disk, {escape(chosen.cell.policy)}.</strong> "
        f"{escape(chosen.reason)}</p>"
        f"<h2>Prompt tokens found</h2>{_hit_rates(plan)}{_gains(plan)}"
        f"<h2>All configurations</h2>{_table(plan.rows, plan)}{loads}"
        "<p>Replayed with Penstock's own cache; times are a model's.</p></body></html>\n"
    )
