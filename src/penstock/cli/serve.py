"""`penstock serve`: a model behind an OpenAI-compatible server, with Penstock as its cache."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from penstock.cli.conventions import ConfigOption
from penstock.config import load_config
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from penstock.config import Config

NEEDED = ("torch", "transformers", "safetensors", "gguf", "starlette", "uvicorn")


ModelOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="A folder with a checkpoint, or a .gguf file; without it the default model.",
    ),
]
TpOption: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Ranks that share the model, a process each.")
]
BlocksOption: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Blocks on the device of each rank.")
]
BlockTokensOption: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens in a block.")
]
HostGibOption: TypeAlias = Annotated[
    float | None,
    typer.Option(metavar="G", min=0, help="Host memory for blocks, of each rank; 0: none."),
]
DtypeOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Of weights and KV: float32, bfloat16 or float16.")
]
DeviceOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Where to compute: cpu, cuda or cuda:N; a pair on the cpu.")
]
InstancesOption: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=16, help="Copies of the model, or pairs of them."),
]
PrefillTpOption: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Ranks of an instance that computes prompts alone."),
]
DecodeTpOption: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Ranks of the instance that answers them."),
]
RoleOption: TypeAlias = Annotated[
    str | None,
    typer.Option(help="What to start: both (everything), prefill, decode or router."),
]
RouterOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Where the router lets instances in: tcp://HOST:PORT."),
]
PrefillAtOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Where the prefill instance is: tcp://HOST:PORT."),
]
DecodeAtOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Where the decode instance is: tcp://HOST:PORT."),
]
NumberOption: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Which of the router's instances or pairs this is."),
]
HostOption: TypeAlias = Annotated[
    str | None, typer.Option(help="The address to listen on; 127.0.0.1 if not given.")
]
PortOption: TypeAlias = Annotated[
    int | None, typer.Option(min=0, max=65535, help="The port; 8000 if not given, 0: a free one.")
]
ApiKeyOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="KEY", help="What clients must send as their API key.")
]
PrintConfigOption: TypeAlias = Annotated[
    bool, typer.Option("--print-config", help="Print every setting in effect as TOML, and end.")
]


def serve(  # noqa: PLR0913 - as many options as there are wishes
    *,
    model: ModelOption = None,
    tp: TpOption = None,
    blocks: BlocksOption = None,
    block_tokens: BlockTokensOption = None,
    host_gib: HostGibOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    instances: InstancesOption = None,
    role: RoleOption = None,
    prefill_tp: PrefillTpOption = None,
    decode_tp: DecodeTpOption = None,
    router: RouterOption = None,
    prefill_at: PrefillAtOption = None,
    decode_at: DecodeAtOption = None,
    number: NumberOption = None,
    host: HostOption = None,
    port: PortOption = None,
    api_key: ApiKeyOption = None,
    config: ConfigOption = None,
    print_config: PrintConfigOption = False,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, with Penstock as its cache.

    Options change what the file of `--config` says. Everything that this command starts ends
    with it.
    """
    require_extras()
    from penstock.serve.plan import Wishes, settle  # noqa: PLC0415  (needs the extras)

    wishes = Wishes(
        model=model,
        tp=tp,
        host_gib=host_gib,
        blocks=blocks,
        block_tokens=block_tokens,
        dtype=dtype,
        device=device,
        host=host,
        port=port,
        api_key=api_key,
        instances=instances,
        role=role,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        router=router,
        prefill_at=prefill_at,
        decode_at=decode_at,
        number=number,
    )
    settled = settle(load_config(config) if config else None, wishes)
    if print_config:
        print(settled.to_toml(), end="")
        return
    _serve(settled)


def require_extras() -> None:
    """Raises `UnavailableError` if something is missing that the engine or the server needs."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UnavailableError(
            f'{missing[0]} is not installed: pip install "penstock[cli,engine,serve]"'
        )


def _serve(config: Config) -> None:
    from penstock.serve.running import serve as run  # noqa: PLC0415  (needs the extras)

    logging.basicConfig(level=logging.WARNING, format="%(name)s %(message)s")
    with Bars(config) as bars:
        run(config, bars)


class Bars:
    """Shows on standard error how far the ranks have loaded, then says where to find them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("layers"),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def loading(self, name: str, layers: int, of: int) -> None:
        """Moves a rank's bar."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=of)
        self._progress.update(self._tasks[name], completed=layers)

    def waiting(self, address: str, router: str) -> None:
        """One line says where everybody is expected."""
        print(f"penstock: router at {address}/v1, waits for instances at {router}", flush=True)

    def ready(self, address: str, ready_s: Sequence[float] = ()) -> None:
        """The bars go; one line is left, which says how long the memory of each tier took."""
        self._progress.stop()
        config = self._config
        if config.engine is not None and config.engine.role == "router":
            print(f"penstock: ready: {config.model.name} at {address}/v1", flush=True)
            return
        assert config.cache.device is not None
        assert config.serve is not None
        tiers = [
            f"{config.cache.device.slot_count} device blocks of {config.cache.block_tokens} tokens"
        ]
        taken_s = [*ready_s[1:], *(0.0 for _ in config.cache.tiers)]  # The device comes first.
        for tier, kind, each_s in zip(config.cache.tiers, config.tier_kinds, taken_s, strict=False):
            size = f"{kind.gib:g} GiB" if kind.gib else f"{tier.slot_count} blocks"
            tiers.append(f"{tier.name} {size} ready in {each_s:.2f} s")
        print(
            f"penstock: ready: {config.model.name} at {address}/v1 "
            f"({_who(config)}; {' → '.join(tiers)})",
            flush=True,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


def _who(config: Config) -> str:
    """How many instances there are, and of how many ranks."""
    assert config.serve is not None
    engine, count = config.engine, config.serve.instances
    if engine is not None and engine.prefill_tp:
        return (
            f"{_counted(count, 'pair')}, {_counted(engine.prefill_tp, 'prefill rank')} and "
            f"{_counted(engine.decode_tp, 'decode rank')} each"
        )
    ranks = _counted(config.cache.rank_count, "rank")
    return f"{_counted(count, 'instance')}, {ranks} each"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
