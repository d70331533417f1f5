"""The options of `penstock serve`, each of which sets a key of the configuration file.

An option has the bounds of its key, and the text under its field is its help. Other commands that
serve HTTP have some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from penstock.cli.conventions import Takes
from penstock.config import KEYS, Number, Whole


def sets(table: str, key: str, metavar: str | None = None, least: float | None = None) -> Takes:
    """What an option takes that sets a key; `least`: from here on, where the key may have less."""
    kind = KEYS[table][key].key
    if not isinstance(kind, Whole | Number):
        return Takes(metavar)
    return Takes(metavar, kind.minimum if least is None else least, kind.maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of the command line; `None`: the file's value, or the default."""

    model: Annotated[str | None, sets("engine", "model", "PATH")] = None
    """A folder with a checkpoint, or a .gguf file; without it the default model."""
    tp: Annotated[int | None, sets("cache", "ranks", "N")] = None
    """Ranks that share the model, a process each."""
    blocks: Annotated[int | None, sets("cache", "blocks", "N", 1)] = None
    """Blocks on the device of each rank."""
    block_tokens: Annotated[int | None, sets("cache", "block_tokens", "N")] = None
    """Tokens in a block."""
    host_gib: Annotated[float | None, sets("tiers of kind host", "gib", "G")] = None
    """Host memory for blocks, of each rank; 0: none."""
    disk: Annotated[str | None, sets("tiers of kind disk", "path", "PATH")] = None
    """A folder that keeps blocks beyond the process."""
    disk_gib: Annotated[float | None, sets("tiers of kind disk", "gib", "G")] = None
    """Room in that folder, of all ranks together."""
    dtype: Annotated[str | None, sets("engine", "dtype")] = None
    """Of weights and KV: float32, bfloat16 or float16."""
    device: Annotated[str | None, sets("engine", "device")] = None
    """Where to compute: cpu, cuda or cuda:N."""
    instances: Annotated[int | None, sets("serve", "instances", "N")] = None
    """Copies of the model, or of each role."""
    role: Annotated[str | None, sets("engine", "role")] = None
    """What to start: both (everything), prefill, decode or router."""
    prefill: Annotated[int | None, sets("serve", "prefill", "N", 1)] = None
    """Instances that compute prompts for others."""
    decode: Annotated[int | None, sets("serve", "decode", "N", 1)] = None
    """Instances that answer them."""
    prefill_tp: Annotated[int | None, sets("engine", "prefill_tp", "N", 1)] = None
    """Ranks of an instance that computes prompts alone."""
    decode_tp: Annotated[int | None, sets("engine", "decode_tp", "N", 1)] = None
    """Ranks of the instance that answers them."""
    router: Annotated[str | None, sets("serve", "router", "ADDRESS")] = None
    """Where the router lets instances in: tcp://HOST:PORT."""
    handoff_host: Annotated[str | None, sets("engine", "handoff_host", "HOST")] = None
    """Where instances of other machines reach those of this command for handoffs."""
    number: Annotated[int | None, sets("serve", "number", "N")] = None
    """The number of this command's first instance."""
    keys_file: Annotated[str | None, sets("serve", "keys_file", "FILE")] = None
    """The keys of this machine and its peers, made by `penstock keys`: for roles that are started
    one by one on several machines."""
    host: Annotated[str | None, sets("serve", "host")] = None
    """The address to listen on, or unix:/PATH; 127.0.0.1 if not given."""
    port: Annotated[int | None, sets("serve", "port")] = None
    """The port; 8000 if not given, 0: a free one."""
    api_key: Annotated[str | None, sets("serve", "api_key", "KEY")] = field(
        default=None, repr=False
    )
    """What clients must send as their API key. Everybody on this machine can see it: better is
    --api-key-file, or PENSTOCK_API_KEY in the environment."""
    api_key_file: Annotated[str | None, sets("serve", "api_key_file", "FILE")] = None
    """A file that holds the API key."""
    allowed_hosts: Annotated[str | None, sets("serve", "allowed_hosts", "NAMES")] = None
    """Further names of this server, such as that of a proxy, separated by commas: without a key,
    requests to other names are refused on the loopback interface."""
    drain_s: Annotated[float | None, sets("serve", "drain_s", "S")] = None
    """How long answers may take to end when asked to stop; 20."""
    silence_s: Annotated[float | None, sets("serve", "silence_s", "S")] = None
    """How long a process may be silent before it is taken for lost; 30. One that has ended is lost
    at once."""
    log_level: Annotated[str | None, sets("serve", "log_level")] = None
    """What is logged: debug, info, warning or error."""
    log_json: Annotated[bool | None, sets("serve", "log_json")] = None
    """Log one JSON object a line."""
