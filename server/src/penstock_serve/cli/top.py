"""`penstock top [URL]`: a running server in a terminal, live.

| key         | does                                             |
|-------------|--------------------------------------------------|
| `1` to `3`  | overview, instances (or servers), last requests  |
| tab         | the next of these                                |
| `s`         | sorts by the next column                         |
| `r`         | the other way round                              |
| `q`         | ends                                             |

In a terminal, the overview begins with bars and with the last ten minutes as lines of blocks. With
`--once`, or into a file, it is the text of `penstock status`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.conventions import JsonOption, write_json
from penstock.errors import UnavailableError
from penstock_serve.cli.serve import DEFAULT_SERVER, ApiKeyFileOption
from penstock_serve.cli.status import (
    LiveUrlArgument,
    describe_live,
    live_client,
    rate_text,
    seconds_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from rich.console import RenderableType

    from penstock_serve.cli.status import LiveClient

VIEWS = ("overview", "instances", "requests")
FILE_WIDTH = 160
KEYS = "1 overview  2 instances  3 requests  tab next  s sort  r reverse  q quit"
BLOCKS = " ▁▂▃▄▅▆▇█"
BAR_WIDTH = 30
SLICES = 60
"""Slices of ten seconds in ten minutes."""
STYLES = {"ok": "bold green", "degraded": "bold yellow", "down": "bold red"}

Row = tuple[str | float | None, ...]


@dataclass(slots=True)
class TopView:
    """What is shown, and in which order."""

    view: int = 0
    column: int = 0
    """What rows are sorted by; 0: as they come."""
    reverse: bool = False

    def press(self, key: str) -> bool:
        """Takes in a key; returns whether to go on."""
        if key in {"1", "2", "3", "\t"}:
            self.view = (self.view + 1) % len(VIEWS) if key == "\t" else int(key) - 1
            self.column, self.reverse = 0, False
        elif key == "s":
            self.column += 1
        elif key == "r":
            self.reverse = not self.reverse
        return key not in {"q", "\x03", "\x04"}


def show_top(
    url: LiveUrlArgument = DEFAULT_SERVER,
    *,
    api_key_file: ApiKeyFileOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print all views once, and end.")] = False,
    every_s: Annotated[
        float, typer.Option("--every-s", metavar="S", min=0.2, max=3600, help="How often to look.")
    ] = 1.0,
    json: JsonOption = None,
) -> None:
    """Watch a running server in the terminal.

    Keys: 1, 2, 3 or tab choose a view, s sorts by the next column, r reverses, q ends. With --json,
    it looks once and writes what it saw.
    """
    client = live_client(url, api_key_file)
    live = client.ask()
    if json is not None:
        write_json(json, live)
    console = Console()
    if not console.is_terminal:
        # Whoever reads it in a file or a pipe gets the names of requests whole.
        console = Console(width=FILE_WIDTH)
    if once or json is not None:
        if str(json) != "-":
            for number in range(len(VIEWS)):
                console.print(draw(client.url, live, TopView(view=number)))
        return
    if not console.is_terminal or console.is_dumb_terminal or not sys.stdin.isatty():
        raise UnavailableError("top needs a terminal: use --once, --json FILE or penstock status")
    _watch(client, live, console, every_s)


def _watch(client: LiveClient, live: dict[str, Any], console: Console, every_s: float) -> None:
    """Shows what the server says now, again and again, until a key ends it."""
    with (
        _ended_by_signals(),
        _single_keys() as descriptor,
        Live(console=console, screen=True, auto_refresh=False) as at,
    ):
        view, problem = TopView(), ""
        is_drawn = can_draw(console.encoding)
        while True:
            at.update(draw(client.url, live, view, problem, is_drawn=is_drawn), refresh=True)
            deadline = time.monotonic() + every_s
            while typed := _keys_before(deadline, descriptor):
                if not all(view.press(key) for key in typed):
                    return
                at.update(draw(client.url, live, view, problem, is_drawn=is_drawn), refresh=True)
            try:
                live, problem = client.ask(), ""
            except UnavailableError as error:
                problem = f"{error}; trying again"


def _keys_before(deadline: float, descriptor: int) -> str:
    """Waits for keys; empty if it is time to look again. The end of input counts as `q`."""
    left = max(0.0, deadline - time.monotonic())
    ready, _, _ = select.select([descriptor], [], [], left)
    return (os.read(descriptor, 64).decode("latin-1") or "q") if ready else ""


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Signals end it by an exception, so that the terminal becomes what it was before."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, was in before.items():
            signal.signal(each, was)


@contextmanager
def _single_keys() -> Iterator[int]:
    """The terminal gives each key as it is pressed, until the end of the `with`."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def can_draw(encoding: str) -> bool:
    """Whether a terminal shows the characters of bars and lines."""
    try:
        BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def draw(
    url: str,
    live: dict[str, Any],
    view: TopView,
    problem: str = "",
    *,
    is_drawn: bool = False,
) -> RenderableType:
    """One view of a document; the overview has bars and lines if `is_drawn`."""
    state = live["health"]["state"]
    head = Text.assemble(
        ("penstock top  ", "bold"), (state, STYLES[state]), f"  {url}  {VIEWS[view.view]}"
    )
    parts: list[RenderableType] = [head]
    if problem:
        parts.append(Text(problem, style="bold red"))
    if view.view == 0:
        if is_drawn:
            parts.append(pictures(live))
        parts += [Text(line) for line in list(describe_live(url, live))[1:]]
    elif view.view == 1:
        names, rows = _server_table(live) if live["kind"] == "router" else _instance_table(live)
        parts.append(_table(names, rows, view))
    else:
        parts.append(_table(*_request_table(live), view))
    return Group(*parts, Text(KEYS, style="dim"))


def pictures(live: dict[str, Any]) -> RenderableType:
    """How full tiers are, and what happened in the last ten minutes."""
    grid = Table.grid(padding=(0, 2))
    for name, used, of in _tiers_of(live):
        share = used / of if of else 0.0
        grid.add_row(name, bar(share), f"{100 * share:.0f} % full")
    traffic = live["traffic"]
    made = live["sources"] if live["kind"] == "router" else traffic["slices"]
    every_s, rates = traffic["slice_s"], traffic.get("rates") or {}
    lines = (
        ("requests/s", "cyan", traffic["slices"], "requests", rates.get("requests_per_s")),
        ("output tokens/s", "green", made, "generated", rates.get("output_tokens_per_s")),
    )
    for name, style, slices, field, now in lines:
        values = over_time(slices, live["now"], every_s, field)
        drawn = Text(sparkline([each or 0.0 for each in values]), style=style)
        most = max(each or 0.0 for each in values) / every_s
        grid.add_row(name, drawn, f"{rate_text(now)} now, {rate_text(most)} at most")
    times = (
        ("first token", "yellow", traffic["slices"], ("cold_p50_s", "warm_p50_s")),
        ("between tokens", "magenta", made, ("between_p50_s",)),
    )
    for name, style, slices, fields in times:
        found = [over_time(slices, live["now"], every_s, field) for field in fields]
        longest = [
            max((x for x in each if x is not None), default=None)
            for each in zip(*found, strict=True)
        ]
        known = [each for each in longest if each is not None]
        if known:
            drawn = Text(sparkline([each or 0.0 for each in longest]), style=style)
            text = f"{seconds_text(known[-1])} last, {seconds_text(max(known))} at most"
            grid.add_row(name, drawn, text)
    return grid


def bar(share: float, width: int = BAR_WIDTH) -> Text:
    """A bar that is full to an eighth of a character."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    full, rest = divmod(eighths, 8)
    left = width - full - (rest > 0)
    partial = " ▏▎▍▌▋▊▉"[rest] if rest else ""
    style = "red" if share >= 0.95 else "blue"
    return Text.assemble(("█" * full + partial, style), ("·" * left, "dim"))


def sparkline(values: Sequence[float]) -> str:
    """A character for each value; the highest one is full, and what is not 0 is seen."""
    most = max(values, default=0.0)
    if most <= 0:
        return BLOCKS[0] * len(values)
    steps = len(BLOCKS) - 1
    return "".join(BLOCKS[max(1, round(steps * x / most)) if x > 0 else 0] for x in values)


def over_time(
    slices: Sequence[dict[str, Any]], now: float, every_s: float, field: str
) -> list[float | None]:
    """A field of each slice of the last ten minutes; `None` where there is none."""
    last = int(now // every_s)
    known = {round(each["at"] / every_s): each.get(field) for each in slices}
    return [known.get(number) for number in range(last - SLICES + 1, last + 1)]


def _tiers_of(live: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Name, used and size of each tier whose size is known, over all instances or servers."""
    if live["kind"] == "router":
        return [(each["name"], each["used"], each["tokens"]) for each in live["tiers"]]
    sums: dict[str, list[float]] = {}
    for instance in live["instances"]:
        for tier in instance["cache"]["tiers"]:
            store = tier.get("store")
            if store is not None and not store["capacity_bytes"]:
                continue  # Stores that others run do not tell their size.
            found = sums.setdefault(tier["name"], [0.0, 0.0])
            found[0] += tier["slots"] - tier["free"]
            found[1] += tier["slots"]
    return [(name, used, of) for name, (used, of) in sums.items()]


def _instance_table(live: dict[str, Any]) -> tuple[Sequence[str], list[Row]]:
    names = ("instance", "role", "state", "running", "waiting", "loading", "claiming", "prefill/s")
    rows: list[Row] = [
        (
            *(each["instance"], each["role"], each["state"], each["running"], each["waiting"]),
            *(each["loading"], each["claiming"], each["cache"]["prefill_tokens_per_s"]),
        )
        for each in live["instances"]
    ]
    return names, rows


def _server_table(live: dict[str, Any]) -> tuple[Sequence[str], list[Row]]:
    rows: list[Row] = [
        (each["name"], each["role"], "up" if each["up"] else f"down: {each['cause']}", each["load"])
        for each in live["servers"]
    ]
    return ("server", "role", "state", "requests"), rows


def _request_table(live: dict[str, Any]) -> tuple[Sequence[str], list[Row]]:
    names = ("request", "age s", "prompt", "found", "first token", "took", "answer", "ended")
    rows: list[Row] = [
        (
            *(each["request"] or "–", round(live["now"] - each["began"]), each["prompt_tokens"]),
            *(sum(each["found"].values()), each["first_token_s"], each["took_s"]),
            *(each["generated"], each["outcome"] or "running"),
        )
        for each in live["traffic"]["requests"]
    ]
    return names, rows


def _table(names: Sequence[str], rows: list[Row], view: TopView) -> Table:
    column = view.column % (len(names) + 1)
    if column:
        # Cells without a value are last, whichever way the others are sorted.
        known = [row for row in rows if row[column - 1] is not None]
        known.sort(key=lambda row: row[column - 1], reverse=view.reverse)  # type: ignore[arg-type, return-value]
        rows = known + [row for row in rows if row[column - 1] is None]
    elif view.reverse:
        rows = rows[::-1]
    mark = " ↓" if view.reverse else " ↑"
    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(names, start=1):
        is_text = all(isinstance(row[at - 1], str) for row in rows)
        title = name + (mark if at == column else "")
        # In a narrow terminal the name gives way, and numbers stay whole.
        table.add_column(title, justify="left" if is_text else "right", no_wrap=at > 1)
    for row in rows:
        first, *others = (_cell(name, cell) for name, cell in zip(names, row, strict=True))
        table.add_row(Text(first, no_wrap=True, overflow="ellipsis"), *others)
    return table


def _cell(name: str, cell: str | float | None) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    return seconds_text(cell) if name in {"first token", "took"} else f"{cell:,.0f}"
