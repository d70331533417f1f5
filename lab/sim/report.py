"""The result of a campaign: tables for people, a document for programs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from penstock.cache.states import TABLES

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence

    from lab.sim.campaign import Failure, Outcome

IMPOSSIBLE = "impossible"
_SEEDS_SHOWN = 8


def lines_of(outcome: Outcome) -> Iterator[str]:
    """Everything a campaign found, as tables."""
    coverage, kinds_seen = outcome.coverage, outcome.coverage.kinds
    yield (
        f"{coverage.seed_count} seeds, {coverage.event_count} events "
        f"({coverage.events_mean:.1f} a seed), {outcome.seconds:.1f} s"
    )
    for title, kinds, counts, seeds in (
        ("event", kinds_seen.events, coverage.events, coverage.event_seeds),
        ("fault", kinds_seen.faults, coverage.faults, coverage.fault_seeds),
        (kinds_seen.copy_word, kinds_seen.copies, coverage.copies, coverage.copy_seeds),
    ):
        yield ""
        yield from _aligned(_kind_rows(title, kinds, counts, seeds, coverage.seed_count))
    if not kinds_seen.has_tables:
        return
    for table in TABLES:
        yield ""
        yield from _aligned(_move_rows(outcome, table.name))
    yield f"{IMPOSSIBLE}: not in the table of states; the cache raises when it is tried"


def failure_lines(outcome: Outcome, scenario: str) -> Iterator[str]:
    """The seeds that failed, those alike together, and what was seen too rarely."""
    alike: dict[str, list[Failure]] = defaultdict(list)
    for failure in outcome.failures:
        alike[failure.kind].append(failure)
    for failures in sorted(alike.values(), key=len, reverse=True):
        first = failures[0]
        seeds = ", ".join(str(failure.seed) for failure in failures[:_SEEDS_SHOWN])
        more = " …" if len(failures) > _SEEDS_SHOWN else ""
        yield f"{len(failures)} failed: {first.checker}: {first.problem} ({first.where})"
        yield f"  seeds {seeds}{more}"
        yield f"  lab sim --scenario {scenario} --seed {first.seed} --trace"
    for shortfall in outcome.coverage.shortfalls():
        yield f"seen too rarely: {shortfall}"


def document_of(outcome: Outcome) -> dict[str, object]:
    """The same as plain values."""
    coverage, kinds = outcome.coverage, outcome.coverage.kinds
    tables = TABLES if kinds.has_tables else ()
    return {
        "seeds": coverage.seed_count,
        "events": coverage.event_count,
        "events_mean": coverage.events_mean,
        "seconds": outcome.seconds,
        "event_kinds": _kinds(kinds.events, coverage.events, coverage.event_seeds),
        "fault_kinds": _kinds(kinds.faults, coverage.faults, coverage.fault_seeds),
        f"{kinds.copy_word}_kinds": _kinds(kinds.copies, coverage.copies, coverage.copy_seeds),
        "moves": {table.name: _moves(outcome, table.name) for table in tables},
        "failures": [
            {"seed": f.seed, "checker": f.checker, "problem": f.problem, "where": f.where}
            for f in outcome.failures
        ],
        "seen_too_rarely": coverage.shortfalls(),
    }


def _kinds(
    kinds: Sequence[str], counts: Counter[str], seeds: Counter[str]
) -> dict[str, dict[str, int]]:
    return {kind: {"count": counts[kind], "seeds": seeds[kind]} for kind in kinds}


def _moves(outcome: Outcome, name: str) -> dict[str, dict[str, int | None]]:
    """State and move to the number of times; `None` for what is impossible."""
    table = next(table for table in TABLES if table.name == name)
    counts = outcome.coverage.moves[name]
    legal = {(int(state), int(move)) for state, move in table.legal}
    return {
        state.name: {
            move.name: counts[move][state] if (int(state), int(move)) in legal else None
            for move in table.moves
        }
        for state in table.states
    }


def _kind_rows(
    title: str, kinds: Sequence[str], counts: Counter[str], seeds: Counter[str], seed_count: int
) -> list[list[str]]:
    rows = [[title, "count", "a seed", "of seeds"]]
    for kind in kinds:
        share = seeds[kind] / max(1, seed_count)
        mean = counts[kind] / max(1, seed_count)
        rows.append([kind, str(counts[kind]), f"{mean:.2f}", f"{share:.1%}"])
    return rows


def _move_rows(outcome: Outcome, name: str) -> list[list[str]]:
    by_state = _moves(outcome, name)
    rows = [[name, *(state.lower() for state in by_state)]]
    for move in next(iter(by_state.values())):
        counts = [by_state[state][move] for state in by_state]
        rows.append([move.lower(), *(IMPOSSIBLE if c is None else str(c) for c in counts)])
    return rows


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells)
