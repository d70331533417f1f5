"""Models with random weights, and engines on them, for `lab bench engine`.

The one rule: engines of one benchmark share a model, and each has its own blocks and cache, so that
they differ only in what is compared.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

import penstock
from penstock_serve.engine.architecture import Architecture, share_of
from penstock_serve.engine.checkpoints import RankWeights
from penstock_serve.engine.engine import Engine, LocalWorkers
from penstock_serve.engine.model import Alone, Decoder
from penstock_serve.engine.scheduler import Scheduler, SchedulerSettings
from penstock_serve.engine.worker import (
    Worker,
    allocate_kv,
    attention_on,
    device_of,
    kv_tier,
    lane_on,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EIGHT_B = Architecture(
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128_256,
    norm_epsilon=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    positions=40_960,
    qk_norm=False,
    qkv_bias=False,
    tied=False,
    stop_tokens=(),
)
"""The sizes of Llama-3.1-8B: 128 KiB of KV a token in bfloat16."""


class RandomCheckpoint:
    """Random weights by the names of a checkpoint.

    They are large enough that an answer depends on the whole context.
    """

    def __init__(self, architecture: Architecture, *, device: torch.device, seed: int = 7) -> None:
        self._shapes = dict(architecture.tensor_shapes())
        self._draw = torch.Generator(device=device).manual_seed(seed)
        self._device = device

    def __contains__(self, name: str) -> bool:
        return True

    def rows(self, name: str, held: range | None = None) -> torch.Tensor:
        """A tensor, or a range of its rows."""
        shape = self._shapes[name]
        rows = shape[0] if held is None else len(held)
        drawn = torch.randn((rows, *shape[1:]), generator=self._draw, device=self._device)
        if len(shape) == 1:
            return drawn * 0.1 + (1.0 if "norm" in name else 0.0)
        # Scaled so that a product with a matrix keeps the size of its input.
        spread = 1.0 if "embed" in name else 1.2 / shape[1] ** 0.5
        return drawn * spread

    def columns(self, name: str, held: range) -> torch.Tensor:
        """A range of a matrix's columns."""
        return self.rows(name)[:, held.start : held.stop]

    def close(self) -> None:
        pass


class Model:
    """A model with random weights, whole, on one device.

    Generators of devices differ: equal models need the same `drawn_on`.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        device: str,
        dtype: torch.dtype,
        drawn_on: str | None = None,
    ) -> None:
        self.architecture = architecture
        self.device = device_of(device, 0)
        self.dtype = dtype
        self.share = share_of(architecture, rank=0, ranks=1)
        weights = RankWeights(
            RandomCheckpoint(architecture, device=torch.device(drawn_on or self.device)),
            self.share,
            head_dim=architecture.head_dim,
            dtype=dtype,
            device=self.device,
        )
        self.decoder = Decoder(
            architecture, weights, Alone(self.share), attention=attention_on(self.device)
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token."""
        of = self.architecture
        return of.layers * 2 * of.kv_heads * of.head_dim * int(self.dtype.itemsize)

    @contextmanager
    def engine(
        self,
        *,
        block_tokens: int,
        blocks: int,
        host_blocks: int,
        settings: SchedulerSettings,
        graphs: bool = True,
        load_gate: str = "measured",
        layer_wise: str = "off",
        disk: Path | None = None,
        below: str = "",
    ) -> Iterator[Engine]:
        """An engine on this model; with `host_blocks`, it has a host tier, and `disk` below it.

        Or another tier, whose keys `below` has.
        """
        kv = allocate_kv(
            self.architecture,
            self.share,
            block_count=blocks,
            block_tokens=block_tokens,
            dtype=self.dtype,
            device=self.device,
        )
        host = f'{{ name = "host", kind = "host", blocks = {host_blocks}, required = true }}'
        keys = 'kind = "disk", gib = 32, write = "write_through"'
        if disk is not None:
            below = f'name = "disk", path = "{disk}", {keys}'
        config = penstock.parse_config(
            f"""
            version = 1
            model.name = "random"
            model.weights_version = "1"
            cache.block_tokens = {block_tokens}
            cache.blocks = {blocks}
            cache.load_gate = "{load_gate}"
            cache.layer_wise = "{layer_wise}"
            tiers = [{host if host_blocks else ""}{f", {{ {below} }}" if below else ""}]
            """
        )
        tier = kv_tier(self.architecture, self.share, kv, block_tokens=block_tokens)
        lane = lane_on(self.device, graphs=graphs)
        worker = Worker(self.decoder, kv, block_tokens=block_tokens, lane=lane)
        with penstock.open(config, kv=tier) as cache:
            worker.steps = cache.steps
            scheduler = Scheduler(cache, settings, block_tokens=block_tokens, block_count=blocks)
            yield Engine(scheduler, LocalWorkers(worker))
