"""When a process that failed is started again, and when no more.

The one rule: no window holds more restarts than the limit, wherever the window begins.
"""

from __future__ import annotations

from collections import deque

from penstock.supervisor.spec import Never, OnFailure


class RestartHistory:
    """The restarts of one process, as far back as its policy looks."""

    def __init__(self, policy: Never | OnFailure) -> None:
        self._policy = policy
        self._restarts: deque[float] = deque()

    def plan(self, now: float) -> float | None:
        """When to start again after a failure at `now`; `None`: never."""
        policy = self._policy
        if isinstance(policy, Never):
            return None
        while self._restarts and self._restarts[0] <= now - policy.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= policy.limit:
            return None
        delay_s = min(policy.delay_s * 2.0 ** len(self._restarts), policy.delay_max_s)
        self._restarts.append(now + delay_s)
        return now + delay_s
