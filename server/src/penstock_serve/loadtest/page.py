"""Runs of a load test as one page for a browser: no scripts, no network, pictures as inline SVG."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from penstock.toolkit import COLOURS, STYLE, LineChart
from penstock_serve.loadtest.report import notes_on, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock_serve.loadtest.report import AskedRecord, LoadReport

TICKS_MS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
CURVE_POINTS = 100
LEAST_MS = 0.01
"""The scale is logarithmic: less than this is drawn as this."""
OWN_STYLE = """
td:first-child, th:first-child { text-align: left; } ul { padding-left: 1.2rem; }
.wide { overflow-x: auto; }
"""


def _shares(
    title: str,
    reports: Sequence[LoadReport],
    value: Callable[[AskedRecord], float | None],
) -> str:
    """For each run, the share of answers that took at most so long."""
    found = []
    for report in reports:
        times = [value(each) for each in report.records if not each.error]
        sorted_ms = np.sort([1000 * each for each in times if each is not None])
        found.append(np.maximum(sorted_ms, LEAST_MS))
    drawn = [each for each in found if len(each)]
    if not drawn:
        return ""
    least, most = min(each[0] for each in drawn), max(each[-1] for each in drawn)
    ticks = [
        tick
        for number, tick in enumerate(TICKS_MS)
        if TICKS_MS[min(number + 1, len(TICKS_MS) - 1)] >= least
        and TICKS_MS[max(number - 1, 0)] <= most
    ] or [float(least)]
    chart = LineChart([*ticks, float(least), float(most)], 1.0)
    chart.add_axes(ticks, "ms, logarithmic; the curve shows the share of answers", percent=True)
    for number, (report, times_ms) in enumerate(zip(reports, found, strict=True)):
        if not len(times_ms):
            continue
        shares = np.linspace(0, 1, CURVE_POINTS + 1)[1:]
        points = [(float(np.quantile(times_ms, share)), float(share)) for share in shares]
        colour = COLOURS[number % len(COLOURS)]
        chart.add_line(points, report.label, colour, number, "", marks=False)
    return f"<h2>{escape(title)}</h2>{chart.svg()}"


def _table(reports: Sequence[LoadReport]) -> str:
    head, *rows = table_of(reports)
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>'


def _asked(report: LoadReport) -> str:
    settings = ", ".join(
        f"{name} {value}" for name, value in report.settings.items() if value is not None
    )
    return (
        f"<li><strong>{escape(report.label)}</strong>: {escape(report.model)} at "
        f"{escape(report.url)}; {report.answered:,} of {report.requests:,} requests answered in "
        f"{report.seconds:.1f} s; {escape(settings)}</li>"
    )


def load_page(reports: Sequence[LoadReport]) -> str:
    """The page."""
    title = " against ".join(each.label for each in reports)
    notes = "".join(f"<li>{escape(note)}</li>" for note in notes_on(reports))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load: {escape(title)}</title><style>{STYLE}{OWN_STYLE}</style></head><body>"
        f"<h1>Load: {escape(title)}</h1><ul>{''.join(map(_asked, reports))}</ul>"
        f"{f'<ul>{notes}</ul>' if notes else ''}{_table(reports)}"
        f"{_shares('Time to first token', reports, lambda each: each.first_token_s)}"
        f"{_shares('Time a token', reports, lambda each: each.token_s)}"
        f"{_shares('End to end', reports, lambda each: each.end_to_end_s)}"
        "<p>Measured by <code>penstock load</code>; times of whole answers alone. "
        "“better”: how many times better than the first column.</p></body></html>\n"
    )
