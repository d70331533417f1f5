"""Reads the `/metrics` page of an engine: vLLM's, SGLang's, or that of `penstock serve`.

    page = read_page(text)
    page.running, page.found["device"], page.first_token.quantile(0.5)

Each engine has its own names for the same things; a new engine is a row of `ENGINES`. What a page
does not have is `None` or empty, never a guess.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import PenstockError, shown
from penstock_serve.observe.live import HANDED

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES_MAX = 200_000
"""More samples on a page are not read: no engine has as many."""


class PageError(PenstockError):
    """A page is not one that is known."""


@dataclass(frozen=True, slots=True)
class TimeBuckets:
    """A histogram of seconds: how many samples were at most as large as each bound."""

    counts: dict[float, float] = field(default_factory=dict)

    @property
    def count(self) -> float:
        return self.counts.get(inf, 0.0)

    def since(self, earlier: TimeBuckets) -> TimeBuckets:
        """What was added; all of it, if the engine has begun anew."""
        if self.count < earlier.count:
            return self
        return TimeBuckets(
            {bound: n - earlier.counts.get(bound, 0.0) for bound, n in self.counts.items()}
        )

    def plus(self, other: TimeBuckets) -> TimeBuckets:
        """Both together; engines have different bounds, and each is read at those of the other."""
        if not self.count or not other.count:
            return self if self.count else other
        bounds = self.counts.keys() | other.counts.keys()
        return TimeBuckets({bound: self._below(bound) + other._below(bound) for bound in bounds})

    def _below(self, bound: float) -> float:
        """How many samples were at most as large, by a straight line within a bucket."""
        if bound in self.counts:
            return self.counts[bound]
        low = max((each for each in self.counts if each < bound), default=0.0)
        high = min(each for each in self.counts if each > bound)
        below = self.counts.get(low, 0.0)
        if high == inf:
            return below
        return below + (self.counts[high] - below) * (bound - low) / (high - low)

    def quantile(self, share: float) -> float | None:
        """The time below which a share of the samples is, by a straight line within a bucket."""
        if self.count <= 0:
            return None
        wanted = share * self.count
        low, below = 0.0, 0.0
        for bound in sorted(self.counts):
            n = self.counts[bound]
            if n >= wanted and n > below:
                # Nothing is known of how far beyond the last bound a sample lies.
                return low if bound == inf else low + (bound - low) * (wanted - below) / (n - below)
            low, below = bound, n
        return low


class PageTier(NamedTuple):
    """A tier of an engine whose size is on its page, in tokens."""

    name: str
    tokens: float
    used: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePage:
    """One engine at one moment; counts are those since it started."""

    engine: str
    model: str
    running: float
    waiting: float
    kv_used: float | None
    """Share of the device's KV that is in use."""
    prompt_tokens: float
    generated_tokens: float
    found: dict[str, float]
    """Prompt tokens that were not computed, by where they came from."""
    preemptions: float
    first_token: TimeBuckets
    whole: TimeBuckets
    """From the request to the end of its answer."""
    between: TimeBuckets = field(default_factory=TimeBuckets)
    """From one token of an answer to the next."""
    tiers: tuple[PageTier, ...] = ()


class _Samples:
    """The samples of a page by name."""

    def __init__(self, text: str) -> None:
        self._found: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        count = 0
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._found[sample.name].append((sample.labels, float(sample.value)))
                    count += 1
                    if count > SAMPLES_MAX:
                        raise PageError(f"the page has more than {SAMPLES_MAX} samples")
        except ValueError as error:
            # The error may quote a line of any length.
            raise PageError(
                f"the page is not in Prometheus' text format: {shown(str(error))}"
            ) from error

    def has_prefix(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._found)

    def rows(self, name: str) -> list[tuple[dict[str, str], float]]:
        """The samples of a name, once each: ranks of one engine report the same.

        Of ranks that differ in nothing but their place in one replica, the first one counts. With
        attention in data-parallel ranks, the first one of a replica need not be rank 0.
        """
        found: dict[frozenset[tuple[str, str]], tuple[dict[str, str], float]] = {}
        for labels, value in self._found.get(name, []):
            if labels.get("priority"):
                continue  # The sum of all priorities has none.
            alike = frozenset(each for each in labels.items() if each[0] not in _RANK_LABELS)
            if alike not in found or _rank_of(labels) < _rank_of(found[alike][0]):
                found[alike] = labels, value
        return [*found.values()]

    def sum(self, name: str) -> float:
        return sum(value for _, value in self.rows(name))

    def mean(self, *names: str) -> float | None:
        for name in names:
            values = [value for _, value in self.rows(name)]
            if values:
                return sum(values) / len(values)
        return None

    def by(self, name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for labels, value in self.rows(name):
            found[labels.get(label, "")] += value
        return dict(found)

    def times(self, *names: str) -> TimeBuckets:
        """The first histogram of these names that the page has."""
        counts: dict[float, float] = defaultdict(float)
        name = next((each for each in names if self._found.get(f"{each}_bucket")), names[0])
        for labels, value in self.rows(f"{name}_bucket"):
            counts[float(labels["le"])] += value
        return TimeBuckets(dict(counts))

    def label(self, name: str, label: str) -> str:
        return next((labels[label] for labels, _ in self.rows(name) if label in labels), "")


_RANK_LABELS = ("pp_rank", "tp_rank", "moe_ep_rank")
"""SGLang's names for a rank's place in one replica; `dp_rank` is the replica."""


def _rank_of(labels: dict[str, str]) -> tuple[int, ...]:
    names = [labels.get(name, "0") for name in _RANK_LABELS]
    return tuple(int(name) if name.isdecimal() else 0 for name in names)


def read_page(text: str) -> EnginePage:
    """Reads a page.

    Raises `PageError`: it is no page of an engine that is known.
    """
    samples = _Samples(text)
    for prefix, read in ENGINES.items():
        if samples.has_prefix(prefix):
            return read(samples)
    known = ", ".join(shown(prefix) for prefix in ENGINES)
    raise PageError(f"the page has no metric that begins with one of {known}")


def _vllm(samples: _Samples) -> EnginePage:
    ours = "vllm:penstock_"
    found = {"device": samples.sum("vllm:prefix_cache_hits_total")}
    if samples.has_prefix(ours):
        found["host"] = samples.sum(f"{ours}tokens_loaded_total")
        found[HANDED] = samples.sum(f"{ours}tokens_received_total")
    else:
        found["connector"] = samples.sum("vllm:external_prefix_cache_hits_total")
    used = samples.mean("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    sizes = [
        samples.label("vllm:cache_config_info", name) for name in ("num_gpu_blocks", "block_size")
    ]
    tiers = []
    if all(size.isdigit() for size in sizes):
        blocks, block_tokens = map(int, sizes)
        if used is not None:
            tiers.append(PageTier("device", blocks * block_tokens, used * blocks * block_tokens))
        slots, ready = (samples.sum(f"{ours}host_slots{name}") for name in ("", "_ready"))
        if slots:
            tiers.append(PageTier("host", slots * block_tokens, ready * block_tokens))
    return EnginePage(
        engine="vLLM",
        model=samples.label("vllm:num_requests_running", "model_name"),
        running=samples.sum("vllm:num_requests_running"),
        waiting=samples.sum("vllm:num_requests_waiting"),
        kv_used=used,
        prompt_tokens=samples.sum("vllm:prompt_tokens_total"),
        generated_tokens=samples.sum("vllm:generation_tokens_total"),
        found=found,
        preemptions=samples.sum("vllm:num_preemptions_total"),
        first_token=samples.times("vllm:time_to_first_token_seconds"),
        whole=samples.times("vllm:e2e_request_latency_seconds"),
        between=samples.times(
            "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"
        ),
        tiers=tuple(tiers),
    )


def _sglang(samples: _Samples) -> EnginePage:
    found: dict[str, float] = defaultdict(float)
    for source, tokens in samples.by("sglang:cached_tokens_total", "cache_source").items():
        # Older versions, and requests without details, do not say where tokens came from.
        found["device" if source in {"", "total"} else source] += tokens
    slots = samples.sum("sglang:max_total_num_tokens")
    used = samples.mean("sglang:token_usage")
    host, host_used = (samples.sum(f"sglang:hicache_host_{n}_tokens") for n in ("total", "used"))
    tiers = [PageTier("device", slots, used * slots)] if slots and used is not None else []
    if host:
        tiers.append(PageTier("host", host, host_used))
    return EnginePage(
        engine="SGLang",
        model=samples.label("sglang:num_running_reqs", "model_name"),
        running=samples.sum("sglang:num_running_reqs"),
        waiting=samples.sum("sglang:num_queue_reqs"),
        kv_used=used,
        prompt_tokens=samples.sum("sglang:prompt_tokens_total"),
        generated_tokens=samples.sum("sglang:generation_tokens_total"),
        found=dict(found),
        preemptions=samples.sum("sglang:num_retracted_requests_total"),
        first_token=samples.times("sglang:time_to_first_token_seconds"),
        whole=samples.times("sglang:e2e_request_latency_seconds"),
        between=samples.times(
            "sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"
        ),
        tiers=tuple(tiers),
    )


def _penstock(samples: _Samples) -> EnginePage:
    phases = samples.by("penstock_requests_now", "phase")
    slots, free = (samples.by(f"penstock_tier_{name}", "tier") for name in ("slots", "free"))
    return EnginePage(
        engine="Penstock",
        model="",
        running=phases.get("running", 0.0),
        waiting=sum(n for phase, n in phases.items() if phase != "running"),
        kv_used=1 - free["device"] / slots["device"] if slots.get("device") else None,
        prompt_tokens=samples.sum("penstock_prompt_tokens_total"),
        generated_tokens=samples.sum("penstock_generated_tokens_total"),
        found=samples.by("penstock_tier_tokens_cached_total", "tier"),
        preemptions=samples.sum("penstock_preemptions_total"),
        first_token=samples.times("penstock_first_token_seconds"),
        whole=samples.times("penstock_request_seconds"),
        between=samples.times("penstock_between_tokens_seconds"),
    )


ENGINES: dict[str, Callable[[_Samples], EnginePage]] = {
    "vllm:": _vllm,
    "sglang:": _sglang,
    "penstock_": _penstock,
}
"""By how the names of their metrics begin."""
