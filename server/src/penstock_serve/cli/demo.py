"""`penstock demo`: serves a model, asks it with several clients, and checks every answer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import penstock
from penstock.cli.conventions import (
    ExitStatus,
    JsonOption,
    Takes,
    with_options,
    write_json,
    write_text,
)
from penstock.errors import counted
from penstock_serve.cli.serve import require_packages

if TYPE_CHECKING:
    from penstock_serve.demo.result import ChatRound, Played

PictureOption = Annotated[
    Path, typer.Option(metavar="FILE", help="Where the page with the results goes.")
]
Count = Annotated[int | None, Takes("N", 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """How large the demonstration is; `None`: as `Stage` has it."""

    model: Annotated[str | None, Takes("PATH")] = None
    """A folder with a checkpoint, or a .gguf file; without it the default model."""
    chats: Count = None
    """Conversations."""
    turns: Count = None
    """Turns of each."""
    clients: Count = None
    """Clients that hold them."""
    max_tokens: Annotated[
        int | None,
        typer.Option("--tokens", metavar="N", min=1, help="Tokens of an answer, at most."),
    ] = None
    blocks: Count = None
    """Blocks on the device of each instance."""


@with_options(DemoOptions)
def show_demo(
    *,
    picture: PictureOption = Path("build/demo.html"),
    json: JsonOption = None,
    **given: Any,  # noqa: ANN401
) -> None:
    """Serve a model by a pair of instances, talk to it, and check every answer.

    Conversations with shared system prompts, with the cache and without; each answer is
    compared with a fresh computation. Ends with status 1 if anything is wrong.
    """
    require_packages()
    played = play_stage({name: value for name, value in given.items() if value is not None})
    _write_picture(picture, played)
    if json is None or str(json) != "-":
        print_played(_console(), played, picture)
    if json is not None:
        write_json(json, {"penstock": penstock.__version__} | played.document())
    raise typer.Exit(ExitStatus.FINDING if played.findings else ExitStatus.FINE)


def play_stage(options: dict[str, Any]) -> Played:
    """Runs the demonstration, with its progress on standard error."""
    from penstock_serve.demo import Stage, play  # noqa: PLC0415  (needs the extras)

    try:
        stage = Stage(**options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    progress = Console(stderr=True, highlight=False)
    return play(stage, lambda line: progress.print(line, style="dim", soft_wrap=True))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def _write_picture(path: Path, played: Played) -> None:
    from penstock_serve.demo.page import html_of  # noqa: PLC0415

    write_text(path, html_of(played), option="--picture")


PIPED_WIDTH = 110
"""The width of the output if it is not a terminal."""
INDENT = 3


def print_section(console: Console, title: str, *parts: str | Table) -> None:
    """Prints a title and its indented content."""
    console.print(Text(title, style="bold"))
    for part in parts:
        content = Text(part) if isinstance(part, str) else part
        console.print(Padding(content, (0, 0, 0, INDENT), expand=False))
    console.print()


def table_of(*columns: str) -> Table:
    """A table; a column whose name begins with `>` holds numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    return table


def print_played(console: Console, played: Played, picture: Path) -> None:
    """Prints the results of `penstock demo`."""
    cached = played.rounds[0]
    console.print(f"[bold]penstock demo[/bold]\n\n{played.command}\n{played.ready_line}\n")
    print_section(console, "Answers", _answers(cached))
    print_section(console, "Seconds to the first token (median; slowest)", _waits(played))
    print_section(
        console, "Prompt tokens, by where the answering instance had them", _tiers(played)
    )
    print_section(console, "Handoffs from prefill to decode", _handoffs(played))
    print_section(console, "Copies between tiers, every block with its checksums", _copies(played))
    print_section(console, f"Why requests missed, {cached.title}", _misses(cached))
    _print_verdict(console, played, picture)


def _answers(played: ChatRound) -> Table:
    table = table_of("chat", "asked", "said")
    for turn in played.turns:
        said = " ".join(turn.text.split())
        # The last sentence: first questions are long.
        asked = turn.messages[-1]["content"].split(". ")[-1]
        table.add_row(turn.chat, asked, said)
    return table


def _waits(played: Played) -> Table:
    table = table_of("", ">first turns", ">later turns", ">all, s", ">prompt tokens", ">generated")
    for each in played.rounds:
        waits = [
            f"{each.first_token_s(later=later):.2f}; {each.slowest_first_token_s(later=later):.2f}"
            for later in (False, True)
        ]
        counts = (f"{each.seconds:.1f}", f"{each.prompt_tokens:,}", f"{each.generated:,}")
        table.add_row(each.title, *waits, *counts)
    return table


def _tiers(played: Played) -> Table:
    tiers = list(played.rounds[0].tokens_by_tier())
    table = table_of("", *(f">{tier}" for tier in tiers), ">nowhere: handed over or computed")
    for each in played.rounds:
        found = each.tokens_by_tier()
        counts = [found[tier] for tier in tiers]
        rest = each.prompt_tokens - sum(counts)
        table.add_row(each.title, *(f"{count:,}" for count in (*counts, rest)))
    return table


def _handoffs(played: Played) -> Table:
    table = table_of("", "instance", "ended", ">MB received", ">parts verified")
    for each in played.rounds:
        for name, counts in each.statistics.items():
            ends = ", ".join(f"{count} {end}" for end, count in counts["handoffs"].items() if count)
            # Only the receiving instance verifies parts.
            _, parts, size = each.handoffs_taken().get(name, (0, 0, 0))
            taken = (f"{size / 1e6:,.1f}", f"{parts:,}") if parts else ("", "")
            table.add_row(each.title, name, ends, *taken)
    return table


def _copies(played: Played) -> Table:
    table = table_of("", "instance", "hop", ">copies", ">blocks", ">MB")
    for each in played.rounds:
        for name, hops in each.blocks_copied().items():
            for hop, (copies, blocks, size) in hops.items():
                numbers = (f"{copies:,}", f"{blocks:,}", f"{size / 1e6:,.1f}")
                table.add_row(each.title, name, hop, *numbers)
    return table


def _misses(played: ChatRound) -> Table:
    table = table_of("reason", *(f">{name}" for name in played.statistics))
    reasons = {
        reason
        for counts in played.statistics.values()
        for reason, count in counts["misses"].items()
        if count
    }
    for reason in sorted(reasons):
        counts = [each["misses"][reason] for each in played.statistics.values()]
        table.add_row(reason, *(f"{count}" for count in counts))
    return table


def _print_verdict(console: Console, played: Played, picture: Path) -> None:
    verdict = played.verdict
    console.print(
        f"{counted(verdict.answers, 'answer')}, {verdict.tokens:,} tokens: {verdict.values:,} "
        f"log-probabilities compared with a fresh computation; the largest difference is "
        f"{verdict.largest:.1e}, {verdict.bound:g} is allowed; {verdict.near_ties} tokens differ "
        f"where two are nearly equal.\n"
    )
    console.print(
        f"It took {played.seconds:.0f} s, of which {played.ready_s:.0f} s to get ready and "
        f"{played.check_s:.0f} s to check; {played.generated:,} tokens were generated, "
        f"{played.generated_max:,} may be.\n"
    )
    if played.findings:
        print_section(console, counted(len(played.findings), "finding"), *played.findings)
    else:
        told = "; ".join(played.headline)
        console.print(f"[bold green]All answers were right[/bold green]: {told}.")
    console.print(
        f"Look at {picture.absolute().as_uri()}: it explains what happened.", soft_wrap=True
    )
