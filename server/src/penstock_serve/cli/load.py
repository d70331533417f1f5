"""`penstock load` and `penstock load-compare`: a load test of any server with OpenAI's API."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
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
    Takes,
    require_two_files,
    show_result,
    with_options,
    write_text,
)
from penstock.config import String
from penstock.errors import ConfigError, counted
from penstock_serve.cli.serve import (
    DEFAULT_SERVER,
    ApiKeyFileOption,
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
from penstock_serve.loadtest.workloads import PROFILES, Profile, TraceSettings, from_trace, generate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock_serve.loadtest.exchange import LoadTarget
    from penstock_serve.loadtest.report import LoadReport
    from penstock_serve.loadtest.runner import LoadRun
    from penstock_serve.loadtest.workloads import ScriptSession

CONCURRENCY = 8
TOKENS_MAX = 1 << 22
"""Of one part of a prompt: more than any model takes."""
SECONDS_MAX = 86_400.0
RATE_MAX = 10_000.0
"""One process sends no more than this in a second."""


UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="Of the server, or HOST:PORT.")]
HtmlOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with tables and curves, too.")
]
WorkloadOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"What to ask: {', '.join(PROFILES)}.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What a run asks, and how.

    Raises `ConfigError` or `typer.BadParameter`: a number makes no sense.
    """

    workload: WorkloadOption = "conversations"
    trace: Annotated[str | None, Takes("TRACE")] = None
    """Ask what a trace asks: a file, conversation or synthetic."""
    rate: Annotated[float | None, Takes("N")] = None
    """Open loop: sessions begin on time, for N requests a second."""
    concurrency: Annotated[int | None, Takes("N", 1, 4096)] = None
    """Closed loop: N sessions at a time; 8."""
    requests: Annotated[int, Takes("N", 1, 1 << 24)] = 100
    """How many requests in all."""
    seconds: Annotated[float | None, Takes("S")] = None
    """Send no request after so long."""
    timeout: Annotated[float, Takes("S")] = 120.0
    """How long one request may take."""
    seed: SeedOption = None
    model: Annotated[str | None, Takes("NAME")] = None
    """The server's first model if not given."""
    api: Annotated[str, Takes("NAME")] = "chat"
    """chat or completions."""
    api_key_file: ApiKeyFileOption = None
    turns: Annotated[int | None, Takes("N", 1, 10_000)] = None
    """Turns of a session."""
    prefixes: Annotated[int | None, Takes("N", 1, 100_000)] = None
    """Different system prompts."""
    system_tokens: Annotated[int | None, Takes("N", 0, TOKENS_MAX)] = None
    """Of a shared system prompt."""
    context_tokens: Annotated[int | None, Takes("N", 0, TOKENS_MAX)] = None
    """Of a document, or of a task."""
    turn_tokens: Annotated[int | None, Takes("N", 1, TOKENS_MAX)] = None
    """That each turn adds, about."""
    output_tokens: Annotated[int | None, Takes("N", 1, TOKENS_MAX)] = None
    """Of an answer, at most."""
    gap_s: Annotated[float | None, Takes("S")] = None
    """From an answer to the next turn, on average."""
    prompt_max: Annotated[int | None, Takes("N", 1, TOKENS_MAX)] = None
    """Cut the prompts of a trace to N tokens."""
    own_answers: bool = False
    """Put the server's answers into histories."""
    ignore_eos: bool = False
    """Ask for answers of full length."""
    ttft_bound: Annotated[float, Takes("S")] = 2.0
    """Goodput: the longest time to the first token."""
    tpot_bound: Annotated[float | None, Takes("S")] = None
    """Goodput: the longest time a token."""
    label: Annotated[str, Takes("TEXT")] = ""
    """What tables call this run."""
    json: JsonOption = None
    html: HtmlOption = None

    def __post_init__(self) -> None:
        require_two_files(self.json, self.html)
        for name in ("timeout", "seconds", "ttft_bound", "tpot_bound"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= SECONDS_MAX:
                raise ConfigError(
                    f"--{name.replace('_', '-')}",
                    f"is {value}, must be seconds above 0, at most {SECONDS_MAX:g}",
                )
        if self.gap_s is not None and not 0 <= self.gap_s <= SECONDS_MAX:
            raise ConfigError(
                "--gap-s", f"is {self.gap_s}, must be seconds from 0 to {SECONDS_MAX:g}"
            )
        if self.rate is not None and not 1 / SECONDS_MAX <= self.rate <= RATE_MAX:
            raise ConfigError(
                "--rate", f"is {self.rate}, must be requests a second, at most {RATE_MAX:g}"
            )
        if self.rate is not None and self.concurrency is not None:
            raise typer.BadParameter(
                "is an open loop, --concurrency a closed one: give one of them", param_hint="--rate"
            )

    @property
    def shape(self) -> dict[str, Any]:
        """What was given of the shape of sessions."""
        found = {each.name: getattr(self, each.name, None) for each in fields(Profile)}
        return {name: value for name, value in found.items() if value is not None}


@with_options(LoadOptions)
def load(url: UrlArgument = DEFAULT_SERVER, **given: Any) -> None:  # noqa: ANN401 - `LoadOptions`
    """Ask a server with OpenAI's API as many users would, and measure its answers.

    It works with Penstock, vLLM, SGLang and others. What is asked follows from --seed alone. The
    status is 1 if a request failed. Ctrl-C ends the run and reports what was measured until then.
    """
    options = LoadOptions(**given)
    plan = _workload_plan(options) if options.trace is None else _trace_plan(options, options.trace)
    target, plan = _fitted(_target(url, options), plan)
    names = ("own_answers", "ignore_eos", "api", "seconds", "timeout")
    context = LoadContext(
        penstock=__version__,
        label=options.label or f"{target.url.host}:{target.url.port}",
        url=str(target.url),
        model=target.model,
        settings=plan.settings | {name: getattr(options, name) for name in names},
        ttft_bound_s=options.ttft_bound,
        tpot_bound_s=options.tpot_bound,
    )
    report = _measure(plan, target, context, options)
    _show([report], json=options.json, html=options.html)
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


def _trace_plan(options: LoadOptions, trace: str) -> _Plan:
    if unfit := sorted(options.shape.keys() - {"output_tokens"}):
        raise typer.BadParameter(
            "goes not with --trace, which has its own", param_hint=f"--{unfit[0].replace('_', '-')}"
        )
    settings = TraceSettings(
        trace=trace,
        requests=options.requests,
        rate=options.rate,
        prompt_max=options.prompt_max,
        output_tokens=options.output_tokens,
    )
    found, sessions = from_trace(settings)
    return _Plan(
        sessions=sessions,
        requests=found,
        concurrency=options.concurrency,
        settings=asdict(settings) | {"concurrency": options.concurrency},
    )


def _workload_plan(options: LoadOptions) -> _Plan:
    workload, rate, concurrency = options.workload, options.rate, options.concurrency
    if options.prompt_max is not None:
        raise typer.BadParameter("goes with --trace only", param_hint="--prompt-max")
    String(choices=tuple(PROFILES)).read("--workload", workload)
    if rate is None and concurrency is None:
        concurrency = CONCURRENCY
    profile = replace(PROFILES[workload], **options.shape)
    arrivals = {"requests": options.requests, "rate": rate, "concurrency": concurrency}
    plan = _Plan(
        sessions=(),
        requests=options.requests,
        concurrency=concurrency,
        settings={"workload": workload, "seed": options.seed or 0} | arrivals,
    )
    return plan.reshaped(profile)


def _target(url: str, options: LoadOptions) -> LoadTarget:
    require_packages(("h11",), "")
    from penstock_serve.loadtest.exchange import PATHS, LoadTarget  # noqa: PLC0415  (needs the extra)
    from penstock_serve.server.guard import find_client_key  # noqa: PLC0415
    from penstock_serve.server.vllm_server import ServerUrl  # noqa: PLC0415

    String(choices=tuple(PATHS)).read("--api", options.api)
    return LoadTarget(
        url=ServerUrl.read("URL", server_url(url).rstrip("/").removesuffix("/v1")),
        model=options.model or "",
        api=options.api,
        api_key=find_client_key(options.api_key_file),
        timeout_s=options.timeout,
        ignore_eos=options.ignore_eos,
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
    plan: _Plan, target: LoadTarget, context: LoadContext, options: LoadOptions
) -> LoadReport:
    from penstock_serve.loadtest.runner import LoadRun  # noqa: PLC0415  (needs the extra)

    with _progress(plan.requests) as progress:
        run = LoadRun(
            target,
            concurrency=plan.concurrency,
            seconds=options.seconds,
            own_answers=options.own_answers,
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
    document = [msgspec.to_builtins(each) for each in reports]
    show_result(json, describe_runs(reports), document[0] if len(document) == 1 else document)
    if html is not None:
        write_text(html, load_page(reports), option="--html")
