"""`lab walks`: how many files and calls one piece of work passes."""

from __future__ import annotations

import typer

from lab.walks.walks import WALKS
from penstock.cli.conventions import JsonOption, write_json


def walk(*, json: JsonOption = None) -> None:
    """Count files and calls of Penstock that a block, a layer and a chat pass."""
    found = {name: make() for name, make in WALKS.items()}
    for name, walked in found.items():
        typer.echo(
            f"{name}: {walked.files} files, {walked.calls:,} calls; processes: {walked.processes}"
        )
    if json is not None:
        write_json(json, {name: walked._asdict() for name, walked in found.items()})
