"""Clocks inside vLLM for `lab bench vllm`: what a step costs the threads of the engine.

`TimedScheduler` stands in for vLLM's scheduler (`scheduler_cls`), `TimedWorker` is mixed into
its workers (`worker_extension_cls`). Both count the CPU time of their own thread: the
scheduler's over putting a step together and taking its results in, the worker's over its whole
step, and over the calls of its connector in it, whichever connector that is.

The scheduler also counts, for each request, the steps up to its first token. A busy machine changes
these counts only by which of two requests arrives in time for a step.

Where Penstock's connector records requests, its calls for that are timed too, and the thread that
writes them.
"""

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

import functools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

TOLD = "PENSTOCK_BENCH_STEPS"
"""The environment variable with the file that the scheduler writes its clock to."""
WRITER = "penstock-record"
"""The name of the thread that writes a recording."""
STEP, CONNECTOR = "step", "connector"
COUNTED = ("queued_steps", "loading_steps", "computing_steps", "step_tokens")
"""Steps that a request waited for its turn, waited for its load, and was part of, up to its first
token; and all tokens that those steps computed, its own and others'."""
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder: Any = None
        """That of the connector, once its calls are timed."""
        self._begin_round()

    def _begin_round(self) -> None:
        self.steps = self.empty_steps = 0
        self.spent_s = self.recording_s = 0.0
        self.began_s = time.thread_time()
        self.counted: dict[str, dict[str, int]] = {}
        """For each request, in the order of arrival, what `count` counts."""
        self.unanswered: dict[str, Any] = {}
        """Requests without a first token."""

    def add_request(self, request: Any) -> None:
        """A request has arrived."""
        if self.recorder is None:
            self._watch_recorder()
        super().add_request(request)
        self.counted[request.request_id] = dict.fromkeys(COUNTED, 0)
        self.unanswered[request.request_id] = request

    def _watch_recorder(self) -> None:
        """Times all that recording adds to this thread; a connector opens after the scheduler."""
        half = getattr(self.connector, "_scheduler", None)
        self.recorder = getattr(half, "_recorder", None)
        if half is None or self.recorder is None:
            return
        # The whole of it, with the look at the request's keys.
        half._record = self._recording(half._record)  # noqa: SLF001
        self.recorder.end = self._recording(self.recorder.end)

    def _recording(self, call: Any) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            # To read this clock takes as long as the call: its own part is left out.
            before, began = time.thread_time(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.recording_s += time.thread_time() - began - (began - before)

        return timed

    @property
    def writer_s(self) -> float:
        """CPU time of the thread that writes the recording, since it began."""
        writers = [each.ident for each in threading.enumerate() if each.name == WRITER]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(each)) for each in writers if each)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step is put together."""
        began = time.thread_time()
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self.steps += 1
        else:
            self.empty_steps += 1
        self.spent_s += time.thread_time() - began
        for name, request in self.unanswered.items():
            self._count(self.counted[name], request, output)
        return output

    def _count(self, counts: dict[str, int], request: Any, output: Any) -> None:
        if request.request_id in output.num_scheduled_tokens:
            counts["computing_steps"] += 1
        elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            counts["loading_steps"] += 1
        else:
            counts["queued_steps"] += 1
        counts["step_tokens"] += output.total_num_scheduled_tokens

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Its results are taken in."""
        began = time.thread_time()
        result = super().update_from_output(*args, **kwargs)
        self.spent_s += time.thread_time() - began
        for name in [name for name, each in self.unanswered.items() if each.num_output_tokens]:
            del self.unanswered[name]
        return result

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """A round begins or ends: tells what was counted, and starts anew."""
        reported = {
            "steps": self.steps,
            "empty_steps": self.empty_steps,
            "spent_s": self.spent_s,
            "thread_s": time.thread_time() - self.began_s,
            "recording_s": self.recording_s,
            "writer_s": self.writer_s,
            "first_tokens": list(self.counted.values()),
        }
        Path(os.environ[TOLD]).write_text(json.dumps(reported), encoding="ascii")
        self._begin_round()
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
                    reported = (began_at, time.monotonic(), spent_s, connector_s)
                    self.penstock_calls.append(reported)

        return timed
