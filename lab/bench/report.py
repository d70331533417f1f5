"""The report of a benchmark: one JSON format for all of them, and tables for people.

    {penstock, command, machine: {...},
     rows:   [{bench, side, params, metric, unit, median, p99, samples}],
     ratios: [{name, value, target, holds}]}

A row is what one side measured; a ratio compares rows and has a target. The description of the
machine names neither the machine nor its owner: no host name, no user, no path.

The one rule: a report never says more than was measured. A side that could not run has no rows, a
ratio without both its sides is not added, and a note says so in one line.
"""

from __future__ import annotations

import enum
import math
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lab.bench.measure import Summary

Param = str | int | float | bool


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One metric of one side, under one set of parameters."""

    bench: str
    side: str
    params: dict[str, Param]
    metric: str
    unit: str
    median: float
    p99: float
    samples: int

    def __post_init__(self) -> None:
        _require_names(bench=self.bench, side=self.side, metric=self.metric, unit=self.unit)
        _require_finite(median=self.median, p99=self.p99)
        if self.samples < 1:
            raise ValueError(f"samples: must be at least 1, got {self.samples}")


class Ratio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim about the rows, its target, and whether it holds."""

    name: str
    value: float
    target: float
    holds: bool

    def __post_init__(self) -> None:
        _require_names(name=self.name)
        _require_finite(value=self.value, target=self.target)


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole report, as JSON."""

    penstock: str
    command: str
    machine: Machine
    rows: list[Row]
    ratios: list[Ratio]

    def __post_init__(self) -> None:
        _require_names(penstock=self.penstock, command=self.command)
        if not self.rows:
            raise ValueError("rows: a report needs at least one row, got none")


class Bound(enum.Enum):
    """Whether a target is a minimum or a maximum."""

    AT_LEAST = "≥"
    AT_MOST = "≤"


class BenchReport:
    """Collects rows and ratios while a benchmark runs; shows and writes them at the end.

    Args:
        version: The version of Penstock that was measured.
        command: The command line that would measure the same again.
        machine: Where it ran; by default this machine.
        say: Gets a line for people whenever something was measured, or takes its time.
    """

    def __init__(
        self,
        *,
        version: str,
        command: str,
        machine: Machine | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._version = version
        self._command = command
        self._machine = machine if machine is not None else describe_machine()
        self._rows: dict[tuple[object, ...], Row] = {}
        # The direction of a target is for the tables; the JSON says `holds`.
        self._ratios: dict[str, tuple[Ratio, Bound]] = {}
        self._notes: list[str] = []
        self._say = say
        self._began = time.monotonic()

    def progress(self, what: str) -> None:
        """Says what is measured now, and for how long the benchmark has run."""
        if self._say is not None:
            self._say(f"{time.monotonic() - self._began:6.1f} s  {what}")

    def add_row(
        self,
        *,
        bench: str,
        side: str,
        params: Mapping[str, Param],
        metric: str,
        unit: str,
        summary: Summary,
    ) -> Row:
        """Adds what one side measured; the same row twice is an error."""
        for name, value in params.items():
            if not isinstance(value, Param):
                raise TypeError(
                    f"params.{name}: must be a string, a number or a boolean, got {value!r}"
                )
        identity = (bench, side, tuple(sorted(params.items())), metric)
        if identity in self._rows:
            raise ValueError(f"row: {bench} {side} {metric} {dict(params)} was added already")
        row = Row(
            bench=bench,
            side=side,
            params=dict(params),
            metric=metric,
            unit=unit,
            median=summary.median,
            p99=summary.p99,
            samples=summary.samples,
        )
        self._rows[identity] = row
        _, (_, of, what, who, median, *_) = _row_cells([row])
        self.progress(f"{bench}, {of}: {what}, {who}: {median}")
        return row

    def add_ratio(
        self,
        name: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> Ratio:
        """Adds a ratio with exactly one of the two targets."""
        if name in self._ratios:
            raise ValueError(f"ratio: {name!r} was added already")
        if at_least is not None and at_most is None:
            ratio = Ratio(name=name, value=value, target=at_least, holds=value >= at_least)
            bound = Bound.AT_LEAST
        elif at_most is not None and at_least is None:
            ratio = Ratio(name=name, value=value, target=at_most, holds=value <= at_most)
            bound = Bound.AT_MOST
        else:
            raise ValueError(
                f"ratio {name!r}: needs one target, got at_least={at_least} and at_most={at_most}"
            )
        self._ratios[name] = (ratio, bound)
        return ratio

    def add_note(self, line: str) -> None:
        """Adds a line below the tables, such as why a side is missing."""
        self._notes.append(line)

    def document(self) -> Document:
        """The report so far."""
        return Document(
            penstock=self._version,
            command=self._command,
            machine=self._machine,
            rows=list(self._rows.values()),
            ratios=[ratio for ratio, _ in self._ratios.values()],
        )

    def to_builtins(self) -> object:
        """The document as plain values, checked by decoding it again."""
        document = self.document()
        # msgspec checks types only when it reads, and others will parse what is written.
        if msgspec.json.decode(msgspec.json.encode(document), type=Document) != document:
            raise ValueError("report: what would be written does not read back as it was meant")
        return msgspec.to_builtins(document)

    def show(self, out: TextIO) -> None:
        """Prints the tables: with rich on a terminal if it is installed, else plain."""
        tables = [("Measured", _row_cells(list(self._rows.values())))]
        if self._ratios:
            tables.append(("Targets", _ratio_cells(list(self._ratios.values()))))
        for title, cells in tables:
            if not (out.isatty() and _show_rich(title, cells, out)):
                _show_plain(title, cells, out)
        for note in self._notes:
            out.write(f"Note: {note}\n")

    def exit_code(self, *, check: bool) -> int:
        """1 with `check` if a target is missed, else 0."""
        missed = any(not ratio.holds for ratio, _ in self._ratios.values())
        return 1 if check and missed else 0


def _require_names(**fields: str) -> None:
    for field, value in fields.items():
        if not value:
            raise ValueError(f"{field}: must not be empty")


def _require_finite(**fields: float) -> None:
    for field, value in fields.items():
        if not math.isfinite(value):
            raise ValueError(f"{field}: must be a finite number, got {value}")


def _row_cells(rows: Sequence[Row]) -> list[list[str]]:
    """A heading and a line for every row."""
    cells = [["bench", "params", "metric", "side", "median", "p99", "samples"]]
    for row in rows:
        params = " ".join(f"{name}={value}" for name, value in row.params.items())
        median, p99 = _quantity(row.median, row.unit), _quantity(row.p99, row.unit)
        cells.append([row.bench, params, row.metric, row.side, median, p99, str(row.samples)])
    return cells


def _ratio_cells(ratios: Sequence[tuple[Ratio, Bound]]) -> list[list[str]]:
    """A heading and a line for every ratio."""
    cells = [["ratio", "value", "target", "holds"]]
    for ratio, bound in ratios:
        target = f"{bound.value} {ratio.target:g}"
        cells.append([ratio.name, f"{ratio.value:.2f}", target, "yes" if ratio.holds else "NO"])
    return cells


def _quantity(value: float, unit: str) -> str:
    """A number for people; times in the largest unit in which they are at least 1."""
    if unit == "ns":
        for scaled, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {scaled}"
    return f"{value:.4g} {unit}"


def _show_rich(title: str, cells: list[list[str]], out: TextIO) -> bool:
    """Prints one table with rich; returns False if rich is not installed."""
    try:
        from rich.console import Console  # noqa: PLC0415 - an extra, absent from a plain install
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        return False
    table = Table(*cells[0], title=title, title_justify="left")
    for line in cells[1:]:
        # A marked-up cell would eat the brackets that a parameter may hold.
        table.add_row(*(cell.replace("[", r"\[") for cell in line))
    Console(file=out).print(table)
    return True


def _show_plain(title: str, cells: list[list[str]], out: TextIO) -> None:
    """Prints one table as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    out.write(f"{title}\n")
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        out.write(f"  {'  '.join(padded).rstrip()}\n")
    out.write("\n")


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hardware and the versions that results depend on."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    kernel: str
    python: str
    numpy: str


def describe_machine() -> Machine:
    """The description of this machine for a report."""
    return Machine(
        cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        numpy=np.__version__,
    )


def _field(path: str, name: str) -> str | None:
    """The first value of `name : value` in one of the kernel's text files."""
    # Some architectures (arm64) have no such field, and some sandboxes no such file.
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
