"""The commands of `lab`: what is run from a clone to prove and measure Penstock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.fixtures.run_end import end_processes_with_this_run
from penstock.cli.app import Command, CommandLine

if TYPE_CHECKING:
    from collections.abc import Sequence

PROVE = "Prove"
MEASURE = "Measure"

LAB = CommandLine(
    name="lab",
    help="Proves and measures Penstock, from a clone.",
    commands={
        "sim": Command(
            "lab.cli.sim:simulate",
            PROVE,
            "Simulate cache, runtime or handoff from many seeds, or print the events of one.",
        ),
        "routing": Command(
            "lab.cli.routing:route",
            PROVE,
            "Simulate the router with up to a thousand engines, beside other policies.",
        ),
        "explore": Command("lab.cli.explore", PROVE, "Visit every state of small handoff worlds."),
        "soak": Command(
            "lab.cli.soak:run_soak",
            PROVE,
            "Serve for hours while things break, and look for what grows.",
        ),
        "bench": Command(
            "lab.cli.bench",
            MEASURE,
            "Measure Penstock beside peers and other designs in the same run.",
        ),
        "walks": Command(
            "lab.cli.walks:walk",
            MEASURE,
            "Count files and calls that a block, a layer and a chat pass.",
        ),
    },
)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command of `lab`, by default from `sys.argv`, and returns its exit status."""
    end_processes_with_this_run()
    return LAB.run(arguments)
