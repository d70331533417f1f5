"""What an operator asks of one instance: orders, and questions about itself.

Every order but `Resume` is answered with an `OrderResult`, when it was carried out or could not be.
Some wait for requests or copies to end; `step` carries them out then, or answers after a timeout
why it could not.

Nothing here changes any state; an audit ends the instance if an invariant is violated.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import DType
from penstock.errors import ConfigError, UnavailableError, counted
from penstock_serve.engine import messages as ms
from penstock_serve.engine.checkpoints import WeightsNotLoaded, check_weights
from penstock_serve.engine.requests import Phase
from penstock_serve.observe.live import InstanceStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_serve.engine.architecture import Architecture
    from penstock_serve.engine.engine import Engine
    from penstock_serve.engine.messages import Ask
    from penstock_serve.engine.spec import InstanceSpec


if TYPE_CHECKING:
    WaitingOrder = ms.Pause | ms.Sleep

logger = logging.getLogger("penstock.engine.orders")


@dataclass(slots=True)
class Orders:
    """Carries out orders at an engine."""

    engine: Engine
    architecture: Architecture
    """Of its model."""
    _: KW_ONLY
    send: Callable[[ms.AskAnswer], None]
    """Sends an answer."""
    on_weights: Callable[[str], None]
    """Called with the version of weights that were loaded."""
    waiting: list[tuple[WaitingOrder, float]] = field(default_factory=list)
    """Orders that wait for requests or copies to end, with their deadlines."""

    @property
    def next_deadline(self) -> float:
        """When `step` is due, whatever else happens."""
        return min((deadline for _, deadline in self.waiting), default=math.inf)

    def take(self, order: ms.Order | ms.Resume) -> None:
        """Begins to carry out an order; those that wait are answered by a later `step`.

        Raises `UnavailableError`: a rank is lost.
        """
        match order:
            case ms.Pause():
                self.engine.pause()
                self.waiting.append((order, math.inf))
            case ms.Resume():
                self.engine.resume()
            case ms.Sleep():
                # Blocks that are being written down may arrive; nothing else is begun.
                self.engine.cache.drain()
                self.waiting.append((order, time.monotonic() + order.timeout_s))
            case _:
                self._answer(order.id, *self._carried_out(order))

    def step(self) -> None:
        """Carries out orders that wait no longer."""
        if not self.waiting:
            return
        now = time.monotonic()
        for order, deadline in [*self.waiting]:
            obstacle = self._obstacle(order)
            if obstacle and now < deadline:
                continue
            self.waiting.remove((order, deadline))
            if obstacle:
                self._answer(order.id, f"{obstacle} after {order.timeout_s:g} s")  # type: ignore[union-attr]
            elif isinstance(order, ms.Sleep):
                self._answer(order.id, self._slept(order))
            else:
                self._answer(order.id)

    def forget(self) -> None:
        """The server is lost: the next one gives its own orders."""
        self.waiting.clear()
        self.engine.resume()

    def _obstacle(self, order: WaitingOrder) -> str:
        """What an order still waits for; empty if for nothing."""
        engine = self.engine
        if isinstance(order, ms.Pause):
            return "" if engine.settled else f"{counted(engine.unfinished, 'request')} under way"
        return "" if engine.can_sleep else "requests or copies are under way"

    def _carried_out(self, order: ms.Order) -> tuple[str, str]:
        """Carries out an order that waits for nothing; returns the problem and a digest."""
        try:
            match order:
                case ms.CheckWeights():
                    return "", check_weights(order.path, self.architecture)
                case ms.LoadWeights():
                    self._load_weights(order)
                case ms.Wake():
                    self.engine.wake()
                case _:
                    raise AssertionError(f"{order} waits for others to end")
        except (ConfigError, WeightsNotLoaded) as error:
            return str(error), ""
        except UnavailableError as error:
            if isinstance(order, ms.LoadWeights):
                raise  # A rank is lost.
            return str(error), ""
        return "", ""

    def _load_weights(self, order: ms.LoadWeights) -> None:
        self.engine.load_weights(order.path, digest=order.digest, version=order.version)
        self.on_weights(order.version)
        logger.info("weights loaded: path=%s version=%s", order.path, order.version)

    def _slept(self, order: ms.Sleep) -> str:
        """Goes to sleep; returns why it could not."""
        try:
            self.engine.sleep(host=order.host, weights=order.weights)
        except (UnavailableError, ValueError) as error:
            return str(error)
        logger.info("asleep: host=%s weights=%s", order.host, order.weights)
        return ""

    def _answer(self, order: int, problem: str = "", digest: str = "") -> None:
        result = ms.OrderResult(problem=problem, digest=digest)
        self.send(ms.AskAnswer(id=order, json=msgspec.json.encode(result)))


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
    return heads * architecture.head_dim * DType.parse(spec.engine.dtype).itemsize


def _statistics(spec: InstanceSpec, engine: Engine, token_bytes: int) -> InstanceStatistics:
    count, handoffs = engine.scheduler.count, engine.handoffs
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
        handoffs={} if handoffs is None else dict(handoffs.outcomes),
        handed_bytes=engine.handed.bytes_moved,
        handed_seconds=0.0 if handoffs is None else handoffs.delivered_s,
        handed_parts_verified=engine.handed.parts_verified,
        landing_bytes=engine.handed.landing_bytes,
        token_bytes=token_bytes,
        places=engine.scheduler.settings.step_requests,
        step_seconds=engine.step_s,
        place_seconds=engine.place_s,
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
