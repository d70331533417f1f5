"""What `[engine]`, `[serve]` and `[handoff]` say: how `penstock serve` computes and answers.

They mean nothing to a cache that another engine embeds, so a `Config` has them only if its file
does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address

from penstock.errors import ConfigError

LOOPBACK = "127.0.0.1"
PORT_MAX = 65_535
KEY_VARIABLE = "PENSTOCK_API_KEY"
"""The environment variable that may hold the API key."""
HOST_NAME_MAX = 253
"""Characters, as DNS has it."""
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
_ADDRESS = re.compile(r"tcp://(?P<host>[^:/*\s]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")
_ANYWHERE = frozenset({"0.0.0.0", "[::]"})


def require_address(key: str, address: str, *, ports: int = 1) -> tuple[str, int]:
    """Host and port of an address that others dial.

    Args:
        key: what the setting is called.
        address: the setting.
        ports: how many ports are taken, this one and those after it.

    Raises:
        ConfigError: nobody could dial it.
    """
    found = _ADDRESS.fullmatch(address)
    host, port = (found["host"], int(found["port"])) if found else ("", 0)
    if host in {"", *_ANYWHERE} or not 1 <= port <= PORT_MAX + 1 - ports:
        raise ConfigError(
            key,
            f"is {address!r}, must be tcp://HOST:PORT, with a host that the others can dial and a "
            f"port from 1 to {PORT_MAX + 1 - ports}",
        )
    return host, port


def require_host(key: str, host: str) -> None:
    """Refuses what is neither an IP address nor can be the name of a host.

    Raises:
        ConfigError: names `key`.
    """
    try:
        ip_address(host)
    except ValueError:
        numeric = re.fullmatch(r"[0-9.]*", host) is not None or ":" in host
        if numeric or len(host) > HOST_NAME_MAX or _HOST_NAME.fullmatch(host) is None:
            raise ConfigError(
                key,
                f"is {host!r}, must be an address to listen on, such as '127.0.0.1', '0.0.0.0' or "
                "'::1', or the name of this host",
            ) from None


SHARED_MEMORY = "shared_memory"
"""The data transport that is built in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTable:
    """`[handoff]`: how KV travels from a prefill instance to a decode instance."""

    transport: str = SHARED_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTable:
    """`[engine]`: the model, and how it is computed."""

    model: str = ""
    """A folder with a checkpoint or a `.gguf` file; empty: the default model."""
    role: str = "both"
    prefill_tp: int = 0
    """Ranks of an instance that computes prompts for another one; 0: each computes its own."""
    decode_tp: int = 0
    """Ranks of an instance that answers what another one has computed."""
    prefill_at: str = ""
    """Where the scheduler of that first one listens for the other, and its ranks on the ports
    after it; empty: both are started by one command."""
    decode_at: str = ""
    """Where the scheduler of the other one listens."""
    dtype: str = "float32"
    device: str = "cpu"
    graphs: bool = True
    """Whether a GPU replays decode steps as CUDA graphs."""
    threads: int = 0
    """Of torch, in each rank; 0: the cores of the machine, divided by the ranks."""
    step_tokens: int = 512
    step_requests: int = 64
    waiting_max: int = 1024

    def __post_init__(self) -> None:
        if _DEVICE.fullmatch(self.device) is None:
            raise ConfigError(
                "engine.device",
                f"is {self.device!r}, must be 'cpu', 'cuda' or 'cuda:N', the N-th GPU from 0 on",
            )
        if bool(self.prefill_tp) is not bool(self.decode_tp):
            raise ConfigError(
                "engine.prefill_tp",
                f"is {self.prefill_tp} with engine.decode_tp {self.decode_tp}, must both be 0 or "
                "both be given: prompts that one instance computes, another one answers",
            )
        if self.prefill_at:
            require_address("engine.prefill_at", self.prefill_at, ports=1 + self.prefill_tp)
        if self.decode_at:
            require_address("engine.decode_at", self.decode_at)
        if self.step_tokens < self.step_requests:
            raise ConfigError(
                "engine.step_tokens",
                f"is {self.step_tokens}, must be at least engine.step_requests, "
                f"{self.step_requests}: every running request gets a token a step",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTable:
    """`[serve]`: the address, and what clients may do."""

    host: str = LOOPBACK
    port: int = 8000
    api_key: str = field(default="", repr=False)
    api_key_file: str = ""
    """A file that holds the key, instead of `api_key`."""
    instances: int = 1
    body_bytes_max: int = 1 << 20
    requests_max: int = 512
    connections_max: int = 1024
    header_s: float = 10.0
    """How long the head of a request may take to arrive."""
    body_s: float = 60.0
    """How long the body of a request may take to arrive."""
    drain_s: float = 20.0
    """How long answers may go on after the server was asked to stop."""
    log_level: str = "info"
    log_json: bool = False
    router: str = ""
    """Where a router lets instances in that other commands start; empty: only its own."""
    number: int = 0
    """Which of the router's instances, or pairs, this one is."""
    secret_file: str = ""
    """A file with what the roles of several commands must have in common to let each other in."""
    insecure: bool = False
    """Whether roles may be off the loopback interface, where others may read and join."""

    def __post_init__(self) -> None:
        require_host("serve.host", self.host)
        if self.router:
            require_address("serve.router", self.router)
        if self.api_key and self.api_key_file:
            raise ConfigError(
                "serve.api_key_file",
                f"is {self.api_key_file!r} beside serve.api_key, must be the only one of the two",
            )
