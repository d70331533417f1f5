"""What instances and servers say about themselves: statistics, traffic, the live document.

    record = traffic.begin("cmpl-1", prompt_tokens=900, now=now)
    traffic.first_token(record, found={"device": 512}, is_warm=True, now=now)
    traffic.token(generated=1, gap_s=0.012, now=now)
    traffic.end(record, outcome="answered", generated=40, now=now)

It costs a request a few microseconds, whether somebody looks or not, so that whoever opens the page
sees what went before. Times are on the monotonic clock.

The one rule: everything kept is bounded, whatever the load.

| document                                 | who shows it                                          |
|------------------------------------------|-------------------------------------------------------|
| `InstanceStatistics`                     | `/cache`; `/metrics` is made from it                  |
| `ServerLive`, `RouterLive`, …            | the live page, `penstock status` and `penstock top`:  |
|                                          | `GET /live` as JSON, `GET /live/events` once a second |

The cache's part, `CacheStatistics`, is defined in `machine/statistics.py`, where it is counted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

# msgspec reads the annotations when documents arrive, so these imports must be real.
from penstock import CacheStatistics, Health  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Sequence


SLICE_S = 10.0
SLICES_KEPT = 60
"""Ten minutes."""
KINDS = ("warm", "cold", "between")
"""Times to the first token of warm prompts and of others, and from one token to the next."""
SAMPLES_A_SLICE = 64
"""The last ones; their median is the time of the slice."""
SAMPLES_KEPT = 256
RATE_S = 60.0
"""What is said to happen in a second is the mean of this time."""
ALIKE_MIN = 5
"""Fewer prompts of one length say little about the others."""
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
    """What happened in ten seconds: answers that got their first token, and tokens of answers."""

    at: float
    requests: int = 0
    prompt_tokens: int = 0
    found: dict[str, int] = {}
    warm_p50_s: float | None = None
    """Until the first token, where a prompt was warm, and next where it was not."""
    cold_p50_s: float | None = None
    generated: int = 0
    """Tokens of answers."""
    between_p50_s: float | None = None
    """From one token of an answer to the next."""


class TimesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the last answers, at most ten minutes old."""

    count: int
    p50_s: float | None
    p95_s: float | None


NO_TIMES = TimesReport(count=0, p50_s=None, p95_s=None)


class RatesReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in a second of the last minute, on average."""

    requests_per_s: float = 0.0
    """Answers that got their first token."""
    output_tokens_per_s: float | None = 0.0
    """`None` where nobody has counted them."""


class AlikeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times to first token of prompts of about one length, warm and not."""

    tokens_min: int
    tokens_max: int
    warm_count: int
    warm_p50_s: float
    cold_count: int
    cold_p50_s: float


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic at one moment."""

    slice_s: float
    slices: list[SliceReport]
    """Oldest first; times without an answer have none."""
    warm: TimesReport
    cold: TimesReport
    outcomes: dict[str, int]
    """Requests since the start by how they ended."""
    requests: list[RequestRecord]
    """The last ones, newest first."""
    between: TimesReport = NO_TIMES
    """From one token of an answer to the next."""
    rates: RatesReport = RatesReport()
    alike: AlikeReport | None = None
    """Of the length that most prompts of both kinds have: times of unlike prompts say nothing
    about what a hit saves. `None` if there are too few."""


class _Sample(NamedTuple):
    """A time that was measured."""

    at: float
    seconds: float
    prompt_tokens: int = 0
    """0 where that is not known."""


class _Slice:
    """A slice that still grows."""

    def __init__(self, at: float) -> None:
        self.report = SliceReport(at=at, found={})
        self._times = {kind: deque[float](maxlen=SAMPLES_A_SLICE) for kind in KINDS}

    def add_tokens(self, generated: int, gap_s: float | None) -> None:
        self.report.generated += generated
        if gap_s is not None:
            self._times["between"].append(gap_s)

    def add(self, record: RequestRecord, seconds: float, *, is_warm: bool) -> None:
        report = self.report
        report.requests += 1
        report.prompt_tokens += record.prompt_tokens or 0
        for source, tokens in record.found.items():
            report.found[source] = report.found.get(source, 0) + tokens
        self._times["warm" if is_warm else "cold"].append(seconds)

    def settle(self) -> None:
        """Brings the medians up to date."""
        for kind, times in self._times.items():
            setattr(self.report, f"{kind}_p50_s", quantile(sorted(times), 0.5))


class Traffic:
    """The last requests, and sums of those of the last ten minutes."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=RECORDS_KEPT)
        self._slices: deque[SliceReport] = deque(maxlen=SLICES_KEPT)
        """The last one is that of `_growing`."""
        self._growing: _Slice | None = None
        self._times = {kind: deque[_Sample](maxlen=SAMPLES_KEPT) for kind in KINDS}
        """When a first token came, and how long it took; when a token came after another."""
        self._since: float | None = None
        """When the first request came."""
        self._outcomes: dict[str, int] = {}

    def begin(self, request: str, *, prompt_tokens: int | None, now: float) -> RequestRecord:
        """A prompt arrived."""
        record = RequestRecord(request=request, began=now, prompt_tokens=prompt_tokens, found={})
        self._records.append(record)
        if self._since is None:
            self._since = now
        return record

    def first_token(
        self, record: RequestRecord, *, found: dict[str, int], is_warm: bool, now: float
    ) -> None:
        """The first text of an answer is there."""
        record.found = found
        record.first_token_s = seconds = now - record.began
        self._slice_at(now).add(record, seconds, is_warm=is_warm)
        sample = _Sample(now, seconds, record.prompt_tokens or 0)
        self._times["warm" if is_warm else "cold"].append(sample)

    def token(self, *, generated: int, gap_s: float | None, now: float) -> None:
        """A piece of an answer is there."""
        self._slice_at(now).add_tokens(generated, gap_s)
        if gap_s is not None:
            self._times["between"].append(_Sample(now, gap_s))

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
        slices = [each for each in self._slices if each.at > since]
        for kept in self._times.values():
            while kept and kept[0].at < since:
                kept.popleft()
        return TrafficReport(
            slice_s=SLICE_S,
            slices=slices,
            outcomes=dict(self._outcomes),
            requests=newest[::-1],
            rates=rates_of(slices, since=now if self._since is None else self._since, now=now),
            alike=_alike(self._times["warm"], self._times["cold"]),
            **{kind: _times_of(times) for kind, times in self._times.items()},
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


def rates_of(slices: Sequence[SliceReport], *, since: float, now: float) -> RatesReport:
    """What happened in a second of the last minute, or since a time that is later."""
    first = now - RATE_S
    first = max(since, first - first % SLICE_S + SLICE_S)
    lately = [each for each in slices if each.at + SLICE_S > first]
    past = max(1.0, now - first)
    return RatesReport(
        requests_per_s=sum(each.requests for each in lately) / past,
        output_tokens_per_s=sum(each.generated for each in lately) / past,
    )


def _times_of(samples: Sequence[_Sample]) -> TimesReport:
    ordered = sorted(each.seconds for each in samples)
    return TimesReport(
        count=len(ordered), p50_s=quantile(ordered, 0.5), p95_s=quantile(ordered, 0.95)
    )


def _alike(warm: Sequence[_Sample], cold: Sequence[_Sample]) -> AlikeReport | None:
    """The times of prompts whose lengths are less than a factor of two apart."""
    lengths: dict[int, tuple[list[float], list[float]]] = {}
    for kind, samples in enumerate((warm, cold)):
        for each in samples:
            if each.prompt_tokens:
                found = lengths.setdefault(each.prompt_tokens.bit_length(), ([], []))
                found[kind].append(each.seconds)
    both = {length: min(map(len, times)) for length, times in lengths.items()}
    best = max(both, key=lambda length: both[length], default=0)
    if not best or both[best] < ALIKE_MIN:
        return None
    (warm_s, cold_s) = map(sorted, lengths[best])
    return AlikeReport(
        tokens_min=1 << (best - 1),
        tokens_max=(1 << best) - 1,
        warm_count=len(warm_s),
        warm_p50_s=quantile(warm_s, 0.5) or 0.0,
        cold_count=len(cold_s),
        cold_p50_s=quantile(cold_s, 0.5) or 0.0,
    )


class InstanceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One instance at one moment; counts are those since it started."""

    instance: str
    """Its name."""
    role: str
    state: str
    """`running`, `paused`, `asleep`, or `without weights` after a load that failed."""
    weights_version: str
    cache: CacheStatistics
    health: Health
    waiting: int
    """Answers by phase: these and the next three."""
    loading: int
    running: int
    claiming: int
    preemptions: int
    """Answers that gave their blocks back for a more urgent one, to continue later."""
    handoffs: dict[str, int]
    """Handoffs by how they ended."""
    handed_bytes: int
    handed_seconds: float
    """The time of handoffs that were delivered, all together."""
    handed_parts_verified: int
    """Parts of handoffs that were received and whose checksums agreed."""
    landing_bytes: int
    """Memory that other instances may write handoffs into, or may still write into."""
    token_bytes: int
    """The KV of one token, over all layers and ranks."""
    places: int = 1
    """Requests that a step has room for."""
    step_seconds: float = 0.0
    """Time in which steps were computed, or prepared one after the other."""
    place_seconds: float = 0.0
    """That time, by the number of their requests."""


class LiveHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests are answered, and what is wrong."""

    state: Literal["ok", "degraded", "down"]
    """`degraded`: requests are answered, but something is wrong."""
    status: str
    """What `/health` says."""
    why: list[str]
    """What is wrong; empty if nothing is."""


class ServerLive(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="server"):
    """`penstock serve`."""

    version: str
    """Of Penstock."""
    now: float
    """On the monotonic clock of the server's machine, as all times here."""
    model: str
    health: LiveHealth
    under_way: int
    requests_max: int
    retries: int
    instances: list[msgspec.Raw]
    """`InstanceStatistics` of each, as it sent them last."""
    traffic: TrafficReport


class RoutedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A vLLM server, as its router sees it."""

    name: str
    role: str
    up: bool
    version: str
    cause: str
    """Why it is down."""
    load: int
    """Requests in hand."""


class WatchedTier(msgspec.Struct, kw_only=True):
    """A tier in tokens, summed over the engines whose pages say how large it is."""

    name: str
    tokens: int = 0
    used: int = 0


class RouterLive(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="router"):
    """`penstock router`."""

    version: str
    """Of Penstock."""
    now: float
    health: LiveHealth
    servers: list[RoutedServer]
    prompts: dict[str, int]
    """Answers that began, by the role that computed the prompt."""
    retries: int
    traffic: TrafficReport
    sources: list[SliceReport]
    """Where prompt tokens came from, and tokens of answers, as the `/metrics` of decode servers
    say."""
    tiers: list[WatchedTier]
    """Of the decode servers, as their pages say."""


class WatchedServer(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, as its `/metrics` describes it."""

    name: str
    up: bool
    cause: str = ""
    """Why it is down."""
    engine: str = ""
    model: str = ""
    running: int = 0
    waiting: int = 0
    kv_used: float | None = None
    """Share of the device's KV that is in use."""
    found_share: float | None = None
    """Of all its prompt tokens, those that were not computed."""
    prompt_per_s: float = 0.0
    generated_per_s: float = 0.0
    """Tokens a second."""
    preemptions: int = 0


class MetricsLive(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="metrics"):
    """`penstock dashboard`."""

    version: str
    """Of Penstock."""
    now: float
    health: LiveHealth
    servers: list[WatchedServer]
    tiers: list[WatchedTier]
    traffic: TrafficReport
    """`warm` are times to first token, `cold` those of whole answers; no request is known."""


def health_of(*, is_ready: bool, status: str, why: list[str]) -> LiveHealth:
    """Health by whether requests are answered, and by what is wrong."""
    state: Literal["ok", "degraded", "down"] = "degraded" if why else "ok"
    return LiveHealth(state=state if is_ready else "down", status=status, why=why)
