"""Draws the charts of `docs/performance.md` and of the README from the tables of that page.

    python -m lab.charts

A chart names the tables' rows and columns that it shows, and nothing else: a figure is changed in
its table, and a test compares the stored charts with new ones.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "assets"
PAGE = ROOT / "docs" / "performance.md"

WIDTH, LABEL_WIDTH, VALUE_WIDTH = 760, 250, 90
BAR_HEIGHT, BAR_STEP, PANEL_HEAD, MARGIN = 18, 26, 34, 18
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")

STYLE = """
.card { fill: #ffffff; stroke: #d5dbe1 } text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 } .note { fill: #57606a } .ours { fill: #00897b } .other { fill: #a8b3bd }
@media (prefers-color-scheme: dark) {
  .card { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 } .note { fill: #9198a1 }
  .ours { fill: #2dd4bf } .other { fill: #4d5761 }
}"""


class Bar(NamedTuple):
    """One figure of a table, and the words beside it."""

    label: str
    row: str
    """The first cell of the table's row, without emphasis."""
    column: str
    unit: str
    ours: bool = False


class Panel(NamedTuple):
    """Bars that share a scale."""

    title: str
    note: str
    bars: tuple[Bar, ...]


def _sides(row: str, unit: str) -> tuple[Bar, ...]:
    names = {
        "without a connector": "no connector",
        "vLLM's OffloadingConnector": "OffloadingConnector",
        "LMCache 0.5.6": "LMCache 0.5.6",
        "Penstock": "Penstock",
    }
    return tuple(
        Bar(label, row, column, unit, ours=column == "Penstock") for label, column in names.items()
    )


def _against_vllm(row: str) -> tuple[Bar, ...]:
    return (
        Bar("Penstock", row, "Penstock", "ms", ours=True),
        Bar("vLLM 0.32", row, "vLLM 0.32", "ms"),
    )


def _on_gpu(row: str, unit: str = "ms") -> tuple[Bar, ...]:
    names = {
        "without a connector": "no connector",
        "vLLM's OffloadingConnector": "OffloadingConnector",
        "Penstock": "Penstock",
        "Penstock, layer by layer": "Penstock, `layerwise`",
    }
    return tuple(
        Bar(label, row, column, unit, ours="Penstock" in column) for label, column in names.items()
    )


CHARTS = {
    "chart-vllm-gpu.svg": (
        Panel(
            "vLLM on an H200, 8B sizes: first token, a document of 8,192 tokens and a question",
            "median, shorter is better",
            _on_gpu("8,192 tokens and a question of 100"),
        ),
        Panel(
            "64 requests that decode while everything is saved: tokens a second",
            "longer is better",
            _on_gpu("64 requests decode while all is saved, tokens/s", ""),
        ),
    ),
    "chart-vllm.svg": (
        Panel(
            "vLLM on CPUs, chats: time to first token",
            "median, shorter is better",
            _sides("first token, p50", "ms"),
        ),
        Panel(
            "the same run: output tokens a second",
            "longer is better; vLLM's own connector is ahead here",
            _sides("output tokens/s, median of rounds (best round)", ""),
        ),
    ),
    "chart-gpu.svg": (
        Panel(
            "H200, model of 8B sizes: first token of a prompt of 32,768 tokens",
            "shorter is better",
            (
                Bar("computed", "hits, 32,768 tokens and 32 new ones: first token",
                    "no host tier", "ms"),
                Bar("from host memory", "hits, 32,768 tokens and 32 new ones: first token",
                    "host tier", "ms", ours=True),
                Bar("its bytes, copied bare", "the same 4 GiB in large copies, bare",
                    "host tier", "ms"),
            ),
        ),
        Panel(
            "the same: later turns of chats ten times larger than the device, first token",
            "median, shorter is better",
            (
                Bar("no host tier", "first token, later turns", "no host tier", "ms"),
                Bar("with a host tier", "first token, later turns", "host tier", "ms", ours=True),
            ),
        ),
        Panel(
            "what it costs others: time between tokens while long prefixes arrive",
            "median, shorter is better",
            (
                Bar("alone", "the same, alone", "host tier", "ms"),
                Bar("beside arriving prefixes",
                    "latency, 64 requests, contexts from 4,096 tokens on: between tokens, "
                    "prefixes arrive", "host tier", "ms", ours=True),
            ),
        ),
    ),
    "chart-index.svg": (
        Panel("prefix index, 131,072 tokens: acquire and release of a full hit",
              "shorter is better", _against_vllm("acquire and release of a full hit")),
        Panel("the same with keys, from a list", "shorter is better",
              _against_vllm("the same with keys, from a list")),
        Panel("a miss with eviction", "shorter is better",
              _against_vllm("the same, with eviction")),
    ),
}  # fmt: skip


def figure(markdown: str, row: str, column: str) -> str:
    """The first number in a cell of the page's tables, found by its row and column."""
    header: list[str] = []
    before: list[str] = []
    for line in markdown.splitlines():
        cells = _cells_of(line)
        if set(cells) == {"---"}:
            header = before
        elif line.startswith("|") and cells[0] == row and column in header:
            cell = cells[header.index(column)]
            found = NUMBER.search(cell)
            if found is None:
                raise ValueError(f"the row {row!r} has no number in {column!r}, but {cell!r}")
            return found[0]
        before = cells
    raise ValueError(f"no table has a row {row!r} and a column {column!r}")


def _cells_of(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")]


def draw(panels: tuple[Panel, ...]) -> str:
    """A chart as SVG; it follows the reader's light or dark scheme, on a ground of its own."""
    parts: list[str] = []
    top = MARGIN
    for panel in panels:
        parts += _panel(panel, top)
        top += PANEL_HEAD + BAR_STEP * len(panel.bars) + MARGIN
    height = top
    title = escape("; ".join(panel.title for panel in panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}\n</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panel(panel: Panel, top: int) -> list[str]:
    markdown = PAGE.read_text(encoding="utf-8")
    texts = [figure(markdown, bar.row, bar.column) for bar in panel.bars]
    values = [float(text.replace(",", "")) for text in texts]
    scale = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) / max(values)
    parts = [
        f'<text class="title" x="{MARGIN}" y="{top + 12}">{escape(panel.title)}'
        f'<tspan class="note" font-weight="400"> ({escape(panel.note)})</tspan></text>'
    ]
    for place, (bar, value) in enumerate(zip(panel.bars, values, strict=True)):
        y = top + PANEL_HEAD - 8 + place * BAR_STEP
        width = max(2.0, value * scale)
        kind = "ours" if bar.ours else "other"
        text = f"{texts[place]} {bar.unit}".strip()
        parts += [
            f'<text x="{LABEL_WIDTH - 10}" y="{y + 13}" text-anchor="end">'
            f"{escape(bar.label)}</text>",
            f'<rect class="{kind}" x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" '
            f'height="{BAR_HEIGHT}" rx="3"/>',
            f'<text x="{LABEL_WIDTH + width + 8:.1f}" y="{y + 13}">{text}</text>',
        ]
    return parts


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, panels in CHARTS.items():
        (FOLDER / name).write_text(draw(panels), encoding="utf-8")


if __name__ == "__main__":
    main()
