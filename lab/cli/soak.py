"""`lab soak`: serve for a while, break things, and look whether anything is wrong or grows."""

from __future__ import annotations

import csv
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lab.soak.run import LOAD_S, Outcome, soak
from lab.soak.world import LOG
from penstock.cli.conventions import ExitStatus, JsonOption, write_json

if TYPE_CHECKING:
    from lab.soak.meter import Look


def run_soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="For how long at least.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Decides prompts and faults.")] = 1,
    load: Annotated[float, typer.Option(min=1, help="Seconds of load in a round.")] = LOAD_S,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write a row a round.")
    ] = None,
    *,
    json: JsonOption = None,
) -> None:
    """Serve with two prefill and two decode instances, a disk and Redis while things break.

    Clients compare every answer with the one they know. After each round everything must be well
    again, and nothing held; at the end, memory, descriptors, threads and files must not have grown.
    What is wrong ends the command with status 1; its log is kept then.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as made:
        outcome = soak(Path(made), minutes=minutes, seed=seed, load_s=load, progress=_show)
        _write(outcome, json=json, csv_file=csv_file, seed=seed)
        if outcome.findings:
            kept = Path(tempfile.mkdtemp(prefix="penstock-soak-log-")) / LOG
            shutil.copyfile(Path(made) / LOG, kept)
            typer.echo(f"what the server said: {kept}")
            raise typer.Exit(ExitStatus.FINDING)


def _show(found: Look) -> None:
    typer.echo(
        f"{found.minutes:6.1f} min: {found.answers:,} answers, {found.unanswered:,} requests "
        f"without one, {found.faults} faults; {found.memory_mib:,.0f} MiB, "
        f"{found.descriptors} descriptors, {found.threads} threads, {found.files} files"
    )


def _write(outcome: Outcome, *, json: Path | None, csv_file: Path | None, seed: int) -> None:
    for title, counts in (("faults", outcome.faults), ("requests", outcome.ends)):
        said = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        typer.echo(f"{title}: {said}")
    for finding in outcome.findings:
        typer.echo(f"found: {finding}")
    if not outcome.findings:
        typer.echo("nothing was found")
    if csv_file is not None:
        with csv_file.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(outcome.looks[0]._fields if outcome.looks else ())
            rows.writerows(outcome.looks)
    if json is not None:
        document = {
            "seed": seed,
            "faults": outcome.faults,
            "requests": outcome.ends,
            "findings": outcome.findings,
            "looks": [each._asdict() for each in outcome.looks],
        }
        write_json(json, document)
