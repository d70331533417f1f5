"""`penstock plan`: what sizes of tiers and which policy suit a trace."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from penstock.cache.eviction import policy_named
from penstock.cli.conventions import (
    JobsOption,
    JsonOption,
    require_two_files,
    write_json,
    write_text,
)
from penstock.cli.replay import (
    DEVICE_GIB,
    KV_BYTES,
    BandwidthOption,
    OutputOption,
    PrefillOption,
    read_bandwidths,
    require_rate,
)
from penstock.replay.page import HEADS, page_of, row_texts
from penstock.replay.plan import Planner, PlanSettings
from penstock.replay.report import LEFT_OUT, text_table
from penstock.replay.trace import SHIPPED

if TYPE_CHECKING:
    from penstock.replay.plan import CachePlan

GIB_MIN, GIB_MAX = 1e-6, 1 << 20
TIERS = ("host", "disk")
CORES = os.cpu_count() or 1


def plan(  # noqa: PLR0913 - each is an option
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help=f"A file of requests, or one of {', '.join(SHIPPED)}."
        ),
    ],
    *,
    device_gib: Annotated[
        float, typer.Option(metavar="N", help="Room for KV on the device.")
    ] = float(DEVICE_GIB),
    host_gib: Annotated[
        str, typer.Option(metavar="N,N", help="Sizes of the host tier to try.")
    ] = "0,32,64,128,256",
    disk_gib: Annotated[
        str, typer.Option(metavar="N,N", help="Sizes of a disk below it to try.")
    ] = "0",
    policy: Annotated[str, typer.Option(metavar="NAME,NAME", help="Eviction policies.")] = "lru",
    kv_bytes: Annotated[
        int, typer.Option("--kv-bytes", metavar="N", min=1, max=1 << 30, help="Of KV a token.")
    ] = KV_BYTES,
    prefill_rate: PrefillOption = None,
    output_rate: OutputOption = None,
    bandwidth: BandwidthOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with curves, too.")
    ] = None,
    json: JsonOption = None,
    jobs: JobsOption = CORES,
) -> None:
    """Replay a trace with several sizes of tiers and policies, and recommend one.

    With rates, the plan predicts first tokens, and how they change with the load.
    """
    require_two_files(json, html)
    policies = tuple(policy.split(","))
    for name in policies:
        policy_named(name, place="--policy")
    settings = PlanSettings(
        trace=trace,
        token_bytes=kv_bytes,
        device_gib=_device_size(device_gib),
        host_gib=_sizes("--host-gib", host_gib),
        disk_gib=_sizes("--disk-gib", disk_gib),
        policies=policies,
        prefill_tokens_per_s=require_rate("--prefill-rate", prefill_rate),
        output_tokens_per_s=require_rate("--output-rate", output_rate),
        tier_bytes_per_s=_bandwidths(bandwidth or []),
    )
    made = Planner(settings, jobs=jobs, progress=_show_progress).run()
    if json is None or str(json) != "-":
        print(_describe(made))
    if json is not None:
        write_json(json, msgspec.to_builtins(made))
    if html is not None:
        write_text(html, page_of(made), option="--html")


def _bandwidths(given: list[str]) -> dict[str, float]:
    rates = read_bandwidths(given)
    for name in rates:
        if name not in TIERS:
            raise typer.BadParameter(
                f"names {name!r}, must be one of {', '.join(TIERS)}", param_hint="--bandwidth"
            )
    return rates


def _device_size(gib: float) -> float:
    if not GIB_MIN <= gib <= GIB_MAX:
        raise typer.BadParameter(
            f"is {gib!r}, must be a number from {GIB_MIN:g} to {GIB_MAX}",
            param_hint="--device-gib",
        )
    return gib


def _sizes(option: str, given: str) -> tuple[float, ...]:
    try:
        # The addition makes 0 of -0.
        sizes = tuple(float(text) + 0.0 for text in given.split(","))
    except ValueError:
        sizes = (math.nan,)
    if not all(0 <= size <= GIB_MAX for size in sizes):
        raise typer.BadParameter(
            f"is {given!r}, must be numbers from 0 to {GIB_MAX}, such as 0,32,64",
            param_hint=option,
        )
    return sizes


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        bar = "█" * (30 * done // total)
        end = "\n" if done == total else ""
        print(f"\r{bar:30} {done} of {total} replays", end=end, file=sys.stderr, flush=True)


def _describe(made: CachePlan) -> str:
    cell = made.recommended.cell
    lines = text_table(HEADS, [tuple(row_texts(row)) for row in made.rows])
    if made.loads:
        rows = [(f"× {1 / row.cell.stretch:g}", *row_texts(row)) for row in made.loads]
        lines += ["", *text_table(("load", *HEADS), rows)]
    lines += [
        "",
        f"recommended: {cell.host_gib:g} GiB of host memory, {cell.disk_gib:g} GiB of disk, "
        f"{cell.policy}. {made.recommended.reason}",
    ]
    if left_out := made.rows[0].report.refused:
        lines.append(f"{left_out:,} {LEFT_OUT}")
    return "\n".join(lines)
