"""The requests of the last minutes: what the live page, `penstock status` and `top` show of them.

    record = traffic.begin("cmpl-1", prompt_tokens=900, now=now)
    traffic.first_token(record, found={"device": 512}, is_warm=True, now=now)
    traffic.end(record, outcome="answered", generated=40, now=now)

It costs a request a few microseconds, whether somebody looks or not, so that whoever opens the page
sees what went before. Times are on the monotonic clock.

The one rule: everything kept is bounded, whatever the load.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

SLICE_S = 10.0
SLICES_KEPT = 60
"""Ten minutes."""
SAMPLES_A_SLICE = 64
"""The last ones; their median is the time of the slice."""
SAMPLES_KEPT = 256
RECORDS_KEPT = 256
RECORDS_SHOWN = 24
PHASES = ("queued", "loading", "handed_over", "prefill", "decode")
"""Where the time of a request goes; `usage`, the access log and the metrics have these names."""
HANDED = "handed over"
"""Where prompt tokens come from that another instance computed."""


class RequestRecord(msgspec.Struct, kw_only=True):
    """One prompt, from its arrival to the end of its answers."""

    request: str
    began: float
    prompt_tokens: int | None
    """`None` where that is not known."""
    found: dict[str, int] = {}
    """Prompt tokens that were not computed here, by where they came from."""
    by: str = ""
    """Who answers it."""
    first_token_s: float | None = None
    took_s: float | None = None
    generated: int = 0
    outcome: str = ""
    """Empty while it is under way."""


class SliceReport(msgspec.Struct, kw_only=True):
    """What happened in ten seconds: answers that got their first token."""

    at: float
    requests: int = 0
    prompt_tokens: int = 0
    found: dict[str, int] = {}
    warm_p50_s: float | None = None
    """Until the first token, where a prompt was warm, and next where it was not."""
    cold_p50_s: float | None = None


class FirstTokenTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times to first token of the last answers, at most ten minutes old."""

    count: int
    p50_s: float | None
    p95_s: float | None


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic at one moment."""

    slice_s: float
    slices: list[SliceReport]
    """Oldest first; times without an answer have none."""
    warm: FirstTokenTimes
    cold: FirstTokenTimes
    outcomes: dict[str, int]
    """Requests since the start by how they ended."""
    requests: list[RequestRecord]
    """The last ones, newest first."""


class _Slice:
    """A slice that still grows."""

    def __init__(self, at: float) -> None:
        self.report = SliceReport(at=at, found={})
        self._times: dict[bool, deque[float]] = {
            True: deque(maxlen=SAMPLES_A_SLICE),
            False: deque(maxlen=SAMPLES_A_SLICE),
        }

    def add(self, record: RequestRecord, seconds: float, *, is_warm: bool) -> None:
        report = self.report
        report.requests += 1
        report.prompt_tokens += record.prompt_tokens or 0
        for source, tokens in record.found.items():
            report.found[source] = report.found.get(source, 0) + tokens
        self._times[is_warm].append(seconds)

    def settle(self) -> None:
        """Brings the medians up to date."""
        self.report.warm_p50_s = quantile(sorted(self._times[True]), 0.5)
        self.report.cold_p50_s = quantile(sorted(self._times[False]), 0.5)


class Traffic:
    """The last requests, and sums of those of the last ten minutes."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=RECORDS_KEPT)
        self._slices: deque[SliceReport] = deque(maxlen=SLICES_KEPT)
        """The last one is that of `_growing`."""
        self._growing: _Slice | None = None
        self._times: dict[bool, deque[tuple[float, float]]] = {
            True: deque(maxlen=SAMPLES_KEPT),
            False: deque(maxlen=SAMPLES_KEPT),
        }
        """When a first token came, and how long it took, of warm prompts and of the others."""
        self._outcomes: dict[str, int] = {}

    def begin(self, request: str, *, prompt_tokens: int | None, now: float) -> RequestRecord:
        """A prompt arrived."""
        record = RequestRecord(request=request, began=now, prompt_tokens=prompt_tokens, found={})
        self._records.append(record)
        return record

    def first_token(
        self, record: RequestRecord, *, found: dict[str, int], is_warm: bool, now: float
    ) -> None:
        """The first text of an answer is there.

        Args:
            record: The request.
            found: Its prompt tokens that were not computed, by where they came from.
            is_warm: Whether it counts among those that had a hit.
            now: The time.
        """
        record.found = found
        record.first_token_s = seconds = now - record.began
        self._slice_at(now).add(record, seconds, is_warm=is_warm)
        self._times[is_warm].append((now, seconds))

    def end(self, record: RequestRecord, *, outcome: str, generated: int, now: float) -> None:
        """All answers to a prompt have ended."""
        record.outcome = outcome
        record.generated = generated
        record.took_s = now - record.began
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1

    def report(self, now: float) -> TrafficReport:
        """What happened in the last ten minutes."""
        if self._growing is not None:
            self._growing.settle()
        since = now - SLICE_S * SLICES_KEPT
        newest = list(self._records)[-RECORDS_SHOWN:]
        return TrafficReport(
            slice_s=SLICE_S,
            slices=[each for each in self._slices if each.at > since],
            warm=_times_of(self._times[True], since),
            cold=_times_of(self._times[False], since),
            outcomes=dict(self._outcomes),
            requests=newest[::-1],
        )

    def _slice_at(self, now: float) -> _Slice:
        at = now - now % SLICE_S
        growing = self._growing
        if growing is None or growing.report.at < at:
            if growing is not None:
                growing.settle()
            self._growing = growing = _Slice(at)
            self._slices.append(growing.report)
        return growing


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The sample below which a share of the ordered ones lie; `None` if there is none."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _times_of(times: deque[tuple[float, float]], since: float) -> FirstTokenTimes:
    while times and times[0][0] < since:
        times.popleft()
    ordered = sorted(seconds for _, seconds in times)
    return FirstTokenTimes(
        count=len(ordered), p50_s=quantile(ordered, 0.5), p95_s=quantile(ordered, 0.95)
    )
