"""Options that several commands of `lab` share, beside those of `penstock.cli.conventions`.

| option              | means the same everywhere                      |
|---------------------|------------------------------------------------|
| `--seeds`           | how many seeds, counted from `--start`         |
| `--trace`           | print every event                              |
| `--check`           | a target that is missed ends the command       |
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from penstock.cli.conventions import SEED_MAX

SeedsOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--seeds", metavar="N", min=1, help="Run N seeds, counted from --start."),
]
StartOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--start", metavar="S", min=0, max=SEED_MAX, help="The first seed; 0 if not given."
    ),
]
TraceOption: TypeAlias = Annotated[
    bool,
    typer.Option("--trace", help="Print every event; goes with --seed."),
]
CheckOption: TypeAlias = Annotated[
    bool,
    typer.Option("--check", help="End with status 1 when a target is missed."),
]


def chosen_seeds(
    *, seed: int | None, seeds: int | None, start: int | None, default_count: int
) -> range:
    """The seeds of `--seed`, or else of `--seeds` and `--start`."""
    if seed is None:
        first = start or 0
        return range(first, first + (default_count if seeds is None else seeds))
    if seeds is not None or start is not None:
        raise typer.BadParameter(
            "names one seed, so it goes with neither --seeds nor --start", param_hint="--seed"
        )
    return range(seed, seed + 1)
