"""One run of `lab bench traffic`: requests that are due at given times, and first tokens.

The one rule: a first token is timed from when its request was due, whether or not the engine was
ready to take it, so that an engine that falls behind is not measured at a lower rate.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lab.bench.traffic_workloads import due_s
from penstock_serve.engine.requests import Request

if TYPE_CHECKING:
    from lab.bench.traffic_engine import Side
    from lab.bench.traffic_workloads import Workload
    from penstock_serve.engine.requests import Output

SHARE_IN_TIME = 0.9


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What one run found."""

    count: int
    window_s: float
    passed: bool = False
    first_token_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    asked_tokens: int = 0
    """Of the prompts whose first token came; of them, those in each tier follow."""
    device_tokens: int = 0
    host_tokens: int = 0
    waited_s: float = 0.0
    """For which the thread waited for the device."""
    idle_s: float = 0.0
    """For which there was no request."""
    loading_s: float = 0.0
    """For which all requests waited for blocks from host memory."""
    loaded_bytes: float = 0
    saved_bytes: float = 0
    computed_instead: float = 0
    """Tokens that were found below, and that were predicted to be computed sooner."""
    preemptions: float = 0
    joins: float = 0
    """Requests that joined a step before their blocks had come."""

    @property
    def per_s(self) -> float:
        return self.count / self.window_s

    @property
    def late_allowed(self) -> int:
        """Requests whose first token may come too late."""
        return self.count - math.ceil(SHARE_IN_TIME * self.count)


class TrafficRun:
    """The first `count` turns of a workload within a window."""

    def __init__(
        self,
        side: Side,
        workload: Workload,
        *,
        count: int,
        window_s: float,
        bound_s: float,
    ) -> None:
        self._side = side
        self._engine = side.engine
        self._turns = workload.turns[:count]
        self._known = workload.known_blocks
        self._prompts = [workload.prompt(number) for number in range(count)]
        self._bound_s = bound_s
        self._due = due_s(workload.turns, count, window_s)
        self._waiting = list(range(count))
        """Turns that were not asked yet."""
        self._unanswered: set[int] = set(range(count))
        self._ended: set[int] = set()
        self._late = 0
        self._began = 0.0
        self.result = RunResult(count=count, window_s=window_s)

    def run(self) -> RunResult:
        """Asks until every first token has come, or too many are late."""
        result, before = self.result, self._counts()
        self._began = time.perf_counter()
        while self._unanswered and self._late + self._overdue() <= result.late_allowed:
            self._ask()
            if not self._unanswered - self._overdue_turns():
                break
            outputs = self._engine.step()
            for output in outputs:
                self._take(output)
            if self._engine.idle and not outputs:
                self._rest()
        result.seconds = self._now()
        result.passed = self._late + self._overdue() <= result.late_allowed
        waited = [self._now() - self._due[each] for each in self._unanswered]
        # A run that was given up has turns that were not due yet.
        result.first_token_s += [seconds for seconds in waited if seconds > 0]
        for name, value in self._counts().items():
            setattr(result, name, value - before[name])
        self._engine.abort_all()
        self._side.settle()
        return result

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _overdue_turns(self) -> set[int]:
        now = self._now()
        return {each for each in self._unanswered if now - self._due[each] > self._bound_s}

    def _overdue(self) -> int:
        return len(self._overdue_turns())

    def _ask(self) -> None:
        now = self._now()
        for number in list(self._waiting):
            if self._due[number] > now:
                break
            if not self._may_ask(number):
                continue
            self._waiting.remove(number)
            if self._side.infinite is not None:
                self._side.infinite.known_blocks[str(number)] = self._known[number]
            self._engine.add(
                Request(
                    id=str(number),
                    prompt=self._prompts[number],
                    max_tokens=self._turns[number].answer_tokens,
                )
            )

    def _take(self, output: Output) -> None:
        number = int(output.request)
        if output.reason is not None:
            self._ended.add(number)
        if number not in self._unanswered or output.sampled is None:
            return
        self._unanswered.remove(number)
        seconds = self._now() - self._due[number]
        result = self.result
        result.first_token_s.append(seconds)
        self._late += seconds > self._bound_s
        result.asked_tokens += len(self._prompts[number])
        result.device_tokens += sum(output.cached_by_tier[:1])
        result.host_tokens += sum(output.cached_by_tier[1:])

    def _may_ask(self, number: int) -> bool:
        after = self._turns[number].after
        return after is None or after in self._ended

    def _rest(self) -> None:
        """Nothing can be computed: waits for a copy, or until the next request is due."""
        now = self._now()
        coming = [self._due[number] for number in self._waiting if self._may_ask(number)]
        until = min(coming, default=now + self._bound_s)
        if until <= now:
            # It has become due since requests were asked.
            return
        began = time.perf_counter()
        self._engine.cache.wait(time.monotonic() + until - now)
        rested = time.perf_counter() - began
        if self._engine.unfinished:
            self.result.loading_s += rested
        else:
            self.result.idle_s += rested

    def _counts(self) -> dict[str, float]:
        found = self._engine.cache.statistics()
        hops = {(hop.source, hop.target): hop.bytes_copied or 0 for hop in found.hops}
        device = found.tiers[0].name
        return {
            "waited_s": self._side.workers.waited_s,
            "loaded_bytes": sum(size for (_, target), size in hops.items() if target == device),
            "saved_bytes": sum(size for (source, _), size in hops.items() if source == device),
            "computed_instead": found.tokens_computed_instead,
            "preemptions": self._engine.scheduler.preemptions,
            "joins": self._engine.scheduler.joins,
        }
