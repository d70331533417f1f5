"""What an engine costs that has nothing to do but wait for a slow tier.

One request needs blocks that lie in the host tier of a rank in another process, and that rank
takes long to bring them up. The engine's loop is the one for idle engines: `step`, then `wait`
until something happens. Counted is the CPU time of both processes, all their threads included.

The one rule: the request must still be waiting when the time is over, and be served after it;
else something else was measured.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import penstock
from lab.bench.interference.slow_rank import BLOCK_TOKENS, START_S, slow_config
from lab.bench.measure import summarize
from lab.fixtures.rank_channels import CarryingEngine, meet
from penstock.errors import InvariantViolation, UnavailableError
from penstock.transport.zeromq import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lab.bench.report import BenchReport

MODULE = "lab.bench.interference.slow_rank"
IDLE_SHARE = 0.02
"""CPU time while one request waits for a slow tier, as a share of the time: 0.2 s in 10 s."""
_AFTER_S = 0.5
"""The blocks come so long after the measurement."""
_SERVED_S = 30.0
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRun:
    """What waiting cost."""

    seconds: float
    engine_cpu_s: float
    rank_cpu_s: float
    wakings: int
    """How often the engine's wait came back before the time was over."""


def run_idle_time(report: BenchReport, *, idle_s: float) -> None:
    """Measures an idle engine for so many seconds."""
    found = measure_idle(idle_s)
    params = {"seconds": round(found.seconds, 3), "waiting_requests": 1}
    for side, cpu_s in (
        ("engine and rank", found.engine_cpu_s + found.rank_cpu_s),
        ("engine", found.engine_cpu_s),
        ("rank", found.rank_cpu_s),
    ):
        report.add_row(
            bench="idle engine",
            side=side,
            params=params,
            metric="CPU time",
            unit="s",
            summary=summarize([cpu_s]),
        )
    report.add_row(
        bench="idle engine",
        side="engine",
        params=params,
        metric="times woken",
        unit="count",
        summary=summarize([found.wakings]),
    )
    report.add_ratio(
        f"idle engine: CPU seconds in {idle_s:g} s beside one waiting request",
        found.engine_cpu_s + found.rank_cpu_s,
        at_most=IDLE_SHARE * idle_s,
    )


def measure_idle(idle_s: float) -> IdleRun:
    """Has one request wait for so long, and tells what that cost."""
    with _engine(idle_s + _AFTER_S) as (engine, rank_pid):
        cache = engine.cache
        prompts = [list(range(first, first + BLOCK_TOKENS * 6 + 1)) for first in (0, 5000)]
        for prompt in prompts:
            with cache.acquire(prompt) as lease:
                lease.commit_prompt(len(prompt))
            _run_until(engine, lambda: not cache.busy)
        # The second prompt has taken the device's blocks from the first one.
        waiting = cache.acquire(prompts[0])
        found = _idle(engine, waiting, rank_pid, idle_s)
        _run_until(engine, lambda: waiting.state is penstock.LeaseState.READY)
        if waiting.cached_tokens != BLOCK_TOKENS * 6:
            raise InvariantViolation(
                f"bench: {waiting.cached_tokens} tokens were loaded, {BLOCK_TOKENS * 6} wanted"
            )
        waiting.release()
    return found


def _idle(
    engine: CarryingEngine[penstock.Cache], waiting: penstock.Lease, rank_pid: int, idle_s: float
) -> IdleRun:
    wakings = 0
    engine_cpu_s, rank_cpu_s = time.process_time(), _cpu_s_of(rank_pid)
    began = time.monotonic()
    over = began + idle_s
    while time.monotonic() < over:
        engine.step()
        if engine.wait(over):
            wakings += 1
    found = IdleRun(
        seconds=time.monotonic() - began,
        engine_cpu_s=time.process_time() - engine_cpu_s,
        rank_cpu_s=_cpu_s_of(rank_pid) - rank_cpu_s,
        wakings=wakings,
    )
    if waiting.state is not penstock.LeaseState.LOADING:
        raise InvariantViolation(f"bench: the request is {waiting.state}, not waiting any more")
    return found


@contextlib.contextmanager
def _engine(delay_s: float) -> Iterator[tuple[CarryingEngine[penstock.Cache], int]]:
    """An engine's cache with one slow rank in another process."""
    with contextlib.ExitStack() as stack:
        listener = Listener("engine")
        stack.callback(listener.close)
        process = subprocess.Popen([sys.executable, "-m", MODULE, listener.address, str(delay_s)])
        stack.callback(_end, process)
        deadline = time.monotonic() + START_S
        channel = listener.accept(deadline=deadline)
        if channel is None:
            raise UnavailableError(f"the rank's process did not come within {START_S:g} s")
        facts = meet(channel, deadline=deadline)
        cache = penstock.open(slow_config(), ranks=[facts])
        engine = CarryingEngine(cache, [facts], [channel])
        stack.callback(engine.close)
        yield engine, process.pid


def _run_until(engine: CarryingEngine[penstock.Cache], done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + _SERVED_S
    engine.step()
    while not done():
        if time.monotonic() > give_up:
            raise UnavailableError(f"the slow rank has not answered within {_SERVED_S:g} s")
        engine.wait(give_up)
        engine.step()


def _end(process: subprocess.Popen[bytes]) -> None:
    """The rank ends when its channel does."""
    try:
        process.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_CLOSE_S)


def _cpu_s_of(pid: int) -> float:
    """CPU time of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
