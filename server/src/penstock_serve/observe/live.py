"""What a server says about itself at one moment: the document behind its page, `status` and `top`.

`GET /live` answers with one of these as JSON; `GET /live/events` sends one a second.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# msgspec reads the annotations, so this import must be real.
from penstock_serve.observe.traffic import SliceReport, TrafficReport  # noqa: TC001


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
