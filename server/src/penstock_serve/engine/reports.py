"""An instance's answers to questions about itself: statistics, a story, its timeline.

Nothing here changes any state; an audit ends the instance if an invariant is violated.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import DType
from penstock_serve.engine.requests import Phase
from penstock_serve.observe.live import InstanceStatistics

if TYPE_CHECKING:
    from penstock_serve.engine.architecture import Architecture
    from penstock_serve.engine.engine import Engine
    from penstock_serve.engine.messages import Ask
    from penstock_serve.engine.spec import InstanceSpec


def answer_to(ask: Ask, spec: InstanceSpec, engine: Engine, *, token_bytes: int) -> bytes:
    """The answer to a question, as JSON.

    Raises `InvariantViolation`: an audit found a violated invariant.
    """
    match ask.what:
        case "story":
            return msgspec.json.encode(engine.cache.story(ask.of))
        case "timeline":
            return msgspec.json.encode(_timeline(spec, engine, token_bytes))
        case "audit":
            engine.cache.audit()
        case "statistics":
            pass
    return msgspec.json.encode(_statistics(spec, engine, token_bytes))


def token_bytes_of(architecture: Architecture, spec: InstanceSpec) -> int:
    """Bytes of KV of one token, over all layers and heads."""
    heads = 2 * architecture.layers * architecture.kv_heads
    return heads * architecture.head_dim * DType.parse(spec.dtype).itemsize


def _statistics(spec: InstanceSpec, engine: Engine, token_bytes: int) -> InstanceStatistics:
    count = engine.scheduler.count
    return InstanceStatistics(
        instance=spec.name,
        role=spec.role.value,
        state=engine.state.value,
        weights_version=spec.config.model.weights_version,
        cache=engine.cache.statistics(),
        health=engine.cache.health(),
        waiting=count(Phase.WAITING),
        loading=count(Phase.LOADING),
        running=count(Phase.RUNNING),
        claiming=count(Phase.CLAIMING),
        preemptions=engine.scheduler.preemptions,
        handoffs=engine.handoff_outcomes,
        handed_bytes=engine.handed.bytes_moved,
        handed_seconds=engine.handed_seconds,
        handed_parts_verified=engine.handed.parts_verified,
        landing_bytes=engine.handed.landing_bytes,
        token_bytes=token_bytes,
    )


def _timeline(spec: InstanceSpec, engine: Engine, token_bytes: int) -> dict[str, Any]:
    """The last copies and handoffs that have ended, on this machine's monotonic clock."""
    handoffs = engine.handoffs
    return {
        "instance": spec.name,
        "role": spec.role.value,
        "now": time.monotonic(),
        "block_bytes": spec.config.cache.block_tokens * token_bytes,
        "copies": engine.cache.copies(),
        "handoffs": [] if handoffs is None else list(handoffs.ended),
    }
