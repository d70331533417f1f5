"""What a process of an instance must know to begin: one value, which travels as JSON."""

from __future__ import annotations

import enum

import msgspec
import torch

from penstock.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Role(enum.Enum):
    """What an instance does."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance: a scheduler and its ranks."""

    name: str
    model: str | None
    """A folder or a file; without it the default model."""
    config: str
    """The cache's configuration, as TOML."""
    server: str
    """The address at which the server lets instances in."""
    ranks: int = 1
    scheduler: str = ""
    """The address at which the instance lets its ranks in, if it has several."""
    role: Role = Role.BOTH
    dtype: str = "float32"
    device: str = "cpu"
    step_tokens: int = 512
    step_requests: int = 64
    waiting_max: int = 1024
    threads: int = 0
    """Threads of torch in each rank; 0 leaves it to torch."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", f"is {self.dtype!r}, must be one of {', '.join(DTYPES)}")
        if self.ranks < 1:
            raise ConfigError("tp", f"is {self.ranks}, must be at least 1")
        if self.role is not Role.BOTH:
            raise ConfigError(
                "role",
                f"is {self.role.value!r}, must be {Role.BOTH.value!r}: an instance computes "
                "prompts and answers alike",
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch calls it."""
        return DTYPES[self.dtype]


class RankSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of an instance that has several."""

    instance: InstanceSpec
    rank: int
