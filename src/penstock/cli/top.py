"""`penstock top [URL]`: a running server in a terminal, live.

| key         | does                                             |
|-------------|--------------------------------------------------|
| `1` to `3`  | overview, instances (or servers), last requests  |
| tab         | the next of these                                |
| `s`         | sorts by the next column                         |
| `r`         | the other way round                              |
| `q`         | ends                                             |
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
from penstock.cli.serve import DEFAULT_SERVER, ApiKeyFileOption
from penstock.cli.status import LiveUrlArgument, describe_live, live_client, seconds_text
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from rich.console import RenderableType

    from penstock.cli.status import LiveClient

VIEWS = ("overview", "instances", "requests")
FILE_WIDTH = 160
KEYS = "1 overview  2 instances  3 requests  tab next  s sort  r reverse  q quit"
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
        while True:
            at.update(draw(client.url, live, view, problem), refresh=True)
            deadline = time.monotonic() + every_s
            while typed := _keys_before(deadline, descriptor):
                if not all(view.press(key) for key in typed):
                    return
                at.update(draw(client.url, live, view, problem), refresh=True)
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


def draw(url: str, live: dict[str, Any], view: TopView, problem: str = "") -> RenderableType:
    """One view of a document."""
    state = live["health"]["state"]
    head = Text.assemble(
        ("penstock top  ", "bold"), (state, STYLES[state]), f"  {url}  {VIEWS[view.view]}"
    )
    parts: list[RenderableType] = [head]
    if problem:
        parts.append(Text(problem, style="bold red"))
    if view.view == 0:
        parts += [Text(line) for line in list(describe_live(url, live))[1:]]
    elif view.view == 1:
        names, rows = _server_table(live) if live["kind"] == "router" else _instance_table(live)
        parts.append(_table(names, rows, view))
    else:
        parts.append(_table(*_request_table(live), view))
    return Group(*parts, Text(KEYS, style="dim"))


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
