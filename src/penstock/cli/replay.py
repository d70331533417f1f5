"""`penstock replay` and `penstock plan`: a trace, played through one cache or through many."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from penstock.cache.eviction import policy_named
from penstock.cli.conventions import (
    ConfigOption,
    JobsOption,
    JsonOption,
    Takes,
    require_two_files,
    show_result,
    with_options,
    write_text,
)
from penstock.config import String, load_config, parse_config
from penstock.replay.advice import name_of
from penstock.replay.lines import SHIPPED, copies_of_pipes
from penstock.replay.page import columns_of, loads_of, page_of
from penstock.replay.plan import ADAPTIVE, HOST_SIZES, LRU, WRITES, Planner, PlanSettings, cells_of
from penstock.replay.report import LEFT_OUT, describe, report_on, text_table
from penstock.replay.simulation import BestPossible, Replay, Speeds, sized_cache
from penstock.replay.trace import ID_TOKENS, PerfectHints, TraceReader, natural_block_tokens
from penstock.vocabulary.keys import BLOCK_TOKENS_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.config import Config
    from penstock.replay.advice import CachePlan, CellFound, PlanCell
    from penstock.replay.plan import FirstPass


KV_BYTES = 131_072
"""Of a token in an 8B model with 8 KV heads: 32 layers of keys and values of 1,024 × 2 bytes."""
DEVICE_GIB, HOST_GIB = 40, 128
"""What such a model leaves of a GPU of 80 GB, and a part of its host's memory."""

GB_PER_S_MIN = 0.001
"""Slower links are mistakes of units, and a replay of them takes for ever: while blocks are copied,
every step of the engine is played."""

IdTokensOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=BLOCK_TOKENS_MAX,
        help=f"Tokens of one of the trace's hash_ids; {ID_TOKENS} if not given.",
    ),
]
RateOption = Annotated[float | None, Takes("N")]
TracesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE...",
        help="Files of requests (JSON lines, also packed by gzip, xz or zstd), pipes, - for "
        f"standard input, or one of {', '.join(SHIPPED)}.",
    ),
]
KvBytesOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=1 << 30,
        help=f"Bytes of KV a token, on one rank; {KV_BYTES} without --config.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions:
    """What the options of both commands say of a trace, and of time."""

    trace_block_tokens: IdTokensOption = None
    prefill_rate: RateOption = None
    """Tokens a second that the engine prefills."""
    output_rate: RateOption = None
    """Tokens a second of each answer."""
    bandwidth: Annotated[list[str] | None, Takes("TIER=GB/S")] = None
    """GB a second to and from a tier, on one rank; may be given for each."""
    json: JsonOption = None

    def speeds(self, *, tiers: Collection[str] = ()) -> Speeds:
        """What they say of time; only these tiers may have a rate, if any are given."""
        prefill = _require_rate("--prefill-rate", self.prefill_rate)
        output = _require_rate("--output-rate", self.output_rate)
        rates: dict[str, float] = {}
        for each in self.bandwidth or []:
            name, rate = _read_bandwidth(each)
            problem = " twice, must be given once for each tier" if name in rates else ""
            if tiers and name not in tiers:
                problem = f", must be one of {', '.join(tiers)}"
            if problem:
                raise typer.BadParameter(f"names {name!r}{problem}", param_hint="--bandwidth")
            rates[name] = rate
        return Speeds(
            prefill_tokens_per_s=prefill, output_tokens_per_s=output, tier_bytes_per_s=rates
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(SpeedOptions):
    """Those of `penstock replay`."""

    config: ConfigOption = None
    device_blocks: Annotated[int | None, Takes("N", 1, 1 << 30)] = None
    """Blocks of the device, where the file leaves them to the engine."""
    kv_bytes: KvBytesOption = None
    best: Annotated[
        bool, typer.Option(help="Compare with the best that any eviction policy could do.")
    ] = True
    perfect_hints: bool = False
    """As if clients said of each request which blocks will be used again."""


@with_options(ReplayOptions)
def replay(traces: TracesArgument, **given: Any) -> None:  # noqa: ANN401  (see `ReplayOptions`)
    """Play a trace of requests through the cache of a configuration.

    The cache is the one that serves; only time and copies are modelled. Without rates, every
    request ends before the next one comes. Without --config: a device of 40 GiB over a host tier
    of 128 GiB, for a model of 8B parameters.
    """
    options = ReplayOptions(**given)
    config, id_tokens = options.config, options.trace_block_tokens
    # A pipe that is read once need not be copied. Without --config, its first line is read before.
    again = traces if options.perfect_hints else [] if config else traces[:1]
    with copies_of_pipes(again) as copies:
        token_bytes = options.kv_bytes or (0 if config else KV_BYTES)
        settings = (
            load_config(config) if config else _example(traces[0], token_bytes, id_tokens, copies)
        )
        blocks = options.device_blocks or 0
        cache = sized_cache(settings, token_bytes=token_bytes, device_blocks=blocks)
        player = Replay(cache, options.speeds(), BestPossible() if options.best else None)
        reader = TraceReader(settings, id_tokens=id_tokens, copies=copies)
        requests = reader.read_all(traces)
        if options.perfect_hints:
            hints = PerfectHints(requests, cache.block_tokens)
            requests = hints.written_into(reader.read_all(traces))
        player.run(requests)
    report = report_on(player, traces=list(traces))
    show_result(options.json, describe(report), msgspec.to_builtins(report))


def _example(
    trace: str, token_bytes: int, id_tokens: int | None, copies: Mapping[str, str]
) -> Config:
    """A configuration for those who have none yet, with the blocks of the trace."""
    block_tokens = natural_block_tokens(trace, id_tokens=id_tokens, copies=copies)
    device, host = (
        max(1, (gib << 30) // (token_bytes * block_tokens)) for gib in (DEVICE_GIB, HOST_GIB)
    )
    return parse_config(
        f'version = 1\n[model]\nname = "example"\n'
        f"[cache]\nblock_tokens = {block_tokens}\nblocks = {device}\n"
        f'[[tiers]]\nname = "host"\nkind = "memory"\nblocks = {host}\n'
    )


def _require_rate(option: str, given: float | None) -> float:
    """A rate that was given, or infinity."""
    if given is None:
        return math.inf
    if not 0 < given < math.inf:
        raise typer.BadParameter(f"is {given:g}, must be a number above 0", param_hint=option)
    return given


def _read_bandwidth(given: str) -> tuple[str, float]:
    name, equals, number = given.partition("=")
    try:
        rate = float(number)
    except ValueError:
        rate = math.nan
    if not (name and equals and GB_PER_S_MIN <= rate < math.inf):
        raise typer.BadParameter(
            f"is {given!r}, must be the name of a tier and GB a second, at least "
            f"{GB_PER_S_MIN:g}, such as host=50",
            param_hint="--bandwidth",
        )
    return name, rate * 1e9


GIB_MIN, GIB_MAX = 1e-6, 1 << 20
TIERS = ("host", "disk")
CORES = os.cpu_count() or 1
BOTH_WRITES = ",".join(WRITES)


PlannedTraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help=f"A file of requests, a pipe, -, or one of {', '.join(SHIPPED)}."
    ),
]
HostGibOption = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help=f"Sizes of the host tier to try; 0 and {HOST_SIZES} above the device's if not given.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(SpeedOptions):
    """Those of `penstock plan`."""

    device_gib: Annotated[float, Takes("N")] = float(DEVICE_GIB)
    """Room for KV on the device."""
    host_gib: HostGibOption = None
    disk_gib: Annotated[str, Takes("N,N")] = "0"
    """Sizes of a disk below it to try."""
    policy: Annotated[str, Takes("NAME,NAME")] = f"{LRU},{ADAPTIVE}"
    """Eviction policies."""
    write: Annotated[str, Takes("NAME,NAME")] = BOTH_WRITES
    """How blocks come into the host tier."""
    kv_bytes: Annotated[int, Takes("N", 1, 1 << 30)] = KV_BYTES
    """Of KV a token."""
    html: Annotated[Path | None, Takes("FILE")] = None
    """Write a page with curves, too."""
    jobs: JobsOption = CORES


@with_options(PlanOptions)
def plan(trace: PlannedTraceArgument, **given: Any) -> None:  # noqa: ANN401  (see `PlanOptions`)
    """Replay a trace with several sizes of tiers, policies and ways to write, and recommend one.

    A first answer comes at once, for LRU. With rates, the plan predicts first tokens, recommends
    by them, and says how they change with the load.
    """
    options = PlanOptions(**given)
    require_two_files(options.json, options.html)
    policies = tuple(options.policy.split(","))
    for name in policies:
        policy_named(name, place="--policy")
    with copies_of_pipes([trace]) as copies:
        settings = PlanSettings(
            trace=trace,
            id_tokens=options.trace_block_tokens,
            copies=copies,
            token_bytes=options.kv_bytes,
            device_gib=_device_size(options.device_gib),
            host_gib=_sizes("--host-gib", options.host_gib) if options.host_gib else (),
            disk_gib=_sizes("--disk-gib", options.disk_gib),
            policies=policies,
            writes=_read_writes(options.write),
            speeds=options.speeds(tiers=TIERS),
        )
        made = Planner(settings, jobs=options.jobs, watch=_Progress(settings)).run()
    show_result(options.json, _describe(made), msgspec.to_builtins(made))
    if options.html is not None:
        write_text(options.html, page_of(made), option="--html")


def _read_writes(given: str) -> tuple[str, ...]:
    names = tuple(given.split(","))
    for name in names:
        String(choices=tuple(WRITES)).read("--write", name)
    return names


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


FIRST_ANSWER_S = 3.0
"""After this the first answer is given, from what was read so far, if the trace is that long."""


class _Progress:
    """Says on standard error what is known so far: lines for people and files alike."""

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings
        self._began_s = time.monotonic()
        self._answered = False
        self._bar = sys.stderr.isatty()

    def reading(self, found: FirstPass, *, ended: bool) -> None:
        """The first answer, in time, and again when all was read."""
        late = time.monotonic() - self._began_s > FIRST_ANSWER_S
        if ended or (late and not self._answered):
            self._answered = True
            self._say(_first_answer(self._settings, found, ended=ended))

    def ended(self, found: tuple[PlanCell, CellFound] | None, done: int, total: int) -> None:
        """What a replay found, and how many are still to come."""
        what = "replays"
        if found is not None:
            cell, outcome = found
            load = "" if cell.stretch == 1.0 else f", load × {1 / cell.stretch:g}"
            what = f"replays: {name_of(cell)}{load}: {outcome.token_rate:.2%}"
        spent_s = time.monotonic() - self._began_s
        self._say(f"{spent_s:4.0f} s, {done} of {total} {what}")
        if self._bar and done < total:
            print("█" * (30 * done // total), end="", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._bar else text, file=sys.stderr, flush=True)


def _first_answer(settings: PlanSettings, found: FirstPass, *, ended: bool) -> str:
    cells = [cell for cell in cells_of(settings) if cell.policy == settings.policies[0]]
    texts = [
        f"{cell.host_gib:g} GiB {cell.write} {found.estimate(cell):.2%}"
        if cell.host_gib
        else f"no host tier {found.estimate(cell):.2%}"
        for cell in cells
    ]
    so_far = "" if ended else ", so far"
    sampled = "" if found.curve.one_of == 1 else f", from one of {found.curve.one_of} blocks"
    return (
        f"first answer, by {LRU} over {found.requests:,} requests{so_far}{sampled}: "
        f"{'; '.join(texts)}; in any room at most {found.most():.2%}"
    )


def _describe(made: CachePlan) -> str:
    lines = text_table(*columns_of(made.rows))
    if made.loads:
        lines += ["", *text_table(*columns_of(made.loads, loads_of(made)))]
    chosen = made.recommended
    lines += ["", f"recommended: {name_of(chosen.cell)}. {chosen.reason}", made.gap, *made.notes]
    if left_out := made.rows[0].found.refused:
        lines.append(f"{left_out:,} {LEFT_OUT}")
    return "\n".join(lines)
