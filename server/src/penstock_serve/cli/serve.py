"""`penstock serve`: a model behind an OpenAI-compatible server, with Penstock as its cache."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import rich.progress
import typer
from rich.console import Console

from penstock.cli.conventions import ConfigOption, with_options
from penstock.config import KEY_VARIABLE, KEYS, LOOPBACK, SHARED_KINDS, UNIX, ServeTable
from penstock.errors import UnavailableError, counted, server_install_hint
from penstock.toolkit import OPENING, STARTING, set_up_logs
from penstock_serve.server.serve_options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from rich.progress import TaskID

    from penstock.config import Config, TierKind, TierSettings

logger = logging.getLogger("penstock.cli.serve")

DEFAULT_PORT = ServeTable().port
DEFAULT_SERVER = f"http://{LOOPBACK}:{DEFAULT_PORT}"
"""Where `penstock serve` is unless it is told otherwise, and so whom other commands ask."""
NEEDED = ("torch", "tokenizers", "jinja2", "safetensors", "gguf", "starlette", "uvicorn")


ApiKeyFileOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="A file that holds the API key.")
]
PrintConfigOption = Annotated[
    bool, typer.Option("--print-config", help="Print every setting in effect as TOML, and end.")
]


@with_options(ServeOptions)
def serve(
    *,
    config: ConfigOption = None,
    print_config: PrintConfigOption = False,
    **options_given: Any,  # noqa: ANN401 - see `ServeOptions`
) -> None:
    """Serve a model over HTTP as OpenAI's API does, with Penstock as its cache.

    Options override the file of `--config`. Everything that this command starts ends with it.
    """
    require_packages()
    from penstock_serve.engine.defaults import load_engine_config  # noqa: PLC0415  (needs the extras)

    options = ServeOptions(**options_given)
    given = load_engine_config(config) if config else None
    if print_config:
        _print_settled(given, options)
    else:
        _serve(given, options)


def _print_settled(given: Config | None, options: ServeOptions) -> None:
    from penstock_serve.server.plan import settle  # noqa: PLC0415  (needs the extras)

    settled = settle(given, options)
    print(settled.to_toml(), end="")
    if settled.serve is not None and settled.serve.api_key:
        print("penstock: serve.api_key is set, and not printed", file=sys.stderr)


def require_packages(needed: Sequence[str] = NEEDED, extra: str = "engine") -> None:
    """Raises `UnavailableError` if a package of the engine or the server is missing."""
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise UnavailableError(f"{missing[0]} is not installed: {server_install_hint(extra)}")


def _serve(given: Config | None, options: ServeOptions) -> None:
    from penstock_serve.server.guard import find_key  # noqa: PLC0415  (needs the extras)
    from penstock_serve.server.plan import serves_http, settle  # noqa: PLC0415
    from penstock_serve.server.server_socket import listen  # noqa: PLC0415

    with ExitStack() as held:
        bound = None
        if serves_http(given, options):
            table = (given and given.serve) or ServeTable()
            if options.host is not None:
                table = replace(table, host=options.host)
            # Before the HTTP libraries and the model are loaded: a port in use is reported at once.
            bound = listen(table.host, table.port if options.port is None else options.port)
            held.enter_context(bound)
        from penstock_serve.server.service import serve as run  # noqa: PLC0415

        config = settle(given, options)
        assert config.serve is not None
        set_up_logs(config.serve.log_level, as_json=config.serve.log_json)
        key = find_key(config.serve)
        if bound is not None:
            warn_of_openness(config.serve, key, on_command_line=options.api_key is not None)
        with StartProgress(config) as progress:
            run(config, progress, bound, api_key=key)


def serve_table(**given: object) -> ServeTable:
    """The settings of a command that serves HTTP without a file: options that were given.

    Raises `ConfigError`: one of them is not usable.
    """
    table = ServeTable(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    KEYS["serve"]["log_level"].key.read("--log-level", table.log_level)
    return table


def warn_of_openness(serve: ServeTable, key: str, *, on_command_line: bool) -> None:
    from penstock.toolkit import is_loopback  # noqa: PLC0415  (needs zmq)

    if on_command_line:
        logger.warning(
            "the API key is on the command line, where everybody on this machine can see it: "
            "--api-key-file or %s keep it to yourself",
            KEY_VARIABLE,
        )
    if not key and not is_loopback(serve.host) and not serve.host.startswith(UNIX):
        logger.warning(
            "LISTENING ON %s WITHOUT AN API KEY: EVERYBODY WHO CAN REACH THIS MACHINE IS SERVED. "
            "GIVE --api-key-file OR %s, OR LISTEN ON 127.0.0.1",
            serve.host,
            KEY_VARIABLE,
        )


def server_url(given: str) -> str:
    """The URL of a server from what people type: HOST:PORT, HOST or PORT will do.

    What is a URL or the path of a socket stays as it is, and so does what is no address at all: it
    is refused where it is used.
    """
    if "://" in given or given.startswith(("/", UNIX)) or not given or not given.isprintable():
        return given
    host = f"{LOOPBACK}:{given}" if given.isdecimal() else given
    host = f"{LOOPBACK}{host}" if host.startswith(":") else host
    try:
        parts = urlsplit(f"http://{host}")
        port = parts.port
    except ValueError:
        return given
    if port is None and parts.netloc:
        parts = parts._replace(netloc=f"{parts.netloc}:{DEFAULT_PORT}")
    return parts.geturl()


def api_at(address: str) -> str:
    """The base URL for clients; a socket is a path, and has none."""
    return address if address.startswith(UNIX) else f"{address}/v1"


class StartProgress:
    """Shows the progress of loading, then the address of the server.

    Progress is shown as bars on a terminal, else as log lines, one for each quarter of a rank's
    layers. The address is one line on standard output.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        logs_json = config.serve is not None and config.serve.log_json
        self._bars = _bars() if sys.stderr.isatty() and not logs_json else None
        self._tasks: dict[str, TaskID] = {}
        self._quarters: dict[str, int] = {}

    def loading(self, name: str, layers: int, of: int) -> None:
        if self._bars is not None:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=of)
            self._bars.update(self._tasks[name], completed=layers)
            return
        quarter = 4 * layers // max(of, 1)
        if layers == 0 or quarter < self._quarters.get(name, 0):
            self._quarters.pop(name, None)  # The rank was restarted.
        if quarter > self._quarters.get(name, 0):
            self._quarters[name] = quarter
            logger.info("loading: %s: %d of %d layers", name, layers, of)

    def waiting(self, address: str, router: str) -> None:
        print(f"penstock: router at {api_at(address)}, waits for instances at {router}", flush=True)

    def ready(
        self, address: str, ready_s: Sequence[float] = (), tiers_off: Sequence[str] = ()
    ) -> None:
        self._stop()
        config = self._config
        if config.engine is not None and config.engine.role == "router":
            print(f"penstock: ready: {config.model.name} at {api_at(address)}", flush=True)
            return
        assert config.cache.device is not None
        assert config.serve is not None
        tiers = [
            f"{counted(config.cache.device.slot_count, 'device block')} of "
            f"{counted(config.cache.block_tokens, 'token')}"
        ]
        # The device comes first.
        taken_s = [*ready_s[1:], *(0.0 for _ in config.cache.tiers)]
        off = [*tiers_off[1:], *("" for _ in config.cache.tiers)]
        below = zip(config.cache.tiers, config.tier_kinds, taken_s, off, strict=False)
        tiers += [_described(*each) for each in below]
        print(
            f"penstock: ready: {config.model.name} at {api_at(address)} "
            f"({_who(config)}; {' → '.join(tiers)})",
            flush=True,
        )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        logger.info("starting: model=%s", self._config.model.name)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()


def _described(tier: TierSettings, kind: TierKind, ready_s: float, why_off: str) -> str:
    """A tier in the line that says that requests are accepted: what it is, and whether it is on."""
    size = f" {kind.gib:g} GiB" if kind.gib else f" {counted(tier.slot_count, 'block')}"
    if kind.name in SHARED_KINDS:
        size = f" ({kind.name})"  # How much it holds, only the store knows.
    if why_off in (STARTING, OPENING):
        return f"{tier.name}{size} starting"
    if why_off:
        return f"{tier.name}{size} off: {why_off}"
    return f"{tier.name}{size} on" if tier.stored else f"{tier.name}{size} ready in {ready_s:.2f} s"


def _bars() -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("layers"),
        console=Console(stderr=True),
        transient=True,
    )


def _who(config: Config) -> str:
    assert config.serve is not None
    engine, count = config.engine, config.serve.instances
    if engine is not None and engine.prefill_tp:
        prefill, decode = config.serve.prefill or count, config.serve.decode or count
        return (
            f"{counted(prefill, 'prefill instance')} of {counted(engine.prefill_tp, 'rank')}, "
            f"{counted(decode, 'decode instance')} of {counted(engine.decode_tp, 'rank')}"
        )
    ranks = counted(config.cache.rank_count, "rank")
    return f"{counted(count, 'instance')}, {ranks} each"
