"""What instances and servers say about themselves at one moment.

| document                                 | who shows it                                          |
|------------------------------------------|-------------------------------------------------------|
| `InstanceStatistics`                     | `/cache`; `/metrics` is made from it                  |
| `ServerLive`, `RouterLive`, …            | the live page, `penstock status` and `penstock top`:  |
|                                          | `GET /live` as JSON, `GET /live/events` once a second |

The cache's part, `CacheStatistics`, is defined in `machine/statistics.py`, where it is counted.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# msgspec reads the annotations when documents arrive, so these imports must be real.
from penstock import CacheStatistics, Health  # noqa: TC001
from penstock_serve.observe.traffic import SliceReport, TrafficReport  # noqa: TC001


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
