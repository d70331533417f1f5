"""The specs of an instance's processes: all settings in one value, sent as JSON.

A spec holds secrets, and every user can read the command line of a process. So it is passed in a
sealed memory file that only the new process inherits.
"""

from __future__ import annotations

import enum
import fcntl
import os
from typing import TYPE_CHECKING, TypeVar

import msgspec

# msgspec resolves the annotations of a spec when it decodes one, so these imports must be real.
from penstock.config import Config, EngineTable
from penstock.errors import ConfigError
from penstock.toolkit import (
    Secret,
    inherited_descriptor,
)

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
"""Their names in torch."""


def torch_dtype_of(name: str) -> torch.dtype:
    """The torch dtype with this name."""
    import torch  # noqa: PLC0415  (takes seconds)

    found: torch.dtype = getattr(torch, name)
    return found


class InstanceRole(enum.Enum):
    """What an instance does."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that is sent to a process; its `repr` shows only the length of secrets."""

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (
            f"{name}=<{len(value)} bytes>" if isinstance(value, bytes) else f"{name}={value!r}"
            for name, value in values
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class EngineSpec(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An instance that takes part in handoffs, as other ones reach it."""

    name: str
    ranks: int
    address: str
    """The address at which its scheduler accepts others."""
    rank_addresses: list[str] = []
    """The addresses of its ranks."""
    machine: str = ""
    """Which machine it runs on: addresses other than `tcp` are good on this one only."""


class PairSpec(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two instances: one computes prompts and hands their KV to the other, which answers."""

    prefill: EngineSpec
    decode: EngineSpec
    number: int = 0
    """How many pairs the router had opened before: one that is opened again is another pair."""


class InstanceSpec(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance: a scheduler and its ranks."""

    name: str
    engine: EngineTable = EngineTable()
    """The model, and how it is computed; the roles of the command are not read."""
    digest: str = ""
    """Of the model's files at the first start: after a restart they must be the same."""
    config: Config
    """Of the cache: it has neither `[engine]` nor `[serve]`."""
    server: str
    """The address at which the server accepts instances."""
    server_secret: Secret = b""
    """Of the server and its instances."""
    joins: bool = False
    """Whether the server belongs to another command: the instance waits for it and outlives it."""
    drain_s: float = 0.0
    """How long its requests may take to finish after a stop signal."""
    silence_s: float = 30.0
    """How long its server, or one of its ranks, may be silent before it is taken for lost."""
    ranks: int = 1
    scheduler: str = ""
    """The address at which the instance accepts its ranks, if it has several."""
    secret: Secret = b""
    """Of the instance and its ranks."""
    folder: str = ""
    """The folder of sockets without an address; empty: a folder of each process."""
    role: InstanceRole = InstanceRole.BOTH
    """What it does at first; a router may give it another role."""
    hands_over: bool = False
    """Whether it takes part in handoffs with other instances."""
    ports: str = "0"
    """Where it and its ranks listen for other machines: `serve.ports`."""
    handoff_secret: Secret = b""
    """Of all instances that may hand over to each other."""
    first_gpu: int = 0
    """The GPU of its first rank, where the device is `cuda` without a number."""
    log_level: str = "info"
    log_json: bool = False

    def __post_init__(self) -> None:
        if (dtype := self.engine.dtype) not in DTYPES:
            raise ConfigError("dtype", f"is {dtype!r}, must be one of {', '.join(DTYPES)}")
        if self.ranks < 1:
            raise ConfigError("tp", f"is {self.ranks}, must be at least 1")
        if self.role is not InstanceRole.BOTH and not self.hands_over:
            raise ConfigError(
                "role",
                f"is {self.role.value!r}, must be 'both' for an instance that hands nothing over",
            )

    @property
    def model(self) -> str | None:
        """A folder or a file; without it the default model."""
        return self.engine.model or None

    @property
    def steps_in_flight(self) -> int:
        """Two on a GPU: the next step is queued while the results of the last one are read.

        One with several ranks, since only the first of them knows the tokens.
        """
        return 2 if self.engine.device.startswith("cuda") and self.ranks == 1 else 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype_of(self.engine.dtype)


class RankSpec(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of an instance that has several."""

    instance: InstanceSpec
    rank: int


SpecT = TypeVar("SpecT", InstanceSpec, RankSpec)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed(spec: InstanceSpec | RankSpec) -> int:
    """A descriptor of sealed memory that holds a spec; the caller closes it."""
    fd = os.memfd_create("process-spec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(msgspec.json.encode(spec))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def read_sealed(given: str, kind: type[SpecT]) -> SpecT:
    """The spec of this process."""
    fd = int(given) if given.isdecimal() else inherited_descriptor(given)
    # `pread`: all lives of a process share the descriptor, and so its position.
    return msgspec.json.decode(os.pread(fd, os.fstat(fd).st_size, 0), type=kind)
