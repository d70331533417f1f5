"""`penstock doctor`: is this machine fit for Penstock, and for a configuration?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
import typer

from penstock import __version__
from penstock.cli.conventions import ConfigOption, ExitStatus, JsonOption, write_json
from penstock.config import load_completed
from penstock.doctor.checks import FindingStatus, examine
from penstock.doctor.facts import MachineFacts
from penstock.errors import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.doctor.checks import DoctorFinding

COLOURS = {FindingStatus.OK: 32, FindingStatus.WARNING: 33, FindingStatus.PROBLEM: 31}
"""Of a terminal: green, yellow, red."""


def doctor(*, config: ConfigOption = None, json: JsonOption = None) -> None:
    """Check this machine and a configuration, and say what to change.

    Nothing is changed. With a disk tier, 64 MiB are written to its folder and removed. The status
    is 1 if there is a problem; warnings do not count.
    """
    loaded = None if config is None else load_completed(config, _name_model)
    findings = examine(MachineFacts(config=loaded))
    problems = sum(each.status is FindingStatus.PROBLEM for each in findings)
    if json is None or str(json) != "-":
        print(_described(findings, coloured=sys.stdout.isatty()))
    if json is not None:
        write_json(
            json,
            {
                "penstock": __version__,
                "problems": problems,
                "findings": msgspec.to_builtins(findings),
            },
        )
    if problems:
        raise typer.Exit(ExitStatus.FINDING)


def _name_model(document: dict[str, object]) -> None:
    """The file of a server may leave out its model, which no check needs."""
    document.setdefault("model", {"name": "any"})


def _counted(status: FindingStatus, number: int) -> str:
    return f"{number} ok" if status is FindingStatus.OK else counted(number, status.value)


def _described(findings: Sequence[DoctorFinding], *, coloured: bool) -> str:
    lines = []
    for each in findings:
        status = f"{each.status.value:7}"
        if coloured:
            status = f"\x1b[{COLOURS[each.status]}m{status}\x1b[0m"
        lines.append(f"{status}  {each.check}: {each.seen}")
        if each.remedy:
            lines.append(f"{'':9}→ {each.remedy}")
    counts = {status: sum(each.status is status for each in findings) for status in FindingStatus}
    lines += ["", ", ".join(_counted(each, number) for each, number in counts.items())]
    return "\n".join(lines)
