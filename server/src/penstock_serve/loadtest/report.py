"""What a load test measured: a value for JSON, rows in which runs stand side by side, and a page.

| term                | means                                                                    |
|---------------------|--------------------------------------------------------------------------|
| first token         | from sending a request to the first event with text                      |
| between tokens      | from one event with text to the next one                                 |
| time a token        | of one answer, from its first to its last event, divided by its tokens   |
| goodput             | answers within all bounds that were given, a second                      |
| cached share        | of the prompt tokens, those that the server did not have to compute      |

The one rule: times are those of whole answers alone; every other request is counted as an error,
with its kind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from html import escape
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.errors import ConfigError, counted
from penstock.toolkit import COLOURS, STYLE, LineChart, text_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from penstock_serve.loadtest.runner import SentRequest

REPORT_BYTES_MAX = 1 << 30
LATE_S = 0.05
"""A generator that is so late itself distorts what it measures."""


class TimeSpread(msgspec.Struct, frozen=True, kw_only=True):
    """How a time is distributed, in seconds."""

    samples: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


class AskedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request; times in seconds, `None` where there is none."""

    session: int
    turn: int
    began_s: float
    """Since the run began."""
    first_token_s: float | None = None
    token_s: float | None = None
    """The time a token, of an answer with more than one."""
    end_to_end_s: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""
    """The kind of what went wrong; empty for a whole answer."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that came in time."""

    ttft_bound_s: float | None
    tpot_bound_s: float | None
    requests: int
    share: float
    """Of all requests, also of those that failed."""
    requests_per_s: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result; `--json` writes it."""

    penstock: str
    label: str
    url: str
    model: str
    settings: dict[str, Any]
    """What was asked for: equal settings ask exactly the same."""
    interrupted: bool
    """The run was ended before all requests were sent."""
    seconds: float
    """From the first request to the end of the last answer."""
    requests: int
    answered: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    """For each kind, the first message."""
    first_token: TimeSpread | None
    first_turns: TimeSpread | None
    """The first token in first turns, where a session's own text cannot be cached yet."""
    later_turns: TimeSpread | None
    """The first token in later turns."""
    between_tokens: TimeSpread | None
    token: TimeSpread | None
    """The time a token."""
    end_to_end: TimeSpread | None
    late: TimeSpread | None
    """How late the generator itself was."""
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cached_share: float | None
    """`None` where no answer says how many tokens were cached. Of an answer that does not say it,
    while others do, none were: SGLang leaves the field out where nothing was found."""
    without_usage: int
    """Answers without `usage`; their tokens are not counted."""
    goodput: Goodput
    records: list[AskedRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """What a report says of its run besides what was measured."""

    penstock: str
    label: str
    url: str
    model: str
    settings: dict[str, Any]
    ttft_bound_s: float | None
    tpot_bound_s: float | None


def load_report(
    asked: Sequence[SentRequest], context: LoadContext, *, began_s: float, interrupted: bool = False
) -> LoadReport:
    """The report of a run."""
    records = [_record(each, began_s) for each in asked]
    whole = [each for each in records if not each.error]
    seconds = max((each.answer.ended_s - began_s for each in asked), default=0.0)
    counted = [each for each in whole if each.prompt_tokens is not None]
    told = [each for each in counted if each.cached_tokens is not None]
    prompt = sum(each.prompt_tokens or 0 for each in counted)
    cached = sum(each.cached_tokens or 0 for each in told)
    output = sum(each.output_tokens or 0 for each in whole)
    failures = [each.answer.failure for each in asked if each.answer.failure is not None]
    return LoadReport(
        penstock=context.penstock,
        label=context.label,
        url=context.url,
        model=context.model,
        settings=context.settings,
        interrupted=interrupted,
        seconds=seconds,
        requests=len(records),
        answered=len(whole),
        errors=dict(Counter(each.kind for each in failures).most_common()),
        error_examples={each.kind: each.message for each in reversed(failures)},
        first_token=_spread(each.first_token_s for each in whole),
        first_turns=_spread(each.first_token_s for each in whole if each.turn == 0),
        later_turns=_spread(each.first_token_s for each in whole if each.turn),
        between_tokens=_spread(_gaps(asked)),
        token=_spread(each.token_s for each in whole),
        end_to_end=_spread(each.end_to_end_s for each in whole),
        late=_spread(each.late_s for each in asked),
        requests_per_s=_rate(len(whole), seconds),
        output_tokens_per_s=_rate(output, seconds),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        # Servers that leave the field out where nothing was cached: its absence there means none.
        cached_share=cached / max(1, prompt) if told else None,
        without_usage=len(whole) - len(counted),
        goodput=_goodput(records, context, seconds),
        records=records,
    )


def _record(asked: SentRequest, began_s: float) -> AskedRecord:
    answer = asked.answer
    times, usage = answer.token_times_s, answer.usage
    output = None if usage is None else usage.completion_tokens
    tokens = max(output or 0, len(times))
    return AskedRecord(
        session=asked.session,
        turn=asked.turn,
        began_s=answer.began_s - began_s,
        first_token_s=times[0] - answer.began_s if times else None,
        token_s=(times[-1] - times[0]) / (tokens - 1) if tokens > 1 and times else None,
        end_to_end_s=answer.ended_s - answer.began_s,
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        output_tokens=output,
        error="" if answer.failure is None else answer.failure.kind,
    )


def _gaps(asked: Sequence[SentRequest]) -> Iterable[float]:
    for each in asked:
        if each.answer.failure is None:
            yield from np.diff(each.answer.token_times_s).tolist()


def _spread(given: Iterable[float | None]) -> TimeSpread | None:
    times = np.array([each for each in given if each is not None])
    if not len(times):
        return None
    p50, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    return TimeSpread(
        samples=len(times),
        mean_s=float(times.mean()),
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        max_s=float(times.max()),
    )


def _rate(number: int, seconds: float) -> float:
    return number / seconds if seconds else 0.0


def _goodput(records: Sequence[AskedRecord], context: LoadContext, seconds: float) -> Goodput:
    good = sum(
        not each.error
        and _within(each.first_token_s, context.ttft_bound_s)
        and _within(each.token_s, context.tpot_bound_s)
        for each in records
    )
    return Goodput(
        ttft_bound_s=context.ttft_bound_s,
        tpot_bound_s=context.tpot_bound_s,
        requests=good,
        share=good / len(records) if records else 0.0,
        requests_per_s=_rate(good, seconds),
    )


def _within(value_s: float | None, bound_s: float | None) -> bool:
    return value_s is None or bound_s is None or value_s <= bound_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """A figure in which runs are compared."""

    title: str
    unit: str
    value: Callable[[LoadReport], float | None]
    more_is_better: bool = False

    def text(self, report: LoadReport) -> str:
        """The figure of one run."""
        value = self.value(report)
        if value is None:
            return "–"
        if self.unit == "%":
            return f"{value:.1%}"
        # Three digits; what is counted, and what is large, has no fraction.
        digits = 0 if not self.unit or value >= 100 else 1 if value >= 10 else 2
        return f"{value:,.{digits}f}"

    def gain(self, first: LoadReport, other: LoadReport) -> str:
        """How many times better another run is than the first one."""
        if not self.unit or self.unit == "%":
            return ""
        before, after = self.value(first), self.value(other)
        if not before or not after:
            return ""
        return f"× {after / before if self.more_is_better else before / after:.2f}"


def _spread_rows(title: str, field: str, *names: str) -> list[ComparedRow]:
    def value(name: str, report: LoadReport) -> float | None:
        spread: TimeSpread | None = getattr(report, field)
        return None if spread is None else 1000 * float(getattr(spread, f"{name}_s"))

    return [
        ComparedRow(title=f"{title}, {name}", unit="ms", value=partial(value, name))
        for name in names
    ]


def _rate_row(title: str, field: str) -> ComparedRow:
    return ComparedRow(title=title, unit="/s", value=attrgetter(field), more_is_better=True)


ROWS = (
    ComparedRow(title="requests", unit="", value=lambda each: each.requests),
    ComparedRow(title="failed", unit="", value=lambda each: each.requests - each.answered),
    *_spread_rows("first token", "first_token", "mean", "p50", "p90", "p99"),
    *_spread_rows("first token of first turns", "first_turns", "p50", "p90"),
    *_spread_rows("first token of later turns", "later_turns", "p50", "p90"),
    *_spread_rows("between tokens", "between_tokens", "p50", "p99", "max"),
    *_spread_rows("time a token", "token", "p50", "p90"),
    *_spread_rows("end to end", "end_to_end", "p50", "p90", "p99"),
    _rate_row("answers", "requests_per_s"),
    _rate_row("output tokens", "output_tokens_per_s"),
    _rate_row("goodput", "goodput.requests_per_s"),
    ComparedRow(title="within the bounds", unit="%", value=lambda each: each.goodput.share),
    ComparedRow(title="prompt tokens", unit="", value=lambda each: each.prompt_tokens),
    ComparedRow(title="cached share", unit="%", value=lambda each: each.cached_share),
)


def table_of(reports: Sequence[LoadReport]) -> list[tuple[str, ...]]:
    """A heading and a line for every figure; from the second run on, how much better it is."""
    first, *others = reports
    head = ["", "", first.label]
    for other in others:
        head += [other.label, "better"]
    lines = [tuple(head)]
    for row in ROWS:
        cells = [row.title, row.unit, row.text(first)]
        for other in others:
            cells += [row.text(other), row.gain(first, other)]
        if any(cell not in {"", "–"} for cell in cells[2:]):
            lines.append(tuple(cells))
    return lines


def notes_on(reports: Sequence[LoadReport]) -> list[str]:
    """What a reader must know to read the figures rightly."""
    own = [note for each in reports for note in _notes(each)]
    return [*own, *_bounds(reports), *_differences(reports)]


def _notes(report: LoadReport) -> list[str]:
    notes = [
        f"{number} failed, {kind}: {report.error_examples.get(kind, '')}"
        for kind, number in report.errors.items()
    ]
    if report.interrupted:
        notes.append("the run was interrupted: answers under way are not counted")
    if report.answered and report.cached_share is None:
        notes.append(
            "no answer says how many tokens were cached: none were, or the server does not say "
            "it; start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
        )
    if 0 < report.answered < 100:
        notes.append(f"of {counted(report.answered, 'answer')}, p99 is about the slowest one")
    if report.without_usage:
        notes.append(f"without usage came {counted(report.without_usage, 'answer')}")
    if report.late is not None and report.late.p99_s > LATE_S:
        notes.append(
            f"1 % of requests were sent more than {report.late.p99_s * 1000:.0f} ms late: this "
            "machine is too busy to measure; use another one, or a lower rate"
        )
    return [f"{report.label}: {note}" for note in notes]


def _bounds(reports: Sequence[LoadReport]) -> list[str]:
    """What goodput means in these runs: in one line, if in all of them the same."""
    told = [_bound(each.goodput) for each in reports]
    if len(set(told)) == 1:
        return told[:1]
    return [f"{each.label}: {text}" for each, text in zip(reports, told, strict=True)]


def _bound(goodput: Goodput) -> str:
    first, token = goodput.ttft_bound_s, goodput.tpot_bound_s
    within = [] if first is None else [f"a first token within {first:g} s"]
    within += [] if token is None else [f"{token:g} s a token"]
    return f"goodput: answers with {' and '.join(within)}" if within else "goodput: all answers"


def _differences(reports: Sequence[LoadReport]) -> list[str]:
    first = reports[0].settings
    return [
        f"{other.label} asked for something else than {reports[0].label}: {name} is "
        f"{other.settings.get(name)!r}, not {first.get(name)!r}"
        for other in reports[1:]
        for name in sorted(first.keys() | other.settings.keys())
        if first.get(name) != other.settings.get(name)
    ]


def describe_runs(reports: Sequence[LoadReport]) -> str:
    """The table and the notes as text."""
    head, *rows = table_of(reports)
    return "\n".join([*text_table(head, rows), "", *notes_on(reports)]).rstrip()


def read_report(path: Path) -> LoadReport:
    """A report that `--json` wrote.

    Raises `ConfigError`: the file has none.
    """
    try:
        with path.open("rb") as file:
            body = file.read(REPORT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    if len(body) > REPORT_BYTES_MAX:
        raise ConfigError(str(path), f"has more than {REPORT_BYTES_MAX} bytes, must be a report")
    try:
        return msgspec.json.decode(body, type=LoadReport)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            str(path), f"is not what `penstock load --json` writes: {error}"
        ) from error


TICKS_MS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
CURVE_POINTS = 100
LEAST_MS = 0.01
"""The scale is logarithmic: less than this is drawn as this."""
OWN_STYLE = """
td:first-child, th:first-child { text-align: left; } ul { padding-left: 1.2rem; }
.wide { overflow-x: auto; }
"""


def _shares(
    title: str,
    reports: Sequence[LoadReport],
    value: Callable[[AskedRecord], float | None],
) -> str:
    """For each run, the share of answers that took at most so long."""
    found = []
    for report in reports:
        times = [value(each) for each in report.records if not each.error]
        sorted_ms = np.sort([1000 * each for each in times if each is not None])
        found.append(np.maximum(sorted_ms, LEAST_MS))
    drawn = [each for each in found if len(each)]
    if not drawn:
        return ""
    least, most = min(each[0] for each in drawn), max(each[-1] for each in drawn)
    ticks = [
        tick
        for number, tick in enumerate(TICKS_MS)
        if TICKS_MS[min(number + 1, len(TICKS_MS) - 1)] >= least
        and TICKS_MS[max(number - 1, 0)] <= most
    ] or [float(least)]
    chart = LineChart([*ticks, float(least), float(most)], 1.0)
    chart.add_axes(ticks, "ms, logarithmic; the curve shows the share of answers", percent=True)
    for number, (report, times_ms) in enumerate(zip(reports, found, strict=True)):
        if not len(times_ms):
            continue
        shares = np.linspace(0, 1, CURVE_POINTS + 1)[1:]
        points = [(float(np.quantile(times_ms, share)), float(share)) for share in shares]
        colour = COLOURS[number % len(COLOURS)]
        chart.add_line(points, report.label, colour, number, "", marks=False)
    return f"<h2>{escape(title)}</h2>{chart.svg()}"


def _table(reports: Sequence[LoadReport]) -> str:
    head, *rows = table_of(reports)
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>'


def _asked(report: LoadReport) -> str:
    settings = ", ".join(
        f"{name} {value}" for name, value in report.settings.items() if value is not None
    )
    return (
        f"<li><strong>{escape(report.label)}</strong>: {escape(report.model)} at "
        f"{escape(report.url)}; {report.answered:,} of {report.requests:,} requests answered in "
        f"{report.seconds:.1f} s; {escape(settings)}</li>"
    )


def load_page(reports: Sequence[LoadReport]) -> str:
    """Runs as one page for a browser: no scripts, no network, pictures as inline SVG."""
    title = " against ".join(each.label for each in reports)
    notes = "".join(f"<li>{escape(note)}</li>" for note in notes_on(reports))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load: {escape(title)}</title><style>{STYLE}{OWN_STYLE}</style></head><body>"
        f"<h1>Load: {escape(title)}</h1><ul>{''.join(map(_asked, reports))}</ul>"
        f"{f'<ul>{notes}</ul>' if notes else ''}{_table(reports)}"
        f"{_shares('Time to first token', reports, lambda each: each.first_token_s)}"
        f"{_shares('Time a token', reports, lambda each: each.token_s)}"
        f"{_shares('End to end', reports, lambda each: each.end_to_end_s)}"
        "<p>Measured by <code>penstock load</code>; times of whole answers alone. "
        "“better”: how many times better than the first column.</p></body></html>\n"
    )
