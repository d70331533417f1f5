"""`lab routing`: simulate the router with up to a thousand engines."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from lab.routing.faults import Fault
from lab.routing.policies import Policy
from lab.routing.report import document_of, losses_of, table_of
from lab.routing.traffic import CHATS, TRACES
from lab.routing.world import LOAD, SECONDS, Conditions, Outcome, simulate
from penstock.cli.conventions import ExitStatus, JsonOption, SeedOption, write_json

Named = TypeVar("Named", Policy, Fault)
ENGINES = "1,10,100"
ALL = ",".join(Policy)


def route(
    *,
    engines: Annotated[
        str, typer.Option("--engines", metavar="N,…", help="Numbers of engines.")
    ] = ENGINES,
    policies: Annotated[str, typer.Option("--policies", metavar="NAME,…", help=f"Of {ALL}.")] = ALL,
    traffic: Annotated[
        str, typer.Option("--traffic", metavar="NAME", help=f"{', '.join(TRACES)} or {CHATS}.")
    ] = TRACES[0],
    faults: Annotated[
        str, typer.Option("--faults", metavar="NAME,…", help=f"Of {','.join(Fault)}; or none.")
    ] = Fault.DEATHS.value,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=1.0, help="How long requests come.")
    ] = SECONDS,
    load: Annotated[
        float,
        typer.Option("--load", metavar="L", min=0.01, help="1: what engines compute uncached."),
    ] = LOAD,
    seed: SeedOption = None,
    json: JsonOption = None,
) -> None:
    """Simulate the router of `penstock serve` with many engines, beside other policies.

    Router, links, keys, KV events and books of peers are the product's; engines are rates. All
    but CPU times follows from the seed. Rows where our policy loses end the command with status 1.
    """
    if traffic not in (*TRACES, CHATS):
        raise typer.BadParameter(
            f"is {traffic!r}, must be one of {', '.join((*TRACES, CHATS))}", param_hint="--traffic"
        )
    counts = [_positive(each) for each in engines.split(",")]
    chosen = [_member(Policy, each, "--policies") for each in policies.split(",")]
    kinds = frozenset(_member(Fault, each, "--faults") for each in faults.split(",") if each)
    given = Conditions(
        engines=1, traffic=traffic, seconds=seconds, load=load, faults=kinds, seed=seed or 0
    )
    outcomes = [
        _run(replace(given, engines=count, policy=policy)) for count in counts for policy in chosen
    ]
    losses = losses_of(outcomes)
    if json is not None:
        write_json(json, {"runs": document_of(outcomes), "losses": losses})
    if json is None or str(json) != "-":
        title = f"{traffic}, faults: {', '.join(sorted(kinds)) or 'none'}"
        Console(width=None if sys.stdout.isatty() else 200).print(table_of(outcomes, title))
        for line in losses:
            print(f"worse: {line}")
    if losses:
        raise typer.Exit(ExitStatus.FINDING)


def _run(conditions: Conditions) -> Outcome:
    """One world; what came of it is said at once: a thousand engines take minutes."""
    print(f"lab: {conditions.engines} engines, {conditions.policy}", file=sys.stderr, flush=True)
    found = simulate(conditions)
    said = f"{found.hit_rate:.1%} hits, first token p99 {found.first_token_p99_s:.2f} s"
    print(f"lab: {found.requests} requests, {said}", file=sys.stderr, flush=True)
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"has {text!r}, must be numbers from 1", param_hint="--engines")
    return int(text)


def _member(kind: type[Named], name: str, option: str) -> Named:
    try:
        return kind(name)
    except ValueError:
        known = ", ".join(kind)
        raise typer.BadParameter(f"has {name!r}, must be of {known}", param_hint=option) from None
