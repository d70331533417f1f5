"""`penstock bench`: what Penstock costs on this machine, beside naive ways and ceilings.

The benchmarks beside peers are run from a clone: `lab/cli/bench.py`.
"""

from __future__ import annotations

import shlex
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import penstock
from penstock.bench.disk import ROUNDS as DISK_ROUNDS
from penstock.bench.disk import run_disk
from penstock.bench.disk_process import run_store_process
from penstock.bench.handoff import ROUNDS as HANDOFF_ROUNDS
from penstock.bench.handoff import run_handoff
from penstock.bench.handoff_nixl import run_handoff_over_nixl
from penstock.bench.index import ROUNDS, run_growth, run_index, run_policies
from penstock.bench.report import BenchReport
from penstock.bench.store import ROUNDS as STORE_ROUNDS
from penstock.bench.store import run_store
from penstock.cli.conventions import CheckOption, ConfigOption, JsonOption, write_json
from penstock.cli.store import stored_tiers_of
from penstock.errors import UnavailableError, install_hint

commands = typer.Typer(no_args_is_help=True)

TRANSFER_ROUNDS = 7

RoundsOption = Annotated[int, typer.Option("--rounds", min=3, help="Rounds for each size.")]


class BenchTransport(Enum):
    """How KV travels in a benchmark."""

    SHARED_MEMORY = "shared_memory"
    NIXL = "nixl"


class BenchDevice(Enum):
    """Where a benchmark's engine runs."""

    CUDA = "cuda"
    CPU = "cpu"


@commands.command("index")
def bench_index(
    *,
    json: JsonOption = None,
    rounds: RoundsOption = ROUNDS,
    check: CheckOption = False,
) -> None:
    """Measure the index: keys, hits, misses, eviction, growth, memory."""
    report = new_report("penstock")
    run_index(report, None, rounds=rounds)
    run_policies(report, rounds=rounds)
    run_growth(report)
    finish(report, json=json, check=check)


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
            "bench transfer needs CUDA, and there is no module "
            f"{error.name}: {install_hint('torch')}"
        ) from error
    report = new_report("penstock")
    run_transfer(report, rounds=rounds)
    finish(report, json=json, check=check)


@commands.command("handoff")
def bench_handoff(
    *,
    json: JsonOption = None,
    device: Annotated[
        BenchDevice, typer.Option("--device", help="cpu: rank processes; cuda: one GPU, two pools.")
    ] = BenchDevice.CPU,
    transport: Annotated[
        BenchTransport,
        typer.Option("--transport", help="nixl: beside a plain NIXL write, with --device cpu."),
    ] = BenchTransport.SHARED_MEMORY,
    rounds: RoundsOption = HANDOFF_ROUNDS,
    check: CheckOption = False,
) -> None:
    """Measure the handoff: throughput, what decode has to wait for, CPU time a part."""
    report = new_report("penstock")
    if transport is BenchTransport.NIXL:
        if device is not BenchDevice.CPU:
            raise typer.BadParameter("is nixl, must be shared_memory with --device cuda")
        run_handoff_over_nixl(report, rounds=rounds)
    elif device is BenchDevice.CPU:
        run_handoff(report, rounds=rounds)
    else:
        _run_handoff_on_cuda(report, rounds=rounds)
    finish(report, json=json, check=check)


def _run_handoff_on_cuda(report: BenchReport, *, rounds: int) -> None:
    try:
        import torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnavailableError(
            f"bench handoff --device cuda needs torch: {install_hint('torch')}"
        ) from error
    if not torch.cuda.is_available():
        raise UnavailableError("bench handoff --device cuda needs a CUDA device, torch sees none")
    from penstock.bench.handoff_cuda import run_handoff_on_cuda  # noqa: PLC0415 - needs an extra

    run_handoff_on_cuda(report, rounds=rounds)


@commands.command("disk")
def bench_disk(
    *,
    folder: Annotated[
        Path, typer.Option("--folder", metavar="PATH", help="On the disk that is measured.")
    ] = Path(),
    json: JsonOption = None,
    rounds: RoundsOption = DISK_ROUNDS,
    only: Annotated[
        str,
        typer.Option(
            "--only",
            metavar="PARTS",
            help="rates, process, first-token (needs torch), by comma.",
        ),
    ] = "rates,process",
    device: Annotated[
        BenchDevice, typer.Option("--device", help="Of first-token: cuda has the sizes of an 8B.")
    ] = BenchDevice.CPU,
    check: CheckOption = False,
) -> None:
    """Measure the disk tier beside fio, its store process, and a first token from disk."""
    parts = set(only.split(","))
    if not parts <= {"rates", "process", "first-token"}:
        raise typer.BadParameter(f"--only is {only}, must be of rates, process, first-token")
    report = new_report("penstock")
    if "rates" in parts:
        run_disk(report, folder=folder, rounds=rounds)
    if "process" in parts:
        run_store_process(report, folder=folder, rounds=rounds)
    if "first-token" in parts:
        _run_first_token(report, folder=folder, rounds=rounds, device=device)
    finish(report, json=json, check=check)


@commands.command("store")
def bench_store(
    *,
    config: ConfigOption = None,
    json: JsonOption = None,
    rounds: RoundsOption = STORE_ROUNDS,
    check: CheckOption = False,
) -> None:
    """Measure the shared stores of a configuration beside the plain client of each."""
    report = new_report("penstock")
    run_store(report, stored_tiers_of(config).tiers, rounds=rounds)
    finish(report, json=json, check=check)


def _run_first_token(
    report: BenchReport, *, folder: Path, rounds: int, device: BenchDevice
) -> None:
    try:
        from penstock.bench.disk_first_token import (  # noqa: PLC0415 - needs an extra
            FirstTokenPlan,
            run_first_token,
        )
    except ImportError as error:
        raise UnavailableError(
            f"bench disk --only first-token needs torch: {install_hint('torch')}"
        ) from error
    plan = FirstTokenPlan.small() if device is BenchDevice.CPU else FirstTokenPlan()
    run_first_token(report, plan, folder=folder, rounds=rounds)


@commands.command("engine")
def bench_engine(
    *,
    json: JsonOption = None,
    rounds: RoundsOption = 3,
    only: Annotated[
        str,
        typer.Option("--only", metavar="PARTS", help="chats, decode, hits, latency, by comma."),
    ] = "chats,decode,hits,latency",
    graphs: Annotated[
        bool, typer.Option(help="Whether steps of few tokens are replayed as CUDA graphs.")
    ] = True,
    load_gate: Annotated[
        str, typer.Option("--load-gate", help="measured, or off: whatever is found is loaded.")
    ] = "measured",
    layer_wise: Annotated[
        str, typer.Option("--layer-wise", help="off, or auto: steps join loads layer by layer.")
    ] = "off",
    check: CheckOption = False,
) -> None:
    """Measure the engine on a GPU, with and without a host tier (needs CUDA)."""
    report = new_report("penstock")
    parts = tuple(only.split(","))
    _run_engine(
        report,
        rounds=rounds,
        parts=parts,
        graphs=graphs,
        load_gate=load_gate,
        layer_wise=layer_wise,
    )
    finish(report, json=json, check=check)


def _run_engine(
    report: BenchReport,
    *,
    rounds: int,
    parts: tuple[str, ...],
    graphs: bool,
    load_gate: str,
    layer_wise: str,
) -> None:
    try:
        import torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnavailableError(
            f"bench engine needs CUDA, and torch: {install_hint('torch')}"
        ) from error
    if not torch.cuda.is_available():
        raise UnavailableError("bench engine needs a CUDA device, and torch sees none")
    from penstock.bench.engine import run_engine  # noqa: PLC0415 - needs an extra
    from penstock.bench.engine_parts import PARTS, EnginePlan  # noqa: PLC0415

    if not set(parts) <= set(PARTS):
        raise typer.BadParameter(f"is {','.join(parts)}, must be of {', '.join(PARTS)}")
    plan = EnginePlan(
        rounds=rounds, parts=parts, graphs=graphs, load_gate=load_gate, layer_wise=layer_wise
    )
    run_engine(report, plan)


@commands.command("traffic")
def bench_traffic(
    *,
    json: JsonOption = None,
    only: Annotated[
        str,
        typer.Option("--only", metavar="WORKLOADS", help="Some of the workloads, by semicolon."),
    ] = "",
    caches: Annotated[
        str,
        typer.Option("--caches", metavar="CACHES", help="Some of the caches, by semicolon."),
    ] = "",
    device_gib: Annotated[
        float, typer.Option("--device-gib", min=8.0, help="KV blocks on the GPU.")
    ] = 40.0,
    host_gib: Annotated[float, typer.Option("--host-gib", min=1.0, help="The host tier.")] = 90.0,
    window: Annotated[
        float, typer.Option("--window", min=1.0, help="Seconds of requests in one run.")
    ] = 12.0,
    check: CheckOption = False,
) -> None:
    """Measure requests a second in time, by cache, on a GPU (needs CUDA)."""
    try:
        import torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnavailableError(
            f"bench traffic needs CUDA, and torch: {install_hint('torch')}"
        ) from error
    from penstock.bench.traffic import (  # noqa: PLC0415 - needs an extra
        VARIANTS,
        WORKLOADS,
        TrafficPlan,
        run_traffic,
    )

    workloads = _chosen("--only", only, list(WORKLOADS))
    variants = _chosen("--caches", caches, list(VARIANTS))
    if not torch.cuda.is_available():
        raise UnavailableError("bench traffic needs a CUDA device, and torch sees none")
    report = new_report("penstock")
    plan = TrafficPlan.sized(
        device_gib=device_gib,
        host_gib=host_gib,
        window_s=window,
        variants=tuple(variants),
        workloads={name: WORKLOADS[name] for name in workloads},
    )
    run_traffic(report, plan)
    finish(report, json=json, check=check)


def _chosen(option: str, given: str, known: list[str]) -> list[str]:
    """The names in an option, in the order of those that are known; all if it is empty."""
    named = [each.strip() for each in given.split(";")] if given else known
    unknown = [each for each in named if each not in known]
    if unknown:
        raise typer.BadParameter(f"{option} has {unknown[0]!r}, must be of {'; '.join(known)}")
    return [each for each in known if each in named]


def new_report(program: str) -> BenchReport:
    """A report of the command that runs; how far it is goes to standard error."""
    return BenchReport(
        version=penstock.__version__,
        command=shlex.join([program, *sys.argv[1:]]),
        say=partial(typer.echo, err=True),
    )


def finish(report: BenchReport, *, json: Path | None, check: bool) -> NoReturn:
    """Shows and writes a report, and ends the command with its status."""
    if json is None or str(json) != "-":
        report.show(sys.stdout)
    if json is not None:
        write_json(json, report.to_builtins())
    raise typer.Exit(report.exit_code(check=check))
