"""What a replay found: a value for JSON, and a few tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.errors import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.replay.simulation import BestPossible, Replay


LEFT_OUT = "requests have more blocks than they can get: they were left out"


class TierShare(msgspec.Struct, frozen=True, kw_only=True):
    """What requests found in one tier."""

    name: str
    blocks: int
    """Its size."""
    tokens: int
    token_rate: float
    """The share of all prompt tokens."""
    requests: int
    """Requests that found something there."""
    request_rate: float
    refused: int
    """Blocks that it did not take, as those that lay there were worth more."""


class HopUse(msgspec.Struct, frozen=True, kw_only=True):
    """What went from one tier to another."""

    source: str
    target: str
    blocks: int
    bytes: int | None
    """On one rank; `None` where the bytes of a token are not known."""
    busy: float | None
    """The share of the time in which the link was busy; `None` where its rate is not given."""


class MissCount(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that found no more for one reason."""

    reason: str
    requests: int
    tokens: int
    """What they had to compute."""


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """The time from the arrival of requests to their first token, as the model predicts it."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    compute_busy: float
    """The share of the time in which the engine computed prompts."""


class BestRate(msgspec.Struct, frozen=True, kw_only=True):
    """What any eviction policy could have found at most in the same room."""

    blocks: int
    """The room: the blocks of all tiers together."""
    token_rate: float
    gap: float
    """How much more that is than was found, as a share of all prompt tokens."""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result; `--json` writes it."""

    traces: list[str]
    block_tokens: int
    policy: list[str]
    """The eviction policy of each tier, device first."""
    requests: int
    refused: int
    lost: int
    answers_without_room: int
    block_touches: int
    tokens: int
    token_rate: float
    """The share of prompt tokens that were found in whatever tier."""
    tiers: list[TierShare]
    hops: list[HopUse]
    misses: list[MissCount]
    tokens_computed_instead: int
    """Tokens that lay below the device, but were quicker to compute than to load."""
    blocks_not_saved: int
    """Blocks that a tier below had no room for, or whose disk was too slow for them."""
    first_token: FirstToken | None
    """`None` where nothing takes time."""
    best: BestRate | None
    """`None` where it was not asked for."""


def report_on(replay: Replay, *, traces: list[str]) -> ReplayReport:
    """The report of a replay that has ended."""
    tally, settings = replay.tally, replay.settings
    names = replay.machine.tier_names
    sizes = replay.machine.tier_sizes()
    policies = [each.eviction for each in (settings.device, *settings.tiers) if each]
    tokens = tally.tokens or 1
    found = sum(tally.tokens_by_tier)
    statistics = replay.machine.statistics()
    refused = {tier.name: tier.blocks_refused for tier in statistics.tiers}
    misses = sorted(tally.misses.items(), key=lambda item: -item[1][1])
    return ReplayReport(
        traces=traces,
        block_tokens=settings.block_tokens,
        policy=policies,
        requests=tally.requests,
        refused=tally.refused,
        lost=tally.lost,
        answers_without_room=tally.answers_without_room,
        block_touches=tally.blocks,
        tokens=tally.tokens,
        token_rate=found / tokens,
        tiers=[
            TierShare(
                name=name,
                blocks=sizes[name],
                tokens=tally.tokens_by_tier[index],
                token_rate=tally.tokens_by_tier[index] / tokens,
                requests=tally.requests_by_tier[index],
                request_rate=tally.requests_by_tier[index] / (tally.requests or 1),
                refused=refused[name],
            )
            for index, name in enumerate(names)
        ],
        hops=_hops(replay),
        misses=[
            MissCount(reason=reason, requests=requests, tokens=missed)
            for reason, (requests, missed) in misses
        ],
        tokens_computed_instead=statistics.tokens_computed_instead,
        blocks_not_saved=statistics.saves_refused + statistics.saves_skipped,
        first_token=_first_token(replay),
        best=None if replay.bound is None else _best(replay, replay.bound, found),
    )


def _hops(replay: Replay) -> list[HopUse]:
    names = replay.machine.tier_names
    block_bytes = replay.settings.block_bytes
    rates = replay.speeds.tier_bytes_per_s
    return [
        HopUse(
            source=names[source],
            target=names[target],
            blocks=link.blocks,
            bytes=link.blocks * block_bytes if block_bytes else None,
            busy=link.busy_s / _lasted_s(replay) if names[max(source, target)] in rates else None,
        )
        for (source, target), link in sorted(replay.links.items())
    ]


def _lasted_s(replay: Replay) -> float:
    return max(replay.tally.last_s - replay.tally.first_s, 1e-9)


def _first_token(replay: Replay) -> FirstToken | None:
    times = np.array(replay.tally.first_token_s)
    if replay.speeds.instant or not len(times):
        return None
    p50, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    return FirstToken(
        mean_s=float(times.mean()),
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        compute_busy=replay.compute_busy_s / _lasted_s(replay),
    )


def _best(replay: Replay, best: BestPossible, found: int) -> BestRate:
    room = sum(replay.machine.tier_sizes().values())
    tokens = best.found(room) * replay.settings.block_tokens
    total = replay.tally.tokens or 1
    return BestRate(blocks=room, token_rate=tokens / total, gap=(tokens - found) / total)


def describe(report: ReplayReport) -> str:
    """The report as text."""
    lines = [
        f"{', '.join(report.traces)}: {counted(report.requests, 'request')}, "
        f"{report.tokens:,} prompt tokens, {report.block_touches:,} blocks of "
        f"{counted(report.block_tokens, 'token')}",
        f"found: {report.token_rate:.2%} of prompt tokens",
        "",
        *text_table(
            ("tier", "blocks", "policy", "tokens found", "", "requests", ""),
            [
                (
                    tier.name,
                    f"{tier.blocks:,}",
                    policy,
                    f"{tier.tokens:,}",
                    f"{tier.token_rate:.2%}",
                    f"{tier.requests:,}",
                    f"{tier.request_rate:.2%}",
                )
                for tier, policy in zip(report.tiers, report.policy, strict=True)
            ],
        ),
    ]
    if report.hops:
        lines += [
            "",
            *text_table(("copies", "blocks", "GiB", "busy"), list(map(_hop_row, report.hops))),
        ]
    rows = [(each.reason, f"{each.requests:,}", f"{each.tokens:,}") for each in report.misses]
    lines += ["", *text_table(("why no more was found", "requests", "tokens computed"), rows), ""]
    if report.first_token is not None:
        first = report.first_token
        lines.append(
            f"first token: mean {first.mean_s:.3f} s, p50 {first.p50_s:.3f} s, p90 "
            f"{first.p90_s:.3f} s, p99 {first.p99_s:.3f} s; computing {first.compute_busy:.1%} "
            "of the time (a model, not a measurement)"
        )
    if report.best is not None:
        lines.append(
            f"best possible with {report.best.blocks:,} blocks: {report.best.token_rate:.2%}; "
            f"gap {report.best.gap:.2%} of prompt tokens"
        )
    for number, what in (
        (report.refused, LEFT_OUT),
        (report.lost, "requests lost their room while they waited"),
        (report.answers_without_room, "answers found no room beside their prompts"),
        (report.blocks_not_saved, "blocks were not saved below: no room, or a disk too slow"),
        (report.tokens_computed_instead, "tokens were quicker to compute than to load"),
    ):
        if number:
            lines.append(f"{number:,} {what}")
    for tier in report.tiers:
        if tier.refused:
            lines.append(f"{tier.refused:,} blocks were refused by {tier.name}: not worth the room")
    return "\n".join(lines)


def _hop_row(hop: HopUse) -> tuple[str, ...]:
    gib = "" if hop.bytes is None else f"{hop.bytes / (1 << 30):,.1f}"
    busy = "" if hop.busy is None else f"{hop.busy:.1%}"
    return (f"{hop.source} → {hop.target}", f"{hop.blocks:,}", gib, busy)


def text_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table; the first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
