"""`lab demo`: a cache without a model, and every byte it reads back verified."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import typer
from rich.console import Console

import penstock
from lab.demo import run_demo
from lab.demo.result import REASONS_IN_WORDS
from penstock.cache.explain import MissReason
from penstock.cli.conventions import ExitStatus, JsonOption, SeedOption, write_json
from penstock_serve.cli.demo import PIPED_WIDTH, print_section, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from lab.demo import Demonstration

INTRODUCTION = """\
A toy engine on the CPU: its KV lies in NumPy arrays (the "device"), Penstock manages the blocks \
and keeps two memory tiers below them. Its model computes KV that depends on every token before, \
so each byte that comes back from the cache can be compared with a fresh computation."""


def show_cache_demo(*, seed: SeedOption = None, json: JsonOption = None) -> None:
    """Runs a multi-turn workload over two memory tiers and verifies every byte it reads back.

    Chats that need more room than the device has, a fork, a preemption, bit rot in host memory
    and a change of weights. Ends with status 1 if a byte differs or the books do not add up.
    """
    started = time.perf_counter()
    shown = run_demo(seed or 0)
    seconds = time.perf_counter() - started
    if json is None or str(json) != "-":
        _print(shown, seconds)
    if json is not None:
        document = {"penstock": penstock.__version__, "seconds": round(seconds, 3)}
        write_json(json, document | shown.document())
    raise typer.Exit(ExitStatus.FINDING if shown.findings else ExitStatus.FINE)


def _print(shown: Demonstration, seconds: float) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    console.print(f"[bold]lab demo[/bold], seed {shown.seed}\n\n{INTRODUCTION}\n")
    for number, act in enumerate(shown.acts, start=1):
        print_section(console, f"{number}. {act.title}", *act.told)
    print_section(console, "Prompt tokens, by where they were found", _hits(shown))
    print_section(console, "Why requests found no more", _misses(shown))
    print_section(console, "Blocks, tier by tier", _tiers(shown))
    print_section(console, "One miss, explained", shown.explained)
    print_section(console, f"The story of {shown.story_of!r}, by the engine's clock", *shown.story)
    _print_verdict(console, shown, seconds)


def _hits(shown: Demonstration) -> Table:
    statistics = shown.statistics
    asked = statistics.tokens_asked
    table = table_of("", ">tokens", ">share")
    for tier in statistics.tiers:
        table.add_row(tier.name, f"{tier.tokens_cached:,}", f"{tier.tokens_cached / asked:.1%}")
    missing = asked - statistics.tokens_cached
    table.add_row("nowhere: computed", f"{missing:,}", f"{missing / asked:.1%}")
    table.add_row("asked for, in all", f"{asked:,}", "")
    return table


def _misses(shown: Demonstration) -> Table:
    table = table_of("reason", ">requests", "in words", "for example")
    for reason in MissReason:
        count = shown.statistics.misses[reason.value]
        if count:
            example = shown.misses[reason.value]
            place = f"{example.request}, block {example.miss.block}"
            table.add_row(reason.value, f"{count}", REASONS_IN_WORDS[reason], place)
    return table


def _tiers(shown: Demonstration) -> Table:
    table = table_of("tier", ">slots", ">stored", ">left", ">there now")
    for tier in shown.traffic:
        counts = (tier.slots, tier.stored, tier.removed, tier.present)
        table.add_row(tier.tier, *(f"{count:,}" for count in counts))
    return table


def _print_verdict(console: Console, shown: Demonstration, seconds: float) -> None:
    statistics = shown.statistics
    console.print(
        f"{statistics.requests} requests, {shown.preemptions} preemptions, "
        f"{statistics.blocks_evicted:,} evictions, {shown.tokens_computed:,} tokens computed.\n"
        f"{shown.bytes_verified:,} bytes of KV compared with a fresh computation. "
        f"{shown.sums_made:,} blocks written with their checksums, {shown.sums_checked:,} checked "
        f"when they were read, {statistics.blocks_corrupt} found corrupt "
        f"({shown.bytes_damaged} damaged on purpose).\n"
    )
    if not shown.findings:
        console.print(f"[bold green]All bytes were right[/bold green], in {seconds:.1f} s.")
        return
    print_section(console, f"{len(shown.findings)} findings", *shown.findings)
