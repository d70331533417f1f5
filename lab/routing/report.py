"""Runs of simulated engines, as a table and as a document."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.routing.world import Outcome

COLUMNS = (
    *("engines", "policy", "requests", "failed", "retried", "hits", "first token p50, s", "p99, s"),
    *("a choice, ms", "p99, ms", "blocks of KV events a CPU second"),
    *("bytes of the directory an engine", "a block", "took, s"),
)


def table_of(outcomes: Sequence[Outcome], title: str) -> Table:
    """A row a run."""
    table = Table(*COLUMNS, title=title)
    for each in outcomes:
        engines, known = each.conditions.engines, max(1, each.directory_blocks)
        table.add_row(
            *(f"{engines:,}", each.conditions.policy, f"{each.requests:,}"),
            *(f"{each.failed:,}", f"{each.retried:,}", f"{each.hit_rate:.1%}"),
            *(f"{each.first_token_p50_s:.2f}", f"{each.first_token_p99_s:.2f}"),
            *(f"{each.choice_cpu_p50_ms:.3f}", f"{each.choice_cpu_p99_ms:.3f}"),
            f"{each.event_keys_a_cpu_s:,.0f}",
            *(f"{each.directory_bytes / engines:,.0f}", f"{each.directory_bytes / known:.0f}"),
            f"{each.wall_s:.0f}",
        )
    return table


def document_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For JSON."""
    found = []
    for outcome in outcomes:
        row = asdict(outcome)
        conditions = row.pop("conditions")
        conditions["faults"] = sorted(conditions["faults"])
        found.append(conditions | row)
    return found


def losses_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Where our policy is worse than it should be: by the 99th percentile or by hits."""
    found = []
    rows = {(each.conditions.engines, each.conditions.policy.value): each for each in outcomes}
    for (engines, policy), ours in rows.items():
        if policy != "ours" or engines == 1:
            continue
        least, affine = (rows.get((engines, name)) for name in ("least-loaded", "prefix-affine"))
        if least is not None and ours.first_token_p99_s > least.first_token_p99_s:
            found.append(
                f"{engines} engines: first token p99 is {ours.first_token_p99_s:.2f} s, "
                f"least-loaded {least.first_token_p99_s:.2f} s"
            )
        if affine is not None and ours.hit_rate < affine.hit_rate:
            found.append(
                f"{engines} engines: hits are {ours.hit_rate:.1%}, prefix-affine "
                f"{affine.hit_rate:.1%}"
            )
    return found
