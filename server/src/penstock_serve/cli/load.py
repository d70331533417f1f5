"""`penstock load` and `penstock load-compare`: a load test of any server with OpenAI's API."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock import __version__
from penstock.cli.conventions import (
    INTERRUPTED,
    ExitStatus,
    JsonOption,
    SeedOption,
    require_two_files,
    write_json,
    write_text,
)
from penstock.errors import ConfigError, counted
from penstock_serve.cli.serve import (
    DEFAULT_SERVER,
    ApiKeyFileOption,
    count_option,
    require_packages,
    server_url,
)
from penstock_serve.loadtest.context import (
    CutSessions,
    TokenCounts,
    count_tokens,
    fit_profile,
    fits,
)
from penstock_serve.loadtest.report import (
    LoadContext,
    describe_runs,
    load_page,
    load_report,
    read_report,
)
from penstock_serve.loadtest.workloads import PROFILES, TraceSettings, from_trace, generate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock_serve.loadtest.exchange import LoadTarget
    from penstock_serve.loadtest.report import LoadReport
    from penstock_serve.loadtest.runner import LoadRun
    from penstock_serve.loadtest.workloads import Profile, ScriptSession

REQUESTS = 100
CONCURRENCY = 8
TOKENS_MAX = 1 << 22
"""Of one part of a prompt: more than any model takes."""
SECONDS_MAX = 86_400.0
RATE_MAX = 10_000.0
"""One process sends no more than this in a second."""


_count = partial(count_option, most=TOKENS_MAX)

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="Of the server, or HOST:PORT.")]
WorkloadOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"What to ask: {', '.join(PROFILES)}.")
]
TraceFileOption = Annotated[
    str | None,
    typer.Option(metavar="TRACE", help="Ask what a trace asks: a file, conversation or synthetic."),
]
RateOption = Annotated[
    float | None,
    typer.Option(metavar="N", help="Open loop: sessions begin on time, for N requests a second."),
]
ConcurrencyOption = Annotated[
    int | None, _count(f"Closed loop: N sessions at a time; {CONCURRENCY}.", most=4096)
]
RequestsOption = Annotated[int, _count("How many requests in all.", most=1 << 24)]
SecondsOption = Annotated[
    float | None, typer.Option(metavar="S", help="Send no request after so long.")
]
TimeoutOption = Annotated[float, typer.Option(metavar="S", help="How long one request may take.")]
ModelNameOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="The server's first model if not given.")
]
ApiOption = Annotated[str, typer.Option(metavar="NAME", help="chat or completions.")]
TurnsOption = Annotated[int | None, _count("Turns of a session.", most=10_000)]
PrefixesOption = Annotated[int | None, _count("Different system prompts.", most=100_000)]
SystemOption = Annotated[int | None, _count("Of a shared system prompt.", least=0)]
ContextOption = Annotated[int | None, _count("Of a document, or of a task.", least=0)]
TurnTokensOption = Annotated[int | None, _count("That each turn adds, about.")]
OutputTokensOption = Annotated[int | None, _count("Of an answer, at most.")]
GapOption = Annotated[
    float | None,
    typer.Option("--gap-s", metavar="S", help="From an answer to the next turn, on average."),
]
PromptMaxOption = Annotated[int | None, _count("Cut the prompts of a trace to N tokens.")]
OwnAnswersOption = Annotated[
    bool, typer.Option("--own-answers", help="Put the server's answers into histories.")
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Ask for answers of full length.")
]
TtftOption = Annotated[
    float, typer.Option(metavar="S", help="Goodput: the longest time to the first token.")
]
TpotOption = Annotated[
    float | None, typer.Option(metavar="S", help="Goodput: the longest time a token.")
]
LabelOption = Annotated[str, typer.Option(metavar="TEXT", help="What tables call this run.")]
HtmlOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with tables and curves, too.")
]


def load(  # noqa: PLR0913 - each is an option
    url: UrlArgument = DEFAULT_SERVER,
    *,
    workload: WorkloadOption = "conversations",
    trace: TraceFileOption = None,
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    requests: RequestsOption = REQUESTS,
    seconds: SecondsOption = None,
    timeout: TimeoutOption = 120.0,
    seed: SeedOption = None,
    model: ModelNameOption = None,
    api: ApiOption = "chat",
    api_key_file: ApiKeyFileOption = None,
    turns: TurnsOption = None,
    prefixes: PrefixesOption = None,
    system_tokens: SystemOption = None,
    context_tokens: ContextOption = None,
    turn_tokens: TurnTokensOption = None,
    output_tokens: OutputTokensOption = None,
    gap_s: GapOption = None,
    prompt_max: PromptMaxOption = None,
    own_answers: OwnAnswersOption = False,
    ignore_eos: IgnoreEosOption = False,
    ttft_bound: TtftOption = 2.0,
    tpot_bound: TpotOption = None,
    label: LabelOption = "",
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Ask a server with OpenAI's API as many users would, and measure its answers.

    It works with Penstock, vLLM, SGLang and others. What is asked follows from --seed alone. The
    status is 1 if a request failed. Ctrl-C ends the run and reports what was measured until then.
    """
    require_two_files(json, html)
    _require_seconds(timeout=timeout, seconds=seconds, ttft_bound=ttft_bound, tpot_bound=tpot_bound)
    lengths = {"turns": turns, "prefixes": prefixes, "turn_tokens": turn_tokens}
    lengths |= {"system_tokens": system_tokens, "context_tokens": context_tokens}
    shape = _shape(lengths | {"output_tokens": output_tokens}, gap_s=gap_s)
    arrivals = _Arrivals(requests=requests, rate=_require_rate(rate), concurrency=concurrency)
    if trace is not None:
        plan = _trace_plan(trace, arrivals, shape, prompt_max)
    else:
        plan = _workload_plan(workload, arrivals, shape, seed or 0, prompt_max)
    server = _target(url, api, api_key_file, timeout, model, ignore_eos=ignore_eos)
    target, plan = _fitted(server, plan)
    asked = {"own_answers": own_answers, "ignore_eos": ignore_eos, "api": api}
    context = LoadContext(
        penstock=__version__,
        label=label or f"{target.url.host}:{target.url.port}",
        url=str(target.url),
        model=target.model,
        settings=plan.settings | asked | {"seconds": seconds, "timeout": timeout},
        ttft_bound_s=ttft_bound,
        tpot_bound_s=tpot_bound,
    )
    report = _measure(plan, target, context, seconds=seconds, own_answers=own_answers)
    _show([report], json=json, html=html)
    raise typer.Exit(_status_of(report))


def compare_loads(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What --json of two or more runs wrote.")
    ],
    *,
    html: HtmlOption = None,
    json: JsonOption = None,
) -> None:
    """Lay runs of `penstock load` side by side; others are compared with the first one."""
    if len(files) < 2:
        raise typer.BadParameter("is one file, must be two or more", param_hint="FILE...")
    require_two_files(json, html)
    reports = [read_report(path) for path in files]
    if len({each.label for each in reports}) < len(reports):
        reports = [
            msgspec.structs.replace(each, label=str(path))
            for each, path in zip(reports, files, strict=True)
        ]
    _show(reports, json=json, html=html)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrivals:
    """How many requests come, and when."""

    requests: int
    rate: float | None
    concurrency: int | None

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise typer.BadParameter(
                "is an open loop, --concurrency a closed one: give one of them", param_hint="--rate"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to ask, and when."""

    sessions: Iterable[ScriptSession]
    requests: int
    concurrency: int | None
    settings: dict[str, Any]
    profile: Profile | None = None
    """The shape of sessions, unless they come from a trace."""

    def reshaped(self, profile: Profile) -> _Plan:
        """As many requests, in sessions of another shape."""
        settings = self.settings | asdict(profile)
        sessions = generate(
            profile, seed=settings["seed"], requests=self.requests, rate=settings["rate"]
        )
        return replace(self, sessions=sessions, profile=profile, settings=settings)


def _shape(lengths: dict[str, int | None], *, gap_s: float | None) -> dict[str, Any]:
    """What was given of the shape of sessions."""
    if gap_s is not None and not 0 <= gap_s <= SECONDS_MAX:
        raise ConfigError("--gap-s", f"is {gap_s}, must be seconds from 0 to {SECONDS_MAX:g}")
    given = {**lengths, "gap_s": gap_s}
    return {name: value for name, value in given.items() if value is not None}


def _trace_plan(
    trace: str, arrivals: _Arrivals, shape: dict[str, Any], prompt_max: int | None
) -> _Plan:
    if unfit := sorted(shape.keys() - {"output_tokens"}):
        raise typer.BadParameter(
            "goes not with --trace, which has its own", param_hint=f"--{unfit[0].replace('_', '-')}"
        )
    settings = TraceSettings(
        trace=trace,
        requests=arrivals.requests,
        rate=arrivals.rate,
        prompt_max=prompt_max,
        output_tokens=shape.get("output_tokens"),
    )
    found, sessions = from_trace(settings)
    return _Plan(
        sessions=sessions,
        requests=found,
        concurrency=arrivals.concurrency,
        settings=asdict(settings) | {"concurrency": arrivals.concurrency},
    )


def _workload_plan(
    workload: str, arrivals: _Arrivals, shape: dict[str, Any], seed: int, prompt_max: int | None
) -> _Plan:
    if prompt_max is not None:
        raise typer.BadParameter("goes with --trace only", param_hint="--prompt-max")
    if workload not in PROFILES:
        raise typer.BadParameter(
            f"is {workload!r}, must be one of {', '.join(PROFILES)}", param_hint="--workload"
        )
    if arrivals.rate is None and arrivals.concurrency is None:
        arrivals = replace(arrivals, concurrency=CONCURRENCY)
    profile = replace(PROFILES[workload], **shape)
    plan = _Plan(
        sessions=(),
        requests=arrivals.requests,
        concurrency=arrivals.concurrency,
        settings={"workload": workload, "seed": seed} | asdict(arrivals),
    )
    return plan.reshaped(profile)


def _target(
    url: str,
    api: str,
    key_file: str | None,
    timeout_s: float,
    model: str | None,
    *,
    ignore_eos: bool,
) -> LoadTarget:
    require_packages(("h11",), "")
    from penstock_serve.loadtest.exchange import PATHS, LoadTarget  # noqa: PLC0415  (needs the extra)
    from penstock_serve.server.guard import find_client_key  # noqa: PLC0415
    from penstock_serve.server.vllm_server import ServerUrl  # noqa: PLC0415

    if api not in PATHS:
        raise typer.BadParameter(
            f"is {api!r}, must be one of {', '.join(PATHS)}", param_hint="--api"
        )
    return LoadTarget(
        url=ServerUrl.read("URL", server_url(url).rstrip("/").removesuffix("/v1")),
        model=model or "",
        api=api,
        api_key=find_client_key(key_file),
        timeout_s=timeout_s,
        ignore_eos=ignore_eos,
    )


def _fitted(target: LoadTarget, plan: _Plan) -> tuple[LoadTarget, _Plan]:
    """Names the model, and cuts what is asked to its context; says so if that takes turns away."""
    model = asyncio.run(target.served_model())
    target, context, profile = replace(target, model=model.id), model.context, plan.profile
    if context is None or (profile is not None and fits(profile, TokenCounts.worst(), context)):
        return target, plan
    counts = asyncio.run(count_tokens(target))
    if profile is None:
        cut = CutSessions(plan.sessions, counts, context)
        return target, replace(plan, sessions=cut, settings=plan.settings | {"context": context})
    fitted = fit_profile(profile, counts, context)
    if fitted != profile:
        print(
            f"penstock: sessions have {counted(fitted.turns, 'turn')} instead of {profile.turns}: "
            f"{model.id} takes {context:,} tokens",
            file=sys.stderr,
        )
    return target, plan.reshaped(fitted)


def _measure(
    plan: _Plan,
    target: LoadTarget,
    context: LoadContext,
    *,
    seconds: float | None,
    own_answers: bool,
) -> LoadReport:
    from penstock_serve.loadtest.runner import LoadRun  # noqa: PLC0415  (needs the extra)

    with _progress(plan.requests) as progress:
        run = LoadRun(
            target,
            concurrency=plan.concurrency,
            seconds=seconds,
            own_answers=own_answers,
            progress=progress,
        )
        interrupted = False
        try:
            asyncio.run(_run_until_asked_to_end(run, iter(plan.sessions)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            # What was measured so far is worth more than a traceback.
            interrupted = True
    if isinstance(plan.sessions, CutSessions) and plan.sessions.cut:
        print(
            f"penstock: {counted(plan.sessions.cut, 'request')} of the trace had to be cut: "
            f"{target.model} takes {plan.settings['context']:,} tokens",
            file=sys.stderr,
        )
    return load_report(run.asked, context, began_s=run.began_s, interrupted=interrupted)


async def _run_until_asked_to_end(run: LoadRun, sessions: Iterator[ScriptSession]) -> None:
    """Runs, and is cancelled by SIGTERM as asyncio does by itself for Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run.run(sessions)


def _status_of(report: LoadReport) -> int:
    if report.interrupted:
        return INTERRUPTED
    failed = report.answered < report.requests or not report.requests
    return ExitStatus.FINDING if failed else ExitStatus.FINE


@contextmanager
def _progress(total: int) -> Iterator[Callable[[LoadRun], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]} under way, {task.fields[errors]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, running=0, errors=0)

        def show(run: LoadRun) -> None:
            bar.update(task, completed=len(run.asked), running=run.running, errors=run.errors)

        yield show


def _show(reports: Sequence[LoadReport], *, json: Path | None, html: Path | None) -> None:
    if json is None or str(json) != "-":
        print(describe_runs(reports))
    if json is not None:
        document = [msgspec.to_builtins(each) for each in reports]
        write_json(json, document[0] if len(document) == 1 else document)
    if html is not None:
        write_text(html, load_page(reports), option="--html")


def _require_seconds(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not 0 < value <= SECONDS_MAX:
            raise ConfigError(
                f"--{name.replace('_', '-')}",
                f"is {value}, must be seconds above 0, at most {SECONDS_MAX:g}",
            )


def _require_rate(given: float | None) -> float | None:
    if given is not None and not 1 / SECONDS_MAX <= given <= RATE_MAX:
        raise ConfigError("--rate", f"is {given}, must be requests a second, at most {RATE_MAX:g}")
    return given
