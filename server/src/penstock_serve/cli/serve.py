"""`penstock serve`: a model behind an OpenAI-compatible server, with Penstock as its cache."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import rich.progress
import typer
from rich.console import Console

from penstock.cli.conventions import ConfigOption
from penstock.config import KEY_VARIABLE, LOG_LEVELS, LOOPBACK, SHARED_KINDS, UNIX, ServeTable
from penstock.errors import ConfigError, UnavailableError, counted, server_install_hint, shown
from penstock.toolkit import OPENING, STARTING, set_up_logs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from rich.progress import TaskID
    from typer.models import OptionInfo

    from penstock.config import Config, TierKind, TierSettings
    from penstock_serve.server.plan import ServeOptions

logger = logging.getLogger("penstock.cli.serve")

ABOUT_THE_FILE = {"config", "print_config"}
"""Options that are not settings; every other one is a field of `ServeOptions`."""
DEFAULT_PORT = ServeTable().port
DEFAULT_SERVER = f"http://{LOOPBACK}:{DEFAULT_PORT}"
"""Where `penstock serve` is unless it is told otherwise, and so whom other commands ask."""
NEEDED = ("torch", "tokenizers", "jinja2", "safetensors", "gguf", "starlette", "uvicorn")


def count_option(text: str, *, least: int = 1, most: int | None = None) -> OptionInfo:
    """An option that takes a whole number."""
    option: OptionInfo = typer.Option(metavar="N", min=least, max=most, help=text)
    return option


ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="A folder with a checkpoint, or a .gguf file; without it the default model.",
    ),
]
TpOption = Annotated[int | None, count_option("Ranks that share the model, a process each.")]
BlocksOption = Annotated[int | None, count_option("Blocks on the device of each rank.")]
BlockTokensOption = Annotated[int | None, count_option("Tokens in a block.")]
HostGibOption = Annotated[
    float | None,
    typer.Option(metavar="G", min=0, help="Host memory for blocks, of each rank; 0: none."),
]
DiskOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="A folder that keeps blocks beyond the process.")
]
DiskGibOption = Annotated[
    float | None, typer.Option(metavar="G", help="Room in that folder, of all ranks together.")
]
DtypeOption = Annotated[
    str | None, typer.Option(help="Of weights and KV: float32, bfloat16 or float16.")
]
DeviceOption = Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda or cuda:N.")]
InstancesOption = Annotated[
    int | None, count_option("Copies of the model, or of each role.", most=16)
]
PrefillOption = Annotated[
    int | None, count_option("Instances that compute prompts for others.", most=16)
]
DecodeOption = Annotated[int | None, count_option("Instances that answer them.", most=16)]
PrefillTpOption = Annotated[
    int | None, count_option("Ranks of an instance that computes prompts alone.")
]
DecodeTpOption = Annotated[int | None, count_option("Ranks of the instance that answers them.")]
RoleOption = Annotated[
    str | None, typer.Option(help="What to start: both (everything), prefill, decode or router.")
]
RouterOption = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Where the router lets instances in: tcp://HOST:PORT."),
]
HandoffHostOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST",
        help="Where instances of other machines reach those of this command for handoffs.",
    ),
]
NumberOption = Annotated[
    int | None, count_option("The number of this command's first instance.", least=0)
]
HostOption = Annotated[
    str | None,
    typer.Option(help="The address to listen on, or unix:/PATH; 127.0.0.1 if not given."),
]
PortOption = Annotated[
    int | None, typer.Option(min=0, max=65535, help="The port; 8000 if not given, 0: a free one.")
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="What clients must send as their API key. Everybody on this machine can see it: "
        f"better is --api-key-file, or {KEY_VARIABLE} in the environment.",
    ),
]
ApiKeyFileOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="A file that holds the API key.")
]
AllowedHostsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Further names of this server, such as that of a proxy, separated by commas: without "
        "a key, requests to other names are refused on the loopback interface.",
    ),
]
DrainOption = Annotated[
    float | None,
    typer.Option(
        metavar="S", min=0, help="How long answers may take to end when asked to stop; 20."
    ),
]
SilenceOption = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        min=1,
        max=3600,
        help="How long a process may be silent before it is taken for lost; 30. One that has ended "
        "is lost at once.",
    ),
]
LogLevelOption = Annotated[
    str | None, typer.Option(help="What is logged: debug, info, warning or error.")
]
LogJsonOption = Annotated[
    bool | None, typer.Option("--log-json", help="Log one JSON object a line.")
]
KeysFileOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The keys of this machine and its peers, made by `penstock keys`: for roles that are "
        "started one by one on several machines.",
    ),
]
PrintConfigOption = Annotated[
    bool, typer.Option("--print-config", help="Print every setting in effect as TOML, and end.")
]


def serve(  # noqa: PLR0913 - as many options as there are settings
    *,
    model: ModelOption = None,
    tp: TpOption = None,
    blocks: BlocksOption = None,
    block_tokens: BlockTokensOption = None,
    host_gib: HostGibOption = None,
    disk: DiskOption = None,
    disk_gib: DiskGibOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    instances: InstancesOption = None,
    role: RoleOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    prefill_tp: PrefillTpOption = None,
    decode_tp: DecodeTpOption = None,
    router: RouterOption = None,
    handoff_host: HandoffHostOption = None,
    number: NumberOption = None,
    keys_file: KeysFileOption = None,
    host: HostOption = None,
    port: PortOption = None,
    api_key: ApiKeyOption = None,
    api_key_file: ApiKeyFileOption = None,
    allowed_hosts: AllowedHostsOption = None,
    drain_s: DrainOption = None,
    silence_s: SilenceOption = None,
    log_level: LogLevelOption = None,
    log_json: LogJsonOption = None,
    config: ConfigOption = None,
    print_config: PrintConfigOption = False,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, with Penstock as its cache.

    Options override the file of `--config`. Everything that this command starts ends with it.
    """
    given_options = {name: value for name, value in locals().items() if name not in ABOUT_THE_FILE}
    require_packages()
    from penstock_serve.engine.defaults import load_engine_config  # noqa: PLC0415  (needs the extras)
    from penstock_serve.server.plan import ServeOptions  # noqa: PLC0415

    options = ServeOptions(**given_options)
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
    if table.log_level not in LOG_LEVELS:
        raise ConfigError(
            "--log-level", f"is {shown(table.log_level)}, must be one of {', '.join(LOG_LEVELS)}"
        )
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
