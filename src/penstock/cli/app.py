"""The commands of `penstock`, and the edge where errors become exit statuses.

Each command has a module of its own beside this one and is added to `app` below; options
that several commands share are in `conventions`.

The one rule that must not break: what the caller or the world got wrong ends as one line and
a status; what we got wrong ends as a traceback, never as a tidy message.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer
from typer.main import get_command

from penstock.cli import bench, config, explore
from penstock.cli.conventions import ExitStatus
from penstock.cli.demo import show_demo
from penstock.cli.serve import serve
from penstock.cli.sim import simulate
from penstock.cli.version import show_version
from penstock.cli.vllm_config import print_vllm_flag
from penstock.errors import CapacityError, InvariantViolation, PenstockError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN = "Run"
SET_UP = "Set up"
PROVE = "Try, test and measure"

app = typer.Typer(
    name="penstock",
    help="Keeps the KV cache of LLM serving: tools to try, check and measure it.",
    epilog="Exit status: 0 fine, 1 a finding, 2 wrong usage or settings, 3 cannot run here.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)
app.add_typer(
    config.commands,
    name="config",
    help="Check a configuration file, or show what it comes to.",
    rich_help_panel=SET_UP,
)
app.add_typer(
    bench.commands,
    name="bench",
    help="Measure, beside peers and ceilings in the same run.",
    rich_help_panel=PROVE,
)
app.add_typer(
    explore.commands,
    name="explore",
    help="Look at small worlds in every order in which things can happen.",
    rich_help_panel=PROVE,
)
app.command("serve", rich_help_panel=RUN)(serve)
app.command("demo", rich_help_panel=PROVE)(show_demo)
app.command("sim", rich_help_panel=PROVE)(simulate)
app.command("version", rich_help_panel=SET_UP)(show_version)
app.command("vllm-config", rich_help_panel=SET_UP)(print_vllm_flag)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, by default from `sys.argv`, and returns its exit status."""
    # Called as a command rather than as an app, so that typer leaves `sys.excepthook` alone.
    command = get_command(app)
    try:
        command(args=None if arguments is None else list(arguments), prog_name="penstock")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitStatus.FINE
    except InvariantViolation:
        raise
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return _status_of(error)
    return ExitStatus.FINE


def _status_of(error: PenstockError) -> ExitStatus:
    if isinstance(error, UnavailableError | CapacityError):
        return ExitStatus.CANNOT_RUN_HERE
    return ExitStatus.USAGE
