"""`lab explore`: look at small worlds in every order in which things can happen."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from lab.explore import Bounds, Result
from lab.worlds.fleets import EXPLORED, AnyWorld
from penstock import __version__
from penstock.cli.conventions import ExitStatus, JsonOption, write_json
from penstock.errors import counted

commands = typer.Typer(no_args_is_help=True)

SECONDS_DEFAULT = 900.0

WorldOption = Annotated[
    list[str] | None,
    typer.Option("--world", metavar="NAME", help="Look at this world only; may be repeated."),
]
SecondsOption = Annotated[
    float,
    typer.Option("--seconds", metavar="S", min=0.001, help="Stop after so many seconds in all."),
]
ListOption = Annotated[bool, typer.Option("--list", help="Only say which worlds there are.")]


@commands.callback()
def explorer() -> None:
    """Look at small worlds in every order in which things can happen."""


@commands.command("handoff")
def explore_handoff(
    world: WorldOption = None,
    *,
    seconds: SecondsOption = SECONDS_DEFAULT,
    only_list: ListOption = False,
    json: JsonOption = None,
) -> None:
    """Explore the shipped machines of a handoff in small worlds.

    Messages, the three steps of every write, timers, and what may go wrong happen in every
    order. What is found (a broken promise, a deadlock, a state with no way to a good end) is
    told as the shortest story that leads there, and ends the command with status 1. A world
    whose states were not all visited in time is said to be so, and is no finding.
    """
    chosen = _chosen(world)
    if only_list:
        for small in chosen:
            print(f"{small.name:24}  {small.says}{_method(small)}")
        return
    quiet = json is not None and str(json) == "-"
    results, deadline = [], time.monotonic() + seconds
    for place, small in enumerate(chosen):
        left_s = (deadline - time.monotonic()) / _sharing(chosen[place:])
        bounds = Bounds(seconds=max(0.001, left_s))
        result = small.look(bounds)
        results.append((small, result))
        if not quiet:
            _show(small, result)
    if not quiet:
        _show_sum([result for _, result in results])
    if json is not None:
        worlds = [{"world": s.name, "says": s.says} | r.document() for s, r in results]
        write_json(json, {"penstock": __version__, "worlds": worlds})
    if any(result.finding for _, result in results):
        raise typer.Exit(ExitStatus.FINDING)


def _chosen(names: list[str] | None) -> list[AnyWorld]:
    known = {small.name: small for small in EXPLORED}
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(known)}", param_hint="--world"
            )
    return [known[name] for name in names] if names else [*EXPLORED]


def _sharing(worlds: list[AnyWorld]) -> int:
    """How many worlds share the time that is left: large ones do, others end early."""
    return sum(small.large for small in worlds) if worlds[0].large else 1


def _method(small: AnyWorld) -> str:
    return "" if small.delays is None else f"; at most {small.delays} delays"


def _show(small: AnyWorld, result: Result) -> None:
    print(f"{small.name}: {small.says}")
    print(f"  {result.summary()}", flush=True)
    if result.finding is not None:
        for line in result.finding.lines():
            print(f"  {line}")


def _show_sum(results: list[Result]) -> None:
    findings = sum(result.finding is not None for result in results)
    exhausted = sum(result.exhausted for result in results)
    states = sum(result.state_count for result in results)
    seconds = sum(result.seconds for result in results)
    found = f"{findings} with findings" if findings else "nothing was found"
    print(
        f"{counted(len(results), 'world')}, {exhausted} exhausted, {counted(states, 'state')}, "
        f"{seconds:.1f} s: {found}"
    )
