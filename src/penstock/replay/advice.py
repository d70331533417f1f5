"""What a plan found, and what follows from it: values, and sentences for people.

What is recommended is the cheapest of what comes close: of all configurations that find at least
`ENOUGH` of what the best of them finds, the one with the least disk and memory. Memory counts
first: a GiB of it costs more than one of a disk. Where times are known, those come close whose mean
time to first token is within the same share of the quickest one's: that is what people wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.replay.report import FirstToken  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Sequence


ENOUGH = 0.9
POINTS_MIN = 0.0005
"""A smaller share of all prompt tokens is not worth a word: 0.05 %."""


class PlanCell(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration."""

    policy: str
    write: str
    """How blocks come into the host tier; empty where there is none."""
    host_gib: float
    disk_gib: float
    stretch: float = 1.0


class CellFound(msgspec.Struct, frozen=True, kw_only=True):
    """What requests found with one configuration."""

    requests: int
    refused: int
    """Requests with more blocks than the device: they are counted nowhere else."""
    tokens: int
    """Of all prompts."""
    token_rate: float
    """The share of them that was found."""
    tier_rates: list[float]
    """The same for each tier, the device first."""
    first_token: FirstToken | None
    """`None` where nothing takes time."""
    estimated: bool = False
    """Whether it was not replayed, as another configuration of the same sizes finds more."""


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration, with what it finds and could find."""

    cell: PlanCell
    total_gib: float
    """Of device, host and disk."""
    found: CellFound
    best_rate: float
    """What any policy could find in the same room."""
    tokens_per_gib: float | None
    """Tokens more than with the next smaller size of the host tier, for each GiB more."""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration to take, and why."""

    cell: PlanCell
    reason: str


class CachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result; `--json` writes it."""

    trace: str
    block_tokens: int
    token_bytes: int
    device_gib: float
    rows: list[PlanRow]
    bound: list[tuple[float, float]]
    """Total GiB, and the share of prompt tokens that any policy could find."""
    lru: list[tuple[float, float]]
    """The same for one LRU over all the room."""
    most: float
    """What would be found if nothing ever left."""
    recommended: Recommendation
    gap: str
    """What closes the gap to the bound."""
    notes: list[str]
    """What those who gave the sizes should know."""
    loads: list[PlanRow]
    """The recommended configuration with the trace stretched; empty where nothing takes time."""


def name_of(cell: PlanCell) -> str:
    """A configuration in a few words."""
    host = f", {cell.host_gib:g} GiB of host memory ({cell.write})" if cell.host_gib else ""
    disk = f", {cell.disk_gib:g} GiB of disk" if cell.disk_gib else ""
    return f"{cell.policy}{host or ', no host tier'}{disk}"


def recommend(rows: Sequence[PlanRow]) -> Recommendation:
    """The configuration with the least memory, and then disk, that comes close to the best."""
    best = max(rows, key=_worth)
    enough = [row for row in rows if _comes_close(row, best)]
    # Of equal sizes the best one, and of those that are as good the first, which is the simplest.
    least = min((row.cell.host_gib, row.cell.disk_gib) for row in enough)
    chosen = max(
        (row for row in enough if (row.cell.host_gib, row.cell.disk_gib) == least), key=_worth
    )
    return Recommendation(cell=chosen.cell, reason=_reason(rows, chosen, best))


def _worth(row: PlanRow) -> float:
    first = row.found.first_token
    return row.found.token_rate if first is None else -first.mean_s


def _comes_close(row: PlanRow, best: PlanRow) -> bool:
    if row.found.first_token is None or best.found.first_token is None:
        return row.found.token_rate >= ENOUGH * best.found.token_rate
    return best.found.first_token.mean_s >= ENOUGH * row.found.first_token.mean_s


def _reason(rows: Sequence[PlanRow], chosen: PlanRow, best: PlanRow) -> str:
    largest = max(row.total_gib for row in rows)
    first, quickest = chosen.found.first_token, best.found.first_token
    text = (
        f"It finds {chosen.found.token_rate:.2%} of prompt tokens with "
        f"{chosen.total_gib:g} GiB in all"
    )
    if first is None or quickest is None:
        text += ". "
        most = f"the {best.found.token_rate:.2%} that the best configuration here finds"
        close, less = f"at least {ENOUGH:.0%} of {most}", f"finds {ENOUGH:.0%} of {most}"
    else:
        text += f", and the first token comes after {first.mean_s:.2f} s on average. "
        most = f"the {quickest.mean_s:.2f} s of the quickest configuration here"
        close = f"within {1 / ENOUGH - 1:.0%} of {most}"
        less = f"is {close}"
    tried = f", of up to {largest:g} GiB"
    if not any(row.cell.host_gib for row in rows):
        return f"{text}No host tier was tried."
    if not best.found.token_rate:
        return f"{text}No configuration here finds anything: no prompt comes back while it is kept."
    if not chosen.cell.host_gib:
        return f"{text}That is {close}{tried}, so host memory adds little."
    # Where more still brings much, what is best was not among them.
    larger = len(rows) > 1 and chosen.total_gib == largest
    advice = " It is the largest that was tried: try larger ones." if larger else ""
    return f"{text}No smaller host tier {less}{tried}.{advice}"


def sentence_on_the_gap(rows: Sequence[PlanRow], chosen: PlanCell) -> str:
    """What closes the gap between LRU as it is by default and the best possible in this room."""
    size = (chosen.host_gib, chosen.disk_gib)
    base, *others = [row for row in rows if (row.cell.host_gib, row.cell.disk_gib) == size]
    rate, best = base.found.token_rate, base.best_rate
    gap = best - rate
    name = f"{base.cell.policy} with {base.cell.write}" if base.cell.write else base.cell.policy
    if gap < POINTS_MIN:
        return f"In this room {name} finds as much as any policy could, {best:.2%}."
    closed = [
        f"{_difference(row.cell, base.cell)} closes {100 * (row.found.token_rate - rate):.2f}"
        for row in others
        if row.found.token_rate - rate >= POINTS_MIN
    ]
    closes = ", ".join(closed) or "nothing that was tried closes any"
    larger = max(rows, key=lambda row: row.found.token_rate)
    more = larger.cell.host_gib > chosen.host_gib or larger.cell.disk_gib > chosen.disk_gib
    rest = f"; {name_of(larger.cell)} finds {larger.found.token_rate:.2%}" if more else ""
    return (
        f"In this room {name} finds {rate:.2%} and the best possible is {best:.2%}: of these "
        f"{100 * gap:.2f} points {closes}; hints of clients may close more (penstock replay "
        f"--perfect-hints says how much){rest}."
    )


def _difference(cell: PlanCell, base: PlanCell) -> str:
    if cell.write == base.write:
        return cell.policy
    return cell.write if cell.policy == base.policy else f"{cell.policy} with {cell.write}"


def notes_on(rows: Sequence[PlanRow], device_gib: float) -> list[str]:
    """What those who gave the sizes should know."""
    small = {
        row.cell.host_gib
        for row in rows
        if row.cell.write == "write_through" and row.cell.host_gib <= device_gib
    }
    if not small:
        return []
    sizes = ", ".join(f"{size:g}" for size in sorted(small))
    return [
        f"A host tier of {sizes} GiB is not larger than the device, {device_gib:g} GiB: with "
        "write_through it has the blocks that the device has, and finds next to nothing; with "
        "exclusive, rooms add up."
    ]
