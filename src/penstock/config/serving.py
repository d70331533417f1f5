"""What `[engine]` and `[serve]` say: how `penstock serve` computes, and whom it answers.

They mean nothing to a cache that another engine embeds, so a `Config` has them only if its file
does.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError

LOOPBACK = "127.0.0.1"


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
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 0
    """Of torch, in each rank; 0: the cores of the machine, divided by the ranks."""
    step_tokens: int = 512
    step_requests: int = 64
    waiting_max: int = 1024

    def __post_init__(self) -> None:
        if bool(self.prefill_tp) is not bool(self.decode_tp):
            raise ConfigError(
                "engine.prefill_tp",
                f"is {self.prefill_tp} with engine.decode_tp {self.decode_tp}, must both be 0 or "
                "both be given: prompts that one instance computes, another one answers",
            )
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
    api_key: str = ""
    instances: int = 1
    body_bytes_max: int = 1 << 20
    requests_max: int = 512
