"""The options of `penstock serve`, each of which sets a key of the configuration file.

An option has the bounds of its key, and the text under its field is its help. Other commands that
serve HTTP have some of them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import typer

from penstock.config import KEYS, Number, Whole, texts_under

if TYPE_CHECKING:
    from collections.abc import Callable

CommandT = TypeVar("CommandT", bound="Callable[..., None]")


class Sets(NamedTuple):
    """The key that an option sets."""

    table: str
    key: str
    metavar: str | None = None
    least: float | None = None
    """From here on, where the key may have less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of the command line; `None`: the file's value, or the default."""

    model: Annotated[str | None, Sets("engine", "model", "PATH")] = None
    """A folder with a checkpoint, or a .gguf file; without it the default model."""
    tp: Annotated[int | None, Sets("cache", "ranks", "N")] = None
    """Ranks that share the model, a process each."""
    blocks: Annotated[int | None, Sets("cache", "blocks", "N", 1)] = None
    """Blocks on the device of each rank."""
    block_tokens: Annotated[int | None, Sets("cache", "block_tokens", "N")] = None
    """Tokens in a block."""
    host_gib: Annotated[float | None, Sets("tiers of kind host", "gib", "G")] = None
    """Host memory for blocks, of each rank; 0: none."""
    disk: Annotated[str | None, Sets("tiers of kind disk", "path", "PATH")] = None
    """A folder that keeps blocks beyond the process."""
    disk_gib: Annotated[float | None, Sets("tiers of kind disk", "gib", "G")] = None
    """Room in that folder, of all ranks together."""
    dtype: Annotated[str | None, Sets("engine", "dtype")] = None
    """Of weights and KV: float32, bfloat16 or float16."""
    device: Annotated[str | None, Sets("engine", "device")] = None
    """Where to compute: cpu, cuda or cuda:N."""
    instances: Annotated[int | None, Sets("serve", "instances", "N")] = None
    """Copies of the model, or of each role."""
    role: Annotated[str | None, Sets("engine", "role")] = None
    """What to start: both (everything), prefill, decode or router."""
    prefill: Annotated[int | None, Sets("serve", "prefill", "N", 1)] = None
    """Instances that compute prompts for others."""
    decode: Annotated[int | None, Sets("serve", "decode", "N", 1)] = None
    """Instances that answer them."""
    prefill_tp: Annotated[int | None, Sets("engine", "prefill_tp", "N", 1)] = None
    """Ranks of an instance that computes prompts alone."""
    decode_tp: Annotated[int | None, Sets("engine", "decode_tp", "N", 1)] = None
    """Ranks of the instance that answers them."""
    router: Annotated[str | None, Sets("serve", "router", "ADDRESS")] = None
    """Where the router lets instances in: tcp://HOST:PORT."""
    handoff_host: Annotated[str | None, Sets("engine", "handoff_host", "HOST")] = None
    """Where instances of other machines reach those of this command for handoffs."""
    number: Annotated[int | None, Sets("serve", "number", "N")] = None
    """The number of this command's first instance."""
    keys_file: Annotated[str | None, Sets("serve", "keys_file", "FILE")] = None
    """The keys of this machine and its peers, made by `penstock keys`: for roles that are started
    one by one on several machines."""
    host: Annotated[str | None, Sets("serve", "host")] = None
    """The address to listen on, or unix:/PATH; 127.0.0.1 if not given."""
    port: Annotated[int | None, Sets("serve", "port")] = None
    """The port; 8000 if not given, 0: a free one."""
    api_key: Annotated[str | None, Sets("serve", "api_key", "KEY")] = field(
        default=None, repr=False
    )
    """What clients must send as their API key. Everybody on this machine can see it: better is
    --api-key-file, or PENSTOCK_API_KEY in the environment."""
    api_key_file: Annotated[str | None, Sets("serve", "api_key_file", "FILE")] = None
    """A file that holds the API key."""
    allowed_hosts: Annotated[str | None, Sets("serve", "allowed_hosts", "NAMES")] = None
    """Further names of this server, such as that of a proxy, separated by commas: without a key,
    requests to other names are refused on the loopback interface."""
    drain_s: Annotated[float | None, Sets("serve", "drain_s", "S")] = None
    """How long answers may take to end when asked to stop; 20."""
    silence_s: Annotated[float | None, Sets("serve", "silence_s", "S")] = None
    """How long a process may be silent before it is taken for lost; 30. One that has ended is lost
    at once."""
    log_level: Annotated[str | None, Sets("serve", "log_level")] = None
    """What is logged: debug, info, warning or error."""
    log_json: Annotated[bool | None, Sets("serve", "log_json")] = None
    """Log one JSON object a line."""


def with_options(*names: str) -> Callable[[CommandT], CommandT]:
    """Gives a command these options, or all, in place of its `**given`."""

    def add(command: CommandT) -> CommandT:
        own = inspect.signature(command, eval_str=True)
        kept = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        given = [_parameter(name) for name in names or [each.name for each in fields(ServeOptions)]]
        command.__signature__ = own.replace(parameters=[*kept, *given])  # type: ignore[attr-defined]
        return command

    return add


def _parameter(name: str) -> inspect.Parameter:
    kind, sets = get_args(get_type_hints(ServeOptions, include_extras=True)[name])
    key = KEYS[sets.table][sets.key].key
    bounds: dict[str, Any] = {}
    if isinstance(key, Whole | Number):
        least = key.minimum if sets.least is None else sets.least
        bounds = {"min": least, "max": key.maximum}
    # Without a name of its own, a flag would have another one that says no.
    names = [f"--{name.replace('_', '-')}"]
    option = typer.Option(
        *names, metavar=sets.metavar, help=texts_under(ServeOptions)[name], **bounds
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )
