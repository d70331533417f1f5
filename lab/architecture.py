"""Draws `docs/architecture.svg` from the imports between the packages of Penstock.

    python -m lab.architecture

A package is drawn below every package that imports it. Arrows that follow from others are left
out: cli -> serve -> engine implies cli -> engine. The drawing depends on the imports and on
`CAPTIONS` alone, so a test compares the stored picture with a new one.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"

CAPTIONS = {
    "cache": "index, pools, eviction",
    "cli": "the penstock command",
    "config": "the TOML file",
    "connectors": "vLLM",
    "doctor": "penstock doctor",
    "handoff": "prefill to decode",
    "machine": "events in, effects out",
    "movers": "copy blocks",
    "relay": "NIXL between machines",
    "replay": "traces through the cache",
    "runtime": "Cache, ranks, step()",
    "store": "tiers below memory",
    "supervisor": "starts processes",
    "testing": "conformance suites",
    "tiers": "memory for blocks",
    "transport": "messages, remote writes",
    "vocabulary": "keys, layouts, checksums",
}
PURE = frozenset({"vocabulary", "cache", "machine"})
"""Packages without clock, thread, socket, environment or torch (see pyproject.toml)."""

Graph = dict[str, set[str]]
"""For each package, the packages it imports."""

BOX_WIDTH, BOX_HEIGHT = 172, 46
COLUMN, ROW, MARGIN = 196, 92, 24
ORDERING_SWEEPS = 12


class Place(NamedTuple):
    """Where a package is drawn, or where a long arrow passes a row."""

    row: int
    """Counted from the bottom."""
    x: float


def read_imports(package: Path) -> Graph:
    """The imports between the sub-packages of a package, with those for type checking."""
    names = {path.parent.name for path in package.glob("*/__init__.py")}
    graph: Graph = {name: set() for name in sorted(names)}
    for name in graph:
        for path in sorted((package / name).rglob("*.py")):
            graph[name] |= names & set(_imported(path, package.name)) - {name}
    return graph


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """All statements and handlers below a node, without expressions, of which there are many."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for each in getattr(node, field, ()):
            yield each
            yield from statements_of(each)


def _imported(path: Path, root: str) -> Iterator[str]:
    for node in statements_of(ast.parse(path.read_text(encoding="utf-8"))):
        modules: Iterable[str] = ()
        if isinstance(node, ast.Import):
            modules = (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = (f"{node.module}.{alias.name}" for alias in node.names)
        for module in modules:
            parts = module.split(".")
            if parts[0] == root and len(parts) > 1:
                yield parts[1]


def without_implied(graph: Graph) -> Graph:
    """The graph without the arrows that follow from longer paths (its transitive reduction)."""
    return {
        name: {
            target
            for target in targets
            if not any(target in reachable(graph, via) for via in targets - {target})
        }
        for name, targets in graph.items()
    }


def reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def rows_of(graph: Graph) -> dict[str, int]:
    """The row of each package: one below its lowest importer, as the importers come first."""
    depths: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in depths:
            depths[name] = max((depth(target) + 1 for target in graph[name]), default=0)
        return depths[name]

    rows: dict[str, int] = {}
    for name in sorted(graph, key=lambda name: (-depth(name), name)):
        importers = [rows[other] for other in rows if name in graph[other]]
        rows[name] = min(importers) - 1 if importers else depth(name)
    return rows


def drawn_paths(graph: Graph, rows: Mapping[str, int]) -> list[list[str]]:
    """Each arrow as the names it passes: a name such as `cli>tiers:3` stands for a crossed row."""
    return [
        [
            name,
            *(f"{name}>{target}:{row}" for row in range(rows[name] - 1, rows[target], -1)),
            target,
        ]
        for name in sorted(graph)
        for target in sorted(graph[name])
    ]


def places_of(rows: Mapping[str, int], paths: list[list[str]]) -> dict[str, Place]:
    """Places everything in its row, near what it is connected with."""
    levels: dict[int, list[str]] = defaultdict(list)
    neighbours: dict[str, set[str]] = defaultdict(set)
    for name in sorted(rows):
        levels[rows[name]].append(name)
    for path in paths:
        for upper, lower in pairwise(path):
            neighbours[upper].add(lower)
            neighbours[lower].add(upper)
        for passed in path[1:-1]:
            levels[int(passed.rpartition(":")[2])].append(passed)
    widest = max(len(level) for level in levels.values())
    x: dict[str, float] = {}

    def spread(level: list[str]) -> None:
        for position, name in enumerate(level):
            x[name] = (position + 0.5) * widest / len(level)

    for level in levels.values():
        spread(level)
    for _ in range(ORDERING_SWEEPS):
        for row in [*sorted(levels), *sorted(levels, reverse=True)]:
            means = {
                name: sum(x[other] for other in neighbours[name]) / max(1, len(neighbours[name]))
                for name in levels[row]
            }
            levels[row].sort(key=lambda name: (round(means[name], 6), name))
            spread(levels[row])
    return {name: Place(row, x[name]) for row, level in levels.items() for name in level}


def draw(graph: Graph) -> str:
    """The picture as SVG text."""
    reduced = without_implied(graph)
    rows = rows_of(reduced)
    paths = drawn_paths(reduced, rows)
    places = places_of(rows, paths)
    top = max(rows.values())
    width = round(max(place.x for place in places.values()) * COLUMN + COLUMN / 2 + 2 * MARGIN)
    height = top * ROW + BOX_HEIGHT + 3 * MARGIN

    def centre(name: str) -> tuple[float, float]:
        place = places[name]
        return MARGIN + place.x * COLUMN, MARGIN + (top - place.row) * ROW + BOX_HEIGHT / 2

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif">',
        "<title>The packages of Penstock and their imports</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8"'
        ' markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#667"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    lines += [_arrow([centre(name) for name in path]) for path in paths]
    lines += [_box(name, *centre(name)) for name in sorted(rows)]
    lines += [
        f'<text x="{MARGIN}" y="{height - MARGIN / 2}" font-size="12" fill="#556">'
        "An arrow: imports. Implied arrows are left out."
        " Green: no clock, thread, socket or torch.</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _arrow(points: list[tuple[float, float]]) -> str:
    (x, y), *passed = points
    data = [f"M{x:.0f} {y + BOX_HEIGHT / 2:.0f}"]
    y += BOX_HEIGHT / 2
    for next_x, next_y in passed:
        above, below = next_y - BOX_HEIGHT / 2, next_y + BOX_HEIGHT / 2
        bend = (y + above) / 2
        data.append(f"C{x:.0f} {bend:.0f} {next_x:.0f} {bend:.0f} {next_x:.0f} {above:.0f}")
        if (next_x, next_y) != passed[-1]:
            data.append(f"V{below:.0f}")
        x, y = next_x, below
    return f'<path d="{" ".join(data)}" fill="none" stroke="#889" marker-end="url(#head)"/>'


def _box(name: str, x: float, y: float) -> str:
    fill = "#d9f0dd" if name in PURE else "#e8ecf6"
    return (
        f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{BOX_WIDTH}"'
        f' height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="#667"/>'
        f'<text x="{x:.0f}" y="{y - 3:.0f}" text-anchor="middle" font-size="14"'
        f' font-weight="bold">{escape(name)}</text>'
        f'<text x="{x:.0f}" y="{y + 14:.0f}" text-anchor="middle" font-size="11"'
        f' fill="#444">{escape(CAPTIONS[name])}</text>'
    )


def main() -> None:
    graph = read_imports(ROOT / "src" / "penstock")
    PICTURE.write_text(draw(graph), encoding="utf-8")


if __name__ == "__main__":
    main()
