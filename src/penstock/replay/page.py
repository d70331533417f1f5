"""The page of a plan, and what pages of this package share: a style, and charts of lines.

Nothing on it comes from elsewhere: no scripts, no fonts, no network. It is read in the order in
which people ask: what to take, why, what the curves show, and all that was tried.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from penstock.errors import counted
from penstock.replay.advice import CachePlan, PlanRow, name_of
from penstock.replay.report import LEFT_OUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 360, 56, 40, 16, 200
COLOURS = ("#2b7fd4", "#d9622b", "#149c76", "#8d63c9", "#b57a12", "#c0427f")
"""Of lines: to be told from each other, and from both backgrounds."""
STYLE = """
:root { --bg: #f4f6f8; --card: #fff; --ink: #17212b; --soft: #5a6875; --line: #dde3e9;
  --chosen: #e3f2ec; color-scheme: light dark }
@media screen and (prefers-color-scheme: dark) { :root { --bg: #0e141a; --card: #161f28;
  --ink: #e6edf3; --soft: #93a3b1; --line: #263341; --chosen: #17342b } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; margin: 0 auto;
  max-width: 1240px; padding: 22px 20px 40px; color: var(--ink); background: var(--bg);
  overflow-wrap: anywhere }
h1 { font-size: clamp(23px, 3.6vw, 34px); line-height: 1.2; letter-spacing: -.02em; margin: 8px 0 }
h2 { font-size: 18px; margin: 0 0 6px } .soft { color: var(--soft) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 16px 18px; margin: 14px 0; min-width: 0 } .card p { margin: 0 0 8px }
.card.chosen { border-left: 5px solid #149c76 } .card b { font-size: 19px }
.table, .chart { overflow-x: auto }
table { border-collapse: collapse; margin: 6px 0; white-space: nowrap; font-size: 14px }
th, td { padding: 4px 9px; text-align: right; border-bottom: 1px solid var(--line) }
th { font-weight: 500; color: var(--soft) }
tr.chosen { background: var(--chosen); font-weight: 600 }
svg { width: 100%; height: auto } svg text { fill: var(--soft) } .chart svg { min-width: 560px }
@media (max-width: 600px) {
  body { padding: 14px 10px 30px } .card { padding: 12px }
  table { white-space: normal; font-size: 13px } th, td { padding: 3px 6px }
  .wraps tr:first-child { display: none }
  .wraps table, .wraps tbody { display: block }
  .wraps tr + tr { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 12px;
    padding: 6px 4px; border-bottom: 1px solid var(--line) }
  .wraps td { display: block; border: 0; padding: 0; text-align: left }
  .wraps td:empty { display: none }
  .wraps td::before { content: attr(data-name) ": "; color: var(--soft); font-weight: 400 }
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
    """The rows that one line connects: the same policy, way to write and disk."""
    lines: dict[str, list[PlanRow]] = {}
    for cell in (row.cell for row in plan.rows if row.cell.host_gib):
        disk = f", disk {cell.disk_gib:g}" if cell.disk_gib else ""
        lines[f"{cell.policy}, {cell.write}{disk}"] = [
            row
            for row in plan.rows
            if (row.cell.policy, row.cell.disk_gib) == (cell.policy, cell.disk_gib)
            and row.cell.write in {"", cell.write}
        ]
    return lines or {plan.rows[0].cell.policy: plan.rows[:1]}


def _hit_rates(plan: CachePlan) -> str:
    sizes = round_sizes([row.total_gib for row in plan.rows])
    chart = LineChart(sizes, max(rate for _, rate in plan.bound) * 1.05)
    chart.add_axes(sizes, "GiB of device, host and disk", percent=True)
    series = _series(plan)
    for number, (name, rows) in enumerate(series.items()):
        points = [(row.total_gib, row.found.token_rate) for row in rows]
        chart.add_line(points, name, COLOURS[number % len(COLOURS)], number, "")
    chart.add_line(plan.lru, "one LRU of all", "#8899aa", len(series), "2 3")
    chart.add_line(plan.bound, "best possible", "#8899aa", len(series) + 1, "7 4")
    return f'<div class="chart">{chart.svg()}</div>'


def _what_the_rates_show(plan: CachePlan) -> str:
    (least, low), (most, high) = plan.lru[0], plan.lru[-1]
    steps = [
        (after[1] - before[1], before[0], after[0])
        for before, after in zip(plan.lru, plan.lru[1:], strict=False)
    ]
    text = (
        f"Share of prompt tokens that are found. One LRU over all the room finds {low:.2%} in "
        f"{least:g} GiB and {high:.2%} in {most:g} GiB"
    )
    if steps and high > low:
        gain, below, above = max(steps)
        text += (
            f", and gains most, {100 * gain:.2f} points, between {below:.3g} and {above:.3g} GiB"
        )
    return (
        f"{text}; {plan.most:.2%} would be found if nothing ever left: the rest comes once. No "
        f"policy can be above the dashed line: {plan.bound[0][1]:.2%} to {plan.bound[-1][1]:.2%}."
    )


def _gains(plan: CachePlan) -> str:
    gains = [row for row in plan.rows if row.tokens_per_gib is not None]
    if len({row.cell.host_gib for row in gains}) < 2:
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
    best = max(gains, key=lambda row: row.tokens_per_gib or 0.0)
    return _card(
        "What each GiB more brings",
        "<p>Tokens of the trace that were found with a host tier and not with the next smaller "
        f"one, for each GiB between them. Where a line falls, more memory brings less. The most, "
        f"{best.tokens_per_gib:,.0f}, has {escape(name_of(best.cell))}.</p>"
        f'<div class="chart">{chart.svg()}</div>',
    )


_COLUMNS: tuple[tuple[str, Callable[[PlanRow], str]], ...] = (
    ("policy", lambda row: row.cell.policy),
    ("write", lambda row: row.cell.write),
    ("host GiB", lambda row: f"{row.cell.host_gib:g}"),
    ("disk GiB", lambda row: f"{row.cell.disk_gib:g}" if row.cell.disk_gib else ""),
    ("found", lambda row: f"{'about ' * row.found.estimated}{row.found.token_rate:.2%}"),
    ("device", lambda row: _share(row, 0)),
    ("host", lambda row: _share(row, 1)),
    ("disk", lambda row: _share(row, 2)),
    ("best possible", lambda row: f"{row.best_rate:.2%}"),
    (
        "tokens/GiB more",
        lambda row: "" if row.tokens_per_gib is None else f"{row.tokens_per_gib:,.0f}",
    ),
    ("first token mean s", lambda row: _first(row, "mean_s")),
    ("p50 s", lambda row: _first(row, "p50_s")),
    ("p99 s", lambda row: _first(row, "p99_s")),
)


def _share(row: PlanRow, tier: int) -> str:
    rates = row.found.tier_rates
    return f"{rates[tier]:.2%}" if tier < len(rates) else ""


def _first(row: PlanRow, field: str) -> str:
    first = row.found.first_token
    return "" if first is None else f"{getattr(first, field):.2f}"


def columns_of(
    rows: Sequence[PlanRow], loads: Sequence[str] = ()
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The heads and texts of a table, for the page and for the terminal, without empty columns."""
    found = [(head, [text_of(row) for row in rows]) for head, text_of in _COLUMNS]
    if loads:
        found.insert(0, ("load", list(loads)))
    kept = [(head, texts) for head, texts in found if any(texts)]
    return tuple(head for head, _ in kept), list(zip(*(texts for _, texts in kept), strict=True))


def loads_of(plan: CachePlan) -> list[str]:
    """How much load the rows under other loads have, as they are called."""
    return [f"× {1 / row.cell.stretch:g}" for row in plan.loads]


def _table(rows: Sequence[PlanRow], plan: CachePlan, loads: Sequence[str] = ()) -> str:
    names, lines = columns_of(rows, loads)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = []
    for row, texts in zip(rows, lines, strict=True):
        chosen = ' class="chosen"' if row.cell == plan.recommended.cell else ""
        cells = "".join(
            f'<td data-name="{escape(name)}">{escape(text)}</td>'
            for name, text in zip(names, texts, strict=True)
            if text or not loads
        )
        body.append(f"<tr{chosen}>{cells}</tr>")
    return f'<div class="table wraps"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _card(title: str, inner: str, chosen: str = "") -> str:
    return f'<section class="card{chosen}"><h2>{escape(title)}</h2>{inner}</section>'


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def page_of(plan: CachePlan) -> str:
    """The page."""
    first = plan.rows[0].found
    left_out = [f"{first.refused:,} {LEFT_OUT}."] if first.refused else []
    chosen = plan.recommended
    cards = [
        _card(
            "Recommended",
            f"<p><b>{escape(name_of(chosen.cell))}</b></p>"
            + _paragraphs([chosen.reason, plan.gap, *plan.notes, *left_out]),
            " chosen",
        ),
        _card("Prompt tokens found", f"<p>{_what_the_rates_show(plan)}</p>{_hit_rates(plan)}"),
        _gains(plan),
        _card("All configurations", _table(plan.rows, plan)),
    ]
    if plan.loads:
        cards.append(_card("The same under other loads", _table(plan.loads, plan, loads_of(plan))))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Plan for {escape(plan.trace)}</title><style>{STYLE}</style></head><body>"
        f'<p class="soft">Penstock plan</p><h1>{escape(plan.trace)}</h1>'
        f'<p class="soft">{first.requests:,} requests, {first.tokens:,} prompt tokens, blocks of '
        f"{counted(plan.block_tokens, 'token')}, {plan.token_bytes:,} bytes of KV a token, "
        f"{plan.device_gib:g} GiB on the device.</p>{''.join(cards)}"
        "<p class=\"soft\">Replayed with Penstock's own cache; times are a model's.</p>"
        "</body></html>\n"
    )
