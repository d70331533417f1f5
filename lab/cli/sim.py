"""`lab sim`: simulate the cache or the handoff from many seeds, or tell the story of one."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from lab.cli.options import SeedsOption, StartOption, TraceOption, chosen_seeds
from lab.explore.result import DEFECTS
from lab.sim.campaign import failure_of, run_campaign
from lab.sim.report import document_of, failure_lines, lines_of
from lab.sim.scenarios import Scenario, world_of
from penstock import __version__
from penstock.cli.conventions import (
    ExitStatus,
    JobsOption,
    JsonOption,
    SeedOption,
    write_json,
)
from penstock.errors import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEEDS_DEFAULT = 1000


def simulate(
    scenario: Annotated[
        Scenario, typer.Option("--scenario", help="What to simulate.")
    ] = Scenario.CACHE,
    seeds: SeedsOption = None,
    start: StartOption = None,
    seed: SeedOption = None,
    jobs: JobsOption = 1,
    *,
    trace: TraceOption = False,
    json: JsonOption = None,
) -> None:
    """Simulate cache or handoff from many seeds, or tell the story of one.

    A seed decides everything: settings, requests, delays and faults. After every event the
    whole state is checked. Seeds that fail end the command with status 1; so do events,
    faults or moves between states that too few of the seeds have seen.
    """
    chosen = chosen_seeds(seed=seed, seeds=seeds, start=start, default_count=SEEDS_DEFAULT)
    if trace:
        if seed is None:
            raise typer.BadParameter(
                "tells the story of one seed: give --seed", param_hint="--trace"
            )
        _tell(scenario, seed)
        return
    with _progress(len(chosen)) as advance:
        outcome = run_campaign(chosen, scenario, jobs=jobs, progress=advance)
    problems = list(failure_lines(outcome, scenario.value))
    if json is not None:
        head = {"penstock": __version__, "scenario": scenario.value, "start": chosen.start}
        write_json(json, head | document_of(outcome))
    if json is None or str(json) != "-":
        for line in (*lines_of(outcome), "", *(problems or ["nothing was found"])):
            print(line)
    if problems:
        raise typer.Exit(ExitStatus.FINDING)


def _tell(scenario: Scenario, seed: int) -> None:
    """Tells every event of one world, and how it ended."""
    world = world_of(scenario, seed, log=print)
    try:
        world.run()
    except DEFECTS as error:
        failure = failure_of(seed, error)
        print(f"seed {seed} failed: {failure.checker}: {error} ({failure.where})")
        raise typer.Exit(ExitStatus.FINDING) from None
    print(f"seed {seed}: {counted(world.events.total(), 'event')}, nothing was found")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Shows how many seeds have ended: a bar on a terminal, a few lines elsewhere."""
    if sys.stderr.isatty():
        columns = (BarColumn(), MofNCompleteColumn(), "seeds", TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda count: bar.advance(task, count)
        return
    done, reported = 0, 0

    def advance(count: int) -> None:
        nonlocal done, reported
        done += count
        tenths = done * 10 // total
        if tenths > reported and done < total:
            reported = tenths
            print(f"lab: {done} of {total} seeds", file=sys.stderr, flush=True)

    yield advance
