"""The commands of `penstock`, and the place where errors become exit statuses.

Each command has a row in `COMMANDS`, which says where it is; options that several
commands share are in `conventions`. Only the module of the command that runs is imported: all of
them together take more than a second, and `penstock --help` needs none. `CommandLine` is also used
for the commands of a clone's `lab/`.

The one rule: errors of the caller or of the machine end as one line and a status; our own defects
end as a traceback.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.main import get_command

from penstock import __version__
from penstock.cli.conventions import ExitStatus
from penstock.cli.entry import INTERRUPTED
from penstock.errors import (
    CapacityError,
    InvariantViolation,
    PenstockError,
    UnavailableError,
    server_install_hint,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

RUN = "Run"
SET_UP = "Set up"
PROVE = "Try, test and measure"


class Command(NamedTuple):
    """One command: where it is, and what the list of commands says about it."""

    target: str
    """`MODULE:FUNCTION`; without a function the module has several, in a Typer `commands`."""
    panel: str
    help: str
    extras: str = ""
    """What of its wheel it cannot do without."""


COMMANDS = {
    "serve": Command(
        "penstock_serve.cli.serve:serve",
        RUN,
        "Serve a model over HTTP as OpenAI's API does, with Penstock as its cache.",
        extras="engine",
    ),
    "router": Command(
        "penstock_serve.cli.router:route",
        RUN,
        "Route requests to vLLM servers: one computes the prompt, another one answers.",
    ),
    "status": Command(
        "penstock_serve.cli.status:show_status",
        RUN,
        "Say how a running server is: its health, requests, tiers and misses.",
    ),
    "top": Command(
        "penstock_serve.cli.top:show_top", RUN, "Watch a running server in the terminal."
    ),
    "dashboard": Command(
        "penstock_serve.cli.router:show_dashboard",
        RUN,
        "Serve the live page for vLLM and SGLang servers, from their metrics.",
    ),
    "cache": Command(
        "penstock_serve.cli.status",
        RUN,
        "Clear what a running server has cached, or tell the story of a request.",
    ),
    "config": Command(
        "penstock.cli.config",
        SET_UP,
        "Check a configuration file, show what it comes to, or list its keys.",
    ),
    "keys": Command(
        "penstock.cli.keys", SET_UP, "Make and list the keys by which machines know each other."
    ),
    "demo": Command(
        "penstock_serve.cli.demo:show_demo",
        PROVE,
        "Serve a model by a pair of instances, talk to it, and check every answer.",
        extras="engine",
    ),
    "doctor": Command(
        "penstock.cli.config:doctor",
        SET_UP,
        "Check this machine and a configuration, and say what to change.",
    ),
    "load": Command(
        "penstock_serve.cli.load:load",
        PROVE,
        "Ask a server with OpenAI's API as many users would, and measure its answers.",
    ),
    "load-compare": Command(
        "penstock_serve.cli.load:compare_loads",
        PROVE,
        "Lay runs of `penstock load` side by side; others are compared with the first one.",
    ),
    "plan": Command(
        "penstock.cli.replay:plan",
        PROVE,
        "Replay a trace with several sizes of tiers, policies and ways to write, and recommend "
        "one.",
    ),
    "replay": Command(
        "penstock.cli.replay:replay",
        PROVE,
        "Play a trace of requests through the cache of a configuration.",
    ),
    "sglang-config": Command(
        "penstock.cli.config:print_sglang_options",
        SET_UP,
        "Print the options that make SGLang keep KV in the tiers of a configuration file.",
    ),
    "store": Command(
        "penstock.cli.store",
        RUN,
        "Serve disk tiers to the engines of this machine, or look into their folder.",
    ),
    "version": Command(
        "penstock.cli.app:show_versions",
        SET_UP,
        "Print the versions of Penstock, of Python and of what Penstock uses.",
    ),
    "vllm-config": Command(
        "penstock.cli.config:print_vllm_flag",
        SET_UP,
        "Print the flag that makes vLLM keep KV in the tiers of a configuration file.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A program with commands."""

    name: str
    help: str
    commands: Mapping[str, Command]
    of_a_clone: Collection[str] = ()
    """Commands that this program does not have, but `lab` and `make` in a clone."""

    def app_for(self, arguments: Sequence[str]) -> typer.Typer:
        """Makes the application: the command that is named here, the others as a list."""
        app = typer.Typer(
            name=self.name,
            help=self.help,
            epilog="Exit status: 0 fine, 1 a finding, 2 wrong usage or settings, "
            "3 cannot run here.",
            no_args_is_help=True,
            add_completion=False,
            rich_markup_mode="markdown",
        )
        app.callback(help=self.help)(_root)
        # Options before the command's name take no values, so the first other word is the name.
        named = next((word for word in arguments if not word.startswith("-")), "")
        for name, row in self.commands.items():
            if name != named:
                app.command(name, help=row.help, rich_help_panel=row.panel)(_only_listed)
                continue
            place, _, function = row.target.partition(":")
            module = import_module(place)
            if function:
                app.command(name, rich_help_panel=row.panel)(getattr(module, function))
            else:
                app.add_typer(module.commands, name=name, help=row.help, rich_help_panel=row.panel)
        return app

    def run(self, arguments: Sequence[str] | None = None) -> int:
        """Runs one command, by default from `sys.argv`, and returns its exit status."""
        status: int = ExitStatus.FINE
        try:
            status = self._run(arguments)
            # Now: the interpreter's own end would tell an error by a traceback and status 120.
            sys.stdout.flush()
        except BrokenPipeError:
            # Who reads has read enough.
            _drop_output()
        except OSError as error:
            if error.errno not in FULL:
                raise
            _drop_output()
            print(f"{self.name}: output cannot be written: {error.strerror}", file=sys.stderr)
            return ExitStatus.CANNOT_RUN_HERE
        return status

    def _require_package(self, arguments: Sequence[str]) -> None:
        """Raises `UnavailableError` if the command is in a wheel that is not installed."""
        named = next((word for word in arguments if not word.startswith("-")), "")
        row = self.commands.get(named)
        if row is not None and find_spec(row.target.partition(".")[0]) is None:
            hint = server_install_hint(row.extras)
            raise UnavailableError(f"{named} is part of penstock-serve: {hint}")

    def _run(self, arguments: Sequence[str] | None) -> int:
        given = sys.argv[1:] if arguments is None else list(arguments)
        if given and given[0] in self.of_a_clone:
            print(
                f"{self.name}: {given[0]} is not part of the package; in a clone of the repository "
                f"run `make {given[0]}`, or `.venv/bin/lab {given[0]}` with options",
                file=sys.stderr,
            )
            return ExitStatus.CANNOT_RUN_HERE
        try:
            self._require_package(given)
            # As a command rather than as an app: typer leaves `sys.excepthook` alone.
            command = get_command(self.app_for(given))
            _show_flags_as_flags(command)
            command(args=given, prog_name=self.name)
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):
                # typer and rich end with status 1 where whoever reads has read enough.
                raise end.__context__ from None
            return end.code if isinstance(end.code, int) else ExitStatus.FINE
        except InvariantViolation:
            raise
        except PenstockError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return _status_of(error)
        except MemoryError as error:
            print(f"{self.name}: not enough memory: {error}", file=sys.stderr)
            return ExitStatus.CANNOT_RUN_HERE
        except KeyboardInterrupt:
            # While modules are imported; afterwards typer does the same.
            return INTERRUPTED
        return ExitStatus.FINE


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Why standard output, or a file that was asked for, cannot take more."""

PENSTOCK = CommandLine(
    name="penstock",
    help="Keeps the KV cache of LLM serving: tools to try, check and measure it.",
    commands=COMMANDS,
    of_a_clone=("sim", "explore", "bench"),
)


def _show_flags_as_flags(command: Any) -> None:  # noqa: ANN401 - of what typer is made of
    """Has help name no type of an option that takes no value; typer says `--help <bool>`."""

    def params(get_params: Callable[[Any], list[Any]], context: object) -> list[Any]:
        found = get_params(context)
        for param in found:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return found

    command.get_params = partial(params, command.get_params)
    for each in getattr(command, "commands", {}).values():
        _show_flags_as_flags(each)


def _drop_output() -> None:
    """Has what is still to be written go nowhere, or the interpreter's end would try it again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)


def _only_listed() -> None:
    """Stands in the list of commands for one that is not going to run."""


PACKAGES = ("penstock", "penstock-serve", "numpy", "msgspec", "xxhash", "pyzmq", "torch")


def show_versions() -> None:
    """Print the versions of Penstock, of Python and of what Penstock uses."""
    rows = {package: _installed(package) for package in PACKAGES}
    rows |= {"python": platform.python_version(), "system": platform.platform()}
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")


def _installed(package: str) -> str:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return "not installed"


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with the option's value
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version of Penstock, and end.",
        ),
    ] = False,
) -> None:
    """Has the options that come before a command."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command of `penstock`, by default from `sys.argv`, and returns its exit status."""
    return PENSTOCK.run(arguments)


def _status_of(error: PenstockError) -> ExitStatus:
    if isinstance(error, UnavailableError | CapacityError):
        return ExitStatus.CANNOT_RUN_HERE
    return ExitStatus.USAGE
