"""Many seeds, over several processes, and what came of them.

Seeds are independent of each other, so neither the number of processes nor the order in
which batches end changes anything in the result, except how long it took.

The one rule that must not break: whatever goes wrong in a world is a finding with its seed,
and the other seeds still run.
"""

from __future__ import annotations

import multiprocessing
import re
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lab.explore.result import DEFECTS
from lab.explore.world import Violation
from lab.sim.coverage import Coverage, counting_moves
from lab.sim.scenarios import Scenario, kinds_of, world_of

if TYPE_CHECKING:
    from collections.abc import Callable

_BATCH_SEEDS = 50
"""About a second of work, so that progress is seen and processes end together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A seed whose world went wrong."""

    seed: int
    checker: str
    """Who noticed: a checker of the simulator, or the kind of exception."""
    problem: str
    where: str
    """The line of code that raised."""

    @property
    def kind(self) -> str:
        """The problem without its numbers, to tell which failures are alike."""
        return f"{self.checker}: {re.sub(r'[0-9]+', 'N', self.problem)}"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of some seeds."""

    coverage: Coverage = field(default_factory=Coverage)
    failures: list[Failure] = field(default_factory=list)
    """In the order of seeds."""
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        """Takes in the seeds of another run."""
        self.coverage.add(other.coverage)
        self.failures = sorted([*self.failures, *other.failures], key=lambda f: f.seed)


def failure_of(seed: int, error: Exception) -> Failure:
    """What to remember of the error that ended a world."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    checker, problem = type(error).__name__, str(error)
    if isinstance(error, Violation):
        checker, problem = error.checker, error.problem
    return Failure(
        seed=seed,
        checker=checker,
        problem=problem.partition("\n")[0],
        where=f"{Path(last.filename).name}:{last.lineno}",
    )


def run_seeds(seeds: range, scenario: Scenario = Scenario.CACHE) -> Outcome:
    """Runs seeds in this process."""
    outcome = Outcome(coverage=Coverage(kinds=kinds_of(scenario)))
    with counting_moves() as moves:
        for seed in seeds:
            world = world_of(scenario, seed)
            try:
                world.run()
            except DEFECTS as error:
                outcome.failures.append(failure_of(seed, error))
            outcome.coverage.add_world(world)
    if outcome.coverage.kinds.has_tables:
        outcome.coverage.moves = moves
    return outcome


def run_campaign(
    seeds: range,
    scenario: Scenario = Scenario.CACHE,
    *,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Runs seeds over `jobs` processes; `progress` hears of every few that have ended."""
    began = time.perf_counter()
    whole = Outcome(coverage=Coverage(kinds=kinds_of(scenario)))
    batches = [seeds[first : first + _BATCH_SEEDS] for first in range(0, len(seeds), _BATCH_SEEDS)]
    if jobs == 1 or len(batches) == 1:
        for batch in batches:
            whole.add(run_seeds(batch, scenario))
            progress(len(batch))
    else:
        # Spawned rather than forked: no world may depend on what this process did before.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(batches)), mp_context=context) as processes:
            running = {processes.submit(run_seeds, batch, scenario): batch for batch in batches}
            for ended in as_completed(running):
                whole.add(ended.result())
                progress(len(running[ended]))
    whole.seconds = time.perf_counter() - began
    return whole
