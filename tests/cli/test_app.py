"""The edge of the command line: errors become one line and a status, defects a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.main import get_command

import penstock
from lab.reference_pages import completed
from penstock.cli.app import COMMANDS, PENSTOCK, CommandLine, run
from penstock.errors import (
    CapacityError,
    ConfigError,
    InvariantViolation,
    LeaseError,
    PenstockError,
    UnavailableError,
    server_install_hint,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def command_raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Makes `penstock fail` a command that raises the given error."""

    def install(error: Exception) -> None:
        app = typer.Typer()

        @app.command()
        def fail() -> None:
            raise error

        @app.command()
        def other() -> None: ...

        monkeypatch.setattr(CommandLine, "app_for", lambda _line, _arguments: app)

    return install


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("cache.blocks", "is -1, must be at least 0"), 2),
        (LeaseError("the lease has ended"), 2),
        (UnavailableError("no CUDA device"), 3),
        (CapacityError(tier="device", wanted=3, available=2), 3),
    ],
)
def test_what_others_got_wrong_is_one_line_and_a_status(
    error: PenstockError,
    status: int,
    command_raising: Callable[[Exception], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command_raising(error)

    ended = run(["fail"])

    assert ended == status
    assert capsys.readouterr().err == f"penstock: {error}\n"


def test_too_little_memory_is_one_line_and_a_status(
    command_raising: Callable[[Exception], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command_raising(MemoryError("Unable to allocate 4.00 GiB"))

    assert run(["fail"]) == 3
    assert capsys.readouterr().err == ("penstock: not enough memory: Unable to allocate 4.00 GiB\n")


def test_an_interrupt_before_a_command_begins_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_line: CommandLine, _arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CommandLine, "app_for", interrupted)

    assert run(["plan"]) == 130


@pytest.mark.parametrize("defect", [InvariantViolation("a slot was freed twice"), KeyError("x")])
def test_what_we_got_wrong_is_not_tidied_away(
    defect: Exception, command_raising: Callable[[Exception], None]
) -> None:
    command_raising(defect)

    with pytest.raises(type(defect)):
        run(["fail"])


def test_a_finding_ends_with_status_one(
    command_raising: Callable[[Exception], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command_raising(typer.Exit(1))

    ended = run(["fail"])

    assert ended == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [["no-such-command"], ["version", "--no-such-option"], []])
def test_wrong_usage_ends_with_status_two(arguments: list[str]) -> None:
    assert run(arguments) == 2


def test_help_lists_the_commands_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    ended = run(["--help"])

    printed = " ".join(capsys.readouterr().out.split())
    assert ended == 0
    assert "config" in printed
    assert "version" in printed
    assert "0 fine, 1 a finding, 2 wrong usage or settings, 3 cannot run here" in printed


@pytest.mark.parametrize("words", [[], ["serve"], ["cache", "story"]], ids=" ".join)
def test_help_names_no_type_of_an_option_without_a_value(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--help"]) == 0

    assert "bool" not in capsys.readouterr().out.lower()


def test_version_names_penstock_python_and_what_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    ended = run(["version"])

    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert ended == 0
    used = ["numpy", "msgspec", "xxhash", "pyzmq", "torch"]
    assert names == ["penstock", "penstock-serve", *used, "python", "system"]


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    ended = run(["--version"])

    assert ended == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def options_of(command: Any) -> list[set[str]]:
    """The names of each option of a command, and of the commands below it."""
    own = [
        {*each.opts, *each.secondary_opts}
        for each in command.params
        if each.param_type_name == "option"
    ]
    below = [options_of(each) for each in getattr(command, "commands", {}).values()]
    return own + [names for some in below for names in some]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_on_a_page(name: str) -> None:
    root: Any = get_command(PENSTOCK.app_for([name]))
    pages = completed((ROOT / "docs" / "cli.md").read_text(encoding="utf-8"))
    named = set(re.findall(r"--[a-z][a-z-]*", pages))

    assert not [names for names in options_of(root.commands[name]) if not names & named]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_about_itself(name: str) -> None:
    row = COMMANDS[name]
    place, _, function = row.target.partition(":")
    module = import_module(place)

    if function:
        said = getattr(module, function).__doc__.split("\n\n")[0]
        assert " ".join(said.split()) == row.help
    else:
        assert module.commands.registered_commands


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        (["sim", "--seeds", "40"], "make sim"),
        (["explore", "handoff", "--list"], "make explore"),
        (["bench", "vllm", "--rounds", "3"], "make bench"),
        (["bench", "interference", "--help"], "make bench"),
    ],
)
def test_a_command_that_needs_a_clone_says_in_one_line_where_it_is(
    arguments: list[str], target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(arguments)

    printed = capsys.readouterr()
    assert ended == 3
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert f"`{target}`" in printed.err


def test_a_word_that_is_no_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["servee"]) == 2
    assert "Did you mean 'serve'?" in capsys.readouterr().err


def test_help_imports_no_command_and_no_heavy_package() -> None:
    script = (
        "import sys\n"
        "from penstock.cli.entry import main\n"
        "main(['--help'])\n"
        "print(sorted(name for name in sys.modules if name.startswith('penstock.')))\n"
        "print(sorted({'numpy', 'zmq', 'torch', 'transformers'} & set(sys.modules)))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    ours = {f"penstock.{name}" for name in ("cli", "cli.app", "cli.conventions", "cli.entry")}
    *_, loaded, heavy = done.stdout.splitlines()
    assert loaded == str(sorted({*ours, "penstock.errors"}))
    assert heavy == "[]"


@pytest.mark.parametrize("words", [["--version"], ["plan", "--help"]])
def test_output_that_finds_no_room_is_one_line_and_a_status(words: list[str]) -> None:
    """Short output is written at the end of the process, long output in its midst."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "penstock", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=600,
            check=False,
        )

    assert ended.returncode == 3
    assert ended.stderr == "penstock: output cannot be written: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_read_enough_is_no_error(
    unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is seen at the end of the process, or in the midst of the command."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "penstock", "--version"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=600,
            check=False,
        )

    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "extras"),
    [(["serve"], "engine"), (["demo"], "engine"), (["top", "--help"], "")],
    ids=["serve", "demo", "top --help"],
)
def test_a_command_of_the_other_wheel_says_how_to_install_it(
    arguments: list[str],
    extras: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("penstock.cli.app.find_spec", lambda _: None)

    ended = run(arguments)

    printed = capsys.readouterr()
    assert ended == 3
    assert printed.out == ""
    assert printed.err == (
        f"penstock: {arguments[0]} is part of penstock-serve: {server_install_hint(extras)}\n"
    )
