"""Clocks inside vLLM for `penstock bench vllm`: what a step costs the threads of the engine.

`TimedScheduler` stands in for vLLM's scheduler (`scheduler_cls`), `TimedWorker` is mixed into
its workers (`worker_extension_cls`). Both count the CPU time of their own thread: the
scheduler's over putting a step together and taking its results in, the worker's over its whole
step, and over the calls of its connector in it, whichever connector that is.
"""

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.core.sched.scheduler import Scheduler

TOLD = "PENSTOCK_BENCH_STEPS"
"""The environment variable with the file that the scheduler writes its clock to."""
STEP, CONNECTOR = "step", "connector"
WORK = ("execute_model", "sample_tokens")
CALLS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


class TimedScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with a clock."""

    steps = 0
    empty_steps = 0
    spent_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step is put together."""
        began = time.thread_time()
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self.steps += 1
        else:
            self.empty_steps += 1
        self.spent_s += time.thread_time() - began
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Its results are taken in."""
        began = time.thread_time()
        result = super().update_from_output(*args, **kwargs)
        self.spent_s += time.thread_time() - began
        return result

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """A round begins or ends: tells the clock, and starts anew."""
        told = f"{self.steps} {self.empty_steps} {self.spent_s!r}"
        Path(os.environ[TOLD]).write_text(told, encoding="ascii")
        self.steps, self.empty_steps, self.spent_s = 0, 0, 0.0
        return super().reset_prefix_cache(*args, **kwargs)


class TimedWorker:
    """What is added to vLLM's worker."""

    penstock_spent_s: dict[str, float]
    penstock_calls: list[tuple[float, float, float, float]]
    """Of each call: when it began and ended, its CPU time, and its connector's."""

    def penstock_watch(self) -> None:
        """From now on whole steps, and the calls of the connector in them, are timed."""
        self.penstock_spent_s = dict.fromkeys((STEP, CONNECTOR), 0.0)
        self.penstock_calls = []
        for name in WORK:
            setattr(self, name, self._timed(getattr(self, name), STEP))
        if not has_kv_transfer_group():
            return
        connector = get_kv_transfer_group()
        for name in CALLS:
            setattr(connector, name, self._timed(getattr(connector, name), CONNECTOR))

    def penstock_take(self) -> dict[str, Any]:
        """Seconds since the last call, and each call of the worker."""
        spent, self.penstock_spent_s = self.penstock_spent_s, dict.fromkeys((STEP, CONNECTOR), 0.0)
        calls, self.penstock_calls = self.penstock_calls, []
        return {**spent, "calls": calls}

    def _timed(self, call: Any, what: str) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_at, before_s = time.monotonic(), self.penstock_spent_s[CONNECTOR]
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent_s = time.thread_time() - began
                self.penstock_spent_s[what] += spent_s
                if what == STEP:
                    connector_s = self.penstock_spent_s[CONNECTOR] - before_s
                    told = (began_at, time.monotonic(), spent_s, connector_s)
                    self.penstock_calls.append(told)

        return timed
