"""A plan as one page for a browser: no scripts, no network, pictures as inline SVG."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from penstock.replay.report import LEFT_OUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.replay.plan import CachePlan, PlanRow

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
