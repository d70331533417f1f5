"""The command begins without its extra, and without anything but the standard library."""

from __future__ import annotations

import subprocess
import sys

import pytest

import penstock
from penstock.cli.entry import main


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # `None` in `sys.modules` is how Python itself says that a module is not to be had.
    monkeypatch.setitem(sys.modules, missing, None)

    status = main(["version"])

    assert status == 3
    assert capsys.readouterr().err == (
        "penstock: the command line needs the 'cli' extra: pip install \".[cli]\" "
        "in a clone of the repository\n"
    )


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_version_is_printed_without_the_extra_too(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_the_entry_loads_nothing_that_the_extra_brings() -> None:
    script = "import sys, penstock.cli.entry; print({'typer', 'rich'} & set(sys.modules))"

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout == "set()\n"


def test_an_interrupt_while_modules_are_imported_is_a_status_and_no_traceback() -> None:
    script = """
import sys
from penstock.cli.entry import main

class Interrupt:
    def find_spec(self, name, *_):
        if name == "penstock.cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.exit(main(["version"]))
"""

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (130, "")


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.entry", "version"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("penstock ")
