"""`penstock store`: the store process, what its tiers can do, and what lies in a disk tier."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from penstock.cli.conventions import ConfigOption, ExitStatus, JsonOption, name_model, show_result
from penstock.config import KEYS, load_completed
from penstock.errors import ConfigError, counted
from penstock.logs import set_up_logs
from penstock.runtime.stored_tiers import store_config
from penstock.store.disk.format import load_cipher
from penstock.store.disk.inspect import inspect_folder
from penstock.store.probe import probe_tier
from penstock.store.process.server import serve_store
from penstock.transport.waiting import StopSignal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.store.disk.format import DiskCipher
    from penstock.store.disk.inspect import FolderReport, Inspection, SegmentReport, Verification
    from penstock.store.probe import ProbedTier
    from penstock.store.process.messages import StoreConfig

MIB = 1 << 20
TOKEN_BYTES = 128 << 10
"""KV of a token of Llama-3.1-8B in bf16."""
BAR_WIDTH = 40
AGES = (
    ("1 minute", 60),
    ("10 minutes", 600),
    ("1 hour", 3600),
    ("6 hours", 6 * 3600),
    ("1 day", 86400),
    ("1 week", 7 * 86400),
    ("30 days", 30 * 86400),
)

commands = typer.Typer()


@commands.callback(invoke_without_command=True)
def store(
    context: typer.Context,
    *,
    config: ConfigOption = None,
    log_level: Annotated[
        str, typer.Option(help="What is logged: debug, info, warning or error.")
    ] = "info",
) -> None:
    """Serve the stored tiers of a configuration to the engines of this machine, until SIGTERM.

    Engines whose configuration names the same folder use this process instead of one of their
    own, and share what lies in the folder.
    """
    if context.invoked_subcommand is not None:
        return
    KEYS["serve"]["log_level"].key.read("--log-level", log_level)
    found = stored_tiers_of(config)
    set_up_logs(log_level, as_json=False)
    with StopSignal((signal.SIGTERM, signal.SIGINT)) as stop:
        status = serve_store(found, stop=stop.descriptor)
    if status:
        raise typer.Exit(status)


def stored_tiers_of(config: Path | None) -> StoreConfig:
    """The stored tiers of a configuration.

    Raises `ConfigError`: there is no file, or no such tier in it.
    """
    if config is None:
        raise ConfigError("--config", "is missing, must be a file with a stored tier")
    found = store_config(load_completed(config, name_model))
    if found is None:
        raise ConfigError(
            f"{config}: tiers",
            "has no stored tier, must have one, for example of kind 'disk' or 'redis'",
        )
    return found


@commands.command()
def probe(
    *,
    config: ConfigOption = None,
    token_bytes: Annotated[
        int,
        typer.Option(
            min=1,
            max=1 << 30,
            help="KV bytes of a token, for the last column; the default is Llama-3.1-8B in bf16.",
        ),
    ] = TOKEN_BYTES,
    json: JsonOption = None,
) -> None:
    """Measure the stored tiers of a configuration from this machine: latency, rates, errors.

    It writes some 100 MiB of random blocks to each, and removes them. The status is 1 if a tier
    cannot be used, or a block did not come back.
    """
    found = [probe_tier(tier) for tier in stored_tiers_of(config).tiers]
    show_result(
        json,
        "\n".join(line for each in found for line in _describe_probe(each, token_bytes)),
        {"tiers": [asdict(each) for each in found], "token_bytes": token_bytes},
    )
    if any(each.problem or each.faults for each in found):
        raise typer.Exit(ExitStatus.FINDING)


def _describe_probe(tier: ProbedTier, token_bytes: int) -> Iterator[str]:
    yield f"{tier.name} ({tier.kind})"
    if tier.problem:
        yield f"  cannot be used: {tier.problem}"
        return
    if tier.ask_s is not None:
        yield f"  to learn what is there: {tier.ask_s * 1000:.1f} ms"
    # A prompt that is computed faster than its KV arrives is computed.
    headings = ("block KiB", "save MB/s", "load MB/s", "one block ms", "loads pay below tokens/s")
    rows = [
        (
            f"{size.block_bytes >> 10}",
            f"{size.save_bytes_s / 1e6:.0f}",
            f"{size.load_bytes_s / 1e6:.0f}",
            f"{size.single_load_s * 1000:.1f}",
            f"{size.load_bytes_s / token_bytes:.0f}",
        )
        for size in tier.sizes
    ]
    for line in _columns([headings, *rows]):
        yield f"  {line}"
    if tier.faults:
        yield f"  did not come back: {counted(tier.faults, 'block')}"


@commands.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of a disk tier.")],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every live block and check all its sums.")
    ] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file", metavar="FILE", help="Check encrypted blocks with the key in this file."
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Say what lies in the folder of a disk tier: segments, blocks, generations, damage.

    It takes no lock and writes nothing, so the store may be running. The status is 1 if something
    is damaged.
    """
    if key_file is not None and not verify:
        raise typer.BadParameter("is for --verify", param_hint="--key-file")
    cipher = load_cipher(key_file) if key_file is not None else None
    inspection = inspect_folder(path)
    found = _verify(inspection, cipher) if verify else None
    report, now = inspection.report, time()
    lines = [
        *_describe(report, now=now),
        *(_describe_verification(found) if found is not None else ()),
    ]
    show_result(json, "\n".join(lines), _document(report, found, now=now))
    if report.damages or (found is not None and found.damaged):
        raise typer.Exit(ExitStatus.FINDING)


def _verify(inspection: Inspection, cipher: DiskCipher | None) -> Verification:
    console = Console(stderr=True)
    columns = ("verify", BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("verify", total=inspection.report.live_bytes)
        return inspection.verify(cipher, lambda size: progress.advance(task, size))


def _describe(report: FolderReport, *, now: float) -> Iterator[str]:
    segments = report.segments
    yield (
        f"{report.folder}: {counted(len(segments), 'segment')}, {counted(report.live, 'block')}; "
        f"{_mib(report.live_bytes)} MiB live, {_mib(report.dead_bytes)} MiB dead, "
        f"{_mib(report.file_bytes)} MiB of files"
    )
    for each in report.damages:
        yield f"damaged: {each}"
    for segment in segments:
        if segment.problem and not segment.damaged:
            yield f"not read: {segment.file}: {segment.problem}"
    readable = [segment for segment in segments if segment.slots]
    if readable:
        yield ""
        yield from _columns([_SEGMENT_HEADINGS, *map(_segment_cells, readable)])
    if report.spaces:
        yield ""
        rows = [("space", "generation", "blocks", "MiB", "dead, by generation")]
        for space in report.spaces:
            dead = ", ".join(f"{n} of {g}" for g, n in space.dead_by_generation.items())
            size = _mib(space.live_bytes)
            rows.append((space.name, str(space.generation), str(space.live), size, dead or "none"))
        yield from _columns(rows)
    if report.written_at:
        yield ""
        yield from _histogram(report.written_at, now)


_SEGMENT_HEADINGS = (
    *("file", "age", "life", "part", "form", "block KiB", "slots", "live", "superseded"),
    *("old generation", "skipped", "torn", "free", "MiB"),
)


def _segment_cells(segment: SegmentReport) -> tuple[str, ...]:
    form = segment.form[:8] + ("" if segment.form_known else " unknown")
    counts = (segment.slots, segment.live, segment.superseded, segment.outdated)
    more = (segment.skipped, segment.torn, segment.free)
    return (
        segment.file + (" (encrypted)" if segment.encrypted else ""),
        *(str(segment.age), segment.life, segment.part[:8], form),
        f"{segment.block_bytes / 1024:.4g}",
        *map(str, (*counts, *more)),
        _mib(segment.file_bytes),
    )


def _histogram(written_at: Sequence[int], now: float) -> Iterator[str]:
    """How many live blocks were written how long ago, as bars."""
    counts = _counts_by_age(written_at, now)
    most = max(counts.values())
    yield "written within"
    for name, count in counts.items():
        bar = "█" * -(-count * BAR_WIDTH // most)
        yield f"  {name:<10}  {count:>8}  {bar}".rstrip()


def _counts_by_age(written_at: Sequence[int], now: float) -> dict[str, int]:
    counts = {**{name: 0 for name, _ in AGES}, "longer": 0}
    for at in written_at:
        counts[next((name for name, limit in AGES if now - at < limit), "longer")] += 1
    return counts


def _describe_verification(found: Verification) -> Iterator[str]:
    yield ""
    yield (
        f"verified: {counted(found.whole, 'block')} whole, "
        f"{found.trailer_only} by their trailer only, {found.changed} changed meanwhile, "
        f"{found.damaged} damaged"
    )
    for each in found.damages:
        yield f"damaged: {each.file} slot {each.slot}, key {each.key[:16]}…: {each.what}"
    if found.damaged > len(found.damages):
        yield f"and {found.damaged - len(found.damages)} more"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}"


def _document(report: FolderReport, found: Verification | None, *, now: float) -> dict[str, object]:
    return {
        "folder": report.folder,
        "blocks": report.live,
        "live_bytes": report.live_bytes,
        "dead_bytes": report.dead_bytes,
        "file_bytes": report.file_bytes,
        "damages": report.damages,
        "segments": [
            asdict(each) | {"dead": each.dead, "free": each.free} for each in report.segments
        ],
        "spaces": [asdict(each) for each in report.spaces],
        "blocks_written_within": _counts_by_age(report.written_at, now),
        "verification": None
        if found is None
        else asdict(found) | {"damages": [each._asdict() for each in found.damages]},
    }
